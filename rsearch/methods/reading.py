"""Methods that ask once: without passages, or with those of one search.

Sources: the naive baselines of FlashRAG (Jin et al., arXiv 2405.13576); chain of
thought, Wei et al., arXiv 2201.11903.
"""

import re
from collections.abc import Sequence

from rsearch.llm.requests import Search
from rsearch.methods.base import Kit, ask_chat
from rsearch.protocols import plain
from rsearch.types import Messages, Passage, Question

MARK = "So the answer is:"
MARK_PATTERN = re.compile(r"so the (?:final )?answer is:?", re.IGNORECASE)
THINK = (
    "Answer the question. Think step by step, and end with one line that says "
    f"'{MARK}' and the answer alone."
)
THINK_WITH_PASSAGES = "The following are given documents.\n\n{passages}\n\n" + THINK


def direct(question: Question, kit: Kit):
    """Ask the question without passages."""
    return (yield from ask_chat(direct_messages(kit, question.text), kit.answer_tokens))


def rag(question: Question, kit: Kit, *, top_k: int = 0):
    """Show the passages of one search with the question.

    Args:
        top_k: number of passages to show; 0 shows all that the search returns.
    """
    (passages,) = yield Search((question.text,), top_k or None)
    messages = rag_messages(kit, question.text, passages)
    return (yield from ask_chat(messages, kit.answer_tokens))


def cot(question: Question, kit: Kit):
    """Let the model reason before it answers."""
    messages = thinking_messages(kit, question.text, ())
    return marked_answer((yield from ask_chat(messages, kit.thought_tokens)))


def rag_cot(question: Question, kit: Kit, *, top_k: int = 0):
    """Show the passages of one search, and let the model reason; see `rag`."""
    (passages,) = yield Search((question.text,), top_k or None)
    messages = thinking_messages(kit, question.text, passages)
    return marked_answer((yield from ask_chat(messages, kit.thought_tokens)))


def direct_messages(kit: Kit, question: str) -> Messages:
    """Return the chat that asks a question without passages.

    Args:
        kit: kit of the evaluation; its `direct` replaces the messages.
    """
    wording = plain.reword(plain.DIRECT, user=kit.direct)
    return plain.messages_with_passages(wording, question, "")


def rag_messages(kit: Kit, question: str, passages: Sequence[Passage]) -> Messages:
    """Return the chat that asks a question below passages.

    Args:
        kit: kit of the evaluation; its `rag` replaces the messages, and its `shorten`
            cuts the passages.
    """
    return text_messages(kit, question, shown_passages(kit, passages))


def shown_passages(kit: Kit, passages: Sequence[Passage], *, first: int = 1) -> str:
    """Return the text of passages, cut to what a model is shown."""
    return kit.shorten(plain.write_passages(passages, first=first))


def text_messages(kit: Kit, question: str, text: str) -> Messages:
    """Return the chat that asks a question below a text in place of passages.

    Args:
        kit: kit of the evaluation; its `rag` replaces the messages.
    """
    wording = plain.reword(plain.RAG, user=kit.rag)
    return plain.messages_with_passages(wording, question, text)


def thinking_messages(kit: Kit, question: str, passages: Sequence[Passage]) -> Messages:
    """Return the chat that asks for thoughts and a marked answer.

    Args:
        passages: passages, best first; () asks the question without any.
    """
    passages_text = shown_passages(kit, passages)
    system = THINK_WITH_PASSAGES if passages else THINK
    wording = plain.reword(plain.DIRECT, system=system)
    return plain.messages_with_passages(wording, question, passages_text)


def marked_answer(reply: str | None) -> str | None:
    """Return the first line of text after the last mark; None without a mark.

    White space and a final full stop are removed from it.
    """
    marks = list(MARK_PATTERN.finditer(reply or ""))
    if not marks:
        return None
    line = reply[marks[-1].end() :].strip().partition("\n")[0]
    return line.strip().removesuffix(".").strip()

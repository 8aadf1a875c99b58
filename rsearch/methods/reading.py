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
MARKED = re.compile(r"so the (?:final )?answer is:?", re.IGNORECASE)
THINK = (
    "Answer the question. Think step by step, and end with one line that says "
    f"'{MARK}' and the answer alone."
)
THINK_WITH_PASSAGES = "The following are given documents.\n\n{passages}\n\n" + THINK


def direct(question: Question, kit: Kit):
    """Ask the question alone."""
    return (yield from ask_chat(direct_messages(kit, question.text), kit.answer_tokens))


def rag(question: Question, kit: Kit, *, top_k: int = 0):
    """Show the passages of one search with the question.

    Args:
        question: that is answered.
        kit: of the evaluation.
        top_k: passages that are shown; 0 is all that the search returns.
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
    """Return the chat that asks a question alone.

    Args:
        kit: of the evaluation; its `direct` replaces the words.
        question: that is asked.
    """
    wording = plain.reworded(plain.DIRECT, user=kit.direct)
    return plain.messages_with_passages(wording, question, "")


def rag_messages(kit: Kit, question: str, passages: Sequence[Passage]) -> Messages:
    """Return the chat that asks a question under passages.

    Args:
        kit: of the evaluation; its `rag` replaces the words, its `shorten` cuts the
            passages.
        question: that is asked.
        passages: best first.
    """
    return text_messages(kit, question, shown_passages(kit, passages))


def shown_passages(kit: Kit, passages: Sequence[Passage], *, first: int = 1) -> str:
    """Return as much of the text of passages as a model is shown.

    Args:
        kit: of the evaluation.
        passages: best first.
        first: the number of the first.
    """
    return kit.shorten(plain.write_passages(passages, first=first))


def text_messages(kit: Kit, question: str, shown: str) -> Messages:
    """Return the chat that asks a question under a text in place of passages.

    Args:
        kit: of the evaluation; its `rag` replaces the words.
        question: that is asked.
        shown: the text.
    """
    wording = plain.reworded(plain.RAG, user=kit.rag)
    return plain.messages_with_passages(wording, question, shown)


def thinking_messages(kit: Kit, question: str, passages: Sequence[Passage]) -> Messages:
    """Return the chat that asks for thoughts and a marked answer.

    Args:
        kit: of the evaluation.
        question: that is asked.
        passages: best first; without any the question is asked alone.
    """
    shown = shown_passages(kit, passages)
    system = THINK_WITH_PASSAGES if passages else THINK
    wording = plain.reworded(plain.DIRECT, system=system)
    return plain.messages_with_passages(wording, question, shown)


def marked_answer(reply: str | None) -> str | None:
    """Return what stands behind the last mark, on its line; None without a mark.

    Space and a full stop around the answer are no part of it.
    """
    marks = list(MARKED.finditer(reply or ""))
    if not marks:
        return None
    line = reply[marks[-1].end() :].strip().partition("\n")[0]
    return line.strip().removesuffix(".").strip()

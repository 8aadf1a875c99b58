"""Conversations without tags: the baselines that answer immediately.

The whole reply is the answer, and the end of text ends it. `direct` shows only the
question, `rag` the passages of one search above the question. The wording is that of
FlashRAG's naive baselines (Jin et al., arXiv 2405.13576).
"""

import dataclasses
from collections.abc import Sequence

from rsearch.protocols.base import Protocol, fill_fields
from rsearch.types import Action, Answer, Messages, Observation, Passage, ToolCall


def parse(turn: str) -> Action:
    """Read the stripped reply as the answer; an empty one is wrong."""
    return Answer(turn.strip())


def _show_passages(queries: Sequence[str], passages: Sequence[Sequence[Passage]]):
    """Return an empty observation: nothing is searched after the prompt."""
    return Observation("", "", "")


def _render(action: ToolCall | Answer) -> str:
    """Return the answer itself.

    Raises:
        ValueError: a search, which could not be recognised, or space around the answer.
    """
    if isinstance(action, ToolCall) or parse(action.text) != action:
        raise ValueError(f"{action} cannot be written without tags")
    return action.text


DIRECT = Protocol(
    name="direct",
    system="Answer the question based on your own knowledge. Only give me the answer "
    "and do not output any other words.",
    user="Question: {question}",
    add_question_mark=False,
    stop_strings=(),
    parse=parse,
    show_passages=_show_passages,
    render=_render,
    write=lambda step: _render(step.action),
)

RAG = dataclasses.replace(
    DIRECT,
    name="rag",
    system="Answer the question based on the given document. Only give me the answer "
    "and do not output any other words.\nThe following are given documents.\n\n"
    "{passages}",
)

# Raw text in place of a chat, continued by the reply.
RAW = dataclasses.replace(
    DIRECT, name="raw", system=None, user="{question}", is_chat=False
)


def evidence_messages(question: str, evidence: str) -> Messages:
    """Return the chat that asks for an answer from evidence, as in R-Search's Table 5.

    The texts are concatenated, since either may hold braces.
    """
    return [
        {
            "role": "user",
            "content": "Answer the question based on the given passages. Only give me "
            "the answer and do not output any other words.\n\nThe following are given "
            f"passages:\n{evidence}\n\nQuestion: {question}\nAnswer:",
        }
    ]


def write_passages(passages: Sequence[Passage], *, first: int = 1) -> str:
    """Return the passages as `rag` shows them, best first, numbered from `first`."""
    numbered_passages = enumerate(passages, first)
    lines = [f"Doc {i}(Title: {p.title}) {p.text}" for i, p in numbered_passages]
    return "\n".join(lines)


def messages_with_passages(
    protocol: Protocol, question: str, passages: str
) -> Messages:
    """Return the chat of `protocol` with `{question}` and `{passages}` filled in."""
    values = {"question": question, "passages": passages}
    texts = {"system": protocol.system, "user": protocol.user}
    return [
        {"role": role, "content": fill_fields(text, **values)}
        for role, text in texts.items()
        if text is not None
    ]


def reword(
    protocol: Protocol,
    *,
    user: str | None = None,
    system: str | None = None,
    invalid_message: str | None = None,
) -> Protocol:
    """Return the protocol reworded; a new user message drops the system message.

    Args:
        protocol: any protocol.
        user: replaces the user message; None keeps both messages.
        system: replaces the system message; None keeps it, or drops it if `user` is
            given.
        invalid_message: replaces the message after a malformed turn; None keeps it.
    """
    if user is not None:
        protocol = dataclasses.replace(protocol, user=user, system=system)
    elif system is not None:
        protocol = dataclasses.replace(protocol, system=system)
    if invalid_message is not None:
        protocol = dataclasses.replace(protocol, invalid_message=invalid_message)
    return protocol

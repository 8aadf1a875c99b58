"""Demonstrations: the turns that a policy should write, for supervised learning.

A demonstration holds only the policy's own words. The engine's results are looked up
when it is replayed, by the same code that serves a rollout, so that both look alike.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

import xxhash

from rsearch.data.records import (
    BadRecords,
    check_id,
    check_text,
    decode_record,
    quote,
    report_skipped,
)
from rsearch.data.sources import read_records
from rsearch.runtime.console import note
from rsearch.types import Question

PROTOCOL, DIRECT, RAG, RAW = "protocol", "direct", "rag", "raw"
CHAT = "chat"
FLAGS = ("is_segment", "is_raw", "is_rag")  # of a record; at most one is true


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One conversation to imitate.

    Attributes:
        question: question that opens the conversation.
        turns: texts of the policy's turns, each up to its action.
        method: how the conversation is opened: by the "protocol", as one of the
            baselines "direct" and "rag", with its messages as "raw" text without a
            template, or as an ordinary "chat". In the last two the reply is one turn.
        context_turns: number of leading turns that are given and not learnt.
        observations: texts shown after each turn but the last, in place of the engine's
            results; None queries the engine.
        messages: chat that opens the conversation, in place of the method's; None keeps
            the method's.
        is_segment: whether this is cut from a longer conversation, so that its last
            turn may search.
        location: file and line that it was read from; "" if it was made here.
    """

    question: Question
    turns: tuple[str, ...]
    method: str = PROTOCOL
    context_turns: int = 0
    observations: tuple[str, ...] | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    is_segment: bool = False
    location: str = dataclasses.field(default="", compare=False)


def load_demonstrations(
    path: str | os.PathLike, *, on_bad: str = "raise"
) -> list[Demonstration]:
    """Load the demonstrations of a JSONL file.

    A record holds "question" and "turns" (texts), and may hold "id", "context_turns",
    "observations" (texts, one for each turn but the last), "messages"
    ([{"role", "content"}, ...]), "is_segment", "is_raw" and "is_rag" (its method
    is "raw" or "rag"); see `Demonstration`. A null field counts as missing.

    Args:
        on_bad: "raise" makes a bad record an error; "skip" leaves it out, and prints
            the first bad records and their number.

    Raises:
        ValueError: a bad record, as file:line: field; no record at all.
    """
    return _load(path, on_bad, _demonstration)


def load_chats(
    path: str | os.PathLike, *, on_bad: str = "raise"
) -> list[Demonstration]:
    """Load general chats, each as the demonstration of its last reply.

    A record holds "messages" ([{"role", "content"}, ...]), the last of which is the
    assistant's, and may hold "id". Bad ones are treated as in `load_demonstrations`.
    """
    return _load(path, on_bad, _chat_demonstration)


def draw_chats(
    chats: Sequence[Demonstration], count: int, *, seed: int
) -> list[Demonstration]:
    """Return `count` chats in a random order, repeating all if there are too few."""

    def rank(chat):
        text = f"{seed} {chat.question.id}".encode("utf-8", "replace")
        return xxhash.xxh3_64_intdigest(text)

    return list(itertools.islice(itertools.cycle(sorted(chats, key=rank)), count))


def _load(path, on_bad, read):
    """Return `read(record, location)` of each record in a file."""
    bad_records = BadRecords(on_bad)
    demonstrations = []
    for location, raw in read_records(path):
        try:
            demonstrations.append(read(decode_record(raw), str(location)))
        except ValueError as error:
            bad_records.add(location, error)
    if not demonstrations and bad_records.num:
        first = bad_records.problems[0]
        raise ValueError(
            f"{path}: all {bad_records.num} records are bad; first {first}"
        )
    report_skipped(path, bad_records.problems, note, count=bad_records.num)
    if not demonstrations:
        raise ValueError(f"{path}: holds no demonstration")
    return demonstrations


def _chat_demonstration(record, location):
    """Return the Demonstration that a chat's record holds."""
    *opening, last = _chat(record.get("messages"))
    if last["role"] != "assistant" or not opening:
        raise ValueError(
            "field messages: expected a chat that ends with a reply of the assistant, "
            f"got {len(opening) + 1} messages, the last with role {last['role']!r}"
        )
    name = record.get("id")
    question = Question(
        location if name is None else check_id(name, "id"), opening[-1]["content"], ()
    )
    return Demonstration(
        question,
        (last["content"],),
        method=CHAT,
        messages=tuple(opening),
        location=location,
    )


def _demonstration(record, location):
    """Return the Demonstration of one record; its location replaces a missing id."""
    record = {name: value for name, value in record.items() if value is not None}
    text = check_text(record.get("question"), "question")
    turns = _texts(record.get("turns"), "turns")
    if not turns:
        raise ValueError(f"field turns: expected a list of texts, got {quote(turns)}")
    name = check_id(record.get("id", location), "id")
    num_context_turns = record.get("context_turns", 0)
    if type(num_context_turns) is not int or not 0 <= num_context_turns < len(turns):
        raise ValueError(
            f"field context_turns: expected a number >= 0 and less than {len(turns)}, "
            f"the number of turns, got {quote(num_context_turns)}"
        )
    observations = record.get("observations")
    if observations is not None:
        observations = _texts(observations, "observations", may_be_empty=True)
        if len(observations) != len(turns) - 1:
            raise ValueError(
                f"field observations: {len(observations)} of them for {len(turns)} "
                "turns; expected one for each turn but the last"
            )
    messages = record.get("messages")
    if messages is not None:
        messages = _chat(messages)
    flags = [record.get(field, False) for field in FLAGS]
    for field, flag in zip(FLAGS, flags, strict=True):
        if not isinstance(flag, bool):
            raise ValueError(
                f"field {field}: expected true or false, got {quote(flag)}"
            )
    is_segment, is_raw, is_rag = flags
    true_fields = [field for field, flag in zip(FLAGS, flags) if flag]
    if len(true_fields) > 1:
        other, field = true_fields[:2]
        raise ValueError(f"field {field}: true: expected {other} to be false")
    if is_raw and (messages is None or len(turns) > 1):
        raise ValueError("field is_raw: true: expected messages and a single turn")
    if is_rag and (messages is not None or len(turns) > 1):
        raise ValueError("field is_rag: true: expected a single turn and no messages")
    question = Question(name, text, ())
    return Demonstration(
        question,
        turns,
        method=RAW if is_raw else RAG if is_rag else PROTOCOL,
        context_turns=num_context_turns,
        observations=observations,
        messages=messages,
        is_segment=is_segment,
        location=location,
    )


def _texts(value, field, *, may_be_empty=False):
    """Return a list of texts as a tuple; with `may_be_empty` a text may be blank."""
    if not isinstance(value, list):
        raise ValueError(f"field {field}: expected a list of texts, got {quote(value)}")
    for i, text in enumerate(value):
        if not (may_be_empty and isinstance(text, str) and not text.strip()):
            check_text(text, f"{field}[{i}]")
    return tuple(value)


def _chat(value):
    """Return the messages of a chat as a tuple of dicts."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"field messages: expected a list, got {quote(value)}")
    chat = []
    for i, message in enumerate(value):
        fields = message if isinstance(message, dict) else {}
        names = ("role", "content")
        chat.append({n: check_text(fields.get(n), f"messages[{i}].{n}") for n in names})
    return tuple(chat)

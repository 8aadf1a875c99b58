"""What a policy should have written, turn by turn: the data of supervised learning.

A demonstration holds only the policy's own words. What the engine answers is looked up
when it is replayed, by the same code that answers a rollout, so that both look alike.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from rsearch.data.records import (
    check_id,
    check_record,
    check_text,
    decode_record,
    shown,
)
from rsearch.data.sources import read_records
from rsearch.protocols.base import Protocol, Step
from rsearch.types import Question
from rsearch.world.plans import early_stop, guess, solution
from rsearch.world.world import World

PROTOCOL, DIRECT, RAG = "protocol", "direct", "rag"


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One conversation to imitate.

    Attributes:
        question: that opens it.
        turns: what is written, each turn up to its action.
        method: how it is opened: by the "protocol", or as one of the baselines.
        context_turns: how many of the first turns are given and not learnt.
        observations: what is shown after each turn but the last, in place of what the
            engine finds; None asks the engine.
        messages: the chat that opens it, in place of its method's; None keeps that.
        is_segment: whether it is cut from a longer one: its last turn may search.
    """

    question: Question
    turns: tuple[str, ...]
    method: str = PROTOCOL
    context_turns: int = 0
    observations: tuple[str, ...] | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    is_segment: bool = False


def load_demonstrations(path) -> list[Demonstration]:
    """Demonstrations of a JSONL file.

    A record holds "question" and "turns" (texts), and may hold "id", "context_turns",
    "observations" (texts, one for each turn but the last), "messages"
    ([{"role", "content"}, ...]) and "is_segment"; see `Demonstration`.

    Raises:
        ValueError: a bad record, as file:line: field; no record at all.
    """
    found = []
    for place, raw in read_records(path):
        try:
            record = decode_record(raw) if isinstance(raw, bytes) else raw
            found.append(_demonstration(check_record(record), str(place)))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    if not found:
        raise ValueError(f"{path}: holds no demonstration")
    return found


def _demonstration(record, place):
    """The Demonstration of one record; `place` stands in for an id."""
    text = check_text(record.get("question"), "question")
    turns = _texts(record.get("turns"), "turns")
    if not turns:
        raise ValueError(f"field turns: expected a list of texts, got {shown(turns)}")
    name = check_id(record.get("id", place), "id")
    context = record.get("context_turns", 0)
    if type(context) is not int or not 0 <= context < len(turns):
        raise ValueError(
            f"field context_turns: expected a number from 0, below the {len(turns)} "
            f"turns, got {shown(context)}"
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
    is_segment = record.get("is_segment", False)
    if not isinstance(is_segment, bool):
        raise ValueError(
            f"field is_segment: expected true or false, got {shown(is_segment)}"
        )
    question = Question(name, text, ())
    return Demonstration(
        question,
        turns,
        context_turns=context,
        observations=observations,
        messages=messages,
        is_segment=is_segment,
    )


def _texts(value, field, *, may_be_empty=False):
    """A list of texts as a tuple; with `may_be_empty` a text may be a blank one."""
    if not isinstance(value, list):
        raise ValueError(f"field {field}: expected a list of texts, got {shown(value)}")
    for i, text in enumerate(value):
        if not (may_be_empty and isinstance(text, str) and not text.strip()):
            check_text(text, f"{field}[{i}]")
    return tuple(value)


def _chat(value):
    """Messages of a chat as a tuple of dicts."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"field messages: expected a list, got {shown(value)}")
    chat = []
    for i, message in enumerate(value):
        parts = message if isinstance(message, dict) else {}
        names = ("role", "content")
        chat.append({n: check_text(parts.get(n), f"messages[{i}].{n}") for n in names})
    return tuple(chat)


def world_demonstrations(
    world: World,
    protocol: Protocol,
    *,
    seed,
    repeats,
    flawed_share,
    guess_share,
    baseline_share,
    recall_share=0.0,
) -> list[Demonstration]:
    """Imperfect demonstrations of the world's training questions.

    Args:
        world: has the questions and the facts behind them.
        protocol: that they are written in. Where it takes several queries in a turn,
            facts that do not depend on each other are asked for together.
        seed: of the flaws.
        repeats: demonstrations of each question, each with its own flaw or none.
        flawed_share: how many do not find the answer.
        guess_share: of the flawed, how many guess at once; the others stop before the
            last search, and take what they have found by then for the answer.
        baseline_share: how many beside these, relative to their number, answer as the
            baselines do, so that the model has seen how those are asked too.
        recall_share: of the flawless ones about the famous, how many recall what they
            know in place of searching for it.
    """
    entropy = np.random.SeedSequence([seed, 2])
    rng = np.random.Generator(np.random.PCG64(entropy))
    own = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 4])))
    found = []
    for question in world.train:
        for _ in range(repeats):
            flawed, guessed, baseline = rng.random(3)
            wrong = guess(world, question, rng)
            if flawed >= flawed_share:
                steps = solution(
                    world,
                    question,
                    recalls=own.random() < recall_share,
                    max_queries=protocol.max_queries,
                )
            elif guessed < guess_share:
                steps = wrong
            else:
                steps = early_stop(world, question, own)
            found.append(Demonstration(question, turns_of(protocol, steps)))
            if baseline < baseline_share:
                method = DIRECT if guessed < 0.5 else RAG
                answer = f" {question.golden_answers[0]}"
                found.append(Demonstration(question, (answer,), method))
    return found


def turns_of(protocol: Protocol, steps: list[Step]) -> tuple[str, ...]:
    """The steps in the protocol's words."""
    return tuple(protocol.write(step) for step in steps)

"""What a policy should have written, turn by turn: the data of supervised learning.

A demonstration holds only the policy's own words. What the engine answers is looked up
when it is replayed, by the same code that answers a rollout, so that both look alike.
"""

import dataclasses

import numpy as np

from rsearch.data.records import check_record, check_text, decode_record, shown
from rsearch.data.sources import read_records
from rsearch.data.world import RELATIONS, World
from rsearch.protocols.tagged import render
from rsearch.types import Answer, Question, Search

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
    """

    question: Question
    turns: tuple[str, ...]
    method: str = PROTOCOL
    context_turns: int = 0
    observations: tuple[str, ...] | None = None


def load_demonstrations(path) -> list[Demonstration]:
    """Demonstrations of a JSONL file: {"question": text, "turns": [text, ...]}.

    Raises:
        ValueError: a bad record, as file:line: field; no record at all.
    """
    found = []
    for place, raw in read_records(path):
        try:
            record = decode_record(raw) if isinstance(raw, bytes) else raw
            check_record(record)
            text = check_text(record.get("question"), "question")
            turns = record.get("turns")
            if not isinstance(turns, list) or not turns:
                raise ValueError(
                    f"field turns: expected a list of texts, got {shown(turns)}"
                )
            turns = tuple(check_text(t, f"turns[{i}]") for i, t in enumerate(turns))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        question = Question(str(place), text, ())
        found.append(Demonstration(question, turns))
    if not found:
        raise ValueError(f"{path}: holds no demonstration")
    return found


def world_demonstrations(
    world: World, *, seed, repeats, flawed_share, guess_share, baseline_share
) -> list[Demonstration]:
    """Imperfect demonstrations of the world's training questions.

    Args:
        world: has the questions and the facts behind them.
        seed: of the flaws.
        repeats: demonstrations of each question, each with its own flaw or none.
        flawed_share: how many do not find the answer.
        guess_share: of the flawed, how many guess at once; the others take the bridge
            for the answer and stop after one search.
        baseline_share: how many beside these, relative to their number, answer as the
            baselines do, so that the model has seen how those are asked too.
    """
    entropy = np.random.SeedSequence([seed, 2])
    rng = np.random.Generator(np.random.PCG64(entropy))
    found = []
    for question in world.train:
        for _ in range(repeats):
            flawed, guessed, baseline = rng.random(3)
            tail = world.hops[question.id][1]
            others = world.entities[RELATIONS[tail.relation].object]
            guess = others[rng.integers(len(others))]
            if flawed >= flawed_share:
                turns = _both_hops(world, question)
            elif guessed < guess_share:
                turns = (_written("I guess.", Answer(guess)),)
            else:
                turns = _one_hop(world, question)
            found.append(Demonstration(question, turns))
            if baseline < baseline_share:
                method = DIRECT if guessed < 0.5 else RAG
                found.append(Demonstration(question, (f" {tail.object}",), method))
    return found


def world_words(world: World) -> list[str]:
    """Everything demonstrations say, for a tokenizer to learn from."""
    flawless = [turn for q in world.train for turn in _both_hops(world, q)]
    return [*flawless, _written("I guess.", Answer(""))]


def _both_hops(world, question):
    """The two searches that it takes, and the right answer."""
    head, tail = world.hops[question.id]
    return (
        _written(head.gap, Search((head.subject,))),
        _written(f"{head.fact} {tail.gap}", Search((tail.subject,))),
        _written(tail.fact, Answer(tail.object)),
    )


def _one_hop(world, question):
    """One search, and the bridge as the answer."""
    head, _ = world.hops[question.id]
    return (
        _written(head.gap, Search((head.subject,))),
        _written(head.fact, Answer(head.object)),
    )


def _written(thought, action):
    return f"<think> {thought}</think>{render(action)}"

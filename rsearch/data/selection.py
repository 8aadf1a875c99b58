"""Select the questions to learn from: by difficulty, in a mix, or at random."""

import re
from collections.abc import Sequence

import xxhash

from rsearch.types import Question

LEVELS = ("easy", "medium", "hard")
ENTRY = re.compile(r"(?:(\S+) )?(\w+) (?:(\d+):(\d*)|(\d+)|(\d*\.\d+))")


def difficulty(needed: int | None, *, easy_below: int, hard_above: int) -> str:
    """Return how hard a question is, by the rollouts until one was right.

    Source: R1-Searcher (arXiv 2503.05592) section 2.1: fewer than 10 are easy, more
    than 20 are hard.

    Args:
        needed: the number of the first right rollout, from 1; None where none was.
        easy_below: fewer are easy.
        hard_above: more are hard, and so is a question that was never answered right.
    """
    if needed is None or needed > hard_above:
        return "hard"
    return "easy" if needed < easy_below else "medium"


def drawn(items: Sequence[Question], *, seed: int, name: str = "") -> list[int]:
    """Return the indices of all questions in a random order.

    The order of two questions follows from the seed, their ids and the draw's name
    alone: it does not change when there are more questions or fewer.
    """

    def rank(i):
        text = f"{name}{seed} {items[i].id}".encode("utf-8", "replace")
        return xxhash.xxh3_64_intdigest(text), i

    return sorted(range(len(items)), key=rank)


def share(items: Sequence[Question], fraction: float, *, seed: int) -> list[int]:
    """Return the indices of a random fraction (0 to 1) of the questions, sorted."""
    return sorted(drawn(items, seed=seed)[: round(fraction * len(items))])


def first_drawn(items: Sequence[Question], count: int, *, seed: int) -> list[int]:
    """Return the indices of `count` random questions, sorted; 0 means all.

    It is a draw of its own: `share` and `mixed`, which take from the front of theirs,
    do not decide which of what they took is among these.
    """
    return sorted(drawn(items, seed=seed, name="first ")[: count or None])


def dataset_of(question: Question) -> str:
    """Return the data set that a question's metadata names, or ""."""
    names = [question.metadata.get(n) for n in ("data_source", "dataset")]
    return next((name for name in names if isinstance(name, str)), "")


def mixed(
    questions: Sequence[Question],
    levels: Sequence[str | None],
    mix: Sequence[str],
    *,
    seed: int,
) -> tuple[list[int], list[str]]:
    """Select the questions of a mix.

    Args:
        questions: to choose from.
        levels: how hard each is, one of LEVELS; None is never taken.
        mix: entries "[dataset] level amount": "medium 200" takes 200 at random,
            "hard 0.5" half of them, "hotpotqa medium 200:350" those of one data set
            that a draw of 350 has and one of 200 has not, "easy 0:" all.
        seed: of the draws, which are nested: 200 of them are among 350.

    Returns:
        Their indices, sorted, and a line for each entry with too few questions.
    """
    taken: set[int] = set()
    short = []
    for entry in mix:
        dataset, level, low, high, count, fraction = ENTRY.fullmatch(entry).groups()
        cell = [
            i
            for i, question in enumerate(questions)
            if levels[i] == level and dataset in (None, dataset_of(question))
        ]
        order = [cell[i] for i in drawn([questions[i] for i in cell], seed=seed)]
        stop = int(count or high or len(cell))
        if fraction is not None:
            stop = round(float(fraction) * len(cell))
        if stop > len(cell) or 0 < int(low or 0) >= len(cell):
            short.append(f"{entry!r}: there are {len(cell)} such questions")
        taken.update(order[int(low or 0) : stop])
    return sorted(taken), short

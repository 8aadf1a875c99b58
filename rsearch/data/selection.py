"""Select the questions to learn from: by difficulty, in a mix, or at random."""

import re
from collections.abc import Sequence

import xxhash

from rsearch.types import Question

LEVELS = ("easy", "medium", "hard")
ENTRY = re.compile(r"(?:(\S+) )?(\w+) (?:(\d+):(\d*)|(\d+)|(\d*\.\d+))")


def difficulty(needed: int | None, *, easy_below: int, hard_above: int) -> str:
    """Return how hard a question is, given the rollouts needed to answer it right.

    Source: R1-Searcher (arXiv 2503.05592) section 2.1: fewer than 10 rollouts are easy,
    more than 20 are hard.

    Args:
        needed: number of the first right rollout, from 1; None if none was right.
        easy_below: fewer rollouts than this make a question easy.
        hard_above: more rollouts than this, or no right one, make a question hard.
    """
    if needed is None or needed > hard_above:
        return "hard"
    return "easy" if needed < easy_below else "medium"


def shuffled_indices(
    items: Sequence[Question], *, seed: int, name: str = ""
) -> list[int]:
    """Return the indices of all questions in a random order.

    The order of two questions depends only on the seed, their ids and the draw's name,
    so it does not change when other questions are added or removed.
    """

    def rank(i):
        text = f"{name}{seed} {items[i].id}".encode("utf-8", "replace")
        return xxhash.xxh3_64_intdigest(text), i

    return sorted(range(len(items)), key=rank)


def share(items: Sequence[Question], fraction: float, *, seed: int) -> list[int]:
    """Return the indices of a random fraction (0 to 1) of the questions, sorted."""
    return sorted(shuffled_indices(items, seed=seed)[: round(fraction * len(items))])


def first_drawn(items: Sequence[Question], count: int, *, seed: int) -> list[int]:
    """Return the indices of `count` random questions, sorted; 0 means all.

    The draw is independent of those of `share` and `select_mix`, which take from the
    front of their own order.
    """
    return sorted(shuffled_indices(items, seed=seed, name="first ")[: count or None])


def dataset_of(question: Question) -> str:
    """Return the dataset that a question's metadata names, or ""."""
    names = [question.metadata.get(n) for n in ("data_source", "dataset")]
    return next((name for name in names if isinstance(name, str)), "")


def check_datasets(questions: Sequence[Question], mix: Sequence[str]) -> None:
    """Refuse an entry of a mix whose dataset no question names.

    Args:
        mix: see `select_mix`.

    Raises:
        ValueError: shows the entry and the datasets that questions name.
    """
    names = sorted({dataset_of(question) for question in questions} - {""})
    for entry in mix:
        dataset, *_ = ENTRY.fullmatch(entry).groups()
        if dataset not in (None, *names):
            raise ValueError(
                f"config.curate.mix: {entry!r}: no question is of this dataset; the "
                f"field data_source of the questions names {', '.join(names) or 'none'}"
            )


def select_mix(
    questions: Sequence[Question],
    levels: Sequence[str | None],
    mix: Sequence[str],
    *,
    seed: int,
) -> tuple[list[int], list[str]]:
    """Select the questions of a mix.

    Args:
        levels: how hard each question is, one of LEVELS; None is never taken.
        mix: entries "[dataset] level amount": "medium 200" takes 200 at random,
            "hard 0.5" takes half, "hotpotqa medium 200:350" takes from one dataset
            those in a draw of 350 that are not in a draw of 200, "easy 0:" takes all.
        seed: seed of the draws, which are nested: a draw of 350 contains that of 200.

    Returns:
        Sorted indices of the questions, and a line for each entry whose numbers reach
        beyond the questions there are, or are in the wrong order.
    """
    indices: set[int] = set()
    shortages = []
    for entry in mix:
        dataset, level, low, high, count, fraction = ENTRY.fullmatch(entry).groups()
        cell = [
            i
            for i, question in enumerate(questions)
            if levels[i] == level and dataset in (None, dataset_of(question))
        ]
        order = [
            cell[i] for i in shuffled_indices([questions[i] for i in cell], seed=seed)
        ]
        start, stop = int(low or 0), int(count or high or len(cell))
        if fraction is not None:
            stop = round(float(fraction) * len(cell))
        taken = order[start:stop]
        if stop > len(cell) or start >= max(stop, 1):
            shortages.append(f"{entry!r}: takes {len(taken)} of {len(cell)} questions")
        indices.update(taken)
    return sorted(indices), shortages

"""Read the questions that a configuration names, and drop what cannot be asked."""

import functools
import os
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from rsearch.config.stage_plan import QUESTIONS, kinds, stage_file
from rsearch.data.chains import decomposition, gold_passages
from rsearch.data.questions import load_questions
from rsearch.data.records import MAX_NAMED, say_left_out
from rsearch.text.normalize import normalize_squad
from rsearch.types import Question
from rsearch.world.world import WORLD, World


def read_questions(
    c: ConfigDict,
    split: str,
    world: World | None,
    say: Callable[[str], None],
    home: str | os.PathLike | None = None,
) -> tuple[Question, ...]:
    """Read the questions of "train" or "dev"; tell `say` of records left out.

    A source "stage:<name>" means the questions that this stage of the run at `home`
    has written.

    Raises:
        ValueError: a file that cannot be used, or a split the world does not have.
    """
    source, limit = c.data[split], c.data[f"max_{split}"]
    source = stage_file(source, QUESTIONS, home)
    if source.startswith(f"{WORLD}:"):
        world_split = source.removeprefix(f"{WORLD}:")
        splits = {"train": world.train, "dev": world.dev}
        if split == "dev":
            for question in world.dev:  # and its dev questions of each kind
                kind = question.metadata["kind"]
                splits[kind] = (*splits.get(kind, ()), question)
        if world_split not in splits:
            names = ", ".join(f"{WORLD}:{name}" for name in splits)
            raise ValueError(f"config.data.{split} = {source!r}: the world has {names}")
        return splits[world_split][: limit or None]
    names = ("question", "answers", "id")
    fields = {n: c.data[f"fields_{n}"] for n in names if c.data[f"fields_{n}"]}
    check = _check_for_chains(c, world) if split == "train" else None
    questions, problems = load_questions(
        source, fields=fields, limit=limit, on_bad=c.data.on_bad, check=check
    )
    say_left_out(split, problems, say)
    return tuple(questions)


def _check_for_chains(c, world):
    """Return a check that a question has what its chain is made from; or None."""
    method = c.curate.method if "curate" in kinds(c) else None
    if method == "no_reasoning":
        read_metadata = decomposition
    elif method == "chains" and c.curate.observations == "gold":
        read_metadata = functools.partial(gold_passages, known={})
    else:
        return None

    def check(question):
        if world is None or question.id not in world.hops:  # which has them all
            read_metadata(question, ())

    return check


def decontaminate(
    train: Sequence[Question],
    dev: Sequence[Question],
    say: Callable[[str], None],
    *,
    drops: bool,
) -> tuple[Question, ...]:
    """Drop the training questions that are held out too, and tell `say` of them.

    Questions are the same whose words are, whatever their case and punctuation.

    Args:
        train, dev: questions.
        say: called with a line where there are any.
        drops: whether to leave these out; else they are only counted.
    """
    held_out = {normalize_squad(question.text) for question in dev}
    both = [q for q in train if normalize_squad(q.text) in held_out]
    if not both:
        return tuple(train)
    advice = "config.data.decontaminate = True leaves them out"
    say(
        f"{len(both):,} of {len(train):,} training questions are held out, too, such "
        f"as {both[0].id}; {'left out of train' if drops else advice}"
    )
    dropped = {q.id for q in both} if drops else set()
    return tuple(q for q in train if q.id not in dropped)


def drop_long_prompts(
    questions: Sequence[Question],
    split: str,
    *,
    count_tokens: Callable[[str], int],
    max_tokens: int,
    say: Callable[[str], None],
    limit: int = 0,
) -> tuple[tuple[Question, ...], int]:
    """Return the questions whose prompts are within their budget.

    Args:
        questions: of "train" or "dev", the `split`.
        count_tokens: a question's text -> the tokens of its prompt.
        max_tokens: the budget of a prompt.
        say: called with a line on the first questions left out, and on their number.
        limit: how many are wanted; 0 is all that fit.

    Returns:
        The questions, and how many before the last of them were left out.
    """
    short: list[Question] = []
    num_long = 0
    for question in questions:
        if limit and len(short) == limit:
            break
        count = count_tokens(question.text)
        if count <= max_tokens:
            short.append(question)
            continue
        num_long += 1
        if num_long <= MAX_NAMED:
            say(
                f"left out of {split}: {question.id}, "
                f"prompt {count} > {max_tokens} tokens"
            )
    if num_long > MAX_NAMED:
        say(f"left out of {split}: {num_long:,} questions with long prompts in all")
    return tuple(short), num_long

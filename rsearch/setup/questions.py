"""Read the questions that a configuration names, and drop those too long to ask."""

import functools
import os
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from rsearch.config.stage_plan import (
    PARAGRAPHS,
    QUESTIONS,
    STAGE_PREFIX,
    kinds,
    stage_file,
)
from rsearch.data.chains import decomposition, gold_passages
from rsearch.data.paragraphs import question_paragraphs
from rsearch.data.questions import load_questions
from rsearch.data.records import MAX_NAMED, report_skipped
from rsearch.data.selection import shuffled_indices
from rsearch.methods.names import split_name
from rsearch.text.normalize import normalize_squad
from rsearch.types import ParagraphsOf, Question
from rsearch.world.world import WORLD, World, make_paragraphs


def read_questions(
    c: ConfigDict,
    split: str,
    world: World | None,
    log: Callable[[str], None],
    home: str | os.PathLike | None = None,
) -> tuple[Question, ...]:
    """Read the questions of "train" or "dev"; report records left out to `log`.

    A source "stage:<name>" means the questions that this stage of the run at `home` has
    written.

    Raises:
        ValueError: a file cannot be used, or the world has no such split.
    """
    source, limit = c.data[split], c.data[f"max_{split}"]
    if not source:
        raise ValueError(
            f"config.data.{split} is empty: name a file, a data set on the hub, "
            f"set:NAME or {WORLD}:{split}"
        )
    source = stage_file(source, QUESTIONS, home)
    if _is_of_world(source):
        world_split = source.removeprefix(f"{WORLD}:")
        splits = {"train": world.train, "dev": world.dev}
        if split == "dev":
            for question in world.dev:  # each kind of dev question is a split too
                kind = question.metadata["kind"]
                splits[kind] = (*splits.get(kind, ()), question)
        if world_split not in splits:
            names = ", ".join(f"{WORLD}:{name}" for name in splits)
            raise ValueError(f"config.data.{split} = {source!r}: the world has {names}")
        return splits[world_split][: limit or None]
    # A stage has written its questions in a format of this program, whatever the fields
    # of the file that it chose them from.
    is_from_stage = c.data[split].startswith(STAGE_PREFIX)
    names = () if is_from_stage else ("question", "answers", "id")
    fields = {n: c.data[f"fields_{n}"] for n in names if c.data[f"fields_{n}"]}
    if split == "train":
        check = _check_for_chains(c, world)
    else:
        check = _check_for_paragraphs(c)
    questions, problems = load_questions(
        source, fields=fields, limit=limit, on_bad=c.data.on_bad, check=check
    )
    report_skipped(split, problems, log)
    return tuple(questions)


def _check_for_chains(c, world):
    """Return a check that a question has the data that its chain needs, or None."""
    method = c.curate.method if "curate" in kinds(c) else None
    if method == "no_reasoning":
        read_metadata = decomposition
    elif method == "chains" and c.curate.observations == "gold":
        read_metadata = functools.partial(gold_passages, known={})
    else:
        return None

    def check(question):
        if world is None or question.id not in world.hops:  # the world has all data
            read_metadata(question, ())

    return check


def _check_for_paragraphs(c):
    """Return a check that a question has the paragraphs to search or show, or None."""
    methods = map(split_name, c.eval.methods)
    settings_list = [settings for name, settings in methods if name == "in_context"]
    if not settings_list and c.retrieval.corpus != PARAGRAPHS:
        return None
    needs_gold = any("only_gold=true" in settings for settings in settings_list)

    def check(question):
        paragraphs = question_paragraphs(question.metadata)
        if needs_gold and not any(is_gold for _, is_gold in paragraphs):
            raise ValueError(
                "none of the question's paragraphs is gold, and config.eval.methods = "
                "'in_context:only_gold=true': expected some with is_supporting "
                "(MuSiQue), or context and supporting_facts that share a title "
                "(HotpotQA)"
            )

    return check


def paragraph_reader(c: ConfigDict, world: World | None) -> ParagraphsOf:
    """Return a function that reads the paragraphs of the held-out questions.

    The embedded world's questions come without paragraphs; they are made here, on
    demand, so that no digest of its questions depends on them.
    """
    if _is_of_world(c.data.dev):
        return make_paragraphs(world)
    return lambda question: question_paragraphs(question.metadata)


def _is_of_world(source):
    return source.startswith(f"{WORLD}:")


def decontaminate(
    train: Sequence[Question],
    dev: Sequence[Question],
    log: Callable[[str], None],
    *,
    drops: bool,
) -> tuple[Question, ...]:
    """Drop training questions that are also held out, and report them to `log`.

    Two questions are the same if they differ only in case, punctuation and articles.

    Args:
        log: called with a line if there are any.
        drops: whether to drop these questions; otherwise they are only counted.
    """
    held_out = {normalize_squad(question.text) for question in dev}
    duplicates = [q for q in train if normalize_squad(q.text) in held_out]
    if not duplicates:
        return tuple(train)
    advice = "config.data.decontaminate = True leaves them out"
    log(
        f"{len(duplicates):,} of {len(train):,} training questions are also held out, "
        f"such as {duplicates[0].id}; {'left out of train' if drops else advice}"
    )
    dropped = {q.id for q in duplicates} if drops else set()
    return tuple(q for q in train if q.id not in dropped)


def drop_long_prompts(
    questions: Sequence[Question],
    split: str,
    *,
    count_tokens: Callable[[str], int],
    max_tokens: int,
    log: Callable[[str], None],
    limit: int = 0,
    draw_seed: int | None = None,
    are_kept: bool = False,
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return the questions to ask, and those whose prompts are too long.

    Args:
        split: "train" or "dev", for messages.
        count_tokens: (a question's text) -> number of tokens of its prompt.
        log: called with a line about each of the first questions with long prompts, and
            with their number.
        limit: number of questions to return; 0 returns all.
        draw_seed: draws the questions; None takes the first ones.
        are_kept: whether questions with long prompts are returned too.

    Returns:
        The questions, and all with too long a prompt that precede the last of them.
    """
    if draw_seed is not None:
        indices = shuffled_indices(questions, seed=draw_seed, name=f"{split} ")
        questions = [questions[i] for i in indices]
    questions_to_ask: list[Question] = []
    too_long: list[Question] = []
    outcome = f"in {split}, counts as wrong" if are_kept else f"left out of {split}"
    for question in questions:
        if limit and len(questions_to_ask) == limit:
            break
        count = count_tokens(question.text)
        if count <= max_tokens or are_kept:
            questions_to_ask.append(question)
        if count <= max_tokens:
            continue
        too_long.append(question)
        if len(too_long) <= MAX_NAMED:
            log(f"{outcome}: {question.id}, prompt {count} > {max_tokens} tokens")
    if len(too_long) > MAX_NAMED:
        log(f"{outcome}: {len(too_long):,} questions with long prompts in all")
    return tuple(questions_to_ask), tuple(too_long)

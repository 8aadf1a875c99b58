"""Good and flawed plans for the questions of the embedded world."""

from collections.abc import Sequence

import numpy as np

from rsearch.protocols.base import Step
from rsearch.tools.search import search_call
from rsearch.types import Answer, Question
from rsearch.world.facts import RELATIONS, UNKNOWN, Hop
from rsearch.world.questions import COMPARISON, earliest
from rsearch.world.world import World

GUESS = "I guess."
RECALLED = "I know."


def solution(
    world: World, question: Question, *, recalls: bool = False, max_queries: int = 1
) -> list[Step]:
    """Return the steps that find the answer without a needless search.

    Args:
        world: world with the facts behind the question.
        question: one of the world's questions.
        recalls: whether facts about the famous are recalled instead of searched for.
        max_queries: most queries in one search, which asks for the facts of a
            comparison together as far as this allows.
    """
    hops = world.hops[question.id]
    known = [recalls and hop.subject in world.famous for hop in hops]
    compares = question.metadata["kind"] == COMPARISON
    size = max_queries if compares else 1
    unsearched = [hop for hop, is_known in zip(hops, known) if not is_known]
    if compares:  # Known facts come first, so that one search asks for all others.
        hops = [hop for hop in hops if hop not in unsearched] + unsearched
    steps, searched, findings, internal = [], [], [], []
    while hops:
        if hops[0] not in unsearched:
            internal.append(hops[0].sentence)
            hops = hops[1:]
            continue
        now, hops = hops[:size], hops[size:]
        thought = " ".join([*findings, now[0].gap])
        queries = tuple(hop.subject for hop in now)
        steps.append(_step(steps, thought, search_call(*queries), internal))
        findings = [hop.sentence if compares else hop.fact for hop in now]
        searched += now
        internal = []
    if compares and internal and not findings:
        internal.append(conclusion(world.hops[question.id]))
    elif compares:
        findings.append(conclusion(world.hops[question.id]))
    evidence = " ".join(map(original, searched)) if searched else None
    answer = Answer(question.golden_answers[0])
    thought = " ".join(findings) or RECALLED
    return [*steps, _step(steps, thought, answer, internal, evidence)]


def early_stop(
    world: World, question: Question, rng: np.random.Generator
) -> list[Step]:
    """Return all steps before the last search, or fewer, and an answer from these.

    The answer is the object of the last fact found, which is wrong; for a comparison it
    is the subject of that fact, which may be right. If a question needs only one
    search, the answer is a guess.
    """
    hops = world.hops[question.id]
    if len(hops) == 1:
        return guess(world, question, rng)
    last = 1 if len(hops) == 2 else int(rng.integers(1, len(hops)))
    compares = question.metadata["kind"] == COMPARISON
    steps, findings, first_hops = [], [], hops[:last]
    for hop in first_hops:
        thought = " ".join([*findings, hop.gap])
        steps.append(_step(steps, thought, search_call(hop.subject)))
        findings = [hop.sentence if compares else hop.fact]
    answer = first_hops[-1].subject if compares else first_hops[-1].object
    evidence = " ".join(map(original, first_hops))
    return [*steps, _step(steps, findings[0], Answer(answer), evidence=evidence)]


def guess(world: World, question: Question, rng: np.random.Generator) -> list[Step]:
    """Return the only step of a guess: an answer of the right kind, with no search."""
    hops = world.hops[question.id]
    if question.metadata["kind"] == COMPARISON:
        others = [hop.subject for hop in hops]
    else:
        others = world.entities[RELATIONS[hops[-1].relation].object]
    return [guessing(others[rng.integers(len(others))])]


def guessing(answer: str) -> Step:
    """Return the only step of a model that does not know: this answer, as a guess."""
    return _step([], GUESS, Answer(answer))


def original(hop: Hop) -> str:
    """Return a hop's passage as it is shown: its title, and the fact if it is known."""
    fact = "" if hop.object == UNKNOWN else f" {hop.fact}"
    return f"(Title: {hop.subject}){fact}"


def conclusion(hops: Sequence[Hop]) -> str:
    """Return the conclusion from all years, such as "Release 1920 first."."""
    return f"{earliest(hops).fact.removesuffix('.')} first."


def _step(steps, thought, action, internal=(), evidence=None):
    return Step(len(steps) + 1, thought, action, " ".join(internal), evidence)

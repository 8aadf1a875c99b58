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
        recalls: whether facts about the famous are recalled instead of searched for.
        max_queries: most queries in one search, which asks for the facts of a
            comparison together as far as this allows.
    """
    hops = world.hops[question.id]
    recall_mask = [recalls and hop.subject in world.famous for hop in hops]
    is_comparison = question.metadata["kind"] == COMPARISON
    num_together = max_queries if is_comparison else 1
    hops_to_search = [
        hop for hop, is_recalled in zip(hops, recall_mask) if not is_recalled
    ]
    if is_comparison:  # Known facts come first, so that one search asks for all others.
        hops = [hop for hop in hops if hop not in hops_to_search] + hops_to_search
    steps, searched_hops, findings, internal = [], [], [], []
    while hops:
        if hops[0] not in hops_to_search:
            internal.append(hops[0].sentence)
            hops = hops[1:]
            continue
        search_hops, hops = hops[:num_together], hops[num_together:]
        thought = " ".join([*findings, search_hops[0].gap])
        queries = tuple(hop.subject for hop in search_hops)
        steps.append(_step(steps, thought, search_call(*queries), internal))
        findings = [hop.sentence if is_comparison else hop.fact for hop in search_hops]
        searched_hops += search_hops
        internal = []
    if is_comparison and internal and not findings:
        internal.append(conclusion(world.hops[question.id]))
    elif is_comparison:
        findings.append(conclusion(world.hops[question.id]))
    evidence = " ".join(map(original, searched_hops)) if searched_hops else None
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
    num_searches = 1 if len(hops) == 2 else int(rng.integers(1, len(hops)))
    is_comparison = question.metadata["kind"] == COMPARISON
    steps, findings, first_hops = [], [], hops[:num_searches]
    for hop in first_hops:
        thought = " ".join([*findings, hop.gap])
        steps.append(_step(steps, thought, search_call(hop.subject)))
        findings = [hop.sentence if is_comparison else hop.fact]
    answer = first_hops[-1].subject if is_comparison else first_hops[-1].object
    evidence = " ".join(map(original, first_hops))
    return [*steps, _step(steps, findings[0], Answer(answer), evidence=evidence)]


def guess(world: World, question: Question, rng: np.random.Generator) -> list[Step]:
    """Return the only step of a guess: an answer of the right kind, with no search."""
    hops = world.hops[question.id]
    if question.metadata["kind"] == COMPARISON:
        candidates = [hop.subject for hop in hops]
    else:
        candidates = world.entities[RELATIONS[hops[-1].relation].object]
    return [guessing(candidates[rng.integers(len(candidates))])]


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

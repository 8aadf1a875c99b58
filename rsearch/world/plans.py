"""How questions of the embedded world are answered, step by step: well, and badly."""

from rsearch.protocols.base import Step
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Question,
)
from rsearch.world.facts import RELATIONS, UNKNOWN, Hop
from rsearch.world.questions import COMPARISON, earliest

GUESS = "I guess."
RECALLED = "I know."


def solution(world, question: Question, *, recalls=False, max_queries=1) -> list[Step]:
    """The steps that find the answer, with no search too many.

    Args:
        world: has the facts behind the question.
        question: one of its questions.
        recalls: whether facts of the famous are recalled rather than searched for.
        max_queries: of one search; the facts of a comparison are asked for together
            where it allows that.
    """
    hops = world.hops[question.id]
    known = [recalls and hop.subject in world.famous for hop in hops]
    compares = question.metadata["kind"] == COMPARISON
    size = max_queries if compares else 1
    unsearched = [hop for hop, is_known in zip(hops, known) if not is_known]
    if compares:  # What is known of it comes first, so that the rest is one search.
        hops = [hop for hop in hops if hop not in unsearched] + unsearched
    steps, searched, found, internal = [], [], [], []
    while hops:
        if hops[0] not in unsearched:
            internal.append(hops[0].sentence)
            hops = hops[1:]
            continue
        now, hops = hops[:size], hops[size:]
        thought = " ".join([*found, now[0].gap])
        queries = tuple(hop.subject for hop in now)
        steps.append(_step(steps, thought, search_call(*queries), internal))
        found = [hop.sentence if compares else hop.fact for hop in now]
        searched += now
        internal = []
    if compares and internal and not found:
        internal.append(compared(world.hops[question.id]))
    elif compares:
        found.append(compared(world.hops[question.id]))
    evidence = " ".join(map(original, searched)) if searched else None
    answer = Answer(question.golden_answers[0])
    thought = " ".join(found) or RECALLED
    return [*steps, _step(steps, thought, answer, internal, evidence)]


def early_stop(world, question: Question, rng) -> list[Step]:
    """All but the last search, or fewer: what was found by then is the answer.

    Where one search would do, there is none, and the answer is a guess.
    """
    hops = world.hops[question.id]
    if len(hops) == 1:
        return guess(world, question, rng)
    last = 1 if len(hops) == 2 else int(rng.integers(1, len(hops)))
    compares = question.metadata["kind"] == COMPARISON
    steps, found, kept = [], [], hops[:last]
    for hop in kept:
        thought = " ".join([*found, hop.gap])
        steps.append(_step(steps, thought, search_call(hop.subject)))
        found = [hop.sentence if compares else hop.fact]
    answer = kept[-1].subject if compares else kept[-1].object
    evidence = " ".join(map(original, kept))
    return [*steps, _step(steps, found[0], Answer(answer), evidence=evidence)]


def guess(world, question: Question, rng) -> list[Step]:
    """An answer of the right kind, without a search."""
    hops = world.hops[question.id]
    if question.metadata["kind"] == COMPARISON:
        others = [hop.subject for hop in hops]
    else:
        others = world.entities[RELATIONS[hops[-1].relation].object]
    return [guessing(others[rng.integers(len(others))])]


def guessing(answer: str) -> Step:
    """The only step of one who does not know."""
    return _step([], GUESS, Answer(answer))


def original(hop: Hop) -> str:
    """What the passage says of it, with its title, in the words it is shown in."""
    told = "" if hop.object == UNKNOWN else f" {hop.fact}"
    return f"(Title: {hop.subject}){told}"


def compared(hops) -> str:
    """The conclusion from all years: "Release 1920 first."."""
    return f"{earliest(hops).fact.removesuffix('.')} first."


def _step(steps, thought, action, internal=(), evidence=None):
    return Step(len(steps) + 1, thought, action, " ".join(internal), evidence)

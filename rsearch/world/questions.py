"""The questions of the embedded world: kinds, patterns, and the hops behind each."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rsearch.types import Question
from rsearch.world.facts import DATED, RELATIONS, UNKNOWN, Hop

CHAINS = {  # kind -> {relations, hop by hop: the question's pattern}
    "single": {
        ("birthplace",): "In which city was {s} born?",
        ("employer",): "Which company employs {s}?",
        ("director",): "Who is the director of {s}?",
    },
    "bridge": {
        ("director", "birthplace"): "In which city was the director of {s} born?",
        ("director", "employer"): "Which company employs the director of {s}?",
        ("employer", "seat"): "In which city is the employer of {s} based?",
        ("birthplace", "country"): "In which country lies the birthplace of {s}?",
    },
    "three_hop": {
        ("director", "employer", "seat"): (
            "In which city is the employer of the director of {s} based?"
        ),
        ("director", "birthplace", "country"): (
            "In which country lies the birthplace of the director of {s}?"
        ),
        ("employer", "seat", "country"): (
            "In which country is the employer of {s} based?"
        ),
    },
    "four_hop": {
        ("director", "employer", "seat", "country"): (
            "In which country is the employer of the director of {s} based?"
        ),
    },
}
COMPARED = (("birth", "release"), ("birth", "founding"), ("release", "founding"))
OLDER = "Which is older, {0} or {1}?"  # the question about two of these relations
COMPARISON, UNANSWERABLE = "comparison", "unanswerable"
PARTS = {  # kind -> its share of the questions, relative to the others
    "single": 4,
    "bridge": 5,
    "three_hop": 2,
    "four_hop": 1,
    COMPARISON: 11,
    UNANSWERABLE: 1,
}
KINDS = tuple(PARTS)


def relations_of(kinds: Collection[str]) -> tuple[str, ...]:
    """Return the relations of a world that asks these kinds of questions."""
    return tuple(n for n in RELATIONS if n not in DATED or COMPARISON in kinds)


def ask(
    split: str,
    count: int,
    kinds: Sequence[str],
    heads: Mapping[str, Sequence[str]],
    facts: dict[str, dict[str, str]],
    famous: frozenset[str],
    rng: np.random.Generator,
) -> tuple[tuple[Question, ...], dict[str, tuple[Hop, ...]]]:
    """Draw questions about these heads, in random order, and the hops behind them.

    Each kind gets its share by PARTS, as far as it has enough questions; the remainder
    goes to the first kinds that have more.

    Args:
        split: "train" or "dev".
        kinds: keys of PARTS.
        heads: {kind of entity: names that questions may mention}.
        facts: {subject: {relation: object}}.

    Returns:
        The questions, and {id: hops}.

    Raises:
        ValueError: there are fewer than `count` questions.
    """
    candidates = _find_candidates(kinds, heads, facts, famous, rng)
    total = sum(map(len, candidates.values()))
    if count > total:
        raise ValueError(
            f"config.world.{split}_questions = {count}: its films and people give at "
            f"most {total}"
        )
    draws = []
    for kind, number in _divide_count(count, candidates).items():
        indices = rng.permutation(len(candidates[kind]))[:number]
        draws += [(kind, *candidates[kind][i]) for i in indices]
    if len(kinds) > 1:
        draws = [draws[i] for i in rng.permutation(len(draws))]
    questions, hops = [], {}
    for number, (kind, text, answer, plan) in enumerate(draws):
        name = f"world-{split}-{number}"
        is_known = all(hop.subject in famous for hop in plan)
        metadata = {"kind": kind, "known": is_known}
        questions.append(Question(name, text, (answer,), metadata))
        hops[name] = plan
    return tuple(questions), hops


def _find_candidates(kinds, heads, facts, famous, rng):
    """Return all possible questions: {kind: [(text, answer, hops)]}."""
    candidates = {kind: [] for kind in kinds}
    for kind, patterns in CHAINS.items():
        for relations, pattern in patterns.items():
            for head in heads[RELATIONS[relations[0]].subject]:
                plan = _follow_chain(head, relations, facts)
                answer = plan[-1].object
                actual_kind = UNANSWERABLE if answer == UNKNOWN else kind
                is_complete = len(plan) == len(relations)
                if is_complete and kind in candidates and actual_kind in candidates:
                    candidates[actual_kind].append(
                        (pattern.format(s=head), answer, plan)
                    )
    if COMPARISON in candidates:
        for relations in COMPARED:
            candidates[COMPARISON] += _draw_comparisons(
                relations, heads, facts, famous, rng
            )
    return candidates


def _follow_chain(head, relations, facts):
    """Return the hops from this head, as far as they are known."""
    plan = []
    for relation in relations:
        plan.append(Hop(head, relation, facts[head][relation]))
        head = plan[-1].object
        if head == UNKNOWN:
            break
    return tuple(plan)


def _draw_comparisons(relations, heads, facts, famous, rng):
    """Pair entities of different kinds and years, famous ones with famous ones.

    There is at most one question for each entity of the first kind.
    """
    first_kind, second_kind = (RELATIONS[relation].subject for relation in relations)
    questions = []
    for head in heads[first_kind]:
        hop = Hop(head, relations[0], facts[head][relations[0]])
        for name in (
            heads[second_kind][i] for i in rng.permutation(len(heads[second_kind]))
        ):
            other_hop = Hop(name, relations[1], facts[name][relations[1]])
            is_equally_known = (name in famous) == (head in famous)
            if is_equally_known and other_hop.object != hop.object:
                text = OLDER.format(head, name)
                plan = hop, other_hop
                questions.append((text, earliest(plan).subject, plan))
                break
    return questions


def earliest(hops: Sequence[Hop]) -> Hop:
    """Return the hop with the earliest year."""
    return min(hops, key=lambda hop: int(hop.object))


def _divide_count(count, candidates):
    """Return {kind: number}: a count divided by PARTS, as far as there are enough."""
    total = sum(PARTS[kind] for kind in candidates)
    numbers = {
        kind: min(len(available), count * PARTS[kind] // total)
        for kind, available in candidates.items()
    }
    for kind, available in candidates.items():
        missing = count - sum(numbers.values())
        numbers[kind] += min(missing, len(available) - numbers[kind])
    return numbers

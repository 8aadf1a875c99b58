"""The embedded world: what is true in it can be found, and only in two searches."""

import hashlib
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.data.world import NAMES, QUESTIONS, RELATIONS, make_world
from rsearch.retrieval.encoder import HashedNgrams
from rsearch.retrieval.engine import engine_in_memory
from tests.small_run import run_python

SIZES = dict(
    people=500,
    films=400,
    companies=100,
    cities=100,
    train_questions=1400,
    dev_questions=200,
)
FEW = dict(
    people=10, films=10, companies=3, cities=3, train_questions=5, dev_questions=2
)


def world(seed=0, **sizes):
    return make_world(seed=seed, **{**SIZES, **sizes})


def digest(world):
    parts = [world.entities, world.passages, world.train, world.dev, world.hops]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


DIGEST = """
from tests.data.test_world import digest, world
print(digest(world(7)))
"""


def test_it_follows_from_its_seed_in_every_process():
    here = digest(world(7))
    for hash_seed in ("1", "2"):
        done = run_python("-c", DIGEST, PYTHONHASHSEED=hash_seed)
        assert done.stdout.strip() == here, done.stderr


def test_other_seeds_make_other_worlds():
    assert len({digest(world(seed, **FEW)) for seed in range(20)}) == 20


def heads(questions, hops):
    return {hops[q.id][0].subject for q in questions}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    people=st.integers(10, 60),
    films=st.integers(10, 60),
    companies=st.integers(1, 30),
    cities=st.integers(1, 30),
)
def test_every_question_is_two_facts_of_which_it_names_the_first_subject(
    seed, people, films, companies, cities
):
    made = make_world(
        seed=seed,
        people=people,
        films=films,
        companies=companies,
        cities=cities,
        train_questions=30,
        dev_questions=8,
    )
    by_title = {p.title: p.text for p in made.passages}
    assert len(by_title) == len(made.passages) == len({p.id for p in made.passages})
    assert not heads(made.train, made.hops) & heads(made.dev, made.hops)
    asked = [q.text for q in made.train + made.dev]
    assert len(asked) == len(set(asked)) == 38
    assert len({q.id for q in made.train + made.dev}) == 38
    for question in made.train + made.dev:
        first, second = made.hops[question.id]
        assert first.object == second.subject
        assert question.golden_answers == (second.object,)
        assert first.subject in question.text
        assert first.object not in question.text
        assert second.object not in question.text
        # One passage holds the first fact, another one the second, and neither both.
        assert first.fact in by_title[first.subject]
        assert second.fact in by_title[second.subject]
        assert first.subject != second.subject


def test_no_two_entities_share_a_name():
    """Else two passages would have one title, and facts would run together."""
    pairs = {
        "person": ("given", "family", " "),
        "film": ("adjectives", "nouns", " "),
        "company": ("trades", "forms", " "),
        "city": ("stems", "endings", ""),
    }
    everybody = NAMES["countries"].split()
    for first, second, joint in pairs.values():
        parts = NAMES[first].split(), NAMES[second].split()
        everybody += [joint.join(pair) for pair in itertools.product(*parts)]
    assert len(everybody) == len(set(everybody))


def test_every_relation_has_words_of_its_own():
    assert len({r.words for r in RELATIONS.values()}) == len(RELATIONS)
    for first, second in QUESTIONS:
        assert RELATIONS[first].object == RELATIONS[second].subject


@pytest.mark.parametrize("seed", range(3))
def test_two_searches_find_both_facts_and_one_does_not(seed):
    made = world(seed)
    search = engine_in_memory(made.passages, HashedNgrams(512), top_k=1)
    questions = made.train + made.dev
    hops = [made.hops[q.id] for q in questions]
    for position in (0, 1):
        found = search([both[position].subject for both in hops])
        wrong = [
            both[position].subject
            for both, (passage,) in zip(hops, found, strict=True)
            if both[position].fact not in passage.text
        ]
        assert not wrong, f"{len(wrong)} not found first: {wrong[:5]}"
    shown = search([q.text for q in questions])
    tells = [
        q.golden_answers[0] in passage.contents
        for q, (passage,) in zip(questions, shown, strict=True)
    ]
    assert sum(tells) / len(tells) < 0.02


def test_what_was_found_can_be_searched_for_in_the_words_it_was_found_in():
    """A passage's fact ends with the bridge's whole name and a full stop."""
    made = world()
    for question in made.train[:200]:
        first, second = made.hops[question.id]
        for hop in (first, second):
            assert re.search(rf"{re.escape(hop.object)}\.( |$)", hop.fact)
            assert hop.gap == hop.fact.replace(f" {hop.object}.", "?")


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("people", 10_000, 40 * 48),
        ("films", 10_000, 26 * 26),
        ("companies", 300, 26 * 8),
        ("cities", 1_000, 20 * 9),
        # 320 films in two patterns and 400 people in two patterns; 80 and 100 held out.
        ("train_questions", 1_441, 1_440),
        ("dev_questions", 361, 360),
    ],
)
def test_what_is_too_large_is_refused_with_its_field(field, value, most):
    with pytest.raises(ValueError, match=f"config.world.{field} = {value}: .*{most}"):
        world(**{field: value})


def test_the_largest_world_can_be_made():
    made = world(people=1920, films=676, companies=208, cities=180)
    assert len(made.passages) == 1920 + 676 + 208 + 180


def test_its_texts_hold_no_held_out_question():
    made = world(**FEW)
    assert not {q.text for q in made.dev} & set(made.texts())

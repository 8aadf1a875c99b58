"""The embedded world: its facts can be found, and two of them only in two searches."""

import hashlib
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.retrieval.encoder import HashedNgrams
from rsearch.retrieval.engine import engine_in_memory
from rsearch.world.facts import DATED, RELATIONS, UNKNOWN
from rsearch.world.names import COUNTRIES, NAMES, PARTS, family
from rsearch.world.questions import CHAINS, COMPARED, KINDS
from rsearch.world.world import NUM_PARAGRAPHS, make_paragraphs, make_world
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


ALL = dict(
    people=400,
    films=300,
    companies=60,
    cities=60,
    kinds=KINDS,
    known_share=0.2,
    missing_share=0.15,
    distractors=100,
)


def world(seed=0, **sizes):
    return make_world(seed=seed, **{**SIZES, **sizes})


@pytest.fixture(scope="module")
def whole():
    """A world with questions of all kinds."""
    return world(**ALL)


def digest(world):
    parts = [world.entities, world.passages, world.train, world.dev, world.hops]
    parts += [sorted(world.famous), world.facts]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


DIGEST = """
from tests.world.test_world import ALL, digest, world
print(digest(world(7)), digest(world(7, **ALL)))
"""


def test_a_world_is_determined_by_its_seed_in_every_process():
    here = f"{digest(world(7))} {digest(world(7, **ALL))}"
    # Strings have other hashes there, since this process has drawn its own hash seed.
    done = run_python("-c", DIGEST, PYTHONHASHSEED="1")
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
def test_every_question_joins_two_facts_and_names_only_the_first_subject(
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
    """Otherwise two passages would share a title, and their facts would be mixed up."""
    everybody = list(COUNTRIES)
    for first, second, joint in PARTS.values():
        parts = NAMES[first].split(), NAMES[second].split()
        everybody += [joint.join(pair) for pair in itertools.product(*parts)]
    assert len(everybody) == len(set(everybody))


def test_every_relation_has_its_own_words():
    assert len({r.words for r in RELATIONS.values()}) == len(RELATIONS)
    for patterns in CHAINS.values():
        for relations in patterns:
            for first, second in itertools.pairwise(relations):
                assert RELATIONS[first].object == RELATIONS[second].subject
    assert {relation for compared in COMPARED for relation in compared} == set(DATED)


@pytest.mark.parametrize("seed", range(3))
def test_two_searches_find_both_facts_and_one_does_not(seed):
    made = world(seed)
    search = engine_in_memory(made.passages, HashedNgrams(512), top_k=1)
    questions = made.train + made.dev
    hops = [made.hops[q.id] for q in questions]
    for position in (0, 1):
        actual = search([both[position].subject for both in hops])
        wrong = [
            both[position].subject
            for both, (passage,) in zip(hops, actual, strict=True)
            if both[position].fact not in passage.text
        ]
        assert not wrong, f"{len(wrong)} not found first: {wrong[:5]}"
    shown = search([q.text for q in questions])
    tells = [
        q.golden_answers[0] in passage.contents
        for q, (passage,) in zip(questions, shown, strict=True)
    ]
    assert sum(tells) / len(tells) < 0.02


def test_a_bridge_can_be_searched_for_in_the_words_of_its_passage():
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
def test_a_size_that_is_too_large_is_refused_with_its_field(field, value, most):
    with pytest.raises(ValueError, match=f"config.world.{field} = {value}: .*{most}"):
        world(**{field: value})


def test_the_largest_world_can_be_made():
    made = world(people=1920, films=676, companies=208, cities=180)
    assert len(made.passages) == 1920 + 676 + 208 + 180


def test_the_worlds_texts_hold_no_held_out_question():
    made = world(**FEW)
    assert not {q.text for q in made.dev} & set(made.texts())


def by_kind(questions):
    actual = {kind: [] for kind in KINDS}
    for question in questions:
        actual[question.metadata["kind"]].append(question)
    return actual


def test_every_kind_is_asked_and_most_kinds_have_known_questions(whole):
    for split in (whole.train, whole.dev):
        kinds = by_kind(split)
        assert all(kinds.values())
        known = {k for k, qs in kinds.items() if any(q.metadata["known"] for q in qs)}
        assert known >= set(KINDS) - {"unanswerable", "four_hop"}
        assert not any(q.metadata["known"] for q in kinds["unanswerable"])


def test_a_chain_leads_from_the_head_to_the_answer(whole):
    length = {"single": 1, "bridge": 2, "three_hop": 3, "four_hop": 4}
    for question in whole.train + whole.dev:
        kind, hops = question.metadata["kind"], whole.hops[question.id]
        if kind not in length:
            continue
        assert len(hops) == length[kind]
        assert hops[0].subject in question.text
        for first, second in itertools.pairwise(hops):
            assert first.object == second.subject
            assert second.subject not in question.text
        assert question.golden_answers == (hops[-1].object,)
        for hop in hops:
            assert whole.facts[hop.subject][hop.relation] == hop.object


def test_a_comparison_is_of_independent_facts_and_has_one_right_answer(whole):
    compared = [
        q for q in whole.train + whole.dev if q.metadata["kind"] == "comparison"
    ]
    assert {len(whole.hops[q.id]) for q in compared} == {2}
    position = []
    for question in compared:
        hops = whole.hops[question.id]
        years = [int(hop.object) for hop in hops]
        assert len(set(years)) == len(years)
        (first,) = [h.subject for h in hops if int(h.object) == min(years)]
        assert question.golden_answers == (first,)
        assert all(hop.subject in question.text for hop in hops)
        # The subjects are of different kinds, so their names consist of other words.
        assert len({RELATIONS[hop.relation].subject for hop in hops}) == len(hops)
        position.append([hop.subject for hop in hops].index(first))
    # The position of the answer in the question gives nothing away.
    assert sum(position) / len(position) == pytest.approx(0.5, abs=0.12)


def test_the_missing_fact_of_an_unanswerable_question_is_in_no_passage(whole):
    texts = {p.title: p.text for p in whole.passages}
    for question in by_kind(whole.train + whole.dev)["unanswerable"]:
        *actual, missing = whole.hops[question.id]
        assert question.golden_answers == (UNKNOWN,) == (missing.object,)
        assert RELATIONS[missing.relation].words not in texts[missing.subject]
        assert all(hop.fact in texts[hop.subject] for hop in actual)


def test_all_facts_that_follow_from_a_famous_head_are_known(whole):
    for question in whole.train + whole.dev:
        hops = whole.hops[question.id]
        is_famous = [hop.subject in whole.famous for hop in hops]
        assert question.metadata["known"] == all(is_famous)
        if is_famous[0]:
            assert all(is_famous)
    share = len(whole.famous) / len(whole.facts)
    assert share == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("kind", ["person", "film", "company", "city"])
def test_whole_families_are_famous_or_not(whole, kind):
    by_family = {}
    for name in whole.entities[kind]:
        by_family.setdefault(family(name, kind), []).append(name in whole.famous)
    mixed = [all(f) != any(f) for f in by_family.values()]
    assert sum(mixed) <= 1  # the one at which the share ends
    assert 1 < sum(any(f) for f in by_family.values()) < len(by_family) / 2


def test_a_family_is_the_word_that_its_names_share():
    names = ("Ada Abel", "person"), ("Lost Castle", "film"), ("Atlas Foods", "company")
    assert [family(*name) for name in names] == ["Abel", "Lost", "Atlas"]
    assert family("Kaltdorf", "city") == family("Kalttal", "city") == "Kalt"


def test_heads_of_held_out_questions_are_in_no_training_question(whole):
    def named(questions):
        return {
            hop.subject
            for q in questions
            for hop in (
                whole.hops[q.id]
                if q.metadata["kind"] == "comparison"
                else whole.hops[q.id][:1]
            )
        }

    assert not named(whole.train) & named(whole.dev)


def test_near_homonyms_share_words_and_are_not_found_in_place_of_their_originals(whole):
    own = [p for p in whole.passages if p.title not in whole.facts]
    assert len(own) == 100 == len({p.title for p in own})
    for passage in own:
        original, _, _ = passage.title.rpartition(" ")
        assert original in whole.facts
    search = engine_in_memory(whole.passages, HashedNgrams(512), top_k=1)
    subjects = [h.subject for hops in whole.hops.values() for h in hops]
    for subject, (passage,) in zip(subjects, search(subjects), strict=True):
        assert passage.title == subject


def test_a_kind_with_too_few_questions_leaves_its_share_to_the_others():
    few = world(**{**ALL, "missing_share": 0.01})
    kinds = by_kind(few.train)
    assert len(few.train) == 1400
    assert 0 < len(kinds["unanswerable"]) < 10


def test_a_world_with_one_kind_of_question_has_no_other():
    for kind in KINDS[:-1]:
        made = world(**{**ALL, "kinds": (kind,)}, train_questions=60, dev_questions=20)
        assert {q.metadata["kind"] for q in made.train + made.dev} == {kind}


def test_too_many_near_homonyms_are_refused():
    with pytest.raises(ValueError, match=r"world.distractors = 701: .* 700"):
        world(**{**ALL, "distractors": 701})


def test_paragraphs_are_the_passages_of_a_question_and_of_other_held_out_ones(whole):
    before, paragraphs_of = digest(whole), make_paragraphs(whole)
    contents = {passage.contents for passage in whole.passages}
    behind = {hop.subject for q in whole.dev for hop in whole.hops[q.id]}
    gold_first = 0
    for question in (*whole.dev, *whole.train[:20]):
        marked = paragraphs_of(question)
        titles = [text.partition("\n")[0] for text, _ in marked]
        gold = {title for title, (_, is_gold) in zip(titles, marked) if is_gold}
        assert gold == {hop.subject for hop in whole.hops[question.id]}
        assert len({*titles}) == len(titles) == NUM_PARAGRAPHS
        assert {text for text, _ in marked} <= contents
        assert {*titles} - gold <= behind
        gold_first += marked[0][1]
    # Neither the other paragraphs nor the position of gold gives the answer away.
    assert 0 < gold_first < 100
    drawn = [paragraphs_of(question) for question in whole.dev]
    assert len({tuple(sorted(marked)) for marked in drawn}) == len(drawn)
    assert [make_paragraphs(whole)(question) for question in whole.dev] == drawn
    assert digest(whole) == before


def test_a_small_world_has_fewer_paragraphs():
    small = world(**FEW)
    (first, second), paragraphs_of = small.dev, make_paragraphs(small)
    titles = {
        hop.subject
        for hops in map(small.hops.get, (first.id, second.id))
        for hop in hops
    }
    for question in small.dev:
        marked = paragraphs_of(question)
        assert {text.partition("\n")[0] for text, _ in marked} == titles
        assert sum(is_gold for _, is_gold in marked) == 2

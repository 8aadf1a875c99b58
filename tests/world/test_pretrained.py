"""Small models of the embedded world: the texts they read, and their cache."""

import dataclasses
import functools
import itertools
import pathlib
import queue
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from configs import base
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS
from rsearch.protocols.tagged import SEARCH_R1
from rsearch.retrieval.encoder import HashedNgrams
from rsearch.retrieval.engine import engine_in_memory
from rsearch.runtime import files
from rsearch.tools.search import search_call
from rsearch.types import Source
from rsearch.world import pretrained, reading
from rsearch.world.pretrained import MODELS, find_source, find_world_model
from rsearch.world.questions import KINDS
from rsearch.world.reading import world_tokenizer
from rsearch.world.texts import WORLD_PROTOCOLS, world_words
from rsearch.world.world import make_world
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]
WORLD = dict(
    people=60,
    films=40,
    companies=10,
    cities=10,
    train_questions=60,
    dev_questions=12,
    kinds=KINDS,
    known_share=0.3,
    missing_share=0.2,
    distractors=5,
)
NAMES = {  # the default world's models, with which runs and tables were made
    "base": "base-0cbb606a7fb78abc",
    "expert": "expert-6907763168719739",
    "judge": "judge-367d98548191448a",
}
SHAPE = dict(width=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
LITTLE = dataclasses.replace(
    MODELS["base"],
    **SHAPE,
    mlp_width=16,
    steps=1,
    step_tokens=320,
    shares=dataclasses.replace(
        MODELS["base"].shares, comparisons=20, orderings=10, lookups=20
    ),
)


@pytest.fixture(scope="module")
def world():
    return make_world(seed=0, **WORLD)


@pytest.fixture(scope="module")
def search(world):
    return engine_in_memory(world.passages, HashedNgrams(512), top_k=1)


@pytest.fixture(scope="module")
def read(world, search):
    """Function from a model's name to the items that it reads, made once."""

    @functools.cache
    def of(name):
        return reading.reading(world, MODELS[name].shares, search, seed=0)

    return of


def texts(item):
    """Return all texts of one item that a model reads."""
    if isinstance(item, reading.Dialogue):
        return [item.question.text, *item.turns, *(item.observations or ())]
    if isinstance(item, reading.Chat):
        return [*(m["content"] for m in item.messages), item.reply]
    return [text for pair in item.pieces for text in pair]


@pytest.mark.parametrize("name", MODELS)
def test_no_held_out_question_is_read(world, read, name):
    held_out = [question.text for question in world.dev]
    for item in read(name):
        joined = " ".join(texts(item))
        assert not any(text in joined for text in held_out)


@pytest.mark.parametrize("name", ["base", "expert"])
def test_policies_read_the_facts_of_all_famous_subjects_and_no_others(
    world, read, name
):
    items = read(name)
    fact_texts = [item.pieces for item in items if isinstance(item, reading.Text)]
    fact_texts = [
        pieces for pieces in fact_texts if pieces[0][0].strip() in world.facts
    ]
    pairs = [pair for pieces in fact_texts for pair in pieces]
    subjects = {subject.strip() for subject, _ in pairs}
    assert subjects == world.famous
    count = sum(len(world.facts[subject]) for subject in subjects)
    assert len(pairs) == count * MODELS[name].shares.facts


def test_policies_read_dialogues_of_every_protocol_and_a_judge_reads_none(world, read):
    for name in ("base", "expert"):
        items = read(name)
        dialogues = [i for i in items if isinstance(i, reading.Dialogue)]
        assert {d.protocol for d in dialogues} == set(WORLD_PROTOCOLS)
        known = len(reading.make_recollections(world)) * MODELS[name].shares.recalling
        assert len(dialogues) == len(WORLD_PROTOCOLS) * len(world.train) + known
    kinds = {type(item) for item in read("judge")}
    assert kinds == {reading.Chat, reading.Text}


def test_a_comparison_can_be_made_from_only_the_given_texts(world):
    rng = np.random.default_rng(0)
    dated = r"(\w+ \w+) +(?:Born in \w+\. Works for \w+ \w+\. |Directed by \w+ \w+\. "
    dated += r"|Based in \w+\. )?(Birth|Release|Founding) (\d{4})\."
    turns = set()
    for _ in range(200):
        pieces = reading.make_comparison(world, rng).pieces
        question = pieces[0][0]
        names = re.sub(r".*older, ", "", question)[:-1].split(" or ")
        shown = "".join(context for context, _ in pieces[1:])
        facts = re.findall(dated, shown)
        assert [name for name, *_ in facts] == names
        assert len({year for *_, year in facts}) == len(facts) == len(names)
        name, relation, year = min(facts, key=lambda fact: int(fact[2]))
        learnt = [learnt for _, learnt in pieces]
        assert learnt[-1].endswith(f" {relation} {year} first. {name}.")
        for fact in facts:
            assert f"{fact[0]} {fact[1]} {fact[2]}." in "".join(learnt)
        queries = ", ".join(re.findall(r"\? (.*)$", t)[0] for t in learnt[:-1])
        assert queries == ", ".join(names)
        turns.add(len(pieces) - len(names))
    assert turns == {1, 0}  # one by one, or together


def test_an_ordering_names_the_first_of_the_given_years():
    rng = np.random.default_rng(0)
    for _ in range(50):
        for years_shown, learnt in reading.make_orderings(rng).pieces:
            facts = re.findall(r"(Birth|Release|Founding) (\d{4})\.", years_shown)
            assert len(facts) in (2, 3) and len({year for _, year in facts}) > 1
            relation, year = min(facts, key=lambda fact: int(fact[1]))
            assert learnt == f" {relation} {year} first."


def test_a_lookup_repeats_a_fact_of_its_passage_and_leads_to_the_next(world):
    rng = np.random.default_rng(0)
    retold = missing = chains = 0
    for _ in range(300):
        pieces = reading.make_lookups(world, rng).pieces
        chains += len(pieces) > 1
        for context, learnt in pieces:
            words, _, passage = context.strip().partition("? ")
            assert learnt.startswith(f" {words} ")
            if learnt == f" {words} unknown.":
                assert words not in passage
                missing += 1
            else:
                assert learnt in passage
                retold += 1
        for (_, learnt), (context, _) in itertools.pairwise(pieces):
            subject = re.sub(r"^ (Directed by|Born in|Works for|Based in) ", "", learnt)
            assert f"? {subject[:-1]} {subject[:-1]} " in context
    assert retold > 10 * missing > 0 and chains > 100


def test_partly_known_questions_are_recalled_as_far_as_they_are_known(world):
    dialogues = reading.make_recollections(world)
    known = [
        any(hop.subject in world.famous for hop in world.hops[q.id])
        for q in world.train
    ]
    assert len(dialogues) == sum(known) > 0
    for dialogue in dialogues:
        hops = world.hops[dialogue.question.id]
        famous = [hop for hop in hops if hop.subject in world.famous]
        recalled = " ".join(dialogue.turns)
        assert all(hop.sentence in recalled for hop in famous)
        searches = sum("external_search" in turn for turn in dialogue.turns)
        assert searches == len(hops) - len(famous)


def share_right(world, read, name):
    """Return the share of dialogues, without recollections, that end in the answer."""
    dialogues = [i for i in read(name) if isinstance(i, reading.Dialogue)]
    for recollection in reading.make_recollections(world):
        for _ in range(MODELS[name].shares.recalling):
            dialogues.remove(recollection)
    return np.mean(
        [
            WORLD_PROTOCOLS[d.protocol].parse(d.turns[-1]).text
            == d.question.golden_answers[0]
            for d in dialogues
        ]
    )


def test_the_expert_is_always_right_and_the_base_model_often_wrong(world, read):
    assert share_right(world, read, "expert") == 1
    assert share_right(world, read, "base") < 0.6


def test_evidence_is_enough_for_an_answer_or_the_answer_is_unknown(world, read):
    by_text = {question.text: question for question in world.train}
    items = read("judge")
    for chat in [item for item in items if isinstance(item, reading.Chat)]:
        content = chat.messages[0]["content"]
        (question,) = [
            q for text, q in by_text.items() if f"Question: {text}" in content
        ]
        hops = world.hops[question.id]
        is_told = all(f"(Title: {hop.subject})" in content for hop in hops)
        right = question.golden_answers[0] if is_told else "unknown"
        assert chat.reply == right


def test_rows_learn_only_the_texts_that_the_model_writes(world, search, read):
    tokenizer = world_tokenizer(world)
    items = read("expert")
    rows = pretrained.make_rows(items, tokenizer, search)
    assert len(rows) == len(items)
    for item, row in zip(items, rows, strict=True):
        learnt = [s for s in row if s.source == Source.POLICY]
        learnt_text = "".join(tokenizer.decode(s.token_ids) for s in learnt)
        learnt_text = learnt_text.replace("<|end|>", "")
        if isinstance(item, reading.Dialogue):
            assert learnt_text == "".join(item.turns)
        elif isinstance(item, reading.Chat):
            assert learnt_text == f" {item.reply}"
        else:
            assert learnt_text == "".join(text for _, text in item.pieces)
    assert max(map(pretrained.row_length, rows)) <= pretrained.LENGTHS[-1]


def test_batches_hold_every_row_before_any_is_repeated(world, search, read):
    items = read("base")
    tokenizer = world_tokenizer(world)
    rows = pretrained.make_rows(items[::4], tokenizer, search)

    def ids(row):
        return tuple(np.concatenate([s.token_ids for s in row]).tolist())

    seen = set()
    wanted = {ids(row) for row in rows}
    batches = pretrained.make_batches(rows, LITTLE, seed=0, multiple=1)
    for _ in range(len(rows) + 10):
        batch = next(batches)
        tokens = batch.tokens[0]
        assert tokens.size <= LITTLE.step_tokens or len(tokens) == 1
        seen |= {tuple(row.tolist()) for row in tokens}
        if len(seen) >= len(wanted):
            break
    padded = {n: {w + (0,) * (n - len(w)) for w in wanted} for n in pretrained.LENGTHS}
    assert seen <= set().union(*padded.values())
    assert len(seen) == len(wanted)


def make_little(cache, *, seed=0, log=print, **settings):
    """Return the directory of a little model; other settings are the world's."""
    return find_world_model(
        "base",
        world_settings={**WORLD, **settings},
        seed=seed,
        log=log,
        cache=cache,
        pretraining=LITTLE,
    )


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """(directory of a little model, which must not be changed; lines of its log)."""
    said = []
    return make_little(tmp_path_factory.mktemp("little"), log=said.append), said


@pytest.mark.fault(84, "damaged export")
def test_a_model_is_made_once_and_then_found(little, tmp_path, monkeypatch):
    first, said_at_first = little
    assert said_at_first
    assert [p for p in first.parent.iterdir() if p.name.startswith(".")] == []
    made, said = shutil.copytree(first, tmp_path / first.name), []
    find = functools.partial(make_little, tmp_path, log=said.append)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert find() == made and not said
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    spec = read_spec(made)
    assert (spec.width, spec.num_layers) == (16, 1)
    tokenizer = load_tokenizer(made)
    expected = world_tokenizer(make_world(seed=0, **WORLD))
    assert tokenizer.fingerprint == expected.fingerprint
    params = huggingface.load_params(made, spec)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    # Another world or seed is another model, whose training is skipped here.
    monkeypatch.setattr(pretrained, "_train", lambda *_: (params, spec))
    assert len({made, find(people=61), find(seed=1)}) == 3
    weights = (made / "model.safetensors").read_bytes()
    (made / "model.safetensors").write_bytes(weights[:-8] + bytes(8))
    assert find() == made
    assert (made / "model.safetensors").read_bytes() == weights
    (aside,) = tmp_path.glob(f"{made.name}.damaged-*")
    assert (aside / "model.safetensors").read_bytes() != weights


def test_making_a_model_again_gives_the_same_weights(little, tmp_path):
    made = [little[0], make_little(tmp_path / "b")]
    a, b = ((m / "model.safetensors").read_bytes() for m in made)
    assert made[0].name == made[1].name
    assert a == b
    # A process that needs a model waits while another process makes it.
    cache, said = tmp_path / "c", queue.Queue()
    cache.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with files.locked(cache / f".{made[0].name}.lock") as is_held:
            assert is_held
            waits = pool.submit(make_little, cache, log=said.put)
            assert "waiting for it" in said.get(timeout=60)
            shutil.copytree(made[0], cache / made[0].name)
        assert waits.result(60) == cache / made[0].name
    assert said.empty()


def test_a_source_is_a_model_of_the_world_or_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("RSEARCH_CACHE", str(tmp_path))
    monkeypatch.setitem(pretrained.MODELS, "base", LITTLE)
    c = config()
    directory = find_source(c, "world:base")
    assert directory.parent == tmp_path / "world"
    assert directory.name.startswith("base-")
    assert find_source(c, str(directory)) == pathlib.Path(directory)


def test_an_unknown_model_is_refused_with_the_names_of_the_known_ones():
    with pytest.raises(ValueError, match=r"'world:oracle': .* base, expert, judge"):
        find_source(config(), "world:oracle")


def test_a_word_is_initialised_alike_with_and_without_a_space(world):
    tokenizer = world_tokenizer(world)
    rng = np.random.default_rng(0)
    before = jax.numpy.asarray(rng.normal(size=(tokenizer.vocab_size, 4)))
    after = np.asarray(pretrained.align_spaced(before, tokenizer))
    ids = {token: i for i, token in enumerate(tokenizer.token_bytes)}
    words = [t for t in ids if b" " + t in ids]
    assert len(words) > 20
    shift = {tuple(np.round(after[ids[w]] - after[ids[b" " + w]], 5)) for w in words}
    assert len(shift) == 1
    others = [i for t, i in ids.items() if t not in words]
    np.testing.assert_array_equal(after[others], np.asarray(before)[others])


@pytest.mark.parametrize("name", NAMES)
def test_the_models_of_the_default_world_keep_their_names(tmp_path, name):
    """A model with another name would be trained again, and no table would hold."""
    (tmp_path / NAMES[name]).mkdir()
    c = base.get_config()
    model = find_world_model(
        name, world_settings=dict(c.world), seed=c.seed, cache=tmp_path
    )
    assert model.name == NAMES[name]


def test_a_new_protocol_changes_nothing_about_the_world(
    monkeypatch, world, search, read
):
    items = read("base")
    tokenizer, words = world_tokenizer(world), world_words(world)
    added = dataclasses.replace(SEARCH_R1, name="mine", opening="Think first:")
    monkeypatch.setitem(PROTOCOLS, "mine", added)
    assert world_words(world) == words
    assert world_tokenizer(world).fingerprint == tokenizer.fingerprint
    assert reading.reading(world, MODELS["base"].shares, search, seed=0) == items
    # Its turns can still be encoded, and decode to the same text.
    step = Step(1, "Born in?", search_call(world.hops[world.train[0].id][0].subject))
    turn = added.write(step)
    assert tokenizer.decode(tokenizer.encode(turn)) == turn

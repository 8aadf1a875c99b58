"""The engine of rollouts, tested with a sampler that writes given texts."""

import dataclasses
import pathlib
import threading
import traceback

import jax
import numpy as np
import pytest

import rsearch
from rsearch.models.sharding import make_mesh
from rsearch.rollout import decode, sampling, scheduler
from rsearch.rollout.decode import Sampler
from rsearch.rollout.scheduler import (
    STEPS_BETWEEN_CHECKS,
    RolloutEngine,
    decoding_order,
)
from rsearch.rollout.stop_strings import token_automaton
from rsearch.types import Outcome, Passage, Source
from tests.rollout import tiny
from tests.rollout.scripted import (
    ANSWERS,
    LONG_ANSWER,
    SEARCHES,
    WAIT,
    WHO,
    Script,
    assert_rows_held,
    find,
    make_host,
    people,
    play,
)

PACKAGE = pathlib.Path(rsearch.__path__[0])


@pytest.fixture
def searches_awaited(monkeypatch):
    """Make others wait for a search before they decode, even on a busy machine."""
    monkeypatch.setattr(scheduler, "TOOL_WAIT_SECONDS", (WAIT, WAIT))


def num_tokens(text):
    return len(tiny.tokenizer().encode(text))


def test_a_conversation_continues_until_its_answer():
    turns = ["nothing", SEARCHES, ANSWERS]
    ((group,), script) = play([turns])
    (rollout,) = group.rollouts
    assert rollout.policy_texts == tuple(turns)
    assert (rollout.outcome, rollout.answer) == (Outcome.ANSWERED, "city")
    assert (rollout.num_malformed, len(rollout.searches)) == (1, 1)
    kinds = [s.source for s in rollout.segments]
    assert kinds == [1, 2, 3, 2, 3, 2]
    # The rows have read the ids of the segments.
    shown = [s for s in rollout.segments if s.source == Source.SEARCH]
    assert script.read == [(0, s.token_ids.tolist()) for s in shown]
    assert script.prompts == [rollout.segments[0].token_ids.tolist()]
    assert_rows_held([group], script)
    # Ids after a row's count are not part of its turn.
    turns_written = [s for s in rollout.segments if s.source == Source.POLICY]
    for segment, text in zip(turns_written, turns):
        assert segment.token_ids.tolist() == tiny.tokenizer().encode(text).tolist()
        assert set(segment.logp.tolist()) == {-1.0}


ENDINGS = [
    [ANSWERS],
    [SEARCHES, ANSWERS],
    [SEARCHES, SEARCHES, SEARCHES],
    ["<search>bad</search>"],
    ["nothing", "nothing", "nothing"],
]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
def test_rows_end_at_different_turns_and_only_the_others_continue(num_rows):
    ((group,), script) = play(ENDINGS, num_rows=num_rows)
    assert [r.outcome for r in group.rollouts] == [
        Outcome.ANSWERED,
        Outcome.ANSWERED,
        Outcome.TRUNCATED,
        Outcome.TOOL_ERROR,
        Outcome.MALFORMED,
    ]
    assert [len(r.searches) for r in group.rollouts] == [0, 1, 2, 0, 0]
    assert [r.num_malformed for r in group.rollouts] == [0, 0, 0, 0, 3]
    assert [len(r.policy_texts) for r in group.rollouts] == [1, 2, 3, 1, 3]
    for sample, rollout in enumerate(group.rollouts):
        turns_written = [s for s in rollout.segments if s.source == Source.POLICY]
        assert all((s.logp == -1 - sample).all() for s in turns_written)
    turns = {(s, n) for writers in script.writers for _, s, n in writers}
    assert turns == {
        (s, n) for s, texts in enumerate(ENDINGS) for n in range(len(texts))
    }
    # Rows that have ended read no observation.
    assert sorted(sample for sample, _ in script.read) == [1, 2, 2, 4, 4]
    assert_rows_held([group], script)


@pytest.mark.parametrize("num_rows", [4, 16, 20])
def test_rows_that_pause_together_search_in_one_call_and_read_their_own_results(
    num_rows,
):
    calls = []

    def search(queries):
        calls.append(queries)
        return [(Passage(q, f"{q}\n{'river ' * int(q[-1])}"),) for q in queries]

    batch = [f"{chr(ord('A') + i)}.{i % 4}" for i in range(num_rows)]
    turns = [[f"<search>{query}</search>", ANSWERS] for query in batch]
    assert len({num_tokens(first) for first, _ in turns}) == 1
    ((group,), script) = play(turns, host=make_host(search))
    assert calls == [batch]
    for rollout, query in zip(group.rollouts, batch, strict=True):
        assert query in rollout.segments[2].text
    assert_rows_held([group], script)


@pytest.mark.usefixtures("searches_awaited")
def test_a_turn_is_processed_once_even_next_to_final_turns():
    """Sample 2 takes the slot of sample 0 and is one turn behind sample 1."""
    asks, says = "<search> who </search>", "<answer> who </answer>"
    assert num_tokens(asks) == num_tokens(says)  # so that they pause together
    host, answered = make_host(), []
    read_turns = host.read_turns

    def watched(wave, turns_written, *, final):
        if turns_written:
            turns = sorted(wave[slot].num_turns for slot in turns_written)
            answered.append((final, turns))
        return read_turns(wave, turns_written, final=final)

    host.read_turns = watched
    turns = [[says], [asks, asks, asks], [asks, asks, ANSWERS]]
    ((group,), _) = play(turns, num_rows=2, host=host)
    assert answered == [
        (False, [0, 0]),
        (False, [0, 1]),
        (False, [1]),
        (True, [2]),
        (True, [2]),
    ]
    for rollout, texts in zip(group.rollouts, turns, strict=True):
        assert rollout.policy_texts == tuple(texts)
    assert [len(r.searches) for r in group.rollouts] == [0, 2, 2]


def test_every_question_gets_its_group_with_any_number_of_rows():
    batch, turns = people(5), [[SEARCHES, ANSWERS], [ANSWERS]]
    for num_rows in (1, 3, 4, 16):
        groups, script = play(turns, batch, num_rows=num_rows)
        assert [g.question for g in groups] == batch
        for group in groups:
            for rollout, texts in zip(group.rollouts, turns, strict=True):
                assert rollout.policy_texts == tuple(texts)
                text = rollout.segments[0].text
                assert f"who {group.question.id[1]}?" in text
        assert_rows_held(groups, script)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 64])
@pytest.mark.parametrize("group_size", [1, 2, 5])
def test_each_prompt_is_read_once(num_rows, group_size):
    batch = people(7)
    groups, script = play([[ANSWERS]] * group_size, batch, num_rows=num_rows)
    prompts = [g.rollouts[0].segments[0].token_ids.tolist() for g in groups]
    assert script.prompts == prompts


@pytest.mark.usefixtures("searches_awaited")
def test_a_free_slot_is_refilled_while_other_rows_decode():
    # Sample 0 answers in its first turn; sample 2 gets its slot long before sample 1
    # has ended.
    turns = [[ANSWERS], [LONG_ANSWER], [SEARCHES, ANSWERS]]
    ((group,), script) = play(turns, num_rows=2)
    decoding = [{(s, n) for _, s, n in writers} for writers in script.writers]
    assert decoding[0] == {(0, 0), (1, 0)}
    assert {(1, 0), (2, 0)} in decoding and {(1, 0), (2, 1)} in decoding
    slots = {s: slot for writers in script.writers for slot, s, _ in writers}
    assert slots[2] == slots[0] != slots[1]
    assert_rows_held([group], script)


def test_a_long_rollout_does_not_delay_the_others():
    short = "<answer> city </answer>"
    longest = "a" * 45 + short
    assert num_tokens(longest) >= 10 * num_tokens(short)
    steps = []
    for first in (short, longest):
        _, script = play([[first], *[[short]] * 119], num_rows=4)
        steps.append(sum(script.steps))
    # It adds only its own tokens: the other slots continue.
    assert steps[1] < 1.2 * steps[0]


@pytest.mark.fault(35, "bounded queue")
def test_other_rows_decode_while_a_search_runs():
    script = Script([[SEARCHES, ANSWERS], [LONG_ANSWER]])
    has_ended = threading.Event()
    awaited = []

    def search(queries):
        awaited.append(has_ended.wait(WAIT))
        return find(queries)

    decode = script.decode

    def watched(*args):
        rows = decode(*args)
        if any(
            script.phase[slot] == "paused" for slot, s, _ in script.writers[-1] if s
        ):
            has_ended.set()  # sample 1 has written its whole answer
        return rows

    script.decode = watched
    engine = RolloutEngine(script, make_host(search), num_rows=2, group_size=2)
    (group,) = engine(None, [WHO], jax.random.key(0))
    assert awaited == [True]
    assert [r.outcome for r in group.rollouts] == [Outcome.ANSWERED] * 2
    # After every few tokens it checks whether the search has returned.
    first = num_tokens(SEARCHES)
    assert script.steps[0] == first
    remaining = num_tokens(LONG_ANSWER) - first
    assert remaining > 2 * STEPS_BETWEEN_CHECKS
    assert script.steps[1:3] == [STEPS_BETWEEN_CHECKS] * 2
    assert_rows_held([group], script)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 16])
def test_the_number_of_finished_questions_is_reported(num_rows):
    done = []
    turns = [[ANSWERS], [SEARCHES, ANSWERS]]
    play(turns, people(5), num_rows=num_rows, on_done=done.append)
    assert done == [1, 2, 3, 4, 5]
    groups, _ = play(turns, (), num_rows=num_rows, on_done=done.append)
    assert groups == [] and len(done) == 5


def test_the_last_turn_may_be_the_only_one():
    ((group,), script) = play([[SEARCHES]], host=make_host(max_searches=0))
    assert group.rollouts[0].outcome == Outcome.TRUNCATED
    assert script.read == []


def test_without_a_forced_turn_a_rollout_has_max_searches_turns():
    turns = [[SEARCHES, SEARCHES, ANSWERS], [SEARCHES, ANSWERS, ANSWERS]]
    ((group,), script) = play(turns, host=make_host(forced_final_turn=False))
    first, second = group.rollouts
    assert (first.outcome, len(first.searches)) == (Outcome.TRUNCATED, 2)
    assert (second.outcome, len(second.searches)) == (Outcome.ANSWERED, 1)
    assert [len(r.policy_texts) for r in group.rollouts] == [2, 2]
    assert sorted(sample for sample, _ in script.read) == [0, 1]


@pytest.mark.fault(11, "never cut")
def test_a_prompt_that_is_too_long_is_refused_by_its_questions_id():
    host = make_host()
    engine = RolloutEngine(Script([[ANSWERS]]), host, num_rows=1, group_size=1)
    length = len(engine.prompt(WHO))
    host.limits = dataclasses.replace(host.limits, max_prompt_tokens=length)
    assert len(engine(None, [WHO], jax.random.key(0))) == 1
    host.limits = dataclasses.replace(host.limits, max_prompt_tokens=length - 1)
    with pytest.raises(ValueError, match=f"question q: .*{length} tokens"):
        engine(None, [WHO], jax.random.key(0))


def test_given_messages_open_a_conversation():
    engine = RolloutEngine(
        Script([[ANSWERS]]),
        make_host(),
        num_rows=1,
        group_size=1,
        messages=lambda q: [{"role": "user", "content": f"say {q.id}"}],
    )
    ((rollout,),) = (g.rollouts for g in engine(None, [WHO], jax.random.key(0)))
    assert rollout.segments[0].text == "<|user|>say q<|assistant|>"


def test_segments_agree_with_what_the_device_has_read():
    """This uses the real sampler and rows that end in different ways."""

    def search(queries):
        return [
            None if len(q) % 3 == 0 else p
            for q, p in zip(queries, passages_of(queries))
        ]

    passages_of = tiny.search
    setup = tiny.make_engine(search=search)
    outcomes = set()
    for seed in range(3):
        groups = setup.roll_out(tiny.questions(2), seed=seed)
        rollouts = [r for g in groups for r in g.rollouts]
        lengths = [r.num_tokens for r in rollouts]
        context = setup.sampler.rows.context
        np.testing.assert_array_equal(context.length, lengths)
        assert max(lengths) <= context.cache.k.shape[3]
        outcomes |= {r.outcome for r in rollouts}
    assert outcomes >= {Outcome.ANSWERED, Outcome.TRUNCATED, Outcome.TOOL_ERROR}


def test_rows_without_calls_do_not_wait_for_a_search():
    """The first row's search lasts until all others, one after another, have ended."""
    others_ended, ended = threading.Event(), []

    def search(queries):
        assert others_ended.wait(timeout=20)
        return find(queries)

    host = make_host(search)
    read_turns = host.read_turns

    def watched(wave, turns_written, *, final):
        batch, shown = read_turns(wave, turns_written, final=final)
        ended.extend(turns_written.keys() - batch.keys())
        if len(ended) == 4:
            others_ended.set()
        return batch, shown

    host.read_turns = watched
    turns = [[SEARCHES, ANSWERS], *[[ANSWERS]] * 4]
    ((group,), _) = play(turns, num_rows=2, host=host)
    assert [len(r.searches) for r in group.rollouts] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("cut", [2, 4])
def test_sharded_rows_read_shard_by_shard_and_write_the_same(cut):
    """Each device reads only for its own rows, as the script checks."""
    turns = [[SEARCHES, SEARCHES, ANSWERS], [ANSWERS], [SEARCHES, ANSWERS]]
    expected, _ = play(turns, people(9), num_rows=16)
    script = Script(turns)
    script.num_shards = cut
    engine = RolloutEngine(script, make_host(), num_rows=16, group_size=3)
    groups = engine(None, people(9), jax.random.key(0))
    assert_rows_held(groups, script)
    for group, other in zip(groups, expected, strict=True):
        texts = [r.policy_texts for r in group.rollouts]
        assert texts == [r.policy_texts for r in other.rollouts]


@pytest.mark.parametrize(
    ("pages", "cut"), [(11, 1), (15, 1), (24, 1), (88, 1), (32, 2)]
)
def test_rows_that_share_pages_write_the_same_however_few_pages_there_are(pages, cut):
    """The script checks that each row has room for all it reads and may write."""
    turns = [[SEARCHES, SEARCHES, ANSWERS], [ANSWERS], [SEARCHES, ANSWERS]]
    expected, _ = play(turns, people(9), num_rows=8)
    script = Script(turns)
    script.num_shards, script.page_tokens, script.row_pages = cut, 64, 11
    engine = RolloutEngine(
        script, make_host(), num_rows=8, group_size=3, cache_tokens=pages * 64
    )
    groups = engine(None, people(9), jax.random.key(0))
    assert_rows_held(groups, script)
    for group, other in zip(groups, expected, strict=True):
        assert group.question == other.question
        texts = [r.policy_texts for r in group.rollouts]
        assert texts == [r.policy_texts for r in other.rollouts]
    # If two long rollouts were in one shard and neither could continue, one restarted.
    assert bool(engine.num_restarts) == (pages == 32)


def test_pages_for_just_the_longest_conversation_are_enough():
    """The last turn has the largest allowed length, and no token of room is spare."""
    turns = [[SEARCHES, LONG_ANSWER]]
    longest = len(tiny.tokenizer().encode(LONG_ANSWER))
    expected, _ = play(turns, people(2))
    script = Script(turns, longest)
    script.row_pages = len(tiny.row_of(expected[0].rollouts[0]))
    host = make_host(max_turn_tokens=longest)
    engine = RolloutEngine(
        script, host, num_rows=1, group_size=1, cache_tokens=script.row_pages
    )
    assert_rows_held(engine(None, people(2), jax.random.key(0)), script)


def test_rows_decode_in_order_of_admission_and_at_the_end_by_fewest_turns():
    num_turns = {3: 2, 0: 0, 2: 1, 4: 0}  # slot -> turns, in the order of admission
    order = decoding_order(num_turns, [1], is_draining=False)
    assert order.tolist() == [3, 0, 2, 4, 1]
    order = decoding_order(num_turns, [1], is_draining=True)
    assert order.tolist() == [3, 0, 4, 2, 1]
    order = decoding_order({3: 0, 0: 2, 2: 1, 4: 0}, [1], is_draining=True)
    assert order.tolist() == [3, 4, 2, 0, 1]


def test_a_sampled_token_is_at_most_eight_frames_below_the_call(monkeypatch):
    """Counted are this package's frames on a real stack, not JAX's."""
    stacks = []

    def watched(*args, **settings):
        frames = traceback.extract_stack()[:-1]
        paths = [pathlib.Path(frame.filename) for frame in frames]
        stacks.append([p.name for p in paths if PACKAGE in p.parents])
        return sampling.sample(*args, **settings)

    monkeypatch.setattr(decode, "sample", watched)
    sampler = Sampler(
        tiny.model(),
        make_mesh(devices=jax.devices()[:1]),
        stop_table=token_automaton(("r", "in"), tiny.tokenizer().token_bytes),
        eos_ids=tiny.tokenizer().eos_ids,
        num_slots=200,
        max_turn_tokens=4,
        chunk=16,
        temperature=1.0,
        top_p=1.0,
    )
    limits = dataclasses.replace(tiny.LIMITS, max_turn_tokens=4)
    # More rows than a block, so that the deepest path is taken.
    rollouts = RolloutEngine(
        sampler, tiny.make_host(limits=limits), num_rows=32, group_size=2
    )
    params = rollouts.place_params(tiny.params())
    groups = rollouts(params, tiny.questions(1), jax.random.key(0))
    assert groups[0].rollouts[0].num_policy_tokens
    assert stacks and stacks[0][0] == "scheduler.py" and stacks[0][-1] == "decode.py"
    # The call and all frames below it, including `sample`.
    assert max(map(len, stacks)) + 1 <= 8
    assert sampler.queue_size(32) < 32


def test_a_search_that_wants_question_ids_receives_them():
    pairs = []

    def search(queries, question_ids):
        pairs.extend(zip(queries, question_ids, strict=True))
        return [(Passage(name, f"Title\n{name}"),) for name in question_ids]

    search.wants_question_ids = True
    turns = [[SEARCHES, ANSWERS], [SEARCHES, SEARCHES, ANSWERS]]
    groups, _ = play(turns, people(5), num_rows=4, host=make_host(search))
    for group in groups:
        name = group.question.id
        assert [p.id for r in group.rollouts for p in r.passages] == [name] * 3
    assert len(pairs) == 15 and len({query for query, _ in pairs}) == 1

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rsearch.models.sharding import make_mesh
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.sampling import nucleus, sample
from tests.rollout import tiny
from tests.rollout.paused import ALL, COUNT, IDS, KEY, NAMES, SAME, Paused
from tests.rollout.tiny import log_softmax, sorted_nucleus

V = tiny.tokenizer().vocab_size


jit_nucleus = jax.jit(nucleus)


def kept_ids(logits, top_p):
    kept_logits = jit_nucleus(jnp.asarray(logits, jnp.float32)[None], top_p)[0]
    return set(np.flatnonzero(np.isfinite(kept_logits)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=64, max_size=64), st.integers(1, 99))
def test_the_nucleus_is_the_smallest_set_with_the_probability_mass(parts, percent):
    p = np.array(parts) / sum(parts)
    top_p = percent / 100
    ids = kept_ids(np.log(p), top_p)
    last = min(p[i] for i in ids)
    # It includes all tokens as likely as the least likely one; without these, the mass
    # would be too small.
    assert ids == set(np.flatnonzero(p >= last))
    assert p[list(ids)].sum() >= top_p - 1e-6
    assert p[p > last].sum() < top_p + 1e-6


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.999), st.floats(0.1, 30))
@example(0, 0.999, 30.0)
def test_the_nucleus_equals_the_one_found_by_sorting(seed, top_p, spread):
    logits = spread * np.random.default_rng(seed).normal(size=64).astype(np.float32)
    mass = np.cumsum(np.sort(np.exp(log_softmax(logits)))[::-1])
    if np.abs(mass - top_p).min() < 1e-6:
        return  # rounding decides
    expected = set(np.flatnonzero(np.isfinite(sorted_nucleus(logits, top_p))))
    assert kept_ids(logits, top_p) == expected


@pytest.mark.parametrize(
    "p, top_p, expected",
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, {0}),
        ([0.5, 0.25, 0.125, 0.125], 0.75, {0, 1}),
        ([0.5, 0.25, 0.125, 0.125], 0.8, {0, 1, 2, 3}),  # ties are included together
        ([0.25, 0.25, 0.25, 0.25], 0.1, {0, 1, 2, 3}),
        ([0.125, 0.5, 0.125, 0.25], 0.01, {1}),
    ],
)
def test_the_nucleus_by_hand(p, top_p, expected):
    assert kept_ids(np.log2(p) * np.log(2), top_p) == expected


def test_a_certain_token_is_the_whole_nucleus():
    logits = np.full(64, -1e9, np.float32)
    logits[7] = 0
    assert kept_ids(logits, 0.999) == {7}


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7)])
def test_draw_frequencies_follow_the_distribution(temperature, top_p):
    n = 20_000
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32)
    keys = jax.random.split(jax.random.key(5), n)
    draw = jax.jit(lambda x, k: sample(x, k, temperature=temperature, top_p=top_p))
    tokens, logp = draw(jnp.broadcast_to(jnp.array(logits), (n, 12)), keys)
    expected = log_softmax(logits / temperature)
    if top_p < 1:
        expected = sorted_nucleus(logits, top_p)
        assert 1 < np.isfinite(expected).sum() < 12
    counts = np.bincount(tokens, minlength=12)
    possible = np.isfinite(expected)
    assert counts[~possible].sum() == 0
    fit = scipy.stats.chisquare(counts[possible], n * np.exp(expected[possible]))
    assert fit.pvalue > 0.01
    np.testing.assert_allclose(logp, expected[np.asarray(tokens)], atol=1e-5)


@pytest.fixture(scope="module")
def paused():
    return Paused()


def assert_rows_equal(actual, expected, rows=slice(None)):
    """Check that the contexts and turns of these rows are the same."""
    for x, y in ((actual.context, expected.context), (actual.turn, expected.turn)):
        for name in x._fields:
            if name == "cache":
                for a, b in zip(x.cache, y.cache):
                    a, b = np.asarray(a)[:, rows], np.asarray(b)[:, rows]
                    np.testing.assert_array_equal(a, b)
                continue
            a, b = np.asarray(getattr(x, name)), np.asarray(getattr(y, name))
            np.testing.assert_array_equal(a[rows], b[rows], err_msg=name)


def test_prefill_reads_each_prompt_independently_of_the_others(paused):
    context = paused.prompts()
    np.testing.assert_array_equal(context.length, COUNT)
    for i, n in enumerate(COUNT):
        full = tiny.full_logits(np.pad(IDS[i, :n], (0, 27 - n)))[n - 1]
        np.testing.assert_allclose(context.logits[i], full, atol=1e-5)


def test_admit_gives_each_slot_its_prompt_and_leaves_the_others_unchanged(paused):
    prompts = jax.device_get(paused.prompts())
    old = paused.decode(paused.start())
    before = jax.tree.map(np.array, old)
    # Slot 4 is padding, wherever it occurs.
    rows = paused.admit([3, 4, 0, 4], [2, 0, 2, 1], old)
    assert_rows_equal(rows, before, [1, 2])
    for slot in (3, 0):
        assert rows.context.length[slot] == COUNT[2]
        np.testing.assert_array_equal(rows.context.logits[slot], prompts.logits[2])
        for new, cached in zip(rows.context.cache, prompts.cache):
            np.testing.assert_array_equal(new[:, slot, :, :27], cached[:, 2])


def test_a_row_does_not_depend_on_the_previous_row_in_its_slot(paused):
    fresh = jax.device_get(paused.decode(paused.start()).turn)
    used = paused.decode(paused.admit(range(4), [2, 2, 3, 2]))
    again = paused.decode(paused.admit(range(4), range(4), used))
    for a, b in zip(again.turn, fresh):
        np.testing.assert_array_equal(a, b)


def test_extend_appends_the_given_tokens_and_leaves_other_rows_unchanged(paused):
    before = jax.tree.map(np.array, paused.start())
    tokens = np.random.default_rng(2).integers(0, V, (3, 21)).astype(np.int32)
    # Two of the rows, in any order; slot 4 is padding.
    slots, given_count = np.array([3, 4, 1]), np.array([7, 0, 21], np.int32)
    after = paused.extend(paused.start(), slots, tokens, given_count)
    assert_rows_equal(after, before, [0, 2])
    assert_rows_equal(after._replace(context=before.context), before)
    for slot, row in ((3, 0), (1, 2)):
        n, m = COUNT[slot], given_count[row]
        assert after.context.length[slot] == n + m
        k, old = (np.asarray(x.context.cache.k[:, slot]) for x in (after, before))
        np.testing.assert_array_equal(k[:, :, :n], old[:, :, :n])
        assert (k[:, :, n : n + m] != 0).all()
        assert not k[:, :, n + m :].any()
        uninterrupted = np.concatenate([IDS[slot, :n], tokens[row, :m]])
        full = tiny.full_logits(np.pad(uninterrupted, (0, 48 - n - m)))[n + m - 1]
        np.testing.assert_allclose(after.context.logits[slot], full, atol=1e-5)


def test_extend_without_rows_changes_nothing(paused):
    before = jax.tree.map(np.array, paused.decode(paused.start()))
    nobody, nothing = np.full(3, 4, np.int32), np.zeros((3, 21), np.int32)
    after = paused.extend(paused.decode(paused.start()), nobody, nothing, nothing[:, 0])
    assert_rows_equal(after, before)


def test_rows_that_do_not_decode_stay_unchanged(paused):
    before = jax.tree.map(np.array, paused.start())
    begins = np.array([True, False, False, True])
    after = paused.decode(paused.start(), begins)
    count = np.asarray(after.turn.count)
    np.testing.assert_array_equal(count > 0, begins)
    np.testing.assert_array_equal(after.context.length, COUNT + count)
    assert_rows_equal(after, before, [1, 2])


def test_a_draw_depends_only_on_the_rows_name_and_position(paused):
    def first_tokens(length, names=SAME):
        rows = paused.start()
        context = rows.context._replace(
            logits=jnp.zeros((4, V)), length=jnp.array(length)
        )
        rows = paused.decode(rows._replace(context=context), names=names, max_steps=1)
        return rows.turn.tokens[:, 0].tolist()

    assert len(set(first_tokens([3, 1, 27, 11]))) == 4
    assert len(set(first_tokens([5, 5, 5, 5]))) == 1
    assert len(set(first_tokens([5, 5, 5, 5], NAMES))) == 4
    moved = first_tokens([5, 5, 5, 5], NAMES[::-1])
    assert moved == first_tokens([5, 5, 5, 5], NAMES)[::-1]


def test_a_row_writes_at_most_its_budget(paused):
    budget = np.array([0, 1, 3, 10], np.int32)
    after = paused.decode(paused.start(), budget=budget)
    num_written = np.asarray(after.turn.count)
    assert (num_written <= budget).all() and num_written[1] == 1 and num_written[0] == 0
    assert not np.asarray(after.turn.active).any()
    np.testing.assert_array_equal(after.context.length, COUNT + num_written)
    # Everything after the count is zero.
    behind = np.arange(10)[None] >= num_written[:, None]
    assert not np.asarray(after.turn.tokens)[behind].any()
    assert not np.asarray(after.turn.logp)[behind].any()


@pytest.fixture(scope="module")
def lengths(paused):
    """[4] lengths in tokens of the turns if nothing interrupts them."""
    count = np.array(paused.decode(paused.start()).turn.count)
    assert len(set(count.tolist())) == 4
    return count


@pytest.mark.parametrize("min_finished", [1, 2, 3, 4])
def test_decode_returns_when_enough_turns_have_ended(paused, lengths, min_finished):
    turn = paused.decode(paused.start(), min_finished=min_finished).turn
    steps = np.sort(lengths)[min_finished - 1]
    np.testing.assert_array_equal(turn.count, np.minimum(lengths, steps))
    np.testing.assert_array_equal(turn.active, lengths > steps)


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_decode_returns_after_max_steps(paused, lengths, max_steps):
    turn = paused.decode(paused.start(), max_steps=max_steps).turn
    np.testing.assert_array_equal(turn.count, np.minimum(lengths, max_steps))
    np.testing.assert_array_equal(turn.active, lengths > max_steps)
    assert np.asarray(turn.active).any()


def test_only_turns_that_end_in_the_call_count_as_finished(paused, lengths):
    """A row whose turn had ended before the call does not count."""
    steps = np.sort(lengths)
    rows = paused.decode(paused.start(), min_finished=2)
    rows = paused.decode(rows, ~ALL, min_finished=1)
    np.testing.assert_array_equal(rows.turn.count, np.minimum(lengths, steps[2]))
    rows = paused.decode(rows, ~ALL, min_finished=99)
    np.testing.assert_array_equal(rows.turn.count, lengths)
    # No row is left to decode.
    before = jax.tree.map(np.array, rows)
    assert_rows_equal(paused.decode(rows, ~ALL, min_finished=1), before)


@pytest.mark.parametrize("max_steps, min_finished", [(1, 4), (3, 4), (10, 1)])
def test_an_interrupted_turn_continues_as_if_uninterrupted(
    paused, max_steps, min_finished
):
    uninterrupted = jax.tree.map(np.array, paused.decode(paused.start()))
    rows, begins, calls = paused.start(), ALL, 0
    while calls == 0 or np.asarray(rows.turn.active).any():
        rows, begins = (
            paused.decode(rows, begins, max_steps=max_steps, min_finished=min_finished),
            ~ALL,
        )
        calls += 1
    assert calls > 2
    # Tokens, log-probs, the automaton's state and the cache's contents are compared.
    assert_rows_equal(rows, uninterrupted)


def sampler_of_eight_ids(stop_table, *, max_turn_tokens):
    """Return a greedy sampler with 8 ids, of which 3 ends turns, and this automaton."""
    return tiny.WatchedSampler(
        tiny.model(vocab_size=8),
        make_mesh(devices=jax.devices()[:1]),
        stop_table=np.array(stop_table, np.uint8),
        eos_ids=(3,),
        num_slots=16,
        max_turn_tokens=max_turn_tokens,
        chunk=4,
        temperature=0.0,
        top_p=1.0,
    )


def test_a_stop_string_split_by_an_interruption_still_ends_the_turn():
    """The ids 1 2 are a stop string; the first row is made to write 1, then 2."""
    sampler = sampler_of_eight_ids(
        [[0, 1, 0, 0], [0, 1, 2, 0], [2, 2, 2, 2]], max_turn_tokens=4
    )
    params = tiny.params(vocab_size=8)
    prompts = sampler.prefill(params, np.array([[5, 1], [5, 1]]), np.array([2, 2]))
    rows = sampler.admit(sampler.empty(2), prompts, np.arange(2), np.arange(2))
    begins = np.ones(2, bool)
    names, budget = np.zeros((2, 2), np.uint32), np.full(2, 4, np.int32)
    request = DecodeRequest(names, begins, budget, min_finished=2, max_steps=1)

    def with_logits(rows, tokens):
        logits = jax.nn.one_hot(jnp.array(tokens), 8)
        return rows._replace(context=rows.context._replace(logits=logits))

    for token in (1, 2):
        rows = with_logits(rows, [token, 2])
        rows = sampler.decode(params, rows, KEY, request._replace(begins=begins))
        begins = ~np.ones(2, bool)
    np.testing.assert_array_equal(rows.turn.tokens[:, :2], [[1, 2], [2, 2]])
    np.testing.assert_array_equal(rows.turn.state, [2, 0])
    np.testing.assert_array_equal(rows.turn.active, [False, True])
    # The automaton restarts with the next turn, in which a single 2 is no stop string.
    begins = np.array([True, False])
    rows = with_logits(rows, [2, 2])
    rows = sampler.decode(params, rows, KEY, request._replace(begins=begins))
    np.testing.assert_array_equal(rows.turn.count, [1, 3])
    np.testing.assert_array_equal(rows.turn.tokens[0], [2, 0, 0, 0])
    assert rows.turn.active.all()


def test_ids_beyond_the_tokenizers_vocabulary_neither_stop_nor_end_a_turn():
    """Models pad their embeddings; only the tokenizer's last id does both here."""
    sampler = sampler_of_eight_ids([[0, 0, 0, 1], [1, 1, 1, 1]], max_turn_tokens=2)
    params = tiny.params(vocab_size=8)
    ids = np.array([[5, 1, 2], [5, 1, 2]], np.int32)
    prompts = sampler.prefill(params, ids, np.array([3, 3], np.int32))
    rows = sampler.admit(sampler.empty(2), prompts, np.arange(2), np.arange(2))
    logits = jax.nn.one_hot(jnp.array([6, 3]), 8)
    rows = rows._replace(context=rows.context._replace(logits=logits))
    names, begins = np.zeros((2, 2), np.uint32), np.ones(2, bool)
    request = DecodeRequest(names, begins, np.full(2, 2, np.int32), 2, 2)
    rows = sampler.decode(params, rows, KEY, request)
    np.testing.assert_array_equal(rows.turn.tokens[:, 0], [6, 3])
    np.testing.assert_array_equal(rows.turn.count, [2, 1])


@pytest.mark.fault(18, "vocabulary and embedding")
def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    with pytest.raises(ValueError, match=f"{V}"):
        tiny.make_sampler(vocab_size=V - 1)

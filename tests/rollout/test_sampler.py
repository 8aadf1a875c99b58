import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rsearch.models.sharding import make_mesh
from rsearch.rollout.sampler import nucleus, sample
from tests.rollout import tiny
from tests.rollout.tiny import log_softmax, sorted_nucleus

V = tiny.tokenizer().vocab_size


jit_nucleus = jax.jit(nucleus)


def kept_ids(logits, top_p):
    kept = jit_nucleus(jnp.asarray(logits, jnp.float32)[None], top_p)[0]
    return set(np.flatnonzero(np.isfinite(kept)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=64, max_size=64), st.integers(1, 99))
def test_the_nucleus_is_the_smallest_set_that_has_the_mass(parts, percent):
    p = np.array(parts) / sum(parts)
    top_p = percent / 100
    kept = kept_ids(np.log(p), top_p)
    last = min(p[i] for i in kept)
    # All that is as likely is in; without the last rank the mass would not be enough.
    assert kept == set(np.flatnonzero(p >= last))
    assert p[list(kept)].sum() >= top_p - 1e-6
    assert p[p > last].sum() < top_p + 1e-6


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.999), st.floats(0.1, 30))
@example(0, 0.999, 30.0)
def test_the_nucleus_equals_that_of_a_sort(seed, top_p, spread):
    logits = spread * np.random.default_rng(seed).normal(size=64).astype(np.float32)
    mass = np.cumsum(np.sort(np.exp(log_softmax(logits)))[::-1])
    if np.abs(mass - top_p).min() < 1e-6:
        return  # Rounding decides.
    expected = set(np.flatnonzero(np.isfinite(sorted_nucleus(logits, top_p))))
    assert kept_ids(logits, top_p) == expected


@pytest.mark.parametrize(
    "p, top_p, kept",
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, {0}),
        ([0.5, 0.25, 0.125, 0.125], 0.75, {0, 1}),
        ([0.5, 0.25, 0.125, 0.125], 0.8, {0, 1, 2, 3}),  # ties go in together
        ([0.25, 0.25, 0.25, 0.25], 0.1, {0, 1, 2, 3}),
        ([0.125, 0.5, 0.125, 0.25], 0.01, {1}),
    ],
)
def test_the_nucleus_by_hand(p, top_p, kept):
    assert kept_ids(np.log2(p) * np.log(2), top_p) == kept


def test_one_certain_token_is_its_own_nucleus():
    logits = np.full(64, -1e9, np.float32)
    logits[7] = 0
    assert kept_ids(logits, 0.999) == {7}


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7)])
def test_draws_are_as_frequent_as_the_distribution_says(temperature, top_p):
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
    """(sampler, parameters, rows after prompts of 3, 0, 27 and 11 tokens, ids)."""
    setup = tiny.make_engine(num_rows=4, group_size=1)
    ids = np.random.default_rng(1).integers(0, V, (4, 27)).astype(np.int32)
    count = np.array([3, 1, 27, 11], np.int32)

    def start():
        rows = setup.sampler.prefill(setup.params, ids, count)
        return setup.sampler.spread(rows, np.arange(4))

    return setup.sampler, setup.params, start, ids, count


def test_prefill_reads_each_prompt_as_if_it_were_alone(paused):
    _, _, start, ids, count = paused
    rows = start()
    np.testing.assert_array_equal(rows.length, count)
    for i, n in enumerate(count):
        full = tiny.full_logits(np.pad(ids[i, :n], (0, 27 - n)))[n - 1]
        np.testing.assert_allclose(rows.logits[i], full, atol=1e-5)


def test_spread_gives_each_row_its_questions_prompt(paused):
    sampler, _, start, _, count = paused
    before = jax.tree.map(np.asarray, start())
    rows = sampler.spread(start(), np.array([2, 2, 0, 1]))
    np.testing.assert_array_equal(rows.length, count[[2, 2, 0, 1]])
    np.testing.assert_array_equal(rows.cache.k, before.cache.k[:, [2, 2, 0, 1]])


def test_extend_writes_the_given_tokens_and_leaves_other_rows_alone(paused):
    sampler, params, start, ids, count = paused
    before = jax.tree.map(np.asarray, start())
    given_ids = np.random.default_rng(2).integers(0, V, (4, 21)).astype(np.int32)
    given_count = np.array([0, 21, 1, 7], np.int32)
    after = sampler.extend(params, start(), given_ids, given_count)
    np.testing.assert_array_equal(after.length, count + given_count)
    for i, (n, m) in enumerate(zip(count, given_count)):
        k, old = np.asarray(after.cache.k[:, i]), before.cache.k[:, i]
        np.testing.assert_array_equal(k[:, :, :n], old[:, :, :n])
        assert (k[:, :, n : n + m] != 0).all()
        assert not k[:, :, n + m :].any()
        row = np.concatenate([ids[i, :n], given_ids[i, :m]])
        full = tiny.full_logits(np.pad(row, (0, 48 - n - m)))[n + m - 1]
        np.testing.assert_allclose(after.logits[i], full, atol=1e-5)
    np.testing.assert_array_equal(after.logits[0], before.logits[0])


def test_rows_that_do_not_write_keep_everything(paused):
    sampler, params, start, _, count = paused
    before = jax.tree.map(np.asarray, start())
    keys = jax.random.split(jax.random.key(0), 4)
    active = np.array([True, False, False, True])
    after, turn = sampler.decode(params, start(), keys, active, np.full(4, 10))
    np.testing.assert_array_equal(np.asarray(turn.count) > 0, active)
    np.testing.assert_array_equal(after.length, count + turn.count)
    for i in (1, 2):
        np.testing.assert_array_equal(after.cache.k[:, i], before.cache.k[:, i])
        np.testing.assert_array_equal(after.cache.v[:, i], before.cache.v[:, i])
        np.testing.assert_array_equal(after.logits[i], before.logits[i])


def test_a_draw_follows_from_the_rows_key_and_the_position_alone(paused):
    sampler, params, start, _, _ = paused
    same = jnp.broadcast_to(jax.random.key(3), 4)

    def first_tokens(length, keys=same):
        rows = start()._replace(logits=jnp.zeros((4, V)), length=jnp.array(length))
        _, turn = sampler.decode(params, rows, keys, np.ones(4, bool), np.full(4, 1))
        return turn.tokens[:, 0].tolist()

    assert len(set(first_tokens([3, 1, 27, 11]))) == 4
    assert len(set(first_tokens([5, 5, 5, 5]))) == 1
    other_keys = jax.random.split(same[0], 4)
    assert len(set(first_tokens([5, 5, 5, 5], other_keys))) == 4


def test_a_row_writes_no_more_than_its_budget(paused):
    sampler, params, start, _, count = paused
    keys = jax.random.split(jax.random.key(0), 4)
    budget = np.array([0, 1, 3, 10])
    after, turn = sampler.decode(params, start(), keys, np.ones(4, bool), budget)
    written = np.asarray(turn.count)
    assert (written <= budget).all() and written[1] == 1 and written[0] == 0
    np.testing.assert_array_equal(after.length, count + written)
    # What lies behind the count is empty.
    behind = np.arange(10)[None] >= written[:, None]
    assert not np.asarray(turn.tokens)[behind].any()
    assert not np.asarray(turn.logp)[behind].any()


def test_ids_beyond_the_tokenizers_vocabulary_neither_stop_nor_end_a_turn():
    """Models pad their embeddings; here the last id of the tokenizer does both."""
    sampler = tiny.WatchedSampler(
        tiny.model(vocab_size=8),
        make_mesh(devices=jax.devices()[:1]),
        stop_table=np.array([[0, 0, 0, 1], [1, 1, 1, 1]], np.uint8),
        eos_ids=(3,),
        num_slots=16,
        max_turn_tokens=2,
        chunk=4,
        temperature=0.0,
        top_p=1.0,
    )
    params = tiny.params(vocab_size=8)
    ids = np.array([[5, 1, 2], [5, 1, 2]], np.int32)
    rows = sampler.prefill(params, ids, np.array([3, 3], np.int32))
    rows = rows._replace(logits=jax.nn.one_hot(jnp.array([6, 3]), 8))
    keys = jax.random.split(jax.random.key(0), 2)
    _, turn = sampler.decode(params, rows, keys, np.ones(2, bool), np.full(2, 2))
    np.testing.assert_array_equal(turn.tokens[:, 0], [6, 3])
    np.testing.assert_array_equal(turn.count, [2, 1])


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    with pytest.raises(ValueError, match=f"{V}"):
        tiny.make_sampler(vocab_size=V - 1)

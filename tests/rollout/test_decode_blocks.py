import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models.sharding import make_mesh
from rsearch.rollout import decode
from rsearch.rollout.decode import (
    decode_block_size,
    decode_queue_size,
    order_in_blocks,
)
from tests.rollout import tiny
from tests.rollout.paused import ALL, Paused


@pytest.mark.parametrize(
    ("num_rows", "block", "max_rows"),
    [(8, 8, 8), (300, 300, 300), (17, 16, 16), (64, 16, 16), (768, 16, 48)],
)
def test_a_sixteenth_of_the_rows_decodes_in_whole_blocks(num_rows, block, max_rows):
    assert decode_queue_size(num_rows, block) == max_rows


def test_all_rows_decode_together_unless_a_small_model_runs_on_one_cpu(monkeypatch):
    single = make_mesh(devices=jax.devices()[:1])
    assert decode_block_size(tiny.model(), single, 64) == decode.BLOCK_SIZE
    assert decode_block_size(tiny.model(), single, 7) == 7
    assert decode_block_size(tiny.model(), make_mesh(data=8), 64) == 64
    monkeypatch.setattr(decode, "LARGE_LAYERS", 0)
    assert decode_block_size(tiny.model(), single, 64) == 64


def test_active_rows_come_first_in_queue_order():
    active = jnp.array([True, False, True, True, False])
    queue = np.array([3, 1, 0, 4, 2], np.int32)
    assert order_in_blocks(active, queue, 2).tolist() == [3, 0, 2, 1, 4, 5]
    assert order_in_blocks(active, None, 2).tolist() == [0, 2, 3, 1, 4, 5]
    assert order_in_blocks(active, queue, 5).tolist() == [3, 0, 2, 1, 4]


@pytest.fixture(scope="module")
def all_at_once():
    """All four rows after one turn, decoded together."""
    paused = Paused()
    return jax.device_get(paused.decode(paused.start()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_that_do_not_decode_cost_nothing(all_at_once, monkeypatch, size):
    """A step takes one round per block of active rows, and none without such rows."""
    sizes = []

    class Counted(tiny.WatchedSampler):
        def _step(self, params, rows, *arguments):
            count = jnp.sum(rows.turn.active)
            jax.debug.callback(lambda n: sizes.append(int(n)), count, ordered=True)
            return super()._step(params, rows, *arguments)

    monkeypatch.setattr(decode, "BLOCK_SIZE", size)
    monkeypatch.setattr(tiny, "WatchedSampler", Counted)
    few = Paused()
    actual = few.decode(few.start())
    jax.effects_barrier()
    num_active = [np.sum(all_at_once.turn.count > step) for step in range(10)]
    assert sizes == [min(size, n - i) for n in num_active for i in range(0, n, size)]
    assert len(sizes) < 10 * -(-4 // size)
    np.testing.assert_array_equal(actual.turn.tokens, all_at_once.turn.tokens)
    np.testing.assert_allclose(actual.turn.logp, all_at_once.turn.logp, atol=1e-5)
    np.testing.assert_array_equal(actual.context.length, all_at_once.context.length)


def test_the_first_rows_of_a_queue_end_their_turns_before_others_decode(
    all_at_once, monkeypatch
):
    count = np.array(all_at_once.turn.count)
    monkeypatch.setattr(decode, "BLOCK_SIZE", 1)
    single = Paused()
    queue, num_written = np.array([2, 0, 3, 1], np.int32), np.zeros(4, int)
    rows, begins = single.start(), ALL
    for slot in queue:
        rows, begins = single.decode(rows, begins, min_finished=1, queue=queue), ~ALL
        num_written[slot] = count[slot]
        np.testing.assert_array_equal(rows.turn.count, num_written)
    np.testing.assert_array_equal(rows.turn.tokens, all_at_once.turn.tokens)
    np.testing.assert_allclose(rows.turn.logp, all_at_once.turn.logp, atol=1e-5)

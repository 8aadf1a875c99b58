import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.data.order import epoch_order, hold_out, step_items

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**70)


def stream(num_items, count, seed, num_steps):
    steps = (step_items(num_items, count, seed=seed, step=s) for s in range(num_steps))
    return list(itertools.chain.from_iterable(steps))


@given(sizes, seeds, st.integers(0, 2**40))
def test_an_epoch_is_a_permutation(num_items, seed, epoch):
    order = epoch_order(num_items, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_items))


def test_the_order_of_a_seed_never_changes():
    # Fixed values: a new NumPy version must not reorder the data of a resumed run.
    assert epoch_order(8, seed=0, epoch=0).tolist() == [1, 4, 5, 6, 2, 0, 3, 7]
    assert epoch_order(8, seed=0, epoch=1).tolist() == [7, 6, 2, 3, 1, 0, 4, 5]
    assert step_items(8, 3, seed=7, step=5) == [1, 3, 5]


def test_seeds_and_epochs_give_different_orders():
    pairs = itertools.product([0, 1, 2**32, 2**32 + 1], [0, 1, 2, 2**32])
    orders = [tuple(epoch_order(50, seed=s, epoch=e).tolist()) for s, e in pairs]
    assert len(set(orders)) == len(orders) == 16


def test_an_item_is_equally_likely_at_every_position():
    # 2000 epochs of 5 items: each cell has an expected count of 400, with a standard
    # deviation of about 18.
    counts = np.zeros((5, 5), int)
    for epoch in range(2000):
        counts[epoch_order(5, seed=3, epoch=epoch), np.arange(5)] += 1
    assert np.abs(counts - 400).max() < 80


def test_an_epochs_order_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(5, seed=0, epoch=0)[0] = 1


@given(sizes, sizes, seeds)
def test_the_stream_is_one_permutation_after_another(num_items, count, seed):
    taken = stream(num_items, count, seed, 4 * num_items // count + 1)
    for epoch in range(len(taken) // num_items):
        part = taken[epoch * num_items : (epoch + 1) * num_items]
        assert sorted(part) == list(range(num_items))


@given(sizes, sizes, seeds, st.integers(0, 10**9))
def test_a_step_repeats_no_item_more_than_it_must(num_items, count, seed, step):
    taken = step_items(num_items, count, seed=seed, step=step)
    assert len(taken) == count
    assert all(type(item) is int for item in taken)
    if count <= num_items:
        assert len(set(taken)) == count
    else:
        times = np.bincount(taken, minlength=num_items)
        # A step may span several epochs, the first and the last of them in part.
        assert times.min() >= count // num_items - 1
        assert times.max() <= -(-count // num_items) + 1


@given(st.integers(1, 12), seeds)
def test_the_stream_is_the_plain_order_if_steps_divide_an_epoch(count, seed):
    num_items = 3 * count
    plain = [epoch_order(num_items, seed=seed, epoch=e).tolist() for e in range(3)]
    assert stream(num_items, count, seed, 9) == list(itertools.chain(*plain))


def test_a_step_across_epochs_changes_only_the_start_of_the_new_epoch():
    num_items, count, seed = 100, 30, 5
    taken = stream(num_items, count, seed, 10)
    for epoch in range(3):
        part = taken[epoch * num_items : (epoch + 1) * num_items]
        plain = epoch_order(num_items, seed=seed, epoch=epoch).tolist()
        assert part[count:] == plain[count:]


def test_no_items_are_refused():
    for call in (
        lambda: epoch_order(0, seed=0, epoch=0),
        lambda: step_items(0, 1, seed=0, step=0),
    ):
        with pytest.raises(ValueError, match="num_items=0"):
            call()


@given(st.lists(st.integers(0, 9), max_size=30), st.floats(0.0, 0.99), seeds)
def test_items_with_the_same_key_are_all_learnt_or_all_held_out(keys, share, seed):
    count = max(1, round(share * len(set(keys)))) if share else 0
    if share and count >= len(set(keys)):
        with pytest.raises(ValueError, match=str(share)):
            hold_out(keys, share, seed=seed)
        return
    learnt, held_out = hold_out(keys, share, seed=seed)
    assert sorted(learnt + held_out) == list(range(len(keys)))
    sides = [{keys[i] for i in side} for side in (learnt, held_out)]
    assert sides[0].isdisjoint(sides[1]) and len(sides[1]) == count

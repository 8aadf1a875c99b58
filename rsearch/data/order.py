"""Order the questions of a run as a function of the step, not of a counter.

Item j of the endless stream is position j % n of the permutation of epoch j // n. Step
s takes items s * count ... (s + 1) * count - 1, so a resumed run needs only its step.

A step that straddles two epochs could take a question twice: late in one epoch and
early in the next. `step_items` moves the questions that the step already has to just
after the step, so every epoch is still a permutation and no step repeats a question.
"""

import functools
from collections.abc import Hashable, Sequence

import numpy as np


@functools.lru_cache(maxsize=2)
def epoch_order(num_items: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of one epoch.

    It sorts Philox's raw 64-bit words. Unlike `Generator.permutation`, NumPy keeps that
    stream the same in all versions.

    Args:
        num_items: number of items in an epoch, > 0.
        seed, epoch: >= 0; the order depends only on these and `num_items`.

    Returns:
        [num_items] int64, read-only.
    """
    if num_items <= 0:
        raise ValueError(f"{num_items=}: there is nothing to put in order")
    # With the epoch as the spawn key, (seed, epoch) pairs of any size stay distinct.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    order = np.argsort(bits.random_raw(num_items), kind="stable")
    order.setflags(write=False)
    return order


def step_items(num_items: int, count: int, *, seed: int, step: int) -> list[int]:
    """Return the items of one step.

    Args:
        num_items: number of items in an epoch, > 0.
        count: number of items in a step, > 0.
        seed, step: >= 0.

    Returns:
        [count] indices into the items, distinct unless count > num_items.
    """
    if num_items <= 0:
        raise ValueError(f"{num_items=}: there is nothing to take")
    indices = []
    position = step * count
    while len(indices) < count:
        epoch, start = divmod(position, num_items)
        order = _stream_order(num_items, count, seed=seed, epoch=epoch)
        items = order[start : start + count - len(indices)]
        indices += items.tolist()
        position += len(items)
    return indices


def _stream_order(num_items, count, *, seed, epoch):
    """Return [num_items] an epoch's order, with no repeats in the step it starts in."""
    order = epoch_order(num_items, seed=seed, epoch=epoch)
    if count > num_items or epoch * num_items % count == 0:
        return order
    if num_items >= 2 * count:
        # Only the first `count` items change, and a step needs the last items of the
        # epoch before, which are still as `epoch_order` made them.
        start_epoch = epoch - 1
    else:
        # The last epoch that began together with a step, at most `count` epochs back.
        start_epoch = epoch
        while start_epoch * num_items % count:
            start_epoch -= 1
    order = epoch_order(num_items, seed=seed, epoch=start_epoch)
    for next_epoch in range(start_epoch + 1, epoch + 1):
        previous_items = order[num_items - next_epoch * num_items % count :]
        order = epoch_order(num_items, seed=seed, epoch=next_epoch)
        if len(previous_items):
            order = _without_repeats(order, previous_items, count - len(previous_items))
    return order


def _without_repeats(order, previous_items, num_new):
    """Move the first `num_new` items that are not in `previous_items` to the front."""
    is_new = ~np.isin(order, previous_items)
    front = np.flatnonzero(is_new)[:num_new]
    return np.concatenate([order[front], np.delete(order, front)])


def hold_out(
    keys: Sequence[Hashable], share: float, *, seed: int
) -> tuple[list[int], list[int]]:
    """Return the indices of items to learn from, and of those held out.

    Items with equal keys stay together: a share of the distinct keys is held out, at
    least one key unless the share is 0.

    Raises:
        ValueError: nothing would be left to learn from.
    """
    if not share:
        return list(range(len(keys))), []
    distinct_keys = list(dict.fromkeys(keys))
    count = max(1, round(share * len(distinct_keys)))
    if count >= len(distinct_keys):
        raise ValueError(
            f"holding out {share} of {len(distinct_keys)} leaves none to learn from"
        )
    order = epoch_order(len(distinct_keys), seed=seed, epoch=0)
    held_out_keys = {distinct_keys[i] for i in order[:count]}
    train_indices = [i for i, key in enumerate(keys) if key not in held_out_keys]
    return train_indices, [i for i, key in enumerate(keys) if key in held_out_keys]

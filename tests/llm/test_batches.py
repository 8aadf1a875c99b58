"""Sequences are read in batches of compiled sizes, with little padding."""

import math

import numpy as np
import pytest

from rsearch.llm.batches import CALL_ROWS, batch_sizes, batches_by_length

CHUNK = 4


def test_few_chats_run_in_a_small_batch():
    assert batch_sizes(1) == [1] and batch_sizes(2) == [1, 2]
    assert batch_sizes(16) == [1, 4, 16] and batch_sizes(100) == [1, 2, 7, 25, 100]


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(32, [8, 32]), (8, [8]), (256, [8, 16, 64, 256]), (24, [8, 24]), (2, [2])],
)
def test_every_shard_has_rows_in_each_batch(num_rows, expected):
    assert batch_sizes(num_rows, 8) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3] * 8, [8]),
        ([3] * 9, [1, 8]),  # not 32
        ([3] * 7, [8]),
        ([3] * 30, [32]),
        ([40] + [3] * 8, [1, 8]),  # the others do not wait for the longest
        ([40, 38, 3, 3], [2, 2]),
        ([1], [1]),
        ([], []),
    ],
)
def test_sequences_of_similar_length_are_read_together(lengths, expected):
    device_rows = {size: size for size in (1, 2, 8, 32)}
    batches = batches_by_length(lengths[::-1], device_rows, CHUNK)
    sizes = [min(n for n in device_rows if n >= len(batch)) for batch in batches]
    assert sizes == expected
    order = [len(lengths) - 1 - i for batch in batches for i in batch]
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    assert sorted(order) == list(range(len(lengths)))


def cost(batches, lengths, device_rows):
    def of_one(batch):
        rows = device_rows[min(n for n in device_rows if n >= len(batch))]
        chunks = math.ceil(max(lengths[i] for i in batch) / CHUNK)
        return chunks * (rows + CALL_ROWS)

    return sum(map(of_one, batches))


def partitions(items):
    """Yield every division of items into batches."""
    if not items:
        yield []
        return
    for batches in partitions(items[1:]):
        yield [[items[0]], *batches]
        for i, batch in enumerate(batches):
            yield [*batches[:i], [items[0], *batch], *batches[i + 1 :]]


def test_no_other_batches_cost_less():
    random = np.random.default_rng(0)
    for device_rows in ({1: 1, 2: 2, 8: 8}, {1: 1, 2: 2, 8: 2}, {1: 1, 4: 1, 16: 4}):
        for _ in range(20):
            lengths = random.integers(1, 30, random.integers(1, 7)).tolist()
            chosen = batches_by_length(lengths, device_rows, CHUNK)
            least = min(
                cost(batches, lengths, device_rows)
                for batches in partitions(list(range(len(lengths))))
            )
            assert cost(chosen, lengths, device_rows) == pytest.approx(least)

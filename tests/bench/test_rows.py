"""Rows of a benchmark's results."""

import pytest

from rsearch.bench.comparison import HEADS, Measurement, cells, make_row, with_bound
from rsearch.bench.machine import MachineBounds

MACHINE = MachineBounds(
    "m", 2, flops={"float32": 100.0}, bandwidth=10.0, is_measured=True
)


def test_a_row_is_the_median_with_its_spread():
    row = make_row("decode", "rsearch", "tokens/s", [5.0, 1.0, 9.0, 6.0, 4.0])
    assert (row.low, row.value, row.high, row.ratio) == (1.0, 5.0, 9.0, None)


@pytest.mark.parametrize(("more_is_better", "ratio"), [(True, 2.0), (False, 0.5)])
def test_a_ratio_above_one_is_in_our_favour(more_is_better, ratio):
    row = make_row(
        "c",
        "torch",
        "u",
        [3.0],
        our_values=[6.0, 1.0, 7.0],
        more_is_better=more_is_better,
    )
    assert row.ratio == ratio


@pytest.mark.parametrize(
    ("flops", "moved", "bound", "share"),
    [
        (200.0, 10.0, "FLOPs", 0.5),
        (200.0, 40.0, "bytes", 1.0),
        (0.0, 4.0, "bytes", 0.1),
    ],
)
def test_the_bound_is_the_resource_with_the_longest_least_time(
    flops, moved, bound, share
):
    row = with_bound(Measurement("c", "s", 1.0, "u"), MACHINE, 4.0, (flops, moved))
    assert (row.bound, row.share) == (bound, pytest.approx(share))


def test_the_least_times_of_phases_add_up():
    row = Measurement("c", "s", 1.0, "u")
    row = with_bound(row, MACHINE, 4.0, (0.0, 4.0), (200.0, 10.0))
    assert (row.bound, row.share) == ("FLOPs", pytest.approx(0.6))


def test_an_unknown_machine_has_no_bound():
    unknown = MachineBounds("m", 2, flops={}, bandwidth=None, is_measured=False)
    row = with_bound(Measurement("c", "s", 1.0, "u"), unknown, 4.0, (200.0, 10.0))
    assert (row.bound, row.share) == (None, None)
    assert cells(row)[HEADS.index("bound")] == cells(row)[HEADS.index("share")] == "-"


def test_the_numbers_of_an_accelerators_maker_give_no_bound_for_float32():
    told = MachineBounds(
        "m", 2, flops={"bfloat16": 100.0}, bandwidth=10.0, is_measured=False
    )
    phase, row = (200.0, 10.0), Measurement("c", "s", 1.0, "u")
    assert with_bound(row, told, 4.0, phase, dtype="bfloat16").share == 0.5
    assert with_bound(row, told, 4.0, phase, dtype="float32") == row


def test_a_missing_peer_has_a_row_with_the_reason():
    row = make_row("c", "faiss", "u", "faiss is not installed", our_values=[1.0])
    assert row.value is None and cells(row)[HEADS.index("notes")] == row.missing

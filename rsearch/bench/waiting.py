"""Rollouts that are kept waiting: by searches, and by one that is far longer."""

import statistics

from rsearch.bench.children import Subject, compare
from rsearch.bench.rows import OURS, Bench, Row, row_of
from rsearch.bench.shapes import SHAPES, model_directory

SHAPE = {  # of rollouts, as configs/quickstart.py has them
    "num_prompt": 16,
    "num_new": 18,
    "num_observed": 22,
    "num_turns": 3,
    "dtype": "float32",
}
TIMES_LONGER = 10


def measure_delay(bench: Bench, *, shape, slots, rollouts, milliseconds) -> list[Row]:
    """Tokens a second with every search delayed, beside those without.

    A row that searches waits; its slot is nobody else's. So many slots finish at most
    `slots` rollouts in the time that one waits for its searches and writes, beside as
    many as write at once: `most` tells what share of the tokens a second this leaves,
    whatever is done meanwhile.

    Args:
        bench: see `Bench`.
        shape: a key of SHAPES.
        slots: rollouts open at once.
        rollouts: of each repetition.
        milliseconds: that each search takes.
    """
    settings = SHAPE | {"batch": slots, "num_rollouts": rollouts}
    delayed = f"{OURS}, searches of {milliseconds} ms"
    seconds = milliseconds / 1e3
    changes = {OURS: {}, delayed: {"delay_seconds": seconds}}
    found = _compared(bench, shape, settings, changes)
    case = f"delay, {slots} slots, {rollouts} rollouts"
    rates = {
        name: [one["written"] / one["seconds"] for one in told]
        for name, told in found.items()
    }
    each = SHAPE["num_turns"] * SHAPE["num_new"]
    without = statistics.median(rates[OURS])
    waited = seconds * (SHAPE["num_turns"] - 1)
    writing = each * found[OURS][0]["writing at once"] / without
    most = slots * each / (waited + writing)
    share = statistics.median(rates[delayed]) / without
    counts = {"share of without": share, "most": min(1.0, most / without)}
    return [
        row_of(
            case,
            name,
            "tokens/s",
            values,
            ours=rates[OURS],
            counts=counts if name == delayed else {},
        )
        for name, values in rates.items()
    ]


def measure_straggler(bench: Bench, *, shape, slots, rollouts) -> list[Row]:
    """Seconds of rollouts of which the first is ten times longer, beside none.

    Both have the budgets that the long one needs, as one configuration has.

    Args:
        bench, shape, slots, rollouts: as in `measure_delay`.
    """
    settings = SHAPE | {"batch": slots, "num_rollouts": rollouts}
    longer = f"{OURS}, one {TIMES_LONGER} times longer"
    changes = {
        OURS: {"room": TIMES_LONGER},
        longer: {"times_longer": TIMES_LONGER},
    }
    found = _compared(bench, shape, settings, changes)
    seconds = {name: [one["seconds"] for one in told] for name, told in found.items()}
    case = f"straggler, {slots} slots, {rollouts} rollouts"
    return [
        row_of(case, name, "s", values, ours=seconds[OURS], more_is_better=False)
        for name, values in seconds.items()
    ]


def _compared(bench, shape, settings, changes):
    """This package twice, with and without these settings."""
    with model_directory("", SHAPES[shape]) as directory:
        whole = settings | {"model": directory}
        subjects = {
            name: Subject("rsearch.bench.sampling", whole | own, "make_turns")
            for name, own in changes.items()
        }
        return compare(subjects, bench.repeats)

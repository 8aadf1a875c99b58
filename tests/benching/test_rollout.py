"""What the work of rollouts, at least, is taken to be."""

import pytest

from rsearch.benching import rollout
from rsearch.benching.machine import Machine
from rsearch.benching.rows import OURS, Bench
from rsearch.benching.shapes import SHAPES

TOLD = Machine("m", 2, flops=1e15, bandwidth=1e15, is_measured=False)
DECODE = {"model": "", "batch": 2, "num_prompt": 4, "num_new": 2}
TURNS = {"num_rollouts": 2, "group_size": 1, "spread": 0.0, "num_turns": 2}
ONE = {
    **{"seconds": 1.0, "prefill_seconds": 1.0, "tokens": [[1]], "peak_bytes": 1},
    **{"written": 8, "tokens read": 20},
}


@pytest.mark.parametrize(
    ("dtype", "is_known"), [("bfloat16", True), ("float32", False)]
)
def test_what_an_accelerators_maker_tells_bounds_bfloat16_alone(
    dtype, is_known, monkeypatch
):
    monkeypatch.setattr(rollout, "compare", lambda *_: {OURS: [ONE]})
    settings, spec = DECODE | {"dtype": dtype}, SHAPES["tiny"]
    rows = rollout._decoding(Bench(TOLD), spec, settings)
    settings |= TURNS | {"num_observed": 3}
    rows += rollout._conversing(Bench(TOLD), spec, settings)
    assert len(rows) == 3
    for row in rows:
        assert bool(row.bound) == bool(row.share) == is_known

"""What the work of rollouts, at least, is taken to be."""

import dataclasses
import sys

import pytest

from rsearch.bench import engines, networks, rollout
from rsearch.bench.comparison import OURS, Bench
from rsearch.bench.machine import MachineBounds
from rsearch.bench.networks import SHAPES

TOLD = MachineBounds("m", 2, flops=1e15, bandwidth=1e15, is_measured=False)
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
    monkeypatch.setattr(rollout, "compare", lambda *_, **__: {OURS: [ONE]})
    settings, spec = DECODE | {"dtype": dtype}, SHAPES["tiny"]
    rows = rollout.measure_decode(Bench(TOLD), spec, settings, {})
    settings |= TURNS | {"num_observed": 3}
    rows += rollout.measure_conversations(Bench(TOLD), spec, settings)
    assert len(rows) == 3
    for row in rows:
        assert bool(row.bound) == bool(row.share) == is_known


def test_decoding_is_measured_beside_engines_in_their_own_environments(monkeypatch):
    """They have the same work; one that is not installed has a row that says so."""
    seen = {}

    def compare(subjects, _, *, are_short):
        assert are_short
        seen.update(subjects)
        runs = {name: [ONE] for name in subjects}
        return runs | {"vLLM": "vllm is not installed"}

    monkeypatch.setattr(rollout, "compare", compare)
    pythons = {"ctranslate2": "/ct2/bin/python", "vllm": ""}
    machine = dataclasses.replace(TOLD, bandwidth=1e12, is_measured=True)
    settings, spec = DECODE | {"dtype": "float32"}, SHAPES["tiny"]
    rows = rollout.measure_decode(Bench(machine), spec, settings, pythons)
    assert seen["CTranslate2"].python == "/ct2/bin/python"
    assert seen["vLLM"].python == sys.executable
    for name, subject in seen.items():
        dtype = "bfloat16" if name.endswith("bfloat16") else "float32"
        assert subject.settings == settings | {"dtype": dtype}
        if subject.module == "rsearch.bench.engines":
            assert callable(getattr(engines, subject.make))
    assert "OpenVINO" not in seen
    (missing,) = [row for row in rows if row.subject == "vLLM"]
    assert "vllm is not installed" in str(missing)
    bounds = {row.subject: row.share for row in rows if row.case.startswith("decode")}
    # Half the bytes take half the time at least.
    assert bounds["transformers, bfloat16"] == pytest.approx(bounds["transformers"] / 2)


def test_the_rows_of_an_input_table_that_nobody_reads_are_no_work():
    """A table apart is in `num_params`, and only AdamW touches all of it."""
    tied = SHAPES["tiny"]
    apart = dataclasses.replace(tied, tie_embeddings=False)
    table = 512 * 48
    assert apart.num_params == tied.num_params + table
    sizes = {"batch": 2, "num_prompt": 4, "num_new": 2, "dtype": "float32"}
    steps = {"num_questions": 1, "group_size": 2, "num_prompt": 4, "num_new": 2}
    for spec in (tied, apart):
        # Keys and values of 2 x 2 tokens behind 5, of 16 features and two layers.
        flops, moved = networks.decode_work(spec, **sizes)
        assert flops == 2 * 4 * tied.num_params + 2 * 4 * 2 * 48 * 10
        assert moved == 4 * (2 * tied.num_params + 2 * 2 * 2 * 16 * 10)
        inner = tied.num_params - table
        assert networks.read_work(spec, 3, "bfloat16") == (6 * inner, 2 * inner)
        assert networks.step_work(spec, **steps)[2][1] == 4 * tied.num_params
    more = [networks.update_work(spec, 2, 4, 4) for spec in (tied, apart)]
    assert more[0][0] == more[1][0] == 3 * (2 * 8 * tied.num_params + 8 * 384 * 2)
    assert more[0][1] == 4 * 10 * tied.num_params
    assert more[1][1] == more[0][1] + 4 * 7 * table

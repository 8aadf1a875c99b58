"""The least work of rollouts, and the engines that are compared on it."""

import dataclasses
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rsearch.bench import engines, networks, rollout
from rsearch.bench.comparison import OURS, Bench
from rsearch.bench.machine import MachineBounds
from rsearch.bench.networks import SHAPES

TOLD = MachineBounds(
    "m", 2, flops={"bfloat16": 1e15}, bandwidth=1e15, is_measured=False
)
DECODE = {"model": "", "batch": 2, "num_prompt": 4, "num_new": 2}
TURNS = {"num_rollouts": 2, "group_size": 1, "spread": 0.0, "num_turns": 2}
ONE = {
    **{"seconds": 1.0, "prefill_seconds": 1.0, "tokens": [[1]], "peak_bytes": 1},
    **{"written": 8, "tokens read": 20},
}


@pytest.mark.parametrize(
    ("dtype", "is_known"), [("bfloat16", True), ("float32", False)]
)
def test_the_numbers_of_an_accelerators_maker_bound_only_bfloat16(
    dtype, is_known, monkeypatch
):
    monkeypatch.setattr(rollout, "compare", lambda *_, **__: {OURS: [ONE]})
    settings, spec = DECODE | {"dtype": dtype}, SHAPES["tiny"]
    rows = rollout.measure_decode(Bench(TOLD), spec, settings, {})
    settings |= TURNS | {"num_observed": 3}
    rows += rollout.measure_conversations(Bench(TOLD), spec, settings, {})
    assert len(rows) == 3
    for row in rows:
        assert bool(row.bound) == bool(row.share) == is_known


@pytest.mark.parametrize("work", ("decode", "turns"))
def test_engines_are_measured_in_their_own_environments(work, monkeypatch):
    """All have the same work; one that is not installed has a row that says so."""
    seen = {}

    def compare(subjects, _, *, are_short=False):
        assert are_short == (work == "decode")
        seen.update(subjects)
        runs = {name: [ONE] for name in subjects}
        return runs | {"vLLM": "vllm is not installed"}

    monkeypatch.setattr(rollout, "compare", compare)
    pythons = dict.fromkeys(("ctranslate2", "vllm"), sys.executable)
    pythons["openvino"] = "/ov/bin/python"
    flops = dict.fromkeys(("float32", "bfloat16"), 1e15)
    machine = dataclasses.replace(TOLD, flops=flops, bandwidth=1e12, is_measured=True)
    settings, spec = DECODE | {"dtype": "float32"}, SHAPES["tiny"]
    measure = rollout.measure_decode
    if work == "turns":
        settings |= TURNS | {"num_observed": 3}
        measure = rollout.measure_conversations
    rows = measure(Bench(machine), spec, settings, pythons)
    assert seen["OpenVINO"].python == "/ov/bin/python"
    assert seen["vLLM"].python == sys.executable
    # CTranslate2 keeps no cache between turns.
    assert ("CTranslate2" in seen) == (work == "decode")
    for name, subject in seen.items():
        dtype = "bfloat16" if name.endswith("bfloat16") else "float32"
        assert subject.settings == settings | {"dtype": dtype}
        module = importlib.import_module(subject.module)
        assert callable(getattr(module, subject.make))
    (missing,) = [row for row in rows if row.subject == "vLLM"]
    assert "vllm is not installed" in str(missing)
    bounds = {row.subject: row.share for row in rows if row.case.startswith(work[0])}
    if work == "decode":
        # The least time for half the bytes is half as long.
        assert bounds["transformers, bfloat16"] == pytest.approx(
            bounds["transformers"] / 2
        )


def test_a_peer_is_compared_with_rsearch_in_the_same_dtype(monkeypatch):
    seconds = {OURS: 8.0, f"{OURS}, bfloat16": 2.0, "transformers, bfloat16": 6.0}

    def compare(subjects, *_, **__):
        times = {name: seconds.get(name, 8.0) for name in subjects}
        return {n: [ONE | dict(seconds=s, prefill_seconds=s)] for n, s in times.items()}

    monkeypatch.setattr(rollout, "compare", compare)
    settings, spec = DECODE | {"dtype": "float32"}, SHAPES["tiny"]
    rows = rollout.measure_decode(Bench(TOLD), spec, settings, {})
    rows += rollout.measure_conversations(
        Bench(TOLD), spec, settings | TURNS | {"num_observed": 3}, {}
    )
    ratios = {(row.case, row.subject): row.ratio for row in rows}
    assert len(ratios) == 12
    for (_, subject), ratio in ratios.items():
        expected = {OURS: None, f"{OURS}, bfloat16": 0.25, "transformers": 1.0}
        assert ratio == expected.get(subject, 3.0)


def test_conversations_of_one_turn_read_only_prompts(tmp_path):
    networks.write_random(tmp_path / "model", SHAPES["tiny"])
    sizes = {"batch": 2, "num_prompt": 4, "num_new": 2, "num_observed": 3}
    once = rollout.make_turns(
        model=str(tmp_path / "model"), **sizes, num_turns=1, num_rollouts=2
    )
    numbers = once()
    assert (numbers["written"], numbers["tokens read"]) == (4, 8)
    assert numbers["tokens read per search"] == 0


def test_an_engines_rollouts_are_requests_that_grow_turn_by_turn():
    """Each starts with all that was written and read before; none is sent twice."""
    asked, pending = [], []

    def add(name, ids, num_new):
        asked.append((name, list(ids), num_new))
        pending.append((name, [7] * num_new))

    def step():
        yield pending.pop()  # last first: an engine may choose the order

    sizes = {"num_prompt": 3, "num_new": 2, "num_observed": 4, "spread": 0.0}
    once = engines._repeat_turns(
        add, step, 50, **sizes, num_turns=2, num_rollouts=4, group_size=2
    )
    for repetition in range(2):
        numbers = once()
        assert numbers["written"] == 16 and numbers["seconds"] > 0
        now = asked[8 * repetition :]
        assert len(now) == 8 and {num_new for _, _, num_new in now} == {2}
        firsts = [ids for _, ids, _ in now[:4]]
        assert firsts[0] == firsts[1] != firsts[2] == firsts[3]
        seconds = sorted(ids for _, ids, _ in now[4:])
        assert [len(ids) for ids in seconds] == [3 + 2 + 4] * 4
        assert sorted(firsts) == [ids[:3] for ids in seconds]
        assert all(ids[3:5] == [7, 7] for ids in seconds)
    assert len({name for name, _, _ in asked}) == 16
    assert asked[0][1] != asked[8][1]  # so no cache of the last repetition helps


def test_openvino_computes_with_weights_that_are_not_quantized(monkeypatch):
    """OpenVINO and optimum-intel, which quantizes large models, are faked."""
    exported = {}

    def export(model, path, **settings):
        exported.update(settings)
        (path / "config.json").write_text('{"vocab_size": 9}')

    modules = {
        "openvino_genai": SimpleNamespace(
            SchedulerConfig=SimpleNamespace,
            ContinuousBatchingPipeline=lambda *settings: None,
        ),
        "optimum.exporters.openvino": SimpleNamespace(main_export=export),
        "optimum.intel": SimpleNamespace(OVConfig=dict),
    }
    for name in ("optimum", "optimum.exporters"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    engines.make_openvino_decode(model="m", batch=1, num_prompt=2, num_new=1)
    assert exported["ov_config"] == {"dtype": "fp32"}


def test_a_written_token_attends_to_all_that_was_read_and_written_before():
    """Two turns of 3 tokens, the first after 5 and the second after 5 + 3 + 4."""
    spec = SHAPES["tiny"]
    sizes = {"batch": 2, "num_new": 3, "dtype": "float32"}
    turns = [networks.decode_work(spec, num_prompt=p, **sizes) for p in (5, 12)]
    _, written = networks.turns_work(
        spec,
        {"tokens read": 18, "written": 12},
        **sizes,
        num_prompt=5,
        num_turns=2,
        num_observed=4,
    )
    assert written == tuple(map(sum, zip(*turns)))


def test_rows_of_an_input_embedding_that_are_not_read_are_no_work():
    """A separate embedding is in `num_params`, but only AdamW touches all of it."""
    tied = SHAPES["tiny"]
    apart = dataclasses.replace(tied, tie_embeddings=False)
    table = 512 * 48
    assert apart.num_params == tied.num_params + table
    sizes = {"batch": 2, "num_prompt": 4, "num_new": 2, "dtype": "float32"}
    steps = {"num_questions": 1, "group_size": 2, "num_prompt": 4, "num_new": 2}
    for spec in (tied, apart):
        # 2 x 2 tokens read keys and values of 5, with 16 features in each of 2 layers.
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

"""Small benchmarks of every kind: their reports, not their speed."""

import importlib
import json

import jax
import numpy as np
import pytest

from rsearch.bench import __main__ as bench
from rsearch.bench import growth, networks, rollout, step, train
from rsearch.bench.comparison import Bench
from rsearch.bench.machine import MachineBounds
from rsearch.bench.rollout import ENGINES
from rsearch.setup.rollouts import make_rollouts
from rsearch.stages.policy_update import update_policy

TINY = ("--shape=tiny", "--repeats=1")
MACHINE = MachineBounds(
    "m",
    2,
    flops={"float32": 1e15, "bfloat16": 2e15},
    bandwidth=1e15,
    is_measured=True,
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Run subjects in this process: their own ones (see tests/bench) start slowly."""

    def compare(subjects, repeats, **_):
        actual = {}
        for name, subject in subjects.items():
            module = importlib.import_module(subject.module)
            try:
                once = getattr(module, subject.make)(**subject.settings)
            except ModuleNotFoundError as error:
                actual[name] = f"{error.name} is not installed"
                continue
            actual[name] = [once() | {"peak_bytes": 1} for _ in range(repeats)]
        return actual

    monkeypatch.setattr(bench, "run_in_process", lambda probe: MACHINE)
    for module in (rollout, train, growth):
        monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(
        networks, "run_in_process", lambda function, *args: function(*args)
    )
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def run(tmp_path, capsys, *argv):
    """Run a benchmark that must succeed; return (rows as JSON, printed text)."""
    out = tmp_path / "bench.json"
    assert bench.main([*argv, f"--out={out}"]) == 0
    told = json.loads(out.read_text())
    assert told["machine"]["name"] == "m"
    return told["rows"], capsys.readouterr().out


def test_rollouts_are_compared_with_a_peer(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    cases = "--cases=decode,turns"
    sizes = (
        "--batch=2",
        "--turn_batch=2",
        "--turn_rollouts=4",
        "--turn_group=2",
        "--turn_spread=0",
        "--prompt_tokens=16",
        "--new_tokens=8",
        cases,
    )
    rows, printed = run(
        tmp_path,
        capsys,
        "rollout",
        *TINY,
        *sizes,
        "--turns=3",
        "--observation_tokens=9",
    )
    # Engines that are not installed have a row that says so.
    assert {row["subject"] for row in rows if row["missing"]} <= {*ENGINES.values()}
    named = {
        (row["case"], row["subject"]): row
        for row in rows
        if row["subject"] not in ENGINES.values()
    }
    cases = ("decode, 2 rows", "prefill, 2 rows", "3 turns, 4 rollouts on 2 rows")
    both = [(c, s) for c in cases for s in ("rsearch", "transformers")]
    in_bfloat16 = {(c, f"{s}, bfloat16") for c, s in both}
    assert {*named} == {*both} | in_bfloat16
    for (case, subject), row in named.items():
        assert row["low"] <= row["value"] <= row["high"] and not row["missing"]
        is_rival = subject == "transformers, bfloat16"  # of the same dtype
        ours = named[case, "rsearch, bfloat16" if is_rival else "rsearch"]["value"]
        ratio = None if subject == "rsearch" else pytest.approx(ours / row["value"])
        assert row["ratio"] == ratio and case in printed
    for case in cases:
        row = named[case, "rsearch"]
        assert row["bound"] in ("FLOPs", "bytes") and 0 < row["share"] < 1
    # The same weights and prompts: both write the same tokens.
    assert named[cases[0], "transformers"]["counts"]["equal tokens"] == 1
    counts = named[cases[2], "rsearch"]["counts"]
    assert counts == {"tokens read per search": 9, "tokens read": 2 * 16 + 4 * 2 * 9}
    again = named[cases[2], "transformers"]["counts"]["tokens read"]
    assert again == 4 * (16 + (16 + 8 + 9) + (16 + 2 * 8 + 2 * 9))


@pytest.mark.slow
def test_rollouts_that_wait_are_compared_with_those_that_do_not(tmp_path, capsys):
    sizes = ("--waiting_shape=tiny", "--max_concurrent=4", "--rollouts=8", "--delay=30")
    cases = "--cases=delay,straggler"
    rows, _ = run(tmp_path, capsys, "rollout", *TINY, *sizes, cases)
    plain, delayed, even, longer = rows
    assert [r["subject"] for r in (plain, even)] == ["rsearch", "rsearch"]
    assert delayed["subject"] == "rsearch, searches of 30 ms"
    assert longer["subject"] == "rsearch, one 10 times longer"
    share = delayed["counts"]["share of without"]
    assert share == pytest.approx(1 / delayed["ratio"])
    # Two searches of 30 ms against the time of 3 x 18 tokens at the measured rate.
    alone = 4 * 3 * 18 / plain["value"]
    assert delayed["counts"]["most"] == pytest.approx(alone / (alone + 0.06))
    assert longer["ratio"] == pytest.approx(longer["value"] / even["value"])


def test_updates_are_compared_with_a_peer(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    cases = ("--cases=update,logits", "--vocabulary=600", "--vocabulary_tokens=32")
    sizes = ("--rows=2", "--tokens=16", "--logit_chunk=16")
    rows, _ = run(tmp_path, capsys, "train", *TINY, *cases, *sizes)
    named = {(row["case"], row["subject"]): row for row in rows}
    update, logits = "update, 2 x 16 tokens", "update, 600 ids, 32 tokens"
    peers = ("rsearch", "torch, 1 at once", "torch, 2 at once")
    assert {*named} == {
        *((update, name) for name in peers),
        *((logits, name) for name in ("rsearch", "all logits at once")),
    }
    # The same weights and tokens: loss and gradient are the same.
    for name in ("loss", "grad_norm"):
        told = [named[update, peer]["counts"][name] for peer in peers]
        assert told == pytest.approx([told[0]] * 3, rel=1e-4)
    told = [named[logits, name]["counts"]["loss"] for _, name in [*named][3:]]
    assert told == pytest.approx([told[0]] * 2, rel=1e-5)


def test_whole_steps_are_measured_even_if_the_peer_is_not_installed(tmp_path, capsys):
    sizes = ("--grpo_shape=tiny", "--questions=2", "--group=2", "--new_tokens=5")
    rows, _ = run(tmp_path, capsys, "train", "--repeats=2", "--cases=grpo", *sizes)
    ours, peer = rows
    assert ours["value"] > ours["counts"]["rollouts"] > 0
    assert 0 < ours["share"] < 1 and ours["bound"] in ("FLOPs", "bytes")
    assert peer["subject"] == "google-tunix" and "not installed" in peer["missing"]


@pytest.mark.parametrize(
    ("flops", "is_measured", "says"),
    [
        (
            {"float32": 2e12, "bfloat16": 5e12},
            True,
            "2,000 GFLOP/s in float32, 5,000 GFLOP/s in bfloat16, 30.0 GB/s, measured",
        ),
        (
            {"bfloat16": 2e12},
            False,
            "2,000 GFLOP/s in bfloat16, 30.0 GB/s, as published by its maker",
        ),
        ({}, False, "its bounds are unknown and left out; known devices: TPU v4, "),
    ],
)
def test_the_bounds_of_the_machine_are_described(flops, is_measured, says):
    machine = MachineBounds("m", 2, flops, 3e10 if flops else None, is_measured)
    assert bench.describe_bounds(machine).startswith(says)


SMALL_STEP = {
    "stages": "rl",
    "model.num_layers": 1,
    "rl.questions_per_step": 4,
    "rl.micro_batch": 8,
    "rollout.group_size": 2,
    "retrieval.top_k": 1,
}


def fields_of(values):
    """Return the flags that set these fields."""
    return [f"--config.{name}={value}" for name, value in values.items()]


@pytest.mark.slow
def test_a_step_is_split_into_its_parts(tmp_path, capsys):
    fields = fields_of(SMALL_STEP | {"rollout.max_concurrent": 8})
    rows, _ = run(tmp_path, capsys, "step", "--repeats=1", *fields)
    seconds = {row["case"].rpartition(": ")[2]: row["value"] for row in rows}
    whole, _, search = (seconds.pop(n) for n in ("whole", "tokens written", "search"))
    parts = ("place", "prefill", "decode", "reward", "score", "update", "idle")
    assert tuple(seconds) == parts
    assert sum(seconds.values()) == pytest.approx(whole) and search >= 0
    assert min(seconds[part] for part in ("prefill", "decode", "update")) > 0


@pytest.mark.slow
def test_steps_in_which_only_a_critic_learns_are_not_measured(
    tmp_path, capsys, monkeypatch
):
    numbers = []

    def update(*args, **settings):
        numbers.append(settings["step"])
        return update_policy(*args, **settings)

    monkeypatch.setattr(step, "update_policy", update)
    changes = {"rl.algorithm": "ppo", "critic.pretrain_steps": 1}
    fields = fields_of(SMALL_STEP | changes | {"rollout.max_concurrent": 8})
    run(tmp_path, capsys, "step", "--repeats=1", *fields)
    assert numbers == [1, 2]


def test_a_measured_step_has_as_many_rows_as_in_training(monkeypatch):
    class Made(Exception):
        """Holds the engine, and ends the benchmark before it is used."""

    def make(*args, **settings):
        raise Made(make_rollouts(*args, **settings))

    monkeypatch.setattr(step, "make_rollouts", make)
    with pytest.raises(Made) as made:
        bench.main(["step", *fields_of(SMALL_STEP)])
    (engine,) = made.value.args
    # The recipe's 256 rows are halved while they still hold all 8 rollouts.
    assert engine.num_rows == 16


def test_growth_is_measured_over_sizes(tmp_path, capsys):
    cases = ("--cases=rows", "--rows=2,4", "--contexts=64")
    rows, _ = run(tmp_path, capsys, "growth", *TINY, *cases)
    assert [row["case"] for row in rows] == [
        f"{work}, {size} rows"
        for work in ("prefill", "decode of 32 tokens", "update")
        for size in (2, 4)
    ]
    names = {"exponent of seconds", "exponent of memory"}
    for smaller, larger in zip(rows[::2], rows[1::2]):
        assert smaller["counts"] == {} and {*larger["counts"]} == names
        exponent = np.log2(larger["value"] / smaller["value"])
        assert larger["counts"]["exponent of seconds"] == pytest.approx(
            exponent, abs=0.01
        )
        assert larger["counts"]["exponent of memory"] == 0  # as the fixture sets it


def test_a_commands_memory_does_not_include_that_of_its_parent_process():
    large = bytearray(b"x") * 600_000_000
    del large
    assert growth.measure_command("rsearch.index", "--help")["peak_bytes"] < 500e6


@pytest.mark.slow
def test_a_long_run_is_measured_at_several_steps(tmp_path, capsys):
    sizes = ("--cases=steps", "--steps=64")
    rows, _ = run(tmp_path, capsys, "growth", *sizes)
    assert [row["case"] for row in rows] == [
        f"tiny step, {n} steps done" for n in (4, 8, 16, 32, 64)
    ]
    for row in rows:
        assert 0 < row["value"] < 60 and row["peak_bytes"] > 1e8
    disk = [row["counts"]["MB on disk"] for row in rows]
    assert disk[-1] > disk[0] > 0


def test_a_size_without_a_measurement_has_and_gives_no_exponents(monkeypatch):
    run = {"seconds": 1.0, "prefill_seconds": 1.0, "peak_bytes": 1}

    def compare(subjects, repeats, **_):
        return {n: "none" if "4 rows" in n else [run] for n in subjects}

    monkeypatch.setattr(growth, "compare", compare)
    values = {name: default for name, (default, _) in growth.FLAGS.items()}
    values |= {"shape": "tiny", "cases": "rows", "rows": "2,4,8"}
    rows = growth.measure(lambda: Bench(MACHINE, 1), **values)
    assert [row.missing for row in rows] == ["", "none", ""] * 3
    assert all(row.counts == {} for row in rows)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the first argument must be one of rollout"),
        (["rolout"], "the first argument must be one of rollout"),
        (["rollout", "--repeats=0"], "--repeats=0, expected at least 1"),
        (["rollout", "--delay=-1"], "--delay=-1, expected at least 0"),
        (["rollout", "--turn_group=0"], "--turn_group=0, expected at least 1"),
        (["retrieval", "--batch=0"], "--batch=0, expected at least 1"),
        (["growth", "--contexts=32"], "--contexts=32: expected more than 32 tokens"),
        (["growth", "--steps=31"], "--steps=31, expected at least 32"),
        (["growth", "--devices=2,x"], "--devices=2,x: expected numbers of at least 1"),
        (["growth", "--cases=row"], "--cases=row: must be of rows, context, "),
        (["rollout", "--batch=8,0"], "--batch=8,0: expected numbers of at least 1"),
        (["rollout", "--batch=a"], "--batch=a: expected numbers of at least 1"),
        (
            ["train", "--micro_batch=3"],
            "--rows=8: must be a multiple of --micro_batch=3",
        ),
        (["step", "--out=/no/such/x"], "--out=/no/such/x: there is no directory /no"),
        (["step", "--out=/"], "--out=/ is a directory; name a file in it"),
        (
            ["rollout", "--cases=decoding"],
            "--cases=decoding: must be of decode, turns, delay",
        ),
        (
            ["rollout", "--shape=large"],
            "--shape=large: must be one of smollm2, qwen2.5-1.5b, quickstart, tiny",
        ),
        (["rollout", "--waiting_shape=large"], "--waiting_shape=large: must be one of"),
        (["train", "--grpo_shape=large"], "--grpo_shape=large: must be one of smollm2"),
        (["rollout", "--model=/no/such"], "/no/such/config.json does not exist"),
        (["train", "--model=/no/such"], "/no/such/config.json does not exist"),
        (["train", "--tokens=1"], "--tokens=1, expected at least 2"),
        (
            ["train", "--vocabulary_tokens=1"],
            "--vocabulary_tokens=1, expected at least",
        ),
        (["rollout", "--vllm_python=/no/x"], "--vllm_python=/no/x: there is no such"),
        (["train", "--tunix_python=/no/x"], "--tunix_python=/no/x: there is no such"),
        (["step", "--stage=sft"], "--stage=sft: must be an RL stage: rl"),
        (["rollout", "--dtype=int8"], "--dtype=int8: must be one of float32, bfloat16"),
    ],
)
def test_a_benchmark_refuses_wrong_arguments_before_it_measures(
    argv, says, monkeypatch
):
    def probe(function):
        pytest.fail("the machine was measured first")

    monkeypatch.setattr(bench, "run_in_process", probe)
    with pytest.raises(ValueError, match=says):
        bench.main(argv)

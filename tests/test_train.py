"""rsearch.train: an interrupted run resumes as if nothing had happened."""

import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from rsearch import train
from rsearch.config import recipes as configuration
from rsearch.config.recipes import run_command
from rsearch.hosts import preemption
from rsearch.runtime import checkpoint
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metric_table import GROUPS, describe_metric
from rsearch.runtime.metrics import read_metrics
from tests.llm.test_endpoint import serving
from tests.runtime.test_metrics import summaries
from tests.small_run import (
    ROOT,
    SIZES,
    arguments,
    child_environment,
    config,
    finished,
    quick_compilation,
    run_python,
    without_times,
)

__all__ = ["quick_compilation"]
METHODS = ["protocol", "direct", "rag"]
BRIEF = dict(eval__at_start="false", eval__methods="protocol")


def leaves(workdir, stage, step):
    """Return a checkpoint's {leaf: shape, dtype and digest of its bytes}."""
    return checkpoint.read_manifest(workdir / stage / "checkpoints", step)["leaves"]


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def files(workdir):
    """Return {path: bytes} of a run's files, except the records of its processes."""
    paths = [p for p in sorted(workdir.rglob("*")) if p.is_file()]
    paths = [p for p in paths if p.name not in ("lock", "run.json")]
    return {p.relative_to(workdir): p.read_bytes() for p in paths}


@pytest.fixture
def copy(tmp_path):
    """A copy of the finished run."""
    return pathlib.Path(shutil.copytree(finished(), tmp_path / "run"))


@pytest.mark.fault(83, "code", "checkpoint of another run")
def test_a_run_resumes_with_changed_code_but_not_from_another_runs_checkpoint(
    copy, capsys
):
    record = json.loads((copy / "run.json").read_text())
    assert all(row["start"] == len(record["starts"]) for row in results(copy))
    record["starts"][-1]["code"]["files"]["rewards/form.py"] = "0"
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"rewards/form\.py"):
        train.main(config(), copy, strict=True)
    train.main(config(), copy)
    assert "rewards/form.py" in capsys.readouterr().err
    body = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**body, "run": "beef"}))
    with pytest.raises(ValueError, match=f"{body['run']}.*beef"):
        train.main(config(), copy)


def test_a_run_without_tensorflow_torch_and_pickles_writes_all_of_its_files():
    workdir = finished()
    rows = results(workdir)
    assert [(r["stage"], r["step"], r["method"]) for r in rows] == [
        (stage, step, method)
        for stage, step in (("start", 0), ("sft", 60), ("rl", 3))
        for method in METHODS
    ]
    assert checkpoint.steps(workdir / "sft" / "checkpoints") == [40, 60]
    assert checkpoint.steps(workdir / "rl" / "checkpoints") == [2, 3]
    for stage, steps in (("sft", 60), ("rl", 3)):
        measured = read_metrics(workdir / stage / "metrics.jsonl")
        assert [r["step"] for r in measured] == list(range(steps))
        for row in measured:
            assert all(np.isfinite(value) for value in row.values()), row
        assert list((workdir / stage / "tensorboard").glob("events*"))
        fields = {name for row in measured for name in row} - {"step"}
        assert not {f for f in fields if describe_metric(f)[0] not in GROUPS}
    drawn = {value.tag for _, value in summaries(workdir / "rl")}
    names = ("reward", "advantage", "searches", "policy_tokens")
    assert {f"distribution/{name}" for name in names} <= drawn
    shown = (workdir.parent / "stdout").read_text()
    assert "reward by step" in shown and "<|user|>" in shown
    assert shown.count("world-dev-") >= 3  # the example transcripts


def test_the_policy_learns_from_demonstrations_and_then_searches():
    losses = [r["loss"] for r in read_metrics(finished() / "sft" / "metrics.jsonl")]
    assert losses[-1] < 0.4 * losses[0]
    measured = read_metrics(finished() / "rl" / "metrics.jsonl")
    assert any(r["searches"] > 0 for r in measured)
    assert any(r["groups_with_spread"] > 0 and r["grad_norm"] > 0 for r in measured)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_after_its_first_step_a_stage_compiles_nothing(stage):
    measured = read_metrics(finished() / stage / "metrics.jsonl")
    assert len({r["compiles"] for r in measured}) == 1
    assert measured[0]["compiles"] > 0


@pytest.mark.fault(24, "devices")
def test_a_finished_run_does_nothing_and_returns_the_same_rows(copy, capsys):
    """This process has eight devices, so the checkpoint is sharded differently."""
    before = files(copy)
    assert train.main(config(), copy) == results(finished())
    assert files(copy) == before
    assert "reward by step" in capsys.readouterr().out


def test_a_finished_run_loads_no_model_other_than_the_policy(copy):
    """Without its last checkpoint it loads them, and names one that is missing."""
    asks = {
        "models__judge__source": "/no/judge",
        "overrides": {"rl": {"models": {"writer": {"source": "/no/writer"}}}},
        "models__rewriter__source": "/no/rewriter",
        "rl__memorise_coef": 0.1,
        "rl__memorise_rows": 8,
        "reward": {"evidence_f1": {}},
    }
    changed = config(**asks)
    file = copy / "config.json"
    whole = json.loads(file.read_text())
    whole["config"] = json.loads(configuration.to_json(changed))
    file.write_text(json.dumps(whole))
    assert train.main(changed, copy) == results(finished())
    shutil.rmtree(copy / "rl" / "checkpoints" / "3")
    with pytest.raises(ValueError, match=r"/no/(judge|writer)"):
        train.main(changed, copy)


def test_a_field_without_effect_is_refused_unless_the_run_began_with_it(copy, tmp_path):
    changed = config(rl__gamma=0.5, rl__algorithm="grpo")
    with pytest.raises(ValueError, match=r"config\.rl\.gamma = 0\.5 has no effect"):
        train.main(changed, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    whole = json.loads((copy / "config.json").read_text())
    whole["config"] = json.loads(configuration.to_json(changed))
    (copy / "config.json").write_text(json.dumps(whole))
    assert train.main(changed, copy) == results(finished())


@pytest.mark.fault(8, "table")
def test_a_changed_configuration_is_refused_with_a_line_per_field(copy, capsys):
    before = files(copy)
    changed = arguments(copy, rl__lr=0.5, seed=3)
    assert run_command(train.command, changed) == 2
    message = capsys.readouterr().err
    assert "error:" in message and "Traceback" not in message
    assert "config.rl.lr" in message and "config.seed" in message
    assert files(copy) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--config.rl.lrr=1", "did you mean config.rl.lr"),
        ("--config.rl.micro_batch=3", "config.rl.micro_batch = 3 does not fit"),
        ("--config.world.people=100000", "config.world.people = 100000: at most"),
        ("--config.data.dev=world:test", "'world:test': the world has world:train"),
        ("--config.rollout.context_tokens=60", "context_tokens = 60 is too small"),
        ("--config.protocol.name=none", "must be one of search_r1, r_search"),
        ("--config.model.vocab_size=100", "the model's embedding only 100 rows"),
        (
            "--config.rollout.max_prompt_tokens=3",
            "every held-out prompt is longer than",
        ),
        ("--config.data.train=missing.jsonl", "missing.jsonl: there is no such file"),
        ("--config.retrieval.corpus=c.jsonl", "asks about a world that"),
    ],
)
def test_an_impossible_run_ends_with_one_line_and_code_2(
    tmp_path, capsys, given, message
):
    command = [*arguments(tmp_path / "run"), given]
    name = given.split("=")[0] + "="
    command = [a for a in command[:-1] if not a.startswith(name)] + [given]
    assert run_command(train.command, command) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert told.strip().splitlines()[-1].startswith("error: ")


def run_until(pattern, workdir, **overrides):
    command = ["-m", "tests.interrupted_run", pattern]
    return run_python(*command, *arguments(workdir, **overrides))


def assert_same_as_uninterrupted(workdir):
    for stage, step in (("sft", 60), ("rl", 3)):
        assert leaves(workdir, stage, step) == leaves(finished(), stage, step)
        ours, theirs = (
            without_times(read_metrics(folder / stage / "metrics.jsonl"))
            for folder in (workdir, finished())
        )
        assert ours == theirs
    assert without_times(results(workdir)) == without_times(results(finished()))
    ours, theirs = (
        read_jsonl(folder / "transcripts.jsonl") for folder in (workdir, finished())
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.fault(20, "in a save", "in a rename", "in a deletion")
@pytest.mark.fault(20, "in a journal's append")
@pytest.mark.fault(40, "every stage")
def test_a_run_interrupted_again_and_again_ends_bit_identical(tmp_path):
    """It is killed three times and stopped once, and restarted after each."""
    run = tmp_path / "run"
    settings = {"checkpoint__rl_steps": 3}
    moments = (
        "fsync sft/checkpoints/20$",  # while an old one is deleted
        "appended rl/rollouts-0.journal",  # one of the first step's rollouts has ended
    )
    for moment in moments:
        done = run_until(moment, run, **settings)
        assert done.returncode == -signal.SIGKILL, done.stderr
    done = run_until("SIGTERM@append rl/metrics", run, **settings)
    assert "step 1: 1 rollouts had already finished" in done.stderr
    assert done.returncode == preemption.EXIT_CODE, done.stderr
    assert "Traceback" not in done.stderr and "saved after 1 steps" in done.stderr
    assert len(read_metrics(run / "rl" / "metrics.jsonl")) == 1
    # The rows of steps 2 and 3 are written, but no checkpoint has these steps.
    done = run_until("replace rl/checkpoints/3/manifest.json", run, **settings)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.steps(run / "rl" / "checkpoints") == [1]
    done = run_until("never", run, **settings)
    assert done.returncode == 0, done.stderr
    assert "resumes in" in done.stderr
    assert_same_as_uninterrupted(run)
    assert not list(run.rglob("*.journal"))


MOMENTS = (
    "replace config.json",
    "replace results.json",  # of the first method
    "replace transcripts.jsonl",
    "fsync sft/checkpoints/40/tree$",  # within a save
    "replace sft/checkpoints/20/manifest.json",
    "fsync sft/checkpoints/20$",  # while an old one is deleted
    "appended sft/metrics.jsonl",
    "append rl/metrics.jsonl",
    "appended rl/metrics.jsonl",
    "fsync rl/checkpoints/1/tree/_METADATA",
    "fsync rl/checkpoints/3$",
)


@pytest.mark.fault(20, "in a deletion", "in a rename")
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_this_moment_ends_bit_identical(tmp_path, moment):
    done = run_until(moment, tmp_path / "run")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run_until("never", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert_same_as_uninterrupted(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_times_ends_bit_identical(tmp_path, seed):
    finished()
    rng = random.Random(seed)
    kills = 0
    while kills < 4:
        process = subprocess.Popen(
            [sys.executable, "-m", "rsearch.train", *arguments(tmp_path / "run")],
            cwd=ROOT,
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(rng.uniform(2, 12))
        process.send_signal(signal.SIGKILL)
        kills += 1
        if process.wait() == 0:
            break
    done = run_until("never", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert_same_as_uninterrupted(tmp_path / "run")


EXTEND = """
import sys
from rsearch import train
from tests.small_run import config
brief = dict(stages=("sft",), eval__at_start=False, eval__methods=("protocol",))
for steps in (20, 60):
    run = config(sft__steps=steps, **brief)
    (row,) = train.main(run, sys.argv[1])
    assert row["step"] == steps, row
"""


@pytest.mark.slow
def test_a_stage_extended_by_more_steps_ends_as_if_it_had_them_from_the_start(tmp_path):
    done = run_python("-c", EXTEND, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert leaves(tmp_path / "run", "sft", 60) == leaves(finished(), "sft", 60)
    expected = [r for r in results(finished()) if r["stage"] == "sft"][:1]
    assert without_times(results(tmp_path / "run")) == without_times(expected)


def test_a_stage_with_a_successor_cannot_be_extended(copy, capsys):
    assert run_command(train.command, arguments(copy, sft__steps=80)) == 2
    assert "config.sft.steps" in capsys.readouterr().err


def assert_close(ours, theirs, rtol):
    for row, other in zip(without_times(ours), without_times(theirs), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            np.testing.assert_allclose(
                value, other[name], rtol=rtol, atol=1e-5, err_msg=f"{name} {row}"
            )


@pytest.mark.slow  # tests/test_devices.py shows it for single stages
def test_eight_devices_give_the_metrics_of_one_up_to_rounding(tmp_path):
    mesh = dict(mesh__data=4, mesh__fsdp=2, **BRIEF)
    train.main(config(sft__steps=5, stages=("sft",), **mesh), tmp_path / "sft")
    for stage, workdir in (("sft", "sft"), ("rl", "rl")):
        if stage == "rl":  # from the same parameters: small differences add up
            shutil.copytree(finished(), tmp_path / "rl")
            shutil.rmtree(tmp_path / "rl" / "rl")
            train.main(config(**mesh), tmp_path / "rl")
        ours = read_metrics(tmp_path / workdir / stage / "metrics.jsonl")
        theirs = read_metrics(finished() / stage / "metrics.jsonl")
        assert len(ours) == {"sft": 5, "rl": 3}[stage]
        assert_close(ours, theirs[: len(ours)], rtol=2e-4)


def test_a_stage_of_zero_steps_is_skipped(tmp_path):
    run = config(sft__steps=0, rl__steps=0, **BRIEF)
    rows = train.main(run, tmp_path / "run")
    assert [(r["stage"], r["step"]) for r in rows] == [("sft", 0), ("rl", 0)]
    scores = [{k: r[k] for k in ("em", "tokens", "policy_tokens")} for r in rows]
    assert scores[0] == scores[1]


def test_the_default_workdir_names_what_was_overridden():
    recipe = configuration.load("configs/quickstart.py")

    def name(**overrides):
        changes = {key.replace("__", "."): v for key, v in overrides.items()}
        changed = configuration.apply_overrides(recipe, changes)
        return str(train.default_workdir(recipe, changed))

    assert name() == "runs/quickstart" == name(seed=recipe.seed)
    assert name(seed=1) == "runs/quickstart-seed=1"
    assert name(world__films=7, seed=1) == "runs/quickstart-seed=1-world.films=7"
    # Fields that may change when a run resumes are not in its name.
    assert name(mesh__fsdp=2, rl__steps=99, log_every=3) == "runs/quickstart"
    assert name(rl__micro_batch=8) == "runs/quickstart"
    averaged = name(rl__micro_batch=8, rl__loss_mean="micro_token")
    assert averaged == "runs/quickstart-rl.loss_mean=micro_token-rl.micro_batch=8"
    strange = name(data__train="/a b/../c.jsonl")
    assert strange == "runs/quickstart-data.train=_a_b_.._c.jsonl"
    long = {name(data__train="x" * 300 + end) for end in ("1", "2")}
    assert len(long) == 2 and all(len(label) < 150 for label in long)
    assert name(data__train="x" * 300 + "1", log_every=7) in long
    for bad in ("", ".", "..", "a/b", "/a", "a\nb"):
        with pytest.raises(ValueError, match=f"config.name = {re.escape(repr(bad))}"):
            name(name=bad)


def test_without_a_workdir_the_command_uses_the_default_one(tmp_path, monkeypatch):
    """Its name has the overridden fields."""
    made = []
    monkeypatch.setattr(
        train, "main", lambda config, workdir, **_: made.append(workdir)
    )
    recipe = f"--config={ROOT}/configs/quickstart.py"
    assert run_command(train.command, [recipe, "--config.seed", "3"]) == 0
    assert run_command(train.command, [recipe, "--config.seed=3", "--workdir=w"]) == 0
    assert [str(path) for path in made] == ["runs/quickstart-seed=3", "w"]


def test_training_accepts_a_dict_of_a_recipe_and_dotted_overrides(copy):
    sweep = {"config": "configs/quickstart.py", **SIZES}
    assert train.main(sweep, copy) == results(finished())
    with pytest.raises(ValueError, match=r"did you mean config\.rl\.lr"):
        train.main({**sweep, "rl.lrr": 1.0}, copy)
    with pytest.raises(ValueError, match="needs the recipe"):
        train.main(SIZES, copy)


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([1.0], 60, "█"),
        ([0.0, 1.0], 60, "▁█"),
        ([0.0, 0.5, 1.0], 60, "▁▅█"),
        ([0.01, 0.0], 60, "▁▁"),  # noise is not a collapse
        ([-1.0, 0.0, 1.0], 60, "▁▅█"),
        ([0.0, 2.0, 6.0, 8.0], 2, "▂▇"),  # means 1 and 7 on a scale of 0 to 8
    ],
)
def test_a_sparkline_has_a_fixed_scale(values, width, bars):
    low, high = train.reward_scale(values)
    assert train.sparkline(values, low=low, high=high, width=width) == bars


def test_an_impossible_plan_of_stages_is_refused_before_a_workdir_is_made(tmp_path):
    wrong = config(stages=("sft", "rl"), data__train="stage:curate")
    with pytest.raises(ValueError, match="the run has no such stage; it has sft, rl"):
        train.main(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(77, "refused at the start")
@pytest.mark.parametrize("train_questions", ["world:train", "stage:curate"])
def test_a_refusing_judge_of_a_later_stage_ends_a_run_before_anything_is_loaded(
    tmp_path, capsys, train_questions
):
    with serving(lambda number, body: (404, b"no such model", {})) as endpoint:
        judge = {"source": endpoint.url, "name": "m"}
        overrides = {"data": {"train": train_questions}, "models": {"judge": judge}}
        c = config(
            stages=("curate", "rl"),
            overrides={"rl": overrides | {"reward": {"evidence_f1": {}}}},
        )
        with pytest.raises(ValueError, match=r"models\.judge\.source.*no such model"):
            train.main(c, tmp_path / "run")
    assert len(endpoint.requests) == 1 and "retrieval:" not in capsys.readouterr().err


def test_names_of_a_stages_inputs_do_not_depend_on_which_stages_have_ended():
    """Otherwise a run resumed after a data stage would compare other questions."""
    own = {"rl": {"data": {"train": "stage:curate"}}}
    recipe = config(stages=("curate", "sft", "rl"), overrides=own)
    base = types.SimpleNamespace(config=recipe, inputs={"tokenizer": "t"})

    def named(stage, **inputs):
        setup = types.SimpleNamespace(inputs={"tokenizer": "t"} | inputs)
        return train.stage_inputs(stage, train.PreparedStage(setup, ()), base)

    plain = {"tokenizer": "t", "data.train": "asked"}
    assert named("curate", **{"data.train": "asked"}) == plain
    assert named("sft", **{"data.train": "asked"}) == plain
    chosen = {"tokenizer": "t", "rl.data.train": "chosen"}
    assert named("rl", **{"data.train": "chosen"}) == chosen

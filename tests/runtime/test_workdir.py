"""A run owns its directory, and only the run that created it continues in it."""

import json
import os
import signal
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from rsearch.config import recipes as configs
from rsearch.config.spec import base_fields
from rsearch.runtime.workdir import (
    Workdir,
    check_workdir,
    read_config,
    write_json,
)


@pytest.fixture
def config():
    return configs.apply_overrides(
        configs.load("configs/base.py"),
        {"stages": ("sft", "rl"), "sft.steps": 20, "rl.steps": 10},
    )


def changed(config, **overrides):
    return configs.apply_overrides(
        config, {name.replace("__", "."): value for name, value in overrides.items()}
    )


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_first_start_writes_the_configuration_and_the_next_resumes(tmp_path, config):
    with Workdir(tmp_path / "deep" / "run", config) as first:
        assert not first.is_resumed
        assert first.stage("rl").is_dir()
    assert configs.diff(read_config(tmp_path / "deep" / "run"), config) == []
    before = (tmp_path / "deep" / "run" / "config.json").read_bytes()
    with Workdir(tmp_path / "deep" / "run", config) as second:
        assert second.is_resumed
    assert (tmp_path / "deep" / "run" / "config.json").read_bytes() == before


@pytest.mark.fault(7, "one workdir")
def test_a_second_run_in_a_directory_is_refused_and_names_the_holder(tmp_path, config):
    told = pytest.raises(ValueError, match=f"in use by process {os.getpid()} on ")
    with Workdir(tmp_path, config), told:
        Workdir(tmp_path, config)
    Workdir(tmp_path, config).close()


def test_a_check_finds_what_a_workdir_would_refuse_and_changes_nothing(
    tmp_path, config
):
    run, other = tmp_path / "run", tmp_path / "other"
    check_workdir(run, config)  # a new one
    assert not run.exists()
    Workdir(run, config).close()
    other.mkdir()
    (other / "thesis.txt").write_text("dear")
    before = contents(tmp_path)
    check_workdir(run, config)
    check_workdir(run, changed(config, sft__steps=5), is_reader=True)
    for path, own, told in (
        (other, config, "not a workdir"),
        (other / "thesis.txt", config, "--workdir is a file"),
        (run, changed(config, seed=7), r"config\.seed"),
    ):
        with pytest.raises(ValueError, match=told):
            check_workdir(path, own)
    told = pytest.raises(ValueError, match=f"{run}: in use by process {os.getpid()} ")
    with Workdir(run, config), told:
        check_workdir(run, config)
    Workdir(run, config).close()  # it is not locked
    assert contents(tmp_path) == before


HOLD = """
import sys, time
from rsearch.config import recipes as config
from rsearch.runtime.workdir import Workdir
work = Workdir(sys.argv[1], config.load("configs/base.py"))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.fault(7, "stale lock")
def test_killed_process_leaves_no_lock_behind(tmp_path, capsys):
    base = configs.load("configs/base.py")
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=configs.ROOT)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"in use by process {process.pid} on "):
        Workdir(tmp_path, base)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    message = f"was in use by process {process.pid} on "
    with Workdir(tmp_path, base) as work:
        assert work.is_resumed
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "taken over" in line
    Workdir(tmp_path, base).close()  # a released lock is not reported
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"seed": 0', '"seed": NaN'),
        lambda text: text.replace('"inputs": {', '"inputs": [], "x": {'),
        lambda text: text.replace('"inputs": {', '"inputs": {"x": {}'),
        lambda text: "[" * 100_000,
    ],
)
def test_a_config_json_that_no_run_has_written_is_named(tmp_path, config, change):
    with Workdir(tmp_path / "run", config):
        pass
    file = tmp_path / "run" / "config.json"
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before
    with pytest.raises(ValueError, match=r"config\.json: not the config\.json of a"):
        Workdir(tmp_path / "run", config)


def test_steps_that_are_not_a_number_are_refused(tmp_path, config):
    with Workdir(tmp_path / "run", config) as run:
        run.stage("rl")
        whole = json.loads((run.path / "config.json").read_text())
        whole["config"]["rl"]["steps"] = "x"
        (run.path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"config\.rl\.steps +'x' +[0-9]+"):
        Workdir(tmp_path / "run", config)


@pytest.mark.fault(8, "table")
def test_a_different_configuration_is_refused_with_its_differences(tmp_path, config):
    Workdir(tmp_path, config).close()
    before = contents(tmp_path)
    other = changed(config, seed=config.seed + 7, optim__b1=0.125, log_every=9)
    with pytest.raises(ValueError) as caught:
        Workdir(tmp_path, other)
    rows = [line.split() for line in str(caught.value).splitlines()[1:]]
    assert rows == [
        ["field", "there", "now"],
        ["config.optim.b1", repr(config.optim.b1), "0.125"],
        ["config.seed", str(config.seed), str(config.seed + 7)],
    ]
    after = contents(tmp_path)
    assert after[tmp_path / "config.json"] == before[tmp_path / "config.json"]
    Workdir(tmp_path, config).close()  # the refused start released the lock


@pytest.mark.fault(8, "safe fields")
@pytest.mark.parametrize(
    "name",
    [
        "log_every",
        "checkpoint.rl_steps",
        "checkpoint.keep",
        "eval.examples",
        "eval.max_questions",
        "mesh.fsdp",
        "rl.micro_batch",
        "sft.micro_batch",
        "rollout.max_concurrent",
        "retrieval.cache_size",
    ],
)
def test_a_field_that_does_not_affect_learning_may_change(
    tmp_path, config, name, capsys
):
    Workdir(tmp_path, config).close()
    new = configs.apply_overrides(config, {name: configs.fields(config)[name] + 8})
    Workdir(tmp_path, new).close()
    assert f"config.{name} is now" in capsys.readouterr().err
    assert configs.diff(read_config(tmp_path), new) == []


def test_a_change_of_any_other_field_is_refused(tmp_path, config):
    with Workdir(tmp_path, config) as work:
        work.stage("sft")
        work.stage("rl")
    whole = json.loads(configs.to_json(config))
    # "curate.", since the run has no such stage; steps, since a stage may get more.
    free = ("curate.", "sft.steps", "rl.steps")
    for name in configs.fields(whole):
        field = base_fields().get(name)
        if name.startswith(free) or (field and field.may_change):
            continue
        other = ConfigDict(whole)
        *path, leaf = name.split(".")
        node = other
        for key in path:
            node = node[key]
        with node.ignore_type():
            node[leaf] = ["something else"]
        with pytest.raises(ValueError, match="different configuration"):
            Workdir(tmp_path, other)


@pytest.mark.parametrize(
    "mean",
    [
        {"rl.loss_mean": "micro_token"},
        {"overrides": {"rl": {"rl": {"loss_mean": "micro_token"}}}},
    ],
)
def test_micro_batches_that_the_loss_is_a_mean_of_may_not_change(
    tmp_path, config, mean
):
    begun = configs.apply_overrides(config, mean)
    other = changed(begun, rl__micro_batch=begun.rl.micro_batch // 2)
    Workdir(tmp_path, begun).close()
    Workdir(tmp_path, other).close()  # the stage has not started
    with Workdir(tmp_path, begun) as work:
        work.stage("sft")
        work.stage("rl")
    with pytest.raises(ValueError) as caught:
        Workdir(tmp_path, other)
    for part in ("config.rl.micro_batch  128", "config.rl.loss_mean = 'micro_token'"):
        assert part in str(caught.value)
    Workdir(tmp_path, other, is_reader=True).close()
    Workdir(tmp_path, other, accept=["config.rl.micro_batch"]).close()
    overrides = {"rl": {"rl": {"loss_mean": "micro_token", "micro_batch": 32}}}
    with pytest.raises(ValueError, match=r"overrides\.rl\.rl\.micro_batch changes the"):
        Workdir(tmp_path, changed(other, overrides=overrides))


def test_a_field_that_may_change_may_also_change_where_a_stage_overrides_it(
    tmp_path, config
):
    def overridden(**fields):
        fields = {"mesh": {"fsdp": 2}, "rl": {"micro_batch": 8}} | fields
        return changed(config, overrides={"rl": fields})

    with Workdir(tmp_path, overridden()) as work:
        work.stage("rl")
    Workdir(tmp_path, overridden(mesh={"fsdp": 4})).close()
    Workdir(tmp_path, config).close()
    Workdir(tmp_path, overridden(mesh={}, rl={})).close()
    with pytest.raises(ValueError, match=r"config\.overrides\.rl\.rl\.lr"):
        Workdir(tmp_path, overridden(rl={"lr": 0.5}))


def test_another_stages_mean_does_not_fix_the_micro_batches(tmp_path, config):
    overrides = {"rl_later": {"rl": {"loss_mean": "micro_token"}}}
    begun = changed(config, stages=("rl", "rl_later"), overrides=overrides)
    with Workdir(tmp_path, begun) as work:
        work.stage("rl")
    Workdir(tmp_path, changed(begun, rl__micro_batch=8)).close()


@pytest.mark.fault(8, "safe fields")
def test_a_stage_may_get_more_steps_until_a_later_one_has_started(tmp_path, config):
    with Workdir(tmp_path, config) as work:
        work.stage("sft")
    longer = changed(config, sft__steps=30)
    Workdir(tmp_path, longer).close()
    with pytest.raises(ValueError, match=r"config.sft.steps +30 +20"):
        Workdir(tmp_path, config)  # fewer than before
    with Workdir(tmp_path, longer) as work:
        work.stage("rl")
    with pytest.raises(ValueError, match=r"config.sft.steps +30 +40"):
        Workdir(tmp_path, changed(longer, sft__steps=40))
    Workdir(tmp_path, changed(longer, rl__steps=11)).close()


def test_an_override_of_a_started_stages_steps_may_not_be_removed(tmp_path, config):
    overridden = changed(config, overrides={"rl": {"rl": {"steps": 20}}})
    with Workdir(tmp_path, overridden) as work:
        work.stage("rl")
    for overrides in ({}, {"sft": {"sft": {"lr": 0.5}}}):
        with pytest.raises(ValueError, match=r"config\.overrides\.rl\.rl\.steps +20"):
            Workdir(tmp_path, changed(config, overrides=overrides))


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"config.json": '{"model_type": "llama"}', "model.safetensors": "weights"},
        {"config.json": "{"},
        {"lock": "", "photo.jpg": "x"},
    ],
)
def test_a_directory_with_other_files_is_refused_and_left_unchanged(
    tmp_path, config, files
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"not a workdir|of a workdir"):
        Workdir(tmp_path, config)
    assert contents(tmp_path) == before


@pytest.mark.fault(21, "file in the way")
def test_a_file_in_place_of_the_directory_is_refused(tmp_path, config):
    (tmp_path / "f").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        Workdir(tmp_path / "f", config)


def test_a_start_killed_before_it_wrote_its_configuration_starts_again(
    tmp_path, config
):
    (tmp_path / "lock").write_text("process 1 on elsewhere\n")
    (tmp_path / "config.json.tmp").write_text('{"rsea')
    with Workdir(tmp_path, config) as work:
        assert not work.is_resumed


def test_other_processes_of_a_run_share_its_directory(tmp_path, config):
    with Workdir(tmp_path, config) as first:
        other = Workdir(tmp_path, config, is_primary=False)
        assert other.stage("rl") == first.stage("rl")


def test_json_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, [{"em": 0.5}])
    with pytest.raises(ValueError):
        write_json(path, [{"em": float("nan")}])
    assert json.loads(path.read_text()) == [{"em": 0.5}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        ("rl", {"rl.decay": True}),
        # Its last checkpoint has the weights of an earlier step.
        ("sft", {"sft.keep": "lowest_loss", "sft.validation_share": 0.1}),
    ],
)
def test_a_stage_that_depends_on_its_last_step_gets_no_more_steps(
    tmp_path, config, stage, fields
):
    begun = configs.apply_overrides(config, {"stages": (stage,), **fields})
    with Workdir(tmp_path, begun) as work:
        work.stage(stage)
    field = f"{stage}.steps"
    longer = configs.apply_overrides(begun, {field: begun[field] + 1})
    with pytest.raises(ValueError, match=rf"config\.{stage}\.steps"):
        Workdir(tmp_path, longer)


@pytest.mark.fault(15, "changed", "both fingerprints")
def test_a_changed_input_is_refused_with_both_fingerprints(tmp_path, config):
    Workdir(tmp_path, config, inputs={"data.train": "aaa", "tokenizer": "t"}).close()
    Workdir(tmp_path, config, inputs={"data.train": "aaa", "tokenizer": "t"}).close()
    with pytest.raises(ValueError, match=r"data\.train has changed.* was aaa, now bbb"):
        Workdir(tmp_path, config, inputs={"data.train": "bbb", "tokenizer": "t"})


def inputs_of(folder):
    return json.loads((folder / "config.json").read_text())["inputs"]


def test_a_stage_that_starts_later_also_binds_the_run_to_its_inputs(tmp_path, config):
    with Workdir(tmp_path, config, inputs={"tokenizer": "t"}) as work:
        work.add_inputs({"tokenizer": "t", "rl.data.train": "aaa"})
        assert inputs_of(tmp_path) == {"tokenizer": "t", "rl.data.train": "aaa"}
        before = contents(tmp_path)
        work.add_inputs({"rl.data.train": "aaa"})
        assert contents(tmp_path) == before
    # The next start names fewer inputs at first, and none is forgotten.
    with Workdir(tmp_path, config, inputs={"tokenizer": "t"}) as work:
        assert inputs_of(tmp_path)["rl.data.train"] == "aaa"
        with pytest.raises(
            ValueError, match=r"rl\.data\.train has changed.*aaa, now b"
        ):
            work.add_inputs({"rl.data.train": "bbb", "rl.other": "c"})
        assert (
            contents(tmp_path)[tmp_path / "config.json"]
            == before[tmp_path / "config.json"]
        )
        assert configs.diff(read_config(tmp_path), config) == []


def test_only_the_primary_process_writes_the_inputs_that_all_compare(tmp_path, config):
    with Workdir(tmp_path, config, inputs={"a": "1"}) as work:
        other = Workdir(tmp_path, config, is_primary=False)
        other.add_inputs({"a": "1", "b": "2"})
        assert inputs_of(tmp_path) == {"a": "1"}
        work.add_inputs({"b": "2"})
        with pytest.raises(ValueError, match="b has changed"):
            other.add_inputs({"b": "3"})


def test_a_stage_that_has_not_started_may_still_be_tuned_or_added(tmp_path, config):
    sft = changed(config, stages=("sft",))
    with Workdir(tmp_path, sft) as work:
        work.stage("sft")
    more = changed(config, stages=("sft", "rl"), rl__lr=0.5)
    Workdir(tmp_path, more).close()
    assert read_config(tmp_path)["stages"] == ["sft", "rl"]
    with pytest.raises(ValueError, match=r"config\.sft\.lr"):
        Workdir(tmp_path, changed(more, sft__lr=0.5))
    with pytest.raises(ValueError, match=r"config\.stages"):
        Workdir(tmp_path, changed(more, stages=("rl",)))


def test_an_evaluation_leaves_the_configuration_of_a_run_unchanged(tmp_path, config):
    with Workdir(tmp_path, config) as work:
        work.stage("rl")
    before = contents(tmp_path)[tmp_path / "config.json"]
    other = changed(config, rl__steps=1, eval__max_questions=3)
    Workdir(tmp_path, other, is_reader=True).close()
    assert contents(tmp_path)[tmp_path / "config.json"] == before
    with pytest.raises(ValueError, match=r"config\.seed"):
        Workdir(tmp_path, changed(config, seed=99), is_reader=True)


def test_an_evaluation_refers_to_the_command_that_accepts_changes(tmp_path, config):
    Workdir(tmp_path, config, inputs={"code:x": "old"}).close()
    with pytest.raises(ValueError, match=r"code:x .*--accept of rsearch\.train$"):
        Workdir(tmp_path, config, inputs={"code:x": "new"}, is_reader=True)


@pytest.mark.fault(8, "accepted by name")
def test_a_change_is_accepted_by_name(config, tmp_path, capsys):
    run, inputs = tmp_path / "run", {"data.train": "old", "index": "same"}
    Workdir(run, config, inputs=inputs).close()
    (run / "rl").mkdir()
    own, now = changed(config, rl__lr=0.5), inputs | {"data.train": "new"}
    before = (run / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"--accept=config\.rl\.lr:"):
        Workdir(run, own, inputs=now)
    with pytest.raises(ValueError, match=r"was old, now new; .*--accept=data\.train$"):
        Workdir(run, own, inputs=now, accept=("config.rl.lr",))
    assert (run / "config.json").read_bytes() == before
    both = ("config.rl.lr", "data.train")
    check_workdir(run, own, accept=both)
    Workdir(run, own, inputs=now, accept=both).close()
    message = capsys.readouterr().err
    assert "data.train has changed: its fingerprint was old, now new" in message
    assert "config.rl.lr is now 0.5" in message
    Workdir(run, own, inputs=now).close()  # the changes now belong to the run


def forget(run, *names):
    """Rewrite config.json as a version without these fields would have written it."""
    body = json.loads((run / "config.json").read_text())
    for name in names:
        *sections, leaf = name.split(".")
        node = body["config"]
        for section in sections:
            node = node[section]
        del node[leaf]
    write_json(run / "config.json", body)


def test_a_run_from_before_a_field_was_added_resumes_with_its_default(
    tmp_path, config, capsys
):
    Workdir(tmp_path, config).close()
    added = ("protocol.tools", "retrieval.engine", "rl.dual_clip", "critic")
    forget(tmp_path, *added)
    before = (tmp_path / "config.json").read_bytes()
    check_workdir(tmp_path, config)
    with Workdir(tmp_path, config) as again:
        assert again.is_resumed
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "config.json").read_bytes() == before
    assert configs.diff(read_config(tmp_path), config) == []
    tuned = changed(config, retrieval__engine="mine:find", rl__dual_clip=3.0)
    (tmp_path / "rl").mkdir()
    with pytest.raises(ValueError, match="holds a run with a different") as caught:
        Workdir(tmp_path, tuned)
    for name in ("retrieval.engine", "rl.dual_clip"):
        assert f"config.{name}" in str(caught.value)
    assert "protocol.tools" not in str(caught.value)


def test_terms_and_overrides_of_a_run_are_not_filled_with_defaults(tmp_path, config):
    run_config = changed(config, reward={"answer_f1": {}}, overrides={"rl": {}})
    Workdir(tmp_path, run_config).close()
    assert read_config(tmp_path)["reward"] == {"answer_f1": {}}


@pytest.mark.fault(72, "an older run")
def test_weights_whose_samples_an_earlier_version_recorded_are_recognised(
    tmp_path, config
):
    full = "a.safetensors 12 xxh3:{}, b.safetensors 34 xxh3:{}"
    sampled = {"model.source": "a.safetensors 12, b.safetensors 34"}
    now = {"model.source": full.format("a" * 32, "b" * 32), "model.source.config": "c"}
    Workdir(tmp_path, config, inputs=sampled).close()
    other = {"model.source": now["model.source"].replace(" 34 ", " 35 ")}
    with pytest.raises(ValueError, match=r"model\.source has changed"):
        Workdir(tmp_path, config, inputs=other)
    Workdir(tmp_path, config, inputs=now, is_reader=True).close()
    assert inputs_of(tmp_path) == sampled
    with Workdir(tmp_path, config, inputs=now) as work:
        assert inputs_of(tmp_path) == now
        work.add_inputs(now)
    # From now on every byte counts.
    with pytest.raises(ValueError, match=r"model\.source has changed"):
        changed_bytes = {"model.source": full.format("a" * 32, "c" * 32)}
        Workdir(tmp_path, config, inputs=changed_bytes)

"""Sweeps: their trials, and how these are run, stopped and resumed."""

import errno
import importlib.util
import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from rsearch.config.recipes import parse_command_line, run_command
from rsearch.config.stage_plan import stage_configs
from rsearch.hosts.preemption import SIGNALS
from rsearch.runtime.children import GPU_MEMORY
from tests.small_run import arguments, run_python

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "launch" / "sweep.py"
RECIPE = "configs/quickstart.py"
TRIALS = sorted((ROOT / "launch").glob("*.trials"))

_spec = importlib.util.spec_from_file_location("sweep", SCRIPT)
sweep = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sweep)

# Stands in for rsearch.train: logs its arguments. With seed 4 it fails the first time,
# with seed 5 it is stopped twice, and with seed 6 it is killed.
FAKE_TRAIN = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
words = sys.argv[2:]
with open(folder / "asked", "a") as file:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    print(gpus, os.environ.get("JAX_PLATFORMS"), *words, file=file)
with open(folder / "memory", "a") as file:
    print(os.environ.get("XLA_CLIENT_MEM_FRACTION"), file=file)
print("seen", words)
pathlib.Path(words[-1].removeprefix("--workdir=")).mkdir(parents=True, exist_ok=True)
before = (folder / "asked").read_text().count("config.seed=4")
if "--config.seed=6" in words:
    os.kill(os.getpid(), 9)
if "--config.seed=5" in words:
    sys.exit(75 if (folder / "asked").read_text().count("config.seed=5") < 3 else 0)
sys.exit(7 if "--config.seed=4" in words and before < 2 else 0)
"""


@pytest.fixture
def run_sweep(tmp_path, monkeypatch):
    """A function that runs a sweep; returns (exit code, calls logged, comparisons)."""
    compared = []
    monkeypatch.setattr(sweep.compare, "main", lambda argv: compared.append(argv))
    real = sweep.train_command

    def command(trial, out, **settings):
        words = real(trial, out, **settings)[3:]
        return [sys.executable, "-c", FAKE_TRAIN, str(tmp_path), *words]

    monkeypatch.setattr(sweep, "train_command", command)

    def run(*argv):
        compared.clear()
        asked = tmp_path / "asked"
        before = asked.read_text().count("\n") if asked.exists() else 0
        code = run_command(sweep.main, [*argv, f"--out={tmp_path / 'out'}"])
        lines = asked.read_text().splitlines() if asked.exists() else []
        return code, lines[before:], list(compared)

    before = {name: signal.getsignal(name) for name in SIGNALS}
    yield run
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1,2", ["1", "2"]),
        ("1, 2 ", ["1", "2"]),
        ("(1, 2),(3,)", ["(1, 2)", "(3,)"]),
        ("{'a': [1, 2]}, {}", ["{'a': [1, 2]}", "{}"]),
        ("'a,b','c)'", ["a,b", "c)"]),
        ("('a', 'b'),{'a': 'b'}", ["('a', 'b')", "{'a': 'b'}"]),
        ("'',x", ["", "x"]),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(text, values):
    assert sweep.split_values("--config.x", text) == values


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "an empty value"),
        ("1,", "an empty value"),
        ("1,2,1", "given twice"),
        ("(1", "no ) at the end"),
        ("(1]", "']' closes nothing"),
        ("1)", "')' closes nothing"),
        ("'a", "no ' at the end"),
    ],
)
def test_values_that_cannot_be_split_are_refused(text, wrong):
    with pytest.raises(ValueError, match=r"--config\.x=") as error:
        sweep.split_values("--config.x", text)
    assert wrong in str(error.value)


def test_a_grid_has_a_trial_for_each_combination():
    axes, rest = sweep.split_axes(
        ["--out=x", "--config.rl.lr=1e-4,3e-4", "--config.seed", "0,1"]
    )
    assert rest == ["--out=x"]
    trials = sweep.expand(axes, sweep.read_trials(""), RECIPE)
    assert [t.name for t in trials] == [
        "rl.lr=1e-4-seed=0",
        "rl.lr=1e-4-seed=1",
        "rl.lr=3e-4-seed=0",
        "rl.lr=3e-4-seed=1",
    ]
    assert trials[1].words == (
        f"--config={RECIPE}",
        "--config.rl.lr=1e-4",
        "--config.seed=1",
    )


def test_a_list_is_crossed_with_the_grid_and_may_name_recipes(tmp_path):
    path = tmp_path / "trials"
    path.write_text(
        "# the two modes\n\n"
        "--config=configs/rag_r1.py:tiny,sq\n"
        "--config=configs/rag_r1.py:tiny,mq --config.rl.lr=1e-4  # slower\n"
        "--config.protocol.direct='Say: {question}'\n"
    )
    trials = sweep.expand(
        [("--config.seed", ["0", "1"])], sweep.read_trials(path), RECIPE
    )
    assert [t.name for t in trials[::2]] == [
        "rag_r1_tiny_sq-seed=0",
        "rag_r1_tiny_mq-rl.lr=1e-4-seed=0",
        "protocol.direct=Say_question_-seed=0",
    ]
    assert trials[5].words == (
        f"--config={RECIPE}",
        "--config.protocol.direct=Say: {question}",
        "--config.seed=1",
    )


def test_a_field_with_one_value_is_not_in_a_trials_name():
    axes, _ = sweep.split_axes(["--config.rl.steps=5", "--config.seed=0,1"])
    trials = sweep.expand(axes, sweep.read_trials(""), RECIPE)
    assert [t.name for t in trials] == ["seed=0", "seed=1"]
    assert all("--config.rl.steps=5" in t.words for t in trials)
    assert sweep.expand(axes[:1], sweep.read_trials(""), RECIPE)[0].name == "trial"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("rl.lr=1", "is written as --config.FIELD=VALUE"),
        ("--workdir=x", "is written as --config.FIELD=VALUE"),
        ("--config.seed 3", "is written as --config.FIELD=VALUE"),
        ("--config.seed", "needs a value"),
        ("--config.seed='1", "No closing quotation"),
        ("--config.name=\udcff", "can't decode byte 0xff"),
    ],
)
def test_a_bad_line_of_a_list_is_named(tmp_path, line, wrong):
    path = tmp_path / "trials"
    text = f"--config.seed=1\n{line}\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="trials:2: ") as error:
        sweep.read_trials(path)
    assert type(error.value) is ValueError and wrong in str(error.value)


@pytest.mark.fault(7, "trial twice", "conflicting overrides")
def test_trials_of_the_same_name_and_fields_set_twice_are_refused(tmp_path, capsys):
    path = tmp_path / "trials"
    path.write_text("--config.seed=1\n--config.seed=1\n")
    common = [f"--config={RECIPE}", f"--out={tmp_path}", f"--trials={path}"]
    for more, wrong in (
        ([], "trials:2: a second trial named seed=1, after"),
        (["--config.seed=1,2"], "trials:1: --config.seed is also set on the command"),
        (["--config.seed=1", "--config.seed=2"], "is given twice; write --config.seed"),
        (["--at_once=0"], "--at_once=0: must be 1 or more"),
    ):
        assert run_command(sweep.main, [*common, *more]) == 2
        assert wrong in capsys.readouterr().err
    assert run_command(sweep.main, [f"--out={tmp_path}", "--config.seed=1"]) == 2
    assert "--config=... is missing" in capsys.readouterr().err


@pytest.mark.fault(42, "killed for memory")
def test_a_killed_trial_is_reported_with_the_usual_cause(run_sweep, capsys):
    code, asked, compared = run_sweep(f"--config={RECIPE}", "--config.seed=6,1")
    assert (code, len(asked), len(compared)) == (1, 2, 1)
    message = "seed=6: exit code -9, killed, usually for lack of memory, see "
    assert message in capsys.readouterr().err


@pytest.mark.fault(21, "full")
def test_a_full_disk_does_not_end_the_sweep(run_sweep, monkeypatch, capsys):
    def refuse(path, row):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(sweep, "append_jsonl", refuse)
        code, asked, _ = run_sweep(f"--config={RECIPE}", "--config.seed=1,2")
    assert (code, len(asked)) == (0, 2)
    assert "sweep.jsonl" in capsys.readouterr().err
    assert len(run_sweep(f"--config={RECIPE}", "--config.seed=1,2")[1]) == 2


def test_every_trial_is_checked_before_any_starts(run_sweep, tmp_path, capsys):
    for field, wrong in (
        ("--config.rl.lr=1e-4,-1", "rl.lr=-1: config.rl.lr"),
        ("--config.rl.lrr=1e-4", "trial: unknown field config.rl.lrr"),
        ("--config.protocol.name=serch_r1", "config.protocol.name = 'serch_r1'"),
    ):
        code, asked, _ = run_sweep(f"--config={RECIPE}", field)
        assert (code, asked) == (2, [])
        assert wrong in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_trials_share_the_gpus_that_the_sweep_was_given(run_sweep, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-7a")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    sweep_ = [f"--config={RECIPE}", "--config.seed=1,2,3", "--gpus_each=1"]
    _, asked, _ = run_sweep(*sweep_, "--at_once=3")
    given = {tuple(line.split()[:2]) for line in asked}
    assert given == {("4", "cuda"), ("5", "cuda"), ("GPU-7a", "cuda")}
    code, asked, _ = run_sweep(*sweep_, "--at_once=4")
    assert (code, asked) == (2, [])
    assert (
        "need 4 GPUs, but CUDA_VISIBLE_DEVICES=4, 5,GPU-7a" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("how", "own", "share"),
    [
        (["--at_once=1"], {}, "0.920"),
        (["--at_once=9"], {}, "0.460"),  # of which only two exist
        (["--at_once=2", "--gpus_each=1"], {}, "0.920"),
        (["--at_once=2"], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "None"),
    ],
)
def test_trials_on_one_gpu_share_its_memory(
    run_sweep, tmp_path, monkeypatch, how, own, share
):
    for name in ("CUDA_VISIBLE_DEVICES", *GPU_MEMORY):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    run_sweep(f"--config={RECIPE}", "--config.seed=1,2", *how)
    assert (tmp_path / "memory").read_text().splitlines() == [share] * 2


def test_trials_are_run_once_and_failed_ones_again(
    run_sweep, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sweep_ = [f"--config={RECIPE}", "--config.seed=1,2,4"]
    code, asked, compared = run_sweep(*sweep_, "--at_once=2", "--gpus_each=2")
    assert code == 1
    assert len(asked) == 3 and {line.split()[0] for line in asked} == {"0,1", "2,3"}
    out = tmp_path / "out"
    assert compared == [[str(out / "seed=1"), str(out / "seed=2")]]
    assert f"--workdir={out / 'seed=4'}" in " ".join(asked)
    said = capsys.readouterr().err
    assert "seed=4 FAILS" in said and f"see {out / 'seed=4'}.log" in said
    assert "seen" in (out / "seed=4.log").read_text()
    code, asked, compared = run_sweep(*sweep_, "--group")
    assert code == 0 and len(asked) == 1 and "seed=4" in asked[0]
    assert asked[0].startswith("None ")
    (argv,) = compared
    assert argv == [*(str(out / f"seed={n}") for n in (1, 2, 4)), "--group"]
    assert run_sweep(*sweep_)[1] == []
    (argv,) = run_sweep(*sweep_, "--allow=normalize")[2]
    assert argv[-1] == "--allow=normalize"
    assert run_sweep(*sweep_, "--allow=normalise")[::2] == (2, [])


def test_a_trial_whose_run_was_deleted_is_run_again(run_sweep, tmp_path):
    sweep_ = [f"--config={RECIPE}", "--config.seed=1,2"]
    run_sweep(*sweep_)
    (tmp_path / "out" / "seed=2").rmdir()
    code, asked, compared = run_sweep(*sweep_)
    assert code == 0 and len(asked) == 1 and "--config.seed=2" in asked[0]
    assert len(compared[0]) == 2


def test_a_command_is_one_line_even_if_a_value_has_several(capsys):
    text = "it's\nof '\n' lines: {question}"
    sweep_ = [f"--config={RECIPE}", "--out=x", f'--config.protocol.direct="{text}"']
    assert sweep.main([*sweep_, "--commands"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = 'python() { printf "%s\\0" "$@"; }; '
    done = subprocess.run(["bash", "-c", told + line], stdout=subprocess.PIPE)
    assert f"--config.protocol.direct={text}" in done.stdout.decode().split("\0")


def test_a_stopped_trial_is_resumed(run_sweep, tmp_path, capsys):
    code, asked, _ = run_sweep(f"--config={RECIPE}", "--config.seed=5,7")
    assert code == 0
    assert [words.count("config.seed=5") for words in asked] == [1, 0, 1, 1]
    assert "was stopped; it is resumed later" in capsys.readouterr().err


def test_the_record_distinguishes_a_changed_trial_from_the_old_one(run_sweep, tmp_path):
    run_sweep(f"--config={RECIPE}", "--config.seed=1")
    _, asked, _ = run_sweep(f"--config={RECIPE}", "--config.seed=2")
    assert len(asked) == 1
    rows = (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()
    assert [json.loads(row)["exit_code"] for row in rows] == [0, 0]


def test_the_flags_dry_run_and_commands_run_nothing(
    run_sweep, tmp_path, capsys, monkeypatch
):
    sweep_ = [f"--config={RECIPE}", "--config.seed=1,2"]
    code, asked, _ = run_sweep(*sweep_, "--dry_run")
    assert (code, asked) == (0, []) and not (tmp_path / "out").exists()
    assert "seed=2" in capsys.readouterr().out
    monkeypatch.undo()
    assert sweep.main([*sweep_, "--out=a b", "--commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line) for line in lines] == [
        [
            *("python", "-m", "rsearch.train", f"--config={RECIPE}"),
            *(f"--config.seed={n}", f"--workdir=a b/seed={n}"),
        ]
        for n in (1, 2)
    ]


def sweep_of_two(folder, before):
    """Start a sweep with {signal: handler}; return its process and its trials' ids."""
    program = folder / "program.py"
    program.write_text(
        f"import importlib.util, sys, time\n"
        f"spec = importlib.util.spec_from_file_location('sweep', {str(SCRIPT)!r})\n"
        f"sweep = importlib.util.module_from_spec(spec)\n"
        f"spec.loader.exec_module(sweep)\n"
        f"wait = 'import os, time; print(os.getpid(), flush=True); time.sleep(99)'\n"
        f"sweep.train_command = lambda trial, out: [sys.executable, '-c', wait]\n"
        f"trials = [sweep.Trial('a', ()), sweep.Trial('b', ())]\n"
        f"out = sweep.pathlib.Path({str(folder)!r})\n"
        f"try:\n"
        f"    sweep.run_trials(trials, out, at_once=2)\n"
        f"except KeyboardInterrupt:\n"
        f"    sys.exit(130)\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    process = subprocess.Popen(
        [sys.executable, program],
        env=environment,
        preexec_fn=lambda: [signal.signal(*pair) for pair in before.items()],
    )
    logs = [folder / "a.log", folder / "b.log"]
    deadline = time.monotonic() + 60
    while not all(log.exists() and log.read_text() for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, [int(log.read_text().split()[0]) for log in logs]


LEFT_BY_SHELLS = (signal.SIG_DFL, signal.SIG_IGN)
# With SIGTERM in the test of nohup below, they cover three signals and both handlers
# that a shell leaves for SIGINT. All pairs together are slow.
FAST = {(signal.SIGINT, signal.SIG_IGN), (signal.SIGHUP, signal.SIG_DFL)}


@pytest.mark.parametrize(
    ("how", "before"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(SIGNALS, LEFT_BY_SHELLS)
    ],
    ids=lambda value: value.name,
)
def test_running_trials_are_stopped_with_the_sweep(tmp_path, how, before):
    """On a real process, as a shell starts it in the foreground or the background."""
    handlers = {signal.SIGINT: before, signal.SIGHUP: signal.SIG_DFL}
    process, trials = sweep_of_two(tmp_path, handlers)
    process.send_signal(how)
    assert process.wait(timeout=60) == 130
    for trial in trials:
        with pytest.raises(ProcessLookupError):
            os.kill(trial, 0)
    assert not (tmp_path / sweep.RECORD).exists()


def test_two_signals_together_stop_all_running_trials(tmp_path):
    """As when a terminal is closed: from its shell, and from the kernel."""
    process, trials = sweep_of_two(tmp_path, {signal.SIGHUP: signal.SIG_DFL})
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    # If the second signal comes late, the sweep does not wait for its trials to end.
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{trial}").exists() for trial in trials):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sweep_under_nohup_outlives_its_terminal(tmp_path):
    process, _ = sweep_of_two(tmp_path, {signal.SIGHUP: signal.SIG_IGN})
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130


def test_two_spellings_of_a_value_are_one_trial(tmp_path, capsys):
    argv = [f"--config={RECIPE}", f"--out={tmp_path}", "--config.rl.lr=1e-4,0.0001"]
    assert run_command(sweep.main, argv) == 2
    wrong = "rl.lr=0.0001: the same configuration as rl.lr=1e-4"
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize("path", TRIALS, ids=lambda p: p.name)
def test_the_trials_listed_in_the_project_are_valid(path):
    trials = sweep.expand([], sweep.read_trials(path), None)
    sweep.check_trials(trials)
    assert len(trials) == len(path.read_text().split("\n--config=")) - 1


def test_the_unmasked_trial_has_a_baseline_that_differs_only_in_the_mask():
    trials = sweep.expand(
        [], sweep.read_trials(ROOT / "launch" / "ablations.trials"), None
    )
    unmasked = "--config.rl.mask_retrieved=False"
    (trial,) = (t for t in trials if unmasked in t.words)
    masked = tuple(word for word in trial.words if word != unmasked)
    assert sum(t.words == masked for t in trials) == 1


@pytest.mark.parametrize("name", ["systems", "ablations"])
def test_every_listed_trial_has_prompts_that_its_small_model_can_read(name):
    trials = sweep.expand(
        [], sweep.read_trials(ROOT / "launch" / f"{name}.trials"), None
    )
    for trial in trials:
        config, _ = parse_command_line(list(trial.words), flags={})
        for stage, own in stage_configs(config):
            prompt = (own.protocol.system or "") + own.protocol.instruction
            assert len(prompt.split()) <= 2, f"{trial.words}, {stage}: {prompt}"


@pytest.mark.slow
def test_a_sweep_of_real_runs_ends_with_their_table(tmp_path):
    out = tmp_path / "out"
    small = [w for w in arguments("") if not w.startswith("--workdir")]
    command = [SCRIPT, *small, f"--out={out}", "--at_once=2", "--group"]
    command.append("--config.seed=0,1")
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "small" in line]
    assert len(rows) == 1 and "\u00b1" in rows[0].replace("+-", "\u00b1")
    assert {p.name for p in out.iterdir()} == {
        *("seed=0", "seed=0.log", "seed=1", "seed=1.log", "sweep.jsonl")
    }

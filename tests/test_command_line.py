"""A command takes what is right, and says in one line what is not."""

import subprocess
import sys

import pytest

from rsearch.config import recipes as configs
from rsearch.runtime.held import LostDirectoryError

BASE = configs.load("configs/base.py")


def parse(*argv, **flags):
    flags = flags or {"workdir": (configs.REQUIRED, "where"), "steps": (3, "count")}
    return configs.parse_command_line(argv, flags=flags)


def test_command_line_gives_configuration_and_flags():
    config, flags = parse(
        "--config=configs/base.py",
        "--config.rl.lr=0.5",
        "--config.seed",
        "4",
        "--workdir=w",
        "--steps=5",
        "--steps=6",
        "--print_config",
    )
    assert (config.rl.lr, config.seed) == (0.5, 4)
    assert flags == {"workdir": "w", "steps": 6, "print_config": True}


@pytest.mark.fault(2, "misspelt --config", "unknown flag")
@pytest.mark.parametrize(
    "argv, message",
    [
        (["--config=configs/base.py"], "--workdir=... is missing"),
        (["--workdir=w"], "--config=... is missing"),
        (["--wrokdir=w"], "unknown flag --wrokdir; did you mean --workdir?"),
        (["--conifg.seed=1"], "unknown flag --conifg.seed; did you mean --config?"),
        (["--steps=x"], "--steps = 'x': expected int"),
        (["--workdir"], "--workdir needs a value"),
        (["w"], "unexpected argument 'w'"),
        (["--config.sede=1"], "did you mean config.seed?"),
        (["--config.seed=1", "--config.seed=2"], "conflicting overrides"),
    ],
)
def test_bad_command_line_is_refused(argv, message):
    full = [
        flag
        for flag in ("--config=configs/base.py", "--workdir=w")
        if "missing" not in message or flag in argv
    ]
    with pytest.raises(ValueError) as caught:
        parse(*[f for f in full if f not in argv], *argv)
    assert message in str(caught.value)


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--workdir" in out and "--config.FIELD=VALUE" in out


def test_positional_arguments_are_required_in_order():
    flags = {"json": (False, "as JSON")}
    actual = configs.parse_flags(["a.jsonl", "--json"], flags=flags, positional=("f",))
    assert actual == {"json": True, "f": "a.jsonl"}
    with pytest.raises(ValueError, match="f is missing"):
        configs.parse_flags([], flags=flags, positional=("f",))


# Exit codes


@pytest.mark.fault(82, "exit code")
def test_faults_of_users_and_ours_are_told_apart(capsys):
    def wrong_value(argv):
        configs.apply_overrides(BASE, {"sede": 1})

    def no_file(argv):
        open("/nonexistent/file")  # noqa: SIM115

    def ours(argv):
        raise ValueError("raised outside rsearch")

    def interrupted(argv):
        raise KeyboardInterrupt

    def lost(argv):
        raise LostDirectoryError("its directory")

    assert configs.run_command(lambda argv: None, []) == 0
    assert configs.run_command(wrong_value, []) == 2
    assert configs.run_command(no_file, []) == 2
    assert configs.run_command(interrupted, []) == 130
    assert configs.run_command(lost, []) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: unknown field config.sede; did you mean config.seed?"
    assert lines[1] == "error: No such file or directory: /nonexistent/file"
    with pytest.raises(ValueError, match="outside"):
        configs.run_command(ours, [])


COMMAND = """
import sys
from rsearch.config import recipes as config

def main(argv):
    c, flags = config.parse_command_line(argv, flags={})
    config.validate(c)
    print("valid")

code = config.run_command(main)
assert "jax" not in sys.modules, "validated before anything could compile"
sys.exit(code)
"""


@pytest.mark.fault(1, "exit 2 in one line")
@pytest.mark.fault(2, "exit 2")
@pytest.mark.parametrize(
    "override, message",
    [
        ("--config.rl.stepz=1", "unknown field config.rl.stepz"),
        ("--config.seed=one", "config.seed = 'one': expected int"),
        ("--config.rollout.top_p=2", "config.rollout.top_p = 2.0: must be"),
        ("--confg.seed=1", "unknown flag --confg.seed; did you mean --config?"),
    ],
)
def test_process_ends_with_code_2_and_one_line(override, message):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--config=configs/base.py", override],
        cwd=configs.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")

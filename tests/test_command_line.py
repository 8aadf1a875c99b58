"""A command accepts correct arguments and names a wrong one in one line."""

import io
import subprocess
import sys
import time

import jax
import pytest

from rsearch.config import recipes as configs
from rsearch.runtime import console
from rsearch.runtime.run_directory import LostDirectoryError

BASE = configs.load("configs/base.py")


def parse(*argv, **flags):
    flags = flags or {"workdir": (configs.REQUIRED, "where"), "steps": (3, "count")}
    return configs.parse_command_line(argv, flags=flags)


def test_a_command_line_gives_the_configuration_and_flags():
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
    expected = {"config": "configs/base.py", "print_config": True}
    assert flags == expected | {"workdir": "w", "steps": 6}


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
        (["--workdir="], "--workdir is empty"),
        (["w"], "unexpected argument 'w'"),
        (["--config.sede=1"], "did you mean config.seed?"),
        (["--config.seed=1", "--config.seed=2"], "conflicting overrides"),
    ],
)
def test_a_bad_command_line_is_refused(argv, message):
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


def test_the_last_positional_argument_may_have_several_values():
    def files_of(*argv):
        return configs.parse_flags(argv, flags={}, positional=("out", "f..."))

    assert files_of("x", "a") == {"out": "x", "f": ["a"]}
    assert files_of("x", "a", "b", "c") == {"out": "x", "f": ["a", "b", "c"]}
    with pytest.raises(ValueError, match="f is missing"):
        files_of("x")
    # What a shell makes of "$UNSET" must not be read as the working directory.
    for argv, name in ((("", "a"), "out"), (("x", ""), "f"), (("x", "a", ""), "f")):
        with pytest.raises(ValueError, match=f"^{name} is empty"):
            files_of(*argv)


@pytest.mark.fault(86, "colon in a config path", "home in a path")
def test_a_path_may_contain_colons_and_a_tilde(tmp_path, monkeypatch):
    recipe = (configs.ROOT / "configs" / "search_r1.py").read_text()
    folder = tmp_path / "with:colon" / "x.py:y"
    folder.mkdir(parents=True)
    (folder / "z.py").write_text(recipe)
    (folder.parent / "x.py").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (folder / "z.py", "~/with:colon/x.py:y/z.py"):
        assert configs.load(f"{path}").rl.algorithm == "ppo"
        assert configs.load(f"{path}:grpo").rl.algorithm == "grpo"
    missing = f"{tmp_path}/with:colon/x.py:y/gone.py"
    with pytest.raises(ValueError, match="with:colon"):
        configs.load(f"{missing}:grpo")
    _, flags = parse("--config=configs/base.py", "--workdir=~/run")
    assert flags["workdir"] == str(tmp_path / "run")
    flags = configs.parse_flags(["~", "--a=~/b"], flags={"a": ("", "")}, positional="f")
    assert flags == {"f": str(tmp_path), "a": f"{tmp_path}/b"}


# Exit codes


@pytest.mark.fault(86, "encoding of the output")
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_command_succeeds_with_any_encoding_of_the_output(monkeypatch, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    error = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", error)

    def work(argv):
        console.table("▁▂ 漢", ("a", "▁"), [("漢", 1.0)])
        console.note("▁▂")
        print("\udcff", "▁")

    assert configs.run_command(work, []) == 0
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    assert "\\u2581\\u2582 \\u6f22" in lines[0] and lines[-1] == "\\udcff \\u2581"
    assert len({len(line) for line in lines[1:-1]}) == 1  # columns are aligned
    assert b"\\u2581\\u2582" in error.buffer.getvalue()


CLOSED = """
import os, sys
from rsearch.config import recipes
from rsearch.runtime import console

def work(argv):
    console.table("t", ("a",), [("b",)])
    console.note("n")
    print("p", sys.stdin.read())
    file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    os.write(1, b"of a library")
    os.write(2, b"of a library")
    os.close(file)

sys.exit(recipes.run_command(work, []))
"""


@pytest.mark.fault(86, "closed streams")
def test_text_for_closed_streams_does_not_end_up_in_a_runs_files(tmp_path):
    file = tmp_path / "file"
    words = [sys.executable, "-c", CLOSED, str(file)]
    shell = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *words]
    done = subprocess.run(shell, cwd=configs.ROOT, timeout=120)
    assert (done.returncode, file.read_bytes()) == (0, b"")


@pytest.mark.fault(82, "exit code")
def test_errors_of_users_and_bugs_are_told_apart(capsys):
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

    def full(argv):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def internal(argv):
        raise jax.errors.JaxRuntimeError("INTERNAL: RESOURCE_EXHAUSTED")

    assert configs.run_command(lambda argv: None, []) == 0
    assert configs.run_command(wrong_value, []) == 2
    assert configs.run_command(no_file, []) == 2
    assert configs.run_command(interrupted, []) == 130
    assert configs.run_command(lost, []) == 3
    assert configs.run_command(full, []) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: unknown field config.sede; did you mean config.seed?"
    assert lines[1] == "error: No such file or directory: /nonexistent/file"
    assert "config.rollout.max_concurrent" in lines[-1]
    with pytest.raises(ValueError, match="outside"):
        configs.run_command(ours, [])
    with pytest.raises(jax.errors.JaxRuntimeError):
        configs.run_command(internal, [])


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
        (
            "--config.rl.learning_rate=1",
            "unknown field config.rl.learning_rate; --print_config prints all fields",
        ),
        ("--config.reward=a:b", "config.reward = 'a:b': expected {name: {setting: "),
        ("--config.seed=one", "config.seed = 'one': expected int"),
        ("--config.rollout.top_p=2", "config.rollout.top_p = 2.0: must be"),
        ("--confg.seed=1", "unknown flag --confg.seed; did you mean --config?"),
    ],
)
def test_a_wrong_argument_ends_the_process_with_code_2_and_one_line(override, message):
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


INTERRUPTED = """
import threading, time
from rsearch.config import recipes as config

def main(argv):
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("begun")
    raise KeyboardInterrupt

config.run_command(main)
"""


def test_a_process_ends_after_control_c_although_a_thread_still_runs():
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=configs.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - started < 60
    assert (done.returncode, done.stdout) == (130, "begun\n")
    assert done.stderr == "interrupted\n"


def test_help_about_a_recipe_runs_its_file_once(tmp_path, capsys):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        '"""My recipe."""\n'
        "from configs import base, variants\n"
        "print('executed')\n"
        "def get_config(variant=''):\n"
        "    variants.parse_variant(variant, flags=('tiny',))\n"
        "    return base.get_config()\n"
    )
    with pytest.raises(SystemExit):
        parse("--help", f"--config={recipe}")
    printed = capsys.readouterr().out
    assert printed.count("executed") == 1
    assert "My recipe." in printed and "variants: any of tiny" in printed


def test_help_is_printed_before_slow_libraries_are_imported():
    """For a command that needs no arrays, and for one that needs all of them."""
    program = """
import contextlib, importlib, io, sys
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    importlib.import_module("rsearch." + sys.argv[1]).main(["--help"])
print(*sorted({"jax", "orbax", "scann", "tensorflow", "torch"} & sys.modules.keys()))
"""
    for name, expected in (("compare", ""), ("evaluate", "jax")):
        done = subprocess.run(
            [sys.executable, "-c", program, name],
            cwd=configs.ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr

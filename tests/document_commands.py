"""The commands of the documents, as bash splits them into words."""

import ast
import importlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from rsearch.__main__ import COMMANDS
from tests.small_run import ROOT

PAGES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))
TEXTS = ("README.md", "BUILD.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES)
DOCUMENTS = (*TEXTS, "configs/FIDELITY.md")
CONFIGS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").glob("*.py"))
MACHINES = {  # pattern that names the devices of a command: how many they are
    r"--devices=(\d+)": int,
    r"--topology=[^:\s]+:([\dx]+)": lambda size: math.prod(map(int, size.split("x"))),
    r"--topology=[ah]\d+x(\d+)": int,
    r"--type=v5p-(\d+)": lambda cores: int(cores) // 2,
    r"sbatch --nodes=(\d+)": lambda nodes: int(nodes) * 8,
    r"(rsearch.export .*--workdir=/shared)": lambda _: 1,  # on the machine `fill`
    r"(--config.rollout.devices=)": lambda _: 8,  # of a node that it divides in two
}
# No program is found, so each command only prints its words.
SHELL = """
command_not_found_handle() { printf '%s\\0' "$@" '' >&3; }
exec 3>&1 >/dev/null
for text; do (eval "$text"); done
"""
VARIABLES = {"DATA": "data", "MODELS": "models", "SLURM_ARRAY_TASK_ID": "1"}
INLINE = re.compile(r"(?:python|bash|sbatch|rsearch) .*")
RECIPE = "configs/search_r1.py:tiny"  # recipe of runs/search_r1 and of "--config=..."
FILLED = {
    "--config=...": f"--config={RECIPE}",
    "--config.FIELD=A,B": "--config.seed=1,2",
    "--workdir=...": "--workdir=runs/search_r1",
    "--encoder=...": "--encoder=hashed",
}

# Commands whose function is not `main` of the module with their name.
MAINS = {
    "rsearch": ("rsearch.__main__", "main"),
    "rsearch.bench": ("rsearch.bench.__main__", "main"),
    "rsearch.plan": ("rsearch.plan.command", "command"),
    "rsearch.train": ("rsearch.train", "command"),
}
# Commands about a finished run, and those of their arguments that need nothing else.
OF_A_RUN = ("evaluate", "export", "show", "reproduce")  # replay: test_replay.py
ABOUT_A_RUN = re.compile(
    r"(--workdir=)?(runs/\w+|RUN)|--out=[\w/-]+|--step=\w+|--methods=[\w,:=]+"
    r"|--sets=(world:\w+,?)+|--config\.(eval\.\w+|retrieval\.top_k)=[\d.]+"
)


class Command(NamedTuple):
    """A command of a document: the module or file that runs, and its arguments.

    `text` is the whole command line, which may name the machines that it is for.
    """

    document: str
    text: str
    name: str
    arguments: tuple


def words_of(texts):
    """Yield the words of each command in these texts, as bash splits them."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [shutil.which("bash"), "-c", SHELL, "bash", *texts],
            env={"PATH": empty, **VARIABLES},
            cwd=empty,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    words = []
    for word in done.stdout.decode().split("\0")[:-1]:
        if word:
            words.append(word)
        else:
            yield words
            words = []


def start_bash(lines, folder, environment, programs=()):
    """Start lines of bash in a directory; their `python` is that of the tests.

    Args:
        environment: its variables.
        programs: directories of programs that come before Python's.
    """
    python = os.path.dirname(sys.executable)
    path = os.pathsep.join([*map(str, programs), python, environment["PATH"]])
    return subprocess.Popen(
        ["bash", "-euc", lines],
        cwd=folder,
        env={**environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_bash(lines, folder, environment, programs=()):
    """Run lines of bash, which must succeed, as above; return what they print."""
    process = start_bash(lines, folder, environment, programs)
    printed, error = process.communicate(timeout=7200)
    assert process.returncode == 0, error[-4000:]
    return printed


def texts_of(document):
    """Return the code blocks of a document and the commands within its sentences."""
    text = (ROOT / document).read_text(encoding="utf-8")
    if document.endswith(".py"):
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
        return ["\n".join(line for line in lines if line.startswith("    "))]
    texts = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in filter(INLINE.fullmatch, [" ".join(span.split()) for span in spans]):
        # A table's cell writes choices as ls\|verify; DIR... means one or several.
        line = re.sub(r"(?<=\w)\.\.\.(?=\s|$)", "", line)
        choices = re.search(r"\S+\\\|\S+", line)
        for choice in choices[0].split("\\|") if choices else [""]:
            texts.append(line.replace(choices[0], choice) if choices else line)
    return texts


def program_of(words):
    """Return the name and arguments of a program; None if it is not the package's."""
    first, *rest = words
    if first == "python" and rest[:1] == ["-m"]:
        _, name, *arguments = rest
        if not name.startswith(("rsearch", "tests")):
            return None
    elif first == "python" and "".join(rest[:1]).startswith("launch/"):
        name, *arguments = rest
    elif first == "rsearch" and rest[0] in COMMANDS:
        name, arguments = first, rest
    elif first in ("bash", "sbatch") and "launch/" in " ".join(rest):
        at = next(i for i, word in enumerate(rest) if word.startswith("launch/"))
        name, arguments = rest[at], rest[at + 1 :]
        assert (ROOT / name).is_file()
        if "--" in arguments:
            arguments = arguments[arguments.index("--") + 1 :]
        if name == "launch/quickstart.sh":
            arguments = ["--config=configs/quickstart.py", *arguments]
        if not any(word.startswith("--config=") for word in arguments):
            return None  # the tests, or a list of trials
        name = "rsearch.plan" if name == "launch/gpu_plan.sh" else "rsearch.train"
    else:
        return None
    if name == "rsearch" and arguments:
        name, *arguments = f"rsearch.{arguments[0]}", *arguments[1:]
    return name, tuple(FILLED.get(word, word) for word in arguments if word != "...")


def commands():
    """Return all commands of the documents, each once."""
    unique = {}
    for document in (*DOCUMENTS, *CONFIGS):
        several = [*words_of(texts_of(document))]
        wrapped = [w[w.index("--wrap") + 1] for w in several if "--wrap" in w]
        several += words_of(wrapped) if wrapped else []
        for words in several:
            if program := program_of(words):
                command = Command(document, " ".join(words), *program)
                unique.setdefault(command[1:], command)
    return [*unique.values()]


def devices_of(line):
    """Return the number of devices that a command names; None if it names none."""
    for pattern, count in MACHINES.items():
        if match := re.search(pattern, line):
            return count(match[1])
    return None


def flags_of(words):
    """Return {flag: value} of a command's words."""
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def fields_of(flags):
    """Return {field: value} of the flags that set fields of a configuration."""
    prefix = "--config."
    return {
        name.removeprefix(prefix): value
        for name, value in flags.items()
        if name.startswith(prefix)
    }


def needs_only_a_run(command):
    """Return whether a finished run of the embedded world is all that it needs."""
    is_about_a_run = command.name.removeprefix("rsearch.") in OF_A_RUN
    is_known = all(map(ABOUT_A_RUN.fullmatch, command.arguments))
    return bool(is_about_a_run and command.arguments and is_known)


def main_of(name):
    """Return the function that runs a command."""
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("launched", ROOT / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main
    module, function = MAINS.get(name, (name, "main"))
    return getattr(importlib.import_module(module), function)


COMMANDS_OF_DOCUMENTS = commands()

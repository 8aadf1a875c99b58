"""Commands in the documents: recipes that load, with fields that fit their machines."""

import math
import pathlib
import re
import shlex

import pytest

from rsearch.config.checks import validate
from rsearch.config.recipes import apply_overrides, load
from rsearch.evaluate import main
from rsearch.methods.table import METHODS

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))
MACHINES = {  # what names the devices of a command, and how many they are
    r"--devices=(\d+)": int,
    r"--topology=[^:\s]+:([\dx]+)": lambda size: math.prod(map(int, size.split("x"))),
    r"--topology=[ah]\d+x(\d+)": int,
    r"--type=v5p-(\d+)": lambda cores: int(cores) // 2,
    r"sbatch --nodes=(\d+)": lambda nodes: int(nodes) * 8,
    r"(rsearch.export .*--workdir=/shared)": lambda _: 1,  # on the machine `fill`
}


def commands():
    """(command of one line, devices or None) of those that name a recipe."""
    actual = []
    for name in ("README.md", "BUILD.md", *PAGES):
        text = (ROOT / name).read_text(encoding="utf-8")
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                # A sweep's fields have several values each.
                if "--config=configs/" in line and "sweep.py" not in line:
                    actual.append((" ".join(line.split()), devices_of(line)))
    return actual


def test_a_page_is_linked_and_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in PAGES:
        assert f"({name})" in readme and (ROOT / name).stat().st_size <= 8192


def test_the_page_on_evaluation_has_every_method_and_commands_that_are_understood():
    text = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| method \| what.*?\n\n", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", table)) == set(METHODS)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ")
    commands = re.split(r"\n(?=python)", lines.strip())
    evaluations = [shlex.split(c)[3:] for c in commands if "rsearch.evaluate" in c]
    assert len(evaluations) == 11
    for arguments in evaluations:
        flags = [x for x in arguments if not x.startswith("--workdir")]
        recipe = "--config=configs/search_r1.py:tiny"
        assert main([recipe, "--workdir=x", *flags, "--print_config"]) == 0


def devices_of(line):
    """How many devices a command says that there are; None where it does not."""
    for pattern, count in MACHINES.items():
        if match := re.search(pattern, line):
            return count(match[1])
    return None


def test_some_commands_name_their_machine():
    assert {num for _, num in commands()} >= {None, 8, 16}


@pytest.mark.parametrize(("line", "num_devices"), commands())
def test_the_recipe_of_a_command_is_valid(line, num_devices):
    fields = dict(re.findall(r"--(config[\w.]*)=([^\s\"]+)", line))
    config = load(fields.pop("config"))
    overrides = {name.removeprefix("config."): value for name, value in fields.items()}
    config = apply_overrides(config, overrides)
    validate(config, num_devices=num_devices)


@pytest.mark.parametrize("name", ["README.md", "BUILD.md"])
def test_the_files_that_a_document_names_exist(name):
    """As they are written, or below rsearch/ or tests/; a user's are in code blocks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    names = set(re.findall(r"`([\w./-]+/[\w./-]*\.(?:py|sh|md|txt|trials))`", text))
    assert len(names) > 5
    folders = (ROOT, ROOT / "rsearch", ROOT / "tests")
    assert not [n for n in names if not any((f / n).is_file() for f in folders)]

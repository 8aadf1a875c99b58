"""The console script: its list of commands and the help of each."""

import contextlib
import importlib.util
import inspect
import signal
import tomllib

import pytest

from rsearch import __main__ as console
from rsearch.config import recipes
from tests.small_run import ROOT, run_python


def test_every_command_is_listed_and_every_name_is_a_module(capsys):
    assert console.main([]) == console.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = ROOT / "rsearch"
    modules = {path.stem for path in folder.glob("[!_]*.py")} - {"types", "api"}
    modules |= {path.parent.name for path in folder.glob("*/__main__.py")}
    assert set(console.COMMANDS) == modules
    for name, sentence in console.COMMANDS.items():
        assert lines.count(f"  {name:<12} {sentence}") == 2
        assert importlib.util.find_spec(f"rsearch.{name}") is not None


def test_an_unknown_command_fails_with_one_line_naming_the_nearest_command(capsys):
    assert console.main(["trian"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'trian'" in line and "train" in line


def test_the_script_is_installed_under_the_packages_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"rsearch": "rsearch.__main__:main"}


@pytest.mark.parametrize("words", [("rsearch.score",), ("rsearch", "score")])
def test_control_c_during_the_imports_of_a_command_leaves_no_traceback(words, tmp_path):
    (tmp_path / "ml_collections.py").write_text("raise KeyboardInterrupt")
    done = run_python("-m", *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    # A shell reports 130 for a process that SIGINT has ended, too.
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr == "interrupted\n"


def test_help_says_what_a_command_does_and_names_its_positional_arguments():
    done = run_python("-m", "rsearch", "checkpoint", "--help")
    first = done.stdout.splitlines()[0]
    assert (
        done.returncode == 0
        and first == "List, verify or delete the checkpoints of a run."
    )
    assert "ACTION" in done.stdout and "DIRECTORY" in done.stdout
    assert "--keep" in done.stdout


PLACES = {  # of the commands that are not `main` of the module with their name
    "bench": ("bench.__main__", "main"),
    "plan": ("plan.command", "command"),
    "train": ("train", "command"),
}


@pytest.mark.parametrize("name", console.COMMANDS)
def test_help_is_printed_once_and_leads_to_all_flags(name, capsys):
    place, function = PLACES.get(name, (name, "main"))
    module = importlib.import_module(f"rsearch.{place}")
    with contextlib.suppress(SystemExit):
        recipes.run_command(getattr(module, function), ["--help"])
    text = capsys.readouterr().out
    assert text.count(inspect.getdoc(module)) == 1
    assert "arguments:\n" in text or "--help lists the flags" in text
    assert all(f"--{flag} " in text for flag in getattr(module, "FLAGS", ()))


NAMES = ("r1_searcher", "r1_searcher_pp", "r_search", "rag_r1", "rearag", "search_r1")
RECIPES = [ROOT / "configs" / f"{name}.py" for name in NAMES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_help_is_its_docstring_and_lists_all_variants(path, capsys):
    with pytest.raises(SystemExit):
        recipes.parse_command_line(["--help", f"--config={path}:tiny"], flags={})
    text = capsys.readouterr().out
    assert f"configs/{path.name}" in text
    with pytest.raises(ValueError) as caught:
        recipes.load(f"{path}:no_such_word")
    words = str(caught.value).partition("'no_such_word': ")[2].partition(" (in")[0]
    assert "tiny" in words and text.endswith(f"variants: {words}\n")


def test_the_help_of_a_recipe_with_a_syntax_error_names_its_line(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text('"""Mine."""\n\ndef get_config(:\n')
    with pytest.raises(ValueError, match=rf"{recipe}:3:\d+: "):
        recipes.parse_command_line(["--help", f"--config={recipe}"], flags={})

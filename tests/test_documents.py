"""The documents: commands in them are valid, links and files in them exist."""

import ast
import contextlib
import glob
import json
import pathlib
import re
import shutil

import pytest

import rsearch
from rsearch.__main__ import COMMANDS
from rsearch.config.checks import validate
from rsearch.config.recipes import apply_overrides, load, run_command
from rsearch.methods.table import METHODS, expand_all
from rsearch.runtime.workdir import Workdir
from rsearch.setup.checks import check_names
from tests.document_commands import (
    COMMANDS_OF_DOCUMENTS,
    PAGES,
    RECIPE,
    TEXTS,
    devices_of,
    fields_of,
    flags_of,
    main_of,
    needs_only_a_run,
)
from tests.small_run import ROOT, finished

CORPORA = {
    "psgs_w100.tsv": "id\ttext\ttitle\n1\tLies in Pellia.\tGoldberg\n",
    "kilt_knowledgesource.json": json.dumps(
        {"_id": "1", "wikipedia_title": "Goldberg", "text": ["Goldberg", "A town."]}
    ),
    "wiki.jsonl": json.dumps({"id": "1", "title": "Goldberg", "text": "A town."}),
    "FILE": json.dumps({"id": "1", "contents": "Goldberg\nA town."}),
    "data/hotpotqa/corpus.jsonl": json.dumps(
        {"_id": "1", "title": "Goldberg", "text": "A town."}
    ),
    "data/2wikimultihopqa/corpus.jsonl": json.dumps(
        {"_id": "2", "title": "Pellia", "text": "A country."}
    ),
}

# The flag with which a command ends as soon as it has checked the others; "--help" does
# not check their values.
PRINTS = ("train", "evaluate", "export", "tool", "serve", "mcp")
PRINTS += ("retriever", "plan")
ENDS_WITH = {f"rsearch.{name}": "--print_config" for name in PRINTS}
ENDS_WITH["launch/sweep.py"] = "--commands"
# Commands that end at the first missing file, and their flags that name files.
READS = {
    f"rsearch.{n}": () for n in ("corpus", "compare", "report", "score", "checkpoint")
}
READS["rsearch.index"] = ("--corpus", "--questions")
# Flags of commands that need neither a model nor data, and of those that need runs or
# minutes: tests/plan plans all tables.
DRY = {"--dry_run", "--print_config", "--list", "--help", "--commands"}
NEEDED = ("--runs", "--topology")
NEED_NO_MODEL = [
    c
    for c in COMMANDS_OF_DOCUMENTS
    if c.name in READS and c.arguments and c.name != "rsearch.index"
]
READ_RECIPES = [
    c
    for c in COMMANDS_OF_DOCUMENTS
    if not any(word.startswith(NEEDED) for word in c.arguments)
    if not DRY.isdisjoint(c.arguments)
    or (c.name == "rsearch.tables" and "--size" not in c.text)
]


def test_every_command_is_in_the_documents_and_some_name_their_machine():
    names = {command.name for command in COMMANDS_OF_DOCUMENTS if command.arguments}
    assert names >= {f"rsearch.{name}" for name in COMMANDS} - {"rsearch.fidelity"}
    assert "launch/sweep.py" in names
    sizes = {devices_of(command.text) for command in COMMANDS_OF_DOCUMENTS}
    assert sizes >= {None, 8, 16}


@pytest.mark.parametrize(
    "command", COMMANDS_OF_DOCUMENTS, ids=lambda c: f"{c.document}: {c.text[:60]}"
)
def test_the_flags_of_a_command_are_valid(command, tmp_path, monkeypatch, capsys):
    """All of its flags are known, and their values have the right types."""
    main = main_of(command.name)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("launch").symlink_to(ROOT / "launch")
    reads_run = command.name in ("rsearch.evaluate", "rsearch.export")
    if reads_run and command.arguments and "--config=" not in command.text:
        (run,) = (x for x in command.arguments if x.startswith("--workdir="))
        Workdir(run.partition("=")[2], load(RECIPE)).close()
    if command.name in READS and command.arguments and "world:" not in command.text:
        assert run_command(main, command.arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--" not in line and any(f in line for f in files_of(command))
        return
    end = ENDS_WITH.get(command.name, "--help") if command.arguments else "--help"
    with contextlib.suppress(SystemExit):  # of --help
        assert run_command(main, [*command.arguments, end]) == 0
    assert capsys.readouterr().out


def files_of(command):
    """Return the files that a command names: words without dashes, and some flags."""
    flags = READS[command.name]
    has_action = command.name == "rsearch.checkpoint"  # ls, verify or gc
    pairs = [word.partition("=") for word in command.arguments[has_action:]]
    return [value or name for name, _, value in pairs if name in flags or not value]


@pytest.mark.parametrize(
    "command",
    [
        c
        for c in COMMANDS_OF_DOCUMENTS
        if "--config=configs/" in c.text or c.name == "rsearch.evaluate"
        if c.name != "launch/sweep.py"  # has lists of values, which it checks itself
    ],
    ids=lambda c: c.text[:60],
)
def test_the_fields_of_a_command_are_valid(command, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    flags = flags_of(command.arguments)
    fields = fields_of(flags)
    if "--methods" in flags:
        fields["eval.methods"] = ",".join(expand_all(flags["--methods"].split(",")))
    config = load(flags.get("--config", RECIPE))
    config = apply_overrides(config, fields)
    validate(config, num_devices=devices_of(command.text))
    r = config.retrieval
    names_search = r.corpus == "world" or r.index or r.url or r.engine
    assert names_search or command.name != "rsearch.train", "retrieval.index"
    if command.name == "rsearch.evaluate":
        check_names(config)


@pytest.mark.slow
@pytest.mark.parametrize("command", NEED_NO_MODEL, ids=lambda c: c.text[:60])
def test_a_command_that_needs_no_model_succeeds(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("search_r1", "search_rl", "r_search", "x", "lr/1"):
        shutil.copytree(finished(), f"runs/{folder}")
    # This one was evaluated between its steps.
    metrics = pathlib.Path("runs/search_rl/rl/metrics.jsonl")
    lines = metrics.read_text().splitlines()
    rows = [json.loads(line) | {"dev_em": 0.5} for line in lines]
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copytree(finished(), "DIR")
    shutil.copy("DIR/transcripts.jsonl", "FILE.jsonl")
    for name, text in CORPORA.items():
        pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(name).write_text(text)
    # As a shell does if files match.
    arguments = [
        path for word in command.arguments for path in sorted(glob.glob(word)) or [word]
    ]
    assert run_command(main_of(command.name), arguments) == 0


@pytest.mark.parametrize("command", READ_RECIPES, ids=lambda c: c.text[:60])
def test_a_command_that_only_reads_recipes_succeeds(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "launch"):
        pathlib.Path(folder).symlink_to(ROOT / folder)
    try:
        code = run_command(main_of(command.name), command.arguments)
    except SystemExit as end:  # of --help
        code = end.code or 0
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [*filter(needs_only_a_run, COMMANDS_OF_DOCUMENTS)],
    ids=lambda c: c.text[:60],
)
def test_a_command_about_a_finished_run_succeeds(command, tmp_path, monkeypatch):
    """It is executed with a step, sets and a batch that the small run has."""
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"--step=\w+", "--step=2", "\n".join(command.arguments))
    arguments = re.sub("--sets=.*", "--sets=world:bridge,world:train", text).split("\n")
    for word in arguments:
        if match := re.fullmatch(r"(?:--workdir=)?(RUN|runs/\w+)", word):
            shutil.copytree(finished(), match[1])
    if command.name == "rsearch.evaluate":
        arguments.append("--config.rollout.max_concurrent=16")
        if "max_questions" not in command.text:
            arguments.append("--config.eval.max_questions=2")
    assert run_command(main_of(command.name), arguments) == 0


@pytest.mark.slow
def test_the_notebooks_policy_answers_from_the_passages_it_finds(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # On eight simulated devices, without optimization, it would take an hour.
    monkeypatch.delenv("XLA_FLAGS")
    notebook = nbformat.read(ROOT / "docs" / "first_steps.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=3600, resources=place).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    scores = dict(re.findall(r"^(with passages|without) +EM +([\d.]+)", text, re.M))
    assert float(scores["with passages"]) > 80 and float(scores["without"]) < 20


def test_every_page_is_linked_and_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    for name in (
        *PAGES,
        "docs/first_steps.ipynb",
        "BUILD.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ):
        assert f"({name})" in readme, name
        assert name not in PAGES or (ROOT / name).stat().st_size <= 8192, name


def heading_anchors(path):
    """Return the anchors of a document's headings, as GitHub makes them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    headings = [line.lstrip("#").strip().lower() for line in lines if line[:1] == "#"]
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_existing_files_and_headings(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), link
        assert not anchor or anchor in heading_anchors(path), link


JARGON = re.compile(
    r"\b(goes on|go on|told|reckon\w*|anew|at home|pretend\w*|want of|nor need"
    r"|comes to nothing|whatever is|nobody's)\b"
)


@pytest.mark.parametrize("name", TEXTS)
def test_the_documents_use_the_terms_of_the_field(name):
    """Runs resume, requests fail, values are reported or estimated."""
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert not [text[m.start() - 30 : m.end() + 10] for m in JARGON.finditer(text)]


def test_python_in_the_documents_parses_and_uses_existing_names():
    for name in TEXTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            for node in ast.walk(ast.parse(program)):
                if isinstance(node, ast.Attribute):
                    is_ours = ast.unparse(node.value) == "rsearch"
                    assert not is_ours or hasattr(rsearch, node.attr), node.attr


def test_the_table_of_commands_lists_every_command():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `python -m rsearch\.(\w+)", text, re.MULTILINE)
    assert sorted(named) == sorted(COMMANDS)


def test_the_page_on_evaluation_lists_every_method():
    text = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| method \| what.*?\n\n", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", table)) == set(METHODS)


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_that_a_document_names_exist(name):
    """As written, or below rsearch/ or tests/. Files of users are in code blocks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    names = set(re.findall(r"`([\w./-]+/[\w./-]*\.(?:py|sh|md|txt|trials))`", text))
    assert len(names) > 5 or name != "README.md"
    folders = (ROOT, ROOT / "rsearch", ROOT / "tests")
    names = {n for n in names if "NAME" not in n}  # a placeholder
    assert not [n for n in names if not any((f / n).is_file() for f in folders)]


def test_the_page_on_tests_names_the_files_of_all_slow_tests():
    """By their paths, their folders, or their programs in tests/chaos/."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.slow" in path.read_text(encoding="utf-8"):
            file, folder = (p.relative_to(ROOT / "tests") for p in (path, path.parent))
            program = f"tests.chaos.{path.stem.removeprefix('test_')} "
            assert any(n in text for n in (f"`{file}`", f"`{folder}/`", program)), file

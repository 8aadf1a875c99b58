"""Measure the package's structure: python -m tests.structure [NAME OF A BUDGET ...]

Each Budget has an aim, and a limit that no change may pass. If the aim is not reached
yet, the limit is the last measured number, and is tightened as that improves.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import io
import pathlib
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "rsearch").rglob("*.py"))
ROOMS = (  # lowest first: a module imports from its own room and from lower lines
    ("types",),
    ("text",),
    ("hosts",),
    ("config", "runtime"),
    ("models", "protocols", "tools"),
    ("data",),
    ("retrieval",),
    ("rollout", "rewards"),
    ("llm", "learn"),
    ("world",),
    ("methods",),
    ("setup",),
    ("evaluation",),
    ("serving",),
    ("stages",),
    ("plan",),
    ("bench",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
COMMANDS = len(ROOMS)
# Rooms up to setup that define configurations, or store those of runs.
KNOW_CONFIG = ("config", "runtime", "setup")

DRIVERS = (
    "stages/*.py",
    "stages/curate/*.py",
    "rollout/scheduler.py",
    "rollout/decode.py",
    "learn/update.py",
    "retrieval/index_build.py",
)
_BANNED = """
own found told given one most enough whole part piece place left kept asked written
together apart alike plain
"""
_NO_VERBS = """
a an the this that these those it its what how where who whose which when whether of as
also in on at by for from with without to only no not each every all any both some one
two and or if there is are
"""
BANNED = frozenset(_BANNED.split())  # as bare names
NO_VERBS = frozenset(_NO_VERBS.split())  # no imperative sentence opens with them
VERBS_IN_S = ("pass", "process", "guess", "cross", "press", "express", "address")


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(path.read_text(), str(path))


def module_name(path: pathlib.Path) -> str:
    """Return "rsearch.models.decoder" for its file; a package for its __init__."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


MODULES = {module_name(path): path for path in SOURCES}


def room_of(module: str) -> str:
    """Return "models" for "rsearch.models.decoder"."""
    return module.partition(".")[2].partition(".")[0]


def level_of(module: str) -> int:
    """Return the level of a module's room; commands are above all rooms."""
    return LEVEL.get(room_of(module), COMMANDS)


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Return the package's modules that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(tree(MODULES[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else node.module)
    return frozenset(names - {module, "rsearch"})


@functools.cache
def import_chain(module: str) -> tuple[str, ...]:
    """Return the longest chain of imports that starts at a module.

    Raises:
        RecursionError: modules import each other.
    """
    chains = [import_chain(other) for other in sorted(imports_of(module))]
    return (module, *max(chains, key=len, default=()))


def cycles() -> list[str]:
    """Return the import cycles, each as "a -> b -> a"."""
    circles, done = [], set()

    def visit(module, path):
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(imports_of(module)):
                visit(other, [*path, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])
    return circles


def wrong_imports() -> list[str]:
    """Return the imports from higher levels; within a level only cycles are wrong."""
    return [
        f"{module} imports {other}"
        for module in MODULES
        for other in sorted(imports_of(module))
        if level_of(other) > level_of(module)
    ]


def config_below_setup() -> list[str]:
    """Return the modules below setup that import configurations or ConfigDict."""
    wrong = []
    for module, path in MODULES.items():
        is_below = level_of(module) < LEVEL["setup"]
        if not is_below or room_of(module) in KNOW_CONFIG:
            continue
        imported = {n for n in imports_of(module) if room_of(n) == "config"}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "ml_collections":
                imported.add(node.module)
        if imported:
            wrong.append(f"{module}: {', '.join(sorted(imported))}")
    return wrong


def root_modules() -> list[str]:
    """Return the modules at the package's root that are not commands, types or api."""
    return [
        name
        for name, path in MODULES.items()
        if name.count(".") == 1 and path.stem not in ("__init__", "types", "api")
        if "main" not in {getattr(node, "name", "") for node in tree(path).body}
    ]


def comments_per_100_lines(patterns=DRIVERS) -> float:
    """Return the number of comments per 100 lines that are not blank."""
    num_comments = num_lines = 0
    for pattern in patterns:
        for path in (ROOT / "rsearch").glob(pattern):
            text = path.read_text()
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            num_comments += sum(token.type == tokenize.COMMENT for token in tokens)
            num_lines += sum(bool(line.strip()) for line in text.splitlines())
    return 100 * num_comments / num_lines


def functions(parsed: ast.Module) -> list[ast.FunctionDef]:
    """Return all functions of a parsed file, including nested ones."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(parsed) if isinstance(node, kinds)]


def public_functions(path: pathlib.Path) -> Iterator[ast.FunctionDef]:
    """Yield the public functions of a file, and the methods of its public classes."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    for node in tree(path).body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        if isinstance(node, kinds):
            yield node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                is_special = getattr(member, "name", "") in ("__init__", "__call__")
                if not isinstance(member, kinds):
                    continue
                if is_special or not member.name.startswith("_"):
                    yield member


# Names with the same meaning in every module that defines them: a command's entry
# points, a stage's loop, a protocol's two directions, a benchmark and its subjects.
SHARED_NAMES = {
    *("main", "command", "routes_of"),
    *("run", "finish_step"),
    *("parse", "render"),
    *("measure", "make_decode", "make_turns", "make_update", "make_step"),
}


def ambiguous_names() -> list[str]:
    """Return the public functions and classes that several modules define."""
    kinds = ast.FunctionDef | ast.ClassDef
    modules = collections.defaultdict(list)
    for module, path in MODULES.items():
        for node in tree(path).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                modules[node.name].append(module)
    return [
        f"{name}: {', '.join(where)}"
        for name, where in sorted(modules.items())
        if len(where) > 1 and name not in SHARED_NAMES
    ]


def unannotated() -> tuple[list[str], int]:
    """Return the public arguments without an annotation, and the number of all."""
    bare, total = [], 0
    for path in SOURCES:
        for function in public_functions(path):
            a = function.args
            for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs):
                if argument.arg in ("self", "cls"):
                    continue
                total += 1
                if argument.annotation is None:
                    place = f"{path.relative_to(ROOT)}:{argument.lineno}"
                    bare.append(f"{place}: {function.name}({argument.arg})")
    return bare, total


def banned_names() -> list[str]:
    """Return the places where a bare pronoun, participle or adverb is a name."""
    uses = []
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            name = None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            if name is not None and name.strip("_") in BANNED:
                uses.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    return uses


def is_imperative(docstring: str) -> bool:
    """Return whether a docstring opens like an imperative sentence."""
    words = docstring.split()
    first = words[0].strip(",:;.").lower() if words else ""
    if not first.isalpha() or first in NO_VERBS:
        return False
    return not first.endswith("s") or first in VERBS_IN_S


def unreadable_openings() -> list[str]:
    """Return the functions whose docstring does not open with an imperative sentence.

    Properties are named like values, so a noun may open their docstrings.
    """
    wrong = []
    for path in SOURCES:
        for function in functions(tree(path)):
            docstring = ast.get_docstring(function)
            decorators = {ast.unparse(d) for d in function.decorator_list}
            is_property = decorators & {"property", "functools.cached_property"}
            if docstring is None or is_property or is_imperative(docstring):
                continue
            place = f"{path.relative_to(ROOT)}:{function.lineno}"
            wrong.append(f"{place}: {docstring.splitlines()[0]}")
    return wrong


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The package's frames in a real step of a tiny run.

    Attributes:
        gradient: (file, function) of the frames from the command to the gradient.
        token: the same from the stage's loop to the sampling of a token.
    """

    gradient: tuple[tuple[str, str], ...]
    token: tuple[tuple[str, str], ...]


@functools.cache
def stacks_of_a_step() -> Stacks:
    """Run one step of a tiny GRPO run, and return the stacks of its traced calls."""
    import jax

    from rsearch import train
    from rsearch.rollout import decode
    from tests.small_run import config

    class BothSeenError(Exception):
        """Ends the run once both stacks are known, before the update is compiled."""

    stacks = {}
    value_and_grad, sample = jax.value_and_grad, decode.sample

    def keep(name):
        frames, frame = [], sys._getframe(2)
        while frame is not None:
            path = pathlib.Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT / "rsearch"):
                file = str(path.relative_to(ROOT / "rsearch"))
                frames.append((file, frame.f_code.co_name))
            frame = frame.f_back
        frames.reverse()
        if ("stages/rl.py", "run") in frames:
            stacks.setdefault(name, frames)

    def watched_gradient(*args, **settings):
        keep("gradient")
        if len(stacks) == 2:
            raise BothSeenError
        return value_and_grad(*args, **settings)

    def watched_sample(*args, **settings):
        keep("token")
        return sample(*args, **settings)

    whole_step = config(
        stages=("rl",), rl__steps=1, eval__methods=("protocol",), eval__at_start=False
    )
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(BothSeenError),
        mock.patch.object(jax, "value_and_grad", watched_gradient),
        mock.patch.object(decode, "sample", watched_sample),
    ):
        train.main(whole_step, pathlib.Path(folder) / "run")
    loop = stacks["token"].index(("stages/rl.py", "run"))
    sampled = (*stacks["token"][loop + 1 :], ("rollout/sampling.py", "sample"))
    return Stacks(tuple(stacks["gradient"]), tuple(sampled))


@dataclasses.dataclass(frozen=True)
class Budget:
    """A number that a change may not make worse.

    Attributes:
        name: name of the number.
        measure: function that measures the number.
        aim: number that the design aims at.
        limit: bound that a test enforces.
        is_least: whether the limit is a lower bound.
    """

    name: str
    measure: Callable[[], float]
    aim: float
    limit: float
    is_least: bool = False

    def holds(self, number: float, bound: float) -> bool:
        """Return whether a measured number is within a bound."""
        return number >= bound if self.is_least else number <= bound


def _mean_imports():
    return sum(len(imports_of(m)) for m in MODULES) / len(MODULES)


def _annotated_share():
    bare, total = unannotated()
    return 1 - len(bare) / total


BUDGETS = (
    Budget("import cycles", lambda: len(cycles()), 0, 0),
    Budget("imports from higher levels", lambda: len(wrong_imports()), 0, 0),
    Budget("configuration below setup", lambda: len(config_below_setup()), 0, 0),
    Budget("root modules that are not commands", lambda: len(root_modules()), 0, 0),
    Budget(
        "import depth of rsearch.train",
        lambda: len(import_chain("rsearch.train")) - 1,
        11,
        11,
    ),
    # Modules that call third-party code import runtime/boundary.py.
    Budget("mean imports of a module", _mean_imports, 3.3, 4.5),
    Budget(
        "files, command to gradient",
        lambda: len({file for file, _ in stacks_of_a_step().gradient}),
        4,
        4,
    ),
    Budget(
        "calls, command to gradient",
        lambda: len(stacks_of_a_step().gradient) - 1,
        5,
        5,
    ),
    Budget(
        "frames, loop to sampled token", lambda: len(stacks_of_a_step().token), 9, 9
    ),
    Budget(
        "comments in 100 lines of drivers", comments_per_100_lines, 8, 8, is_least=True
    ),
    Budget("annotated public arguments", _annotated_share, 0.9, 0.9, is_least=True),
    Budget("names with two meanings", lambda: len(ambiguous_names()), 0, 0),
    Budget("banned names", lambda: len(banned_names()), 0, 0),
    Budget(
        "docstrings without an opening verb",
        lambda: len(unreadable_openings()),
        0,
        0,
    ),
)
DETAILS = {
    "import cycles": cycles,
    "names with two meanings": ambiguous_names,
    "imports from higher levels": wrong_imports,
    "configuration below setup": config_below_setup,
    "root modules that are not commands": root_modules,
    "import depth of rsearch.train": lambda: [
        " > ".join(import_chain("rsearch.train"))
    ],
    "files, command to gradient": lambda: [str(f) for f in stacks_of_a_step().gradient],
    "calls, command to gradient": lambda: [str(f) for f in stacks_of_a_step().gradient],
    "frames, loop to sampled token": lambda: [str(f) for f in stacks_of_a_step().token],
    "annotated public arguments": lambda: unannotated()[0],
    "banned names": banned_names,
    "docstrings without an opening verb": unreadable_openings,
}


def main(*details: str) -> int:
    """Print the table of budgets; with `details`, the items behind those budgets."""
    for word in details:
        for name, find in DETAILS.items():
            if name.startswith(word):
                print(name, *find(), sep="\n  ")
    if details:
        return 0
    is_held = True
    print(f"{'':36}{'now':>9}{'aim':>9}{'limit':>9}")
    for budget in BUDGETS:
        number = budget.measure()
        is_held &= budget.holds(number, budget.limit)
        mark = "" if budget.holds(number, budget.aim) else "  not reached"
        print(
            f"{budget.name:36}{number:9.4g}{budget.aim:9.4g}{budget.limit:9.4g}{mark}"
        )
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

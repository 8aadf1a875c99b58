"""Load users' own code, named as "package.module:name" in a configuration.

Wherever the configuration names an entry of a table (a reward term, a protocol, a tool,
a method, a search engine, a loss), such a reference may name an object in the user's
own module instead. Importing a module runs its code, so references are taken only from
configurations and command lines, never from data or from a model's output.
"""

import ast
import hashlib
import importlib
import inspect
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rsearch.text.spelling import did_you_mean

REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
SPELLING = "'package.module:name'"
LIBRARY = __name__.partition(".")[0]
CODE = "code:"  # prefix of a module's name among the inputs of a run
# {imported module: (its spec, which a reload replaces; digest of its source)}
_imported: dict[str, tuple[Any, str]] = {}


def is_reference(value: Any) -> bool:
    """Return whether a configuration value has the form 'package.module:name'."""
    return isinstance(value, str) and REFERENCE.fullmatch(value) is not None


def lookup(field: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return the entry of a table, or the object that a reference names.

    Args:
        field: the configuration's field, for messages.
        name: a key of the table, or "package.module:name".

    Raises:
        ValueError: the name is neither; the message has the field, the name and the
            nearest keys.
    """
    if name in table:
        return table[name]
    if is_reference(name):
        return load_reference(field, name)
    hint = did_you_mean(str(name), table, show=repr)
    raise ValueError(
        f"{field} = {name!r}: must be one of {', '.join(table)}, or {SPELLING}{hint}"
    )


def load_reference(field: str, reference: str) -> Any:
    """Import a user's module and return the object that the reference names.

    The working directory is also searched, however the program was started.

    Raises:
        ValueError: the module is missing or cannot be imported, or has no such name.
    """
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise ValueError(f"{field} = {reference!r}: must be {SPELLING}")
    module_name, name = match.groups()
    module = _import(f"{field} = {reference!r}", module_name)
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(name, names, show=repr)
        raise ValueError(
            f"{field} = {reference!r}: {module.__file__} has no {name!r}{hint}"
        )
    return getattr(module, name)


def check_callable(field: str, name: str, value: Any, signature: str) -> None:
    """Refuse an object that cannot be called with the expected arguments.

    Args:
        field: the configuration's field.
        name: its value.
        value: the object that the value names.
        signature: the expected signature, as text: arguments in parentheses, those
            after "*" by keyword; settings ("**...") are not checked.

    Raises:
        ValueError: the object cannot be called, or not with these arguments.
    """
    if not callable(value):
        raise ValueError(
            f"{field} = {name!r}: is of type {type(value).__name__}, which cannot be "
            f"called: must be a function {signature}"
        )
    try:
        actual_signature = inspect.signature(value)
    except ValueError:  # builtin functions may have no signature
        return
    names = signature[1 : signature.index(")")].split(", ")
    has_settings = any(n.startswith("**") for n in names)
    names = [n for n in names if not n.startswith("**")]
    num_positional = names.index("*") if "*" in names else len(names)
    keywords = dict.fromkeys(names[num_positional + 1 :])
    bind = actual_signature.bind_partial if has_settings else actual_signature.bind
    try:
        bind(*names[:num_positional], **keywords)
    except TypeError as error:
        raise ValueError(
            f"{field} = {name!r}: takes {actual_signature}: must be a function "
            f"{signature} ({error})"
        ) from None


def code_inputs(
    references: Sequence[Any], known: dict[str, tuple[str, list[str]]] | None = None
) -> dict[str, str]:
    """Return {"code:<module>": digest of its source} for the references among values.

    A run is bound to these inputs, so that a resumed run reports code that has changed.
    The user's own modules that a referenced module imports are also inputs.

    Args:
        references: values of a configuration; those that are no references are skipped.
        known: {module: (digest, names of the modules that it imports)} of the modules
            that the run uses already, and to which it adds those read now. They are
            not read again: the imported code runs on, though its file may be edited.

    Raises:
        ValueError: a module is missing, or its source has changed since it was first
            used, so that the digest would not be that of the code that runs.
    """
    modules = {m[1] for r in references if (m := REFERENCE.fullmatch(str(r)))}
    inputs, pending_names = {}, sorted(modules)
    known = {} if known is None else known
    while pending_names:
        name = pending_names.pop()
        if CODE + name in inputs:
            continue
        if name not in known:
            known[name] = _read_module(name)
        inputs[CODE + name], imported_names = known[name]
        pending_names += imported_names
    return dict(sorted(inputs.items()))


def _read_module(name: str) -> tuple[str, list[str]]:
    """Return the digest of a module's source, and its imports from its folder tree."""
    module = _import(name, name)
    source = pathlib.Path(module.__file__).read_bytes()
    digest = hashlib.sha256(source).hexdigest()[:16]
    spec, imported_digest = _imported.get(name, (None, ""))
    if spec is not module.__spec__:  # used for the first time since its import
        _imported[name] = module.__spec__, digest
    elif imported_digest != digest:
        raise ValueError(
            f"{CODE}{name}: {module.__file__} has changed since this process "
            "imported it: restart Python, or importlib.reload the module"
        )
    return digest, _local_imports(module, source)


def _local_imports(module, source: bytes) -> list[str]:
    """Return the names of the modules that a module imports from its folder tree."""
    package = sys.modules[module.__name__.partition(".")[0]]
    # The package of a folder without __init__.py has no __file__.
    file = getattr(package, "__file__", None) or module.__file__
    root = pathlib.Path(file).parent
    anchor = module.__spec__.parent if module.__spec__ else ""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = anchor.split(".")[: len(anchor.split(".")) - node.level + 1]
                base = ".".join(filter(None, [*parents, base]))
            # In `from package import name`, the name may be a module or an object.
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    local_names = []
    for name in sorted(names):
        file = pathlib.Path(getattr(sys.modules.get(name), "__file__", None) or "")
        # A virtual environment or this package may be in the working directory.
        is_library = "site-packages" in file.parts or name.partition(".")[0] == LIBRARY
        if file.suffix == ".py" and file.is_relative_to(root) and not is_library:
            local_names.append(name)
    return local_names


def _import(label: str, name: str):
    """Import a module by its name; error messages begin with `label`."""
    # `python -m` searches the working directory, but a console script does not.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    # The file may have been written since the import system last read its directory.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{label}: there is no module {error.name!r} in the working directory "
                f"{os.getcwd()} or on PYTHONPATH"
            ) from None
        raise ValueError(f"{label}: {_locate_error(error)}") from error
    except (Exception, SystemExit) as error:  # a script may end itself
        raise ValueError(f"{label}: {_locate_error(error)}") from error
    # A folder without __init__.py has no file, and a compiled module no source.
    if not (getattr(module, "__file__", None) or "").endswith(".py"):
        raise ValueError(f"{label}: {name!r} is not a module of Python source")
    return module


def _locate_error(error: BaseException) -> str:
    """Return 'file:line: Kind: message' for an error raised while a module ran."""
    if isinstance(error, SyntaxError):
        file, line, message = error.filename, error.lineno, error.msg
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file, line, message = frame.filename, frame.lineno, str(error)
    return f"{file}:{line}: {type(error).__name__}: {' '.join(message.split())}"

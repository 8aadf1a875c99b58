"""Load configurations from recipes, set their fields from a command line, print them.

A configuration is a locked `ml_collections.ConfigDict` that a recipe's `get_config`
builds. This module gathers everything that a command needs for it: `load`,
`apply_overrides`, `parse_command_line`, `validate`, `diff`, `to_json`, `fingerprint`,
`print_config` and `run_command`, which turns a user's mistake into one line and exit
code 2.
"""

import errno
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import re
import select
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rsearch.config.checks import validate
from rsearch.config.effective import check_effective
from rsearch.config.fields import (
    ABSENT,
    RENAMED,
    apply_overrides,
    check_known,
    convert,
    diff,
    fields,
    fingerprint,
    renaming,
    to_json,
)
from rsearch.config.spec import ROOT
from rsearch.hosts.preemption import EXIT_CODE, PreemptedError
from rsearch.runtime import files
from rsearch.runtime.console import DISK_FULL_ERRORS, clean, open_streams, unless_full
from rsearch.runtime.run_directory import LostDirectoryError
from rsearch.text.spelling import did_you_mean

# Imported for other modules only.
__all__ = ["ABSENT", "check_effective", "check_known", "diff", "validate"]

REQUIRED = object()
VARIADIC_SUFFIX = "..."  # ends the name of an argument that takes one or more values
MAX_LABEL = 100  # longest directory name in characters; longer ones are cut
STOPPED = 3  # exit code of a run that stopped itself
INTERNAL_ERROR = 1  # exit code of an error that is a bug of this package
INTERRUPTED = 128 + signal.SIGINT  # exit code after Control-C
BROKEN_PIPE = 128 + signal.SIGPIPE  # exit code that a shell reports after SIGPIPE
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
OUT_OF_MEMORY_HINT = (
    "a lower config.rollout.max_concurrent, config.eval.max_prompt_tokens or "
    "micro_batch of a stage needs less"
)
HELP = """\
  --config=FILE[:VARIANT]    the recipe, for example configs/quickstart.py
  --config.FIELD=VALUE       sets one of its fields; --print_config lists them
"""


class StoppedError(RuntimeError):
    """The run has stopped itself because its metrics went wrong."""


def load(spec: str) -> ConfigDict:
    """Return the configuration that a recipe builds.

    Args:
        spec: 'configs/x.py', 'configs.x', or either with ':variant'. The path is
            relative to the working directory or, failing that, to the folder that
            contains rsearch. The variant goes to `get_config(variant)` as one string.

    Raises:
        ValueError: the file is missing or broken; names file:line:column.
    """
    path, variant = _split(spec)
    return _build(import_file(path), path, variant)


def _build(module, path, variant) -> ConfigDict:
    """Return the configuration that a recipe's module builds, as in `load`."""
    build = getattr(module, "get_config", None)
    if build is None:
        raise ValueError(f"{path}: defines no function get_config")
    if variant and not inspect.signature(build).parameters:
        raise ValueError(f"{path}: get_config takes no variant, got {variant!r}")
    try:
        config = build(variant) if variant else build()
    except Exception as error:
        hint = f" (in variant {variant!r})" if variant else ""
        raise ValueError(_describe_error(path, error) + hint) from error
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ValueError(f"{path}: get_config returned {kind}, not a ConfigDict")
    return config.lock()


def resolve(config: ConfigDict | dict | str) -> ConfigDict:
    """Return the configuration that a Python caller names.

    Args:
        config: a configuration as `load` and `apply_overrides` return it; a recipe as
            `load` takes it; or a dict with the recipe under "config" and dotted
            overrides: {"config": "configs/quickstart.py", "rl.lr": 3e-4}.

    Raises:
        ValueError: there is no such recipe or field, or the value is none of these.
    """
    if isinstance(config, str):
        return load(config)
    if isinstance(config, dict):
        if "config" not in config:
            raise ValueError('a dict of overrides needs the recipe, as "config"')
        overrides = {name: config[name] for name in config if name != "config"}
        return apply_overrides(resolve(config["config"]), overrides)
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"config = {config!r}: must be a recipe's name, a dict or a ConfigDict"
        )
    return config


@functools.cache
def defaults() -> dict:
    """Return configs/base.py as a plain dict of JSON values; do not modify it.

    The default of a field added by a later version is the behaviour that earlier runs
    had, so the configuration of a run without the field is read with the default.
    """
    return json.loads(to_json(load(str(ROOT / "configs" / "base.py"))))


def from_json(config: dict) -> ConfigDict:
    """Return the configuration of a run from its JSON values."""
    return apply_overrides(load(str(ROOT / "configs" / "base.py")), config)


def with_defaults(config: dict) -> dict:
    """Return a configuration of JSON values, with defaults for missing fields.

    Sections whose keys are the recipe's own, such as reward, are not changed.
    """

    def fill(section, default):
        missing = {k: v for k, v in default.items() if k not in section}
        inner = {
            key: fill(value, default[key])
            for key, value in section.items()
            if isinstance(value, dict) and isinstance(default.get(key), dict)
        }
        return {**section, **inner, **missing}

    # Every version had a name and stages; a dict without them is no configuration.
    recipe_fields = {"name", "stages", "reward", "overrides"}
    default = {k: v for k, v in defaults().items() if k not in recipe_fields}
    return fill(config, default)


def _split(spec):
    """Split a spec into (file, variant); both may contain colons.

    The split with the longest path to an existing file is taken.
    """
    if not spec or spec.startswith(":"):
        raise ValueError("config is empty: write configs/<recipe>.py[:variant]")
    words = spec.split(":")
    for count in range(len(words), 0, -1):
        for path in _candidates(":".join(words[:count])):
            if os.path.isfile(path):  # also False for a name that is too long
                return path, ":".join(words[count:])
    # The message names a misspelt path up to its suffix.
    name = re.match(r"(?:.*?\.py(?=:|$))|[^:]*", spec)[0]
    candidates = _candidates(name)
    name = _file_name(name)
    recipes = [str(p.relative_to(ROOT)) for p in (ROOT / "configs").glob("[!_]*.py")]
    places = " and ".join(dict.fromkeys(str(p.parent) for p in candidates))
    raise ValueError(
        f"config file {name} not found in {places}{did_you_mean(name, recipes)}"
    )


def _candidates(name):
    """Return the paths that a recipe's path or dotted name may mean."""
    name = files.expand(_file_name(name))
    return [pathlib.Path.cwd() / name, ROOT / name]


def _file_name(name):
    is_dotted = not name.endswith(".py") and "/" not in name
    return name.replace(".", "/") + ".py" if is_dotted else name


def import_file(path: pathlib.Path) -> types.ModuleType:
    """Run a Python file and return its module.

    Raises:
        ValueError: the file is missing or broken; names file:line:column.
    """
    module_spec = importlib.util.spec_from_file_location(
        f"rsearch_recipe_{path.stem}", path
    )
    if module_spec is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as error:
        # An error about null bytes has neither file nor position.
        file = error.filename or path
        position = f"{file}:{error.lineno or 1}:{error.offset or 1}"
        raise ValueError(f"{position}: {error.msg}") from error
    except Exception as error:
        raise ValueError(_describe_error(path, error)) from error
    return module


def _describe_error(path, error):
    """Return 'file:line: message' for an error raised while a recipe ran."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(path)]
    message = " ".join(str(error).split()).strip("'\"")
    # ConfigDict's message names the key and then lists all others, in many lines.
    key = re.match(r'Key "(\w+)" does not exist|(\w+)$', message)
    if key and isinstance(error, KeyError | AttributeError):
        name = key[1] or key[2]
        old_names = [old for old in RENAMED if old.split(".")[-1] == name]
        hints = "; ".join(map(renaming, old_names[:2]))
        message = f"no field or key {name!r}{'; ' if hints else ''}{hints}"
    elif isinstance(error, KeyError):
        message = f"no key {message!r}" if " " not in message else message
    elif not isinstance(error, ValueError | AttributeError):
        message = f"{type(error).__name__}: {message}"
    return f"{path}:{lines[-1] if lines else 1}: {message}"


def print_config(config: ConfigDict) -> None:
    """Print one line `config.a.b = value` per field, sorted by name."""
    for name, value in sorted(fields(config).items()):
        plain_value = value.to_dict() if isinstance(value, ConfigDict) else value
        print(f"config.{name} = {plain_value!r}")


def parse_command_line(
    argv: Sequence[str],
    *,
    flags: Mapping[str, tuple],
    default: Callable[[dict[str, Any]], ConfigDict] | None = None,
) -> tuple[ConfigDict, dict[str, Any]]:
    """Parse the arguments of a command that takes a configuration.

    Args:
        argv: the arguments, without the program's name.
        flags: {name: (default, help)} or {name: (default, help, minimum)}; a flag has
            its default's type (str for None), and a bool flag may be given without a
            value. A flag whose default is `REQUIRED` must be given. `config` and
            `print_config` are always available.
        default: ({flag: value}) -> the configuration to use if none is given; with
            None, a configuration must be given.

    Returns:
        (config, {flag: value}). The configuration is loaded and overridden, but not yet
        validated. If a flag is given twice, the last value counts; a field of the
        configuration set twice to different values is refused.

    Raises:
        ValueError: an unknown flag or field, with the closest known one, or a bad
            value.
        SystemExit: after --help.
    """
    flags = {
        "config": (REQUIRED if default is None else "", None),
        "print_config": (False, "prints the configuration and exits"),
        **flags,
    }
    values, overrides, _ = _parse(argv, flags, positional=(), takes_config=True)
    recipe = values["config"]
    config = load(recipe) if recipe or default is None else default(values)
    return apply_overrides(config, overrides), values


def parse_flags(
    argv: Sequence[str], *, flags: Mapping[str, tuple], positional: Sequence[str] = ()
) -> dict[str, Any]:
    """Parse the arguments of a command without a configuration.

    Args:
        argv: the arguments, without the program's name.
        flags: as in `parse_command_line`.
        positional: names of the arguments without dashes, all required, in order. If
            the last name ends in "...", it takes one or more arguments; the result has
            their list under the name without the dots.

    Returns:
        {name: value} of flags and positional arguments.
    """
    values, _, arguments = _parse(
        argv, flags, positional=positional, takes_config=False
    )
    names = [name.removesuffix(VARIADIC_SUFFIX) for name in positional]
    if len(arguments) < len(names):
        raise ValueError(f"{names[len(arguments)]} is missing; --help shows the usage")
    if "" in arguments:  # an unset variable; as a path it would mean the directory "."
        name = names[min(arguments.index(""), len(names) - 1)]
        raise ValueError(f"{name} is empty; --help shows the usage")
    if positional and positional[-1].endswith(VARIADIC_SUFFIX):
        arguments = [*arguments[: len(names) - 1], arguments[len(names) - 1 :]]
    return {**values, **dict(zip(names, arguments, strict=True))}


def _parse(argv, flags, *, positional, takes_config):
    """Return {flag: value}, ['a.b=value', ...] and the positional arguments."""
    flag_texts, overrides, arguments = {}, [], []
    argv, words = list(argv), tuple(argv)
    while argv:
        word = argv.pop(0)
        if word in ("--help", "-h"):
            recipe = _recipe_of(words) if takes_config else None
            print(recipe or _help(flags, positional, takes_config), end="")
            raise SystemExit(0)
        if not word.startswith("--"):
            is_last = len(arguments) >= len(positional)
            if is_last and not "".join(positional[-1:]).endswith(VARIADIC_SUFFIX):
                raise ValueError(f"unexpected argument {word!r}; flags start with --")
            arguments.append(_expand(word))
            continue
        name, equals, value = word[2:].partition("=")
        is_field = takes_config and name.startswith("config.")
        if not is_field and name not in flags:
            hint = did_you_mean(name.split(".")[0], list(flags), prefix="--")
            raise ValueError(f"unknown flag --{name}{hint}")
        if not equals:
            if not is_field and isinstance(flags[name][0], bool):
                value = "true"
            elif argv and not argv[0].startswith("--"):
                value = argv.pop(0)
            else:
                raise ValueError(f"--{name} needs a value: --{name}=...")
        if is_field:
            overrides.append(f"{name}={value}")
        else:
            flag_texts[name] = _expand(value)
    values = {}
    for name, (default, _, *minimum) in flags.items():
        if name in flag_texts:
            if default is REQUIRED and name != "config" and not flag_texts[name]:
                raise ValueError(f"--{name} is empty: --{name}=...")
            kind = str if default in (None, REQUIRED) else type(default)
            values[name] = convert(f"--{name}", flag_texts[name], kind, default)
        elif default is REQUIRED:
            raise ValueError(f"--{name}=... is missing; --help shows the flags")
        else:
            values[name] = default
        if minimum and not values[name] >= minimum[0]:
            raise ValueError(f"--{name}={values[name]}: must be {minimum[0]} or more")
    return values, overrides, arguments


def _expand(value):
    """Return a flag's value with ~ expanded, as a shell does for a separate word."""
    return str(files.expand(value)) if value.startswith("~") else value


def _recipe_of(words):
    """Return the docstring and variants of the recipe named by --config, or None."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config":
            value = value if equals else "".join(words[i + 1 : i + 2])
            path, _ = _split(value)
            module = import_file(path)
            text, message = inspect.getdoc(module) or "no docstring", ""
            try:  # the error about an unknown variant names the others
                _build(module, path, "?")
            except ValueError as error:
                message = str(error).removesuffix(" (in variant '?')")
            variants = message.partition("unknown variant '?': ")[2] or "none"
            return f"{path}: {text}\n\nvariants: {variants}\n"
    return None


def _help(flags, positional, takes_config):
    """Return the help text of a command, a line for each argument."""
    lines = [f"  {name.upper():<26} (required)\n" for name in positional]
    lines += [HELP] if takes_config else []
    for name, (default, text, *_) in flags.items():
        if text is not None:
            default_note = (
                " (required)" if default is REQUIRED else f" (default: {default!r})"
            )
            if default is None or default is False:
                default_note = ""
            lines.append(f"  {'--' + name:<26} {text}{default_note}\n")
    return "arguments:\n" + "".join(lines)


def run_label(name: str, changed: Sequence[str]) -> str:
    """Return the name of a run's directory, such as quickstart-seed=1.

    Args:
        changed: "field=value" of each field that differs from the recipe.

    Raises:
        ValueError: the name is not one component of a path.
    """
    is_component = name == pathlib.PurePath(name).name and name not in ("", "..")
    if not (is_component and name.isprintable()):
        raise ValueError(
            f"config.name = {name!r}: must be the name of a directory, without '/'; "
            "or name the directory with --workdir=..."
        )
    words = [re.sub(r"[^\w.=+-]+", "_", text) for text in changed]
    label = "-".join([name, *words])
    if len(label) > MAX_LABEL:
        digest = fingerprint({"changed": [*changed]})
        label = f"{label[:MAX_LABEL]}-{digest}"
    return label


def run_command(
    main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None
) -> int:
    """Run `main(argv)` and return the process's exit code.

    A user's mistake (a ValueError raised by this package, a file that cannot be read or
    written) and a device that runs out of memory give a line `error: ...` on stderr and
    code 2. Any other error is a bug of this package and keeps its traceback. Control-C
    gives 130, a run that was told to stop (see `rsearch.hosts.preemption`) 75, and a
    run that stopped itself 3. If the output goes to a program that has ended, such as
    head, the command ends silently with 141.

    Without `argv` the process ends here after Control-C: Python's own exit would wait
    for searches that still run in threads.
    """
    open_streams()
    is_process = argv is None
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            if "--help" in argv or "-h" in argv:  # the list of flags follows below
                # With Python's -OO there are no docstrings.
                print(inspect.getdoc(sys.modules[main.__module__]) or "", end="\n\n")
            code = _exit_code(main, argv)
        except SystemExit:  # after --help
            if not _flush():
                return 2
            raise
        code = code if _flush() else code or 2
        if is_process and code == INTERRUPTED:
            os._exit(code)
        return code
    except BrokenPipeError:
        if not _drop_output():
            raise
        return BROKEN_PIPE


def _flush():
    """Flush the output streams now, since an error at interpreter exit is lost.

    Returns whether everything printed was written. A log on stderr may lose lines.
    """
    is_complete = True
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            _discard_output(stream)
            if stream is sys.stdout:
                is_complete = False
                _print_error(
                    f"error: {error.strerror}: the printed output is incomplete"
                )
    return is_complete


def _drop_output():
    """Discard the output of streams without a reader; return whether there are any."""
    is_any_closed = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        try:
            poll.register(stream.fileno(), 0)
        except OSError:  # a stream in memory, such as those of tests
            continue
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            is_any_closed = True
            _discard_output(stream)
    return is_any_closed


def _discard_output(stream):
    """Discard whatever is written to the stream, including its buffer."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, stream.fileno())
    os.close(null_device)


def _exit_code(main, argv):
    """Run main and return the exit code for its outcome."""
    try:
        return int(main(argv) or 0)
    except BaseException as error:
        code = exit_code_of(error)
        if code in (INTERNAL_ERROR, BROKEN_PIPE):
            raise
        if code == EXIT_CODE:  # the signal may also have ended the reader of the output
            _drop_output()
        _print_error(_last_line(error))
        return code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, PreemptedError):
        return EXIT_CODE
    if isinstance(error, StoppedError | LostDirectoryError):
        return STOPPED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    is_user_mistake = isinstance(error, ValueError | OSError) and is_user_error(error)
    return 2 if is_user_mistake or _is_out_of_memory(error) else INTERNAL_ERROR


def _last_line(error):
    """Return the line that a command prints about the error that ends it."""
    message = str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, PreemptedError):
        return f"{clean(message) or 'stopped'}; the same command resumes it"
    if _is_out_of_memory(error):
        return f"error: {clean(message.splitlines()[0])}; {OUT_OF_MEMORY_HINT}"
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename or 'no file named'}"
    if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
        message += "; ulimit -n allows more"
    return f"error: {clean(message)}"


def _is_out_of_memory(error):
    """Return whether JAX reports that a device is out of memory."""
    is_jax = isinstance(error, RuntimeError)
    is_jax &= type(error).__module__.partition(".")[0] in ("jax", "jaxlib")
    return is_jax and str(error).startswith("RESOURCE_EXHAUSTED")


def _print_error(text):
    """Write a line to stderr, if there is room for it."""
    with unless_full():
        print(text, file=sys.stderr)


def is_user_error(error: BaseException) -> bool:
    """Return whether a ValueError or OSError is due to a user's mistake."""
    if isinstance(error, OSError):
        user_errnos = (*DISK_FULL_ERRORS, *TOO_MANY_FILES)
        return error.filename is not None or error.errno in user_errnos
    # Libraries also raise ValueError, for our mistakes. JAX hides its own frames and
    # says so in a note.
    frames = traceback.extract_tb(error.__traceback__)
    source_file = pathlib.Path(frames[-1].filename)
    our_folders = [ROOT / "rsearch", ROOT / "configs", ROOT / "launch"]
    is_from_us = any(source_file.is_relative_to(folder) for folder in our_folders)
    is_from_jax = any("JAX" in note for note in getattr(error, "__notes__", ()))
    is_our_type = type(error).__module__.startswith("rsearch.")
    if isinstance(error, ValueError) and is_our_type:
        return is_from_us
    return type(error) is ValueError and is_from_us and not is_from_jax

"""The directory that a run owns: locked, bound to one configuration, resumable.

    <workdir>/lock          locked while a run writes here; names its process
    <workdir>/config.json   the configuration of the run, compared at every later start
    <workdir>/<stage>/      checkpoints, metrics.jsonl and curves of a stage

A run is resumed only with the configuration with which it began, except for the fields
that configs/base.py marks with `may_change`. Fields that have been renamed since then
are read under their current names.
"""

import json
import os
import pathlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from rsearch.config.fields import ABSENT, diff, fields, rename_fields, to_json
from rsearch.config.recipes import defaults, with_defaults
from rsearch.config.spec import base_fields
from rsearch.config.stage_plan import KINDS, kind_of
from rsearch.hosts import processes
from rsearch.runtime import files, run_directory
from rsearch.runtime.console import clean_line, note
from rsearch.runtime.digests import earlier_form

FORMAT = 1
FORMAT_KEY = "rsearch_workdir"  # distinguishes our config.json from a model's
CONFIG = "config.json"


class Workdir:
    """A run's directory, into which only one run writes; a context manager.

    Args:
        path: path of the directory; created if missing.
        config: the run's configuration, validated.
        inputs: {name: fingerprint} of what the configuration names: training data,
            demonstrations, tokenizer, index, weights. A run is resumed only with inputs
            of the same fingerprints.
        is_reader: True for evaluation: an existing run keeps its config.json, and its
            number of steps may differ from this configuration's.
        is_primary: False on all hosts of a run but the first; they share the directory,
            and neither lock it nor write its config.json.
        accept: names of inputs, and of fields such as config.rl.lr, that may have
            changed nevertheless. The run is then no longer the one that was begun.

    Attributes:
        path: absolute path of the directory.
        is_resumed: whether an earlier start had created the run.
        run_id: random hexadecimal id, drawn at the first start, which names the run in
            its checkpoints; "" if evaluation reads a run that an earlier version began.

    Raises:
        ValueError: another run holds the directory, it belongs to a different
            configuration, or it is neither empty nor a workdir. Nothing but its lock
            file has then been changed.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        config: ConfigDict,
        *,
        inputs: Mapping[str, str] | None = None,
        is_reader: bool = False,
        is_primary: bool = True,
        accept: Iterable[str] = (),
    ):
        self.path = pathlib.Path(path).absolute()
        self.run_id = ""
        self._directory, self._accept = None, frozenset(accept)
        self._is_primary = is_primary
        _check_usable(self.path)
        self.is_resumed = (self.path / CONFIG).exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._directory = run_directory.RunDirectory(self.path, locks=is_primary)
        if not is_primary:
            self.run_id = read_run_id(self.path) if self.is_resumed else ""
            return
        if holder := self._directory.crashed_holder:
            problem = "which has ended without releasing it; taken over"
            note(f"{self.path}: was in use by {holder}, {problem}")
        try:
            self.is_resumed = (self.path / CONFIG).exists()
            self._bind(config, inputs or {}, is_reader)
            self._remember_config()
        except BaseException:
            self.close()
            raise

    def _bind(self, config, inputs, is_reader):
        """Write config.json, or compare the configuration with an existing one."""
        new_config = json.loads(to_json(config))
        changes, old_inputs = [], {}
        if self.is_resumed:
            changes = _changes(self.path, new_config, is_reader, self._accept)
            # After the fields, which better explain why the inputs differ.
            body = _read(self.path)
            old_inputs = body.get("inputs", {})
            remedy = ""
            if is_reader:  # only a training command can bind the run to a new input
                remedy = "restore it, or name it in --accept of rsearch.train"
            _check_inputs(self.path, old_inputs, inputs, self._accept, remedy)
            self.run_id = body.get("run", "")
            if is_reader:
                return
        for name, old, new in changes:
            note(f"{self.path.name}: config.{name} is now {new!r}, was {old!r}")
        # Evaluation may have opened it first, without inputs such as training data.
        if changes or not self.run_id or inputs.items() - old_inputs.items():
            self.run_id = self.run_id or secrets.token_hex(8)
            body = {
                FORMAT_KEY: FORMAT,
                "run": self.run_id,
                "config": new_config,
                "inputs": {**old_inputs, **inputs},
            }
            write_json(self.path / CONFIG, body)

    def add_inputs(self, inputs: Mapping[str, str]) -> None:
        """Bind the run to more {name: fingerprint}: the inputs of a stage that begins.

        Raises:
            ValueError: an earlier start has recorded another fingerprint.
        """
        body = _read(self.path)
        old_inputs = body.get("inputs", {})
        _check_inputs(self.path, old_inputs, inputs, self._accept)
        if self._is_primary and inputs.items() - old_inputs.items():
            write_json(self.path / CONFIG, {**body, "inputs": {**old_inputs, **inputs}})
            self._remember_config()

    def _remember_config(self):
        """Have a directory that replaces this one if it is lost get its config.json."""
        self._directory.contents[CONFIG] = (self.path / CONFIG).read_bytes()

    def stop_if_lost(self) -> None:
        """End the run if the directory is no longer at its path.

        Raises:
            LostDirectoryError: says what has happened, and where the run is saved.
        """
        self._directory.stop_if_lost()

    def stage(self, name: str) -> pathlib.Path:
        """Return the directory of a stage; it is created if missing."""
        assert name.isidentifier(), name
        self.stop_if_lost()  # another run's files must not be read or written
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        files.sync_directory(self.path)  # the folder may be new
        return folder

    def close(self):
        """Release the directory."""
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def open_workdir(path: str | os.PathLike, config: ConfigDict, **settings) -> Workdir:
    """Return the Workdir of a run of one or several hosts; host 0 locks it."""
    workdirs = []
    processes.on_host0(lambda: workdirs.append(Workdir(path, config, **settings)))
    return (
        workdirs[0] if workdirs else Workdir(path, config, **settings, is_primary=False)
    )


def check_workdir(
    path: str | os.PathLike,
    config: ConfigDict,
    *,
    is_reader: bool = False,
    accept: Iterable[str] = (),
    remedy: str = "",
):
    """Refuse a directory that `Workdir` would refuse; change nothing.

    This is called before index, models and questions are loaded, which takes minutes.
    Their fingerprints are checked later, by `Workdir`.

    Args:
        path, config, is_reader, accept: see `Workdir`.
        remedy: what to do instead of changing a field, for the message.

    Raises:
        ValueError: as for `Workdir`.
    """
    path = pathlib.Path(path).absolute()
    _check_usable(path)
    run_directory.check_free(path)
    if (path / CONFIG).exists():
        _changes(path, json.loads(to_json(config)), is_reader, accept, remedy)


def read_config(path: str | os.PathLike) -> dict:
    """Return the configuration of a workdir, as a plain dict.

    A field that was added after the run had begun has its default.

    Raises:
        ValueError: the directory is not a workdir, or its config.json is invalid.
    """
    return with_defaults(_read(path)["config"])


def check_recorded(
    path: str | os.PathLike, inputs: Mapping[str, str], *, stage: str, remedy: str
) -> None:
    """Refuse inputs other than those of a stage of the run in a workdir.

    Args:
        inputs: {name: fingerprint}; any that the run did not record are accepted.
        remedy: what to do instead, for the message.

    Raises:
        ValueError: the directory is not a workdir, or an input has changed.
    """
    recorded = _read(path).get("inputs", {})
    # An input that differs in a stage is recorded with the stage's name.
    for name in inputs:
        if (full_name := f"{stage}.{name}") in recorded:
            recorded[name] = recorded[full_name]
    _check_inputs(pathlib.Path(path), recorded, inputs, (), remedy)


def read_run_id(path: str | os.PathLike) -> str:
    """Return the id of the run in a workdir; "" if an earlier version began it.

    Raises:
        ValueError: the directory is not a workdir, or its config.json is invalid.
    """
    return _read(path).get("run", "")


def _read(path):
    """Return config.json: {FORMAT_KEY: format, "run", "config", "inputs"}."""
    file = pathlib.Path(path) / CONFIG
    if not file.is_file():
        raise ValueError(f"{path}: not a workdir: it has no {CONFIG}")
    try:
        body = files.read_json(file)
        version, _ = body[FORMAT_KEY], body["config"].keys()
        for text in (body.get("run", ""), *body.get("inputs", {}).values()):
            text.encode()
        json.dumps(body, allow_nan=False)
        body["config"] = rename_fields(body["config"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file}: not the {CONFIG} of a workdir") from None
    if version != FORMAT:
        raise ValueError(f"{file}: format {version}, this program reads {FORMAT}")
    return body


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write an indented JSON file atomically and durably. NaN is refused: use None.

    Only host 0 writes.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if processes.is_host0():
        files.replace(path, text.encode())


def _check_usable(path):
    """Refuse a directory that holds something other than a run."""
    files.check_path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: --workdir is a file; it must be a directory")
    if not path.exists():
        return
    if (path / CONFIG).exists():
        read_config(path)
        return
    # A start that was killed before it wrote config.json leaves these two files.
    own_files = {run_directory.LOCK, f"{CONFIG}.tmp"}
    if other_files := {p.name for p in path.iterdir()} - own_files:
        raise ValueError(
            f"{path}: not empty, and not a workdir (it holds {min(other_files)!r}); "
            "name an empty or a new directory"
        )


def may_differ(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a field may differ between two starts of a run.

    Args:
        name: dotted name of the field.
        config: {dotted name: value} of the run's configuration.
    """
    return _may_always_change(name, config, config["stages"]) or (
        name.endswith(".steps") and name.split(".")[-2] in KINDS
    )


def _may_always_change(name, config, stages):
    """Return whether a field may change although these stages have started."""
    overridden_stage, field = _stage_and_field(name)
    if field is None or not field.may_change:
        return False
    if field.fixed_by is None:
        return True
    if overridden_stage:
        stages = {overridden_stage}.intersection(stages)
    other, fixing_value = field.fixed_by
    return not any(
        config.get(f"overrides.{stage}.{other}", config.get(other)) == fixing_value
        for stage in stages
        if kind_of(stage) == other.partition(".")[0]
    )


def _stage_and_field(name):
    """Return the stage whose override a dotted name is ("": none's), and its Field.

    The Field is None for names that configs/base.py does not have.
    """
    stage, (section, *rest) = "", name.split(".", 2)
    if section == "overrides" and len(rest) == 2:
        stage, name = rest
    return stage, base_fields().get(name)


def _changes(path, new_config, is_reader, accept, remedy=""):
    """Return [(field, old, new)] of a new configuration; refuse some changes."""
    default_fields = fields(defaults())
    changes = [
        (name, old, new)
        for name, old, new in diff(_read(path)["config"], new_config)
        # Omit fields that a later version has added, if they have their defaults.
        if old != ABSENT or name not in default_fields or new != default_fields[name]
        # Omit empty sections too: their last override may have been removed.
        if not (old in (ABSENT, {}) and new in (ABSENT, {}))
    ]
    started_stages = [s for s in new_config["stages"] if (path / s).exists()]
    refused_changes = [
        change
        for change in changes
        if not _may_change(change, new_config, started_stages)
        and f"config.{change[0]}" not in accept
        # No stage learns in an evaluation.
        and not (is_reader and may_differ(change[0], {"stages": ()}))
    ]
    if refused_changes:
        if is_reader:  # only a training command can change the run's configuration
            remedy = remedy or "use the run's values"
        raise ValueError(_refusal(path, refused_changes, remedy))
    return changes


def _may_change(change, config, started_stages):
    """Return whether a run may be resumed with this field changed.

    Stages may be appended, and any setting of a stage may change until the stage has
    started. After that it may only get more steps, and only if its learning rate is
    constant after the warm-up, it ends with the weights of its last step, and no later
    stage has started from its result.
    """
    name, old, new = change
    if _may_always_change(name, fields(config), started_stages):
        return True
    stages = config["stages"]
    if name == "stages":
        return isinstance(old, list) and list(new[: len(old)]) == old
    readers = [s for s in _reading_stages(name, stages) if s in started_stages]
    if _reading_stages(name, KINDS + tuple(stages)) and not readers:
        return True
    if name.endswith(".steps") and len(readers) == 1:
        (stage,) = readers
        overrides = config.get("overrides", {}).get(stage, {}).get(kind_of(stage), {})
        section = {**config[kind_of(stage)], **overrides}
        # The last checkpoint then has earlier weights than optimizer moments.
        if section.get("decay") or section.get("keep") == "lowest_loss":
            return False
        later_stages = stages[stages.index(stage) + 1 :]
        # One of the two may be ABSENT, which is not a number.
        return (
            isinstance(old, int)
            and isinstance(new, int)
            and new >= old
            and not set(later_stages) & set(started_stages)
        )
    return False


def _reading_stages(name, stages):
    """Return the stages that read a field, if nothing else reads it."""
    section, _, rest = name.partition(".")
    if section == "overrides":
        return [s for s in stages if s == rest.partition(".")[0]]
    return [s for s in stages if section == kind_of(s)]


def _check_inputs(path, old_inputs, new_inputs, accept, remedy=""):
    """Refuse inputs whose contents have changed since the run began."""
    for name in sorted(old_inputs.keys() & new_inputs.keys()):
        # An earlier version has only the sampled digest of weights.
        if old_inputs[name] in (new_inputs[name], earlier_form(new_inputs[name])):
            continue
        problem = f"its fingerprint was {old_inputs[name]}, now {new_inputs[name]}"
        if name not in accept:
            remedy = remedy or (
                "name another --workdir, or continue with the current one: "
                f"--accept={name}"
            )
            raise ValueError(
                f"{path}: {name} has changed since this run began: {problem}; {remedy}"
            )
        note(f"{path.name}: {name} has changed: {problem}")


def _refusal(path, changes, remedy):
    """Return the message of a refusal, with a table of the differences."""
    table = [("field", "there", "now")]
    table += [
        (clean_line(f"config.{name}"), repr(old), repr(new))
        for name, old, new in changes
    ]
    widths = [max(len(row[i]) for row in table) for i in (0, 1)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in table]
    lines += [
        f"  config.{name} changes the numbers, because config.{other} = {value!r}"
        for name, *_ in changes
        if (field := _stage_and_field(name)[1]) and field.fixed_by
        for other, value in [field.fixed_by]
    ]
    remedy = remedy or (
        "name another --workdir, or use the run's values, or continue with the new "
        f"ones, --accept={','.join(f'config.{name}' for name, _, _ in changes)}"
    )
    message = f"{path}: holds a run with a different configuration; {remedy}:"
    return "\n".join([message, *lines])

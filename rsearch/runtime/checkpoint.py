"""Save and restore checkpoints: arrays and a little JSON, complete or absent.

    <directory>/<step>/tree/          the arrays, written by Orbax
    <directory>/<step>/manifest.json  their description; a digest of each leaf and file

The manifest is written last, once the data is durable: a checkpoint exists if its
manifest does. A step without a manifest is a torn save, and counts as absent. Digests
are xxh3-128, and every restore verifies them. A step that fails verification is renamed
to `<step>.damaged` and never deleted.
"""

import errno
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from rsearch.hosts import collectives, processes
from rsearch.runtime import files, run_directory, storage
from rsearch.runtime.console import note

SCHEMA = 1
MANIFEST = "manifest.json"
TREE = "tree"
FOLDER = "checkpoints"  # in a stage's directory
SET_ASIDE_REASONS = ("damaged", "collapsed")  # the reasons why a step is set aside
LOWEST = "lowest"  # key of a meta: the step of the lowest validation loss, and the loss
MAX_LISTED = 8  # leaves named in one message


class DamagedError(ValueError):
    """A checkpoint whose contents are not what was saved."""


class ForeignError(ValueError):
    """A checkpoint that was made by another run or another stage."""


def save(
    directory: str | os.PathLike,
    step: int,
    tree: Any,
    meta: dict,
    *,
    keep: int,
    spare: int | None = None,
    made_by: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint, then delete old ones.

    Args:
        directory: directory of all checkpoints of one stage; created if missing.
        step: int >= 0. A torn save of this step is replaced.
        tree: a pytree of jax or numpy arrays of any dtype that JAX supports; PRNG keys
            are passed as their `jax.random.key_data`.
        meta: a dict of JSON values, all finite.
        keep: number of checkpoints to keep, this one included. Older ones are deleted
            once the new manifest is durable.
        spare: another step whose checkpoint is not deleted.
        made_by: {"run": id, "stage": name, ...} for the manifest, as JSON values.

    Raises:
        ValueError: a leaf would not be restored unchanged, the step is already saved,
            or Orbax could not read the path back.
        OSError: the disk refuses the write.
    """
    assert step >= 0 and keep >= 1, (step, keep)
    leaves = named(tree)
    for name, leaf in leaves.items():
        _check_leaf(name, leaf)
    descriptions = {name: describe(leaf) for name, leaf in leaves.items()}
    body = {
        "schema": SCHEMA,
        "step": int(step),
        "meta": json.loads(json.dumps(meta, allow_nan=False)),  # as read back later
        "leaves": descriptions,
        "made_by": dict(made_by or {}),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "orbax-checkpoint": importlib.metadata.version("orbax-checkpoint"),
            "numpy": np.__version__,
        },
    }
    folder = pathlib.Path(directory).absolute() / str(step)
    files.check_path(folder)
    if (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: there is a checkpoint of this step already")
    try:
        is_single_host = processes.num_hosts() == 1
        anchored_folder = run_directory.anchor(folder) if is_single_host else folder
        _write(anchored_folder, step, leaves, body, keep, spare)
    except OSError as error:
        code = error.errno or errno.EIO
        reason = error.strerror or os.strerror(code)
        size = sum(leaf.nbytes for leaf in leaves.values())
        reason += f" (a checkpoint of {size:,} bytes)"
        raise OSError(code, reason, str(folder)) from error


def _write(folder, step, leaves, body, keep, spare):
    """Write the data, then the manifest, and then delete old checkpoints."""
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        files.sync_directory(folder.parent.parent)
    processes.barrier(f"checkpoint made {step}")
    storage.write_tree(folder / TREE, {n: x for n, x in leaves.items() if x.size})
    processes.barrier(f"checkpoint written {step}")
    if jax.process_index() == 0:
        files.sync_tree(folder)
        files.sync_directory(folder.parent)
        body["files"] = _describe_files(folder)
        files.replace(folder / MANIFEST, encode(body))
        try:
            kept_steps = {*steps(folder.parent)[-keep:], spare}
            for other in step_folders(folder.parent):  # torn saves included
                if other < step and other not in kept_steps:
                    delete_step(folder.with_name(str(other)))
        except OSError as error:
            note(f"{error}; checkpoints older than step {step} remain")
    processes.barrier(f"checkpoint saved {step}")


def restore(
    directory: str | os.PathLike,
    step: int,
    like: Any,
    *,
    is_part: bool = False,
    made_by: Mapping[str, Any] | None = None,
) -> Any:
    """Restore the arrays of a checkpoint, and verify them.

    Args:
        directory: directory of all checkpoints of one stage.
        like: a tree of the saved structure; its leaves have shape and dtype, such as
            jax.ShapeDtypeStruct. If a leaf has a sharding, the restored array gets it,
            whatever it was saved with; otherwise it is on the first local device.
        is_part: whether the checkpoint may hold more leaves than `like`.
        made_by: {"run": id, "stage": name} that must have made it; see `check_made_by`.

    Returns:
        A tree of jax arrays with the structure of `like`, bit-identical to those saved.

    Raises:
        ValueError: structure, shapes or dtypes differ; the leaves are named.
        ForeignError: another run or stage has made it.
        DamagedError: on some host a file or a leaf does not match its digest.
    """
    folder = pathlib.Path(directory).absolute() / str(step)
    specs = named(like)
    with processes.same_error_on_all(DamagedError):
        body = read_manifest(directory, step)
        check_made_by(folder, body, made_by or {})
        leaves = body["leaves"]
        if is_part:
            leaves = {name: leaves[name] for name in specs.keys() & leaves}
        _check_structure(folder, leaves, specs)
        check_files(folder, body["files"])
    arrays = _read(folder, specs)
    descriptions = {name: describe(arrays[name]) for name in specs}
    with processes.same_error_on_all(DamagedError):
        check_leaves(folder, descriptions, leaves)
    treedef = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(treedef, [arrays[name] for name in specs])


def _read(folder, specs):
    """Return {name: array} of the wanted leaves of a step."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = {n: getattr(x, "sharding", None) or default for n, x in specs.items()}
    leaves = {n: x for n, x in specs.items() if 0 not in x.shape}
    arrays = storage.read_tree(folder / TREE, leaves, shardings) if leaves else {}
    for name, leaf in specs.items():
        if name not in arrays:  # an empty array: Orbax does not store those
            empty = np.zeros(leaf.shape, leaf.dtype)
            arrays[name] = jax.device_put(empty, shardings[name])
    return arrays


def newest_good(
    directory: str | os.PathLike,
    like: Any,
    *,
    made_by: Mapping[str, Any] | None = None,
) -> tuple[int, Any, dict] | None:
    """Restore the newest checkpoint that verifies; set aside newer, damaged ones.

    Returns:
        (step, tree, meta), or None if there is no checkpoint.

    Raises:
        ValueError: structure, shapes or dtypes differ; or there were checkpoints but
            all are damaged, or the hosts see none in common: starting again from
            nothing is the user's decision.
        ForeignError: another run or stage has made one.
    """
    known_steps = _agreed_steps(directory)
    for step in reversed(known_steps):
        try:
            tree = restore(directory, step, like, made_by=made_by)
            return step, tree, read_manifest(directory, step)["meta"]
        except DamagedError as error:
            new_path = set_aside(directory, step)
            note(f"{error}; set aside as {new_path.name}")
    if known_steps:
        raise ValueError(
            f"{directory}: every checkpoint is damaged ({len(known_steps)}, set aside "
            "as <step>.damaged); the same command now starts from the beginning"
        )
    return None


def newest_readable(
    directory: str | os.PathLike, like: Any, *, is_part: bool = False
) -> tuple[int, Any] | None:
    """Restore the newest checkpoint that verifies, and change nothing.

    For readers of another process's run, which may save and delete steps meanwhile:
    the steps are listed again after one that cannot be restored.

    Returns:
        (step, tree), or None if there is no checkpoint.

    Raises:
        ValueError: structure, shapes or dtypes differ; or there are checkpoints but
            all are damaged, or the hosts see none in common.
    """
    tried_steps = set()
    while new_steps := _shared_steps(steps_by_host(directory), directory) - tried_steps:
        step = max(new_steps)
        tried_steps.add(step)
        try:
            return step, restore(directory, step, like, is_part=is_part)
        except DamagedError as error:
            note(f"{error}; skipped")
        except Exception:
            # Readers on several hosts hold the run's lock: nothing is deleted then.
            if processes.num_hosts() > 1 or step in steps(directory):
                raise
    if tried_steps:
        step_list = ", ".join(map(str, sorted(tried_steps)))
        raise ValueError(f"{directory}: every checkpoint is damaged: {step_list}")
    return None


def steps_by_host(directory: str | os.PathLike) -> list[set[int]]:
    """Return the set of steps that each host sees, [hosts]: a network disk may lag.

    All hosts call this together.
    """
    payload = json.dumps(steps(directory)).encode()
    return [set(json.loads(reply)) for reply in processes.allgather_bytes(payload)]


def _shared_steps(views, directory) -> set[int]:
    """Return the steps that all hosts see; refuse hosts that have none in common."""
    shared_steps = set.intersection(*views)
    if any(views) and not shared_steps:
        raise ValueError(f"{directory}: no checkpoint is seen by all hosts: {views}")
    return shared_steps


def _agreed_steps(directory):
    """Return the steps that all hosts see; set aside later ones that only some see."""
    views = steps_by_host(directory)
    shared_steps = _shared_steps(views, directory)
    seen_steps = set.union(*views)
    for step in sorted(step for step in seen_steps if step > max(shared_steps)):
        laggards = [number for number, view in enumerate(views) if step not in view]
        new_path = set_aside(directory, step)
        reason = f"not seen by hosts {laggards}; continuing from {max(shared_steps)}"
        note(f"{directory}/{step}: {reason}, this step is set aside as {new_path.name}")
    return sorted(shared_steps)


def set_aside(
    directory: str | os.PathLike, step: int, *, reason: str = "damaged"
) -> pathlib.Path:
    """Rename a step to `<step>.<reason>`, and return its new path."""
    folder = pathlib.Path(directory) / str(step)
    new_path = folder.with_name(f"{step}.{reason}")
    number = 1
    while new_path.exists():
        number += 1
        new_path = folder.with_name(f"{step}.{reason}.{number}")
    processes.barrier(f"checkpoint judged {step}")
    if jax.process_index() == 0 and folder.exists():
        os.rename(folder, new_path)
        files.sync_directory(folder.parent)
    processes.barrier(f"checkpoint set aside {step}")
    return new_path


def delete_step(folder: pathlib.Path) -> None:
    """Delete a step's folder, manifest first.

    A crash in between thus leaves a torn save, not a damaged checkpoint.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    files.sync_directory(folder)
    shutil.rmtree(folder)


def verify(directory: str | os.PathLike, step: int) -> None:
    """Read a whole checkpoint, and compare each file and leaf with its digest.

    Raises:
        DamagedError: names the file or leaf that does not match, and both digests.
        ValueError: there is no such checkpoint.
    """
    body = read_manifest(directory, step)
    folder = pathlib.Path(directory).absolute() / str(step)
    check_files(folder, body["files"])
    for name, leaf in body["leaves"].items():  # one at a time, to save memory
        like = jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
        descriptions = {name: describe(_read(folder, {name: like})[name])}
        check_leaves(folder, descriptions, body["leaves"])


def steps(directory: str | os.PathLike) -> list[int]:
    """Return the sorted steps of a directory's checkpoints; [] if it is missing."""
    folder = pathlib.Path(directory)
    return sorted(
        s for s in step_folders(folder) if (folder / str(s) / MANIFEST).is_file()
    )


def latest(directory: str | os.PathLike) -> int | None:
    """Return the newest step, or None."""
    return max(steps(directory), default=None)


def read_manifest(directory: str | os.PathLike, step: int) -> dict:
    """Return the manifest of a step.

    Its keys are schema, step, meta, leaves, made_by, versions and files.

    Raises:
        DamagedError: its contents do not match its digest.
        ValueError: there is no such checkpoint, or it has another schema.
    """
    path = pathlib.Path(directory) / str(step) / MANIFEST
    if not path.is_file():
        step_list = ", ".join(map(str, steps(directory))) or "none"
        raise ValueError(f"{path.parent}: no such checkpoint; steps there: {step_list}")
    raw = path.read_bytes()
    try:
        body = json.loads(raw)
        body.pop("digest")
        is_intact = encode(body) == raw and body["step"] == step
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise DamagedError(f"{path}: damaged: its digest does not match its contents")
    if body["schema"] != SCHEMA:
        raise ValueError(
            f"{path}: schema {body['schema']}, but this program reads schema {SCHEMA}"
        )
    return body


def step_folders(directory: pathlib.Path) -> list[int]:
    """Return the steps that have a folder, complete or torn."""
    if not directory.is_dir():
        return []
    names = [p.name for p in directory.iterdir() if p.is_dir()]
    return [int(n) for n in names if n.isascii() and n.isdigit() and n == str(int(n))]


def describe(leaf: jax.Array | np.ndarray) -> dict:
    """Return shape, dtype and digest of an array, whatever its sharding."""
    digest = xxhash.xxh3_128()
    for chunk in collectives.gather_chunks(leaf):
        digest.update(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
    return {
        "shape": list(np.shape(leaf)),
        "dtype": str(np.dtype(leaf.dtype)),
        "digest": digest.hexdigest(),
    }


def _describe_files(folder: pathlib.Path) -> dict[str, dict]:
    """Return {relative path: size and digest} of a step's files, manifest excluded."""
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "digest": files.digest_file(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_files(folder: pathlib.Path, saved: dict[str, dict]) -> None:
    """Raise DamagedError if a file differs from its `_describe_files` entry."""
    for name, entry in saved.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path}: damaged: the file is missing")
        if path.stat().st_size != entry["bytes"]:
            raise DamagedError(
                f"{path}: damaged: {path.stat().st_size} bytes, the manifest has "
                f"{entry['bytes']}"
            )
        digest = files.digest_file(path)
        if digest != entry["digest"]:
            raise DamagedError(
                f"{path}: damaged: digest {digest}, the manifest has {entry['digest']}"
            )


def check_leaves(
    folder: pathlib.Path, restored: dict[str, dict], saved: dict[str, dict]
) -> None:
    """Raise DamagedError if a restored leaf differs from its saved description."""
    for name, description in restored.items():
        if description != saved[name]:
            raise DamagedError(
                f"{folder}: damaged: leaf {name} is {description}, the manifest has "
                f"{saved[name]}"
            )


def encode(body: dict) -> bytes:
    """Return the manifest's bytes in canonical form, so that any changed bit shows."""
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    signed_body = {**body, "digest": digest}
    return (json.dumps(signed_body, indent=1, sort_keys=True) + "\n").encode()


def named(tree: Any) -> dict[str, Any]:
    """Return {dotted name such as 'params.embed.kernel': leaf}, in the tree's order."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = {keystr(path): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the tree have the same dotted name")
    return leaves


def check_made_by(
    folder: pathlib.Path, body: dict, expected: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint that was made by another run or another stage.

    Args:
        body: its manifest. Manifests of earlier versions do not name run and stage.
        expected: {"run": id, "stage": name}; missing or empty values are not compared.

    Raises:
        ForeignError: names both runs, or both stages.
    """
    made_by = body.get("made_by", {})
    # Earlier versions called every supervised stage "sft", but stored its configuration
    # with its name.
    stages = made_by.get("config", {}).get("stages", ())
    if len(stages) == 1:
        made_by = made_by | {"stage": stages[0]}
    for name in ("run", "stage"):
        saved_name, expected_name = made_by.get(name, ""), expected.get(name, "")
        if saved_name and expected_name and saved_name != expected_name:
            raise ForeignError(
                f"{folder}: {name} {saved_name!r} made this checkpoint, not {name} "
                f"{expected_name!r}; move it out of {folder.parent}"
            )


def _check_leaf(name: str, leaf: Any) -> None:
    """Refuse a leaf that would not be restored unchanged."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = type(leaf).__name__
        raise ValueError(
            f"leaf {name} is of type {kind}, not an array; put it into meta"
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(f"leaf {name} is {leaf.dtype}: save jax.random.key_data of it")
    if leaf.dtype.kind not in "?biufcV" or leaf.dtype.names:
        raise ValueError(f"leaf {name} has dtype {leaf.dtype}, which JAX lacks")
    # A 64-bit leaf would be restored with 32 bits.
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise ValueError(f"leaf {name} has dtype {leaf.dtype}, but JAX uses 32 bits")


def _check_structure(
    folder: pathlib.Path, saved: dict[str, dict], specs: dict[str, Any]
) -> None:
    """Refuse a tree whose leaves differ from the saved ones; name those leaves."""
    problems = [f"{name} is not in the checkpoint" for name in specs.keys() - saved]
    problems += [f"{name} is only in the checkpoint" for name in saved.keys() - specs]
    for name in specs.keys() & saved.keys():
        shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
        if (shape, dtype) != (tuple(specs[name].shape), str(specs[name].dtype)):
            problems.append(
                f"{name} is {dtype}{list(shape)} in the checkpoint, here "
                f"{specs[name].dtype}{list(specs[name].shape)}"
            )
    if problems:
        problem_list = "; ".join(sorted(problems)[:MAX_LISTED])
        if len(problems) > MAX_LISTED:
            problem_list += f" (and {len(problems) - MAX_LISTED} more)"
        raise ValueError(f"{folder}: does not fit this program's state: {problem_list}")

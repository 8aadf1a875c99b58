"""Checkpoints: a tree of arrays and a little JSON, whole or not there at all.

    <directory>/<step>/tree/          the arrays, written by Orbax
    <directory>/<step>/manifest.json  what they are; a digest of every leaf and file

The manifest is written last, once the data is durable: a checkpoint exists when its
manifest does. A step without one is a torn save, and counts as not there. Digests are
xxh3-128 and are verified by every restore; a step that fails is renamed to
`<step>.damaged` and never deleted.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import platform
import shutil
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from jax.experimental import multihost_utils

from rsearch import files
from rsearch.console import note

SCHEMA = 1
MANIFEST = "manifest.json"
TREE = "tree"
MAX_NAMED = 8  # leaves named in one message


class DamagedError(ValueError):
    """A checkpoint that is not as it was saved."""


def save(directory, step, tree, meta, *, keep):
    """Writes a checkpoint, then deletes old ones.

    Args:
        directory: of all the checkpoints of one stage; made where it is missing.
        step: int >= 0. A torn save of this step is replaced.
        tree: a pytree of jax or numpy arrays of any dtype that JAX holds; key arrays go
            in as `jax.random.key_data`.
        meta: a dict of JSON values, all finite.
        keep: how many checkpoints to keep, this one included. Older ones go once the
            new manifest is durable.

    Raises:
        ValueError: a leaf that would not come back as it is, or a step already there.
        OSError: the disk refuses.
    """
    assert step >= 0 and keep >= 1, (step, keep)
    leaves = _named(tree)
    for name, leaf in leaves.items():
        _check_leaf(name, leaf)
    described = {name: _describe(leaf) for name, leaf in leaves.items()}
    body = {
        "schema": SCHEMA,
        "step": int(step),
        "meta": json.loads(json.dumps(meta, allow_nan=False)),  # as it will be read
        "leaves": described,
        "versions": _versions(),
    }
    folder = pathlib.Path(directory).absolute() / str(step)
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: there is a checkpoint of this step already")
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    _barrier(f"made {step}")
    _write_tree(folder / TREE, {n: x for n, x in leaves.items() if x.size})
    _barrier(f"written {step}")
    if jax.process_index() == 0:
        files.sync_tree(folder)
        files.sync_directory(folder.parent)
        body["files"] = _describe_files(folder)
        files.replace(folder / MANIFEST, _encode(body))
        _delete_old(folder.parent, step, keep)
    _barrier(f"saved {step}")


def steps(directory):
    """Sorted steps of the checkpoints that exist; [] where there is no directory."""
    folder = pathlib.Path(directory)
    return sorted(s for s in _step_folders(folder) if _manifest(folder, s).is_file())


def latest(directory):
    """The newest step, or None."""
    return max(steps(directory), default=None)


def read_manifest(directory, step):
    """The manifest of a step: schema, step, meta, leaves, versions and files.

    Raises:
        DamagedError: it is not as it was written.
        ValueError: there is no such checkpoint, or a newer program wrote it.
    """
    path = _manifest(pathlib.Path(directory), step)
    if not path.is_file():
        found = ", ".join(map(str, steps(directory))) or "none"
        raise ValueError(f"{path.parent}: no such checkpoint; steps there: {found}")
    raw = path.read_bytes()
    try:
        body = json.loads(raw)
        body.pop("digest")
        is_intact = _encode(body) == raw and body["step"] == step
    except (ValueError, KeyError, AttributeError, TypeError):
        is_intact = False
    if not is_intact:
        raise DamagedError(f"{path}: damaged: its digest does not match its contents")
    if body["schema"] != SCHEMA:
        raise ValueError(
            f"{path}: schema {body['schema']}, but this program reads schema {SCHEMA}"
        )
    return body


def restore(directory, step, like, *, is_part=False):
    """The arrays of a checkpoint, verified.

    Args:
        directory, step: as saved.
        like: the same structure with anything that has shape and dtype as leaves, such
            as jax.ShapeDtypeStruct. Where a leaf has a sharding, the restored array has
            it too, whatever it was saved with; else it is on the first local device.
        is_part: whether the checkpoint may hold more than `like` asks for.

    Returns:
        A tree of jax arrays with the structure of `like`, bit-identical to those saved.

    Raises:
        ValueError: structure, shapes or dtypes differ; the leaves are named.
        DamagedError: a file or a leaf does not match its digest.
    """
    body = read_manifest(directory, step)
    folder = _manifest(pathlib.Path(directory).absolute(), step).parent
    wanted, leaves = _named(like), body["leaves"]
    if is_part:
        leaves = {name: leaves[name] for name in wanted.keys() & leaves}
    _check_structure(folder, leaves, wanted)
    _check_files(folder, body["files"])
    shardings = {name: _sharding(leaf) for name, leaf in wanted.items()}
    stored = {n: x for n, x in wanted.items() if 0 not in x.shape}
    arrays = _read_tree(folder / TREE, stored, shardings) if stored else {}
    for name, leaf in wanted.items():
        if name not in arrays:  # no elements: Orbax does not store those
            empty = np.zeros(leaf.shape, leaf.dtype)
            arrays[name] = jax.device_put(empty, shardings[name])
        found, saved = _describe(arrays[name]), body["leaves"][name]
        if found != saved:
            raise DamagedError(
                f"{folder}: damaged: leaf {name} is {found}, the manifest has {saved}"
            )
    treedef = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(treedef, [arrays[name] for name in wanted])


def newest_good(directory, like):
    """The newest checkpoint that verifies; damaged ones on the way are set aside.

    Args:
        directory: of all the checkpoints of one stage.
        like: as for `restore`.

    Returns:
        (step, tree, meta), or None where there is no checkpoint.

    Raises:
        ValueError: structure, shapes or dtypes differ; or there were checkpoints and
            all of them are damaged, since going on from nothing is not ours to decide.
    """
    found = steps(directory)
    for step in reversed(found):
        try:
            tree = restore(directory, step, like)
            return step, tree, read_manifest(directory, step)["meta"]
        except DamagedError as error:
            aside = set_aside(directory, step)
            note(f"{error}; set aside as {aside.name}")
    if found:
        raise ValueError(
            f"{directory}: every checkpoint is damaged ({len(found)}, set aside as "
            "<step>.damaged); the same command again starts from the beginning"
        )
    return None


def set_aside(directory, step):
    """Renames a step to `<step>.damaged`, and returns its new path."""
    folder = pathlib.Path(directory) / str(step)
    aside = folder.with_name(f"{step}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{step}.damaged.{number}")
    _barrier(f"judged {step}")
    if jax.process_index() == 0:
        os.rename(folder, aside)
        files.sync_directory(folder.parent)
    _barrier(f"set aside {step}")
    return aside


def _manifest(directory, step):
    return directory / str(step) / MANIFEST


def _step_folders(directory):
    """Steps that have a folder, whole or torn."""
    if not directory.is_dir():
        return []
    names = [p.name for p in directory.iterdir() if p.is_dir()]
    return [int(n) for n in names if n.isascii() and n.isdigit() and n == str(int(n))]


def _delete_old(directory, newest, keep):
    """Deletes what is older than the last `keep` steps, torn saves included."""
    kept = set(steps(directory)[-keep:])
    for step in _step_folders(directory):
        if step < newest and step not in kept:
            # The manifest first: a crash in between leaves a torn step, not a bad one.
            _manifest(directory, step).unlink(missing_ok=True)
            files.sync_directory(directory / str(step))
            shutil.rmtree(directory / str(step))


def _named(tree):
    """{'params.embed.kernel': leaf}, in the tree's order."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in pairs
    }
    if len(named) != len(pairs):
        raise ValueError("two leaves of the tree have the same dotted name")
    return named


def _check_leaf(name, leaf):
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = type(leaf).__name__
        raise ValueError(f"leaf {name} is a {kind}, not an array; put it into meta")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(f"leaf {name} is {leaf.dtype}: save jax.random.key_data of it")
    if leaf.dtype.kind not in "?biufcV" or leaf.dtype.names:
        raise ValueError(f"leaf {name} has dtype {leaf.dtype}, which JAX does not hold")
    # A 64-bit leaf would come back as 32 bits.
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise ValueError(f"leaf {name} has dtype {leaf.dtype}, JAX runs with 32 bits")


def _describe(leaf):
    """Shape, dtype and digest of an array's bytes, the same however it is sharded."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    array = np.ascontiguousarray(leaf)
    raw = array.reshape(-1).view(np.uint8)
    return {
        "shape": list(np.shape(leaf)),
        "dtype": str(array.dtype),
        "digest": xxhash.xxh3_128_hexdigest(raw),
    }


def _describe_files(folder):
    """{relative path: size and digest} of all files of a step but the manifest."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): {
            "bytes": p.stat().st_size,
            "digest": files.digest_file(p),
        }
        for p in paths
    }


def _check_files(folder, saved):
    for name, described in saved.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path}: damaged: the file is missing")
        if path.stat().st_size != described["bytes"]:
            raise DamagedError(
                f"{path}: damaged: {path.stat().st_size} bytes, the manifest has "
                f"{described['bytes']}"
            )
        digest = files.digest_file(path)
        if digest != described["digest"]:
            raise DamagedError(
                f"{path}: damaged: digest {digest}, the manifest has "
                f"{described['digest']}"
            )


def _check_structure(folder, saved, wanted):
    """Refuses a tree that is not the one saved, naming the leaves."""
    wrong = [f"{name} is not in the checkpoint" for name in wanted.keys() - saved]
    wrong += [f"{name} is only in the checkpoint" for name in saved.keys() - wanted]
    for name in wanted.keys() & saved.keys():
        shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
        if (shape, dtype) != (tuple(wanted[name].shape), str(wanted[name].dtype)):
            wrong.append(
                f"{name} is {dtype}{list(shape)} in the checkpoint, here "
                f"{wanted[name].dtype}{list(wanted[name].shape)}"
            )
    if wrong:
        more = f" (and {len(wrong) - MAX_NAMED} more)" if len(wrong) > MAX_NAMED else ""
        named = "; ".join(sorted(wrong)[:MAX_NAMED])
        raise ValueError(f"{folder}: does not fit this program's state: {named}{more}")


def _sharding(leaf):
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        return sharding
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _write_tree(path, arrays):
    """Orbax writes each process's shards; a full disk becomes an OSError."""
    if not arrays:
        return
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(path, args=ocp.args.PyTreeSave(arrays))
    except Exception as error:
        for code in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), str(path)) from error
        raise


def _read_tree(path, wanted, shardings):
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            sharding=shardings[name], global_shape=tuple(x.shape), dtype=x.dtype
        )
        for name, x in wanted.items()
    }
    args = ocp.args.PyTreeRestore(
        item=dict(wanted), restore_args=restore_args, partial_restore=True
    )
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path, args=args)


@contextlib.contextmanager
def _quiet():
    """Without Orbax's log lines, which speak about its own layout."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what fails is raised as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _encode(body):
    """The manifest's bytes: one spelling, so that any changed bit shows."""
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    whole = {**body, "digest": digest}
    return (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()


def _versions():
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "orbax-checkpoint": ocp.__version__,
        "numpy": np.__version__,
    }


def _barrier(name):
    """Waits for the other processes, where there are any."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"checkpoint {name}")

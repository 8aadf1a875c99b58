"""Checkpoints: a tree of arrays and a little JSON, whole or not there at all.

    <directory>/<step>/tree/          the arrays, written by Orbax
    <directory>/<step>/manifest.json  what they are; a digest of every leaf and file

The manifest is written last, once the data is durable: a checkpoint exists when its
manifest does. A step without one is a torn save, and counts as not there. Digests are
xxh3-128 and are verified by every restore; a step that fails is renamed to
`<step>.damaged` and never deleted.

    python -m rsearch.checkpoint ls|verify|gc DIRECTORY

lists the checkpoints of a run or a stage, verifies them, or deletes old and torn ones.
"""

import contextlib
import errno
import json
import os
import pathlib
import platform
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rsearch import files, hosts, storage
from rsearch.config import parse_flags, run_command
from rsearch.console import note, table
from rsearch.manifest import (
    MANIFEST,
    SCHEMA,
    DamagedError,
    check_files,
    check_leaf,
    check_leaves,
    check_structure,
    describe,
    describe_files,
    encode,
    latest,
    named,
    path_of,
    read_manifest,
    step_folders,
    steps,
)

__all__ = ["DamagedError", "latest", "newest_good", "read_manifest", "restore"]
__all__ += ["save", "set_aside", "steps"]

TREE = "tree"
FOLDER = "checkpoints"  # of a stage's checkpoints, in its directory
ASIDE = ("damaged", "collapsed")  # why a step is set aside
FLAGS = {
    "step": (-1, "verify: this one alone"),
    "keep": (2, "gc: newest checkpoints that stay in each stage"),
    "damaged": (False, "gc: deletes what was set aside as damaged, too"),
    "collapsed": (False, "gc: likewise, what a roll-back has set aside"),
    "dry_run": (False, "gc: tells what it would delete, and deletes nothing"),
}


def save(directory, step, tree, meta, *, keep, spare=None):
    """Writes a checkpoint, then deletes old ones.

    Args:
        directory: of all the checkpoints of one stage; made where it is missing.
        step: int >= 0. A torn save of this step is replaced.
        tree: a pytree of jax or numpy arrays of any dtype that JAX holds; key arrays go
            in as `jax.random.key_data`.
        meta: a dict of JSON values, all finite.
        keep: how many checkpoints to keep, this one included. Older ones go once the
            new manifest is durable.
        spare: a step whose checkpoint stays beside them, if there is one.

    Raises:
        ValueError: a leaf that would not come back as it is, a step already there, or a
            path of which nothing comes back.
        OSError: the disk refuses.
    """
    assert step >= 0 and keep >= 1, (step, keep)
    leaves = named(tree)
    for name, leaf in leaves.items():
        check_leaf(name, leaf)
    described = {name: describe(leaf) for name, leaf in leaves.items()}
    body = {
        "schema": SCHEMA,
        "step": int(step),
        "meta": json.loads(json.dumps(meta, allow_nan=False)),  # as it will be read
        "leaves": described,
        "versions": _versions(),
    }
    folder = pathlib.Path(directory).absolute() / str(step)
    files.check_path(folder)
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder}: there is a checkpoint of this step already")
    with _refused(folder, sum(leaf.nbytes for leaf in leaves.values())):
        _write(folder, step, leaves, body, keep, spare)


def _write(folder, step, leaves, body, keep, spare):
    """Data first, the manifest last, and then old ones go."""
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    _barrier(f"made {step}")
    storage.write_tree(folder / TREE, {n: x for n, x in leaves.items() if x.size})
    _barrier(f"written {step}")
    if jax.process_index() == 0:
        files.sync_tree(folder)
        files.sync_directory(folder.parent)
        body["files"] = describe_files(folder)
        files.replace(folder / MANIFEST, encode(body))
        try:
            _delete_old(folder.parent, step, keep, spare)
        except OSError as error:
            note(f"{error}; older checkpoints than {folder} stay")
    _barrier(f"saved {step}")


@contextlib.contextmanager
def _refused(folder, size):
    """What the disk says in it gets the folder, and how much was to be written."""
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        told = f"{os.strerror(code)} (a checkpoint of {size:,} bytes)"
        raise OSError(code, told, str(folder)) from error


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
        DamagedError: a file or a leaf does not match its digest, on any of the hosts.
    """
    folder = path_of(pathlib.Path(directory).absolute(), step).parent
    wanted = named(like)
    with hosts.alike(DamagedError):
        body = read_manifest(directory, step)
        leaves = body["leaves"]
        if is_part:
            leaves = {name: leaves[name] for name in wanted.keys() & leaves}
        check_structure(folder, leaves, wanted)
        check_files(folder, body["files"])
    arrays = _read(folder, wanted)
    found = {name: describe(arrays[name]) for name in wanted}
    with hosts.alike(DamagedError):
        check_leaves(folder, found, leaves)
    treedef = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(treedef, [arrays[name] for name in wanted])


def _read(folder, wanted):
    """{name: array} of these leaves of a step."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = {n: getattr(x, "sharding", None) or first for n, x in wanted.items()}
    stored = {n: x for n, x in wanted.items() if 0 not in x.shape}
    arrays = storage.read_tree(folder / TREE, stored, shardings) if stored else {}
    for name, leaf in wanted.items():
        if name not in arrays:  # no elements: Orbax does not store those
            empty = np.zeros(leaf.shape, leaf.dtype)
            arrays[name] = jax.device_put(empty, shardings[name])
    return arrays


def newest_good(directory, like, *, is_part=False):
    """The newest checkpoint that verifies; damaged ones on the way are set aside.

    Args:
        directory: of all the checkpoints of one stage.
        like, is_part: as for `restore`.

    Returns:
        (step, tree, meta), or None where there is no checkpoint.

    Raises:
        ValueError: structure, shapes or dtypes differ; or there were checkpoints and
            all of them are damaged, or no host sees those of another, since going on
            from nothing is not ours to decide.
    """
    found = _agreed(directory)
    for step in reversed(found):
        try:
            tree = restore(directory, step, like, is_part=is_part)
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


def seen(directory) -> list[set[int]]:
    """[hosts] the steps that each sees, of a disk that may lag; all ask together."""
    own = json.dumps(steps(directory)).encode()
    return [set(json.loads(told)) for told in hosts.exchange(own)]


def _agreed(directory):
    """The steps that all hosts see; later ones, of a disk that lags, are set aside."""
    views = seen(directory)
    shared, known = set.intersection(*views), set.union(*views)
    if known and not shared:
        raise ValueError(f"{directory}: no two hosts see the same checkpoints: {views}")
    for step in sorted(step for step in known if step > max(shared)):
        without = [number for number, own in enumerate(views) if step not in own]
        aside = set_aside(directory, step)
        told = f"not seen by hosts {without}; goes on from {max(shared)}"
        note(f"{directory}/{step}: {told}, this one is set aside as {aside.name}")
    return sorted(shared)


def set_aside(directory, step, *, why="damaged"):
    """Renames a step to `<step>.<why>`, and returns its new path."""
    folder = pathlib.Path(directory) / str(step)
    aside = folder.with_name(f"{step}.{why}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{step}.{why}.{number}")
    _barrier(f"judged {step}")
    if jax.process_index() == 0 and folder.exists():
        os.rename(folder, aside)
        files.sync_directory(folder.parent)
    _barrier(f"set aside {step}")
    return aside


def _delete_old(directory, newest, keep, spare):
    """Deletes what is older than the last `keep` steps, torn saves included."""
    kept = {*steps(directory)[-keep:], spare}
    for step in step_folders(directory):
        if step < newest and step not in kept:
            _delete(directory / str(step))


def _delete(folder):
    """Deletes a step's folder, the manifest first.

    So a crash in between leaves a torn step, not a damaged one.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    files.sync_directory(folder)
    shutil.rmtree(folder)


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


def verify(directory, step) -> None:
    """Reads a checkpoint as a whole and compares each file and leaf with its digest.

    Raises:
        DamagedError: what does not match, and both digests.
        ValueError: there is no such checkpoint.
    """
    body = read_manifest(directory, step)
    folder = path_of(pathlib.Path(directory).absolute(), step).parent
    check_files(folder, body["files"])
    for name, leaf in body["leaves"].items():  # one at a time: all may be too large
        like = jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
        found = {name: describe(_read(folder, {name: like})[name])}
        check_leaves(folder, found, body["leaves"])


def main(argv) -> int:
    """The command; 1 where something is damaged."""
    places = "action", "directory"
    given = parse_flags(argv, flags=FLAGS, positional=places)
    actions = {"ls": _list, "verify": _verify_all, "gc": _collect}
    if given["action"] not in actions:
        raise ValueError(f"{given['action']!r}: must be one of {', '.join(actions)}")
    if given["keep"] < 1:
        raise ValueError(f"--keep={given['keep']}: must be at least 1")
    root = pathlib.Path(given["directory"])
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such directory")
    found = [root] if any(_entries(root)) else sorted(root.rglob(FOLDER))
    if not found:
        raise ValueError(f"{root}: holds no checkpoints")
    return actions[given["action"]](root, found, given)


def _entries(directory):
    """(folder, state) of all that is there: "whole", "torn", or why it is set aside."""
    own = {directory / str(step) for step in step_folders(directory)}
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        if folder in own:
            yield folder, "whole" if (folder / MANIFEST).is_file() else "torn"
            continue
        step, _, why = folder.name.partition(".")
        if step.isdecimal() and (why := why.partition(".")[0]) in ASIDE:
            yield folder, why


def _list(root, found, given):
    """A row for each, the oldest first."""
    rows = []
    for directory in found:
        entries = sorted(_entries(directory), key=lambda e: (_number(e[0]), e[0].name))
        for folder, state in entries:
            own = [p for p in folder.rglob("*") if p.is_file()]
            size = sum(p.stat().st_size for p in own) / 2**20
            stage = directory.relative_to(root).parent.as_posix()
            rows.append((stage, folder.name, state, round(size, 3), len(own)))
    table(str(root), ("stage", "step", "state", "MiB", "files"), rows)
    return 0


def _number(folder):
    return int(folder.name.partition(".")[0])


def _verify_all(root, found, given):
    """Verifies all that count, and changes nothing."""
    num_damaged, asked = 0, given["step"]
    for directory in found:
        chosen = [asked] if asked >= 0 else steps(directory)
        for step in chosen:
            try:
                verify(directory, step)
                note(f"{directory / str(step)}: verified")
            except DamagedError as error:
                num_damaged += 1
                note(str(error))
    return 1 if num_damaged else 0


def _collect(root, found, given):
    """Deletes what is older than the newest, and what never was whole.

    Not beside a run: what is not whole there may be about to become so.
    """
    with contextlib.ExitStack() as held:
        for run in {directory.absolute().parents[1] for directory in found}:
            lock = run / files.LOCK
            if lock.exists() and not held.enter_context(files.locked(lock)):
                raise ValueError(f"{run}: in use by a run; wait for it to end")
        return _collected(found, given)


def _collected(found, given):
    for directory in found:
        kept = {str(step) for step in steps(directory)[-given["keep"] :]}
        for folder, state in _entries(directory):
            stays = not given[state] if state in ASIDE else folder.name in kept
            if stays:
                continue
            note(f"{folder}: {state}, {'would be ' * given['dry_run']}deleted")
            if not given["dry_run"]:
                _delete(folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

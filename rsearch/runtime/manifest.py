"""A checkpoint's manifest: what there is, and a digest of every leaf and file.

It is written last, once the data is durable: a checkpoint exists when its manifest
does. Digests are xxh3-128.
"""

import json
import pathlib

import jax
import numpy as np
import xxhash

from rsearch.hosts import collectives
from rsearch.runtime import files

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_NAMED = 8  # leaves named in one message


class DamagedError(ValueError):
    """A checkpoint that is not as it was saved."""


def steps(directory):
    """Sorted steps of the checkpoints that exist; [] where there is no directory."""
    folder = pathlib.Path(directory)
    return sorted(s for s in step_folders(folder) if path_of(folder, s).is_file())


def latest(directory):
    """The newest step, or None."""
    return max(steps(directory), default=None)


def read_manifest(directory, step):
    """The manifest of a step: schema, step, meta, leaves, versions and files.

    Raises:
        DamagedError: it is not as it was written.
        ValueError: there is no such checkpoint, or a newer program wrote it.
    """
    path = path_of(pathlib.Path(directory), step)
    if not path.is_file():
        found = ", ".join(map(str, steps(directory))) or "none"
        raise ValueError(f"{path.parent}: no such checkpoint; steps there: {found}")
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


def path_of(directory, step):
    """Of a step's manifest."""
    return directory / str(step) / MANIFEST


def step_folders(directory):
    """Steps that have a folder, whole or torn."""
    if not directory.is_dir():
        return []
    names = [p.name for p in directory.iterdir() if p.is_dir()]
    return [int(n) for n in names if n.isascii() and n.isdigit() and n == str(int(n))]


def describe(leaf):
    """Shape, dtype and digest of an array's bytes, the same however it is sharded."""
    digest = xxhash.xxh3_128()
    for piece in collectives.gather_chunks(leaf):
        digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
    return {
        "shape": list(np.shape(leaf)),
        "dtype": str(np.dtype(leaf.dtype)),
        "digest": digest.hexdigest(),
    }


def describe_files(folder):
    """{relative path: size and digest} of all files of a step but the manifest."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): {
            "bytes": p.stat().st_size,
            "digest": files.digest_file(p),
        }
        for p in paths
    }


def check_files(folder, saved):
    """Raises DamagedError where a file is not as `describe_files` had it."""
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


def check_leaves(folder, found, saved):
    """Raises DamagedError where a leaf is not as `describe` had it."""
    for name, described in found.items():
        if described != saved[name]:
            raise DamagedError(
                f"{folder}: damaged: leaf {name} is {described}, the manifest has "
                f"{saved[name]}"
            )


def encode(body):
    """The manifest's bytes: one spelling, so that any changed bit shows."""
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    whole = {**body, "digest": digest}
    return (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()


def named(tree):
    """{'params.embed.kernel': leaf}, in the tree's order."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in pairs
    }
    if len(named) != len(pairs):
        raise ValueError("two leaves of the tree have the same dotted name")
    return named


def check_leaf(name, leaf):
    """Refuses what would not come back as it is."""
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


def check_structure(folder, saved, wanted):
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

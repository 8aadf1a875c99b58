"""Write and check a checkpoint's manifest: a digest of every leaf and file.

It is written last, once the data is durable: a checkpoint exists when its manifest
does. Digests are xxh3-128.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import xxhash

from rsearch.hosts import collectives
from rsearch.runtime import files

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_LISTED = 8  # leaves named in one message


class DamagedError(ValueError):
    """A checkpoint that is not as it was saved."""


class ForeignError(ValueError):
    """A checkpoint that another run or another stage has made."""


def steps(directory: str | os.PathLike) -> list[int]:
    """Return the sorted steps of the checkpoints that exist in a directory, if any."""
    folder = pathlib.Path(directory)
    return sorted(s for s in step_folders(folder) if path_of(folder, s).is_file())


def latest(directory: str | os.PathLike) -> int | None:
    """Return the newest step, or None."""
    return max(steps(directory), default=None)


def read_manifest(directory: str | os.PathLike, step: int) -> dict:
    """Return the manifest of a step.

    Its keys are schema, step, meta, leaves, made_by, versions and files.

    Raises:
        DamagedError: it is not as it was written.
        ValueError: there is no such checkpoint, or a newer program wrote it.
    """
    path = path_of(pathlib.Path(directory), step)
    if not path.is_file():
        known = ", ".join(map(str, steps(directory))) or "none"
        raise ValueError(f"{path.parent}: no such checkpoint; steps there: {known}")
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


def path_of(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Return the path of a step's manifest."""
    return directory / str(step) / MANIFEST


def step_folders(directory: pathlib.Path) -> list[int]:
    """Return the steps that have a folder, complete or torn."""
    if not directory.is_dir():
        return []
    names = [p.name for p in directory.iterdir() if p.is_dir()]
    return [int(n) for n in names if n.isascii() and n.isdigit() and n == str(int(n))]


def describe(leaf: jax.Array | np.ndarray) -> dict:
    """Return shape, dtype and digest of an array, the same however it is sharded."""
    digest = xxhash.xxh3_128()
    for chunk in collectives.gather_chunks(leaf):
        digest.update(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
    return {
        "shape": list(np.shape(leaf)),
        "dtype": str(np.dtype(leaf.dtype)),
        "digest": digest.hexdigest(),
    }


def describe_files(folder: pathlib.Path) -> dict[str, dict]:
    """Return {relative path: size and digest} of a step's files but the manifest."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): {
            "bytes": p.stat().st_size,
            "digest": files.digest_file(p),
        }
        for p in paths
    }


def check_files(folder: pathlib.Path, saved: dict[str, dict]) -> None:
    """Raise DamagedError where a file differs from its `describe_files` entry."""
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


def check_leaves(
    folder: pathlib.Path, restored: dict[str, dict], saved: dict[str, dict]
) -> None:
    """Raise DamagedError where a restored leaf is described otherwise than saved."""
    for name, described in restored.items():
        if described != saved[name]:
            raise DamagedError(
                f"{folder}: damaged: leaf {name} is {described}, the manifest has "
                f"{saved[name]}"
            )


def encode(body: dict) -> bytes:
    """Return the manifest's bytes: one spelling, so that any changed bit shows."""
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    signed = {**body, "digest": digest}
    return (json.dumps(signed, indent=1, sort_keys=True) + "\n").encode()


def named(tree: Any) -> dict[str, Any]:
    """Return {'params.embed.kernel': leaf}, in the tree's order."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in pairs
    }
    if len(named) != len(pairs):
        raise ValueError("two leaves of the tree have the same dotted name")
    return named


def check_made_by(
    folder: pathlib.Path, body: dict, expected: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint that another run or another stage has made.

    Args:
        folder: of the step.
        body: its manifest. One of an earlier version does not say who made it.
        expected: {"run": id, "stage": name}; an id of "" is not compared, nor is what
            is missing.

    Raises:
        ForeignError: names both.
    """
    made_by = body.get("made_by", {})
    for name in ("run", "stage"):
        saved, wanted = made_by.get(name, ""), expected.get(name, "")
        if saved and wanted and saved != wanted:
            raise ForeignError(
                f"{folder}: {name} {saved!r} made this checkpoint, not {name} "
                f"{wanted!r}; move it out of {folder.parent}"
            )


def check_leaf(name: str, leaf: Any) -> None:
    """Refuse a leaf that would not be restored as it is."""
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


def check_structure(
    folder: pathlib.Path, saved: dict[str, dict], wanted: dict[str, Any]
) -> None:
    """Refuse a tree whose leaves are not those that were saved; name the leaves."""
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
        more = (
            f" (and {len(wrong) - MAX_LISTED} more)" if len(wrong) > MAX_LISTED else ""
        )
        named = "; ".join(sorted(wrong)[:MAX_LISTED])
        raise ValueError(f"{folder}: does not fit this program's state: {named}{more}")

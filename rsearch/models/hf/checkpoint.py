"""Hugging Face checkpoints: find one, load its weights, write one.

Only safetensors are read: a pickle runs code when it is opened.
"""

import json
import math
import os
import pathlib
import shutil
import uuid

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from rsearch.hosts import collectives
from rsearch.models.hf import weights
from rsearch.models.hf.config import config_of

EXPORT_DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}

# What a download holds: configuration, tokenizer, and safetensors of the top folder.
_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def find_model(source) -> pathlib.Path:
    """The directory of a model: `source` itself, or a download of that hub id.

    Downloads are kept in huggingface_hub's cache.

    Raises:
        ValueError: neither a directory nor a hub id that could be fetched, or one
            without safetensors weights.
    """
    directory = pathlib.Path(source).expanduser()
    if directory.is_dir():
        return directory
    try:
        found = huggingface_hub.snapshot_download(
            str(source),
            allow_patterns=list(_FETCHED),
            ignore_patterns=["*/*.safetensors"],
        )
    # The hub's own errors are OSErrors and ValueErrors; so are those of the network.
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model {str(source)!r} is neither a directory here nor a Hugging Face hub "
            f"id that could be fetched ({type(error).__name__}: {reason})"
        ) from error
    found = pathlib.Path(found)
    if not any(found.glob("*.safetensors")):
        command = weights.convert_command("model/model.safetensors", [])
        raise ValueError(
            f"model {str(source)!r} has no safetensors weights on the hub, and pickles "
            f"are not fetched, for they can run code; if you trust them, convert them "
            f"yourself (needs torch) and give the directory instead:\n"
            f"hf download {source} --local-dir model && {command} "
            f"model/pytorch_model*.bin"
        )
    return found


def load_params(
    directory, spec, *, shardings=None, value_head=False, dtype=jnp.float32
):
    """Parameters of a checkpoint, in the tree of `init_params`.

    Every device reads its own part of every tensor from disk; on the host lies at most
    one leaf of the tree at a time.

    Args:
        directory: holds model.safetensors, or shards and their index.
        spec: what `hf_config.read_spec` returned for it.
        shardings: a tree like the parameters' with the sharding of each leaf
            (`param_shardings` of `weights.param_shapes`); None puts all on one device.
        value_head: add a value head of zeros, which no checkpoint holds.
        dtype: of the parameters, whatever that on disk (bfloat16, float16, float32).

    Raises:
        ValueError: no safetensors weights, damaged ones, or a table of every tensor
            that is missing, extra or mis-shaped.
    """
    directory = pathlib.Path(directory)
    tensors = weights.open_tensors(directory)
    weights.check_tensors(tensors, spec, source=directory)
    shapes = weights.param_shapes(spec, value_head=value_head)
    if shardings is None:
        one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one_device, shapes)

    def load(path, leaf, sharding):
        name = weights.leaf_name(path)
        blocks = {}

        def read(index):
            # Replicas share one read.
            key = tuple((part.start, part.stop) for part in index)
            if key not in blocks:
                blocks[key] = weights.read_leaf(tensors, name, leaf.shape, index, dtype)
            return blocks[key]

        return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=dtype)

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def export(
    directory,
    params,
    spec,
    tokenizer=None,
    *,
    dtype="float32",
    max_shard_bytes=5_000_000_000,
):
    """Writes a checkpoint that `transformers` and `load_params` can read.

    The directory appears under its name when it is complete. A value head is not part
    of it. Where the mesh spans hosts, every host must call this; the first one writes.

    Args:
        directory: to be made; may exist if it is empty.
        params: the tree of `init_params`, arrays on host or devices.
        spec: their shape.
        tokenizer: saved beside the weights; None leaves it out.
        dtype: on disk: float32, bfloat16 or float16.
        max_shard_bytes: bytes a file, unless one tensor alone is larger.

    Raises:
        ValueError: the directory holds something, an unknown dtype, or a shape that
            transformers has no model for.
    """
    directory = pathlib.Path(directory).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; it is not overwritten")
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"{dtype=} is not one of {sorted(EXPORT_DTYPES)}")
    config = config_of(spec, dtype=dtype)
    shards = _plan_shards(params, spec, EXPORT_DTYPES[dtype], max_shard_bytes)
    writes = jax.process_index() == 0
    part = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        if writes:
            part.mkdir(parents=True)
            if tokenizer is not None:
                tokenizer.save(part)
                config |= tokenizer.special_ids
            (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file, entries in shards.items():
            tensors = {
                name: _fetch(leaf, layer, groups, EXPORT_DTYPES[dtype])
                for name, leaf, layer, groups, _ in entries
            }
            if writes:
                save_file(tensors, part / file, metadata={"format": "pt"})
                # safetensors makes its files private; these are public like the rest.
                os.chmod(part / file, (part / "config.json").stat().st_mode)
        if writes:
            if len(shards) > 1:
                _write_index(part / weights.INDEX_FILE, shards)
            os.replace(part, directory)
    finally:
        if writes:
            shutil.rmtree(part, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export {directory}")


def _plan_shards(params, spec, dtype, max_bytes):
    """{file name: [(tensor name, leaf, layer or None, groups, bytes)]}, by layer."""
    leaves = {
        weights.leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    entries = []
    shapes = weights.param_shapes(spec)
    for path, like in jax.tree_util.tree_leaves_with_path(shapes):
        name = weights.leaf_name(path)
        template, groups = weights.LAYOUT[name]
        leaf = leaves.pop(name)
        assert leaf.shape == like.shape, (name, leaf.shape, like.shape)
        stacked = "{}" in template
        size = math.prod(leaf.shape[stacked:]) * np.dtype(dtype).itemsize
        for layer in range(spec.num_layers) if stacked else (None,):
            entries.append((template.format(layer), leaf, layer, groups, size))
    assert leaves.keys() <= {"value"}, sorted(leaves)
    # One layer after the other; what belongs to none goes last.
    entries.sort(key=lambda e: spec.num_layers if e[2] is None else e[2])
    files, room = [[]], max_bytes
    for entry in entries:
        if files[-1] and entry[-1] > room:
            files.append([])
            room = max_bytes
        files[-1].append(entry)
        room -= entry[-1]
    if len(files) == 1:
        return {weights.SINGLE_FILE: entries}
    return {
        f"model-{number:05}-of-{len(files):05}.safetensors": held
        for number, held in enumerate(files, start=1)
    }


def _fetch(leaf, layer, groups, dtype):
    """One tensor on the host, laid out as on disk."""
    value = leaf if layer is None else leaf[layer]
    stored = weights.to_stored(collectives.gather_array(value), groups).astype(dtype)
    return np.ascontiguousarray(stored)


def _write_index(path, shards):
    weight_map = {e[0]: file for file, entries in shards.items() for e in entries}
    total = sum(e[-1] for entries in shards.values() for e in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n")

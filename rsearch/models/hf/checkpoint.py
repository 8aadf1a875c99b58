"""Hugging Face checkpoints: load a decoder's weights, and write a new directory."""

import errno
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Mapping
from types import MappingProxyType

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rsearch.hosts import collectives, processes
from rsearch.models.decoder import param_shapes
from rsearch.models.hf import weights
from rsearch.models.hf.directory import (
    INDEX_FILE,
    check_layers,
    describe_extra,
    find_misfits,
    open_tensors,
    refuse_misfits,
)
from rsearch.models.hf.families import find_family, make_config, read_family
from rsearch.models.spec import DecoderSpec
from rsearch.models.tokenizer import Tokenizer
from rsearch.runtime.files import read_json, sampled_digest, sync_directory, sync_tree

DIGESTS = "rsearch_digests.json"  # digests of an export's files, stored with them
EXPORT_DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}

# Rotary tables, which old checkpoints hold although they follow from the configuration.
_ROTARY_TABLES = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|transformer\.rotary_pos_emb\.inv_freq"
)


def load_params(
    directory: str | os.PathLike, spec: DecoderSpec, *, shardings: dict | None = None
) -> dict:
    """Load a checkpoint's parameters into the tree of `init_params`, float32.

    Every device reads its own shard of every tensor from disk; the host holds at most
    one leaf of the tree at a time.

    Args:
        directory: directory with config.json, and model.safetensors or shards and their
            index.
        spec: the shape that `families.read_spec` returned for the directory.
        shardings: a tree like the parameters with the sharding of each leaf
            (`param_shardings` of `param_shapes`); None puts everything on one device.

    Returns:
        The parameter tree; leaves have the shapes of `param_shapes`.

    Raises:
        ValueError: there are no safetensors weights, they are damaged, or tensors are
            missing, extra or mis-shaped (the message tabulates them).
    """
    directory = pathlib.Path(directory)
    check_export(directory, suffix=".safetensors")
    family = read_family(directory)
    tensors, layout = family.view(open_tensors(directory), spec), family.layout
    _check_tensors(tensors, layout, spec, directory)
    shapes = param_shapes(spec)
    if shardings is None:
        one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one_device, shapes)

    def load(path, leaf, sharding):
        name = weights.leaf_name(path)
        blocks = {}

        def read(index):
            # Replicas share one read.
            key = tuple((block.start, block.stop) for block in index)
            if key not in blocks:
                blocks[key] = weights.read_leaf(
                    tensors, layout, name, leaf.shape, index
                )
            return blocks[key]

        return jax.make_array_from_callback(
            leaf.shape, sharding, read, dtype=leaf.dtype
        )

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def _check_tensors(tensors, layout, spec, source):
    """Refuse a checkpoint that does not fit a decoder, with a list of all differences.

    A checkpoint may hold more than the parameters: rotary tables, and an output matrix
    that equals tied embeddings.

    Raises:
        ValueError: tabulates every missing, extra or mis-shaped tensor.
    """
    check_layers(tensors, spec.num_layers, source=source)
    rows = []
    expected = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(spec)):
        template, groups = layout[weights.leaf_name(path)]
        is_stacked = "{}" in template
        shape = weights.stored_shape(
            leaf.shape[1:] if is_stacked else leaf.shape, groups
        )
        for layer in range(spec.num_layers if is_stacked else 1):
            name = template.format(layer)
            expected.add(name)
            rows += find_misfits(tensors, name, shape)
    lm_head = layout["unembedding"][0]
    for name in tensors.keys() - expected:
        if _ROTARY_TABLES.fullmatch(name):
            continue
        if name == lm_head and spec.tie_embeddings:
            embedding = tensors.get(layout["embedding"][0])
            if embedding is None or _are_equal(embedding, tensors[name]):
                continue
            shape = str(tensors[name].get_shape())
            rows.append((name, "differs", "tied: = embed_tokens", shape))
        else:
            rows.append(describe_extra(tensors, name))
    refuse_misfits(rows, source=source)


def _are_equal(a, b, num_rows=8192):
    """Compare two stored matrices by value, reading a few rows at a time."""
    shape = a.get_shape()
    if shape != b.get_shape():
        return False
    if not shape:  # a scalar, which does not fit any embedding
        return True
    # Unlike in NumPy, a slice of a safetensors tensor may not end past the tensor.
    starts = range(0, shape[0], num_rows)
    rows = [slice(start, min(start + num_rows, shape[0])) for start in starts]
    return all(np.array_equal(a[block], b[block]) for block in rows)


def export(
    directory: str | os.PathLike,
    params: dict,
    spec: DecoderSpec,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a checkpoint that `transformers` and `load_params` can read.

    The directory appears under its name only when it is complete and durable, with a
    digest of each file for `check_export`. A value head is not written. If the mesh
    spans hosts, every host must call this; the first one writes.

    Args:
        directory: directory to create; it may exist if it is empty.
        params: the tree of `init_params`, with arrays on the host or on devices.
        spec: the decoder's shape.
        tokenizer: tokenizer to save with the weights; None leaves it out.
        dtype: dtype on disk: float32, bfloat16 or float16.
        max_shard_bytes: maximum bytes of a file, unless a single tensor is larger.
        files: {name: text} of more files to write; they replace the tokenizer's files
            of the same name.

    Raises:
        ValueError: the directory is not empty, or transformers has no model of the
            shape.
    """
    directory = pathlib.Path(directory).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; it is not overwritten")
    config = make_config(spec, dtype=dtype)
    layout = find_family(spec)[1].layout
    entries = _list_tensors(params, spec, layout)

    def size_of(entry):
        leaf, layer, _ = entry
        shape = leaf.shape if layer is None else leaf.shape[1:]
        return math.prod(shape) * np.dtype(EXPORT_DTYPES[dtype]).itemsize

    shards = huggingface_hub.split_state_dict_into_shards_factory(
        entries,
        get_storage_size=size_of,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    is_writer = jax.process_index() == 0
    temp_dir = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        if is_writer:
            temp_dir.mkdir(parents=True)
            if tokenizer is not None:
                tokenizer.save(temp_dir)
                # transformers never trains the embedding of config.json's pad id, which
                # may be an end of text.
                config |= tokenizer.special_ids | {"pad_token_id": None}
            (temp_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name, text in files.items():
                (temp_dir / name).write_text(text)
        for file, names in shards.filename_to_tensors.items():
            tensors = {n: _fetch(*entries[n], EXPORT_DTYPES[dtype]) for n in names}
            if is_writer:
                save_file(tensors, temp_dir / file, metadata={"format": "pt"})
                # safetensors makes its files private; give them the others' mode.
                os.chmod(temp_dir / file, (temp_dir / "config.json").stat().st_mode)
        if is_writer:
            if shards.is_sharded:
                weight_map = shards.tensor_to_filename
                index = {"metadata": shards.metadata, "weight_map": weight_map}
                (temp_dir / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
            digests = {p.name: sampled_digest(p) for p in temp_dir.iterdir()}
            (temp_dir / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n")
            sync_tree(temp_dir)
            os.replace(temp_dir, directory)
            sync_directory(directory.parent)
    except SafetensorError as error:  # its kind for a disk that refuses a write
        raise OSError(errno.EIO, str(error), str(directory)) from error
    except OSError as error:
        if error.errno and error.filename is None:  # a write names no file
            error.filename = str(directory)
        raise
    finally:
        if is_writer:
            shutil.rmtree(temp_dir, ignore_errors=True)
    processes.barrier(f"export {directory}")


def check_export(directory: pathlib.Path, *, suffix: str = "") -> None:
    """Compare the files of a directory that `export` wrote with their digests.

    The digests cover samples, so that opening a large model stays quick; for a file of
    up to 4 MiB they cover every byte.

    Args:
        directory: a model's directory; one without digests passes.
        suffix: suffix of the names of the files to compare.

    Raises:
        ValueError: names each file that is missing or differs.
    """
    try:
        digests = read_json(directory / DIGESTS)
    except FileNotFoundError:
        return
    names = digests if isinstance(digests, dict) else {"": None}
    if not all(name and pathlib.PurePath(name).name == name for name in names):
        raise ValueError(f"{directory / DIGESTS} holds no digests of files next to it")
    names = [name for name in names if name.endswith(suffix)]
    damaged_names = [
        name
        for name in names
        if not (directory / name).is_file()
        or sampled_digest(directory / name) != digests[name]
    ]
    if damaged_names:
        raise ValueError(
            f"{directory}: {', '.join(damaged_names)} missing or not as exported; "
            f"export the model again, or delete {DIGESTS} if the change is intended"
        )


def _list_tensors(params, spec, layout):
    """Return the tensors to store, in order: {name: (leaf, layer or None, groups)}."""
    leaves = {
        weights.leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    entries = []
    shapes = param_shapes(spec)
    for path, expected in jax.tree_util.tree_leaves_with_path(shapes):
        name = weights.leaf_name(path)
        template, groups = layout[name]
        leaf = leaves.pop(name)
        assert leaf.shape == expected.shape, (name, leaf.shape, expected.shape)
        for layer in range(spec.num_layers) if "{}" in template else (None,):
            entries.append((template.format(layer), (leaf, layer, groups)))
    assert leaves.keys() <= {"value"}, sorted(leaves)
    # Layers come in order; tensors outside the layers come last.
    entries.sort(key=lambda e: spec.num_layers if e[1][1] is None else e[1][1])
    return dict(entries)


def _fetch(leaf, layer, groups, dtype):
    """Fetch one tensor to the host, in the layout and dtype used on disk."""
    value = leaf if layer is None else leaf[layer]
    array = weights.to_stored(collectives.gather_array(value), groups).astype(dtype)
    return np.ascontiguousarray(array)

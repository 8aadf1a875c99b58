"""Hugging Face checkpoints: find one, read its shape, load its weights, write one.

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

from rsearch.models import weights
from rsearch.models.decoder import DecoderSpec, RopeScaling

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
)

EXPORT_DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}

_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def find_model(source) -> pathlib.Path:
    """The directory of a model: `source` itself, or a download of that hub id.

    Downloads are kept in huggingface_hub's cache, and hold configuration, tokenizer and
    safetensors only.

    Raises:
        ValueError: neither a directory nor a hub id that could be fetched.
    """
    directory = pathlib.Path(source).expanduser()
    if directory.is_dir():
        return directory
    try:
        found = huggingface_hub.snapshot_download(
            str(source),
            allow_patterns=["*.json", "*.safetensors", "*.jinja", *TOKENIZER_FILES],
            ignore_patterns=["*/*.safetensors"],
        )
    # The hub's own errors are OSErrors and ValueErrors; so are those of the network.
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"model {str(source)!r} is neither a directory here nor a Hugging Face hub id "
            f"that could be fetched ({type(error).__name__}: {reason})"
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


def read_spec(directory) -> DecoderSpec:
    """The shape of the decoder that a config.json describes.

    Raises:
        ValueError: no readable config.json, or a field with a value that `Decoder` does
            not compute; names field, value and what is supported.
    """
    path = pathlib.Path(directory) / "config.json"
    config = _read_json(path)

    def refuse(field, value, supported):
        raise ValueError(f"{path}: {field}={value!r} is not supported: {supported}")

    def only(field, supported, default):
        value = config.get(field, default)
        if value not in supported:
            allowed = " or ".join(repr(s) for s in supported)
            refuse(field, value, f"it must be {allowed}")

    def number(field, default=None, *, kind=int, within=config):
        value = within.get(field)
        value = default if value is None else value
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (kind is float and isinstance(value, float))) or value <= 0:
            what = "a whole number" if kind is int else "a number"
            refuse(field, value, f"it must be {what} above 0")
        return kind(value)

    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        refuse("model_type", model_type, f"it must be one of {sorted(_MODEL_TYPES)}")
    only("hidden_act", ("silu", "swish"), "silu")
    only("mlp_bias", (False, None), False)
    only("quantization_config", (None,), None)
    if model_type == "llama" and config.get("attention_bias"):
        supported = "a Llama with it has a bias on o_proj too; only false, or qwen2's"
        refuse("attention_bias", config["attention_bias"], supported)
    if config.get("use_sliding_window"):
        refuse("use_sliding_window", True, "every layer must see the whole context")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        supported = "every layer must be 'full_attention'"
        refuse("layer_types", config["layer_types"], supported)

    # transformers 5 writes rope_parameters, which holds rope_theta; earlier versions
    # write rope_scaling beside it.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        refuse("rope_scaling", rope, "it must be an object")
    rope = {"rope_theta": config.get("rope_theta"), **rope}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        refuse("partial_rotary_factor", partial, "every channel must turn: 1")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if rope_type == "llama3":
        original = "original_max_position_embeddings"
        scaling = RopeScaling(
            factor=number("factor", kind=float, within=rope),
            low_freq_factor=number("low_freq_factor", kind=float, within=rope),
            high_freq_factor=number("high_freq_factor", kind=float, within=rope),
            original_context=number(original, within={**rope, **_only(config, original)}),
        )
    elif rope_type != "default":
        refuse("rope_type", rope_type, "it must be 'default' or 'llama3'")

    width, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        supported = f"it must divide num_attention_heads={heads}"
        refuse("num_key_value_heads", kv_heads, supported)
    if config.get("head_dim") is None and width % heads:
        supported = f"without head_dim, hidden_size={width} must be a multiple of it"
        refuse("num_attention_heads", heads, supported)
    head_dim = number("head_dim", width // heads)
    if head_dim % 2:
        refuse("head_dim", head_dim, "rotary positions need an even number")
    return DecoderSpec(
        vocab_size=number("vocab_size"),
        width=width,
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=number("intermediate_size"),
        rope_theta=number("rope_theta", 10000.0, kind=float, within=rope),
        rope_scaling=scaling,
        norm_eps=number("rms_norm_eps", 1e-6, kind=float),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=model_type == "qwen2",
        max_context=number(
            "max_position_embeddings", 2048 if model_type == "llama" else 32768
        ),
    )


def load_params(
    directory, spec, *, shardings=None, value_head=False, dtype=jnp.float32
):
    """Parameters of a checkpoint, in the tree of `init_params`.

    Every device reads its own part of every tensor from disk; on the host lies at most one
    leaf of the tree at a time.

    Args:
        directory: holds model.safetensors, or shards and their index.
        spec: what `read_spec` returned for it.
        shardings: a tree like the parameters' with the sharding of each leaf
            (`param_shardings` of `weights.param_shapes`); None puts all on one device.
        value_head: add a value head of zeros, which no checkpoint holds.
        dtype: of the parameters, whatever that on disk (bfloat16, float16, float32).

    Raises:
        ValueError: no safetensors weights, damaged ones, or a table of every tensor that
            is missing, extra or mis-shaped.
    """
    directory = pathlib.Path(directory)
    tensors = weights.open_tensors(directory)
    weights.check_tensors(tensors, spec, source=directory)
    shapes = weights.param_shapes(spec, value_head=value_head)
    if shardings is None:
        one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one_device, shapes)

    def load(path, leaf, sharding):
        read = _reader(tensors, weights.leaf_name(path), leaf.shape, np.dtype(dtype))
        return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=dtype)

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def _reader(tensors, name, shape, dtype):
    """A function from an index into one leaf to that block, read from disk once."""
    blocks = {}

    def read(index):
        key = tuple((part.start, part.stop) for part in index)
        if key not in blocks:
            blocks[key] = block(index)
        return blocks[key]

    def block(index):
        sizes = [len(range(*part.indices(n))) for part, n in zip(index, shape)]
        out = np.zeros(sizes, dtype)
        if name in weights.LAYOUT:
            template, groups = weights.LAYOUT[name]
            if "{}" not in template:
                out[...] = weights.read_block(tensors[template], shape, groups, index)
                return out
            for row, layer in enumerate(range(*index[0].indices(shape[0]))):
                tensor = tensors[template.format(layer)]
                out[row] = weights.read_block(tensor, shape[1:], groups, index[1:])
        else:
            assert name == "value", name
        return out

    return read


def export(
    params,
    spec,
    directory,
    *,
    tokenizer_source=None,
    dtype="float32",
    max_shard_bytes=5_000_000_000,
):
    """Writes a checkpoint that `transformers` and `load_params` can read.

    The directory appears under its name when it is complete. A value head is not part of
    it. Where the mesh spans hosts, every host must call this; the first one writes.

    Args:
        params: the tree of `init_params`, arrays on host or devices.
        spec: their shape.
        directory: to be made; may exist if it is empty.
        tokenizer_source: a directory or hub id whose tokenizer files, special token ids
            and generation_config.json are passed on.
        dtype: on disk: float32, bfloat16 or float16.
        max_shard_bytes: bytes a file, unless one tensor alone is larger.

    Raises:
        ValueError: the directory holds something, an unknown dtype, a source without
            tokenizer, or a shape that transformers has no model for.
    """
    directory = pathlib.Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; it is not overwritten")
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"{dtype=} is not one of {sorted(EXPORT_DTYPES)}")
    if spec.width % spec.num_heads and not spec.qkv_bias:
        raise ValueError(
            f"width={spec.width} is not a multiple of num_heads={spec.num_heads}, which "
            f"transformers demands of a Llama"
        )
    source = None if tokenizer_source is None else find_model(tokenizer_source)
    if source and not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{source} has no tokenizer files to copy")

    shards = _plan_shards(params, spec, EXPORT_DTYPES[dtype], max_shard_bytes)
    writes = jax.process_index() == 0
    part = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        if writes:
            part.mkdir(parents=True)
            config = _config(spec, source, dtype)
            (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name in (*TOKENIZER_FILES, "generation_config.json") if source else ():
                if (source / name).is_file():
                    shutil.copyfile(source / name, part / name)
        for file, entries in shards.items():
            tensors = {
                name: _fetch(leaf, layer, groups, EXPORT_DTYPES[dtype])
                for name, leaf, layer, groups, _ in entries
            }
            if writes:
                save_file(tensors, part / file, metadata={"format": "pt"})
                # safetensors makes its files private; these are as public as the rest.
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
    """{file name: [(tensor name, leaf, layer or None, groups, bytes)]}, in layer order."""
    leaves = dict(
        (weights.leaf_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    )
    shapes = weights.param_shapes(spec)
    entries = []
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
    order = list(weights.LAYOUT)
    # Stable: embedding, the layers one after the other, the rest.
    entries.sort(
        key=lambda e: (
            e[2] is None and "embed" not in e[0],
            -1 if e[2] is None else e[2],
        )
    )
    del order
    groups_of_files, room = [], 0
    for entry in entries:
        if not groups_of_files or entry[-1] > room:
            groups_of_files.append([])
            room = max_bytes
        groups_of_files[-1].append(entry)
        room -= entry[-1]
    if len(groups_of_files) == 1:
        return {weights.SINGLE_FILE: groups_of_files[0]}
    total = len(groups_of_files)
    return {
        f"model-{number:05}-of-{total:05}.safetensors": entries
        for number, entries in enumerate(groups_of_files, start=1)
    }


def _fetch(leaf, layer, groups, dtype):
    """One tensor on the host, laid out as on disk."""
    value = leaf if layer is None else leaf[layer]
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    stored = weights.to_stored(np.asarray(value), groups).astype(dtype)
    return np.ascontiguousarray(stored)


def _write_index(path, shards):
    weight_map = {e[0]: file for file, entries in shards.items() for e in entries}
    total = sum(e[-1] for entries in shards.values() for e in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n")


def _config(spec, source, dtype):
    """config.json in the layout that every version of transformers reads."""
    model_type = "qwen2" if spec.qkv_bias else "llama"
    scaling = None
    if spec.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_context,
        }
    only_here = (
        {"use_sliding_window": False}
        if spec.qkv_bias
        else {"attention_bias": False, "mlp_bias": False}
    )
    special = dict.fromkeys(_SPECIAL_TOKENS)
    if source is not None and (source / "config.json").is_file():
        special |= _only(_read_json(source / "config.json"), *_SPECIAL_TOKENS)
    return {
        "architectures": [_MODEL_TYPES[model_type]],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": spec.tie_embeddings,
        **only_here,
        **special,
        "torch_dtype": dtype,
    }


def _only(mapping, *keys):
    return {key: mapping[key] for key in keys if key in mapping}


def _read_json(path):
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, so this is no model's directory")
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object")
    return value

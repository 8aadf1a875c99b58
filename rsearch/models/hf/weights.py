"""Decoder weights as Hugging Face stores them: names, layouts, safetensors files.

A parameter tree stacks its layers on a leading axis and keeps heads apart; a checkpoint
has one matrix a layer, [out, in], with heads and head width in one axis. LAYOUT says
how one is the other, and both directions read it.
"""

import functools
import math
import pathlib
import re
import shlex

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from rsearch.models.decoder import Decoder, DecoderSpec, init_params
from rsearch.runtime import files

# Our leaf -> the tensor that stores it (one a layer where the name has a field), and
# which of our axes, the layer axis left out, make up each axis of that tensor.
LAYOUT = {
    "embedding": ("model.embed_tokens.weight", ((0,), (1,))),
    "layers.attention_norm.scale": ("model.layers.{}.input_layernorm.weight", ((0,),)),
    "layers.attention.q": ("model.layers.{}.self_attn.q_proj.weight", ((1, 2), (0,))),
    "layers.attention.q_bias": ("model.layers.{}.self_attn.q_proj.bias", ((0, 1),)),
    "layers.attention.k": ("model.layers.{}.self_attn.k_proj.weight", ((1, 2), (0,))),
    "layers.attention.k_bias": ("model.layers.{}.self_attn.k_proj.bias", ((0, 1),)),
    "layers.attention.v": ("model.layers.{}.self_attn.v_proj.weight", ((1, 2), (0,))),
    "layers.attention.v_bias": ("model.layers.{}.self_attn.v_proj.bias", ((0, 1),)),
    "layers.attention.o": ("model.layers.{}.self_attn.o_proj.weight", ((2,), (0, 1))),
    "layers.attention.q_norm.scale": (
        "model.layers.{}.self_attn.q_norm.weight",
        ((0,),),
    ),
    "layers.attention.k_norm.scale": (
        "model.layers.{}.self_attn.k_norm.weight",
        ((0,),),
    ),
    "layers.attention_post_norm.scale": (
        "model.layers.{}.post_self_attn_layernorm.weight",
        ((0,),),
    ),
    # The norm before the MLP: a name from the encoders, where it came after attention.
    "layers.mlp_norm.scale": (
        "model.layers.{}.post_attention_layernorm.weight",
        ((0,),),
    ),
    "layers.mlp_post_norm.scale": (
        "model.layers.{}.post_mlp_layernorm.weight",
        ((0,),),
    ),
    "layers.gate": ("model.layers.{}.mlp.gate_proj.weight", ((1,), (0,))),
    "layers.gate_up": ("model.layers.{}.mlp.gate_up_proj.weight", ((1, 2), (0,))),
    "layers.up": ("model.layers.{}.mlp.up_proj.weight", ((1,), (0,))),
    "layers.down": ("model.layers.{}.mlp.down_proj.weight", ((1,), (0,))),
    "final_norm.scale": ("model.norm.weight", ((0,),)),
    "unembedding": ("lm_head.weight", ((1,), (0,))),
}

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = ("F32", "BF16", "F16")

# Rotary tables, which old checkpoints hold although configuration alone gives them.
_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_CONVERT = (
    "import os, sys, torch; from safetensors.torch import save_file; "
    "out, *files = sys.argv[1:]; w = {}; "
    '[w.update(torch.load(f, map_location="cpu", weights_only=True)) for f in files]; '
    'w = w.get("state_dict", w); '
    "w = {k: t.clone().contiguous() for k, t in w.items()}; "
    'save_file(w, out + ".part", {"format": "pt"}); os.replace(out + ".part", out)'
)


def param_shapes(spec: DecoderSpec, *, value_head=False):
    """The tree of `init_params` as ShapeDtypeStructs; nothing is computed."""
    model = Decoder(spec, value_head=value_head)
    return jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))


def leaf_name(path) -> str:
    """A key path of the tree as a key of LAYOUT."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def stored_shape(shape, groups) -> tuple[int, ...]:
    """The shape on disk of one layer's parameter of ours."""
    return tuple(math.prod(shape[axis] for axis in group) for group in groups)


def to_stored(array, groups) -> np.ndarray:
    """One layer's parameter, laid out as on disk."""
    order = [axis for group in groups for axis in group]
    return array.transpose(order).reshape(stored_shape(array.shape, groups))


def read_block(tensor, shape, groups, index) -> np.ndarray:
    """A block of one layer's parameter, reading no more of the file than it needs.

    Args:
        tensor: a safetensors slice: indexing it with slices reads from the file.
        shape: of the whole parameter, in our layout.
        groups: its axes on disk, from LAYOUT.
        index: a slice of unit step for each of our axes.

    Returns:
        The block in our layout, in the dtype on disk.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape)]
    ranges, sizes, rest = [], [], []
    for first, *others in groups:
        # Rows of the merged axis are contiguous for a range of its first axis only.
        stride = math.prod(shape[axis] for axis in others)
        low, high = bounds[first]
        ranges.append(slice(low * stride, high * stride))
        sizes += [high - low] + [shape[axis] for axis in others]
        rest += [slice(None)] + [slice(*bounds[axis]) for axis in others]
    order = [axis for group in groups for axis in group]
    block = tensor[tuple(ranges)].reshape(sizes)[tuple(rest)]
    return block.transpose(np.argsort(order))


def read_leaf(tensors, name, shape, index, dtype) -> np.ndarray:
    """A block of one leaf of the parameter tree.

    Args:
        tensors: from `open_tensors`.
        name: of the leaf, a key of LAYOUT; "value", which no checkpoint holds, is 0.
        shape: of the whole leaf.
        index: a slice of unit step for each of its axes.
        dtype: of the result, whatever that on disk.
    """
    out = np.zeros(
        [len(range(*part.indices(size))) for part, size in zip(index, shape)], dtype
    )
    if name == "value":
        return out
    template, groups = LAYOUT[name]
    if "{}" not in template:
        out[...] = read_block(tensors[template], shape, groups, index)
        return out
    for row, layer in enumerate(range(*index[0].indices(shape[0]))):
        tensor = tensors[template.format(layer)]
        out[row] = read_block(tensor, shape[1:], groups, index[1:])
    return out


def convert_command(out: str, files) -> str:
    """A shell line that turns pickled weights into one safetensors file."""
    args = " ".join(shlex.quote(str(file)) for file in (out, *files))
    return f"python -c {shlex.quote(_CONVERT)} {args}"


def open_tensors(directory: pathlib.Path) -> dict:
    """Every tensor of a checkpoint by name, as a safetensors slice; reads headers only.

    Raises:
        ValueError: no safetensors weights, a missing, damaged or pickled file, an index
            that cannot be read, or a tensor stored twice.
    """
    tensors = {}
    for file in _weight_files(directory):
        handle = _open_file(file)
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no dict
            if name in tensors:
                raise ValueError(f"{file}: {name} is stored in an earlier shard too")
            tensors[name] = handle.get_slice(name)
    return tensors


def check_tensors(tensors, spec: DecoderSpec, *, source) -> None:
    """Refuses a checkpoint that is not this spec's, listing all that differs.

    Accepts what a checkpoint may hold beside its parameters: rotary tables, and an
    output matrix equal to tied embeddings.

    Raises:
        ValueError: a table of every missing, extra or mis-shaped tensor.
    """
    check_layers(tensors, spec.num_layers, source=source)
    rows = []
    expected = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(spec)):
        template, groups = LAYOUT[leaf_name(path)]
        stacked = "{}" in template
        shape = stored_shape(leaf.shape[1:] if stacked else leaf.shape, groups)
        for layer in range(spec.num_layers if stacked else 1):
            name = template.format(layer)
            expected.add(name)
            rows += misfits(tensors, name, shape)
    lm_head = LAYOUT["unembedding"][0]
    for name in tensors.keys() - expected:
        if _RECOMPUTED.fullmatch(name):
            continue
        if name == lm_head and spec.tie_embeddings:
            embedding = tensors.get(LAYOUT["embedding"][0])
            if embedding is None or _equal(embedding, tensors[name]):
                continue
            found = _describe(tensors[name].get_shape())
            rows.append((name, "differs", "tied: = embed_tokens", found))
        else:
            rows.append(extra(tensors, name))
    refuse_misfits(rows, source=source)


def check_layers(tensors, num_layers, *, source) -> None:
    """Refuses more layers than there are tensors, before each of them is looked for.

    Raises:
        ValueError: names both numbers.
    """
    if num_layers > len(tensors):
        raise ValueError(
            f"{source}: config.json says num_hidden_layers={num_layers}, but there are "
            f"{len(tensors)} tensors"
        )


def misfits(tensors, name, shape):
    """[rows of the table] that say what is wrong with one expected tensor."""
    if name not in tensors:
        return [(name, "missing", _describe(shape), "-")]
    found, kind = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
    rows = []
    if found != shape:
        rows.append((name, "shape", _describe(shape), _describe(found)))
    if kind not in STORED_DTYPES:
        rows.append((name, "dtype", " | ".join(STORED_DTYPES), kind))
    return rows


def extra(tensors, name):
    """The row of the table for a tensor that nothing asks for."""
    return (name, "extra", "-", _describe(tensors[name].get_shape()))


def refuse_misfits(rows, *, source) -> None:
    """Raises a ValueError with the table of these rows, if there are any."""
    if rows:
        rows = sorted(
            rows, key=lambda row: re.sub(r"\d+", lambda n: n[0].zfill(9), row[0])
        )
        title = f"{source}: {len(rows)} tensors do not fit its config.json"
        raise ValueError(title + "\n" + _table(rows))


def _weight_files(directory):
    """The safetensors files that make up a checkpoint, in order."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ValueError(_no_weights(directory))
    try:
        weight_map = files.read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()), key=str)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{index}: no weight_map could be read: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise ValueError(f"{index}: {name!r} is not the name of a file beside it")
        if not (directory / name).is_file():
            held = sum(file == name for file in weight_map.values())
            raise ValueError(
                f"{directory / name} is missing; {index.name} says that it holds "
                f"{held} tensors"
            )
    return [directory / name for name in names]


def _open_file(file):
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        with open(file, "rb") as stream:
            start = stream.read(8)
        if start.startswith(b"PK\x03\x04") or re.match(rb"\x80[\x00-\x05]", start):
            command = convert_command(file, [file])
            raise ValueError(
                f"{file} is a pickle under another name, and pickles can run code; if "
                f"you trust it, convert it yourself (needs torch):\n{command}"
            ) from None
        hint = ""
        if start == b"version ":
            hint = "; it looks like a git-lfs pointer: run `git lfs pull`"
        raise ValueError(f"{file} is damaged or incomplete: {error}{hint}") from None


def _no_weights(directory):
    """Why a directory without model.safetensors cannot be loaded."""
    names = sorted(file.name for file in directory.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    pickles = [name for name in pickles if not name.startswith(_NOT_WEIGHTS)]
    pickles = [n for n in pickles if n.startswith("pytorch_model")] or pickles
    if pickles:
        files = [directory / name for name in pickles]
        command = convert_command(directory / SINGLE_FILE, files)
        return (
            f"{directory} holds pickled weights only ({', '.join(pickles)}), and "
            f"pickles can run code; if you trust them, convert them yourself (needs "
            f"torch):\n{command}"
        )
    found = ", ".join(names) or "nothing"
    return f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; it has {found}"


def _equal(a, b, num_rows=8192):
    """Whether two stored matrices hold the same numbers; reads a few rows at a time."""
    shape = a.get_shape()
    if shape != b.get_shape():
        return False
    # A safetensors slice may not end past the tensor, as a NumPy one may.
    starts = range(0, shape[0], num_rows)
    rows = [slice(start, min(start + num_rows, shape[0])) for start in starts]
    return all(np.array_equal(a[part], b[part]) for part in rows)


def _describe(shape):
    return "[" + ", ".join(map(str, shape)) + "]"


def _table(rows):
    rows = [("tensor", "problem", "expected", "found"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    widths.append(0)
    return "\n".join(
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths))
        for row in rows
    )

"""A decoder's weights as a checkpoint stores them: names, layouts, blocks of tensors.

A parameter tree stacks its layers on a leading axis and has a separate axis for heads.
A checkpoint has one [out, in] matrix per layer, with heads and head width merged into
one axis. A Layout maps one to the other, for both reading and writing.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

from rsearch.runtime.boundary import boundary

# For each axis of a stored tensor, the axes of the parameter (without its layer axis)
# that are merged into it.
Groups = tuple[tuple[int, ...], ...]
# Leaf of the parameter tree -> (name of the tensor that stores it, groups of axes).
# "{}" in a name stands for the number of the layer: there is one tensor per layer.
Layout = Mapping[str, tuple[str, Groups]]

# The tensor names of Llama, extended by those of the other families.
DECODER_LAYOUT: Layout = {
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
    # The norm before the MLP. Its name is from encoders, where it followed attention.
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


def leaf_name(path: tuple) -> str:
    """Return the key of a Layout for a key path of the parameter tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def stored_shape(shape: tuple[int, ...], groups: Groups) -> tuple[int, ...]:
    """Return the shape on disk of one layer's parameter."""
    return tuple(math.prod(shape[axis] for axis in group) for group in groups)


def to_stored(array: np.ndarray, groups: Groups) -> np.ndarray:
    """Return one layer's parameter in the layout on disk.

    Args:
        array: the parameter, of any shape.
        groups: groups of its axes on disk.

    Returns:
        The same numbers in the shape of `stored_shape`.
    """
    order = [axis for group in groups for axis in group]
    return array.transpose(order).reshape(stored_shape(array.shape, groups))


def read_block(
    tensor: object, shape: tuple[int, ...], groups: Groups, index: tuple[slice, ...]
) -> np.ndarray:
    """Read a block of one layer's parameter, and only the part of the file it needs.

    Args:
        tensor: a safetensors slice; indexing it with slices reads from the file.
        shape: shape of the full parameter.
        groups: groups of its axes on disk.
        index: a slice of unit step for each of the parameter's axes.

    Returns:
        The block with the parameter's axes, in the dtype on disk.
    """
    bounds = [block.indices(size)[:2] for block, size in zip(index, shape)]
    ranges, sizes, block_slices = [], [], []
    for first_axis, *inner_axes in groups:
        # Only a range of a group's first axis is contiguous in the merged axis.
        stride = math.prod(shape[axis] for axis in inner_axes)
        low, high = bounds[first_axis]
        ranges.append(slice(low * stride, high * stride))
        sizes += [high - low] + [shape[axis] for axis in inner_axes]
        block_slices += [slice(None)] + [slice(*bounds[axis]) for axis in inner_axes]
    order = [axis for group in groups for axis in group]
    with boundary("a tensor of the weights"):
        block = tensor[tuple(ranges)].reshape(sizes)[tuple(block_slices)]
    return block.transpose(np.argsort(order))


def read_leaf(
    tensors: Mapping[str, object],
    layout: Layout,
    name: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
) -> np.ndarray:
    """Read a block of one leaf of the parameter tree.

    Args:
        tensors: tensors from `open_tensors`.
        layout: the family's layout.
        name: name of the leaf, a key of the layout.
        shape: shape of the full leaf.
        index: a slice of unit step for each of the leaf's axes.

    Returns:
        The block, with the leaf's axes, in float32 whatever the dtype on disk.
    """
    sizes = [len(range(*block.indices(size))) for block, size in zip(index, shape)]
    out = np.empty(sizes, np.float32)
    template, groups = layout[name]
    if "{}" not in template:
        out[...] = read_block(tensors[template], shape, groups, index)
        return out
    for row, layer in enumerate(range(*index[0].indices(shape[0]))):
        tensor = tensors[template.format(layer)]
        out[row] = read_block(tensor, shape[1:], groups, index[1:])
    return out

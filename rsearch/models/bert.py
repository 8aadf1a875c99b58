"""BERT as a Flax module: token ids in, one vector per text or one score per pair out.

The architecture of Devlin et al., 2019 (arXiv 1810.04805): learned positions, layer
norm after each residual sum, exact GELU. Loaders read a Hugging Face directory with
config.json and safetensors weights. Embedding a text does not use the pooler; a
cross-encoder (arXiv 1901.04085) reads two texts together and scores them with it.
"""

import dataclasses
import functools
import os
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rsearch.models.hf.directory import (
    check_layers,
    describe_extra,
    find_misfits,
    open_tensors,
    read_object,
    refuse_misfits,
)
from rsearch.models.hf.fields import Fields
from rsearch.models.hf.layouts import refuse_quantized

POOLINGS = ("mean", "cls", "max", "lasttoken")

# Leaf of the parameters -> the tensor that stores it. Matrices are [out, in] on disk.
_EMBEDDINGS = {
    "words.embedding": "embeddings.word_embeddings.weight",
    "positions.embedding": "embeddings.position_embeddings.weight",
    "types.embedding": "embeddings.token_type_embeddings.weight",
    "norm.scale": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_HEAD = {"pooler": "pooler.dense", "classifier": "classifier"}
_UNUSED_TENSORS = (
    "pooler.dense.weight",
    "pooler.dense.bias",
    "embeddings.position_ids",
)


@dataclasses.dataclass(frozen=True)
class BertSpec:
    """The shape of a BERT encoder, with the names of rsearch.models.decoder."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    max_positions: int
    num_types: int
    norm_epsilon: float


class _Layer(nn.Module):
    spec: BertSpec
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, is_token):
        spec = self.spec
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(_norm, spec, self.dtype)

        query, key, value = (
            dense(spec.width, name=name)(x) for name in ("query", "key", "value")
        )
        context = _attend(query, key, value, is_token, num_heads=spec.num_heads)
        x = norm("attention_norm")(x + dense(spec.width, name="attention_out")(context))
        hidden = nn.gelu(dense(spec.mlp_width, name="mlp_in")(x), approximate=False)
        return norm("mlp_norm")(x + dense(spec.width, name="mlp_out")(hidden))


def _attend(query, key, value, is_token, *, num_heads):
    """Attend to the tokens of each row; return [B, T, D] weighted sums of values."""

    def split(x, *axes):
        return x.reshape(*x.shape[:2], num_heads, -1).transpose(axes)

    # Both products are then matrix products of contiguous operands, which a CPU does
    # in half the time that it takes for heads as the last axis but one.
    query, value = split(query, 0, 2, 1, 3), split(value, 0, 2, 1, 3)
    key = split(key, 0, 2, 3, 1)
    logits = (query @ key).astype(jnp.float32) * query.shape[-1] ** -0.5
    # The minimum is finite, so that a row of only padding does not become NaN.
    lowest = jnp.finfo(jnp.float32).min
    logits = jnp.where(is_token[:, None, None, :], logits, lowest)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    # The division comes afterwards, on C numbers per query instead of T.
    total = weights.sum(axis=-1, keepdims=True)
    context = ((weights.astype(value.dtype) @ value) / total).astype(value.dtype)
    return context.transpose(0, 2, 1, 3).reshape(*is_token.shape, -1)


class Bert(nn.Module):
    """The encoder, from token ids to hidden states.

    Attributes:
        spec: shape of the encoder.
        dtype: compute dtype. Parameters, norm statistics and softmax are float32.
    """

    spec: BertSpec
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, token_ids: jax.Array, is_token: jax.Array, types: jax.Array | None = None
    ) -> jax.Array:
        """Return the [B, T, D] hidden states of the last layer.

        Args:
            token_ids: [B, T] int32, T <= max_positions.
            is_token: [B, T] bool, False on padding.
            types: [B, T] int32 token types; None means type 0 for all.
        """
        spec = self.spec
        positions = jnp.arange(token_ids.shape[1])[None, :]
        embed = functools.partial(nn.Embed, features=spec.width, dtype=self.dtype)
        x = embed(spec.vocab_size, name="words")(token_ids)
        x = x + embed(spec.max_positions, name="positions")(positions)
        types = jnp.zeros_like(positions) if types is None else types
        x = x + embed(spec.num_types, name="types")(types)
        x = _norm(spec, self.dtype, "norm")(x)
        for layer in range(spec.num_layers):
            x = _Layer(spec, self.dtype, name=f"layer_{layer}")(x, is_token)
        return x


class CrossEncoder(nn.Module):
    """A scorer of text pairs: transformers' BertForSequenceClassification of 1 label.

    Attributes:
        spec: shape of its BERT.
        dtype: compute dtype, as in Bert.
    """

    spec: BertSpec
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, token_ids: jax.Array, is_token: jax.Array, types: jax.Array
    ) -> jax.Array:
        """Return the [B] float32 scores, in logits.

        Args:
            token_ids: [B, T] int32, T <= max_positions.
            is_token: [B, T] bool, False on padding.
            types: [B, T] int32 token types.
        """
        bert = Bert(self.spec, dtype=self.dtype, name="bert")
        first = bert(token_ids, is_token, types)[:, 0]
        pooled = nn.Dense(self.spec.width, dtype=self.dtype, name="pooler")(first)
        score = nn.Dense(1, dtype=self.dtype, name="classifier")(jnp.tanh(pooled))
        return score[:, 0].astype(jnp.float32)


def _norm(spec, dtype, name):
    # The fast variance, E[x^2] - E[x]^2, loses precision in float32 where |x| is large.
    return nn.LayerNorm(
        epsilon=spec.norm_epsilon, dtype=dtype, use_fast_variance=False, name=name
    )


def pool(hidden: jax.Array, is_token: jax.Array, *, pooling: str) -> jax.Array:
    """Return one vector per text, pooled from the hidden states of its tokens.

    Args:
        hidden: [B, T, D] hidden states.
        is_token: [B, T] bool, padded on the right; special tokens count as tokens.
        pooling: "mean" or "max" over the tokens, or the state of the first ("cls") or
            last ("lasttoken") one.

    Returns:
        [B, D] float32; a row without tokens is finite.
    """
    assert pooling in POOLINGS, pooling
    hidden = hidden.astype(jnp.float32)
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "lasttoken":
        last = jnp.maximum(is_token.sum(axis=1) - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    if pooling == "max":
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(is_token[:, :, None], hidden, lowest).max(axis=1)
    weight = is_token[:, :, None].astype(jnp.float32)
    return (hidden * weight).sum(axis=1) / jnp.maximum(weight.sum(axis=1), 1.0)


def unit(vectors: jax.Array) -> jax.Array:
    """Scale [B, D] vectors to length 1; a zero vector stays zero."""
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(length, 1e-12)


@functools.partial(jax.jit, static_argnames=("model", "pooling"))
def embed(
    model: Bert,
    params: dict,
    token_ids: jax.Array,
    num_tokens: jax.Array,
    *,
    pooling: str,
) -> jax.Array:
    """Return one unit vector per text; compile once for each shape of token_ids.

    Args:
        model: the Bert.
        params: parameters from `load_bert`.
        token_ids: [B, T] int32, padded on the right.
        num_tokens: [B] int32, number of tokens in each row without padding.
        pooling: one of POOLINGS.

    Returns:
        [B, D] float32.
    """
    is_token = jnp.arange(token_ids.shape[1])[None, :] < num_tokens[:, None]
    hidden = model.apply({"params": params}, token_ids, is_token)
    return unit(pool(hidden, is_token, pooling=pooling))


@functools.partial(jax.jit, static_argnames=("model",))
def score(
    model: CrossEncoder,
    params: dict,
    token_ids: jax.Array,
    num_tokens: jax.Array,
    num_first: jax.Array,
) -> jax.Array:
    """Return one score per pair of texts; compile once for each shape of token_ids.

    Args:
        model: the CrossEncoder.
        params: parameters from `load_cross_encoder`.
        token_ids: [B, T] int32, both texts, padded on the right.
        num_tokens: [B] int32, number of tokens in each row without padding.
        num_first: [B] int32, number of ids before the second text, whose ids have
            type 1.

    Returns:
        [B] float32, in logits.
    """
    columns = jnp.arange(token_ids.shape[1])[None, :]
    is_token = columns < num_tokens[:, None]
    types = (is_token & (columns >= num_first[:, None])).astype(jnp.int32)
    return model.apply({"params": params}, token_ids, is_token, types)


def read_bert_spec(directory: str | os.PathLike) -> BertSpec:
    """Return the shape that a Hugging Face config.json describes.

    Raises:
        ValueError: there is no readable config.json, or a field has an unsupported
            value.
    """
    path = pathlib.Path(directory) / "config.json"
    fields = Fields(path, read_object(path))
    fields.check("model_type", ("bert",))
    fields.check("hidden_act", (None, "gelu"))
    fields.check("position_embedding_type", (None, "absolute"))
    # Most files leave these absent or null; any other value means a different model.
    for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention"):
        fields.check(name, (None, False))
    fields.check("auto_map", (None,))
    fields.check("pruned_heads", (None, {}))
    refuse_quantized(path, fields.get("quantization_config"))
    spec = BertSpec(
        vocab_size=fields.number("vocab_size"),
        width=fields.number("hidden_size"),
        num_layers=fields.number("num_hidden_layers"),
        num_heads=fields.number("num_attention_heads"),
        mlp_width=fields.number("intermediate_size"),
        max_positions=fields.number("max_position_embeddings"),
        num_types=fields.number("type_vocab_size"),
        norm_epsilon=fields.number("layer_norm_eps", float),
    )
    if spec.width % spec.num_heads:
        raise ValueError(
            f"{path}: hidden_size={spec.width} is not divisible by "
            f"num_attention_heads={spec.num_heads}"
        )
    return spec


def load_bert(directory: str | os.PathLike) -> tuple[BertSpec, dict]:
    """Load a BERT from a Hugging Face directory.

    Returns:
        (BertSpec, parameters as float32 NumPy arrays). Tensor names may have the prefix
        'bert.'.

    Raises:
        ValueError: config.json is bad, there are no safetensors weights (for pickles
            the message gives the command that converts them), or tensors are missing,
            extra or mis-shaped (the message tabulates them).
    """
    directory = pathlib.Path(directory)
    spec = read_bert_spec(directory)
    return spec, _load_params(directory, Bert(spec), _UNUSED_TENSORS)


def load_cross_encoder(directory: str | os.PathLike) -> tuple[BertSpec, dict]:
    """Load a BertForSequenceClassification of one label from a directory.

    Returns:
        (BertSpec, parameters as float32 NumPy arrays), as from `load_bert`.

    Raises:
        ValueError: as for `load_bert`, or there are several labels, or there is only
            one token type.
    """
    directory = pathlib.Path(directory)
    spec = read_bert_spec(directory)
    if spec.num_types < 2:
        raise ValueError(
            f"{directory / 'config.json'}: type_vocab_size={spec.num_types}, expected "
            "at least 2: a cross-encoder tells two texts apart by their type"
        )
    return spec, _load_params(directory, CrossEncoder(spec), _UNUSED_TENSORS[-1:])


def _load_params(directory, model, unused_names):
    """Load the parameters of a model as float32 NumPy arrays."""
    stored_tensors = open_tensors(directory)
    has_prefix = any(name.startswith("bert.") for name in stored_tensors)
    tensors = {
        name.removeprefix("bert.") if has_prefix else name: tensor
        for name, tensor in stored_tensors.items()
    }
    check_layers(tensors, model.spec.num_layers, source=directory)
    expected = _expected_tensors(model)
    _check(tensors, expected, unused_names, directory)
    params = {}
    for leaf, (name, shape) in expected.items():
        array = np.asarray(tensors[name][:]).astype(np.float32)
        *parents, last = leaf.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array.T if last == "kernel" else array.reshape(shape)
    return params


def _expected_tensors(model):
    """Return {leaf: (stored name, shape on disk)} for every parameter."""
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 2), jnp.bool_)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, mask, ids)["params"]
    expected = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        leaf_name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = leaf.shape[::-1] if leaf_name.endswith(".kernel") else leaf.shape
        expected[leaf_name] = (_stored_name(leaf_name), shape)
    return expected


def _stored_name(leaf_name):
    leaf_name = leaf_name.removeprefix("bert.")
    if leaf_name in _EMBEDDINGS:
        return _EMBEDDINGS[leaf_name]
    *modules, leaf = leaf_name.split(".")
    leaf = "bias" if leaf == "bias" else "weight"
    if modules[0] in _HEAD:
        return f"{_HEAD[modules[0]]}.{leaf}"
    layer, module = modules
    number = layer.removeprefix("layer_")
    return f"encoder.layer.{number}.{_LAYER[module]}.{leaf}"


def _check(tensors, expected, unused_names, directory):
    rows = []
    for name, shape in expected.values():
        rows += find_misfits(tensors, name, shape)
    known_names = {name for name, _ in expected.values()}
    unknown_names = tensors.keys() - known_names - set(unused_names)
    rows += [describe_extra(tensors, name) for name in unknown_names]
    refuse_misfits(rows, source=directory)

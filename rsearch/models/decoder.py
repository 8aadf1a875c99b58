"""One decoder for Llama, Qwen and GLM models: policy, value and reference.

The same module scores whole sequences (`cache=None`) and extends cached ones, so that
the trainer differentiates exactly what the sampler computes.

Dimensions: B rows, T new tokens, D width, H heads, K key/value heads, C head width, F
MLP width, V vocabulary, L layers.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.attention.blocked import attend_within
from rsearch.models.attention.cached import (
    Cache,
    CacheIndex,
    attend_cached,
    index_cache,
)
from rsearch.models.attention.pages import Pages
from rsearch.models.attention.splash import ATTENDED
from rsearch.models.norm import RMSNorm
from rsearch.models.products import is_on_cpu, multiply, product
from rsearch.models.rotary import rotate, rotation
from rsearch.models.spec import DecoderSpec

PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENDED),
)


def unembed(
    hidden: jax.Array, kernel: jax.Array, *, is_transposed: bool = False
) -> jax.Array:
    """Return the [..., V] float32 logits of hidden states [..., D].

    Args:
        hidden: the final hidden states.
        kernel: [D, V]; or [V, D] if transposed, as an embedding is. It is so large that
            a CPU is faster with it on the right, however few rows there are.
        is_transposed: whether the kernel's axes are [V, D].
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = product(flat, kernel.astype(hidden.dtype), is_transposed, jnp.float32)
    return logits.reshape(*hidden.shape[:-1], -1)


def kernel_param(module: nn.Module, name: str, summed: tuple, made: tuple) -> jax.Array:
    """Return a module's parameter for `multiply`: [D..., E...], or transposed.

    Args:
        module: the module that has the parameter.
        name: name of the parameter.
        summed: sizes of the axes D, which a product sums over.
        made: sizes of the axes E, which a product makes.
    """
    shape = made + summed if module.is_transposed else summed + made
    return module.param(name, nn.initializers.normal(0.02), shape)


def add_step_and_adapter(
    module: nn.Module, name: str, x: jax.Array, y: jax.Array
) -> jax.Array:
    """Return y times the steps of an 8-bit matrix, plus the product of its adapter.

    Args:
        module: the module that has the matrix as a parameter.
        name: name of the matrix. The steps of an 8-bit matrix are <name>_step (see
            `rsearch.models.unstacked`); its adapter, if there is one, is <name>_a and
            <name>_b (see `rsearch.models.lora`).
        x: [B, T, D], the activations that the matrix was multiplied with.
        y: [B, T, E], the product.
    """
    if module.has_variable("params", f"{name}_step"):
        step = module.get_variable("params", f"{name}_step").reshape(1, 1, -1)
        y = (y.astype(jnp.float32) * step).astype(x.dtype)
    if not module.has_variable("params", f"{name}_a"):
        return y
    a = module.get_variable("params", f"{name}_a")
    b = module.get_variable("params", f"{name}_b")
    rank = a.shape[-1]
    matmul = functools.partial(multiply, mesh=module.mesh)
    return y + matmul(matmul(x, a.reshape(-1, rank)), b.reshape(rank, -1))


class Attention(nn.Module):
    """Self-attention over the row itself, or over its cache after writing to it."""

    spec: DecoderSpec
    mesh: Mesh | None
    is_transposed: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        cache: Cache | Pages | None,
        layer: jax.Array | int,
        index: CacheIndex,
        turns: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, Cache | Pages | None]:
        s, is_transposed = self.spec, self.is_transposed
        matmul = functools.partial(
            multiply, mesh=self.mesh, is_transposed=is_transposed
        )

        def project(name, heads):
            kernel = kernel_param(self, name, (s.width,), (heads, s.head_dim))
            y = add_step_and_adapter(self, name, x, matmul(x, kernel))
            y = y.reshape(*x.shape[:2], heads, s.head_dim)
            if s.qkv_bias:
                bias = self.param(
                    f"{name}_bias", nn.initializers.zeros, (heads, s.head_dim)
                )
                y = y + bias.astype(x.dtype)[None, None]
            return y

        q, k = project("q", s.num_heads), project("k", s.num_kv_heads)
        if s.qk_norm:
            q = RMSNorm(s.norm_eps, name="q_norm")(q)
            k = RMSNorm(s.norm_eps, name="k_norm")(k)
        q = rotate(q, turns, pairs=s.rotary_pairs)
        k = rotate(k, turns, pairs=s.rotary_pairs)
        v = project("v", s.num_kv_heads)
        if cache is None:
            # Position 0 begins a new text; several texts may share a row.
            text = jnp.cumsum(index.positions == 0, axis=1)
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            out = attend_within(q, k, v, text, self.mesh)
        else:
            out, cache = attend_cached(q, k, v, cache, layer, index, self.mesh)
        kernel = kernel_param(self, "o", (s.num_heads, s.head_dim), (s.width,))
        out = out.reshape(*x.shape[:2], -1)
        return add_step_and_adapter(self, "o", out, matmul(out, kernel)), cache


class Layer(nn.Module):
    """Attention and SwiGLU with their norms, as a body for `nn.scan`.

    Attributes:
        is_transposed: whether its kernels are transposed; see `multiply`.
        dtype: compute dtype; None means the dtype of the input states.
    """

    spec: DecoderSpec
    mesh: Mesh | None
    is_transposed: bool = False
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(
        self, carry: tuple, index: CacheIndex, turns: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple, None]:
        x, cache, layer = carry
        carry_dtype = x.dtype
        x = x.astype(self.dtype or carry_dtype)
        s, is_transposed = self.spec, self.is_transposed
        matmul = functools.partial(
            multiply, mesh=self.mesh, is_transposed=is_transposed
        )
        normed = RMSNorm(s.norm_eps, name="attention_norm")(x)
        attention = Attention(s, self.mesh, self.is_transposed, name="attention")
        out, cache = attention(normed, cache, layer, index, turns)
        if s.post_norms:
            out = RMSNorm(s.norm_eps, name="attention_post_norm")(out)
        x = x + out
        normed = RMSNorm(s.norm_eps, name="mlp_norm")(x)
        model_sizes, mlp_sizes = (s.width,), (s.mlp_width,)
        if s.fused_mlp:
            # Gate and up are separated by an axis, so that sharding the last axis
            # shards both in the same way.
            gate_up = kernel_param(self, "gate_up", model_sizes, (2, s.mlp_width))
            gate_up = gate_up if self.is_transposed else gate_up.swapaxes(0, 1)
            gate, up = matmul(normed, gate_up[0]), matmul(normed, gate_up[1])
        else:
            gate = matmul(normed, kernel_param(self, "gate", model_sizes, mlp_sizes))
            up = matmul(normed, kernel_param(self, "up", model_sizes, mlp_sizes))
        gate = add_step_and_adapter(self, "gate", normed, gate)
        up = add_step_and_adapter(self, "up", normed, up)
        down = kernel_param(self, "down", mlp_sizes, model_sizes)
        # In float32, because in bfloat16 XLA's CPU backend rounds after each operation.
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        activations = (nn.silu(gate) * up).astype(x.dtype)
        out = add_step_and_adapter(self, "down", activations, matmul(activations, down))
        if s.post_norms:
            out = RMSNorm(s.norm_eps, name="mlp_post_norm")(out)
        return ((x + out).astype(carry_dtype), cache, layer + 1), None


class Decoder(nn.Module):
    """A causal language model.

    Attributes:
        spec: shape of the decoder.
        dtype: compute dtype; parameters are float32 masters unless cast by the caller.
        remat: recompute each layer in the backward pass. Without it, matrix products
            and the outputs of attention are saved, and only the rest, which is cheaper
            to compute than to load, is recomputed.
        value_head: add a scalar head on the last hidden state.
        mesh: mesh of the devices it runs on, over which attention is sharded; None
            means one device.
    """

    spec: DecoderSpec
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    value_head: bool = False
    mesh: Mesh | None = None

    def setup(self):
        s = self.spec
        init = nn.initializers.normal(0.02)
        self.embedding = self.param("embedding", init, (s.vocab_size, s.width))
        policy = None if self.remat else PRODUCTS
        layer = nn.remat(Layer, prevent_cse=False, policy=policy)
        self.layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=s.num_layers,
        )(s, self.mesh, dtype=self.dtype)
        self.final_norm = RMSNorm(s.norm_eps)
        if not s.tie_embeddings:
            self.unembedding = self.param("unembedding", init, (s.width, s.vocab_size))
        if self.value_head:
            self.value = self.param("value", nn.initializers.zeros, (s.width,))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache | Pages | None = None,
        rows: jax.Array | None = None,
        table: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | Pages | None]:
        """Compute the hidden states of new tokens.

        Args:
            tokens: [B, T] int32 ids.
            positions: [B, T] int32 positions for the rotary embedding. Without a cache,
                each 0 begins a separate text, and the order of tokens in the row
                decides what is visible within it. With a cache they are also the slots
                to write, and a position >= S writes nothing.
            cache: keys and values of earlier tokens, or None.
            rows: [B] int32 rows of the cache that the tokens belong to; an index one
                past the last row marks padding. None means all rows in order.
            table: [B, n] int32 pages of each row, for a paged cache.

        Returns:
            [B, T, D] final hidden states in the compute dtype, and the extended cache.
        """
        x = jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)
        if cache is None:
            index = CacheIndex(positions, None, None)
        else:
            index = index_cache(cache, positions, rows, table)
        turns = rotation(self.spec, positions)
        if cache is None and is_on_cpu(self.mesh):
            # A gradient stacks the input states of all layers. To write one layer's
            # states, XLA's CPU backend widens and narrows a whole bfloat16 stack.
            x = x.astype(jnp.float32)
        (x, cache, _), _ = self.layers((x, cache, jnp.int32(0)), index, turns)
        return self.final_norm(x.astype(self.dtype)), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the [..., V] float32 logits of hidden states [..., D]."""
        if self.spec.tie_embeddings:
            return unembed(hidden, self.embedding, is_transposed=True)
        return unembed(hidden, self.unembedding)

    def values(self, hidden: jax.Array) -> jax.Array:
        """Return the [...] float32 values of hidden states [..., D] (`value_head`)."""
        return hidden.astype(jnp.float32) @ self.value

    def initialise(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Use every parameter on [B, T] tokens; only for `init`."""
        hidden, _ = self(tokens, positions)
        return self.values(hidden) if self.value_head else self.logits(hidden)


def init_params(model: Decoder, key: jax.Array) -> dict:
    """Return random float32 parameters; layers are stacked on a leading axis L."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return model.init(key, tokens, tokens, method="initialise")["params"]


def param_shapes(spec: DecoderSpec, *, value_head: bool = False) -> dict:
    """Return the tree of `init_params` as ShapeDtypeStructs; compute nothing."""
    # The cached dicts are copied, because the caller may change the result.
    return jax.tree.map(lambda shape: shape, _traced_shapes(spec, value_head))


@functools.lru_cache(maxsize=16)  # a run needs the same shapes again and again
def _traced_shapes(spec, value_head):
    model = Decoder(spec, value_head=value_head)
    return jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))

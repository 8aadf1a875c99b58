"""Compare separate layers with turned kernels to the scan over a stack of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models import unstacked as layers
from rsearch.models.attention.cached import empty_cache
from rsearch.models.sharding import make_mesh, place_for_decoding
from tests.rollout import tiny

ROWS, SLOTS = 4, 8
SHAPES = {
    "llama": dict(qkv_bias=False, vocab_size=48),
    "tied": dict(tie_embeddings=True, vocab_size=48),
    "glm": dict(fused_mlp=True, post_norms=True, rotary_dim=4, vocab_size=48),
    "qwen3": dict(qk_norm=True, vocab_size=48),
}


@functools.cache
def decoder(shape, mesh):
    """Return a compiled function from parameters to the logits [3, B, V] of 3 steps."""
    model = tiny.model(**SHAPES[shape]).clone(mesh=mesh)

    def step(params, cache, inputs):
        position, tokens = inputs
        positions = jnp.full((ROWS, 1), position)
        hidden, cache = layers.decode_step(model, params, tokens, positions, cache)
        return cache, layers.decode_logits(model, params, hidden[:, 0])

    @jax.jit
    def decode(params):
        inputs = jnp.arange(3), jnp.arange(12).reshape(3, ROWS, 1)
        cache = empty_cache(model.spec, ROWS, SLOTS, jnp.float32)
        return jax.lax.scan(functools.partial(step, params), cache, inputs)[1]

    return decode


def decoded_logits(shape, params, mesh):
    """Return logits [3, B, V] after each of three tokens per row."""
    return np.asarray(decoder(shape, mesh)(params))


EIGHT = (2, 2)  # sizes of the fsdp and tensor axes; data has the other factor of 2
OF_EIGHT = [
    pytest.param(shape, EIGHT, marks=() if shape == "glm" else pytest.mark.slow)
    for shape in SHAPES
]


@pytest.mark.parametrize(
    ("shape", "sizes"), [*((shape, (1, 1)) for shape in SHAPES), *OF_EIGHT]
)
def test_separate_layers_give_the_logits_of_a_scan(shape, sizes, monkeypatch):
    monkeypatch.setattr(layers, "LARGE_LAYERS", 0)
    data, tensor = sizes
    devices = jax.devices()[: 2 * data * tensor if data > 1 else 1]
    mesh = make_mesh(data=-1, fsdp=data, tensor=tensor, devices=devices)
    params = place_for_decoding(tiny.params(**SHAPES[shape]), mesh)
    apart = layers.with_layers_apart(params, mesh)
    assert len(apart[layers.SEPARATE]) == 2 and layers.SEPARATE not in params
    expected = decoded_logits(shape, params, mesh)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(
        decoded_logits(shape, apart, mesh), expected, rtol=1e-5, atol=1e-5
    )


def test_small_layers_stay_in_their_stack():
    mesh = make_mesh(devices=jax.devices()[:1])
    params = place_for_decoding(tiny.params(), mesh)
    assert layers.with_layers_apart(params, mesh) is params


@pytest.mark.parametrize("shape", SHAPES)
def test_8_bit_kernels_are_within_half_a_step_of_the_trained_ones(shape):
    params = tiny.params(**SHAPES[shape])
    made, num_kernels = layers.with_int8_kernels(params, jnp.bfloat16), 0
    for path, kernel in jax.tree_util.tree_leaves_with_path(params):
        found, name = made, path[-1].key
        for key in path:
            found = found[key.key]
        if name not in layers.SUMMED:
            assert found.dtype == jnp.bfloat16
            continue
        num_kernels += 1
        assert found.dtype == jnp.int8
        found = np.asarray(found, float)
        axes = tuple(range(1, 1 + layers.SUMMED[name]))
        step = np.max(np.abs(kernel), axes, keepdims=True) / 127
        assert np.all(np.abs(found * step - kernel) <= 0.5001 * step)
        assert np.all(np.max(np.abs(found), axes) == 127)
    assert num_kernels == (6 if shape == "glm" else 7)


def test_8_bit_kernels_of_zeros_are_finite():
    zeros = jax.tree.map(jnp.zeros_like, tiny.params())
    made = layers.with_int8_kernels(zeros, jnp.float32)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(made))


def widened(tree):
    """Return parameters with the numbers that 8-bit integers and steps represent."""
    made = {}
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            made[name] = widened(leaf)
        elif name in layers.SUMMED:
            names = ("gate", "up") if name == "gate_up" else (name,)
            steps = [tree[f"{n}_step"] for n in names]
            step = jnp.stack(steps, axis=1) if len(steps) > 1 else steps[0]
            axes = tuple(range(1, 1 + layers.SUMMED[name]))
            made[name] = leaf * jnp.expand_dims(step, axes)
        elif not name.endswith("_step"):
            made[name] = leaf
    return made


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_with_8_bit_kernels_equals_decoding_with_their_values(
    shape, tensor, monkeypatch
):
    params = tiny.params(**SHAPES[shape])
    made = layers.with_int8_kernels(params, jnp.float32)
    mesh = make_mesh(tensor=tensor, devices=jax.devices()[:tensor])
    placed = place_for_decoding(made, mesh)
    actual = decoded_logits(shape, placed, mesh)
    expected = decoded_logits(shape, place_for_decoding(widened(made), mesh), mesh)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    exact = decoded_logits(shape, place_for_decoding(params, mesh), mesh)
    assert 1e-3 < np.max(np.abs(actual - exact)) < 2
    monkeypatch.setattr(layers, "LARGE_LAYERS", 0)
    apart = layers.with_layers_apart(placed, mesh)
    assert layers.SEPARATE in apart
    apart = decoded_logits(shape, apart, mesh)
    np.testing.assert_allclose(apart, actual, rtol=1e-4, atol=1e-4)

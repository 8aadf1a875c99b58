"""Compare low-rank adapters with the full matrices that they represent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.base import MATRICES as NAMED
from rsearch.models.decoder import Decoder
from rsearch.models.lora import (
    MATRICES,
    adapter_shapes,
    init_adapters,
    merge_adapters,
    num_adapter_params,
    with_adapters,
)
from tests.rollout import tiny
from tests.rollout.tiny import quick_compilation

__all__ = ["quick_compilation"]
SCALE = 1.5
SHAPES = {
    "qwen2": {},
    "qwen3": dict(qkv_bias=False, qk_norm=True, tie_embeddings=True),
    "glm": dict(fused_mlp=True, post_norms=True, rotary_dim=4),
}
TOKENS = np.random.default_rng(0).integers(0, 40, (3, 9)).astype(np.int32)


def adapters(spec, matrices=MATRICES, rank=3, seed=1):
    """Return adapters with random values in both of their matrices."""
    rng = np.random.default_rng(seed)
    shapes = adapter_shapes(spec, rank=rank, matrices=matrices)
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes
    )


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1])[None], TOKENS.shape)
    hidden, _ = model.apply({"params": params}, TOKENS, positions)
    return model.apply({"params": params}, hidden, method="logits")


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_act_like_the_merged_matrices(shape):
    model = tiny.model(vocab_size=40, **SHAPES[shape])
    params = tiny.params(vocab_size=40, **SHAPES[shape])
    plain = logits(model, params)
    for matrices in (MATRICES, ("q", "up"), ("gate",)):
        own = adapters(model.spec, matrices)
        beside = logits(model, with_adapters(params, own, SCALE))
        within = logits(model, merge_adapters(params, own, SCALE))
        np.testing.assert_allclose(beside, within, atol=2e-3 * np.abs(within).max())
        assert np.abs(beside - plain).max() > 0.1


def test_a_merged_matrix_equals_the_sum_by_hand_and_is_cast_last():
    spec = tiny.spec(vocab_size=40)
    params, own = tiny.params(vocab_size=40), adapters(spec)
    a, b = (np.float64(own["layers"]["attention"][f"k_{x}"]) for x in "ab")
    expected = np.float64(params["layers"]["attention"]["k"])
    expected = expected + SCALE * np.einsum("ldr,lrkc->ldkc", a, b)
    actual = merge_adapters(params, own, SCALE)["layers"]["attention"]["k"]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    half = merge_adapters(params, own, SCALE, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        half["layers"]["attention"]["k"], actual.astype(jnp.bfloat16)
    )
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("shape", ["qwen2", "glm"])
def test_gradients_of_adapters_follow_from_those_of_the_full_matrices(shape):
    """W = W0 + s A B has dA = s dW B^T and dB = s A^T dW (LoRA, equation 3)."""
    model = tiny.model(vocab_size=40, **SHAPES[shape])
    params = tiny.params(vocab_size=40, **SHAPES[shape])
    own = adapters(model.spec)

    def loss(params):
        return jnp.mean(jax.nn.logsumexp(logits(model, params), -1) ** 2)

    actual = jax.grad(lambda own: loss(with_adapters(params, own, SCALE)))(own)[
        "layers"
    ]
    plain = jax.grad(loss)(merge_adapters(params, own, SCALE))["layers"]
    flat = {**actual, **actual["attention"]}
    leaves = {**own["layers"], **own["layers"]["attention"]}
    for name in MATRICES:
        a, b = leaves[f"{name}_a"], leaves[f"{name}_b"]
        if name in ("gate", "up") and "gate_up" in plain:
            of_w = plain["gate_up"][:, :, ("gate", "up").index(name)]
        else:
            of_w = {**plain, **plain["attention"]}[name]
        rank, num_layers = a.shape[-1], a.shape[0]
        a2, b2 = a.reshape(num_layers, -1, rank), b.reshape(num_layers, rank, -1)
        of_w = np.float64(of_w).reshape(num_layers, a2.shape[1], b2.shape[2])
        expected_a = SCALE * np.einsum("lio,lro->lir", of_w, b2)
        expected_b = SCALE * np.einsum("lir,lio->lro", a2, of_w)
        for part, expected in (("a", expected_a), ("b", expected_b)):
            ours = np.asarray(flat[f"{name}_{part}"]).reshape(expected.shape)
            size = np.abs(expected).max()
            np.testing.assert_allclose(ours, expected, atol=2e-3 * size), name


def test_new_adapters_change_no_bit_of_the_model():
    model, params = tiny.model(vocab_size=40), tiny.params(vocab_size=40)
    fresh = init_adapters(model.spec, jax.random.key(3), rank=4, matrices=MATRICES)
    beside = logits(model, with_adapters(params, fresh, SCALE))
    np.testing.assert_array_equal(beside, logits(model, params))
    same = merge_adapters(params, fresh, SCALE)
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_an_adapters_initial_values_do_not_depend_on_the_other_adapters():
    spec, key = tiny.spec(width=64, mlp_width=256), jax.random.key(5)
    every = init_adapters(spec, key, rank=32, matrices=MATRICES)["layers"]
    some = init_adapters(spec, key, rank=32, matrices=("down", "v"))["layers"]
    np.testing.assert_array_equal(some["down_a"], every["down_a"])
    np.testing.assert_array_equal(some["attention"]["v_a"], every["attention"]["v_a"])
    assert some.keys() == {"down_a", "down_b", "attention"}
    # The standard deviation is 1 / sqrt(input features), which are 64 and 256 here.
    assert np.std(every["attention"]["q_a"]) == pytest.approx(1 / 8, rel=0.1)
    assert np.std(every["down_a"]) == pytest.approx(1 / 16, rel=0.1)
    assert not any(np.any(x) for n, x in every.items() if n.endswith("_b"))


def test_the_number_of_adapter_parameters_by_hand():
    spec = tiny.spec()  # width 16, 4 query and 2 key heads of 8, MLP 32, 2 layers
    q, kv, mlp = 16 + 32, 16 + 16, 16 + 32
    count = num_adapter_params(spec, rank=3, matrices=MATRICES)
    assert count == 2 * 3 * (2 * q + 2 * kv + 3 * mlp)
    assert num_adapter_params(spec, rank=3, matrices=("k",)) == 2 * 3 * kv


def test_an_adapter_has_the_input_and_output_axes_of_its_matrix():
    assert NAMED == MATRICES
    layers = tiny.params()["layers"]
    layers |= layers.pop("attention")
    shapes = adapter_shapes(tiny.spec(), rank=3, matrices=MATRICES)["layers"]
    shapes |= shapes.pop("attention")
    for name in MATRICES:
        a, b = shapes[f"{name}_a"].shape, shapes[f"{name}_b"].shape
        assert a[0] == b[0] == 2 and a[-1] == b[1] == 3
        assert a[1:-1] + b[2:] == layers[name].shape[1:]


def test_adapters_act_in_bfloat16_too():
    spec = tiny.spec(vocab_size=40)
    params, own = tiny.params(vocab_size=40), adapters(spec)
    whole = with_adapters(params, own, SCALE)
    exact, half = (logits(Decoder(spec, dtype=d), whole) for d in ("f4", jnp.bfloat16))
    assert half.dtype == jnp.float32
    assert np.abs(half - exact).mean() < 0.05 * np.abs(exact).mean()

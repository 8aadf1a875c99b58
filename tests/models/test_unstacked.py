"""Layers one by one, their kernels turned, against the scan over a stack of them."""

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


def written(shape, params, mesh):
    """Logits [3, B, V] behind three tokens of each row, one after the other."""
    model = tiny.model(**SHAPES[shape]).clone(mesh=mesh)
    cache = empty_cache(model.spec, ROWS, SLOTS, jnp.float32)

    @jax.jit
    def step(params, tokens, position, cache):
        positions = jnp.full((ROWS, 1), position)
        hidden, cache = layers.extended(model, params, tokens, positions, cache)
        return layers.logits_behind(model, params, hidden[:, 0]), cache

    actual = []
    for position, tokens in enumerate(np.arange(12).reshape(3, ROWS, 1)):
        logits, cache = step(params, tokens, position, cache)
        actual.append(logits)
    return np.stack(actual)


EIGHT = (2, 2)  # devices of data and tensor, twice
OF_EIGHT = [
    pytest.param(shape, EIGHT, marks=() if shape == "glm" else pytest.mark.slow)
    for shape in SHAPES
]


@pytest.mark.parametrize(
    ("shape", "sizes"), [*((shape, (1, 1)) for shape in SHAPES), *OF_EIGHT]
)
def test_layers_apart_make_what_a_scan_makes(shape, sizes, monkeypatch):
    monkeypatch.setattr(layers, "LARGE_LAYERS", 0)
    data, tensor = sizes
    devices = jax.devices()[: 2 * data * tensor if data > 1 else 1]
    mesh = make_mesh(data=-1, fsdp=data, tensor=tensor, devices=devices)
    params = place_for_decoding(tiny.params(**SHAPES[shape]), mesh)
    apart = layers.with_layers_apart(params, mesh)
    assert len(apart[layers.SEPARATE]) == 2 and layers.SEPARATE not in params
    expected = written(shape, params, mesh)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(
        written(shape, apart, mesh), expected, rtol=1e-5, atol=1e-5
    )


def test_small_layers_stay_where_they_are():
    mesh = make_mesh(devices=jax.devices()[:1])
    params = place_for_decoding(tiny.params(), mesh)
    assert layers.with_layers_apart(params, mesh) is params

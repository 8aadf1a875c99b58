import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rsearch.models import sharding
from rsearch.models.attention.cached import empty_cache
from rsearch.models.decoder import Decoder, init_params
from rsearch.models.spec import DecoderSpec
from tests.hosts.test_processes import run_hosts
from tests.models import reference

SPEC = DecoderSpec(
    vocab_size=32,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    qkv_bias=True,
)
MODEL = Decoder(SPEC)
NEW_KINDS = {
    "qwen3": dict(qkv_bias=False, qk_norm=True),
    "glm4": dict(
        fused_mlp=True, post_norms=True, rotary_dim=2, rotary_pairs="neighbours"
    ),
}


@pytest.fixture(scope="module")
def params():
    return jax.device_get(reference.random_params(SPEC))


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(data=2, fsdp=2, tensor=2)


def specs_of(params, mesh, rules=None):
    shardings = sharding.param_shardings(params, mesh, rules)
    return jax.tree.map(lambda s: s.spec, shardings)


def test_heads_and_mlp_are_sharded_over_tensor_and_the_width_over_fsdp(params, mesh):
    specs = specs_of(params, mesh)
    layers = specs["layers"]
    assert layers["attention"]["q"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert layers["attention"]["o"] == PartitionSpec(None, "tensor", None, "fsdp")
    assert layers["attention"]["k_bias"] == PartitionSpec(None, "tensor", None)
    assert layers["gate"] == PartitionSpec(None, "fsdp", "tensor")
    assert layers["down"] == PartitionSpec(None, "tensor", "fsdp")
    assert layers["mlp_norm"]["scale"] == PartitionSpec(None, None)
    assert specs["embedding"] == PartitionSpec("tensor", "fsdp")
    assert specs["unembedding"] == PartitionSpec("fsdp", "tensor")


def test_for_decoding_no_parameter_is_sharded_over_fsdp(params, mesh):
    specs = specs_of(params, mesh, sharding.DECODING_RULES)
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        assert "fsdp" not in spec
    assert specs["layers"]["up"] == PartitionSpec(None, None, "tensor")


def test_every_parameter_of_every_variant_has_a_sharding_of_its_rank(mesh):
    for changes in (dict(qkv_bias=False), dict(), *NEW_KINDS.values()):
        spec = DecoderSpec(**{**SPEC.__dict__, **changes})
        model = Decoder(spec, value_head=True)
        init = functools.partial(init_params, model)
        shapes = jax.eval_shape(init, jax.random.key(0))
        shardings = sharding.param_shardings(shapes, mesh)
        for leaf, placed in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings)):
            assert len(placed.spec) == leaf.ndim


def test_a_device_holds_its_share_of_each_parameter(params, mesh):
    placed = jax.device_put(params, sharding.param_shardings(params, mesh))
    q = placed["layers"]["attention"]["q"]
    assert q.shape == (2, 16, 4, 4)
    assert {s.data.shape for s in q.addressable_shards} == {(2, 8, 2, 4)}


@pytest.mark.parametrize("vocab_size", [32, 33])
def test_a_sharded_step_equals_an_unsharded_one(mesh, vocab_size):
    """This also holds for a vocabulary that cannot be halved and is not sharded."""
    spec = DecoderSpec(**{**SPEC.__dict__, "vocab_size": vocab_size})
    model, params = Decoder(spec), jax.device_get(reference.random_params(spec))
    tokens = np.random.default_rng(0).integers(0, vocab_size, (4, 8), np.int32)

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(8)[None], tokens.shape)
        hidden, _ = model.apply({"params": params}, tokens, positions)
        logits = model.apply({"params": params}, hidden, method="logits")
        logp = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)
        return -jnp.mean(picked), logits

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, expected), expected_grad = step(params, tokens)
    shardings = sharding.param_shardings(params, mesh)
    carrier = "tensor" if vocab_size == 32 else None
    assert shardings["unembedding"].spec == PartitionSpec("fsdp", carrier)
    placed = jax.device_put(params, shardings)
    rows = jax.device_put(tokens, sharding.batch_sharding(mesh))
    assert {s.data.shape for s in rows.addressable_shards} == {(1, 8)}
    (_, actual), grad = step(placed, rows)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(expected_grad)):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_sharded_value_head_with_all_layer_options_equals_an_unsharded_one(
    mesh,
):
    spec = DecoderSpec(**{**SPEC.__dict__, **NEW_KINDS["glm4"], "qk_norm": True})
    model = Decoder(spec, value_head=True)
    params = jax.device_get(reference.random_params(spec))
    params["value"] = np.random.default_rng(1).normal(size=16).astype(np.float32)
    tokens = np.random.default_rng(0).integers(0, 32, (4, 8), np.int32)

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(8)[None], tokens.shape)
        hidden, _ = model.apply({"params": params}, tokens, positions)
        values = model.apply({"params": params}, hidden, method="values")
        return jnp.mean((values - 1.0) ** 2), values

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, expected), expected_grad = step(params, tokens)
    assert expected.shape == (4, 8)
    shardings = sharding.param_shardings(params, mesh)
    assert shardings["value"].spec == PartitionSpec("fsdp")
    placed = jax.device_put(params, shardings)
    rows = jax.device_put(tokens, sharding.batch_sharding(mesh))
    (_, actual), grad = step(placed, rows)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(expected_grad)):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_sharded_cached_decoding_equals_unsharded(params, mesh):
    tokens = np.random.default_rng(0).integers(0, 32, (4, 8), np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32)[None], (4, 8))

    @jax.jit
    def run(params, tokens, positions):
        cache = empty_cache(SPEC, 4, 8, jnp.float32)
        for part in (slice(0, 5), slice(5, 6), slice(6, 8)):
            hidden, cache = MODEL.apply(
                {"params": params}, tokens[:, part], positions[:, part], cache
            )
        return hidden

    expected = run(params, tokens, positions)
    shardings = sharding.param_shardings(params, mesh, sharding.DECODING_RULES)
    rows = sharding.batch_sharding(mesh)
    actual = run(
        jax.device_put(params, shardings),
        jax.device_put(tokens, rows),
        jax.device_put(positions, rows),
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_data_axis_takes_the_remaining_devices():
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("sizes", [(3, 1, 1), (2, 2, 4), (-1, 3, 1), (-1, 16, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    data, fsdp, tensor = sizes
    with pytest.raises(ValueError, match="there are 8 devices"):
        sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


@pytest.mark.fault(24, "what must divide")
def test_an_axis_that_the_mesh_does_not_divide_is_named(params):
    mesh = sharding.make_mesh(data=2, fsdp=1, tensor=4)
    message = r"axis 2 of parameter layers\.attention\.k has size 2.*mesh\.tensor=4"
    with pytest.raises(ValueError, match=message):
        sharding.param_shardings(params, mesh)


def test_laying_out_updated_parameters_compiles_nothing_new():
    """An update turns P(None) into the equivalent P(), which needs no new program."""
    for code, _, error in run_hosts("-m", "tests.models.placed_twice"):
        assert code == 0, error

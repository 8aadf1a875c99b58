"""Compare updates of adapters on frozen weights with updates of the full weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.learn.batch import to_micro_batches
from rsearch.learn.objectives import policy_loss, value_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import create_state
from rsearch.models.decoder import Decoder
from rsearch.models.lora import MATRICES, init_adapters, merge_adapters, with_adapters
from rsearch.models.sharding import make_mesh, param_shardings
from rsearch.plan.flops import count_flops
from tests.learn.learner import Critic, Learner
from tests.learn.test_update import (
    ADAMW,
    GRPO,
    MODEL,
    V,
    assert_close,
    learner_of,
    make_batch,
    one_device,
)
from tests.models.test_lora import adapters
from tests.rollout import tiny

SCALE, RANK = 1.5, 3


def new_adapters():
    """Return new adapters, which change nothing yet."""
    return init_adapters(MODEL.spec, jax.random.key(3), rank=RANK, matrices=MATRICES)


@functools.cache
def adapter_learner(mesh=None):
    """Return (learner, placed base, function that makes a state of adapters)."""
    optimizer, mesh = make_optimizer(**ADAMW), mesh or one_device()
    learner = Learner(
        MODEL,
        optimizer,
        mesh,
        loss=policy_loss(**GRPO),
        loss_mean="token",
        chunk_tokens=16,
        adapter_scale=SCALE,
    )
    params = tiny.params(vocab_size=V)
    base = jax.device_put(params, param_shardings(params, mesh))
    return learner, base, lambda own: create_state(own, optimizer, mesh)


def leaf(tree, name):
    """Return a leaf of the layers, whether it belongs to attention or not."""
    layers = tree["layers"]
    return layers[name] if name in layers else layers["attention"][name]


def step(own, micro_batch=8, mesh=None):
    """Return (adapters after one update, metrics), as numpy arrays."""
    learner, base, begin = adapter_learner(mesh)
    batch = learner.put(to_micro_batches(make_batch(), micro_batch))
    state, metrics = learner.update(begin(own), batch, base=base)
    return jax.tree.map(np.asarray, (state.params, metrics))


def test_the_first_update_has_the_plain_loss_and_leaves_the_base_bit_identical():
    learner, start = learner_of()
    _, plain = learner.update(start(), learner.put(to_micro_batches(make_batch(), 8)))
    _, base, _ = adapter_learner()
    before = jax.tree.map(np.array, base)
    after, metrics = step(new_adapters())
    for name in ("loss", "kl", "entropy", "clip_fraction", "logp_gap"):
        assert float(metrics[name]) == pytest.approx(float(plain[name]), rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, base, before)
    # While B is 0, only weight decay moves A, which has no gradient; B has one.
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, new_adapters())
    assert all(moved["layers"][f"{m}_b"] > 1e-4 for m in ("gate", "up", "down"))
    assert all(moved["layers"]["attention"][f"{m}_b"] > 1e-4 for m in "qkvo")


def test_the_gradient_is_the_plain_gradient_by_the_chain_rule():
    """For dW of the merged weights, dA = s dW B^T and dB = s A^T dW; compare norms."""
    own = adapters(MODEL.spec)
    _, metrics = step(own)
    whole = merge_adapters(tiny.params(vocab_size=V), own, SCALE)
    state = create_state(whole, make_optimizer(**ADAMW), one_device())
    plain, _ = learner_of()
    # AdamW's first step at lr 1, without decay, is -g / (|g| + 1); solve this for g.
    after, _ = plain.update(state, plain.put(to_micro_batches(make_batch(), 8)))

    def gradient(before, after):
        moved = np.float64(before) * (1 - ADAMW["weight_decay"]) - np.float64(after)
        return moved / (1 - np.abs(moved))

    total = 0.0
    for name in MATRICES:
        a, b = (np.float64(leaf(own, f"{name}_{x}")) for x in "ab")
        a, b = a.reshape(len(a), -1, RANK), b.reshape(len(b), RANK, -1)
        of_w = gradient(leaf(whole, name), leaf(after.params, name))
        of_w = of_w.reshape(len(a), a.shape[1], b.shape[2])
        total += (SCALE**2 * np.einsum("lio,lro->lir", of_w, b) ** 2).sum()
        total += (SCALE**2 * np.einsum("lir,lio->lro", a, of_w) ** 2).sum()
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(total), rel=1e-5)


def test_scores_equal_those_of_the_merged_weights():
    learner, base, _ = adapter_learner()
    own = adapters(MODEL.spec)
    batch = learner.put(to_micro_batches(make_batch(), 4))
    beside = learner.score(own, batch, base)
    within = learner.score(learner.plain(own, base), batch)
    np.testing.assert_allclose(beside, within, atol=2e-4)
    assert np.abs(beside - learner.score(base, batch)).max() > 0.1
    same = learner.plain(base)
    assert same is base


def test_eight_devices_or_micro_batches_make_the_same_update():
    own = adapters(MODEL.spec)
    one, metrics = step(own)
    cut_up, _ = step(own, micro_batch=2)
    assert_close(cut_up, one, 1e-5)
    sharded, same = step(own, 4, mesh=make_mesh(data=2, fsdp=2, tensor=2))
    assert_close(sharded, one, 2e-5)
    assert_close(same, metrics, 1e-4)


def test_no_gradient_of_the_base_is_computed():
    """A backward pass costs two forward ones, or one without the base's gradient."""
    model = Decoder(tiny.spec(vocab_size=V, width=64, mlp_width=256))
    optimizer = make_optimizer(**ADAMW)
    settings = dict(loss=policy_loss(**GRPO), loss_mean="token", chunk_tokens=16)
    learner = Learner(model, optimizer, one_device(), **settings)
    base = tiny.params(vocab_size=V, width=64, mlp_width=256)
    own = init_adapters(model.spec, jax.random.key(0), rank=1, matrices=MATRICES)
    batch = jax.tree.map(jnp.asarray, to_micro_batches(make_batch(), 8))
    flops = {}
    for name, params, under in (("plain", base, None), ("adapters", own, base)):
        state = create_state(params, optimizer, one_device())
        args = state, batch, None, under
        flops[name] = count_flops(learner.update, args, rounds=1)
    assert flops["adapters"] < 0.8 * flops["plain"]
    shapes = jax.eval_shape(learner.update, *args)[0]
    held = sum(x.size for x in jax.tree.leaves(shapes))
    assert held < 3.1 * sum(x.size for x in jax.tree.leaves(own))


def test_a_critic_shares_the_base_and_learns_its_head():
    spec = tiny.spec(vocab_size=V, tie_embeddings=True)
    model, optimizer = Decoder(spec, value_head=True), make_optimizer(**ADAMW)
    critic = Critic(
        model,
        optimizer,
        one_device(),
        loss=value_loss(clip=0.5, over_response=False),
        adapter_scale=SCALE,
    )
    base = tiny.params(vocab_size=V)  # its unembedding is not read
    head = jnp.asarray(np.random.default_rng(3).normal(size=spec.width), jnp.float32)
    batch = jax.tree.map(jnp.asarray, to_micro_batches(make_batch(), 8))
    batch = batch._replace(values=0.0 * batch.advantage, returns=batch.advantage)
    own = new_adapters() | {"value": 0 * head}
    assert not np.any(critic.score(own, batch, base))
    whole = {n: x for n, x in base.items() if n != "unembedding"} | {"value": head}
    values = critic.score(new_adapters() | {"value": head}, batch, base)
    np.testing.assert_allclose(values, critic.score(whole, batch), atol=1e-6)
    state = create_state(new_adapters() | {"value": head}, optimizer, one_device())
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = critic.update(state, batch, base)
    plain, told = critic.update(create_state(whole, optimizer, one_device()), batch)
    assert float(metrics["critic_loss"]) == pytest.approx(float(told["critic_loss"]))
    assert_close(state.params["value"], plain.params["value"], 1e-5)
    assert np.abs(state.params["value"] - before["value"]).max() > 1e-3
    assert np.any(state.params["layers"]["down_b"])
    assert with_adapters(base, state.params, SCALE).keys() == base.keys() | {"value"}

"""The value model's scores and updates, and the policy's memorisation loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.learn.batch import pack_segments, to_micro_batches
from rsearch.learn.losses import clipped_value_loss
from rsearch.learn.objectives import imitation_loss, policy_loss, value_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import create_state
from rsearch.learn.update import critic_params, put
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import make_mesh
from tests.learn.learner import Critic, Learner
from tests.learn.test_update import (
    ADAMW,
    GRPO,
    MODEL,
    T,
    V,
    assert_close,
    make_batch,
    one_device,
)
from tests.learn.test_update import step as policy_step
from tests.rollout import tiny

SPEC = tiny.model(vocab_size=V, tie_embeddings=True).spec
VALUER = Decoder(SPEC, value_head=True)
CLIP = 0.5


@functools.cache
def params():
    """Return a critic's parameters with a random head, so that values are not 0."""
    body = critic_params(tiny.params(vocab_size=V))
    head = np.random.default_rng(3).normal(size=SPEC.width)
    return body | {"value": jnp.asarray(head, jnp.float32)}


@functools.cache
def critic_of(mesh=None, over_response=False, loss_mean="token"):
    """Return (critic, mesh, function that places a new state), compiled once."""
    optimizer, mesh = make_optimizer(**ADAMW), mesh or one_device()
    critic = Critic(
        VALUER,
        optimizer,
        mesh,
        loss=value_loss(clip=CLIP, over_response=over_response),
        over_response=over_response,
        loss_mean=loss_mean,
    )
    state = create_state(params(), optimizer, mesh)
    start = jax.tree.map(np.asarray, state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return critic, mesh, lambda: jax.device_put(start, shardings)


def rows(seed=0):
    """Return ragged rows with returns; some non-policy tokens count as retrieved."""
    batch = make_batch(seed)
    rng = np.random.default_rng(seed)
    retrieved = ~batch.from_policy & (rng.random(batch.tokens.shape) < 0.5)
    values = np.asarray(our_values(batch.tokens)) + 0.3 * rng.normal(size=(8, T))
    return batch._replace(
        in_response=batch.from_policy | retrieved,
        values=values.astype(np.float32),
        returns=rng.normal(size=(8, T)).astype(np.float32),
    )


def our_values(tokens):
    """Return [B, T] values; value t comes from a full pass's hidden state at t - 1."""
    positions = jnp.broadcast_to(jnp.arange(T)[None], tokens.shape)
    hidden, _ = VALUER.apply({"params": params()}, tokens, positions)
    values = np.asarray(hidden, np.float64) @ np.asarray(params()["value"], np.float64)
    return np.pad(values[:, :-1], ((0, 0), (1, 0)))


def step(batch, micro_batch=8, **settings):
    """Return (parameters after one update, metrics), as numpy arrays."""
    critic, mesh, start = critic_of(**settings)
    state, metrics = critic.update(
        start(), put(to_micro_batches(batch, micro_batch), mesh)
    )
    return jax.tree.map(np.asarray, (state.params, metrics))


def test_a_value_depends_only_on_the_tokens_before_it():
    critic, mesh, start = critic_of()
    batch = put(to_micro_batches(rows(), 4), mesh)
    actual = np.asarray(critic.score(start().params, batch)).reshape(8, T)
    expected = our_values(rows().tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    other = rows().tokens.copy()
    other[:, 6:] = (other[:, 6:] + 1) % V
    changed = critic.score(start().params, batch._replace(tokens=cut_of(other)))
    changed = np.asarray(changed).reshape(8, T)
    np.testing.assert_allclose(changed[:, :7], actual[:, :7], atol=1e-5)
    assert (np.abs(changed - actual)[:, 7:] > 1e-4).all()


def cut_of(tokens):
    return tokens.reshape(2, 4, T)


@pytest.mark.parametrize("over_response", [False, True])
def test_the_loss_equals_one_computed_by_numpy(over_response):
    batch = rows()
    _, metrics = step(batch, over_response=over_response)
    mask = batch.in_response if over_response else batch.from_policy
    value = our_values(batch.tokens)
    near = np.clip(value, batch.values - CLIP, batch.values + CLIP)
    errors = [(x - batch.returns) ** 2 for x in (value, near)]
    expected = 0.5 * np.maximum(*errors)[mask].mean()
    assert metrics["critic_loss"] == pytest.approx(expected, abs=1e-4)
    assert metrics["value"] == pytest.approx(batch.values[mask].mean(), abs=1e-5)
    assert metrics["return"] == pytest.approx(batch.returns[mask].mean(), abs=1e-5)


@pytest.mark.parametrize("outside", [np.nan, np.inf])
def test_a_critic_learns_only_from_policy_tokens(outside):
    batch = rows()
    mask = batch.from_policy
    bad = batch._replace(
        values=np.where(mask, batch.values, outside).astype(np.float32),
        returns=np.where(mask, batch.returns, outside).astype(np.float32),
    )
    assert_close(step(bad), step(batch), 0)
    whole, _ = step(batch, over_response=True)
    masked, _ = step(batch)
    assert np.abs(whole["value"] - masked["value"]).max() > 1e-3


def test_micro_batches_and_devices_do_not_change_an_update():
    batch = rows()
    whole, metrics = step(batch)
    pieces, same = step(batch, 2)
    assert_close(pieces, whole, 1e-5)
    assert_close(same, metrics, 1e-4)
    sharded, same = step(batch, 4, mesh=make_mesh(data=2, fsdp=2, tensor=2))
    assert_close(sharded, whole, 2e-5)
    assert_close(same, metrics, 1e-4)


def test_a_critic_starts_from_the_policy_and_predicts_zero():
    policy = tiny.params(vocab_size=V)
    made = critic_params(policy)
    assert not np.asarray(made["value"]).any() and "unembedding" not in made
    for name in made.keys() - {"value"}:
        jax.tree.map(np.testing.assert_array_equal, made[name], policy[name])
    shapes = jax.eval_shape(lambda: params())
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, shapes)


def test_a_critic_learns_to_predict_the_returns():
    """50 steps towards returns that depend on the row's first token."""
    settings = ADAMW | dict(lr=3e-3, eps=1e-8, max_grad_norm=1.0)
    optimizer = make_optimizer(**settings)
    loss = value_loss(clip=0.0, over_response=False)
    critic = Critic(VALUER, optimizer, one_device(), loss=loss)
    state = create_state(
        critic_params(tiny.params(vocab_size=V)), optimizer, one_device()
    )
    batch = rows()
    batch = batch._replace(
        returns=np.tile(batch.tokens[:, :1] % 2, (1, T)).astype(np.float32)
    )
    placed, losses = put(to_micro_batches(batch, 8), one_device()), []
    for _ in range(50):
        state, metrics = critic.update(state, placed)
        losses.append(float(metrics["critic_loss"]))
    assert losses[-1] < 0.05 * losses[0]
    assert critic.num_traces == 1


def memory_rows(seed, count):
    """Return demonstrations, the last of which is empty."""
    full = make_batch(seed)
    empty = pack_segments([()], T)._replace(length=None)  # like the others
    keep = jax.tree.map(lambda x: x[: count - 1], full)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), keep, empty)


MU = 0.5


@functools.cache
def learner(loss, mesh=None):
    """Return (learner, function that places a new state), compiled once."""
    optimizer, mesh = make_optimizer(**ADAMW), mesh or one_device()
    made = Learner(
        MODEL,
        optimizer,
        mesh,
        loss=loss,
        loss_mean="token",
        chunk_tokens=16,
        memorise_coef=MU,
    )
    state = create_state(tiny.params(vocab_size=V), optimizer, mesh)
    start = jax.tree.map(np.asarray, state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return made, lambda: jax.device_put(start, shardings)


def updated(loss, batch, memory=None, *, micro_batch=8, mesh=None):
    """Return (parameters after one update, metrics), as numpy arrays."""
    made, start = learner(loss, mesh)
    if memory is not None:
        memory = made.put(to_micro_batches(memory, micro_batch))
    state, metrics = made.update(start(), made.put(to_micro_batches(batch, 8)), memory)
    return jax.tree.map(np.asarray, (state.params, metrics))


SURROGATE = policy_loss(**GRPO)


def half_imitation(*args):
    """Return the loss of the memorised rows, weighted with mu = 0.5."""
    loss, metrics = imitation_loss(*args)
    return MU * loss, metrics


def test_memorising_adds_mu_times_the_mean_loss_of_its_tokens():
    """With nothing else to learn from, the update is that of mu x the likelihood."""
    batch = make_batch()
    nothing = batch._replace(from_policy=batch.from_policy & False)
    memory = memory_rows(5, 8)
    after, metrics = updated(SURROGATE, nothing, memory)
    expected, told = updated(half_imitation, memory)
    assert_close(after, expected, 1e-5)
    assert metrics["memory_loss"] == pytest.approx(float(told["loss"]), abs=1e-5)
    assert metrics["memory_loss"] > 1 and metrics["loss"] == 0
    # With something else to learn from, both gradients add up.
    _, both = updated(SURROGATE, batch, memory)
    assert both["memory_loss"] == metrics["memory_loss"]
    assert both["grad_norm"] != pytest.approx(metrics["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_memorising_in_micro_batches_on_two_devices_changes_nothing():
    batch, memory = make_batch(), memory_rows(5, 8)
    whole, metrics = updated(SURROGATE, batch, memory)
    mesh = make_mesh(data=2, devices=jax.devices()[:2])
    pieces, same = updated(SURROGATE, batch, memory, micro_batch=2, mesh=mesh)
    assert_close(pieces, whole, 1e-5)
    assert_close(same, metrics, 1e-4)


def test_without_rows_to_memorise_the_update_is_the_plain_one():
    batch = make_batch()
    actual, metrics = updated(SURROGATE, batch, pack_segments([()] * 8, T))
    expected, _ = policy_step(batch)
    assert_close(actual, expected, 1e-6)
    assert metrics["memory_loss"] == 0


def test_value_loss_is_the_mean_of_clipped_value_loss():
    batch = rows()
    value = jnp.asarray(our_values(batch.tokens), jnp.float32)
    mask = batch.from_policy
    errors = clipped_value_loss(value, batch.values, batch.returns, mask, clip=CLIP)
    loss, _ = value_loss(clip=CLIP, over_response=False)(
        value, batch, mask / mask.sum()
    )
    assert float(loss) == pytest.approx(float(errors.sum()) / mask.sum(), rel=1e-5)

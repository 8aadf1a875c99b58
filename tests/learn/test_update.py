import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.learn.advantages import with_advantages
from rsearch.learn.batch import Batch, to_micro_batches
from rsearch.learn.losses import row_weights
from rsearch.learn.objectives import imitation_loss, policy_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import create_state
from rsearch.models.sharding import make_mesh
from tests.learn.learner import Learner
from tests.rollout import tiny

V, T, G = 40, 10, 4
MODEL = tiny.model(vocab_size=V)
# Adam's first step is lr x sign, which hides the gradient; a large eps reveals it.
ADAMW = dict(
    lr=1.0,
    warmup_steps=0,
    decay_steps=0,
    b1=0.9,
    b2=0.99,
    eps=1.0,
    weight_decay=0.01,
    max_grad_norm=1e9,
)
GRPO = dict(clip_low=0.2, clip_high=0.3, kl_coef=0.1, kl_kind="k3", entropy_coef=0.01)
NORMALISED = dict(group_size=G, normalize_std=True, eps=1e-6)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def make_batch(seed=0, num_rows=8):
    """Return ragged rows with advantages and log-probs close to the policy's."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (num_rows, T)).astype(np.int32)
    mask = rng.random((num_rows, T)) < 0.5
    mask[:, 0] = False
    mask &= np.arange(T)[None] < rng.integers(4, T + 1, num_rows)[:, None]
    logp = np.asarray(our_logprobs(tokens))
    batch = Batch(
        tokens=tokens,
        from_policy=mask,
        in_response=mask,
        behavior_logp=(logp + rng.normal(size=mask.shape) * 0.3).astype(np.float32),
        reference_logp=(logp + rng.normal(size=mask.shape) * 0.3).astype(np.float32),
        reward=rng.normal(size=num_rows).astype(np.float32),
        is_signal=np.ones(num_rows, bool),
        advantage=np.zeros(mask.shape, np.float32),
    )
    return jax.tree.map(np.asarray, with_advantages(batch, **NORMALISED))


@jax.jit
def all_logits(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(T)[None], tokens.shape)
    hidden, _ = MODEL.apply({"params": params}, tokens, positions)
    return MODEL.apply({"params": params}, hidden, method="logits")


def our_logprobs(tokens, temperature=1.0):
    """Return [B, T] log-probs from all logits at once, in float64."""
    logits = all_logits(tiny.params(vocab_size=V), tokens)
    logp = tiny.log_softmax(np.asarray(logits) / temperature)[:, :-1]
    chosen = np.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
    return np.pad(chosen, ((0, 0), (1, 0)))


def our_entropy(tokens):
    logp = tiny.log_softmax(all_logits(tiny.params(vocab_size=V), tokens))[:, :-1]
    return np.pad(-(np.exp(logp) * logp).sum(-1), ((0, 0), (1, 0)))


@functools.cache
def learner_of(loss_mean="token", mesh=None):
    """Return (learner, function that places a new state), compiled once per setting."""
    optimizer = make_optimizer(**ADAMW)
    mesh = mesh or one_device()
    learner = Learner(
        MODEL,
        optimizer,
        mesh,
        loss=policy_loss(**GRPO),
        loss_mean=loss_mean,
        chunk_tokens=16,
    )
    state = create_state(tiny.params(vocab_size=V), optimizer, mesh)
    start = jax.tree.map(np.asarray, state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return learner, lambda: jax.device_put(start, shardings)


def step(batch, micro_batch=8, **settings):
    """Return (parameters after one update, metrics), as numpy arrays."""
    learner, start = learner_of(**settings)
    state, metrics = learner.update(
        start(), learner.put(to_micro_batches(batch, micro_batch))
    )
    return jax.tree.map(np.asarray, (state.params, metrics))


def assert_close(a, b, tolerance):
    compare = functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=0)
    jax.tree.map(compare, a, b)


def numpy_grpo(batch, loss_mean):
    """Compute the whole loss token by token."""
    logp, entropy = our_logprobs(batch.tokens), our_entropy(batch.tokens)
    lengths = batch.from_policy.sum(1)
    total = {"loss": 0.0, "kl": 0.0, "entropy": 0.0, "clip_fraction": 0.0}
    for i, t in zip(*np.nonzero(batch.from_policy)):
        if loss_mean == "token":
            weight = 1 / lengths.sum()
        else:
            weight = 1 / lengths[i] / (lengths > 0).sum()
        ratio = np.exp(logp[i, t] - batch.behavior_logp[i, t])
        clipped = min(max(ratio, 0.8), 1.3)
        advantage = batch.advantage[i, t]
        gain = min(ratio * advantage, clipped * advantage)
        d = batch.reference_logp[i, t] - logp[i, t]
        kl = np.exp(d) - d - 1
        total["loss"] += weight * (-gain + 0.1 * kl - 0.01 * entropy[i, t])
        total["kl"] += weight * kl
        total["entropy"] += weight * entropy[i, t]
        total["clip_fraction"] += weight * (clipped * advantage < ratio * advantage)
    return total


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_the_loss_equals_one_computed_by_numpy(loss_mean):
    batch = make_batch()
    _, metrics = step(batch, loss_mean=loss_mean)
    expected = numpy_grpo(batch, loss_mean)
    assert 0 < expected["clip_fraction"] < 1
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_micro_batches_accumulate_to_the_update_of_the_whole_batch(loss_mean):
    batch = make_batch()
    # Rows with very different weights, and one without tokens in the loss.
    mask = batch.from_policy.copy()
    mask[1, 4:] = mask[5] = False
    batch = batch._replace(from_policy=mask)
    whole, metrics = step(batch, 8, loss_mean=loss_mean)
    pieces, same = step(batch, 2, loss_mean=loss_mean)
    assert_close(pieces, whole, 1e-6)
    assert_close(same, metrics, 1e-5)
    moved = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), whole, tiny.params(vocab_size=V)
    )
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_eight_devices_make_the_same_update_as_one():
    batch = make_batch()
    one, metrics = step(batch)
    sharded, same = step(batch, 4, mesh=make_mesh(data=2, fsdp=2, tensor=2))
    assert_close(sharded, one, 1e-5)
    assert_close(same, metrics, 1e-5)


def test_updates_reuse_buffers_and_trace_once():
    step(make_batch())
    learner, start = learner_of()
    state, traces = start(), learner.num_traces
    before = state.params["embedding"]
    for seed in range(3):
        pieces = to_micro_batches(make_batch(seed), 8)
        state, _ = learner.update(state, learner.put(pieces))
    assert before.is_deleted()
    assert learner.num_traces == traces
    assert int(state.updates) == 3


def test_updating_a_state_leaves_the_parameters_it_was_made_from():
    params = {"gate": jnp.ones((4, 4)), "scale": jnp.ones(4)}
    state = create_state(params, make_optimizer(**ADAMW), one_device())
    jax.jit(lambda s: jax.tree.map(lambda x: 0 * x, s), donate_argnums=0)(state)
    assert state.params["gate"].is_deleted()
    assert not any(x.is_deleted() for x in params.values())


def test_scores_are_the_log_probabilities_at_the_sampling_temperature():
    optimizer = make_optimizer(**ADAMW)
    learner = Learner(
        MODEL,
        optimizer,
        one_device(),
        loss=imitation_loss,
        loss_mean="token",
        temperature=0.7,
        chunk_tokens=16,
    )
    batch = make_batch()
    pieces = to_micro_batches(batch, 4)
    scored = np.asarray(learner.score(tiny.params(vocab_size=V), learner.put(pieces)))
    # Only tokens of the policy are scored.
    expected = np.where(batch.from_policy, our_logprobs(batch.tokens, 0.7), 0.0)
    np.testing.assert_allclose(scored.reshape(8, T), expected, atol=1e-5)


LOSSES = {
    "policy": policy_loss(**GRPO),
    "imitation": imitation_loss,
    "all": policy_loss(**GRPO, dual_clip=3.0, tis_cap=2.0, by_sequence=True),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("outside", [0.0, np.nan, np.inf])
def test_only_tokens_of_the_policy_get_a_gradient(name, outside):
    batch = make_batch()
    batch = batch._replace(sampled_logp=batch.behavior_logp - 0.1)
    mask = batch.from_policy
    weights = mask / mask.sum()
    bad = {
        field: np.where(mask, getattr(batch, field), outside).astype(np.float32)
        for field in ("behavior_logp", "sampled_logp", "reference_logp", "advantage")
    }
    logp = np.where(mask, our_logprobs(batch.tokens), outside).astype(np.float32)
    entropy = np.where(mask, our_entropy(batch.tokens), outside).astype(np.float32)

    def loss(logp, entropy):
        return LOSSES[name](logp, entropy, batch._replace(**bad), weights)[0]

    by_logp, by_entropy = jax.grad(loss, argnums=(0, 1))(logp, entropy)
    np.testing.assert_array_equal(np.asarray(by_logp) != 0, mask)
    assert np.isfinite(by_logp).all()
    np.testing.assert_array_equal(
        np.asarray(by_entropy) != 0, mask & (name != "imitation")
    )


def test_logits_that_predict_tokens_of_other_sources_get_no_gradient():
    """Checked through the softmax: the logits at t - 1 learn from the token at t."""
    batch = make_batch()
    weights = batch.from_policy / batch.from_policy.sum()

    def loss(logits):
        logp = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        chosen = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        chosen, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))
        return LOSSES["policy"](chosen, entropy, batch, weights)[0]

    grad = jax.grad(loss)(all_logits(tiny.params(vocab_size=V), batch.tokens))
    predicts = np.pad(batch.from_policy[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_array_equal(np.abs(grad).sum(-1) > 0, predicts)


def test_tokens_after_the_last_policy_token_have_no_influence():
    batch = make_batch()
    after = np.cumsum(batch.from_policy[:, ::-1], 1)[:, ::-1] == 0
    other = np.where(after, (batch.tokens + 1) % V, batch.tokens)
    assert after.sum() > 8
    first, second = step(batch), step(batch._replace(tokens=other))
    assert_close(first, second, 1e-6)


@pytest.mark.fault(14, "all-masked row")
def test_excluded_rollouts_do_not_change_the_loss_of_the_others():
    """Two groups of 4 with a failed rollout each have the loss of two groups of 3."""
    batch = make_batch()
    signal = np.ones(8, bool)
    signal[[1, 6]] = False
    failed = batch._replace(
        is_signal=signal,
        from_policy=batch.from_policy & signal[:, None],
        reward=np.where(signal, batch.reward, np.nan).astype(np.float32),
    )
    advantages = with_advantages(failed, **NORMALISED)
    kept = jax.tree.map(lambda x: x[signal], batch)
    alone = with_advantages(kept, **NORMALISED | dict(group_size=3))
    np.testing.assert_allclose(advantages.advantage[signal], alone.advantage, atol=1e-6)
    logp, entropy = our_logprobs(batch.tokens), our_entropy(batch.tokens)
    for loss_mean in ("token", "sequence"):

        def value(logp, entropy, rows, loss_mean=loss_mean):
            weights = row_weights(rows.from_policy, loss_mean)
            return LOSSES["policy"](logp, entropy, rows, weights)

        both = jax.value_and_grad(value, has_aux=True)
        (_, metrics), grad = both(jnp.array(logp), entropy, advantages)
        (_, same), expected = both(jnp.array(logp[signal]), entropy[signal], alone)
        assert_close(metrics, same, 1e-5)
        np.testing.assert_allclose(grad[signal], expected, atol=1e-6)
        assert not np.asarray(grad)[~signal].any()


KL = dict(kl_coef=0.1, kl_kind="k3", entropy_coef=0.0, clip_low=0.2, clip_high=0.3)


def test_the_adapted_kl_coefficient_is_kept_in_the_state_for_the_next_update():
    batch, optimizer = make_batch(), make_optimizer(**ADAMW)
    learner = Learner(
        MODEL,
        optimizer,
        one_device(),
        loss=policy_loss(**KL),
        loss_mean="token",
        chunk_tokens=16,
        kl_target=1e-6,
        kl_gain=0.5,
    )
    params, rows = tiny.params(vocab_size=V), learner.put(to_micro_batches(batch, 8))
    actual = {}
    for coef in (0.1, 0.3):
        state = create_state(params, optimizer, one_device(), kl_coef=coef)
        state, metrics = learner.update(state, rows)
        # The divergence is far above its target: 1 + 0.5 x 0.2.
        assert float(metrics["kl_coef"]) == pytest.approx(coef, rel=1e-6)
        assert float(state.kl_coef) == pytest.approx(1.1 * coef, rel=1e-6)
        actual[coef] = metrics
    # The loss uses the state's: with 0.3 it is larger by 0.2 times the divergence.
    grown = float(actual[0.3]["loss"] - actual[0.1]["loss"])
    assert grown == pytest.approx(0.2 * float(metrics["kl"]), rel=1e-3)
    assert learner.num_traces == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_with_a_non_finite_gradient_is_skipped(value):
    batch, optimizer = make_batch(), make_optimizer(**ADAMW)
    learner = Learner(
        MODEL, optimizer, one_device(), loss=policy_loss(**KL), loss_mean="token"
    )
    good = learner.put(to_micro_batches(batch, 8))
    place = np.argwhere(batch.from_policy)[0]
    advantage = batch.advantage.copy()
    advantage[tuple(place)] = value
    bad = learner.put(to_micro_batches(batch._replace(advantage=advantage), 8))

    def states():
        """Yield (state, metrics) after a good, a bad and again the good update."""
        state = create_state(
            tiny.params(vocab_size=V), optimizer, one_device(), kl_coef=0.1
        )
        for rows in (good, bad, good):
            state, metrics = learner.update(state, rows)
            yield jax.device_get(state), metrics

    (first, _), (second, metrics), (third, _) = states()
    assert not np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, second, first)
    assert (int(first.updates), int(third.updates)) == (1, 2)
    finite = jax.tree.map(lambda x: bool(np.isfinite(x).all()), third)
    assert all(jax.tree.leaves(finite))


def test_the_truncated_weight_scales_the_surrogate():
    """Tokens sampled with half the trainer's probability have weight 2, or the cap."""
    batch = make_batch()
    weights = batch.from_policy / batch.from_policy.sum()
    logp, entropy = our_logprobs(batch.tokens), our_entropy(batch.tokens)
    rows = batch._replace(
        sampled_logp=np.where(batch.from_policy, batch.behavior_logp, np.nan)
        - np.float32(np.log(2))
    )
    plain = dict(GRPO, kl_coef=0.0, entropy_coef=0.0)
    expected, _ = policy_loss(**plain)(logp, entropy, batch, weights)
    for cap, factor in ((3.0, 2.0), (1.5, 1.5)):
        loss = policy_loss(**plain, tis_cap=cap)
        actual, metrics = loss(logp, entropy, rows, weights)
        assert float(actual) == pytest.approx(factor * float(expected), rel=1e-4)
        assert float(metrics["tis_weight"]) == pytest.approx(factor, rel=1e-5)


def test_a_constant_mean_changes_the_loss_but_not_the_other_metrics():
    batch, optimizer = make_batch(), make_optimizer(**ADAMW)
    learner = Learner(
        MODEL,
        optimizer,
        one_device(),
        loss=policy_loss(**GRPO),
        loss_mean="constant",
        loss_tokens=50,
        chunk_tokens=16,
    )
    state = create_state(tiny.params(vocab_size=V), optimizer, one_device())
    _, actual = learner.update(state, learner.put(to_micro_batches(batch, 8)))
    _, by_token = step(batch)
    num_rows = (batch.from_policy.sum(1) > 0).sum()
    share = batch.from_policy.sum() / (num_rows * 50)
    expected = share * float(by_token["loss"])
    assert float(actual["loss"]) == pytest.approx(expected, rel=1e-4)
    for name in ("entropy", "kl", "logp_gap"):
        assert float(actual[name]) == pytest.approx(float(by_token[name]), rel=1e-4)

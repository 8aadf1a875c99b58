"""One optimizer step: micro-batches accumulate to exactly the gradient of the whole."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.learn.batch import Batch
from rsearch.learn.logprobs import token_logprobs
from rsearch.learn.losses import (
    clipped_surrogate,
    group_advantages,
    kl_estimate,
    masked_sum,
    row_weights,
)
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import batch_sharding, param_shardings, replicated


class TrainState(NamedTuple):
    """All that an update changes.

    Attributes:
        updates: [] int32, optimizer steps taken.
        params: float32 master parameters.
        opt_state: optax state.
    """

    updates: jax.Array
    params: dict
    opt_state: optax.OptState


def make_optimizer(
    *, lr, warmup_steps, decay_steps, b1, b2, eps, weight_decay, max_grad_norm
) -> optax.GradientTransformation:
    """AdamW with global-norm clipping, linear warmup and, if asked, a linear decay.

    Args:
        lr: peak learning rate.
        warmup_steps: update u of these has lr * (u + 1) / warmup_steps: none is lost at
            0.
        decay_steps: updates of the run; the rate falls linearly to a tenth of the peak,
            which the last of them has; 0 keeps it constant.
        b1, b2, eps, weight_decay: of AdamW (arXiv 1711.05101); norms and biases, which
            are vectors in each layer, do not decay.
        max_grad_norm: the gradient's global norm is cut to this.
    """

    def schedule(count):
        warm = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
        if not decay_steps:
            return lr * warm
        last = max(decay_steps - 1 - warmup_steps, 1)
        done = jnp.clip((count - warmup_steps) / last, 0, 1)
        return lr * warm * (1 - 0.9 * done)

    def decays(params):
        names = ("scale", "q_bias", "k_bias", "v_bias", "value")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in names, params
        )

    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(
            schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decays
        ),
    )


def state_shardings(state, mesh: Mesh):
    """Shardings of a TrainState, of arrays or shapes: moments lie with the weights."""
    whole = replicated(mesh)

    def like_params(tree):
        return param_shardings(tree, mesh)

    shape = jax.tree.structure(state.params)

    def is_params(node):
        return jax.tree.structure(node) == shape

    opt_state = jax.tree.map(
        lambda node: like_params(node) if is_params(node) else whole,
        state.opt_state,
        is_leaf=is_params,
    )
    return TrainState(whole, like_params(state.params), opt_state)


def create_state(params, optimizer, mesh: Mesh) -> TrainState:
    """A fresh state around a copy of float32 parameters, laid out over the mesh.

    A copy, since the first update reuses the state's buffers, and the parameters given
    may serve as reference.
    """

    def create(params):
        params = jax.tree.map(jnp.copy, params)
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    shardings = state_shardings(jax.eval_shape(create, params), mesh)
    return jax.jit(create, out_shardings=shardings)(params)


def state_like(shapes, optimizer, mesh: Mesh) -> TrainState:
    """Shapes and shardings of the state around parameters of these shapes."""

    def create(params):
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    state = jax.eval_shape(create, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        state_shardings(state, mesh),
    )


class Learner:
    """The compiled functions of training: score, advantages, update.

    Args:
        model: policy network.
        optimizer: from `make_optimizer`.
        mesh: rows over data and fsdp, parameters over fsdp and tensor.
        loss: (logp, entropy, batch, weights) -> (summed loss, summed metrics).
        temperature: at which the rollouts were sampled.
        chunk_tokens: see `token_logprobs`.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        loss: Callable,
        loss_mean: str,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
    ):
        self._mesh, self._optimizer, self._loss = mesh, optimizer, loss
        self._loss_mean = loss_mean
        self.num_traces = 0
        self._logprobs = functools.partial(
            token_logprobs, model, temperature=temperature, chunk_tokens=chunk_tokens
        )
        self._score_rows = jax.jit(self._score)
        self._update_rows = jax.jit(self._update, donate_argnums=0)

    def put(self, batch: Batch) -> Batch:
        """A [micro-batches, rows, ...] batch on the mesh, the rows spread over it."""
        rows = batch_sharding(self._mesh).spec
        sharding = NamedSharding(self._mesh, PartitionSpec(None, *rows))
        return jax.tree.map(lambda x: jax.device_put(x, sharding), batch)

    def score(self, params, batch: Batch):
        """[M, b, T] log-probabilities of a [M, b, ...] batch under these parameters."""
        return self._score_rows(params, batch.tokens)

    def update(self, state: TrainState, batch: Batch):
        """The state after one optimizer step on a [M, b, ...] batch, and its metrics.

        The old state's buffers are reused: it must not be touched again.
        """
        return self._update_rows(state, batch)

    def _score(self, params, tokens):
        self.num_traces += 1
        return jax.lax.map(lambda rows: self._logprobs(params, rows)[0], tokens)

    def _update(self, state: TrainState, batch: Batch):
        self.num_traces += 1
        flat = batch.from_policy.reshape(-1, batch.from_policy.shape[-1])
        weights = row_weights(flat, self._loss_mean).reshape(batch.from_policy.shape)

        def loss_fn(params, rows, weights):
            logp, entropy = self._logprobs(params, rows.tokens)
            return self._loss(logp, entropy, rows, weights)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

        def accumulate(total, piece):
            (_, metrics), grads = grad_fn(state.params, *piece)
            return jax.tree.map(jnp.add, total, (grads, metrics)), None

        first = jax.tree.map(lambda x: x[0], (batch, weights))
        (_, metrics), grads = jax.eval_shape(grad_fn, state.params, *first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, metrics))
        (grads, metrics), _ = jax.lax.scan(accumulate, zeros, (batch, weights))
        changes, opt_state = self._optimizer.update(
            grads, state.opt_state, state.params
        )
        params = optax.apply_updates(state.params, changes)
        metrics = metrics | {"grad_norm": optax.global_norm(grads)}
        state = TrainState(state.updates + 1, params, opt_state)
        shardings = state_shardings(state, self._mesh)
        return jax.lax.with_sharding_constraint(state, shardings), metrics


def imitation_loss(logp, _entropy, rows: Batch, weights):
    """Negative log-likelihood of the demonstrator's own tokens, and its metrics."""
    loss = -masked_sum(logp * weights, rows.from_policy)
    return loss, {"loss": loss}


def policy_loss(
    *, clip_low, clip_high, kl_coef, kl_kind, entropy_coef, measures_kl=None
) -> Callable:
    """GRPO's loss: clipped surrogate, KL to the reference, entropy bonus.

    Args:
        clip_low, clip_high: see `clipped_surrogate`.
        kl_coef: weight of the KL in the loss; 0 where it is in the reward, or nowhere.
        kl_kind: see `kl_estimate`.
        entropy_coef: weight of the entropy bonus.
        measures_kl: whether there is a reference, so that the metrics have a KL to it;
            by default where it is in the loss.

    Returns:
        (logp, entropy, rows, weights) -> (loss, metrics), both summed with `weights`.
    """

    measures_kl = bool(kl_coef) if measures_kl is None else measures_kl

    def loss(logp, entropy, rows: Batch, weights):
        mask = rows.from_policy
        # What lies outside must not reach a gradient, not even as 0 x NaN.
        logp, entropy, reference_logp = (
            jnp.where(mask, x, 0.0) for x in (logp, entropy, rows.reference_logp)
        )
        surrogate, is_clipped = clipped_surrogate(
            logp, rows.behavior_logp, rows.advantage, mask, low=clip_low, high=clip_high
        )
        kl = kl_estimate(logp, reference_logp, kl_kind)
        total = surrogate - entropy_coef * entropy
        if kl_coef:
            total = total + kl_coef * kl

        def mean(values):
            return masked_sum(values * weights, mask)

        metrics = {
            "loss": mean(total),
            "entropy": mean(entropy),
            "clip_fraction": mean(is_clipped),
            "logp_gap": mean(jnp.abs(logp - rows.behavior_logp)),
        }
        if measures_kl:
            metrics["kl"] = mean(kl)
        return mean(total), metrics

    return loss


@functools.partial(
    jax.jit,
    static_argnames=("group_size", "normalize_std", "eps", "kl_coef", "kl_kind"),
)
def with_advantages(
    batch: Batch, *, group_size, normalize_std, eps, kl_coef=0.0, kl_kind="k1"
) -> Batch:
    """The batch with GRPO's advantage on every policy token.

    Args:
        batch: rows [Q x G, ...] or cut into micro-batches; groups are contiguous.
        group_size: G.
        normalize_std, eps: see `group_advantages`.
        kl_coef: KL in the reward: this times the sum over a rollout's tokens of the
            estimate, relative to its group's mean, is taken off its advantage; 0 where
            the KL is in the loss. It takes no part in the division by the standard
            deviation: in a group whose answers are all right, or all wrong, that would
            blow the estimate's noise up to full size.
        kl_kind: see `kl_estimate`.
    """
    is_signal = batch.is_signal.reshape(-1, group_size)
    advantage = group_advantages(
        batch.reward.reshape(-1, group_size),
        is_signal,
        normalize_std=normalize_std,
        eps=eps,
    )
    if kl_coef:
        kl = kl_estimate(batch.behavior_logp, batch.reference_logp, kl_kind)
        kl = masked_sum(kl, batch.from_policy, axis=-1).reshape(-1, group_size)
        penalty = group_advantages(kl, is_signal, normalize_std=False, eps=eps)
        advantage = advantage - kl_coef * penalty
    advantage = advantage.reshape(batch.reward.shape)
    return batch._replace(
        advantage=jnp.where(batch.from_policy, advantage[..., None], 0.0)
    )

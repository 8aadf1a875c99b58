"""One optimizer step: micro-batches accumulate to exactly the gradient of the whole."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.learn.batch import Batch
from rsearch.learn.logprobs import token_logprobs, token_values
from rsearch.learn.losses import adapted_coefficient, masked_sum, row_weights
from rsearch.learn.packing import summed
from rsearch.learn.train_state import Steps, TrainState
from rsearch.models.decoder import Decoder
from rsearch.models.lora import joined, make_merge
from rsearch.models.sharding import batch_sharding, spread


def batch_shardings(batch: Batch, mesh: Mesh) -> Batch:
    """Shardings of a [micro-batches, rows, ...] batch: the rows spread over the mesh.

    Those of a layout's pieces, too; the pieces come one after another.
    """
    rows = batch_sharding(mesh).spec
    whole = NamedSharding(mesh, PartitionSpec(None, *rows))
    piece = NamedSharding(mesh, PartitionSpec(None, None, *rows))
    found = jax.tree.map(lambda x: whole, batch)
    if batch.layout is None:
        return found
    layout = found.layout._replace(source=piece, positions=piece)
    return found._replace(layout=layout)


def put(batch: Batch, mesh: Mesh) -> Batch:
    """A [micro-batches, rows, ...] batch on the mesh, as `batch_shardings` says."""
    return jax.tree.map(spread, batch, batch_shardings(batch, mesh))


def accumulate(loss, params, batch: Batch, weights):
    """Gradient and metrics of a sum over micro-batches, one at a time.

    And over the pieces of each that has a layout, see `packing.summed`.

    Args:
        loss: (params, rows, weights) -> (loss, metrics), all summed over the masks of
            the rows with weights that are of the whole update, so that what is added up
            is its gradient exactly.
        params: of the network.
        batch: [M, b, ...].
        weights: [M, b, T].

    Returns:
        (gradient, metrics).
    """
    grad_fn = jax.value_and_grad(loss, has_aux=True)

    def add(total, given):
        rows, weights = given

        def add_rows(total, rows):
            (_, metrics), grads = grad_fn(params, rows, weights)
            return jax.tree.map(jnp.add, total, (grads, metrics))

        if rows.layout is None:
            return add_rows(total, rows), None
        return summed(add_rows, total, rows), None

    first = jax.tree.map(lambda x: x[0], (batch, weights))
    _, metrics = jax.eval_shape(loss, params, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, metrics))
    total, _ = jax.lax.scan(add, zeros, (batch, weights))
    return total


def _whole(params, base, scale):
    """Parameters of the network: with adapters, if they stand beside a base."""
    return params if base is None else joined(base, params, scale)


class Learner:
    """The compiled functions of a policy's training: score, update.

    Args:
        model: policy network.
        optimizer: from `make_optimizer`.
        mesh: rows over data and fsdp, parameters over fsdp and tensor.
        loss: (logp, entropy, batch, weights, kl_coef) -> (summed loss, summed metrics).
        loss_mean, loss_tokens: see `row_weights`.
        temperature: at which the rollouts were sampled.
        chunk_tokens: see `token_logprobs`.
        memorise_coef: weight of what is memorised in the loss.
        kl_target, kl_gain: of the states that have a kl_coef, see
            `adapted_coefficient`.
        adapter_scale: alpha / r, where states hold adapters (see `models.adapters`).
        offloads: see `Steps`.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        loss: Callable,
        loss_mean: str,
        loss_tokens: int = 1,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        memorise_coef: float = 0.0,
        kl_target: float = 1.0,
        kl_gain: float = 0.0,
        adapter_scale: float = 1.0,
        offloads: bool = False,
    ):
        self._mesh, self._loss = mesh, loss
        self._weights = functools.partial(
            row_weights, kind=loss_mean, num_tokens=loss_tokens
        )
        self._memorise_coef = memorise_coef
        self._adapt = functools.partial(
            adapted_coefficient, target=kl_target, gain=kl_gain
        )
        self.num_traces = 0
        self._logprobs = functools.partial(
            token_logprobs, model.clone(mesh=mesh), chunk_tokens=chunk_tokens
        )
        self._temperature, self._adapter_scale = temperature, adapter_scale
        self._score_rows = jax.jit(self._score)
        self.steps = Steps(self._gradients, optimizer, mesh, offloads=offloads)
        merge = functools.partial(make_merge, mesh, adapter_scale)
        self.merge = functools.cache(merge)  # one for each dtype, and for donated bases

    def put(self, batch: Batch) -> Batch:
        """A [micro-batches, rows, ...] batch on the mesh, the rows spread over it."""
        return put(batch, self._mesh)

    def plain(self, params, base=None, *, dtype=jnp.float32):
        """What decodes: parameters merged into the base, if there is one.

        Args:
            params: of a state.
            base: frozen weights that its adapters stand beside; float32.
            dtype: of what is merged; a float32 sum is cast to it.
        """
        if base is None:
            return params
        return self.merge(jnp.dtype(dtype))(base, params)

    def left(self, params, base=None):
        """What a stage leaves: `plain`, float32, in the place of the base.

        The base's buffers are reused: it must not be touched again.
        """
        if base is None:
            return params
        return self.merge(jnp.dtype(jnp.float32), donates=True)(base, params)

    def score(self, params, batch: Batch, base=None):
        """[M, b, T] log-probabilities of a [M, b, ...] batch under these parameters.

        Args:
            params: of the network, or adapters that stand beside `base`.
            batch: its tokens and layout.
            base: frozen weights.
        """
        return self._score_rows(params, base, batch.tokens, batch.layout)

    def update(
        self, state: TrainState, batch: Batch, memory: Batch | None = None, base=None
    ):
        """The state after one optimizer step on a [M, b, ...] batch, and its metrics.

        The old state's buffers are reused: it must not be touched again.

        Args:
            state: its critic is left as it is.
            batch: with advantages.
            memory: [M', b, ...] rows whose own tokens' likelihood, by mean over the
                tokens, grows beside: R1-Searcher++'s set T (arXiv 2505.17005 eq. 8-9).
            base: frozen weights that the state's adapters stand beside; there is no
                gradient by them.
        """
        own = state._replace(critic=None)
        own, metrics = self.steps(own, base, batch, memory)
        return own._replace(critic=state.critic), metrics

    def _score(self, params, base, tokens, layout):
        self.num_traces += 1
        params = _whole(params, base, self._adapter_scale)
        score = functools.partial(self._logprobs, temperature=self._temperature)
        return jax.lax.map(lambda rows: score(params, *rows)[0], (tokens, layout))

    def _gradients(self, params, kl_coef, base, batch: Batch, memory):
        self.num_traces += 1

        def loss(params, rows, weights):
            params = _whole(params, base, self._adapter_scale)
            logp, entropy = self._logprobs(
                params, rows.tokens, rows.layout, temperature=self._temperature
            )
            return self._loss(logp, entropy, rows, weights, kl_coef)

        weights = self._weights(batch.from_policy)
        grads, metrics = accumulate(loss, params, batch, weights)
        # A "constant" mean's weights do not sum to 1; what is told is a mean.
        total = jnp.sum(weights)
        scale = jnp.where(total > 0, total, 1.0)
        metrics = {k: v if k == "loss" else v / scale for k, v in metrics.items()}
        if memory is not None:
            recall, told = self._recall(params, base, memory)
            grads = jax.tree.map(jnp.add, grads, recall)
            metrics |= told
        metrics |= {"grad_norm": optax.global_norm(grads)}
        if kl_coef is None:
            return grads, None, metrics
        metrics["kl_coef"] = kl_coef
        return grads, self._adapt(kl_coef, metrics["kl"]), metrics

    def _recall(self, params, base, memory: Batch):
        """Gradient and metrics of what is memorised; at temperature 1, as imitated."""

        def loss(params, rows, weights):
            params = _whole(params, base, self._adapter_scale)
            logp, _ = self._logprobs(params, rows.tokens, rows.layout)
            nll = -masked_sum(logp * weights, rows.from_policy)
            return self._memorise_coef * nll, {"memory_loss": nll}

        weights = row_weights(memory.from_policy, "token")
        return accumulate(loss, params, memory, weights)


class Critic:
    """The compiled functions of a value model's training: score, update.

    Args:
        model: value network, with a value head.
        optimizer: from `make_optimizer`.
        mesh: as the policy's.
        loss: (values, batch, weights) -> (summed loss, summed metrics).
        loss_mean: see `row_weights`.
        over_response: retrieved tokens have values and are learnt from, too.
        adapter_scale: see `Learner`; beside the adapters a state then holds the head.
        offloads: see `Learner`.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        loss: Callable,
        loss_mean: str = "token",
        over_response: bool = False,
        adapter_scale: float = 1.0,
        offloads: bool = False,
    ):
        self._loss = loss
        self._loss_mean, self._over_response = loss_mean, over_response
        self._values = functools.partial(token_values, model.clone(mesh=mesh))
        self._adapter_scale = adapter_scale
        self.num_traces = 0
        self._score_rows = jax.jit(self._score)
        self.steps = Steps(self._gradients, optimizer, mesh, offloads=offloads)

    def score(self, params, batch: Batch, base=None):
        """[M, b, T] values of the states that a [M, b, ...] batch's tokens follow."""
        return self._score_rows(params, base, batch.tokens, batch.layout)

    def update(self, state: TrainState, batch: Batch, base=None):
        """The critic's state after one step on a [M, b, ...] batch, and its metrics.

        The old state's buffers are reused: it must not be touched again. `base` is as
        in `Learner.update`.
        """
        return self.steps(state, base, batch)

    def _score(self, params, base, tokens, layout):
        self.num_traces += 1
        params = _whole(params, base, self._adapter_scale)
        return jax.lax.map(lambda rows: self._values(params, *rows), (tokens, layout))

    def _gradients(self, params, _kl_coef, base, batch: Batch):
        self.num_traces += 1

        def loss(params, rows, weights):
            params = _whole(params, base, self._adapter_scale)
            values = self._values(params, rows.tokens, rows.layout)
            return self._loss(values, rows, weights)

        mask = batch.in_response if self._over_response else batch.from_policy
        weights = row_weights(mask, self._loss_mean)
        grads, metrics = accumulate(loss, params, batch, weights)
        metrics |= {"critic_grad_norm": optax.global_norm(grads)}
        return grads, None, metrics


def critic_params(params):
    """The parameters of a value model that begins as this policy; its head is 0.

    What makes the policy's logits, if it is a matrix of its own, is left out.
    """
    width = params["final_norm"]["scale"].shape
    body = {name: leaf for name, leaf in params.items() if name != "unembedding"}
    return body | {"value": jnp.zeros(width, jnp.float32)}

"""One optimizer step: micro-batches add up to exactly the gradient of the whole batch.

`make_update` compiles (state, base, batch) -> (state, metrics) for any loss;
`make_policy_update` and `make_value_update` define the loss of a policy and of a value
model. `base` holds the frozen weights that adapters (LoRA) are added to, and is None if
all parameters are trained.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.hosts.offload import on_device
from rsearch.learn.batch import Batch
from rsearch.learn.logprobs import token_logprobs, token_values
from rsearch.learn.losses import adapted_coefficient, masked_sum, row_weights
from rsearch.learn.packing import only_piece
from rsearch.learn.train_state import TrainState, apply_gradients, state_shardings
from rsearch.models.decoder import Decoder
from rsearch.models.lora import with_adapters
from rsearch.models.sharding import batch_sharding, param_shardings, spread
from rsearch.types import Params


def batch_shardings(batch: Batch, mesh: Mesh) -> Batch:
    """Return the shardings of a [micro-batches, rows, ...] batch over a mesh.

    Rows are sharded over the mesh, and so are the rows of each piece of a layout.
    Micro-batches and pieces are processed one after another and are not sharded.
    """
    rows = batch_sharding(mesh).spec
    micro_batch_sharding = NamedSharding(mesh, PartitionSpec(None, *rows))
    piece_sharding = NamedSharding(mesh, PartitionSpec(None, None, *rows))
    shardings = jax.tree.map(lambda x: micro_batch_sharding, batch)
    if batch.layout is None:
        return shardings
    layout = shardings.layout._replace(source=piece_sharding, positions=piece_sharding)
    return shardings._replace(layout=layout)


def put(batch: Batch, mesh: Mesh) -> Batch:
    """Return a [micro-batches, rows, ...] batch laid out by `batch_shardings`."""
    return jax.tree.map(spread, batch, batch_shardings(batch, mesh))


def accumulate(
    loss: Callable, params: Params, batch: Batch, weights: jax.Array, *context
) -> tuple:
    """Return the gradient and metrics summed over micro-batches, one at a time.

    If the batch has a layout, each micro-batch goes through the network in pieces, and
    each piece is differentiated right after its forward pass: no activations are kept
    or recomputed for the other pieces. Each conversation lies in one piece, so that a
    masked sum over the tokens of a batch is the total of the sums over its pieces.

    Args:
        loss: (params, rows, weights, *context) -> (loss, metrics), all summed over the
            masks of the rows. The weights are normalised over the whole update, so that
            the summed gradient is exactly that of the update.
        params: parameters of the network.
        batch: [M, b, ...].
        weights: [M, b, T].
        context: more arrays for the loss, such as frozen weights.

    Returns:
        (gradient, metrics).
    """
    # Only shapes are traced here, to create the zeros that the sums start from.
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    first_rows = jax.tree.map(lambda x: x[0], (batch, weights))
    _, metrics = jax.eval_shape(loss, params, *first_rows, *context)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (params, metrics))

    # Gradients and metrics are sums, so that they add up over micro-batches. The
    # weights contain the division: dividing each micro-batch by its own number of
    # tokens would favour tokens of short rollouts, and depend on the micro-batch.
    def add(total, rows, row_weights):
        (_, metrics), grads = value_and_grad(params, rows, row_weights, *context)
        return jax.tree.map(jnp.add, total, (grads, metrics))

    if batch.layout is None:

        def add_micro_batch(total, rows_and_weights):
            return add(total, *rows_and_weights), None

        # A scan, not a Python loop: only one micro-batch's activations exist at a time,
        # and the program does not grow with the number of micro-batches.
        total, _ = jax.lax.scan(add_micro_batch, zeros, (batch, weights))
        return total

    num_pieces = batch.layout.source.shape[1]  # of each micro-batch

    def add_piece(total, number):
        # A single loop over the pieces of all micro-batches, not nested loops, so that
        # the gradient is compiled once and there is only one loop body to read.
        micro_batch, piece_index = jnp.divmod(number, num_pieces)
        rows, row_weights = jax.tree.map(lambda x: x[micro_batch], (batch, weights))
        rows, is_empty = only_piece(rows, piece_index)
        # Empty pieces are skipped: short conversations leave most pieces empty.
        total = jax.lax.cond(
            is_empty, lambda total, *_: total, add, total, rows, row_weights
        )
        return total, None

    numbers = jnp.arange(len(batch.tokens) * num_pieces)
    total, _ = jax.lax.scan(add_piece, zeros, numbers)
    return total


def make_update(
    loss: Callable,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    weigh: Callable,
    finish: Callable,
    offloads: bool = False,
) -> Callable:
    """Return the compiled optimizer step.

    It is (state, base, batch, memory=None) -> (state, metrics). The old state must not
    be used again, since its buffers are reused.

    Args:
        loss: (params, rows, weights, base, kl_coef) -> (loss, metrics), see
            `accumulate`.
        optimizer: from `make_optimizer`.
        mesh: rows are sharded over data and fsdp, parameters over fsdp and tensor.
        weigh: (batch) -> [M, b, T] weights that turn the sum into a mean over the
            update.
        finish: (grads, metrics, weights, params, kl_coef, base, memory) -> (grads,
            metrics, next kl_coef): called once, after all micro-batches.
        offloads: whether the optimizer's moments are kept in host memory between steps.
    """

    if offloads:
        return OffloadedUpdate(loss, optimizer, mesh, weigh=weigh, finish=finish)

    # The state is donated, so that old and new weights and moments never coexist.
    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, base, batch: Batch, memory=None):
        # The weights depend on the whole update, not on single micro-batches.
        weights, kl_coef = weigh(batch), state.kl_coef
        sums = accumulate(loss, state.params, batch, weights, base, kl_coef)
        grads, metrics, kl_coef = finish(
            *sums, weights, state.params, kl_coef, base, memory
        )
        return apply_gradients(state, grads, optimizer, mesh, kl_coef=kl_coef), metrics

    return update


class OffloadedUpdate:
    """An update in two programs, with the moments on the device only for the second.

    If a single program moved them, XLA would put all of them on the device from the
    start, together with the activations, which is what offloading is meant to avoid.

    Attributes:
        gradients: compiled (params, kl_coef, base, batch, memory) -> (grads, metrics,
            next kl_coef).
        step: compiled (state, grads, kl_coef) -> state; reuses the state's buffers.
    """

    def __init__(
        self,
        loss: Callable,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        weigh: Callable,
        finish: Callable,
    ):
        """Define both programs; see `make_update` for the arguments."""

        @jax.jit
        def gradients(params, kl_coef, base, batch, memory=None):
            weights = weigh(batch)
            sums = accumulate(loss, params, batch, weights, base, kl_coef)
            grads, *others = finish(*sums, weights, params, kl_coef, base, memory)
            # Without this XLA may leave the gradients replicated between the programs,
            # which costs a copy of the model on each device.
            shardings = param_shardings(grads, mesh)
            return jax.lax.with_sharding_constraint(grads, shardings), *others

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, grads, kl_coef):
            return apply_gradients(state, grads, optimizer, mesh, kl_coef=kl_coef)

        self.gradients = gradients
        self.step = step
        self._mesh = mesh

    def __call__(
        self,
        state: TrainState,
        base: Params | None,
        batch: Batch,
        memory: Batch | None = None,
    ):
        """Return the state after one step, with moments in host memory, and metrics."""
        grads, metrics, kl_coef = self.gradients(
            state.params, state.kl_coef, base, batch, memory
        )
        # The activations have been freed by now, which makes room for the moments.
        moments = on_device(state.opt_state)
        for old, new in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(moments)):
            if old is not new:
                old.delete()  # frees host memory for the next moments
        state = self.step(state._replace(opt_state=moments), grads, kl_coef)
        # Back to the host before the next rollout, whose KV cache needs the memory.
        host_shardings = state_shardings(state, self._mesh, offloads=True).opt_state
        moments = jax.device_put(state.opt_state, host_shardings)
        return state._replace(opt_state=moments), metrics


def _network_params(params, base, adapter_scale):
    """Return the network's parameters: `params`, joined to the base if there is one."""
    return params if base is None else with_adapters(base, params, adapter_scale)


def make_policy_scorer(
    model: Decoder,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    adapter_scale: float = 1.0,
) -> Callable:
    """Return the compiled (params, base, batch) -> [M, b, T] log-probabilities.

    They are 0 except on the policy's tokens.

    Args:
        model: policy network.
        mesh: see `make_update`.
        temperature: temperature at which the rollouts were sampled.
        chunk_tokens: see `token_logprobs`.
        adapter_scale: alpha / r, if the parameters are adapters (`models.lora`).
    """
    logprobs = functools.partial(
        token_logprobs,
        model.clone(mesh=mesh),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )

    # Only parts of the batch are arguments: others, such as rewards and values, change
    # from step to step in dtype or presence, and would recompile the program.
    @jax.jit
    def score(params, base, tokens, layout, from_policy):
        params = _network_params(params, base, adapter_scale)

        def score_rows(rows):
            tokens, layout, from_policy = rows
            return logprobs(params, tokens, layout, wanted=from_policy)[0]

        return jax.lax.map(score_rows, (tokens, layout, from_policy))

    return lambda params, base, batch: score(
        params, base, batch.tokens, batch.layout, batch.from_policy
    )


@functools.partial(jax.jit, static_argnames="kind")
def mean_loss(logp: jax.Array, rows: Batch, *, kind: str):
    """Return the mean negative log-likelihood of rows, and its number of terms.

    The mean of several such means, weighted by these numbers, is that of all rows.

    Args:
        logp: [..., T] log-probabilities, from a scorer.
        rows: rows to average; those without policy tokens do not count.
        kind: "token" or "sequence", what the terms are; see `row_weights`.
    """
    mask = rows.from_policy
    is_counted = mask if kind == "token" else jnp.any(mask, axis=-1)
    return -masked_sum(logp * row_weights(mask, kind), mask), jnp.sum(is_counted)


def make_policy_update(
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
) -> Callable:
    """Return a policy's update, see `make_update`.

    `memory`, [M', b, ...], holds rows to memorise: the mean log-likelihood of their
    policy tokens is also maximised. It is R1-Searcher++'s set T (arXiv 2505.17005 eq.
    8-9).

    Args:
        model: policy network.
        optimizer, mesh, offloads: see `make_update`.
        loss: (logp, entropy, rows, weights, kl_coef) -> (summed loss, summed metrics).
        loss_mean, loss_tokens: see `row_weights`.
        temperature, chunk_tokens, adapter_scale: see `make_policy_scorer`.
        memorise_coef: weight of the memorisation in the loss.
        kl_target, kl_gain: for states with a kl_coef, see `adapted_coefficient`.
    """
    logprobs = functools.partial(
        token_logprobs, model.clone(mesh=mesh), chunk_tokens=chunk_tokens
    )

    # Adapters are joined inside the loss, so that only they have a gradient.
    def row_loss(params, rows, weights, base, kl_coef):
        params = _network_params(params, base, adapter_scale)
        # At the sampling temperature, so that the ratio compares like with like.
        logp, entropy = logprobs(
            params,
            rows.tokens,
            rows.layout,
            wanted=rows.from_policy,
            temperature=temperature,
        )
        return loss(logp, entropy, rows, weights, kl_coef)

    def recall_loss(params, rows, weights, base):
        # At temperature 1, as in the imitation of demonstrations.
        params = _network_params(params, base, adapter_scale)
        logp, _ = logprobs(params, rows.tokens, rows.layout, wanted=rows.from_policy)
        nll = -masked_sum(logp * weights, rows.from_policy)
        return memorise_coef * nll, {"memory_loss": nll}

    def weigh(batch):
        return row_weights(batch.from_policy, kind=loss_mean, num_tokens=loss_tokens)

    def finish(grads, metrics, weights, params, kl_coef, base, memory):
        # The weights of a "constant" mean do not sum to 1, but means are logged.
        total = jnp.sum(weights)
        scale = jnp.where(total > 0, total, 1.0)
        metrics = {k: v if k == "loss" else v / scale for k, v in metrics.items()}
        # The set T has its own mean, which does not depend on the number of rollouts.
        if memory is not None:
            recall_weights = row_weights(memory.from_policy, "token")
            recall_grads, recall_metrics = accumulate(
                recall_loss, params, memory, recall_weights, base
            )
            grads = jax.tree.map(jnp.add, grads, recall_grads)
            metrics |= recall_metrics
        metrics |= {"grad_norm": optax.global_norm(grads)}
        if kl_coef is None:
            return grads, metrics, None
        metrics["kl_coef"] = kl_coef
        kl = metrics["kl"]
        # The coefficient is adapted after the update that used it, as in PPO's adaptive
        # penalty.
        next_coef = adapted_coefficient(kl_coef, kl, target=kl_target, gain=kl_gain)
        return grads, metrics, next_coef

    return make_update(
        row_loss, optimizer, mesh, weigh=weigh, finish=finish, offloads=offloads
    )


def make_value_scorer(
    model: Decoder, mesh: Mesh, *, adapter_scale: float = 1.0
) -> Callable:
    """Return the compiled (params, base, batch) -> [M, b, T] values.

    A token's value is that of the state in which it was chosen.

    Args:
        model: value network, with a value head.
        mesh, adapter_scale: see `make_policy_scorer`; the parameters then hold the
            adapters and the value head.
    """
    values = functools.partial(token_values, model.clone(mesh=mesh))

    @jax.jit
    def score(params, base, tokens, layout):
        params = _network_params(params, base, adapter_scale)
        return jax.lax.map(lambda rows: values(params, *rows), (tokens, layout))

    return lambda params, base, batch: score(params, base, batch.tokens, batch.layout)


def make_value_update(
    model: Decoder,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    loss: Callable,
    loss_mean: str = "token",
    over_response: bool = False,
    adapter_scale: float = 1.0,
    offloads: bool = False,
) -> Callable:
    """Return a value model's update, see `make_update`; it does not use `memory`.

    Args:
        model: value network, with a value head.
        optimizer, mesh, offloads: see `make_update`.
        loss: (values, rows, weights) -> (summed loss, summed metrics).
        loss_mean: see `row_weights`.
        over_response: whether retrieved tokens also have values and are learnt from.
        adapter_scale: see `make_value_scorer`.
    """
    values = functools.partial(token_values, model.clone(mesh=mesh))

    def row_loss(params, rows, weights, base, _kl_coef):
        params = _network_params(params, base, adapter_scale)
        return loss(values(params, rows.tokens, rows.layout), rows, weights)

    def weigh(batch):
        # With over_response the critic also learns on retrieved tokens, like verl's.
        mask = batch.in_response if over_response else batch.from_policy
        return row_weights(mask, loss_mean)

    def finish(grads, metrics, _weights, _params, _kl_coef, _base, _memory):
        metrics |= {"critic_grad_norm": optax.global_norm(grads)}
        return grads, metrics, None

    return make_update(
        row_loss, optimizer, mesh, weigh=weigh, finish=finish, offloads=offloads
    )


def critic_params(params: dict) -> dict:
    """Return the parameters of a value model that starts as this policy with head 0.

    An untied unembedding matrix is left out.
    """
    width = params["final_norm"]["scale"].shape
    # With a zero head, the first advantages are the returns themselves.
    body = {name: leaf for name, leaf in params.items() if name != "unembedding"}
    return body | {"value": jnp.zeros(width, jnp.float32)}

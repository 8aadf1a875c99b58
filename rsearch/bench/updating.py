"""This package as a subject of the training benchmarks."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rsearch.bench.sampling import load
from rsearch.learn import objectives
from rsearch.learn.batch import Batch, cut
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.train_state import create_state
from rsearch.learn.update import make_policy_update, put

ADAMW = dict(lr=1e-5, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
MAX_GRAD_NORM = 1.0


def token_rows(num_rows: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """[B, T] int32 ids that every subject learns from."""
    rng = np.random.default_rng(1)
    return rng.integers(0, vocab_size, (num_rows, num_tokens)).astype(np.int32)


def _batch(tokens) -> Batch:
    """Rows that were written by somebody else, all but their first token."""
    shape = tokens.shape
    is_learnt = np.ones(shape, bool) & (np.arange(shape[1]) > 0)
    return Batch(
        tokens=tokens,
        from_policy=is_learnt,
        in_response=is_learnt,
        behavior_logp=np.zeros(shape, np.float32),
        reference_logp=np.zeros(shape, np.float32),
        reward=np.zeros(shape[0], np.float32),
        is_signal=np.ones(shape[0], bool),
        advantage=np.zeros(shape, np.float32),
    )


def make_update(
    *, model, num_rows, num_tokens, micro_batch, logit_chunk, dtype, remat=False
):
    """Forward, backward and AdamW on B rows of T tokens: the likelihood of them all.

    Args:
        model: Hugging Face directory.
        num_rows, num_tokens: B and T.
        micro_batch: rows that go through the network at once.
        logit_chunk: tokens whose logits exist at once; 0 = all of a micro-batch.
        dtype: of computing; parameters and moments are float32.
        remat: layers are computed again in the backward pass.
    """
    network, params, mesh = load(model, dtype)
    network = dataclasses.replace(network, remat=remat)
    optimizer = make_optimizer(
        **ADAMW, max_grad_norm=MAX_GRAD_NORM, warmup_steps=0, decay_steps=0
    )
    update = make_policy_update(
        network,
        optimizer,
        mesh,
        loss=objectives.imitation_loss,
        loss_mean="token",
        chunk_tokens=logit_chunk or micro_batch * num_tokens,
    )
    state = create_state(params, optimizer, mesh)
    del params
    tokens = token_rows(num_rows, num_tokens, network.spec.vocab_size)
    batch = put(cut(_batch(tokens), micro_batch), mesh)

    def once():
        nonlocal state
        started = time.perf_counter()
        state, metrics = update(state, None, batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        return {
            "seconds": time.perf_counter() - started,
            "loss": loss,
            "grad_norm": float(metrics["grad_norm"]),
        }

    return once


def make_whole_logits(*, model, num_rows, num_tokens, dtype, **_):
    """The same step as it is written first: [B, T, V] logits, and their softmax."""
    network, params, mesh = load(model, dtype)
    optimizer = make_optimizer(
        **ADAMW, max_grad_norm=MAX_GRAD_NORM, warmup_steps=0, decay_steps=0
    )
    state = create_state(params, optimizer, mesh)
    del params
    tokens = jnp.asarray(token_rows(num_rows, num_tokens, network.spec.vocab_size))

    def loss(params):
        at = {"params": params}
        positions = jnp.broadcast_to(jnp.arange(num_tokens - 1), tokens[:, 1:].shape)
        hidden, _ = network.apply(at, tokens[:, :-1], positions)
        logits = network.apply(at, hidden, method="logits")
        logp = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    def update(state):
        found, grads = jax.value_and_grad(loss)(state.params)
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        return state._replace(params=params, opt_state=opt_state), found

    update = jax.jit(update, donate_argnums=0)

    def once():
        nonlocal state
        started = time.perf_counter()
        state, found = update(state)
        found = float(found)
        jax.block_until_ready(state)
        return {"seconds": time.perf_counter() - started, "loss": found}

    return once

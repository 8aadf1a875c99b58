"""The device's state of conversations, and where on a mesh it lies.

Dimensions: B rows, N tokens of a turn, V vocabulary, E of the rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.attention.cached import Cache
from rsearch.models.attention.pages import Pages
from rsearch.models.sharding import batch_sharding, cut_axes, replicated


class Context(NamedTuple):
    """What rows have read and written.

    Attributes:
        cache: keys and values of the first `length` tokens of each row; in pages, if
            the rows of a rollout share a number of them.
        length: [B] int32 tokens so far.
        logits: [B, V] float32 for the token that comes next.
    """

    cache: Cache | Pages
    length: jax.Array
    logits: jax.Array


class Turn(NamedTuple):
    """What B rows have written in their turns so far.

    Attributes:
        tokens: [B, N] int32; the first `count` of a row are valid.
        logp: [B, N] float32 log-probability under the distribution sampled from.
        count: [B] int32.
        state: [B] uint8 of the stop strings' automaton.
        active: [B] bool, the rows whose turn goes on.
    """

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array
    state: jax.Array
    active: jax.Array


class Rows(NamedTuple):
    """The device state of B conversations."""

    context: Context
    turn: Turn


def row_shardings(x: Rows | Context, mesh: Mesh):
    """Rows, and pages, over data and fsdp, heads over tensor, where they divide.

    Returns:
        As x, the sharding of each array, or shape.
    """
    context = x.context if isinstance(x, Rows) else x
    cache = context.cache
    axes = (1, 0) if isinstance(cache, Pages) else (1, 2)  # of rows, and of heads
    num_rows = len(context.length)
    cached, num_heads = (cache.k.shape[axis] for axis in axes)
    kept = [None, None, None]
    kept[axes[0]], kept[axes[1]] = cut_axes(mesh, num_heads, num_rows, cached)
    kept = NamedSharding(mesh, PartitionSpec(*kept))
    is_cut = cut_axes(mesh, 1, num_rows)[0] is not None
    row = batch_sharding(mesh) if is_cut else replicated(mesh)
    shardings = Context(type(cache)(kept, kept), row, row)
    if isinstance(x, Rows):
        return Rows(shardings, Turn(*[row] * len(Turn._fields)))
    return shardings


def begun(turn: Turn, begins, budget) -> Turn:
    """Where a row begins, a new turn of so many tokens; of others their own."""
    blank = begins[:, None]
    return Turn(
        jnp.where(blank, 0, turn.tokens),
        jnp.where(blank, 0.0, turn.logp),
        jnp.where(begins, 0, turn.count),
        jnp.where(begins, 0, turn.state).astype(jnp.uint8),
        jnp.where(begins, budget > 0, turn.active),
    )


def some(rows: Rows, slots) -> Rows:
    """[E] of the rows, those at slots, beside the cache of all.

    A slot of B is nobody's, whose turn does not go on.
    """
    (cache, *context), turn = rows
    context, turn = jax.tree.map(lambda x: x[slots], (context, turn))
    own = turn._replace(active=turn.active & (slots < len(rows.turn.count)))
    return Rows(Context(cache, *context), own)


def returned(rows: Rows, own: Rows, slots) -> Rows:
    """All rows, with what `some` of them have come to; the cache is theirs."""

    def put(whole, part):
        return whole.at[slots].set(part, mode="drop")

    (_, *context), (cache, *own_context) = rows.context, own.context
    context = jax.tree.map(put, context, own_context)
    return Rows(Context(cache, *context), jax.tree.map(put, rows.turn, own.turn))

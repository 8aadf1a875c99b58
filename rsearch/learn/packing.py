"""Conversations end to end in one row: short ones no longer cost what the longest does.

A batch stays one conversation a row for all that compares and weighs. Only on its way
through the network it is laid out anew: the rows of a micro-batch are placed behind one
another in as few rows of the same length as they take, each with positions of its own
from 0, by which the network keeps them apart, and what comes out goes back to where it
belongs.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PIECES = 8  # that a micro-batch goes through the network in; empty ones cost nothing


class Layout(NamedTuple):
    """Where the tokens of [b, T] conversations lie in K pieces of [p, T] rows.

    Attributes:
        source: [K, p, T] int32, the place in the flat [b x T] a token comes from.
        positions: [K, p, T] int32, from 0 in every conversation; 0 where nothing lies.
        place: [K, b, T] int32, the place in the flat [p x T] that each token went to.
        is_token: [K, b, T] bool, False for what is in another piece, on padding and on
            first tokens, which nothing precedes.
    """

    source: jax.Array
    positions: jax.Array
    place: jax.Array
    is_token: jax.Array


def packed(batch, *, multiple: int = 1):
    """A host's [M, b, ...] batch with a layout, whose shape b and T alone decide.

    Args:
        batch: a Batch with `length`; its tokens are left where they are.
        multiple: p is a multiple of it: the shares that rows are cut into.

    Returns:
        The batch; without a layout where its rows cannot be cut into pieces.
    """
    m, b, t = batch.tokens.shape
    p = -(-b // PIECES)
    p += -p % multiple
    k = -(-b // p)
    if k == 1:
        return batch
    layout = Layout(
        source=np.zeros((m, k, p, t), np.int32),
        positions=np.zeros((m, k, p, t), np.int32),
        place=np.zeros((m, k, b, t), np.int32),
        is_token=np.zeros((m, k, b, t), bool),
    )
    for i, lengths in enumerate(np.asarray(batch.length)):
        for number, members in enumerate(_fill(lengths, t)):
            piece, row = divmod(number, p)
            start = 0
            for member in members:
                n = int(lengths[member])
                inside = np.arange(n)
                layout.source[i, piece, row, start : start + n] = member * t + inside
                layout.positions[i, piece, row, start : start + n] = inside
                layout.place[i, piece, member, :n] = row * t + start + inside
                layout.is_token[i, piece, member, 1:n] = True
                start += n
    return batch._replace(layout=layout)


def _fill(lengths, room: int) -> list[list[int]]:
    """Which conversations share a row: the longest first, each where it fits first."""
    rows, left = [], []
    for i in np.argsort(-lengths, kind="stable"):
        n = int(lengths[i])
        if not n:
            continue
        row = next((r for r, free in enumerate(left) if free >= n), None)
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(int(i))
        left[row] -= n
    return rows or [[]]


def piecewise(run: Callable, tokens, layout: Layout):
    """What `run` makes of [b, T] tokens, piece by piece.

    Args:
        run: ([p, T] tokens, [p, T] positions) -> a tuple of [p, T] float32 arrays.
        tokens: [b, T] int32.
        layout: of these tokens.

    Returns:
        The arrays, each brought back to [b, T]; 0 where there is no token to have one.
    """
    flat = tokens.reshape(-1)

    def go(piece):
        found = run(flat[piece.source], piece.positions)
        return tuple(
            jnp.where(piece.is_token, x.reshape(-1)[piece.place], 0.0) for x in found
        )

    shapes = jax.eval_shape(go, jax.tree.map(lambda x: x[0], layout))

    def nothing(_):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # Kept for the backward pass, what a piece leaves behind would be written for all
    # pieces, empty ones too: it is computed again, which is less than that. The branch
    # is within: what it keeps hangs on the piece, and would be, with the parameters in
    # it, written for all pieces likewise.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(piece):
        return jax.lax.cond(jnp.any(piece.is_token), go, nothing, piece)

    def add(total, piece):
        return jax.tree.map(jnp.add, total, one(piece)), None

    return jax.lax.scan(add, nothing(None), layout)[0]

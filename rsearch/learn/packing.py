"""Conversations end to end in one row: short ones no longer cost what the longest does.

A batch stays one conversation a row for all that compares and weighs. Only on its way
through the network it is laid out anew: the rows of a micro-batch are placed behind one
another in as few rows of the same length as they take, each with positions of its own
from 0, by which the network keeps them apart, and what comes out goes back to where it
belongs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SIZES = 8  # numbers of rows that a micro-batch may be laid out in: each compiles once


class Layout(NamedTuple):
    """Where the tokens of [b, T] conversations lie in [p, T] rows; leading axes [M].

    Attributes:
        source: [p, T] int32, the place in the flat [b x T] that each token comes from.
        positions: [p, T] int32, from 0 in every conversation; 0 where nothing lies.
        place: [b, T] int32, the place in the flat [p x T] that each token went to.
        is_token: [b, T] bool, False on padding and on first tokens, which nothing
            precedes.
    """

    source: jax.Array
    positions: jax.Array
    place: jax.Array
    is_token: jax.Array


def packed(batch, *, multiple: int = 1):
    """A host's [M, b, ...] batch with a layout; all its micro-batches get the same p.

    Args:
        batch: a Batch with `length`; its tokens are left where they are.
        multiple: p is a multiple of it: the shares that rows are cut into.

    Returns:
        The batch; without a layout where one would not save a row.
    """
    m, b, t = batch.tokens.shape
    rows = [_fill(lengths, t) for lengths in np.asarray(batch.length)]
    step = -(-b // SIZES)
    step += -step % multiple
    p = -(-max(map(len, rows)) // step) * step
    if p >= b:
        return batch
    shape = (m, p, t)
    layout = Layout(
        source=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        place=np.zeros((m, b, t), np.int32),
        is_token=np.zeros((m, b, t), bool),
    )
    for i, filled in enumerate(rows):
        for row, members in enumerate(filled):
            start = 0
            for member in members:
                n = int(batch.length[i, member])
                inside = np.arange(n)
                layout.source[i, row, start : start + n] = member * t + inside
                layout.positions[i, row, start : start + n] = inside
                layout.place[i, member, :n] = row * t + start + inside
                layout.is_token[i, member, 1:n] = True
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


def lay_out(tokens, layout: Layout):
    """[p, T] tokens of [b, T] tokens."""
    return tokens.reshape(-1)[layout.source]


def bring_back(values, layout: Layout):
    """[b, T] values of [p, T] values; 0 where there is no token to have one."""
    return jnp.where(layout.is_token, values.reshape(-1)[layout.place], 0.0)

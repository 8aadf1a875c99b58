"""Conversations end to end in one row: short ones no longer cost what the longest does.

A batch stays one conversation a row for all that compares and weighs. Only on its way
through the network it is laid out anew: the rows of a micro-batch are placed behind one
another in as few rows of the same length as they take, each with positions of its own
from 0, by which the network keeps them apart, and what comes out goes back to where it
belongs.
"""

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
        piece: [b] int32, the piece that a conversation lies in; -1 of one without
            tokens.
        start: [b] int32, the place of its first token in that piece's flat [p x T].
        length: [b] int32, its tokens.
    """

    source: jax.Array
    positions: jax.Array
    piece: jax.Array
    start: jax.Array
    length: jax.Array


def piece_rows(num_rows: int, multiple: int = 1) -> int:
    """p, the rows of a piece of a micro-batch; at least its own where it has one piece.

    Args:
        num_rows: of the micro-batch.
        multiple: see `packed`.
    """
    p = -(-num_rows // PIECES)
    return p + -p % multiple


def packed(batch, *, multiple: int = 1):
    """A host's [M, b, ...] batch with a layout, whose shape b and T alone decide.

    Args:
        batch: a Batch with `length`; its tokens are left where they are.
        multiple: p is a multiple of it: the shares that rows are cut into.

    Returns:
        The batch; without a layout where its rows cannot be cut into pieces.
    """
    m, b, t = batch.tokens.shape
    p = piece_rows(b, multiple)
    k = -(-b // p)
    if k == 1:
        return batch
    layout = Layout(
        source=np.zeros((m, k, p, t), np.int32),
        positions=np.zeros((m, k, p, t), np.int32),
        piece=np.full((m, b), -1, np.int32),
        start=np.zeros((m, b), np.int32),
        length=np.asarray(batch.length, np.int32),
    )
    for i, lengths in enumerate(layout.length):
        for number, members in enumerate(_fill(lengths, t)):
            piece, row = divmod(number, p)
            start = 0
            for member in members:
                n = int(lengths[member])
                inside = np.arange(n)
                layout.source[i, piece, row, start : start + n] = member * t + inside
                layout.positions[i, piece, row, start : start + n] = inside
                layout.piece[i, member] = piece
                layout.start[i, member] = row * t + start
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

    A gradient would keep of every piece, full or empty, what the way back needs:
    `summed` gives the layout of one piece at a time to what is differentiated.

    Args:
        run: ([p, T] tokens, [p, T] positions) -> a tuple of [p, T] float32 arrays.
        tokens: [b, T] int32.
        layout: of these tokens.

    Returns:
        The arrays, each brought back to [b, T]; 0 on first tokens, which nothing
        precedes, and where there is no token.
    """
    flat, columns = tokens.reshape(-1), jnp.arange(tokens.shape[1])[None]
    place = layout.start[:, None] + columns
    follows = (columns > 0) & (columns < layout.length[:, None])

    def found(one):
        is_here = follows & (one.piece == 0)[:, None]
        return tuple(
            jnp.where(is_here, x.reshape(-1).at[place].get(mode="clip"), 0.0)
            for x in run(flat[one.source[0]], one.positions[0])
        )

    if len(layout.source) == 1:
        return found(layout)
    first = layout._replace(source=layout.source[:1], positions=layout.positions[:1])
    shapes = jax.eval_shape(found, first)
    return _folded(
        lambda total, one: jax.tree.map(jnp.add, total, found(one)),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        layout,
        layout.piece >= 0,
    )


def summed(add: Callable, total, rows):
    """A total of a micro-batch, to which `add` adds a piece at a time.

    A conversation lies in one piece, so that a sum over tokens under the masks of a
    Batch is the sum of those of its pieces. Where `add` takes a gradient, that of a
    piece follows at once on its way forward: nothing of it is kept or computed again
    for what the other pieces find.

    Args:
        add: (total, Batch) -> total; the Batch has all rows, masks that hold in one
            piece alone, and a layout of this piece.
        total: to begin with; a tree of arrays.
        rows: a Batch of [b, ...] with a layout.

    Returns:
        The total; a piece in which no mask holds anywhere is passed over.
    """

    def add_piece(total, one):
        is_here = one.piece == 0
        own = rows._replace(
            from_policy=rows.from_policy & is_here[:, None],
            in_response=rows.in_response & is_here[:, None],
            layout=one,
        )
        return add(total, own)

    counts = jnp.any(rows.from_policy | rows.in_response, axis=-1)
    return _folded(add_piece, total, rows.layout, counts)


def _folded(add: Callable, total, layout: Layout, among):
    """`total` after every piece: one after another, those without rows passed over.

    Args:
        add: (total, Layout) -> total; the Layout has one piece, in which the rows of
            other pieces do not lie.
        total: to begin with; a tree of arrays.
        layout: of all pieces.
        among: [b] bool, the rows that count.
    """

    def step(total, given):
        number, source, positions = given
        is_here = layout.piece == number
        one = layout._replace(
            source=source[None],
            positions=positions[None],
            piece=jnp.where(is_here, 0, -1),
        )
        is_any = jnp.any(is_here & among)
        return jax.lax.cond(is_any, lambda: add(total, one), lambda: total), None

    pieces = jnp.arange(len(layout.source)), layout.source, layout.positions
    return jax.lax.scan(step, total, pieces)[0]

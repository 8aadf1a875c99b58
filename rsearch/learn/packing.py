"""Pack several conversations into a row, so that short ones cost less.

All code that compares or weighs rows sees a batch with one conversation per row. Only
on its way through the network does a batch have another layout: the conversations of a
micro-batch are packed into fewer rows. Positions start at 0 in each conversation, which
tells the network which tokens belong together. The results are brought back to one
conversation per row.

Dimensions: M micro-batches, b conversations in each, T tokens of the longest, K pieces
of a micro-batch, p packed rows of a piece, R tokens of each: T, or more if joined.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A micro-batch goes through the network in at least MIN_PIECES pieces, and in more if
# each still has PIECE_TOKENS tokens per shard, enough to keep a device busy. Shapes are
# those of the longest conversations; with shorter ones some pieces are empty, and cost
# nothing.
MIN_PIECES = 8
PIECE_TOKENS = 4096
# The rows of a piece are joined if they have more tokens than this: attention within a
# longer row works block by block, which short rows do not need.
SHORT_ROW = 512
# A gradient sums over all tokens of a row but the last, in tiles of a matrix unit.
TILE_TOKENS = 128


class PackedLayout(NamedTuple):
    """The places of the tokens of [b, T] conversations in K pieces of [p, R] rows.

    Attributes:
        source: [K, p, R] int32, the index in the flat [b x T] a token comes from.
        positions: [K, p, R] int32, from 0 in every conversation; 0 on padding.
        piece_index: [b] int32, the piece that contains a conversation; -1 if it has no
            tokens or does not go through the network.
        start: [b] int32, the index of its first token in that piece's flat [p x R].
        length: [b] int32, the number of its tokens there.
    """

    source: jax.Array
    positions: jax.Array
    piece_index: jax.Array
    start: jax.Array
    length: jax.Array


def piece_rows(num_rows: int, num_tokens: int, multiple: int = 1) -> int:
    """Return p, the packed rows of a piece; at least `num_rows` if there is one piece.

    Args:
        num_rows: rows of the micro-batch.
        num_tokens: T, tokens of a row.
        multiple: see `pack_micro_batches`.
    """
    busy_rows = multiple * -(-PIECE_TOKENS // num_tokens)
    p = min(-(-num_rows // MIN_PIECES), busy_rows)
    return p + -p % multiple


def pack_micro_batches(batch: Any, *, multiple: int = 1, joins_rows: bool = False):
    """Add a layout to a host's [M, b, ...] batch; its shape depends only on b and T.

    Args:
        batch: a Batch with `length`; its tokens stay where they are.
        multiple: p is a multiple of this, the number of shards that rows are split
            into.
        joins_rows: whether to join the long rows of a shard into one, in which more
            conversations fit. It costs little if attention skips the blocks of other
            texts, as it does on CPUs.

    Returns:
        The batch, without a layout if its rows cannot be split into pieces.
    """
    m, b, t = batch.tokens.shape
    p = piece_rows(b, t, multiple)
    k = -(-b // p)
    if k == 1:
        return batch
    room = t
    if joins_rows and t > SHORT_ROW and p > multiple:
        # At least p // multiple conversations fit in each, so that K pieces suffice.
        room, p = t * (p // multiple), multiple
        room += -(room - 1) % TILE_TOKENS
    layout = PackedLayout(
        source=np.zeros((m, k, p, room), np.int32),
        positions=np.zeros((m, k, p, room), np.int32),
        piece_index=np.full((m, b), -1, np.int32),
        start=np.zeros((m, b), np.int32),
        length=np.asarray(batch.length, np.int32),
    )
    if t > SHORT_ROW:
        # Rows outside the loss skip the network, except short ones, since the published
        # numbers of small models depend on the order of additions.
        in_loss = np.any(batch.from_policy | batch.in_response, axis=-1)
        layout = layout._replace(length=np.where(in_loss, layout.length, 0))
    for i, lengths in enumerate(layout.length):
        for number, members in enumerate(_fill(lengths, room)):
            number, row = divmod(number, p)
            start = 0
            for member in members:
                n = int(lengths[member])
                offsets = np.arange(n)
                columns = slice(start, start + n)
                layout.source[i, number, row, columns] = member * t + offsets
                layout.positions[i, number, row, columns] = offsets
                layout.piece_index[i, member] = number
                layout.start[i, member] = row * room + start
                start += n
    return batch._replace(layout=layout)


def _fill(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Return the conversations of each packed row, by first fit, longest first."""
    rows, free_tokens = [], []
    for i in np.argsort(-lengths, kind="stable"):
        n = int(lengths[i])
        if not n:
            continue
        row = next((r for r, free in enumerate(free_tokens) if free >= n), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free_tokens.append(room)
        rows[row].append(int(i))
        free_tokens[row] -= n
    return rows or [[]]


def piecewise(
    run: Callable,
    tokens: jax.Array,
    layout: PackedLayout,
    *,
    wanted: jax.Array | None = None,
) -> tuple:
    """Apply `run` to [b, T] tokens, piece by piece.

    A gradient through this would store the residuals of every piece, full or empty. To
    differentiate, use `only_piece` to get the layout of one piece at a time.

    Args:
        run: ([p, R] tokens, [p, R] positions, [p, R] wanted or None) -> a tuple of
            [p, R] float32 arrays.
        tokens: [b, T] int32.
        layout: layout of these tokens.
        wanted: [b, T] bool, tokens whose results are needed; None means all.

    Returns:
        The arrays, each brought back to [b, T]; 0 on first tokens, which nothing
        precedes, and where there is no token.
    """
    flat = tokens.reshape(-1)
    columns = jnp.arange(tokens.shape[1])[None]
    index = layout.start[:, None] + columns
    follows = (columns > 0) & (columns < layout.length[:, None])

    def run_piece(layout):
        in_piece = follows & (layout.piece_index == 0)[:, None]
        source, positions = layout.source[0], layout.positions[0]
        # Padding has position 0, like a first token, whose results are never needed.
        is_wanted = (
            None if wanted is None else wanted.reshape(-1)[source] & (positions > 0)
        )
        return tuple(
            jnp.where(in_piece, x.reshape(-1).at[index].get(mode="clip"), 0.0)
            for x in run(flat[source], positions, is_wanted)
        )

    if len(layout.source) == 1:
        return run_piece(layout)

    def add(total, numbered_piece):
        number, source, positions = numbered_piece
        in_piece = layout.piece_index == number
        piece_layout = layout._replace(
            source=source[None],
            positions=positions[None],
            piece_index=jnp.where(in_piece, 0, -1),
        )
        # A piece without rows costs nothing.
        total = jax.lax.cond(
            jnp.any(in_piece),
            lambda: jax.tree.map(jnp.add, total, run_piece(piece_layout)),
            lambda: total,
        )
        return total, None

    first_piece = layout._replace(
        source=layout.source[:1], positions=layout.positions[:1]
    )
    shapes = jax.eval_shape(run_piece, first_piece)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    pieces = jnp.arange(len(layout.source)), layout.source, layout.positions
    return jax.lax.scan(add, zeros, pieces)[0]


def only_piece(rows: Any, number: jax.Array):
    """Return a micro-batch narrowed to one piece, and whether that is empty.

    Args:
        rows: a Batch of [b, ...] with a layout of K pieces.
        number: [] int32, index of the piece.

    Returns:
        The Batch with all rows, with masks that are True only in this piece and the
        layout of this piece; and [] bool, True if no mask is True in the piece.
    """
    layout = rows.layout
    in_piece = layout.piece_index == number
    in_loss = jnp.any(rows.from_policy | rows.in_response, axis=-1)
    layout = layout._replace(
        source=layout.source[number][None],
        positions=layout.positions[number][None],
        piece_index=jnp.where(in_piece, 0, -1),
    )
    rows = rows._replace(
        from_policy=rows.from_policy & in_piece[:, None],
        in_response=rows.in_response & in_piece[:, None],
        layout=layout,
    )
    return rows, ~jnp.any(in_piece & in_loss)

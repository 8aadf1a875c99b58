"""Who writes in a step of decoding: all rows, or blocks of them from a queue.

A step costs an accelerator, or a CPU with a large model, the reading of all parameters,
whoever writes; a small model on a CPU costs what each row does. There a turn's tokens
cost the same however many rows write them at once, and a few rows at once end their
turns sooner: their searches run while others write. Rows that all write together would
all wait together.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.models.decoder import Decoder
from rsearch.models.sharding import platform_of
from rsearch.models.unstacked import LARGE_LAYERS

BLOCK_SIZE = 16  # rows of a small model that a CPU lets write at once
QUEUE_SHARE = 1 / 16  # of the rows: so many of them write where they stand in a queue


def block_size(model: Decoder, mesh: Mesh, num_rows: int) -> int:
    """How many of B rows write at once, in a program that has one size for all.

    So what a row writes depends on no other, to the last bit.
    """
    is_small = model.spec.num_params * jnp.dtype(model.dtype).itemsize < LARGE_LAYERS
    if platform_of(mesh) == "cpu" and mesh.size == 1 and is_small:
        return min(num_rows, BLOCK_SIZE)
    return num_rows


def queue_size(num_rows: int, block: int) -> int:
    """How many of B rows write in a step, at most, where they stand in a queue.

    Whole blocks; all rows, where these are one.

    Args:
        num_rows: B.
        block: of `block_size`.
    """
    if block == num_rows:
        return num_rows
    return max(1, int(num_rows * QUEUE_SHARE) // block) * block


def in_blocks(active, queue, block: int) -> jax.Array:
    """[n x block] int32 rows: those that write first, as they stand in the queue.

    Args:
        active: [B] bool, the rows that write.
        queue: [B] int32 all rows; None is the order of their slots.
        block: rows of each; B is nobody, where the last block is not full.
    """
    if queue is None:
        queue = jnp.arange(len(active), dtype=jnp.int32)
    order = queue[jnp.argsort(~active[queue])]
    return jnp.pad(order, (0, -len(order) % block), constant_values=len(order))

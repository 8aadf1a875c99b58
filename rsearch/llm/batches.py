"""Choose batches of sequences whose sizes are compiled, with little padding."""

from collections.abc import Mapping, Sequence

SHRINK = 4  # each batch size is a quarter of the next larger one
# What a call costs for each chunk beside its rows, in rows: it reads the parameters.
CALL_ROWS = 1.4


def batch_sizes(num_rows: int, num_shards: int = 1) -> list[int]:
    """Return the batch sizes that are compiled, ascending: `num_rows`, a quarter, ...

    There are few sizes, so that little is compiled, but also small ones, so that a few
    chats do not cost as much as a full batch.

    Args:
        num_rows: the largest size.
        num_shards: number of shards of rows, each on its own devices; all sizes but the
            largest are multiples of it.
    """
    sizes = [num_rows]
    while sizes[0] > num_shards:
        sizes.insert(0, num_shards * -(-sizes[0] // (SHRINK * num_shards)))
    return sizes


def batches_by_length(
    lengths: Sequence[int], device_rows: Mapping[int, int], chunk: int
) -> list[list[int]]:
    """Divide sequences into the batches that cost least to read.

    All rows of a batch cost as much as its longest sequence, and rows that pad a batch
    to its compiled size cost as much as the others. Sequences of similar length
    are therefore read together.

    Args:
        lengths: number of tokens of each sequence, 1 or more.
        device_rows: {compiled batch size: rows of it that each device reads}.
        chunk: number of tokens that are read at a time.

    Returns:
        The indices of the sequences in each batch, the longest sequence first.
    """
    num = len(lengths)
    order = sorted(range(num), key=lambda i: -lengths[i])
    # For sequences order[start:]: their least cost, and the size of their first batch.
    best: list[tuple[float, int]] = [(0.0, 0)] * (num + 1)
    for start in reversed(range(num)):
        num_chunks = -(-lengths[order[start]] // chunk)
        best[start] = min(
            (num_chunks * (rows + CALL_ROWS) + best[min(start + size, num)][0], size)
            for size, rows in device_rows.items()
        )
    batches, start = [], 0
    while start < num:
        end = start + best[start][1]
        batches.append(order[start:end])
        start = end
    return batches

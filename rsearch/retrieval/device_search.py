"""Compare queries with all passages on this host's accelerators.

The vectors are rounded to bfloat16 and sharded over the devices: 21 million vectors of
768 dimensions take 32 GB, or 8 GB on each of four devices. Products of rounded vectors
only propose candidates, as ScaNN's do. `Nearest` computes the final scores from the
original vectors, and compares all of them where rounding might have hidden one of the
best. The results therefore equal those of ScaNN's brute force, to the last bit.

Every host holds all vectors and searches by itself, so rollouts on different hosts
never wait for each other.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.retrieval.nearest import Nearest
from rsearch.retrieval.vectors import Vectors
from rsearch.runtime.console import progress

CHUNK = 65_536  # vectors copied to a device, or compared there, in one step
GROUP = 64  # adjacent vectors whose largest product is found first
QUERIES = 64  # served by one pass over all vectors
MARGIN = 125  # extra candidates: rounded products lie close together


class DeviceSearcher:
    """Proposes the nearest of [N, D] vectors by their bfloat16 products.

    Args:
        devices: devices that hold them, each a shard of consecutive vectors.

    Attributes:
        rounding: bound on the error in the difference between two rounded products, for
            a query of length 1.
    """

    def __init__(self, vectors: Vectors, devices: Sequence[jax.Device]):
        self._num = len(vectors)
        share = -(-self._num // len(devices))
        # Use whole chunks; for a small corpus, one chunk no larger than its shard.
        self._chunk = min(CHUNK, _round_up(share, GROUP))
        rows = _round_up(share, self._chunk)
        shape = rows, vectors.dim
        self._firsts = range(0, self._num, rows)
        self._shards, errors, lengths = [], [], []
        for first, device in zip(self._firsts, devices, strict=False):
            with jax.default_device(device):
                shard = jnp.zeros(shape, jnp.bfloat16)
            stop = min(first + rows, self._num)
            starts = range(first, stop, self._chunk)
            for start in progress(starts, f"copying vectors to {device}"):
                chunk = vectors.span(start, min(start + self._chunk, stop))
                padding = np.zeros((self._chunk - len(chunk), vectors.dim), np.float32)
                chunk = jax.device_put(np.concatenate([chunk, padding]), device)
                shard, error, length = _store(shard, chunk, start - first)
                errors.append(error)
                lengths.append(length)
            self._shards.append(shard)
        error, length = (max(map(float, values)) for values in (errors, lengths))
        # Cauchy-Schwarz bound for a query of length 1. It adds the rounding of the
        # query (sent as a sum of two 8-bit numbers), the vectors, and the sums.
        error += length * (2.0**-16 + vectors.dim * 2.0**-22)
        self.rounding = 2 * error

    def search_batched(
        self, queries: np.ndarray, final_num_neighbors: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ([n, k] positions, [n, k] float32 rounded products), unordered.

        Args:
            queries: [n, D] float32.
            final_num_neighbors: k, at most N.
        """
        candidates = []
        for start in range(0, len(queries), QUERIES):
            batch = queries[start : start + QUERIES]
            # Round the batch up to a power of two, so that few sizes are compiled.
            num = min(QUERIES, 1 << (len(batch) - 1).bit_length())
            padded = np.zeros((num, queries.shape[1]), np.float32)
            padded[: len(batch)] = batch
            # All devices compute at once; the host waits only for their results.
            results = [
                _search(
                    shard,
                    jax.device_put(padded, shard.device),
                    min(len(shard), self._num - first),
                    k=final_num_neighbors,
                    chunk=self._chunk,
                )
                for first, shard in zip(self._firsts, self._shards, strict=True)
            ]
            products = [np.asarray(result[0]) for result in results]
            positions = [
                np.asarray(result[1], np.int64) + first
                for first, result in zip(self._firsts, results, strict=True)
            ]
            products = np.hstack(products)[: len(batch)]
            positions = np.hstack(positions)[: len(batch)]
            best = np.argpartition(products, -final_num_neighbors, axis=1)
            best = best[:, -final_num_neighbors:]
            candidates.append(
                [np.take_along_axis(x, best, 1) for x in (positions, products)]
            )
        positions, products = map(np.concatenate, zip(*candidates, strict=True))
        return positions, products


def nearest_on_devices(vectors: Vectors, devices: Sequence[jax.Device]) -> Nearest:
    """Return an exact search of the vectors that uses these devices for candidates.

    Args:
        vectors: at least one vector.
    """
    searcher = DeviceSearcher(vectors, devices)
    return Nearest(vectors, searcher, None, margin=MARGIN, rounding=searcher.rounding)


@functools.partial(jax.jit, donate_argnums=0)
def _store(
    shard: jax.Array, chunk: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Round a chunk and store it at row `start`.

    Returns:
        (the [R, D] bfloat16 vectors, the largest norm of a rounding error, the largest
        norm of a vector).
    """
    rounded = chunk.astype(jnp.bfloat16)
    error = jnp.linalg.norm(chunk - rounded.astype(jnp.float32), axis=1).max()
    shard = jax.lax.dynamic_update_slice(shard, rounded, (start, 0))
    return shard, error, jnp.linalg.norm(chunk, axis=1).max()


@functools.partial(jax.jit, static_argnames=("k", "chunk"))
def _search(
    shard: jax.Array, queries: jax.Array, num: jax.Array, *, k: int, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Find the vectors with the largest products.

    Sorting all products would take longer than computing them. The k largest are in the
    k groups with the largest maxima, so those groups are found first and their products
    are computed again.

    Args:
        shard: [R, D] bfloat16, the vectors on a device; R is a multiple of `chunk`.
        queries: [n, D] float32.
        num: number of vectors that are not padding.
        chunk: number of vectors compared in one step, a multiple of `GROUP`.

    Returns:
        ([n, m] float32 products, [n, m] int32 positions), m = min(k, R); products of
        padding are -inf.
    """
    n, dim = queries.shape
    high = queries.astype(jnp.bfloat16)
    low = (queries - high.astype(jnp.float32)).astype(jnp.bfloat16)
    parts = jnp.stack([high, low])

    def largest_of_groups(_, start):
        rows = jax.lax.dynamic_slice(shard, (start, 0), (chunk, dim))
        products = jnp.einsum(
            "snd,cd->snc", parts, rows, preferred_element_type=jnp.float32
        ).sum(0)
        is_vector = start + jnp.arange(chunk) < num
        products = jnp.where(is_vector, products, -jnp.inf)
        return None, products.reshape(n, -1, GROUP).max(-1)

    _, maxima = jax.lax.scan(largest_of_groups, None, jnp.arange(0, len(shard), chunk))
    maxima = jnp.moveaxis(maxima, 0, 1).reshape(n, -1)
    _, groups = jax.lax.top_k(maxima, min(k, maxima.shape[1]))
    members = jnp.arange(GROUP)[None, None]
    positions = (groups[..., None] * GROUP + members).reshape(n, -1)

    def products_of(_, query):
        pair, candidates = query
        products = jnp.einsum(
            "sd,cd->sc", pair, shard[candidates], preferred_element_type=jnp.float32
        ).sum(0)
        return None, jnp.where(candidates < num, products, -jnp.inf)

    _, products = jax.lax.scan(
        products_of, None, (jnp.moveaxis(parts, 1, 0), positions)
    )
    products, best = jax.lax.top_k(products, min(k, products.shape[1]))
    return products, jnp.take_along_axis(positions, best, axis=1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

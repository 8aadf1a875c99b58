"""Candidates of few vectors by NumPy, on machines without ScaNN."""

import numpy as np

QUERIES_AT_ONCE = 16  # whose products with all vectors are held


class ExactSearcher:
    """Stands in for ScaNN's brute force: what it proposes, in any order.

    Args:
        vectors: [N, D] float32.
    """

    def __init__(self, vectors):
        self._vectors = np.asarray(vectors, np.float32)

    def search_batched(self, queries, final_num_neighbors):
        """([n, k] positions, [n, k] float32 dot products) of the k nearest.

        Args:
            queries: [n, D] float32.
            final_num_neighbors: k, at most N.
        """
        shape = len(queries), final_num_neighbors
        positions, products = np.empty(shape, np.int64), np.empty(shape, np.float32)
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            found = queries[part] @ self._vectors.T
            best = np.argpartition(found, -shape[1], axis=1)[:, -shape[1] :]
            positions[part] = best
            products[part] = np.take_along_axis(found, best, axis=1)
        return positions, products

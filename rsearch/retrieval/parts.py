"""An index in parts: consecutive pieces of the vectors, each searched on its own.

What they find is merged by score, and where scores are equal by position, so that exact
parts find together what an exact search of the whole finds, to the last bit (of hosts
whose processors are alike: others round a score otherwise).
"""

import itertools

import numpy as np


class PartsError(RuntimeError):
    """Parts of an index cannot be searched now; says which and why."""


def part_blocks(items, num_parts):
    """[num_parts] consecutive slices of a sequence, whose lengths differ by one."""
    cuts = [len(items) * i // num_parts for i in range(num_parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


class Parts:
    """Several parts as one; has len and `search` as Nearest has.

    Args:
        firsts: [parts] positions of their first vectors.
        parts: [parts] each with dim, len and search(queries, top_k).

    Attributes:
        dim: D, width of the vectors.
    """

    def __init__(self, firsts, parts):
        self._firsts, self._parts = list(firsts), list(parts)
        self.dim = self._parts[0].dim

    def __len__(self):
        return sum(map(len, self._parts))

    def search(self, queries, top_k):
        """The nearest vectors of all parts: (positions, scores), [n, k] each.

        Args:
            queries: [n, D] float32, finite.
            top_k: how many; k = min(top_k, number of vectors) are found.
        """
        found = []
        for first, part in zip(self._firsts, self._parts, strict=True):
            positions, scores = part.search(queries, top_k)
            found.append((first + positions, scores))
        return best_of(found, top_k)


def best_of(found, top_k):
    """The best of what several parts have found.

    Args:
        found: [parts] of (positions, scores), [n, k of that part] each.
        top_k: how many to keep of each query's; all where there are fewer.

    Returns:
        [n, k] positions and scores, the largest score first, equal ones by position.
    """
    positions, scores = (np.concatenate(both, axis=1) for both in zip(*found))
    order = np.lexsort((positions, -scores), axis=-1)[:, :top_k]
    return tuple(np.take_along_axis(a, order, axis=1) for a in (positions, scores))

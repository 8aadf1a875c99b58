"""Merge vector and word search by reciprocal rank (Cormack et al., SIGIR 2009)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rsearch.retrieval.engine import WordsFn, encode_queries
from rsearch.retrieval.nearest import NearestFn

RANK_OFFSET = 60  # k in the paper: the larger, the less the first ranks differ
DEPTH = 100  # passages merged from each ranking
# Engines that merge equal indexes differently must not share a fingerprint.
FINGERPRINT = f"reciprocal ranks {RANK_OFFSET} {DEPTH}"


class FusedIndex:
    """A WordsFn: a passage's score is the sum of 1 / (60 + its rank) in both rankings.

    Ranks count from 1; a ranking without the passage adds nothing. Passages with equal
    scores keep the order of the corpus.

    Args:
        nearest: search over one vector per passage.
        encoder: has `encode_queries`.
        words: search over the same passages by their words.
    """

    def __init__(self, nearest: NearestFn, encoder: Any, words: WordsFn):
        assert len(nearest) == len(words), (len(nearest), len(words))
        self._nearest, self._encoder, self._words = nearest, encoder, words

    def __len__(self) -> int:
        return len(self._words)

    def search(
        self, queries: Sequence[str], top_k: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the positions and scores of the best passages of each query."""
        depth = max(DEPTH, top_k)
        vectors = encode_queries(self._encoder, queries)
        by_vectors, _ = self._nearest.search(vectors, depth)
        by_words, _ = self._words.search(queries, depth)
        results = [_fuse(pair, top_k) for pair in zip(by_vectors, by_words)]
        return [row for row, _ in results], [scores for _, scores in results]


def _fuse(rankings, top_k):
    positions, rows = np.unique(np.concatenate(rankings), return_inverse=True)
    shares = [1 / (RANK_OFFSET + 1 + np.arange(len(ranking))) for ranking in rankings]
    scores = np.bincount(rows, weights=np.concatenate(shares))
    order = np.argsort(-scores, kind="stable")[:top_k]
    return positions[order], scores[order]

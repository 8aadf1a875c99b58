"""Small corpora and an encoder with known vectors, for the retrieval tests."""

import hashlib
import pathlib

import numpy as np

from rsearch.retrieval.engine import PassageList
from rsearch.retrieval.nearest import exact_scores, recall_of
from rsearch.types import Passage


class FileCorpus(PassageList):
    """Passages in memory that claim to be a file."""

    def __init__(self, passages, path):
        super().__init__(passages)
        self.path = pathlib.Path(path)


class TableEncoder:
    """Random unit vectors that depend only on the text; records what it encodes."""

    def __init__(self, dim=16, name="table"):
        self.dim, self.fingerprint = dim, f"{name}:{dim}"
        self.encoded, self.batches = [], []

    def encode_queries(self, texts):
        self.batches.append(list(texts))
        return self._encode(texts)

    def encode_passages(self, texts):
        self.encoded += texts
        return self._encode([text.partition("\n")[0] for text in texts])

    def _encode(self, texts):
        rows = np.empty((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts):
            digest = hashlib.sha256(text.encode()).digest()
            values = np.random.default_rng(list(digest)).normal(size=self.dim)
            row[:] = values / np.linalg.norm(values)
        return rows


def numbered(num):
    """Passages p0, p1, ... with titles t0, t1, ..."""
    return [Passage(f"p{i}", f"t{i}\ntext {i}") for i in range(num)]


def unit_rows(rng, num, dim):
    """[num, dim] float32 random directions."""
    rows = rng.normal(size=(num, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def measure_recall(nearest, queries, *, top_k=10):
    """Share of the truly nearest vectors that are found, over all queries."""
    _, scores = nearest.search(queries, top_k)
    return recall_of(scores, exact_scores(nearest.vectors, queries, top_k))

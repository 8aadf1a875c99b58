"""Search a corpus for the rollouts: batched, cached and reproducible."""

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rsearch.retrieval.nearest import (
    ExactSearcher,
    IndexPartError,
    Nearest,
    NearestFn,
    build_searcher,
)
from rsearch.retrieval.vectors import Vectors
from rsearch.runtime.boundary import boundary
from rsearch.runtime.console import note
from rsearch.types import Passage


class WordsFn(Protocol):
    """The interface of text searchers such as `rsearch.retrieval.bm25.WordIndex`."""

    def __len__(self) -> int:
        """Return the number of passages."""

    def search(
        self, queries: Sequence[str], top_k: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the positions and scores of the best passages of each query."""


IndexFn = NearestFn | WordsFn
"""A search for positions of passages, by vectors or by texts."""


class SearchEngine:
    """A SearchFn over one corpus; safe to call from several threads.

    What a query finds depends on the query alone, not on the batch it is in.

    Args:
        nearest: a Nearest, or several merged, over one vector per passage; or a
            WordsFn.
        encoder: has `encode_queries`; None for a WordsFn.
        corpus: has `len` and `passages(indices)`; `read` also needs `passage(index)`
            and iteration.
        top_k: passages per query; fewer only if the corpus has fewer.
        cache_size: number of recently used queries whose passages are cached; 0
            disables the cache.
        fingerprint: fingerprint of a saved index; by default made from those of corpus
            and encoder.

    Attributes:
        fingerprint: engines with equal fingerprints rank passages alike.
    """

    def __init__(
        self,
        nearest: IndexFn,
        encoder: Any,
        corpus: Any,
        *,
        top_k: int,
        cache_size: int = 10_000,
        fingerprint: str | None = None,
    ):
        if top_k < 1:
            raise ValueError(f"{top_k=}, expected at least 1")
        if cache_size < 0:
            raise ValueError(f"{cache_size=}, expected 0 or more")
        assert len(nearest) == len(corpus), (len(nearest), len(corpus))
        self._nearest = nearest
        self._encoder = encoder
        self._corpus = corpus
        self._top_k = top_k
        self._cache_size = cache_size
        self._cache = collections.OrderedDict()  # query -> its passages
        if fingerprint is None:
            assert encoder is not None, "an index of words has a digest"
            fingerprint = f"{corpus.fingerprint} {encoder.fingerprint}"
        self.fingerprint = fingerprint
        self._positions: dict[str, int] | None = None
        # Held for the whole call, or two threads would encode the same queries twice.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._corpus)

    def __str__(self) -> str:
        return f"{len(self):,} passages"

    def with_top_k(self, top_k: int) -> "SearchEngine":
        """Return an engine over the same passages with another top_k."""
        return SearchEngine(
            self._nearest,
            self._encoder,
            self._corpus,
            top_k=top_k,
            cache_size=self._cache_size,
            fingerprint=self.fingerprint,
        )

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """Return the passages of each query, best first, with their scores.

        Passages with equal scores keep the order of the corpus. A blank query finds
        nothing.

        Args:
            queries: texts; a repeated query is searched once.

        Returns:
            [queries] tuples of min(top_k, corpus) Passages. A BM25 index returns fewer
            if fewer passages share a word with the query. None if not all hosts that
            share the index answered.

        Raises:
            ValueError: a query is not text.
        """
        check_queries(queries)
        results = {}
        with self._lock:
            for query in dict.fromkeys(queries):
                if not query.strip():
                    results[query] = ()
                elif query in self._cache:
                    self._cache.move_to_end(query)
                    results[query] = self._cache[query]
            misses = [query for query in dict.fromkeys(queries) if query not in results]
            if misses:
                try:
                    results.update(zip(misses, self._search(misses)))
                except IndexPartError as error:
                    note(f"{len(misses)} queries failed: {error}")
                    results.update(dict.fromkeys(misses))
                    misses = []
            self._cache |= {query: results[query] for query in misses}
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return [results[query] for query in queries]

    def read(self, ids: Sequence[str]) -> list[Passage | None]:
        """Return the passage with each id; None for an id the corpus does not have.

        Args:
            ids: texts of any origin.
        """
        return [self._passage(id) for id in ids]

    def _passage(self, id):
        # In most corpora, a passage's id is the position of its line.
        if id.isdecimal() and len(id) < 16 and int(id) < len(self._corpus):
            passage = self._corpus.passage(int(id))
            if passage.id == id:
                return passage
        with self._lock:
            if self._positions is None:
                self._positions = {p.id: i for i, p in enumerate(self._corpus)}
        position = self._positions.get(id)
        return None if position is None else self._corpus.passage(position)

    def _search(self, queries):
        inputs = queries
        if self._encoder is not None:
            inputs = encode_queries(self._encoder, queries)
        with boundary("the index"):
            positions, scores = self._nearest.search(inputs, self._top_k)
        return [
            scored_passages(self._corpus, row.tolist(), row_scores)
            for row, row_scores in zip(positions, scores)
        ]


def scored_passages(
    corpus: Any, positions: Iterable[int], scores: np.ndarray
) -> tuple[Passage, ...]:
    """Return the passages at [n] positions of a corpus, with their [n] scores."""
    pairs = zip(corpus.passages(positions), scores.tolist(), strict=True)
    return tuple(dataclasses.replace(p, score=score) for p, score in pairs)


def check_queries(queries: Sequence[str]) -> None:
    """Refuse a query that is not text.

    Raises:
        ValueError: names the query.
    """
    for query in queries:
        if not isinstance(query, str):
            kind = type(query).__name__
            raise ValueError(f"a query is {query!r}, a {kind}: expected text")


def encode_queries(encoder: Any, queries: Sequence[str]) -> np.ndarray:
    """Return [n, D] vectors of texts.

    Raises:
        ValueError: the encoder failed, or returned a vector that is not finite.
    """
    with boundary("the encoder of queries"):
        vectors = encoder.encode_queries(queries)
    bad_rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad_rows):
        raise ValueError(
            f"the encoder gave query {queries[bad_rows[0]]!r} a vector that is not "
            "finite: its weights are damaged"
        )
    return vectors


def encode_passages(encoder: Any, texts: Sequence[str]) -> np.ndarray:
    """Return the [n, D] vectors of passages' contents.

    Raises:
        ValueError: the encoder returned a vector that is not finite.
    """
    vectors = encoder.encode_passages(texts)
    if not np.isfinite(vectors).all():
        raise ValueError("the encoder gave a vector that is not finite")
    return vectors


def exact_index(vectors: np.ndarray) -> Nearest:
    """Return an exact search of [N, D] vectors without ScaNN, which is quick to build.

    It finds what ScaNN's brute force finds, but a search takes longer.
    """
    return Nearest(Vectors([vectors]), ExactSearcher(vectors), None)


class PassageList:
    """A corpus of passages held in memory.

    Args:
        passages: Passages in the order of their positions.
    """

    path = "passages in memory"

    def __init__(self, passages: Iterable[Passage]):
        self._passages = tuple(passages)
        digest = hashlib.sha256()
        for passage in self._passages:
            for text in (passage.id, passage.contents):
                data = text.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little") + data)
        self.fingerprint = f"memory:{digest.hexdigest()[:32]}"

    def __len__(self) -> int:
        return len(self._passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self._passages)

    def passage(self, index: int) -> Passage:
        """Return the passage at a position."""
        return self._passages[index]

    def passages(self, indices: Iterable[int]) -> list[Passage]:
        """Return the [n] passages at these positions."""
        return [self._passages[index] for index in indices]


def engine_in_memory(
    passages: Iterable[Passage],
    encoder: Any,
    *,
    top_k: int,
    cache_size: int = 10_000,
) -> SearchEngine:
    """Encode passages now and return an exact-search SearchEngine over them.

    Args:
        passages: at least one Passage.
        encoder: has `encode_passages` and `encode_queries`.
        top_k, cache_size: see SearchEngine.

    Raises:
        ValueError: there are no passages.
    """
    corpus = PassageList(passages)
    if not len(corpus):
        raise ValueError("there are no passages to search")
    vectors = encode_passages(encoder, [passage.contents for passage in corpus])
    nearest = Nearest(Vectors([vectors]), build_searcher(vectors, None), None)
    return SearchEngine(nearest, encoder, corpus, top_k=top_k, cache_size=cache_size)

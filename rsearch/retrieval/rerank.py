"""Rerank passages with a model that reads question and passage together.

A cross-encoder that reads both together is slower and better than comparing their
vectors (arXiv 1901.04085). It therefore scores only the first few passages of a search,
and each passage only with the question that found it.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rsearch.models import bert
from rsearch.models.hf.directory import find_model
from rsearch.models.wordpiece import WordPiece
from rsearch.retrieval.encoder import fingerprint_of, fixed_batches
from rsearch.types import Passage, SearchFn, copy_search_attributes

PAIR_ROWS = 4  # every batch of pairs has exactly this many rows


class CrossEncoderScores:
    """A cross-encoder with its tokenizer, compiled for a few fixed shapes.

    Args:
        source: directory or hub id of a BertForSequenceClassification with one label,
            such as cross-encoder/ms-marco-MiniLM-L12-v2.
        max_tokens: length at which question and passage together are truncated; 0 uses
            the model's number of positions.

    Attributes:
        fingerprint: digest of weights, vocabulary and settings; cross-encoders with
            equal fingerprints score alike.

    Raises:
        ValueError: the files do not make a cross-encoder.
    """

    def __init__(self, source: str | os.PathLike, *, max_tokens: int = 0):
        directory = find_model(source)
        spec, params = bert.load_cross_encoder(directory)
        self.max_tokens = max_tokens or spec.max_positions
        if not 5 <= self.max_tokens <= spec.max_positions:
            raise ValueError(
                f"{directory}: max_tokens={self.max_tokens}, expected 5 to "
                f"{spec.max_positions}, the positions of the model"
            )
        self._tokenizer = WordPiece(directory)
        if len(self._tokenizer.vocab) > spec.vocab_size:
            raise ValueError(
                f"{directory}: the vocabulary has {len(self._tokenizer.vocab)} pieces, "
                f"the model embeds {spec.vocab_size}"
            )
        self._model = bert.CrossEncoder(spec)
        self._params = jax.device_put(params)
        # "float32" is the computation's dtype; without it fingerprints would change.
        settings = ["cross-encoder", self.max_tokens, "float32"]
        self.fingerprint = fingerprint_of(directory, settings)

    def __call__(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Return [n] float32 scores in logits; no passage affects another's score.

        Args:
            passages: [n] texts, each a title, a line feed and a text.
        """
        ids, firsts = self._tokenizer.pairs(
            [query] * len(passages), list(passages), max_tokens=self.max_tokens
        )
        scores = np.empty(len(passages), np.float32)
        batches = fixed_batches(
            ids,
            lambda _: PAIR_ROWS,
            max_tokens=self.max_tokens,
            pad_id=self._tokenizer.pad_id,
        )
        for rows, tokens, counts in batches:
            num_first = np.zeros(PAIR_ROWS, np.int32)
            num_first[: len(rows)] = [firsts[row] for row in rows]
            logits = bert.score(self._model, self._params, tokens, counts, num_first)
            scores[rows] = jax.device_get(logits)[: len(rows)]
        return scores


class RerankedSearch:
    """A SearchFn that retrieves with `search` and orders the results with `rerank`.

    It is as thread-safe as `search`.

    Args:
        search: a SearchFn with a `fingerprint` that returns at least top_k_retrieval
            passages.
        rerank: (query, [n] contents of passages) -> [n] scores, with a `fingerprint`;
            see CrossEncoderScores.
        top_k_retrieval: number of passages scored per query.
        top_k: number of passages returned per query, best first.
        cache_size: number of recently used queries whose order is cached; 0 disables
            the cache.

    Attributes:
        fingerprint: searches with equal fingerprints rank passages alike.
        searches_at_once, wants_question_ids, read: those of `search`; see `SearchFn`.

    Raises:
        ValueError: top_k is larger than top_k_retrieval.
    """

    def __init__(
        self,
        search: SearchFn,
        rerank: Callable[[str, Sequence[str]], np.ndarray],
        *,
        top_k_retrieval: int,
        top_k: int,
        cache_size: int = 10_000,
    ):
        if not 1 <= top_k <= top_k_retrieval:
            raise ValueError(f"{top_k=}, expected 1 to {top_k_retrieval=}")
        self._search = search
        self._rerank = rerank
        copy_search_attributes(search, self)
        self._top_k_retrieval = top_k_retrieval
        self._top_k = top_k
        self._order = functools.lru_cache(maxsize=cache_size)(self._ordered)
        self.fingerprint = (
            f"{search.fingerprint} {rerank.fingerprint} {top_k_retrieval}"
        )

    def __str__(self) -> str:
        return f"{self._search}, reranked"

    def __call__(
        self, queries: Sequence[str], *question_ids: Sequence[str]
    ) -> list[tuple[Passage, ...] | None]:
        """Return the passages of each query, the highest score first.

        Passages with equal scores keep the order of the search. A returned passage's
        score is the reranker's. The result is None where the search failed.

        Args:
            queries: texts.
            question_ids: a list of ids, if the search wants them; see `SearchFn`.

        Raises:
            ValueError: a query is not text, or a score is not finite.
        """
        results = self._search(queries, *question_ids)
        return [
            None if hits is None else self._order(query, tuple(hits))
            for query, hits in zip(queries, results, strict=True)
        ]

    def _ordered(self, query, hits):
        hits = hits[: self._top_k_retrieval]
        if not hits:
            return ()
        scores = np.asarray(self._rerank(query, [hit.contents for hit in hits]))
        assert scores.shape == (len(hits),), (scores.shape, len(hits))
        if not np.isfinite(scores).all():
            raise ValueError(
                f"the reranker gave a passage of query {query!r} a score that is not "
                "finite: its weights are damaged"
            )
        order = np.argsort(-scores, kind="stable")[: self._top_k]
        return tuple(
            dataclasses.replace(hits[i], score=float(scores[i])) for i in order
        )

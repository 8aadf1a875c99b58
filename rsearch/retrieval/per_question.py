"""Search a separate corpus for each question, with indexes held in memory."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rsearch.retrieval.engine import (
    IndexFn,
    PassageList,
    check_queries,
    encode_passages,
    encode_queries,
    exact_index,
    scored_passages,
)
from rsearch.retrieval.vectors import note_cut_passages
from rsearch.runtime.console import progress
from rsearch.types import Passage

BATCH = 1024  # paragraphs encoded between two progress updates
INDEXES = 256  # questions' indexes kept in memory; others are rebuilt when needed


class QuestionCorpora:
    """A SearchFn in which each query searches its own question's corpus.

    What a query finds depends only on the query and its question.

    Args:
        make_index: ([n] positions of passages) -> a search over these passages.
        encoder: has `encode_queries`; None if the indexes search texts.
        passages: the passages of all corpora, at least one.
        corpora: {question id: positions of its passages, ascending}.
        top_k: passages per query; fewer only if the corpus has fewer.
        made_by: fingerprint of the encoder or index that compares queries with
            passages.

    Attributes:
        fingerprint: searches with equal fingerprints rank passages alike.
        wants_question_ids: see `rsearch.types.SearchFn`.
    """

    wants_question_ids = True

    def __init__(
        self,
        make_index: Callable[[np.ndarray], IndexFn],
        encoder: Any,
        passages: Sequence[Passage],
        corpora: Mapping[str, Sequence[int]],
        *,
        top_k: int,
        made_by: str,
    ):
        self._passages = PassageList(passages)
        self._corpora = {name: np.array(rows) for name, rows in corpora.items()}
        self._encoder, self._top_k = encoder, top_k
        self._index = functools.lru_cache(maxsize=INDEXES)(
            lambda name: make_index(self._corpora[name])
        )
        digest = hashlib.sha256(self._passages.fingerprint.encode())
        digest.update(json.dumps([*map(list, corpora.items())]).encode())
        self.fingerprint = f"paragraphs:{digest.hexdigest()[:32]} {made_by}"

    def __str__(self) -> str:
        sizes = [len(rows) for rows in self._corpora.values()]
        return (
            f"{len(sizes):,} questions' corpora of {min(sizes):,} to {max(sizes):,} "
            f"passages, {len(self._passages):,} in all"
        )

    def __call__(
        self, queries: Sequence[str], question_ids: Sequence[str]
    ) -> list[tuple[Passage, ...]]:
        """Return the passages of each query, best first, with their scores.

        Passages with equal scores keep their order in the corpus. A blank query finds
        nothing.

        Args:
            queries: texts; all are encoded in one call.
            question_ids: id of the question that each query belongs to.

        Raises:
            ValueError: a query is not text.
        """
        check_queries(queries)
        inputs = dict.fromkeys(query for query in queries if query.strip())
        if self._encoder is None:
            inputs = {query: query for query in inputs}
        elif inputs:
            inputs = dict(zip(inputs, encode_queries(self._encoder, [*inputs])))
        pairs = zip(queries, question_ids, strict=True)
        return [
            self._search(inputs[query], name) if query.strip() else ()
            for query, name in pairs
        ]

    def _search(self, query, question_id) -> tuple[Passage, ...]:
        """Return what a query, as a vector or a text, finds in a question's corpus."""
        ((positions,), (scores,)) = self._index(question_id).search(
            [query] if self._encoder is None else query[None], self._top_k
        )
        return scored_passages(
            self._passages, self._corpora[question_id][positions], scores
        )


def encode_corpora(
    encoder: Any,
    passages: Sequence[Passage],
    corpora: Mapping[str, Sequence[int]],
    *,
    top_k: int,
) -> QuestionCorpora:
    """Encode passages now and return QuestionCorpora that compare vectors exactly.

    Args:
        encoder: has `fingerprint`, `encode_passages` and `encode_queries`.
        passages, corpora, top_k: see QuestionCorpora. A passage that is in several
            corpora is encoded once.
    """
    texts = [passage.contents for passage in passages]
    starts = progress(range(0, len(texts), BATCH), "encoding paragraphs, batches")
    blocks = [encode_passages(encoder, texts[i : i + BATCH]) for i in starts]
    note_cut_passages(encoder)
    vectors = np.concatenate(blocks)
    return QuestionCorpora(
        lambda rows: exact_index(vectors[rows]),
        encoder,
        passages,
        corpora,
        top_k=top_k,
        made_by=encoder.fingerprint,
    )

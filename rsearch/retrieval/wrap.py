"""Wrap a search in layers, in the order in which its results pass through them.

Each layer is a SearchFn that calls the one inside it, so any layer can be left out.
"""

from collections.abc import Callable

from rsearch.protocols.writing import with_written_observations
from rsearch.retrieval.rerank import RerankedSearch
from rsearch.retrieval.web import PagedSearch
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_search
from rsearch.types import GenerateFn, SearchFn, copy_search_attributes

MAX_ATTEMPTS = 3  # attempts for a query, if the caller needs its passages


def wrap_search(
    search: SearchFn,
    *,
    page_chars: int = 0,
    page_seconds: float = 0.0,
    rerank: Callable | None = None,
    rerank_from: int = 0,
    top_k: int = 0,
    cache_size: int = 0,
    retry: bool = False,
    journal: AppendLog | None = None,
    writer: GenerateFn | None = None,
    writer_prompt: str = "context_only",
) -> SearchFn:
    """Return the search with these layers around it, listed from the innermost.

    A run calls this several times, each time with later layers: when the engine is
    opened (pages, reranker), when a stage begins (journal or retries) and when a
    protocol's conversations are opened (writer). The order is the same as that of one
    call with all of them.

    Args:
        search: an engine or a service, with a cache of its own (a user's function may
            have none), so that equal queries of all rollouts are searched once.
        page_chars: how many characters to add to each hit from the web page that its id
            names; 0 leaves hits unchanged.
        page_seconds: time limit per page.
        rerank: (query, contents of passages) -> scores; None keeps the search's order.
        rerank_from: number of passages scored per query.
        top_k: number of passages kept after reranking, best first.
        cache_size: number of queries whose reranked order is cached.
        retry: whether to search again if a search fails.
        journal: journal of the stage's searches; without one, each start asks the
            service again.
        writer: model that writes one passage from those of each query; None keeps the
            passages themselves.
        writer_prompt: prompt for the writer, a key of `protocols.writing.PROMPTS`.
    """
    # Pages come first: a hit's snippet is too short for reranking or writing.
    if page_chars:
        search = PagedSearch(search, page_chars=page_chars, seconds=page_seconds)
    # The reranker sees whole pages, and more passages than any layer after it.
    if rerank is not None:
        search = RerankedSearch(
            search,
            rerank,
            top_k_retrieval=rerank_from,
            top_k=top_k,
            cache_size=cache_size,
        )
    # Failed searches are retried before results are stored or rewritten.
    if retry:
        search = _retry_failed(search)
    # The journal records what the policy sees of a service, with pages fetched and
    # reranked, so that a resumed run needs neither the service nor the pages again.
    if journal is not None:
        search = record_search(search, journal)
    # The writer comes last: its replies have their own journal, and another protocol of
    # the same run (a baseline) shows the passages themselves.
    if writer is not None:
        search = with_written_observations(search, writer, prompt=writer_prompt)
    return search


def _retry_failed(search):
    """Return a SearchFn that repeats the queries whose search failed.

    A rollout whose search fails is left out of the loss, but a demonstration or a
    prompt needs its passages: the caller cannot continue without them.
    """

    def search_with_retries(*columns):  # queries, and question ids if it wants them
        results = list(search(*columns))
        for _ in range(MAX_ATTEMPTS - 1):
            indices = [i for i, passages in enumerate(results) if passages is None]
            if not indices:
                break
            new_results = search(*([column[i] for i in indices] for column in columns))
            for i, passages in zip(indices, new_results, strict=True):
                results[i] = passages
        return results

    return copy_search_attributes(search, search_with_retries)

"""The layers around a search, in the order in which its results pass through them.

Each layer is a SearchFn that calls the one before it, so any of them can be left out.
"""

from collections.abc import Callable

from rsearch.protocols.writing import write_observations
from rsearch.retrieval.rerank import RerankedSearch
from rsearch.retrieval.web import PagedSearch
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_search
from rsearch.types import GenerateFn, SearchFn, copy_search_attributes

MAX_SEARCHES = 3  # of a query whose search fails, where nothing else can be done


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
    """Return the search with these layers around it, the innermost first.

    A run calls this several times, each time with later layers: when the engine is
    opened (pages, reranker), when a stage begins (journal, or retries) and when a
    protocol's conversations are opened (writer). The order is the same as of one call
    with all of them.

    Args:
        search: an engine or a service, which has a cache of its own (a user's may have
            none): equal queries of all rollouts are searched once.
        page_chars: replace each hit by so many characters of the web page that its id
            names; 0 leaves hits as they are.
        page_seconds: for each page.
        rerank: (query, contents of passages) -> scores; None keeps the search's order.
        rerank_from: passages of a query that are scored.
        top_k: passages that remain, the best first.
        cache_size: queries whose order by `rerank` is remembered.
        retry: search again where a search has failed.
        journal: of the stage's searches; None asks a service anew in each start.
        writer: writes one passage from those of each query; None shows these.
        writer_prompt: how it is asked, a key of `protocols.writing.PROMPTS`.
    """
    # Pages come first: a hit's snippet is too short to be ranked or written from.
    if page_chars:
        search = PagedSearch(search, page_chars=page_chars, seconds=page_seconds)
    # The reranker sees whole pages, and reads more passages than anything after it.
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
    # The journal holds what the policy is shown of a service: pages fetched and
    # reranked, so that a resumed run needs neither the service nor the pages again.
    if journal is not None:
        search = record_search(search, journal)
    # The writer comes last: it has a journal of its own replies, and another
    # protocol of the same run (a baseline) shows the passages themselves.
    if writer is not None:
        search = write_observations(search, writer, prompt=writer_prompt)
    return search


def _retry_failed(search):
    """Return a SearchFn that repeats the queries whose search has failed.

    A rollout whose search fails leaves the loss, but a demonstration or a prompt needs
    its passages: the caller cannot go on without them.
    """

    def search_with_retries(*columns):  # queries, and the questions where it wants them
        results = list(search(*columns))
        for _ in range(MAX_SEARCHES - 1):
            failed = [i for i, passages in enumerate(results) if passages is None]
            if not failed:
                break
            again = search(*([column[i] for i in failed] for column in columns))
            for i, passages in zip(failed, again, strict=True):
                results[i] = passages
        return results

    return copy_search_attributes(search, search_with_retries)

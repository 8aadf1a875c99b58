"""Serve a search engine over HTTP with the protocols of the published systems.

    python -m rsearch.retriever --config=configs/quickstart.py --port=8000
    python -m rsearch.retriever --config=configs/search_r1.py \\
        --config.retrieval.index=DIR
    curl -H "Content-Type: application/json" http://127.0.0.1:8000/retrieve \\
        -d '{"queries": ["Who ...?"], "topk": 3}'

    POST /retrieve      {"queries", "topk", "return_scores"}, for Search-R1, or
                        {"query", ...}, for SkyRL
    POST /retrieve_NAME the same, for R-Search; NAME is that of its dataset
    POST /queries       {"queries", "k"}, for R1-Searcher
    POST /search        {"query", "top_n", "return_score"}, for ReaRAG
    POST /batch_search  the same with a list of queries
    GET  /health        {"status": "ok"}
    GET  /openapi.json  a machine-readable description of all this

The retrieval section of a recipe names the index and the encoder. A request whose topk,
k or top_n is 0 or null gets its top_k passages. Without that field, /retrieve returns
top_k as well, /queries 3 and /search and /batch_search 10, as in the published servers.
A run uses such a service with --config.retrieval.url=http://127.0.0.1:8000.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from rsearch.config.checks import searches_world, validate_search
from rsearch.config.recipes import (
    apply_overrides,
    load,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.protocols.base import replace_surrogates
from rsearch.retrieval.engine import SearchEngine
from rsearch.runtime import console
from rsearch.runtime.openapi import TEXT, list_of, record, with_description
from rsearch.runtime.server import RefusedError
from rsearch.runtime.service_flags import FLAGS as SERVER_FLAGS
from rsearch.runtime.service_flags import open_server
from rsearch.setup.preflight import check_search
from rsearch.setup.search import open_search
from rsearch.world.world import make_world

RECIPE = "configs/quickstart.py"
MAX_QUERIES = 8192  # per request: a trainer sends the queries of all its rollouts
SEARCH_BATCH = 512  # batch size with which longer requests are searched
USUAL_K = 20  # passages found for each query unless a request asks for more
MAX_K = 100
FLAGS = {
    "max_queries": (MAX_QUERIES, "most queries in a request", 1),
    "max_k": (
        0,
        "most passages per query; 0 = 100, or 20 if a service is searched, or as many "
        "as a reranker ranks",
        0,
    ),
    "max_query_chars": (1 << 16, "longer queries are refused", 1),
    **SERVER_FLAGS,
    "max_body_bytes": (1 << 24, "longer requests are refused", 1),
}


def routes_of(
    search: Callable,
    *,
    top_k: int,
    max_k: int,
    max_query_chars: int,
    max_queries: int = MAX_QUERIES,
    deep_search: Callable | None = None,
) -> dict:
    """Return the routes of the service.

    Args:
        search: finds `max_k` passages for each query, or as many as there are.
        top_k: passages per query if a request's number is 0 or null; without a number
            each route has its public server's default.
        max_k: most passages per query; requests for more are refused.
        max_query_chars: longer queries are refused.
        max_queries: most queries in a request; longer requests are refused.
        deep_search: replaces `search` for requests of more than USUAL_K passages, so
            that `search` needs to find only USUAL_K.
    """

    # Each request has a thread, and not every engine allows searches that overlap.
    overlaps = getattr(search, "searches_at_once", 1) > 1
    lock = contextlib.nullcontext() if overlaps else threading.Lock()

    def find(queries, k, flag):
        """Check a request of any protocol and return k passages for each query."""
        if not isinstance(flag, bool | None):
            raise RefusedError(400, "the flag for scores must be true or false")
        if not isinstance(queries, list) or len(queries) > max_queries:
            reason = f"queries must be a list of at most {max_queries}"
            raise RefusedError(400, reason)
        for query in queries:
            if not isinstance(query, str) or len(query) > max_query_chars:
                reason = f"a query must be a text of at most {max_query_chars}"
                raise RefusedError(400, f"{reason} characters")
        if isinstance(k, float) and k.is_integer():
            k = int(k)  # JSON does not distinguish 3.0 from 3
        k = top_k if k is None or (type(k) is int and k == 0) else k
        if type(k) is not int or not 1 <= k <= max_k:
            raise RefusedError(400, f"passages per query must be 1 to {max_k}")
        engine = deep_search if deep_search is not None and k > USUAL_K else search
        texts = [replace_surrogates(query) for query in queries]
        unique = list(dict.fromkeys(texts))
        results = {}
        for start in range(0, len(unique), SEARCH_BATCH):
            batch = unique[start : start + SEARCH_BATCH]
            with lock:
                hits = engine(batch)
            if any(passages is None for passages in hits):
                raise RefusedError(503, "the search failed; try again later")
            results |= zip(batch, hits, strict=True)
        return [results[text][:k] for text in texts]

    def retrieve(body):
        queries, query = body.get("queries"), body.get("query")
        if (queries is None) == (query is None):
            raise RefusedError(400, 'the body must have "queries" or "query"')
        with_scores = body.get("return_scores")
        queries = [query] if queries is None else queries
        results = find(queries, body.get("topk"), with_scores)
        make_hit = _scored_hit if with_scores else _document
        return {"result": [[make_hit(p) for p in passages] for passages in results]}

    def answer_queries(body):
        results = find(body.get("queries"), body.get("k", min(3, max_k)), None)
        answers = [[_numbered_contents(p) for p in passages] for passages in results]
        return {"queries": body["queries"], "answers": answers}

    def search_batch(queries, body):
        with_scores = body.get("return_score")
        results = find(queries, body.get("top_n", min(10, max_k)), with_scores)
        documents = [[_document(p) for p in passages] for passages in results]
        scores = [[p.score for p in passages] for passages in results]
        return documents, scores if with_scores else None

    def search_many(body):
        documents, scores = search_batch(body.get("query"), body)
        return documents if scores is None else [documents, scores]

    def search_one(body):
        documents, scores = search_batch([body.get("query")], body)
        return documents[0] if scores is None else [documents[0], scores[0]]

    routes = {
        ("POST", "/retrieve"): retrieve,
        ("POST", "/retrieve_{dataset}"): retrieve,
        ("POST", "/queries"): answer_queries,
        ("POST", "/search"): search_one,
        ("POST", "/batch_search"): search_many,
    }
    descriptions = _route_descriptions(
        max_queries, max_k=max_k, max_query_chars=max_query_chars
    )
    return with_description(routes, "rsearch.retriever", descriptions)


def _route_descriptions(max_queries, *, max_k, max_query_chars):
    """Return the routes' descriptions; see `openapi.with_description`."""
    query = {**TEXT, "maxLength": max_query_chars}
    queries = list_of(query, maxItems=max_queries)
    k = {"type": ["integer", "null"], "minimum": 0, "maximum": max_k}
    flag = {"type": ["boolean", "null"]}
    document = record({"id": TEXT, "contents": TEXT})
    scored_hit = record({"document": document}, {"score": {"type": "number"}})
    scores = list_of({"type": ["number", "null"]})

    def with_scores(documents, scores):
        pair = list_of({"anyOf": [documents, scores]}, minItems=2, maxItems=2)
        return {"anyOf": [documents, pair]}

    documents = list_of(document)
    settings = {"top_n": k, "return_score": flag}
    # Search-R1's clients send `queries`, SkyRL's `query`.
    null = {"type": "null"}
    retrieve = {"topk": k, "return_scores": flag}
    body = {
        "anyOf": [
            record({"queries": queries}, {"query": null, **retrieve}),
            record({"query": query}, {"queries": null, **retrieve}),
        ]
    }
    hits = {"anyOf": [documents, list_of(scored_hit)]}
    reply = record({"result": list_of(hits)})
    return {
        ("POST", "/retrieve"): (
            "Passages for each query, for Search-R1 and SkyRL; topk 0 means the "
            "configured number, and without return_scores a hit is only its document.",
            body,
            reply,
        ),
        ("POST", "/retrieve_{dataset}"): (
            "The same, for R-Search; the service has one corpus, whatever the name.",
            body,
            reply,
        ),
        ("POST", "/queries"): (
            "Contents of the passages for each query (3 without k), for R1-Searcher, "
            "whose client drops a number at their beginning.",
            record({"queries": queries}, {"k": k}),
            record({"queries": list_of(TEXT), "answers": list_of(list_of(TEXT))}),
        ),
        ("POST", "/search"): (
            "Passages for one query, for ReaRAG; 10 without top_n.",
            record({"query": query}, settings),
            with_scores(documents, scores),
        ),
        ("POST", "/batch_search"): (
            "Passages for each query, for ReaRAG; with scores, [passages, scores].",
            record({"query": queries}, settings),
            with_scores(list_of(documents), list_of(scores)),
        ),
    }


def _document(passage):
    return {"id": passage.id, "contents": passage.contents}


def _scored_hit(passage):
    hit = {"document": _document(passage)}
    return hit if passage.score is None else {**hit, "score": passage.score}


def _numbered_contents(passage):
    """Return the contents in the form that R1-Searcher's client reads.

    R1-Searcher's server begins each text with a line number, which the client drops. If
    there were none, the client would drop the number that begins a title like "1984".
    """
    has_number = re.match(r"\d+\s", passage.contents)
    return f"0\t{passage.contents}" if has_number else passage.contents


def open_engines(config: ConfigDict, max_k: int) -> tuple[Callable, Callable | None]:
    """Open the search engine of a configuration, and nothing else that it names.

    Returns:
        `search` and `deep_search` for `routes_of`.
    """
    r = config.retrieval
    world = None
    if searches_world(config):
        no_questions = {"train_questions": 0, "dev_questions": 0}
        world = make_world(seed=config.seed, **{**config.world, **no_questions})
    is_layered = r.url or r.engine or r.reranker
    usual_k = max_k if is_layered else min(max_k, max(r.top_k, USUAL_K))
    search = open_search(apply_overrides(config, {"retrieval.top_k": usual_k}), world)
    if getattr(search, "wants_question_ids", False):
        raise ValueError(
            f"{search} takes the ids of questions, but a service gets only queries"
        )
    if isinstance(search, SearchEngine) and max_k > usual_k:
        return search, search.with_top_k(max_k)
    return search, None


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    config, values = parse_command_line(
        argv, flags=FLAGS, default=lambda values: load(RECIPE)
    )
    if values["print_config"]:
        print_config(config)
        return 0
    validate_search(config)
    check_search(config)
    retrieval = config.retrieval
    # A service may charge for each passage, or each may be a page to fetch.
    default_max_k = max(retrieval.top_k, USUAL_K if retrieval.url else MAX_K)
    if retrieval.reranker:
        default_max_k = retrieval.rerank_from
    top_k, max_k = retrieval.top_k, values["max_k"] or default_max_k
    if max_k < top_k:
        raise ValueError(
            f"--max_k={max_k}: must be at least config.retrieval.top_k = {top_k}"
        )
    if retrieval.reranker and max_k > retrieval.rerank_from:
        raise ValueError(
            f"--max_k={max_k}: must be at most config.retrieval.rerank_from = "
            f"{retrieval.rerank_from}, which config.retrieval.reranker ranks"
        )
    # Created before anything is loaded, so that a bad host or taken port fails early.
    server = open_server(values, {})

    def prepare():
        search, deep_search = open_engines(config, max_k)
        server.routes = routes_of(
            search,
            top_k=top_k,
            max_k=max_k,
            max_query_chars=values["max_query_chars"],
            max_queries=values["max_queries"],
            deep_search=deep_search,
        )
        console.note(f"{search}: POST {server.url}/retrieve, until Control-C")

    server.serve(prepare)
    console.note("ended")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

"""Serve a search engine over HTTP, in the dialects of the published systems.

    python -m rsearch.retriever --config=configs/quickstart.py --port=8000
    python -m rsearch.retriever --config=configs/search_r1.py \\
        --config.retrieval.index=DIR
    curl -H "Content-Type: application/json" http://127.0.0.1:8000/retrieve \\
        -d '{"queries": ["Who ...?"], "topk": 3}'

    POST /retrieve      {"queries", "topk", "return_scores"}, as Search-R1 asks, or
                        {"query", ...}, as SkyRL asks
    POST /retrieve_NAME the same, as R-Search asks; NAME is of its data set
    POST /queries       {"queries", "k"}, as R1-Searcher asks
    POST /search        {"query", "top_n", "return_score"}, as ReaRAG asks
    POST /batch_search  the same with a list of queries
    GET  /health        {"status": "ok"}
    GET  /openapi.json  all of this, in words that programs read

What is searched, and with which encoder, is said by the retrieval section of a recipe;
its top_k is how many passages a request gets that does not say. A run asks such a
service with --config.retrieval.url=http://127.0.0.1:8000.
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
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.protocols.tagged import whole_characters
from rsearch.retrieval.engine import SearchEngine
from rsearch.runtime import console
from rsearch.runtime.calls import read_api_key
from rsearch.runtime.openapi import TEXT, list_of, record, with_description
from rsearch.runtime.server import JsonServer, RefusedError
from rsearch.setup.preflight import check_search
from rsearch.setup.search import open_search
from rsearch.world.world import make_world

RECIPE = "configs/quickstart.py"
MAX_QUERIES = 8192  # in one request: a trainer sends those of all its rollouts
QUERIES_A_SEARCH = 512  # of a longer request
USUAL_K = 20  # passages that are read for each query; a request for more reads more
MAX_K = 100
FLAGS = {
    "max_queries": (MAX_QUERIES, "queries of a request, at most"),
    "max_k": (
        0,
        "passages of a query, at most; 0 is 100, of a service 20, of a reranker "
        "what it ranks",
    ),
    "max_query_chars": (1 << 16, "a longer query is refused"),
    "max_waiting": (256, "requests under way, at most; further ones get a 503"),
    "host": ("127.0.0.1", "to listen at; others than this machine need a token"),
    "port": (8000, "to listen at; 0 takes a free one"),
    "token_env": ("", "environment variable with the token that requests must carry"),
    "max_body_bytes": (1 << 24, "a longer request is refused"),
    "max_reply_bytes": (1 << 26, "a longer reply is refused"),
}


def routes_of(
    search: Callable,
    *,
    top_k: int,
    max_k: int,
    max_query_chars: int,
    max_queries: int = MAX_QUERIES,
    deep: Callable | None = None,
) -> dict:
    """Return the routes of the service.

    Args:
        search: finds `max_k` passages, or as many as there are.
        top_k: passages of a query where a request does not say.
        max_k: more are refused.
        max_query_chars: a longer query is refused.
        max_queries: more in one request are refused.
        deep: searches in place of `search`, which then finds USUAL_K passages or more,
            where a request asks for more than USUAL_K.
    """

    # Threads answer requests, and a search need not stand calls that overlap.
    overlaps = getattr(search, "searches_at_once", 1) > 1
    lock = contextlib.nullcontext() if overlaps else threading.Lock()

    def find(queries, k, flag):
        """Return k passages for each query; check the flag, whatever its name."""
        if not isinstance(flag, bool | None):
            raise RefusedError(400, "whether scores are returned must be true or false")
        if not isinstance(queries, list) or len(queries) > max_queries:
            reason = f"queries must be a list of at most {max_queries}"
            raise RefusedError(400, reason)
        for query in queries:
            if not isinstance(query, str) or len(query) > max_query_chars:
                reason = f"a query must be a text of at most {max_query_chars}"
                raise RefusedError(400, f"{reason} characters")
        if isinstance(k, float) and k.is_integer():
            k = int(k)  # which JSON does not tell apart
        k = top_k if k is None or (type(k) is int and k == 0) else k
        if type(k) is not int or not 1 <= k <= max_k:
            raise RefusedError(400, f"passages of a query must be 1 to {max_k}")
        engine = deep if deep is not None and k > USUAL_K else search
        texts = [whole_characters(query) for query in queries]
        unique = list(dict.fromkeys(texts))
        results = {}
        for start in range(0, len(unique), QUERIES_A_SEARCH):
            batch = unique[start : start + QUERIES_A_SEARCH]
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
        form = _scored if with_scores else _document
        return {"result": [[form(p) for p in passages] for passages in results]}

    def queries(body):
        results = find(body.get("queries"), body.get("k", min(3, max_k)), None)
        answers = [[_numbered(p) for p in passages] for passages in results]
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
        ("POST", "/queries"): queries,
        ("POST", "/search"): search_one,
        ("POST", "/batch_search"): search_many,
    }
    described = _description(max_queries, max_k=max_k, max_query_chars=max_query_chars)
    return with_description(routes, "rsearch.retriever", described)


def _description(max_queries, *, max_k, max_query_chars):
    """See `openapi.with_description`."""
    query = {**TEXT, "maxLength": max_query_chars}
    queries = list_of(query, maxItems=max_queries)
    k = {"type": ["integer", "null"], "minimum": 0, "maximum": max_k}
    flag = {"type": ["boolean", "null"]}
    document = record({"id": TEXT, "contents": TEXT})
    scored = record({"document": document}, {"score": {"type": "number"}})
    scores = list_of({"type": ["number", "null"]})

    def with_scores(documents, scores):
        pair = list_of({"anyOf": [documents, scores]}, minItems=2, maxItems=2)
        return {"anyOf": [documents, pair]}

    documents = list_of(document)
    settings = {"top_n": k, "return_score": flag}
    # Their clients send one of the two.
    absent = {"type": "null"}
    retrieve = {"topk": k, "return_scores": flag}
    body = {
        "anyOf": [
            record({"queries": queries}, {"query": absent, **retrieve}),
            record({"query": query}, {"queries": absent, **retrieve}),
        ]
    }
    hits = {"anyOf": [documents, list_of(scored)]}
    reply = record({"result": list_of(hits)})
    return {
        ("POST", "/retrieve"): (
            "Passages of each query, as Search-R1 and SkyRL ask; topk 0 is as many as "
            "configured, and without return_scores a passage is its document.",
            body,
            reply,
        ),
        ("POST", "/retrieve_{dataset}"): (
            "The same, as R-Search asks; a service has one corpus, whatever the name.",
            body,
            reply,
        ),
        ("POST", "/queries"): (
            "Contents of the passages of each query, as R1-Searcher asks, whose client "
            "drops a number that they begin with.",
            record({"queries": queries}, {"k": k}),
            record({"queries": list_of(TEXT), "answers": list_of(list_of(TEXT))}),
        ),
        ("POST", "/search"): (
            "Passages of one query, as ReaRAG asks.",
            record({"query": query}, settings),
            with_scores(documents, scores),
        ),
        ("POST", "/batch_search"): (
            "Passages of each query, as ReaRAG asks; with scores, first all passages.",
            record({"query": queries}, settings),
            with_scores(list_of(documents), list_of(scores)),
        ),
    }


def _document(passage):
    return {"id": passage.id, "contents": passage.contents}


def _scored(passage):
    hit = {"document": _document(passage)}
    return hit if passage.score is None else {**hit, "score": passage.score}


def _numbered(passage):
    """Return the contents as R1-Searcher's client reads them.

    Its server's texts begin with a line number, which the client drops. Of a text
    without, it would drop the number that a title like "1984" begins with.
    """
    begins_so = re.match(r"\d+\s", passage.contents)
    return f"0\t{passage.contents}" if begins_so else passage.contents


def _default_max_k(retrieval):
    if retrieval.reranker:
        return retrieval.rerank_from
    # A service may be paid by the passage, or each of them be a page to fetch.
    return max(retrieval.top_k, USUAL_K if retrieval.url else MAX_K)


def open_engines(config: ConfigDict, max_k: int) -> tuple[Callable, Callable | None]:
    """Open the engine of a configuration, and nothing else that it names.

    Returns:
        `search` and `deep` of `routes_of`.
    """
    r = config.retrieval
    world = None
    if searches_world(config):
        no_questions = {"train_questions": 0, "dev_questions": 0}
        world = make_world(seed=config.seed, **{**config.world, **no_questions})
    is_layered = r.url or r.engine or r.reranker
    usual_k = max_k if is_layered else min(max_k, max(r.top_k, USUAL_K))
    search = open_search(apply_overrides(config, {"retrieval.top_k": usual_k}), world)
    if isinstance(search, SearchEngine) and max_k > usual_k:
        return search, search.with_top_k(max_k)
    return search, None


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    argv = list(argv)
    if not any(word.split("=")[0] == "--config" for word in argv):
        argv = [f"--config={RECIPE}", *argv]
    config, values = parse_command_line(argv, flags=FLAGS)
    if values["print_config"]:
        print_config(config)
        return 0
    for name, (default, _) in FLAGS.items():
        at_least = 0 if name in ("max_k", "port") else 1
        if isinstance(default, int) and values[name] < at_least:
            raise ValueError(f"--{name}={values[name]}: must be {at_least} or more")
    validate_search(config)
    check_search(config)
    retrieval = config.retrieval
    top_k, max_k = retrieval.top_k, values["max_k"] or _default_max_k(retrieval)
    if max_k < top_k:
        raise ValueError(
            f"--max_k={max_k}: must be at least config.retrieval.top_k = {top_k}"
        )
    if retrieval.reranker and max_k > retrieval.rerank_from:
        raise ValueError(
            f"--max_k={max_k}: must be at most config.retrieval.rerank_from = "
            f"{retrieval.rerank_from}, which config.retrieval.reranker puts in order"
        )
    # Before anything is loaded: a wrong host or a taken port shows at once.
    server = JsonServer(
        values["host"],
        values["port"],
        {},
        token=read_api_key(values["token_env"]) if values["token_env"] else "",
        max_body_bytes=values["max_body_bytes"],
        max_reply_bytes=values["max_reply_bytes"],
        max_waiting=values["max_waiting"],
    )
    search, deep = open_engines(config, max_k)
    server.routes = routes_of(
        search,
        top_k=top_k,
        max_k=max_k,
        max_query_chars=values["max_query_chars"],
        max_queries=values["max_queries"],
        deep=deep,
    )
    host, port = server.server_address[:2]
    console.note(f"{search}: POST http://{host}:{port}/retrieve, until Control-C")
    server.serve()
    console.note("ended")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

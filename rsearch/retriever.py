"""Serve a search engine over HTTP, in the dialects of the published systems.

    python -m rsearch.retriever --config=configs/quickstart.py --port=8000
    python -m rsearch.retriever --config=configs/search_r1.py \\
        --config.retrieval.index=DIR
    curl -H "Content-Type: application/json" http://127.0.0.1:8000/retrieve \\
        -d '{"queries": ["Who ...?"], "topk": 3}'

    POST /retrieve      {"queries", "topk", "return_scores"}, as Search-R1 asks
    POST /queries       {"queries", "k"}, as R1-Searcher asks
    POST /search        {"query", "top_n", "return_score"}, as ReaRAG asks
    POST /batch_search  the same with a list of queries
    GET  /health        {"status": "ok"}
    GET  /openapi.json  all of this, in words that programs read

What is searched, and with which encoder, is said by the retrieval section of a recipe;
its top_k is how many passages a request gets that does not say. A run asks such a
service with --config.retrieval.url=http://127.0.0.1:8000.
"""

import sys
from collections.abc import Callable, Sequence

from rsearch.config.recipes import (
    apply_overrides,
    parse_command_line,
    print_config,
    run_command,
    validate,
)
from rsearch.protocols.tagged import whole_characters
from rsearch.runtime import console
from rsearch.runtime.calls import read_api_key
from rsearch.runtime.openapi import TEXT, list_of, record, with_description
from rsearch.runtime.server import JsonServer, RefusedError
from rsearch.setup.policy import has_world
from rsearch.setup.search import open_search
from rsearch.world.world import make_world

RECIPE = "configs/quickstart.py"
MAX_QUERIES = 512  # in one request
FLAGS = {
    "max_k": (20, "passages of a query, at most"),
    "max_query_chars": (4000, "a longer query is refused"),
    "host": ("127.0.0.1", "to listen at; others than this machine need a token"),
    "port": (8000, "to listen at; 0 takes a free one"),
    "token_env": ("", "environment variable with the token that requests must carry"),
    "max_body_bytes": (1 << 22, "a longer request is refused"),
}


def routes_of(
    search: Callable, *, top_k: int, max_k: int, max_query_chars: int
) -> dict:
    """Return the routes of the service.

    Args:
        search: finds `max_k` passages, or as many as there are.
        top_k: passages of a query where a request does not say.
        max_k: more are refused.
        max_query_chars: a longer query is refused.
    """

    def find(queries, k, flag):
        """Return k passages for each query; check the flag, whatever its name."""
        if not isinstance(flag, bool | None):
            raise RefusedError(400, "whether scores are returned must be true or false")
        if not isinstance(queries, list) or not 1 <= len(queries) <= MAX_QUERIES:
            reason = f"queries must be a list of 1 to {MAX_QUERIES}"
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
        results = search([whole_characters(query) for query in queries])
        if any(passages is None for passages in results):
            raise RefusedError(503, "the search failed; try again later")
        return [passages[:k] for passages in results]

    def retrieve(body):
        results = find(body.get("queries"), body.get("topk"), body.get("return_scores"))
        return {"result": [[_scored(p) for p in passages] for passages in results]}

    def queries(body):
        results = find(body.get("queries"), body.get("k", min(3, max_k)), None)
        answers = [[p.contents for p in passages] for passages in results]
        return {"queries": body["queries"], "answers": answers}

    def search_batch(queries, body):
        with_scores = body.get("return_score")
        results = find(queries, body.get("top_n", min(10, max_k)), with_scores)
        documents = [[_document(p) for p in passages] for passages in results]
        if not with_scores:
            return documents
        scores = [[p.score for p in passages] for passages in results]
        return [list(pair) for pair in zip(documents, scores, strict=True)]

    def search_one(body):
        return search_batch([body.get("query")], body)[0]

    routes = {
        ("POST", "/retrieve"): retrieve,
        ("POST", "/queries"): queries,
        ("POST", "/search"): search_one,
        ("POST", "/batch_search"): lambda body: search_batch(body.get("query"), body),
    }
    described = _description(max_k=max_k, max_query_chars=max_query_chars)
    return with_description(routes, "rsearch.retriever", described)


def _description(*, max_k, max_query_chars):
    """See `openapi.with_description`."""
    query = {**TEXT, "maxLength": max_query_chars}
    queries = list_of(query, minItems=1, maxItems=MAX_QUERIES)
    k = {"type": ["integer", "null"], "minimum": 0, "maximum": max_k}
    flag = {"type": ["boolean", "null"]}
    document = record({"id": TEXT, "contents": TEXT})
    scored = record({"document": document, "score": {"type": "number"}})
    scores = list_of({"type": "number"})

    def with_scores(documents):
        pair = list_of({"anyOf": [documents, scores]}, minItems=2, maxItems=2)
        return {"anyOf": [documents, pair]}

    documents = list_of(document)
    settings = {"top_n": k, "return_score": flag}
    return {
        ("POST", "/retrieve"): (
            "Passages of each query, as Search-R1 asks; 0 is as many as configured.",
            record({"queries": queries}, {"topk": k, "return_scores": flag}),
            record({"result": list_of(list_of(scored))}),
        ),
        ("POST", "/queries"): (
            "Contents of the passages of each query, as R1-Searcher asks.",
            record({"queries": queries}, {"k": k}),
            record({"queries": list_of(TEXT), "answers": list_of(list_of(TEXT))}),
        ),
        ("POST", "/search"): (
            "Passages of one query, as ReaRAG asks.",
            record({"query": query}, settings),
            with_scores(documents),
        ),
        ("POST", "/batch_search"): (
            "Passages of each query, as ReaRAG asks.",
            record({"query": queries}, settings),
            list_of(with_scores(documents)),
        ),
    }


def _document(passage):
    return {"id": passage.id, "contents": passage.contents}


def _scored(passage):
    return {"document": _document(passage), "score": passage.score}


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    argv = list(argv)
    if not any(word.split("=")[0] == "--config" for word in argv):
        argv = [f"--config={RECIPE}", *argv]
    config, values = parse_command_line(argv, flags=FLAGS)
    if values["print_config"]:
        print_config(config)
        return 0
    validate(config)
    top_k, max_k = config.retrieval.top_k, values["max_k"]
    if max_k < top_k:
        raise ValueError(
            f"--max_k={max_k}: must be at least config.retrieval.top_k = {top_k}"
        )
    # Before anything is loaded: a wrong host or a taken port shows at once.
    server = JsonServer(
        values["host"],
        values["port"],
        {},
        token=read_api_key(values["token_env"]) if values["token_env"] else "",
        max_body_bytes=values["max_body_bytes"],
    )
    config = apply_overrides(config, {"retrieval.top_k": max_k})
    world = make_world(seed=config.seed, **config.world) if has_world(config) else None
    search = open_search(config, world)
    server.routes = routes_of(
        search, top_k=top_k, max_k=max_k, max_query_chars=values["max_query_chars"]
    )
    host, port = server.server_address[:2]
    console.note(f"{search}: POST http://{host}:{port}/retrieve, until Control-C")
    server.serve()
    console.note("ended")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

"""Searches of concurrent rollouts as subjects: by this package, and the public way.

The public systems run a server beside the training. Each row that searches sends it a
request of its own, for which it encodes one query and looks through all vectors. Memory
is that of the host, of all processes, wherever queries are encoded.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import time

import httpx
import numpy as np

from rsearch.bench.child import forget_peak, peak_bytes
from rsearch.bench.passages import read_texts
from rsearch.bench.precision import multiply_in_full
from rsearch.retrieval.encoder import load_encoder
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.nearest import Nearest, build_searcher, choose_partition
from rsearch.retrieval.vectors import Vectors

PASSAGES = 3  # that a query finds
GROUP = 8  # rollouts of one question


def queries_of(texts, repetition, num_rollouts, same_share):
    """[num_rollouts] the queries of one turn; no two turns share one.

    Args:
        texts: to draw from.
        repetition: number of the turn.
        num_rollouts: that search in it.
        same_share: of a group's rollouts ask as its first one does.
    """
    first = repetition * num_rollouts
    asked = []
    for row in range(num_rollouts):
        is_same = row % GROUP < same_share * GROUP
        place = first + (row - row % GROUP if is_same else row)
        # Titles run out; words in front make other queries of about their length.
        text, round_ = texts[place % len(texts)], place // len(texts)
        asked.append(f"{'again ' * round_}{text}")
    return asked


def make_engine(*, folder, encoder, family, num_rollouts, same_share, **_):
    """This package's engine: asked once a turn, by all rows that search."""
    if encoder != "hashed":
        multiply_in_full()
    texts, corpus = read_texts(folder)
    vectors = np.load(pathlib.Path(folder) / "vectors.npy")
    partition = choose_partition(*vectors.shape)
    nearest = Nearest(Vectors([vectors]), build_searcher(vectors, partition), partition)
    encoding = load_encoder(encoder, family=family or None)
    engine = SearchEngine(nearest, encoding, corpus, top_k=PASSAGES)
    return _turns(engine, texts, num_rollouts, same_share)


def make_served(*, folder, encoder, family, num_rollouts, same_share, at_once):
    """The public way: a request a row, `at_once` from threads or one after another."""
    texts, _ = read_texts(folder)
    settings = json.dumps({"folder": str(folder), "encoder": encoder, "family": family})
    server = subprocess.Popen(
        [sys.executable, "-m", "rsearch.bench.public_server", settings],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    told = json.loads(server.stdout.readline() or '{"missing": "the server"}')
    if "missing" in told:
        raise ModuleNotFoundError(told["missing"], name=told["missing"])
    client = httpx.Client(timeout=120.0, trust_env=False)

    def ask(query):
        body = {"queries": [query], "topk": PASSAGES, "return_scores": True}
        reply = client.post(told["url"], json=body)
        reply.raise_for_status()
        (found,) = reply.json()["result"]
        return [hit["document"]["id"] for hit in found]

    pool = concurrent.futures.ThreadPoolExecutor(num_rollouts if at_once else 1)
    # The server, which has the vectors and the model, ends with this process, whose
    # pipe it reads.
    return _turns(
        lambda queries: list(pool.map(ask, queries)),
        texts,
        num_rollouts,
        same_share,
        processes=("self", server.pid),
    )


def _turns(search, texts, num_rollouts, same_share, processes=("self",)):
    """Searches of one turn after another, each with new queries.

    Args:
        search: function of the queries of a turn.
        texts, num_rollouts, same_share: see `queries_of`.
        processes: whose memory counts.
    """
    turn = -1

    def once():
        nonlocal turn
        turn += 1
        queries = queries_of(texts, turn, num_rollouts, same_share)
        for process in processes:
            forget_peak(process)
        started = time.perf_counter()
        found = search(queries)
        seconds = time.perf_counter() - started
        assert len(found) == num_rollouts
        first = [getattr(one[0], "id", one[0]) for one in found]
        peak = sum(map(peak_bytes, processes))
        return {"seconds": seconds, "first": first, "peak_bytes": peak}

    return once

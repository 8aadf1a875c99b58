"""A server that runs during a test, and the routes of the two services."""

import collections
import contextlib
import threading
from collections.abc import Callable

from rsearch import retriever
from rsearch.protocols.tagged import SEARCH_R1
from rsearch.rollout.conversation import Limits
from rsearch.runtime.prometheus import RequestMetrics
from rsearch.serving import service
from rsearch.serving.search_tool import SearchTool
from rsearch.tools.search import search_call
from rsearch.types import Answer, Group, Passage
from tests.rewards.play import play

MODEL = "a-policy"  # name of the tool for OpenAI's clients
PASSAGES = tuple(Passage(f"p{i}", f"T{i}\ntext", 1.0 - i / 10) for i in range(4))


@contextlib.contextmanager
def running(server):
    """Serve from a thread inside the context, then close the server."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
        assert not thread.is_alive()


class Engine:
    """Stands in for a RolloutEngine: one search, then an answer."""

    def __init__(self, search):
        self._search = search

    def prompt(self, question):
        return question.text.split()

    def __call__(self, params, questions, key):
        turns = [SEARCH_R1.render(a) for a in (search_call("q"), Answer("Paris"))]
        found = self._search([q.text for q in questions])
        pairs = zip(questions, found, strict=True)
        return [Group(q, (play(SEARCH_R1, turns, hits, q),)) for q, hits in pairs]


class Tool(SearchTool):
    """The tool around that engine, without a model."""

    def __init__(self, search):
        self._engine, self._params, self._answerer = Engine(search), None, None
        self._host = self._engine
        self._limits, self._max_chars = Limits(1, 50, 50, 50), 200
        self._changed, self._is_running = threading.Condition(), False
        self._waiting, self._batch, self._totals = [], [], collections.Counter()


def find(queries):
    """Return four passages for each query."""
    return [PASSAGES for _ in queries]


def routes(name: str, search: Callable = find) -> dict:
    """Return the routes of the service "tool" or "retriever" around a search."""
    if name == "tool":
        return service.routes_of(Tool(search), MODEL, RequestMetrics())
    sizes = dict(top_k=3, max_k=4, max_query_chars=50)
    return retriever.routes_of(search, **sizes)

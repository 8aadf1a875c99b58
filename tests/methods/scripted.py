"""A model with scripted replies, and a search with known passages."""

import numpy as np

from rsearch.data.paragraphs import question_paragraphs
from rsearch.llm.requests import (
    CUT,
    STOPPED,
    Completion,
    TextScore,
    answer_in_turns,
)
from rsearch.methods.base import Kit
from rsearch.methods.runner import run_program
from rsearch.types import Passage, Question

NONE = np.zeros(0, np.float32)


def kit(**changes):
    """Return a kit with the budgets and prompts of a test."""
    fields = dict(answer_tokens=8, thought_tokens=16, top_k=3, shorten=lambda x: x)
    fields |= dict(embed=embed_letters, embed_passages=embed_letters)
    fields |= dict(fits=lambda m: True, paragraphs=tuple)
    fields |= dict(paragraphs_of=own_paragraphs, normalize="squad")
    return Kit(**fields | changes)


def own_paragraphs(question):
    """Return the paragraphs that come with a question."""
    return question_paragraphs(question.metadata)


def completion(text, *, is_cut=False, tokens=(), logp=NONE, prompt=""):
    """Return a completion with this text and without ids."""
    end, ids = (CUT if is_cut else STOPPED), np.zeros(0, np.int32)
    logp = np.asarray(logp, np.float32)
    return Completion(text, end, tuple(tokens), logp, ids, ids, prompt)


def embed_letters(texts):
    """Return unit vectors, each along the axis of its text's last letter."""
    return np.array([np.eye(128, dtype=np.float32)[ord(text[-1])] for text in texts])


class ScriptedModel:
    """A model that replies by a function of the test, and records its requests.

    Attributes:
        num_rows: number of rows of a batch.
        requests: all requests, in order.
        batches: number of requests of each call.
    """

    def __init__(self, reply, *, score=None, num_rows=4):
        self._reply, self._score, self.num_rows = reply, score, num_rows
        self.requests, self.batches = [], []

    def load(self, params):
        del params

    def on_any_host(self, value):
        return bool(value)

    def _ask(self, requests, answer):
        self.requests += requests
        self.batches.append(len(requests))
        return [answer(request) for request in requests]

    def generate(self, requests):
        def answer(request):
            said = self._reply(request)
            return completion(said) if isinstance(said, str) else said

        return answer_in_turns(requests, lambda new: self._ask(new, answer))

    mix = generate

    def score(self, requests):
        def answer(request):
            tokens, logp = self._score(request)
            read = request.prefix.split() if isinstance(request.prefix, str) else ()
            num_read = len(read) + len(tokens)
            return TextScore(tuple(tokens), np.asarray(logp, np.float32), num_read)

        return self._ask(requests, answer)


class Searched:
    """A search that finds "<query> 1", "<query> 2", ... and records its queries."""

    def __init__(self, num=3):
        self._num, self.queries = num, []

    def __call__(self, queries):
        self.queries += queries
        return [
            tuple(
                Passage(f"{query}-{i}", f"{query} {i}\ntext {i}", 1.0 - i / 10)
                for i in range(1, self._num + 1)
            )
            for query in queries
        ]


def shown(request):
    """Return all text of a request that a model reads."""
    if isinstance(request.prompt, str):
        return request.prompt
    return "\n".join(m["content"] for m in request.prompt) + request.continued


def answer_one(
    program,
    model,
    *,
    text="Who is X?",
    name="q",
    search=None,
    used=None,
    metadata=None,
    **settings,
):
    """Answer one question and return its rollout."""
    question = Question(name, text, ("gold",), metadata or {})
    (group,) = run_program(
        lambda q, k: program(q, k, **settings),
        [question],
        kit=used or kit(),
        model=model,
        search=search or Searched(),
    )
    return group.rollouts[0]

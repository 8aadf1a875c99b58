"""A policy that follows a script and stands in for the engines of make_rollouts.

Like the real policy's, its replies depend only on the key, the question and the sample,
so a stage that is stopped and resumed receives the same replies again.
"""

import zlib

import jax
import numpy as np

from rsearch.types import Group


class Stopped(Exception):
    """The script was set to stop here."""


class Script:
    """A stand-in for `make_rollouts` of a data stage.

    Args:
        say: function (rng, question, conversation) -> the next turn.
        stop_after: number of engine calls that succeed; the next one raises Stopped.
    """

    def __init__(self, say, stop_after=None):
        self.say, self.stop_after = say, stop_after
        self.num_calls = 0
        self.made = []  # (temperature, searches, group size) of each engine
        self.asked = []  # the question ids of each call

    def __call__(
        self,
        host,
        *,
        temperature,
        top_p,
        group_size,
        messages=None,
        num_tokens=None,
    ) -> "Engine":
        self.made.append((temperature, host.limits.max_searches, group_size))
        return Engine(self, host, group_size, messages)


class Engine:
    def __init__(self, script, host, group_size, messages):
        self._script, self._host = script, host
        self._group_size = group_size
        self._messages = messages or (lambda q: host.protocol.messages(q.text))

    def place_params(self, params):
        return params

    def __call__(self, params, questions, key, *, on_done=None, rollout_cache=None):
        script = self._script
        if script.num_calls == script.stop_after:
            raise Stopped
        script.num_calls += 1
        script.asked.append([q.id for q in questions])
        return [
            Group(q, tuple(self._one(q, key, j) for j in range(self._group_size)))
            for q in questions
        ]

    def _one(self, question, key, sample):
        host = self._host
        words = [*jax.random.key_data(key).tolist(), zlib.crc32(question.id.encode())]
        rng = np.random.default_rng([*words, sample])
        conversation = host.open(host.prompt(self._messages(question)))
        for turn in range(host.limits.num_turns):
            text = self._script.say(rng, question, conversation)
            ids = host.tokenizer.encode(text)
            written = {0: (ids, np.zeros(len(ids), np.float32))}
            final = turn == host.limits.num_turns - 1
            host.answer_turns({0: conversation}, written, final=final)
            if conversation.outcome is not None:
                break
        return conversation.rollout()

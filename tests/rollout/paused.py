"""Prepare four rows of the tiny model that have read their prompts."""

import jax
import numpy as np

from rsearch.rollout.interface import DecodeRequest
from tests.rollout import tiny

V = tiny.tokenizer().vocab_size
COUNT = np.array([3, 1, 27, 11], np.int32)
IDS = np.random.default_rng(1).integers(0, V, (4, 27)).astype(np.int32)
SAME = np.full((4, 2), 3, np.uint32)
NAMES = np.array([[5, 0], [5, 1], [6, 0], [6, 1]], np.uint32)
KEY = jax.random.key(47)  # with it, the first turns of the four rows differ in length
ALL = np.ones(4, bool)
BUDGET = np.full(4, 10, np.int32)


class Paused:
    """Four rows that have read prompts of 3, 1, 27 and 11 tokens."""

    def __init__(self):
        setup = tiny.make_engine(num_rows=4, group_size=1)
        self.sampler, self.params = setup.sampler, setup.params

    def prompts(self):
        return self.sampler.prefill(self.params, IDS, COUNT)

    def admit(self, slots, source, rows=None):
        rows = self.sampler.empty(4) if rows is None else rows
        slots, source = np.array(slots, np.int32), np.array(source, np.int32)
        return self.sampler.admit(rows, self.prompts(), slots, source)

    def start(self):
        return self.admit(range(4), range(4))

    def decode(
        self,
        rows,
        begins=ALL,
        *,
        min_finished=4,
        max_steps=10,
        names=NAMES,
        budget=BUDGET,
        queue=None,
    ):
        request = DecodeRequest(
            names, begins, budget, min_finished, max_steps, queue=queue
        )
        return self.sampler.decode(self.params, rows, KEY, request)

    def extend(self, rows, slots, tokens, count):
        return self.sampler.extend(self.params, rows, slots, tokens, count)

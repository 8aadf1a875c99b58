"""A sampler that writes given texts token by token and checks the calls it gets."""

import dataclasses
import zlib

import jax
import numpy as np

from rsearch.protocols.tagged import SEARCH_R1
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.interface import Context, DecodeRequest, Rows, SamplerLike, Turn
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.types import Passage, Question
from tests.rollout import tiny

LIMITS = Limits(
    max_searches=2,
    max_prompt_tokens=400,
    max_turn_tokens=60,
    max_observation_tokens=20,
)
WHO = Question("q", "who was born", ("x",))
SEARCHES = "so <search> river </search>"
ANSWERS = "it is <answer> city </answer>"
LONG_ANSWER = "a" * 45 + ANSWERS
WAIT = 30  # seconds; timeout for events that normally happen immediately
UNUSED = 7  # the id that fills a row after the tokens that it has written


class Script(SamplerLike):
    """A stand-in for Sampler: sample j of every question writes `turns[j]`.

    `admit` turns an "empty" slot to "ready". `decode` turns it to "writing" and, once
    its turn has ended, to "paused". `extend` or `admit` then turns it to "ready" again.
    Only a ready slot may begin a turn.
    """

    num_shards = 1  # number of shards of the rows
    page_tokens = row_pages = 1

    def __init__(self, turns, size=LIMITS.max_turn_tokens):
        self.turns, self.size = turns, size
        self.prompts = []  # the ids of each prompt that was read
        self.read = []  # (sample, ids) of each observation that a row has read
        self.writers = []  # per decode call: (slot, sample, turn) of each writing slot
        self.steps = []  # per decode call: its number of steps
        self.whole = {}  # name, sample -> all ids that the row has read and written

    def row_shards(self, num_rows):
        return self.num_shards

    def all_gather(self, number):
        return np.array([number])

    def report_failure(self):
        """Do nothing: there is no other host."""

    def place_params(self, params):
        return params

    def turns_on_host(self, rows):
        return jax.device_get(rows.turn)

    def empty(self, num_rows, num_pages=0):
        self.num_pages = num_pages
        self.phase = ["empty"] * num_rows
        self.ids = [[] for _ in range(num_rows)]
        self.number = [-1] * num_rows  # of each slot's turn
        size = num_rows, self.size
        self.turn = Turn(
            np.full(size, UNUSED, np.int32),
            np.full(size, -9, np.float32),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.uint8),
            np.zeros(num_rows, bool),
        )
        return self._rows()

    def _rows(self):
        """Return a new value; an old one was donated and may not be used again."""
        self.current = Rows(None, jax.tree.map(np.copy, self.turn))
        return self.current

    def prefill(self, params, tokens, count):
        prompts = [t[:n].tolist() for t, n in zip(tokens, count)]
        self.prompts += [ids for ids in prompts if ids != [0]]  # a single 0 is padding
        return Context(prompts, np.array(count), None)

    def _check_room(self, slots, table, more):
        """Check that rows with pages have enough of them, all from their own shard."""
        if table is None:
            return
        assert table.shape == (len(slots), self.row_pages)
        for slot, row in zip(slots, table.tolist()):
            held = [page for page in row if page < self.num_pages]
            assert row == held + [self.num_pages] * (len(row) - len(held))
            if slot >= len(self.phase):
                assert not held
                continue
            assert len(held) * self.page_tokens >= len(self.ids[slot]) + more
            shard = slot * self.num_shards // len(self.phase)
            assert all(p * self.num_shards // self.num_pages == shard for p in held)

    def admit(self, rows, prompts, slots, source, table=None):
        assert rows is self.current
        for slot, prompt_index in zip(slots, source):
            if slot < len(self.phase):
                assert self.phase[slot] in ("empty", "paused")
                assert prompts.cache[prompt_index] != [0]
                self.phase[slot], self.number[slot] = "ready", -1
                self.ids[slot] = list(prompts.cache[prompt_index])
        self._check_room(slots, table, self.size)
        return self._rows()

    def extend(self, params, rows, slots, tokens, count, table=None):
        assert rows is self.current
        for i, (slot, row, n) in enumerate(zip(slots, tokens, count)):
            if slot < len(self.phase):
                shard = i * self.num_shards // len(slots)
                assert slot * self.num_shards // len(self.phase) == shard
                assert self.phase[slot] == "paused" and n
                self.phase[slot] = "ready"
                self.ids[slot] += row[:n].tolist()
                self.read.append((self.sample[slot], row[:n].tolist()))
            else:
                assert n == 0
        self._check_room(slots, table, self.size)
        return self._rows()

    def queue_size(self, num_rows):
        return num_rows

    def decode(self, params, rows, key, request: DecodeRequest):
        names, begins, budget, min_finished, max_steps, table, queue, *_ = request
        assert rows is self.current
        assert sorted(queue) == list(range(len(self.phase)))
        if table is not None:
            held = table[table < self.num_pages].tolist()
            assert len(held) == len(set(held))
        ready = [phase == "ready" for phase in self.phase]
        assert begins.tolist() == ready
        assert (budget == budget[0]).all() and max_steps >= 1
        self.sample = names[:, 1].tolist()
        for slot in np.flatnonzero(begins):
            self._begin(slot)
        active = self.turn.active
        assert 1 <= min_finished <= active.sum()
        self.writers.append(
            [(int(s), self.sample[s], self.number[s]) for s in np.flatnonzero(active)]
        )
        stays, step = active.sum() - min_finished, 0
        while step < max_steps and active.sum() > stays:
            step += 1
            for slot in np.flatnonzero(active):
                self._write(slot, names[slot].tolist())
        self.steps.append(step)
        return self._rows()

    def _begin(self, slot):
        self.number[slot] += 1
        self.phase[slot] = "writing"
        self.turn.tokens[slot], self.turn.logp[slot] = UNUSED, -9
        self.turn.count[slot], self.turn.active[slot] = 0, True

    def _write(self, slot, name):
        text = self.turns[self.sample[slot]][self.number[slot]]
        ids = tiny.tokenizer().encode(text)
        n = self.turn.count[slot]
        self.turn.tokens[slot, n] = ids[n]
        self.turn.logp[slot, n] = -1 - self.sample[slot]
        self.turn.count[slot] += 1
        self.ids[slot].append(int(ids[n]))
        if n + 1 == len(ids):
            self.phase[slot], self.turn.active[slot] = "paused", False
            self.whole[tuple(name)] = list(self.ids[slot])


def find(queries):
    """Return the passage about the city for every query; the query 'bad' fails."""
    city = (Passage("c", "city\nin the river " * 4),)
    return [None if q == "bad" else city for q in queries]


def make_host(search=find, on_change=None, **limits):
    """Return a Host with Search-R1's protocol."""
    limits = dataclasses.replace(LIMITS, **limits)
    return Host(tiny.tokenizer(), SEARCH_R1, search, limits, on_change=on_change)


def people(count):
    return [Question(f"q{i}", f"who {i}", ("x",)) for i in range(count)]


def play(
    turns,
    questions=(WHO,),
    num_rows=None,
    host=None,
    search_seconds=60.0,
    **settings,
):
    """Return (groups, script) of rollouts whose sample j writes turns[j]."""
    script, host = Script(turns), host or make_host()
    engine = RolloutEngine(
        script,
        host,
        num_rows=num_rows or len(turns),
        group_size=len(turns),
        search_seconds=search_seconds,
    )
    return engine(None, list(questions), jax.random.key(0), **settings), script


def assert_rows_held(groups, script):
    """Check that each rollout holds the very ids that its row has read and written."""
    for group in groups:
        name = zlib.crc32(group.question.id.encode())
        for sample, rollout in enumerate(group.rollouts):
            held = script.whole[name, sample]
            assert held == tiny.row_of(rollout).tolist()
    assert len(script.whole) == sum(len(g.rollouts) for g in groups)

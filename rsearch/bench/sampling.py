"""This package as a subject of the rollout benchmarks."""

import pathlib
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.bench.precision import multiply_in_full
from rsearch.bench.workload import prompt_tokens, turn_lengths
from rsearch.models.decoder import Decoder, param_shapes
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.sharding import make_mesh, param_shardings
from rsearch.models.tokenizer import load_tokenizer
from rsearch.protocols.base import Protocol
from rsearch.retrieval.service import OVERLAPPING
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.decode import Sampler
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.tools.search import search_call
from rsearch.types import (
    Observation,
    Passage,
    Question,
)

CHUNK = 512  # prompt tokens that go through the model at once, of each row
FAR = "Silver Harbour was filmed in Goldberg, where the river ends. "


def load(model: str, dtype: str):
    """(network, placed parameters, mesh) of a Hugging Face directory."""
    multiply_in_full(dtype)
    spec, mesh = read_spec(model), make_mesh(devices=jax.devices()[:1])
    shardings = param_shardings(param_shapes(spec), mesh)
    params = huggingface.load_params(model, spec, shardings=shardings)
    return Decoder(spec, dtype=jnp.dtype(dtype)), params, mesh


def make_decode(*, model, batch, num_prompt, num_new, dtype="float32"):
    """Greedy decoding of B prompts, N tokens each, all at once."""
    network, params, mesh = load(model, dtype)
    vocab_size = network.spec.vocab_size
    sampler = Sampler(
        network,
        mesh,
        stop_table=token_automaton((), [b""] * vocab_size),
        eos_ids=(),
        num_slots=num_prompt + num_new,
        max_turn_tokens=num_new,
        chunk=CHUNK,
        temperature=0.0,
        top_p=1.0,
    )
    params = sampler.place_params(params)
    tokens = prompt_tokens(batch, num_prompt, vocab_size)
    count = np.full(batch, num_prompt, np.int32)
    every, is_row = np.arange(batch, dtype=np.int32), np.ones(batch, bool)
    names, budget = np.zeros((batch, 2), np.uint32), np.full(batch, num_new, np.int32)

    def once():
        empty = jax.block_until_ready(sampler.empty(batch))
        started = time.perf_counter()
        prompts = jax.block_until_ready(sampler.prefill(params, tokens, count))
        read = time.perf_counter()
        rows = sampler.admit(empty, prompts, every, every)
        key = jax.random.key(0)
        request = DecodeRequest(names, is_row, budget, batch, num_new)
        rows = sampler.decode(params, rows, key, request)
        turn = sampler.turns_on_host(rows)
        ended = time.perf_counter()
        return {
            "seconds": ended - read,
            "prefill_seconds": read - started,
            "tokens": turn.tokens.tolist(),
        }

    return once


class CountedSampler(Sampler):
    """A Sampler that counts the tokens it was given to read, and fixes each turn's.

    Args:
        lengths: [questions, G, turns] tokens of each turn.
    """

    def __init__(self, *args, lengths, **settings):
        super().__init__(*args, **settings)
        self.num_read = {"prompts": 0, "observations": 0}
        self._lengths = lengths
        self._names = {zlib.crc32(str(i).encode()): i for i in range(len(lengths))}
        self._turns = np.zeros(lengths.shape[:2], int)  # begun so far
        prefill, extend, decode = self.prefill, self.extend, self.decode

        def counted_prefill(params, tokens, count):
            # A row that nobody asked for reads one token.
            self.num_read["prompts"] += int(count[count > 1].sum())
            return prefill(params, tokens, count)

        def counted_extend(params, rows, slots, tokens, count, table=None):
            self.num_read["observations"] += int(np.sum(count))
            return extend(params, rows, slots, tokens, count, table)

        def fixed_decode(params, rows, key, request):
            budget = self._budgets(request.names, request.begins, request.budget)
            return decode(params, rows, key, request._replace(budget=budget))

        self.prefill, self.extend = counted_prefill, counted_extend
        self.decode = fixed_decode

    def begin(self):
        """All rollouts begin anew."""
        self._turns[:] = 0

    def _budgets(self, names, begins, budget):
        """[B] tokens of the turns that begin, or go on."""
        budget = budget.copy()
        for slot, (name, sample) in enumerate(names):
            own = self._names.get(int(name)), int(sample)
            if own[0] is None:
                continue  # nobody's slot yet
            self._turns[own] += begins[slot]
            turn = self._turns[own] - 1
            if turn >= 0:
                budget[slot] = self._lengths[(*own, turn)]
        return budget


def turns_protocol() -> Protocol:
    """The policy searches in every turn but the last, whatever it writes."""
    return Protocol(
        name="turns",
        system=None,
        user="{question}",
        add_question_mark=False,
        stop_strings=(),
        parse=lambda turn: search_call(turn),
        show_passages=lambda queries, found: Observation(
            "", "".join(p.contents for passages in found for p in passages), ""
        ),
        render=lambda action: "",
        write=lambda step: "",
        is_chat=False,
    )


def search_for(text: str, seconds: float):
    """A SearchFn that finds this text; where it takes its time, as a service does."""

    def search(queries):
        time.sleep(seconds)
        return [(Passage("p", text),) for _ in queries]

    search.searches_at_once = OVERLAPPING if seconds else 1
    return search


def make_turns(
    *,
    model,
    batch,
    num_prompt,
    num_new,
    num_observed,
    num_turns,
    num_rollouts,
    group_size=1,
    spread=0.0,
    delay_seconds=0.0,
    times_longer=1,
    room=1,
    dtype="float32",
):
    """Rollouts in turns of N tokens, with what is read between them.

    Args:
        model, dtype: of the policy.
        batch: slots.
        num_prompt, num_new, num_observed: tokens of a prompt, a turn, an observation.
        num_turns: of each rollout; it searches in all but the last.
        num_rollouts: in all.
        group_size: of them, of each question.
        spread: see `turn_lengths`.
        delay_seconds: that each search takes.
        times_longer: the turns of the first rollout are than those of the others.
        room: budgets are for a rollout so many times longer, whether there is one.
    """
    network, params, mesh = load(model, dtype)
    tokenizer = load_tokenizer(pathlib.Path(model))
    text = FAR * -(-num_observed // len(FAR.split()))  # a word is a token at least
    lengths = turn_lengths(num_rollouts, num_turns, num_new, spread)
    largest = lengths.copy()
    largest[0] *= max(room, times_longer)
    lengths[0] *= times_longer
    longest = int(largest.max())
    limits = Limits(
        max_searches=num_turns - 1,
        max_prompt_tokens=num_prompt,
        max_turn_tokens=longest,
        max_observation_tokens=num_observed,
    )

    host = Host(tokenizer, turns_protocol(), search_for(text, delay_seconds), limits)
    sampler = CountedSampler(
        network,
        mesh,
        lengths=lengths.reshape(-1, group_size, num_turns),
        stop_table=token_automaton((), tokenizer.token_bytes),
        eos_ids=(),
        num_slots=num_prompt
        + int(largest.sum(axis=1).max())
        + (num_turns - 1) * num_observed,
        max_turn_tokens=longest,
        chunk=CHUNK,
        temperature=0.0,
        top_p=1.0,
    )
    params = sampler.place_params(params)
    engine = RolloutEngine(
        sampler,
        host,
        num_rows=batch,
        group_size=group_size,
        searches_at_once=host.searches_at_once,
    )
    count = num_rollouts // group_size
    prompts = prompt_tokens(count, num_prompt, network.spec.vocab_size)
    engine.prompt = lambda question: prompts[int(question.id)]
    questions = [Question(str(i), "", ("",)) for i in range(count)]

    def once():
        before = dict(sampler.num_read)
        sampler.begin()
        started = time.perf_counter()
        groups = engine(params, questions, jax.random.key(0))
        seconds = time.perf_counter() - started
        rollouts = [r for g in groups for r in g.rollouts]
        read = {n: c - before[n] for n, c in sampler.num_read.items()}
        searches = sum(len(r.searches) for r in rollouts)
        return {
            "seconds": seconds,
            "written": sum(r.num_policy_tokens for r in rollouts),
            "tokens read per search": read["observations"] / searches,
            "tokens read": sum(read.values()),
            "writing at once": sampler.queue_size(batch),
        }

    return once

"""Rollouts measured: decoding, conversations of several turns, and waiting."""

import pathlib
import statistics
import time
import zlib

import jax
import numpy as np

from rsearch.bench.comparison import OURS, Bench, Row, Subject, bounded, compare, row_of
from rsearch.bench.networks import (
    SHAPES,
    check_choices,
    decode_work,
    load,
    model_directory,
    read_work,
    turns_work,
)
from rsearch.bench.workload import prompt_tokens, turn_lengths
from rsearch.models.hf.families import read_spec
from rsearch.models.spec import DecoderSpec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.protocols.base import Protocol
from rsearch.retrieval.service import OVERLAPPING
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.decode import Sampler
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.tools.search import search_call
from rsearch.types import Observation, Passage, Question

FLAGS = {
    "model": ("", "Hugging Face directory; random weights of --shape where not given"),
    "shape": ("smollm2", f"of random weights: {', '.join(SHAPES)}"),
    "dtype": ("float32", "of weights and computing: float32 or bfloat16"),
    "cases": ("decode,turns,delay,straggler", "which to measure"),
    "batch": ("8,32", "rows decoded at once, for decode"),
    "prompt_tokens": (128, "of each row"),
    "new_tokens": (64, "tokens that each row writes, in each turn"),
    "turn_batch": (8, "rows written at once in conversations of several turns"),
    "turn_rollouts": (16, "such conversations"),
    "turn_group": (4, "of each question"),
    "turn_spread": (0.5, "share that a turn may be longer or shorter than new_tokens"),
    "turns": (4, "of a conversation"),
    "observation_tokens": (300, "read between two turns"),
    "waiting_shape": ("quickstart", "of random weights, for delay and straggler"),
    "slots": (256, "rollouts open at once, likewise"),
    "rollouts": (256, "of a repetition, likewise"),
    "delay": (200, "milliseconds that each search takes, for delay"),
}
CASES = ("decode", "turns", "delay", "straggler")
PEER = "transformers"


def measure(
    bench: Bench,
    *,
    model,
    shape,
    dtype,
    cases,
    batch,
    prompt_tokens,
    new_tokens,
    turn_batch,
    turn_rollouts,
    turn_group,
    turn_spread,
    turns,
    observation_tokens,
    waiting_shape,
    slots,
    rollouts,
    delay,
) -> list[Row]:
    """The rows of the cases that are asked for; see FLAGS.

    Raises:
        ValueError: an unknown case or shape, a dtype that is not measured, or numbers
            of conversations that do not go together.
    """
    asked = check_choices(cases, CASES, shape, dtype)
    check_choices(cases, CASES, waiting_shape, dtype)
    if turn_rollouts % turn_group:
        raise ValueError(
            f"--turn_rollouts={turn_rollouts}: must be a multiple of "
            f"--turn_group={turn_group}"
        )
    if not 0 <= turn_spread < 1:
        raise ValueError(f"--turn_spread={turn_spread}: must be 0 or more, below 1")
    batches = _numbers("batch", batch)
    rows = []
    waiting = {"shape": waiting_shape, "slots": slots, "rollouts": rollouts}
    if "delay" in asked:
        rows += measure_delay(bench, **waiting, milliseconds=delay)
    if "straggler" in asked:
        rows += measure_straggler(bench, **waiting)
    if not {"decode", "turns"} & set(asked):
        return rows
    with model_directory(model, SHAPES[shape]) as directory:
        spec = read_spec(directory)
        settings = {
            "model": directory,
            "dtype": dtype,
            "num_prompt": prompt_tokens,
            "num_new": new_tokens,
        }
        if "decode" in asked:
            for rows_at_once in batches:
                own = settings | {"batch": rows_at_once}
                rows += _decoding(bench, spec, own)
        if "turns" in asked:
            own = settings | {
                "batch": turn_batch,
                "num_rollouts": turn_rollouts,
                "group_size": turn_group,
                "spread": turn_spread,
                "num_turns": turns,
                "num_observed": observation_tokens,
            }
            rows += _conversing(bench, spec, own)
    return rows


def _numbers(flag, text) -> list[int]:
    """Those between commas, each at least 1.

    Raises:
        ValueError: something else is there.
    """
    numbers = [int(n) if n.strip().isdecimal() else 0 for n in text.split(",")]
    if not all(numbers):
        raise ValueError(f"--{flag}={text}: expected numbers of at least 1, as in 8,32")
    return numbers


def _both(bench, make, settings):
    """What this package and its peer do with the same settings."""
    subjects = {
        OURS: Subject("rsearch.bench.rollout", settings, make),
        PEER: Subject("rsearch.bench.peers", settings, make),
    }
    return compare(subjects, bench.repeats)


def _decoding(bench: Bench, spec: DecoderSpec, settings) -> list[Row]:
    """Tokens a second of decoding and of prefill, each by both."""
    batch, num_new = settings["batch"], settings["num_new"]
    dtype = settings["dtype"]
    found = _both(bench, "make_decode", settings)
    ours = found[OURS]
    rows = []
    for name, told in found.items():
        if isinstance(told, str):
            rows.append(row_of(f"decode, {batch} rows", name, "tokens/s", told))
            continue
        counts = {"ms a step": 1e3 * _median(told, "seconds") / num_new}
        if name != OURS:
            counts["equal tokens"] = _equal(told[0]["tokens"], ours[0]["tokens"])
        row = row_of(
            f"decode, {batch} rows",
            name,
            "tokens/s",
            [batch * num_new / one["seconds"] for one in told],
            ours=[batch * num_new / one["seconds"] for one in ours],
            peak_bytes=_median(told, "peak_bytes"),
            counts=counts,
        )
        flops, moved = decode_work(spec, **settings)
        seconds = _median(told, "seconds")
        rows.append(bounded(row, bench.machine, seconds, (flops, moved), dtype=dtype))
        read = batch * settings["num_prompt"]
        row = row_of(
            f"prefill, {batch} rows",
            name,
            "tokens/s",
            [read / one["prefill_seconds"] for one in told],
            ours=[read / one["prefill_seconds"] for one in ours],
        )
        flops, moved = read_work(spec, read, dtype)
        seconds = _median(told, "prefill_seconds")
        rows.append(bounded(row, bench.machine, seconds, (flops, moved), dtype=dtype))
    return sorted(rows, key=lambda row: row.case)


def _conversing(bench: Bench, spec: DecoderSpec, settings) -> list[Row]:
    """Tokens written a second in conversations of several turns."""
    case = "{num_turns} turns, {num_rollouts} rollouts on {batch} rows"
    case = case.format(**settings)
    found = _both(bench, "make_turns", settings)
    phases, rows = turns_work(spec, found[OURS][0], **settings), []
    for name, told in found.items():
        if isinstance(told, str):
            rows.append(row_of(case, name, "tokens/s", told))
            continue
        counts = {n: told[0][n] for n in told[0] if n.startswith("tokens read")}
        row = row_of(
            case,
            name,
            "tokens/s",
            [one["written"] / one["seconds"] for one in told],
            ours=[one["written"] / one["seconds"] for one in found[OURS]],
            peak_bytes=_median(told, "peak_bytes"),
            counts=counts,
        )
        seconds = _median(told, "seconds")
        rows.append(
            bounded(row, bench.machine, seconds, *phases, dtype=settings["dtype"])
        )
    return rows


def _median(told, name):
    return statistics.median(one[name] for one in told)


def _equal(left, right) -> float:
    """Share of tokens that are the same."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y)]
    return sum(a == b for a, b in pairs) / len(pairs)


SHAPE = {  # of rollouts, as configs/quickstart.py has them
    "num_prompt": 16,
    "num_new": 18,
    "num_observed": 22,
    "num_turns": 3,
    "dtype": "float32",
}
TIMES_LONGER = 10


def measure_delay(bench: Bench, *, shape, slots, rollouts, milliseconds) -> list[Row]:
    """Tokens a second with every search delayed, beside those without.

    A row that searches waits; its slot is nobody else's. So many slots finish at most
    `slots` rollouts in the time that one waits for its searches and writes, beside as
    many as write at once: `most` tells what share of the tokens a second this leaves,
    whatever is done meanwhile.

    Args:
        bench: see `Bench`.
        shape: a key of SHAPES.
        slots: rollouts open at once.
        rollouts: of each repetition.
        milliseconds: that each search takes.
    """
    settings = SHAPE | {"batch": slots, "num_rollouts": rollouts}
    delayed = f"{OURS}, searches of {milliseconds} ms"
    seconds = milliseconds / 1e3
    changes = {OURS: {}, delayed: {"delay_seconds": seconds}}
    found = _compared(bench, shape, settings, changes)
    case = f"delay, {slots} slots, {rollouts} rollouts"
    rates = {
        name: [one["written"] / one["seconds"] for one in told]
        for name, told in found.items()
    }
    each = SHAPE["num_turns"] * SHAPE["num_new"]
    without = statistics.median(rates[OURS])
    waited = seconds * (SHAPE["num_turns"] - 1)
    writing = each * found[OURS][0]["writing at once"] / without
    most = slots * each / (waited + writing)
    share = statistics.median(rates[delayed]) / without
    counts = {"share of without": share, "most": min(1.0, most / without)}
    return [
        row_of(
            case,
            name,
            "tokens/s",
            values,
            ours=rates[OURS],
            counts=counts if name == delayed else {},
        )
        for name, values in rates.items()
    ]


def measure_straggler(bench: Bench, *, shape, slots, rollouts) -> list[Row]:
    """Seconds of rollouts of which the first is ten times longer, beside none.

    Both have the budgets that the long one needs, as one configuration has.

    Args:
        bench, shape, slots, rollouts: as in `measure_delay`.
    """
    settings = SHAPE | {"batch": slots, "num_rollouts": rollouts}
    longer = f"{OURS}, one {TIMES_LONGER} times longer"
    changes = {
        OURS: {"room": TIMES_LONGER},
        longer: {"times_longer": TIMES_LONGER},
    }
    found = _compared(bench, shape, settings, changes)
    seconds = {name: [one["seconds"] for one in told] for name, told in found.items()}
    case = f"straggler, {slots} slots, {rollouts} rollouts"
    return [
        row_of(case, name, "s", values, ours=seconds[OURS], more_is_better=False)
        for name, values in seconds.items()
    ]


def _compared(bench, shape, settings, changes):
    """This package twice, with and without these settings."""
    with model_directory("", SHAPES[shape]) as directory:
        whole = settings | {"model": directory}
        subjects = {
            name: Subject("rsearch.bench.rollout", whole | own, "make_turns")
            for name, own in changes.items()
        }
        return compare(subjects, bench.repeats)


CHUNK = 512  # prompt tokens that go through the model at once, of each row
FAR = "Silver Harbour was filmed in Goldberg, where the river ends. "


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

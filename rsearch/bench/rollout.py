"""Measure rollouts: decoding, conversations of several turns, and waiting."""

import pathlib
import statistics
import time
import zlib
from collections.abc import Callable

import jax
import numpy as np

from rsearch.bench.child import Repetition
from rsearch.bench.comparison import (
    OURS,
    Bench,
    Measurement,
    Subject,
    compare,
    find_python,
    make_case_rows,
    median_of,
    with_bound,
)
from rsearch.bench.networks import (
    SHAPES,
    TEXT,
    decode_work,
    load_network,
    model_directory,
    parse_cases,
    parse_numbers,
    read_work,
    turns_work,
)
from rsearch.bench.workload import prompt_tokens, turn_lengths
from rsearch.models.decoder import Decoder
from rsearch.models.hf.families import read_spec
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.spec import DecoderSpec
from rsearch.models.tokenizer import load_tokenizer
from rsearch.protocols.base import Protocol
from rsearch.retrieval.service import CONCURRENT_SEARCHES
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.decode import Sampler
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.tools.search import search_call
from rsearch.types import Observation, Passage, Question

FLAGS = {
    "model": ("", "Hugging Face directory; random weights of --shape if not given"),
    "shape": ("smollm2", f"shape of random weights: {', '.join(SHAPES)}"),
    "dtype": (
        "float32",
        "dtype of weights and computation in decode and turns: float32 or bfloat16",
    ),
    "cases": ("decode,turns,delay,straggler", "cases to measure"),
    "batch": ("8,32", "rows decoded together, in case decode"),
    "prompt_tokens": (128, "prompt tokens of each row"),
    "new_tokens": (64, "tokens that each row writes, in each turn"),
    "turn_batch": (8, "rows decoded together, in case turns"),
    "turn_rollouts": (16, "conversations, in case turns"),
    "turn_group": (4, "conversations of each question"),
    "turn_spread": (0.5, "share by which turns differ from new_tokens, up or down"),
    "turns": (4, "turns of a conversation"),
    "observation_tokens": (300, "tokens read between two turns"),
    "waiting_shape": ("quickstart", "shape of random weights, in delay and straggler"),
    "max_concurrent": (256, "rollouts in progress at once, in delay and straggler"),
    "rollouts": (256, "rollouts of a repetition, in delay and straggler"),
    "delay": (200, "milliseconds that each search takes, in case delay"),
    "ctranslate2_python": ("", "interpreter with ctranslate2, if this one lacks it"),
    "openvino_python": ("", "interpreter with openvino-genai and optimum-intel"),
    "vllm_python": ("", "interpreter with vllm"),
}
CASES = ("decode", "turns", "delay", "straggler")
PEER = "transformers"
RIVALS = {f"{PEER}, bfloat16": f"{OURS}, bfloat16"}  # compared in the same dtype
ENGINES = {"ctranslate2": "CTranslate2", "openvino": "OpenVINO", "vllm": "vLLM"}
WAITING = {  # sizes of rollouts for delay and straggler, as in configs/quickstart.py
    "num_prompt": 16,
    "num_new": 18,
    "num_observed": 22,
    "num_turns": 3,
    "dtype": "float32",
}
TIMES_LONGER = 10
CHUNK = 512  # prompt tokens of each row in one forward pass
PASSAGE = "Silver Harbour was filmed in Goldberg, where the river ends. "


def measure(
    start: Callable[[], Bench],
    *,
    model: str,
    shape: str,
    dtype: str,
    cases: str,
    batch: str,
    prompt_tokens: int,
    new_tokens: int,
    turn_batch: int,
    turn_rollouts: int,
    turn_group: int,
    turn_spread: float,
    turns: int,
    observation_tokens: int,
    waiting_shape: str,
    max_concurrent: int,
    rollouts: int,
    delay: int,
    ctranslate2_python: str,
    openvino_python: str,
    vllm_python: str,
) -> list[Measurement]:
    """Return the rows of the chosen cases; see FLAGS.

    Args:
        start: probes the machine.

    Raises:
        ValueError: an unknown case or shape, a dtype that is not measured, or sizes of
            conversations that do not match.
    """
    case_names = parse_cases(
        cases,
        CASES,
        dtype=dtype,
        model=model,
        shape=shape,
        waiting_shape=waiting_shape,
    )
    if turn_rollouts % turn_group:
        raise ValueError(
            f"--turn_rollouts={turn_rollouts}: must be a multiple of "
            f"--turn_group={turn_group}"
        )
    if not 0 <= turn_spread < 1:
        raise ValueError(f"--turn_spread={turn_spread}: must be at least 0, below 1")
    batches = parse_numbers("batch", batch)
    pythons = {
        "ctranslate2": find_python("ctranslate2_python", ctranslate2_python),
        "openvino": find_python("openvino_python", openvino_python),
        "vllm": find_python("vllm_python", vllm_python),
    }
    rows, bench = [], start()
    waiting = {
        "shape": waiting_shape,
        "max_concurrent": max_concurrent,
        "rollouts": rollouts,
    }
    if "delay" in case_names:
        rows += measure_delay(bench, **waiting, milliseconds=delay)
    if "straggler" in case_names:
        rows += measure_straggler(bench, **waiting)
    if not {"decode", "turns"} & set(case_names):
        return rows
    with model_directory(model, SHAPES[shape]) as directory:
        spec = read_spec(directory)
        settings = {
            "model": directory,
            "dtype": dtype,
            "num_prompt": prompt_tokens,
            "num_new": new_tokens,
        }
        if "decode" in case_names:
            for rows_at_once in batches:
                sizes = settings | {"batch": rows_at_once}
                rows += measure_decode(bench, spec, sizes, pythons)
        if "turns" in case_names:
            settings |= {
                "batch": turn_batch,
                "num_rollouts": turn_rollouts,
                "group_size": turn_group,
                "spread": turn_spread,
                "num_turns": turns,
                "num_observed": observation_tokens,
            }
            rows += measure_conversations(bench, spec, settings, pythons)
    return rows


def _subjects(work, settings, pythons):
    """Return all subjects for "decode" or "turns", with the same settings.

    Args:
        work: part of the functions' names: `make_<work>`, or `make_<engine>_<work>`.
        settings: settings of all subjects. If they use float32, this package and
            transformers are measured in bfloat16 as well.
        pythons: {engine: its interpreter}; other engines are left out.
    """
    subjects = {}
    dtypes = {"": settings["dtype"]}
    if settings["dtype"] == "float32":
        dtypes[", bfloat16"] = "bfloat16"
    for suffix, dtype in dtypes.items():
        for name, module in ((OURS, "rollout"), (PEER, "peers")):
            subjects[f"{name}{suffix}"] = Subject(
                f"rsearch.bench.{module}", settings | {"dtype": dtype}, f"make_{work}"
            )
    for engine, python in pythons.items():
        subjects[ENGINES[engine]] = Subject(
            "rsearch.bench.engines",
            settings,
            f"make_{engine}_{work}",
            python=python,
        )
    return subjects


def measure_decode(
    bench: Bench, spec: DecoderSpec, settings: dict, pythons: dict[str, str]
) -> list[Measurement]:
    """Return tokens a second of decoding and of prefill, for all subjects.

    Args:
        pythons: {engine: its interpreter}; other engines are left out.
    """
    subjects = _subjects("decode", settings, pythons)
    batch = settings["batch"]
    num_new = settings["num_new"]
    num_read = batch * settings["num_prompt"]
    results = compare(subjects, bench.repeats, are_short=True)

    def counts(name, runs):
        counts = {"ms a step": 1e3 * median_of(runs, "seconds") / num_new}
        if name != OURS:
            expected = results[OURS][0]["tokens"]
            counts["equal tokens"] = _equal_share(runs[0]["tokens"], expected)
        return counts

    def bound_decode(row, runs):
        settings = subjects[row.subject].settings
        work = decode_work(spec, **settings)
        seconds = median_of(runs, "seconds")
        return with_bound(row, bench.machine, seconds, work, dtype=settings["dtype"])

    def bound_prefill(row, runs):
        dtype = subjects[row.subject].settings["dtype"]
        work = read_work(spec, num_read, dtype)
        seconds = median_of(runs, "prefill_seconds")
        return with_bound(row, bench.machine, seconds, work, dtype=dtype)

    decoded = make_case_rows(
        f"decode, {batch} rows",
        "tokens/s",
        results,
        lambda run: batch * num_new / run["seconds"],
        counts=counts,
        bound=bound_decode,
        rivals=RIVALS,
    )
    read = make_case_rows(
        f"prefill, {batch} rows",
        "tokens/s",
        {name: runs for name, runs in results.items() if not isinstance(runs, str)},
        lambda run: num_read / run["prefill_seconds"],
        bound=bound_prefill,
        has_peak=False,
        rivals=RIVALS,
    )
    return decoded + read


def measure_conversations(
    bench: Bench, spec: DecoderSpec, settings: dict, pythons: dict[str, str]
) -> list[Measurement]:
    """Return tokens written a second in conversations of several turns.

    Args:
        bench, spec, settings, pythons: as in `measure_decode`. CTranslate2 is left out,
            since it keeps no cache between two requests.
    """
    pythons = {name: x for name, x in pythons.items() if name != "ctranslate2"}
    case = "{num_turns} turns, {num_rollouts} rollouts on {batch} rows"
    case = case.format(**settings)
    subjects = _subjects("turns", settings, pythons)
    results = compare(subjects, bench.repeats)

    def bound(row, runs):
        settings = subjects[row.subject].settings
        phases = turns_work(spec, results[OURS][0], **settings)
        seconds = median_of(runs, "seconds")
        return with_bound(row, bench.machine, seconds, *phases, dtype=settings["dtype"])

    return make_case_rows(
        case,
        "tokens/s",
        results,
        lambda run: run["written"] / run["seconds"],
        counts=lambda name, runs: {
            n: runs[0][n] for n in runs[0] if n.startswith("tokens read")
        },
        bound=bound,
        rivals=RIVALS,
    )


def _equal_share(rows, other_rows) -> float:
    """Return the share of tokens that are the same."""
    pairs = [
        pair
        for row, other in zip(rows, other_rows, strict=True)
        for pair in zip(row, other)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def measure_delay(
    bench: Bench, *, shape: str, max_concurrent: int, rollouts: int, milliseconds: int
) -> list[Measurement]:
    """Return tokens a second with every search delayed, and without any delay.

    A rollout that waits for a search keeps its slot. While one rollout waits for its
    searches and writes (taking turns with the rollouts of the other rows), at most
    `max_concurrent` rollouts finish. The count "most" is the highest share of the
    undelayed rate that this allows, however well the waiting is used.

    Args:
        max_concurrent: rollouts in progress at once.
        rollouts: rollouts of each repetition.
        milliseconds: time that each search takes.
    """
    delayed_name = f"{OURS}, searches of {milliseconds} ms"
    seconds = milliseconds / 1e3
    changes = {OURS: {}, delayed_name: {"delay_seconds": seconds}}
    results = _compare_changes(bench, shape, max_concurrent, rollouts, changes)
    num_tokens = WAITING["num_turns"] * WAITING["num_new"]  # written by a rollout
    rates = {
        name: statistics.median(run["written"] / run["seconds"] for run in runs)
        for name, runs in results.items()
    }
    undelayed_rate = rates[OURS]
    waiting_seconds = seconds * (WAITING["num_turns"] - 1)
    writing_seconds = num_tokens * results[OURS][0]["writing at once"] / undelayed_rate
    best_rate = max_concurrent * num_tokens / (waiting_seconds + writing_seconds)
    counts = {
        "share of without": rates[delayed_name] / undelayed_rate,
        "most": min(1.0, best_rate / undelayed_rate),
    }
    return make_case_rows(
        f"delay, {max_concurrent} at once, {rollouts} rollouts",
        "tokens/s",
        results,
        lambda run: run["written"] / run["seconds"],
        counts=lambda name, _: counts if name == delayed_name else {},
        has_peak=False,
    )


def measure_straggler(
    bench: Bench, *, shape: str, max_concurrent: int, rollouts: int
) -> list[Measurement]:
    """Return seconds of rollouts when one is ten times longer, and when none is.

    Both have the budgets that the long rollout needs, as in one configuration.

    Args:
        bench, shape, max_concurrent, rollouts: as in `measure_delay`.
    """
    straggler_name = f"{OURS}, one {TIMES_LONGER} times longer"
    changes = {
        OURS: {"room": TIMES_LONGER},
        straggler_name: {"times_longer": TIMES_LONGER},
    }
    results = _compare_changes(bench, shape, max_concurrent, rollouts, changes)
    return make_case_rows(
        f"straggler, {max_concurrent} at once, {rollouts} rollouts",
        "s",
        results,
        lambda run: run["seconds"],
        more_is_better=False,
        has_peak=False,
    )


def _compare_changes(bench, shape, max_concurrent, rollouts, changes):
    """Return {name: this package's results} for each named change of the settings."""
    settings = WAITING | {"batch": max_concurrent, "num_rollouts": rollouts}
    with model_directory("", SHAPES[shape]) as directory:
        settings["model"] = directory
        subjects = {
            name: Subject("rsearch.bench.rollout", settings | change, "make_turns")
            for name, change in changes.items()
        }
        return compare(subjects, bench.repeats)


def make_decode(
    *,
    model: str,
    batch: int,
    num_prompt: int,
    num_new: int,
    dtype: str = "float32",
    temperature: float = 0.0,
) -> Repetition:
    """Prepare the decoding of B prompts together, N tokens each."""
    network, params, mesh = load_network(model, dtype)
    vocab_size = network.spec.vocab_size
    sampler = Sampler(
        network,
        mesh,
        stop_table=token_automaton((), [b""] * vocab_size),
        eos_ids=(),
        num_slots=num_prompt + num_new,
        max_turn_tokens=num_new,
        chunk=CHUNK,
        temperature=temperature,
        top_p=1.0,
    )
    params = sampler.place_params(params)
    tokens = prompt_tokens(batch, num_prompt, vocab_size)
    count = np.full(batch, num_prompt, np.int32)
    slots = np.arange(batch, dtype=np.int32)
    is_row = np.ones(batch, bool)
    names = np.zeros((batch, 2), np.uint32)
    budget = np.full(batch, num_new, np.int32)

    def repeat():
        empty = jax.block_until_ready(sampler.empty(batch))
        start_time = time.perf_counter()
        prompts = jax.block_until_ready(sampler.prefill(params, tokens, count))
        prefill_end = time.perf_counter()
        rows = sampler.admit(empty, prompts, slots, slots)
        key = jax.random.key(0)
        request = DecodeRequest(names, is_row, budget, batch, num_new)
        rows = sampler.decode(params, rows, key, request)
        turn = sampler.turns_on_host(rows)
        end_time = time.perf_counter()
        return {
            "seconds": end_time - prefill_end,
            "prefill_seconds": prefill_end - start_time,
            "tokens": turn.tokens.tolist(),
        }

    return repeat


class CountedSampler(Sampler):
    """A Sampler that counts the tokens it reads, and fixes the length of each turn.

    Args:
        lengths: [questions, G, turns] tokens of each turn.
    """

    def __init__(self, *args, lengths: np.ndarray, **settings):
        super().__init__(*args, **settings)
        self.num_read = {"prompts": 0, "observations": 0}
        self._lengths = lengths
        self._names = {zlib.crc32(str(i).encode()): i for i in range(len(lengths))}
        self._turns = np.zeros(lengths.shape[:2], int)  # turns begun so far
        prefill, extend, decode = self.prefill, self.extend, self.decode

        def counted_prefill(params, tokens, count):
            # A row without a prompt reads one token, as its length must not be 0.
            self.num_read["prompts"] += int(count[count > 1].sum())
            return prefill(params, tokens, count)

        def counted_extend(params, rows, slots, tokens, count, table=None):
            self.num_read["observations"] += int(np.sum(count))
            return extend(params, rows, slots, tokens, count, table)

        def fixed_decode(params, rows, key, request):
            budget = self._budgets(request.names, request.begins, request.budget)
            return decode(params, rows, key, request._replace(budget=budget))

        self.prefill = counted_prefill
        self.extend = counted_extend
        self.decode = fixed_decode

    def restart(self) -> None:
        """Make all rollouts begin again with their first turn."""
        self._turns[:] = 0

    def _budgets(self, names, begins, budget):
        """Return [B] token budgets of the turns that begin or continue."""
        budget = budget.copy()
        for slot, (name, sample) in enumerate(names):
            question = self._names.get(int(name))
            if question is None:
                continue  # a slot that no rollout has taken yet
            rollout = question, int(sample)
            self._turns[rollout] += begins[slot]
            turn = self._turns[rollout] - 1
            if turn >= 0:
                budget[slot] = self._lengths[(*rollout, turn)]
        return budget


def turns_protocol() -> Protocol:
    """Return a protocol that searches in all turns but the last, whatever they say."""
    return Protocol(
        name="turns",
        system=None,
        user="{question}",
        add_question_mark=False,
        stop_strings=(),
        parse=lambda turn: search_call(turn),
        show_passages=lambda queries, results: Observation(
            "", "".join(p.contents for passages in results for p in passages), ""
        ),
        render=lambda action: "",
        write=lambda step: "",
        is_chat=False,
    )


def make_constant_search(text: str, seconds: float) -> Callable:
    """Return a SearchFn that always finds this text, after a delay like a service's."""

    def search(queries):
        time.sleep(seconds)
        return [(Passage("p", text),) for _ in queries]

    search.searches_at_once = CONCURRENT_SEARCHES if seconds else 1
    return search


def make_turns(
    *,
    model: str,
    batch: int,
    num_prompt: int,
    num_new: int,
    num_observed: int,
    num_turns: int,
    num_rollouts: int,
    group_size: int = 1,
    spread: float = 0.0,
    delay_seconds: float = 0.0,
    times_longer: int = 1,
    room: int = 1,
    dtype: str = "float32",
) -> Repetition:
    """Prepare rollouts in turns of N tokens, with observations read between them.

    Args:
        model, dtype: directory and dtype of the policy.
        batch: rows decoded together.
        num_prompt, num_new, num_observed: tokens of a prompt, a turn, an observation.
        num_turns: turns of each rollout, which searches in all but the last.
        num_rollouts: rollouts in all.
        group_size: rollouts of each question.
        spread: see `turn_lengths`.
        delay_seconds: time that each search takes.
        times_longer: factor by which the first rollout's turns are longer.
        room: factor by which budgets allow the first rollout's turns to be longer.
    """
    network, params, mesh = load_network(model, dtype)
    tokenizer = load_tokenizer(pathlib.Path(model))
    # A word is at least one token, so this fills the observation.
    text = PASSAGE * -(-num_observed // len(PASSAGE.split()))
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

    host = Host(
        tokenizer, turns_protocol(), make_constant_search(text, delay_seconds), limits
    )
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
    )
    count = num_rollouts // group_size
    prompts = prompt_tokens(count, num_prompt, network.spec.vocab_size)
    engine.prompt = lambda question: prompts[int(question.id)]
    questions = [Question(str(i), "", ("",)) for i in range(count)]

    def repeat():
        counts_before = dict(sampler.num_read)
        sampler.restart()
        start_time = time.perf_counter()
        groups = engine(params, questions, jax.random.key(0))
        seconds = time.perf_counter() - start_time
        rollouts = [r for g in groups for r in g.rollouts]
        num_read = {n: c - counts_before[n] for n, c in sampler.num_read.items()}
        searches = sum(len(r.searches) for r in rollouts)
        return {
            "seconds": seconds,
            "written": sum(r.num_policy_tokens for r in rollouts),
            "tokens read per search": num_read["observations"] / max(1, searches),
            "tokens read": sum(num_read.values()),
            "writing at once": sampler.queue_size(batch),
        }

    return repeat


def one_turn_engine(
    network: Decoder,
    mesh: jax.sharding.Mesh,
    *,
    num_rows: int,
    group_size: int,
    num_prompt: int,
    num_new: int,
) -> RolloutEngine:
    """Return a rollout engine whose conversations are one turn of N tokens."""
    tokenizer = train_tokenizer(TEXT * 2)
    limits = Limits(
        max_searches=0,
        max_prompt_tokens=num_prompt,
        max_turn_tokens=num_new,
        max_observation_tokens=1,
    )
    host = Host(tokenizer, turns_protocol(), lambda queries: [], limits)
    sampler = Sampler(
        network,
        mesh,
        stop_table=token_automaton((), tokenizer.token_bytes),
        eos_ids=(),
        num_slots=num_prompt + num_new,
        max_turn_tokens=num_new,
        chunk=num_prompt,
        temperature=1.0,
        top_p=1.0,
    )
    return RolloutEngine(sampler, host, num_rows=num_rows, group_size=group_size)

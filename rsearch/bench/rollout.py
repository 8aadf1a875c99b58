"""Rollouts measured: decoding, and conversations of several turns."""

import statistics

from rsearch.bench.children import Subject, compare
from rsearch.bench.rows import OURS, Bench, Row, bounded, row_of
from rsearch.bench.shapes import SHAPES, model_directory
from rsearch.bench.waiting import measure_delay, measure_straggler
from rsearch.models.hf.families import read_spec
from rsearch.models.spec import DecoderSpec

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
BYTES = {"float32": 4, "bfloat16": 2}
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


def check_choices(cases, known, shape, dtype) -> list[str]:
    """The cases that are asked for.

    Raises:
        ValueError: a case, a shape or a dtype that there is not.
    """
    asked = [name.strip() for name in cases.split(",")]
    if not set(asked) <= set(known):
        raise ValueError(f"--cases={cases}: must be of {', '.join(known)}")
    if shape not in SHAPES:
        raise ValueError(f"--shape={shape}: must be one of {', '.join(SHAPES)}")
    if dtype not in BYTES:
        raise ValueError(f"--dtype={dtype}: must be one of {', '.join(BYTES)}")
    return asked


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
        OURS: Subject("rsearch.bench.sampling", settings, make),
        PEER: Subject("rsearch.bench.torch_sampling", settings, make),
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


def turns_work(
    spec: DecoderSpec,
    told,
    *,
    batch,
    num_prompt,
    num_new,
    num_turns,
    num_observed,
    dtype,
    **_,
) -> list[tuple[float, float]]:
    """(operations, bytes moved) of reading and of writing conversations, at least.

    Each token is read once, and what a row writes lies behind half of the conversation.

    Args:
        told: of a repetition: tokens read, and tokens written.
        num_prompt, num_new, num_turns, num_observed, dtype: of the conversations.
    """
    behind = (num_prompt + num_turns * num_new + (num_turns - 1) * num_observed) / 2
    steps = told["written"] / batch
    own = {"batch": batch, "num_prompt": behind - steps / 2, "num_new": steps}
    return [
        read_work(spec, told["tokens read"], dtype),
        decode_work(spec, **own, dtype=dtype),
    ]


def decode_work(
    spec: DecoderSpec, *, batch, num_prompt, num_new, dtype, **_
) -> tuple[float, float]:
    """(operations, bytes moved) of N steps of decoding behind P tokens, at least.

    Each step multiplies by every parameter, and reads them once, but for an input table
    apart; it reads the keys and values of all tokens before it.
    """
    size, num_params = BYTES[dtype], num_multiplied(spec)
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    behind = num_new * (num_prompt + num_new / 2)  # tokens looked at, of a row
    heads = 4 * spec.num_layers * spec.num_heads * spec.head_dim
    flops = 2 * batch * num_new * num_params + batch * heads * behind
    return flops, size * (num_new * num_params + batch * kv * behind)


def read_work(spec: DecoderSpec, num_tokens, dtype) -> tuple[float, float]:
    """(operations, bytes moved) of reading tokens, their attention left out, at least.

    Only the last token of a row needs logits.
    """
    inner = num_multiplied(spec) - spec.vocab_size * spec.width
    return 2.0 * num_tokens * inner, float(BYTES[dtype] * inner)


def num_multiplied(spec: DecoderSpec) -> int:
    """Parameters that a token is multiplied by, and that are read for that.

    Where input and output embeddings are apart, of the input's a token takes a row.
    """
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.width
    return spec.num_params - table


def _median(told, name):
    return statistics.median(one[name] for one in told)


def _equal(left, right) -> float:
    """Share of tokens that are the same."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y)]
    return sum(a == b for a, b in pairs) / len(pairs)

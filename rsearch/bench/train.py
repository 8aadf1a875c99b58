"""Updates measured: forward, backward and AdamW, their time and their memory."""

import dataclasses
import statistics
import sys

from rsearch.bench.children import Subject, compare
from rsearch.bench.rollout import check_choices, decode_work, num_multiplied, read_work
from rsearch.bench.rows import OURS, Bench, Row, bounded, row_of
from rsearch.bench.shapes import SHAPES, model_directory, wide
from rsearch.models.hf.families import read_spec
from rsearch.models.spec import DecoderSpec

FLAGS = {
    "model": ("", "Hugging Face directory; random weights of --shape where not given"),
    "shape": ("smollm2", f"of random weights: {', '.join(SHAPES)}"),
    "dtype": ("float32", "of computing: float32 or bfloat16"),
    "cases": ("update,logits,grpo", "which to measure"),
    "rows": (8, "of an update"),
    "tokens": (1024, "of each row"),
    "micro_batch": (1, "rows that go through the network at once"),
    "peer_micro_batch": (8, "... of the peer, which is measured with 1, too"),
    "logit_chunk": (512, "tokens whose logits exist at once"),
    "vocabulary": (152064, "ids of the network with few parameters else, for logits"),
    "vocabulary_tokens": (2048, "tokens of its one row"),
    "vocabulary_chunk": (256, "... whose logits exist at once"),
    "grpo_shape": ("quickstart", "of the network whose whole steps are measured"),
    "questions": (8, "of such a step"),
    "group": (8, "rollouts of each"),
    "prompt_tokens": (32, "of each question"),
    "new_tokens": (64, "that each rollout writes"),
    "tunix_python": ("", "interpreter that has google-tunix, if this one has not"),
}
CASES = ("update", "logits", "grpo")
PEER = "torch"


def measure(bench: Bench, *, model, shape, dtype, cases, **sizes) -> list[Row]:
    """The rows of the cases that are asked for; see FLAGS.

    Raises:
        ValueError: an unknown case or shape, a dtype that is not measured, or rows that
            are no whole number of micro-batches.
    """
    asked = check_choices(cases, CASES, shape, dtype)
    if sizes["rows"] % min(sizes["micro_batch"], sizes["rows"]):
        raise ValueError(
            f"--rows={sizes['rows']}: must be a multiple of "
            f"--micro_batch={sizes['micro_batch']}"
        )
    rows = []
    if "update" in asked:
        with model_directory(model, SHAPES[shape]) as directory:
            rows += _updating(bench, directory, dtype, sizes)
    if "logits" in asked:
        with model_directory("", wide(sizes["vocabulary"])) as directory:
            rows += _with_many_ids(bench, directory, dtype, sizes)
    if "grpo" in asked:
        rows += _stepping(bench, sizes)
    return rows


def _updating(bench: Bench, model, dtype, sizes) -> list[Row]:
    """Tokens a second of an update by both, one process after the other."""
    num_rows, num_tokens = sizes["rows"], sizes["tokens"]
    own = {
        "model": model,
        "dtype": dtype,
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "micro_batch": min(sizes["micro_batch"], num_rows),
    }
    chunk = {"logit_chunk": sizes["logit_chunk"]}
    subjects = {OURS: Subject("rsearch.bench.updating", own | chunk, "make_update")}
    for micro_batch in sorted({min(sizes["peer_micro_batch"], num_rows), 1}):
        settings = own | {"micro_batch": micro_batch}
        name = f"{PEER}, {micro_batch} at once"
        subjects[name] = Subject(
            "rsearch.bench.torch_updating", settings, "make_update"
        )
    found = compare(subjects, bench.repeats, one_at_a_time=True)
    case = f"update, {num_rows} x {num_tokens} tokens"
    rows = _rows(case, found, num_rows * num_tokens, ("loss", "grad_norm"))
    spec = read_spec(model)
    flops, moved = update_work(spec, num_rows, num_tokens)
    return [
        row
        if row.missing
        else bounded(
            row,
            bench.machine,
            num_rows * num_tokens / row.value,
            (flops, moved),
            dtype=dtype,
        )
        for row in rows
    ]


def _with_many_ids(bench: Bench, model, dtype, sizes) -> list[Row]:
    """The memory of an update of a network that is little more than its vocabulary."""
    tokens = sizes["vocabulary_tokens"]
    settings = {
        "model": model,
        "dtype": dtype,
        "num_rows": 1,
        "num_tokens": tokens,
        "micro_batch": 1,
        "logit_chunk": min(sizes["vocabulary_chunk"], tokens),
    }
    name = "rsearch.bench.updating"
    subjects = {
        OURS: Subject(name, settings, "make_update"),
        "all logits at once": Subject(name, settings, "make_whole_logits"),
    }
    found = compare(subjects, bench.repeats, one_at_a_time=True)
    case = f"update, {sizes['vocabulary']} ids, {tokens} tokens"
    return _rows(case, found, tokens, ("loss",))


def _stepping(bench: Bench, sizes) -> list[Row]:
    """Seconds of whole GRPO steps of a small Llama, beside google-tunix's."""
    check_choices("grpo", CASES, sizes["grpo_shape"], "float32")
    settings = {
        "spec": dataclasses.asdict(SHAPES[sizes["grpo_shape"]]),
        "num_questions": sizes["questions"],
        "group_size": sizes["group"],
        "num_prompt": sizes["prompt_tokens"],
        "num_new": sizes["new_tokens"],
    }
    # Its micro-batches are of questions, this package's of rollouts.
    own = {"micro_batch": sizes["questions"] * sizes["group"]}
    python = sizes["tunix_python"] or sys.executable
    subjects = {
        OURS: Subject("rsearch.bench.stepping", settings | own, "make_step"),
        "google-tunix": Subject(
            "rsearch.bench.tunix_stepping",
            settings | {"micro_batch": sizes["questions"]},
            "make_step",
            python=python,
        ),
    }
    found = compare(subjects, bench.repeats)
    case = "GRPO step, {questions} x {group} rollouts".format(**sizes)
    seconds = {
        name: told if isinstance(told, str) else [one["seconds"] for one in told]
        for name, told in found.items()
    }
    ours = statistics.median(one["rollout seconds"] for one in found[OURS])
    spec, rows = SHAPES[sizes["grpo_shape"]], []
    phases = step_work(
        spec,
        num_questions=sizes["questions"],
        group_size=sizes["group"],
        num_prompt=sizes["prompt_tokens"],
        num_new=sizes["new_tokens"],
    )
    for name, values in seconds.items():
        row = row_of(
            case,
            name,
            "s",
            values,
            ours=seconds[OURS],
            more_is_better=False,
            counts={"rollouts": ours} if name == OURS else {},
        )
        if not row.missing:
            row = bounded(row, bench.machine, row.value, *phases)
        rows.append(row)
    return rows


def _rows(case, found, num_tokens, told_names) -> list[Row]:
    """Tokens a second and peak memory of each subject."""
    ours, rows = found[OURS], []
    peak = statistics.median(one["peak_bytes"] for one in ours)
    for name, told in found.items():
        if isinstance(told, str):
            rows.append(row_of(case, name, "tokens/s", told))
            continue
        own_peak = statistics.median(one["peak_bytes"] for one in told)
        counts = {name: told[0][name] for name in told_names}
        if name != OURS:
            counts = {"rsearch's share of the memory": peak / own_peak} | counts
        rows.append(
            row_of(
                case,
                name,
                "tokens/s",
                [num_tokens / one["seconds"] for one in told],
                ours=[num_tokens / one["seconds"] for one in ours],
                peak_bytes=own_peak,
                counts=counts,
            )
        )
    return rows


def step_work(
    spec: DecoderSpec, *, num_questions, group_size, num_prompt, num_new
) -> list[tuple[float, float]]:
    """(operations, bytes moved) of a GRPO step's phases in float32, at least.

    Prompts are read once a group; the reference scores and the policy learns from every
    token of all rollouts.
    """
    num_rows, num_tokens = num_questions * group_size, num_prompt + num_new
    own = {"batch": num_rows, "num_prompt": num_prompt, "num_new": num_new}
    flops, moved = update_work(spec, num_rows, num_tokens)
    return [
        read_work(spec, num_questions * num_prompt, "float32"),
        decode_work(spec, **own, dtype="float32"),
        (flops / 3, 4.0 * num_multiplied(spec)),  # scores: an update's forward pass
        (flops, moved),
    ]


def update_work(spec: DecoderSpec, num_rows, num_tokens) -> tuple[float, float]:
    """(operations, bytes moved) of an update in float32 moments, at least.

    Forward and twice as much backward; attention to the half of each row that lies
    before a token. Parameters are read for both passes, gradients written, and AdamW
    reads and writes parameters and both moments. Of an input table apart, few rows are
    read and have gradients, but AdamW changes all.
    """
    num_params = num_multiplied(spec)
    tokens = num_rows * num_tokens
    heads = 4 * spec.num_layers * spec.num_heads * spec.head_dim
    flops = 3 * (2 * tokens * num_params + tokens * heads * num_tokens / 2)
    return flops, 4.0 * (num_params * (2 + 1) + spec.num_params * (1 + 6))

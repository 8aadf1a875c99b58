"""Measure how costs grow with sizes, and with the length of a run.

Each case changes one size. The notes of a row have the exponents with which seconds and
memory have grown from the previous row: 1 is linear growth, 0 is none. The memory of a
process includes about 0.3 GB for its libraries, which does not grow.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from rsearch.bench.child import peak_bytes, reset_peak
from rsearch.bench.comparison import (
    OURS,
    ROOT,
    SHOWN_LINES,
    Bench,
    Measurement,
    Subject,
    compare,
    make_row,
    median_of,
)
from rsearch.bench.neighbours import many_vectors, read_texts, real_passages
from rsearch.bench.networks import (
    SHAPES,
    model_directory,
    parse_cases,
    parse_numbers,
    vocabulary_spec,
)
from rsearch.runtime.console import progress

CASES = ("rows", "context", "vocabulary", "corpus", "devices", "steps")
FLAGS = {
    "shape": ("quickstart", f"shape of random weights: {', '.join(SHAPES)}"),
    "dtype": ("float32", "dtype of computation: float32 or bfloat16"),
    "cases": (",".join(CASES), "cases to measure"),
    "rows": ("8,32,128,512", "rows decoded together, and rows of an update"),
    "contexts": ("512,1024,2048,4096,8192", "tokens of a row"),
    "vocabularies": ("4096,16384,65536,152064", "vocabulary sizes of a small network"),
    "passages": ("10000,100000,1000000", "passages of a corpus"),
    "devices": ("1,2,4,8", "devices simulated on this machine's processor"),
    "steps": (5000, "RL steps, each with two questions of four rollouts"),
}
NEW_TOKENS = 32  # tokens that a decoded row writes
ROW = 64  # tokens of a row, when rows or ids vary
CONTEXT_ROWS = 8  # rows decoded together, when contexts or ids vary
VOCABULARY_TOKENS = 1024  # tokens of an update, when ids vary
MICRO_BATCH = 8
LOGIT_CHUNK = 256
QUERIES, QUERIES_AT_ONCE, RECALL, NOISE = 1024, 256, 0.95, 0.5
SHORT_RUN = ("--config.sft.steps=120", "--config.rl.lr=1e-5")
TINY_STEP = (
    *("--config.rl.questions_per_step=2", "--config.rollout.group_size=4"),
    *("--config.rl.micro_batch=8",),
)
DEVICE_STEPS = 12
HALVINGS = 5  # of a run's steps, down to where the first measured window begins
SECONDS_BETWEEN_LOOKS = 0.02
ON_DISK = "MB on disk"


def measure(
    start: Callable[[], Bench],
    *,
    shape: str,
    dtype: str,
    cases: str,
    rows: str,
    contexts: str,
    vocabularies: str,
    passages: str,
    devices: str,
    steps: int,
) -> list[Measurement]:
    """Return the rows of the chosen cases; see FLAGS.

    Args:
        start: probes the machine.

    Raises:
        ValueError: an unknown case or shape, a dtype that is not measured, or sizes
            that are not numbers or are too small.
    """
    case_names = parse_cases(cases, CASES, dtype=dtype, shape=shape)
    row_numbers, context_sizes, id_numbers, corpus_sizes, device_numbers = (
        sorted({*parse_numbers(name, text)})
        for name, text in {
            "rows": rows,
            "contexts": contexts,
            "vocabularies": vocabularies,
            "passages": passages,
            "devices": devices,
        }.items()
    )
    if context_sizes[0] <= NEW_TOKENS:
        raise ValueError(
            f"--contexts={contexts}: expected more than {NEW_TOKENS} tokens"
        )
    if steps < 2**HALVINGS:
        raise ValueError(f"--steps={steps}, expected at least {2**HALVINGS}")
    spec, bench = SHAPES[shape], start()
    measurements = []
    if "rows" in case_names:
        with model_directory("", spec) as model:
            sizes = {n: (model, n, ROW) for n in row_numbers}
            measurements += _measure_network(bench, "rows", dtype, sizes, sizes)
    if "context" in case_names:
        with model_directory("", spec) as model:
            decoded = {n: (model, CONTEXT_ROWS, n) for n in context_sizes}
            updated = {n: (model, 1, n) for n in context_sizes}
            measurements += _measure_network(bench, "tokens", dtype, decoded, updated)
    if "vocabulary" in case_names:
        measurements += _measure_vocabularies(bench, dtype, id_numbers)
    if "corpus" in case_names:
        measurements += _measure_corpora(bench, corpus_sizes)
    if "devices" in case_names:
        measurements += _measure_devices(device_numbers)
    if "steps" in case_names:
        measurements += _measure_steps(steps)
    return measurements


def _measure_network(bench, unit, dtype, decoded, updated) -> list[Measurement]:
    """Return rows for prefill, decoding and updates at each size.

    Args:
        unit: unit of the size.
        decoded, updated: {size: (model's directory, rows, tokens of each row)}.
    """
    decoders = {
        size: Subject(
            "rsearch.bench.rollout",
            {
                "model": model,
                "batch": num_rows,
                "num_prompt": num_tokens - NEW_TOKENS,
                "num_new": NEW_TOKENS,
                "dtype": dtype,
                "temperature": 1.0,
            },
            "make_decode",
        )
        for size, (model, num_rows, num_tokens) in decoded.items()
    }
    updates = {
        size: Subject(
            "rsearch.bench.train",
            {
                "model": model,
                "num_rows": num_rows,
                "num_tokens": num_tokens,
                "micro_batch": math.gcd(num_rows, MICRO_BATCH),
                "logit_chunk": LOGIT_CHUNK,
                "dtype": dtype,
            },
            "make_update",
        )
        for size, (model, num_rows, num_tokens) in updated.items()
    }
    decode_results = _compare_sizes(bench, unit, decoders)
    update_results = _compare_sizes(bench, unit, updates)
    return [
        *_rows("prefill", unit, decode_results, "prefill_seconds"),
        *_rows(f"decode of {NEW_TOKENS} tokens", unit, decode_results),
        *_rows("update", unit, update_results),
    ]


def _measure_vocabularies(bench, dtype, id_numbers) -> list[Measurement]:
    """Return rows for a network that is mostly vocabulary, at each vocabulary size."""
    with contextlib.ExitStack() as stack:
        models = {
            n: stack.enter_context(model_directory("", vocabulary_spec(n)))
            for n in id_numbers
        }
        decoded = {n: (model, CONTEXT_ROWS, ROW) for n, model in models.items()}
        updated = {n: (model, 1, VOCABULARY_TOKENS) for n, model in models.items()}
        return _measure_network(bench, "ids", dtype, decoded, updated)


def _compare_sizes(bench, unit, subjects):
    """Measure {size: subject} one after another, and return {size: repetitions}."""
    subjects_by_name = {
        f"{OURS}, {size:,} {unit}": subject for size, subject in subjects.items()
    }
    results = compare(subjects_by_name, bench.repeats, one_at_a_time=True)
    return dict(zip(subjects, results.values(), strict=True))


def _measure_corpora(bench, corpus_sizes) -> list[Measurement]:
    """Return rows for indexing a corpus of text, and for ScaNN at a fixed recall."""
    with tempfile.TemporaryDirectory(prefix="rsearch-bench-") as folder:
        work = pathlib.Path(folder)
        world = {"corpus": "", "encoder": "hashed", "family": "", "index": ""}
        real = real_passages(work, **world, questions="", num_queries=QUERIES)
        _, passages = read_texts(real.folder)
        indexed = {}
        for size in corpus_sizes:
            corpus = work / f"{size}.jsonl"
            _write_corpus(corpus, passages, size)
            flags = ("--encoder=hashed", f"--out={work / f'index-{size}'}")
            indexed[size] = [
                measure_command("rsearch.index", f"--corpus={corpus}", *flags)
            ]
        subjects = {}
        for size in corpus_sizes:
            vectors = many_vectors(work, real, num=size, noise=NOISE)
            settings = {"folder": str(vectors.folder), "batch": QUERIES_AT_ONCE}
            subjects[size] = Subject(
                "rsearch.bench.neighbours", settings | {"recall": RECALL}, "make_scann"
            )
        searches = _compare_sizes(bench, "passages", subjects)
    return [
        *_rows("rsearch.index", "passages", indexed),
        *_rows(f"search for {QUERIES:,} queries", "passages", searches),
    ]


def _write_corpus(path, passages, num):
    """Write a corpus of `num` texts: the passages, repeated with a number added."""
    with path.open("w") as file:
        for i in range(num):
            contents = f"{passages.passage(i % len(passages)).contents} {i}"
            file.write(json.dumps({"id": str(i), "contents": contents}) + "\n")


# A process's peak memory is at least that of the process that starts it. This one holds
# more than some commands need, so a process that holds only 10 MB starts them.
STARTER = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
seconds = time.perf_counter() - started
peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes}))
"""


def measure_command(command: str, *arguments: str) -> dict:
    """Run a command of this package, and return its seconds and peak memory."""
    process = subprocess.run(
        [sys.executable, "-c", STARTER, sys.executable, "-m", command, *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
    )
    return json.loads(process.stdout)


def _measure_devices(device_numbers) -> list[Measurement]:
    """Return rows for the quickstart's step on simulated devices of this processor.

    The step and the processor stay the same, so growth is the cost of sharding.
    """
    results = {}
    for num in device_numbers:
        flags = f"--xla_force_host_platform_device_count={num}"
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        fields = (*SHORT_RUN, f"--config.mesh.fsdp={num}")
        results[num] = _time_training(fields, (2, DEVICE_STEPS), environment)
    return _rows("step of the quickstart", "simulated devices", results)


def _measure_steps(num_steps) -> list[Measurement]:
    """Return rows for the cost of a tiny step in a long run, by steps done so far."""
    ends = [num_steps >> n for n in range(HALVINGS, -1, -1)]
    spans = _time_training((*SHORT_RUN, *TINY_STEP), ends)
    results = {end: [span] for end, span in zip(ends[1:], spans, strict=True)}
    return _rows("tiny step", "steps done", results)


def _time_training(fields, ends, environment=None) -> list[dict]:
    """Train, and return the numbers of the steps from each end to the next one.

    Args:
        fields: flags that change fields of the quickstart's configuration.
        ends: ascending numbers of steps; the run is stopped at the last one.
        environment: variables added to those of this process.
    """
    spans = []
    with tempfile.TemporaryDirectory(prefix="rsearch-bench-") as folder:
        workdir, log = pathlib.Path(folder) / "run", pathlib.Path(folder) / "log"
        steps = f"--config.rl.steps={ends[-1]}"
        command = ("--config=configs/quickstart.py", f"--workdir={workdir}", steps)
        with log.open("w") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rsearch.train", *command, *fields],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | (environment or {}),
            )
        try:
            steps_done = _count_lines(workdir / "rl" / "metrics.jsonl")
            start_time, first = 0.0, 0
            for end in progress(ends, f"numbers of steps, to {ends[-1]}"):
                while next(steps_done) < end:
                    if process.poll() is not None:
                        lines = log.read_text().splitlines()[-SHOWN_LINES:]
                        raise RuntimeError("\n".join(["training ended:", *lines]))
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                end_time = time.perf_counter()
                if first:
                    span = {
                        "seconds": (end_time - start_time) / (end - first),
                        "peak_bytes": peak_bytes(process.pid),
                        ON_DISK: _bytes_below(workdir) / 1e6,
                    }
                    spans.append(span)
                reset_peak(process.pid)
                start_time, first = end_time, end
        finally:
            process.kill()
            process.wait()
    return spans


def _count_lines(path) -> Iterator[int]:
    """Yield the number of lines that a growing file has so far, again and again."""
    while not path.exists():
        yield 0
    lines = 0
    with path.open("rb") as file:
        while True:
            lines += file.read().count(b"\n")
            yield lines


def _bytes_below(folder) -> int:
    """Return the bytes of a directory's files, some of which may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _rows(case, unit, results, seconds="seconds") -> list[Measurement]:
    """Return a row for each size, with the exponents of growth from the previous size.

    Args:
        unit: unit of the size.
        results: {size: repetitions}, ascending.
        seconds: key of the seconds in a repetition's numbers.
    """
    rows, smaller = [], None
    for size, runs in results.items():
        name = f"{case}, {size:,} {unit}"
        if isinstance(runs, str):
            rows.append(make_row(name, OURS, "s", runs))
            smaller = None
            continue
        values = [run[seconds] for run in runs]
        peak = median_of(runs, "peak_bytes")
        row = make_row(name, OURS, "s", values, peak_bytes=peak)
        counts = {ON_DISK: runs[0][ON_DISK]} if ON_DISK in runs[0] else {}
        if smaller is not None:
            smaller_row, smaller_size = smaller
            ratio = math.log(size / smaller_size)
            log_seconds = math.log(row.value / smaller_row.value)
            log_bytes = math.log(row.peak_bytes / smaller_row.peak_bytes)
            counts |= {
                "exponent of seconds": round(log_seconds / ratio, 2),
                "exponent of memory": round(log_bytes / ratio, 2),
            }
        rows.append(dataclasses.replace(row, counts=counts))
        smaller = row, size
    return rows

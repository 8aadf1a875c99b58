"""Inject every exception that third-party code may raise, at every call of it.

    python -m tests.chaos.injections matrix
    python -m tests.chaos.injections run --injections=1000 --workdir=DIR

`matrix` raises each of `exceptions` at each of DOORS (calls into other code), on the
main thread and on another thread. It lists the pairs that end in anything but a typed
error or a counted failure. `run` trains a small model twice: once undisturbed, and once
with exceptions at random calls, restarted after each. It compares the two runs bit by
bit. With a workdir it continues where it stopped.
"""

import collections
import contextlib
import errno
import importlib
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np

from rsearch.config.recipes import is_user_error, parse_flags, run_command
from rsearch.hosts.preemption import PreemptedError
from rsearch.runtime import console
from rsearch.stages.state import StageState
from tests.chaos.resume import ALGORITHMS, SHORT, differences
from tests.small_run import arguments, run_python

FLAGS = {
    "injections": (1000, "number of exceptions raised during the run"),
    "seed": (0, "seed that selects the calls that fail"),
    "workdir": ("", "directory that keeps both runs (default: a temporary one)"),
}
MATRIX, RUN = "matrix", "run"


class Panic(BaseException):
    """An error that `except Exception` does not catch, such as a panic of Rust code."""


def exceptions() -> dict[str, BaseException]:
    """Return {name: exception}: one of each kind, and an OSError for every errno."""
    made = [
        OverflowError("int too large to convert to float"),
        MemoryError(),
        ImportError("no module named 'torch'"),
        RecursionError("maximum recursion depth exceeded"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
        ValueError("a library's words\nin two lines"),
        RuntimeError(""),
        AssertionError(),
        Panic("index out of bounds"),
    ]
    named = {type(error).__name__: error for error in made}
    for code, name in sorted(errno.errorcode.items()):
        named[f"OSError {name}"] = OSError(code, os.strerror(code))
    return named


# Doors of the matrix. Each function returns (patch, call); within the context manager
# `patch(error)`, the call runs into the error.


def _service(folder):
    from rsearch.retrieval.service import RemoteSearch

    search = RemoteSearch(
        "http://127.0.0.1:9",
        api="search_r1",
        top_k=1,
        max_retries=0,
        outage_seconds=0.0,
        log=_drop,
    )
    return _patch("httpx.Client.stream"), lambda: search(["who?"]) == [None]


def _drop(text):
    pass


def _judge(folder):
    from rsearch.llm.endpoint import remote_generator

    ask = remote_generator(
        "http://127.0.0.1:9/v1",
        "judge",
        api_key_env="",
        max_reply_tokens=4,
        temperature=0.0,
        top_p=1.0,
        timeout_seconds=1.0,
        max_retries=0,
        concurrency=1,
        outage_seconds=0.0,
        log=_drop,
    )
    chat = [{"role": "user", "content": "?"}]
    return _patch("httpx.Client.stream"), lambda: ask([chat]) == [None]


def _question_file(folder):
    from rsearch.data.questions import load_questions

    path = folder / "q.jsonl"
    path.write_text('{"question": "who?", "golden_answers": ["x"]}\n')
    return _patch("json.JSONDecoder.decode"), lambda: load_questions(path)


def _parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rsearch.data.questions import load_questions

    path = folder / "q.parquet"
    pq.write_table(pa.table({"question": ["who?"], "golden_answers": [["x"]]}), path)
    return _patch("pyarrow.parquet.ParquetFile"), lambda: load_questions(path)


def _hub(folder):
    from rsearch.data.questions import load_questions

    # A directory with the hub's layout; a name would cause a network request first.
    return _patch("datasets.load_dataset"), lambda: load_questions(folder)


def _tokenizer():
    from rsearch.models.small_tokenizer import train_tokenizer

    return train_tokenizer(["who is it?"] * 4, vocab_size=280)


def _saved_tokenizer(folder):
    from rsearch.models.tokenizer import load_tokenizer

    _tokenizer().save(folder)
    return _patch("tokenizers.Tokenizer.from_str"), lambda: load_tokenizer(folder)


def _template(folder):
    tokenizer = _tokenizer()
    chat = [{"role": "user", "content": "?"}]
    return _patch("jinja2.Template.render"), lambda: tokenizer.encode_prompt(chat)


def _tensors(folder):
    from safetensors.numpy import save_file

    from rsearch.models.hf import directory

    save_file({"x": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return (
        lambda error: mock.patch.object(directory, "safe_open", side_effect=error),
        lambda: directory.open_tensors(folder),
    )


def _engine(failing):
    from rsearch.retrieval.engine import engine_in_memory
    from rsearch.types import Passage

    class Encoder:
        fingerprint = "fake"

        def encode_passages(self, texts):
            return np.eye(len(texts), 4, dtype=np.float32)

        def encode_queries(self, texts):
            return self.encode_passages(texts)

    encoder = Encoder()
    engine = engine_in_memory([Passage("0", "a\nb")], encoder, top_k=1, cache_size=0)
    owner = encoder if failing == "encode_queries" else engine._nearest
    return (
        lambda error: mock.patch.object(owner, failing, side_effect=error),
        lambda: engine(["who?"]),
    )


def _save(folder):
    from rsearch.runtime import checkpoint

    numbers = itertools.count()
    tree = {"w": np.zeros(2, np.float32)}
    return (
        _patch("orbax.checkpoint.Checkpointer.save"),
        lambda: checkpoint.save(folder / f"{next(numbers)}", 1, tree, {}, keep=1),
    )


def _restore(folder):
    from rsearch.runtime import checkpoint

    tree = {"w": np.zeros(2, np.float32)}
    checkpoint.save(folder, 1, tree, {}, keep=1)
    return (
        _patch("orbax.checkpoint.Checkpointer.restore"),
        lambda: checkpoint.restore(folder, 1, tree),
    )


def _replace(folder):
    from rsearch.runtime import files

    return _patch("os.replace"), lambda: files.replace(folder / "file", b"x")


def _sync(folder):
    from rsearch.runtime import files

    return _patch("os.fsync"), lambda: files.replace(folder / "file", b"x")


def _patch(name: str) -> Callable:
    return lambda error: mock.patch(name, side_effect=error)


DOORS = {
    "search service": _service,
    "judge": _judge,
    "question file": _question_file,
    "Parquet file": _parquet,
    "data set of the hub": _hub,
    "tokenizer file": _saved_tokenizer,
    "chat template": _template,
    "safetensors": _tensors,
    "encoder": lambda folder: _engine("encode_queries"),
    "ScaNN": lambda folder: _engine("search"),
    "Orbax save": _save,
    "Orbax restore": _restore,
    "rename": _replace,
    "fsync": _sync,
}


def outcome(call: Callable) -> str:
    """Return "" if a call ends in a typed error or a counted failure.

    Otherwise describe how it ended.
    """
    try:
        result = call()
    except PreemptedError:  # after an outage the run is saved and ends with code 75
        return ""
    except BaseException as error:
        if is_user_error(error) and "\n" not in str(error):
            return ""
        return f"{type(error).__name__}: {error}"
    return "" if result is True else f"returned {result!r}"


def matrix(folder: pathlib.Path, errors=None) -> tuple[int, list[str]]:
    """Return the number of (door, exception, thread) triples, and the wrong ones.

    Args:
        folder: directory for the doors' files.
        errors: {name: exception}; by default all of `exceptions`.
    """
    wrong, count = [], 0
    errors = exceptions() if errors is None else errors
    with ThreadPoolExecutor(1) as thread:
        for door, make in DOORS.items():
            place = folder / door.replace(" ", "_")
            place.mkdir()
            patch, call = make(place)
            for name, error in errors.items():
                for is_thread in (False, True):
                    with patch(error):
                        if is_thread:
                            end = thread.submit(outcome, call).result()
                        else:
                            end = outcome(call)
                    count += 1
                    if end:
                        wrong.append(f"{door}, {name}: {end}")
    return count, wrong


# Calls, one of which fails in each start: {name: (module, class or "", function)}.
CALLS = {
    "tokenizer": ("rsearch.models.tokenizer", "Tokenizer", "encode"),
    "prompt": ("rsearch.models.tokenizer", "Tokenizer", "encode_prompt"),
    "search": ("rsearch.retrieval.engine", "SearchEngine", "_search"),
    "orbax": ("rsearch.runtime.storage", "", "write_tree"),
    "rename": ("os", "", "replace"),
    "fsync": ("os", "", "fsync"),
    "append": ("rsearch.runtime.files", "", "append"),
    "digest": ("rsearch.runtime.checkpoint", "", "describe"),
    "device_get": ("jax", "", "device_get"),
    "batch": ("rsearch.learn.trainer", "Trainer", "put"),
    "reward": ("rsearch.stages.rl", "", "with_rewards"),
}
# Calls that StageState.retry_io repeats if the disk refuses them.
WRITES = ("orbax", "rename", "fsync", "append")
SHARE, MAX_REFUSALS = 0.3, 25  # share of these calls that fail; most in one start
GAPS = {"tokenizer": 200, "fsync": 60, "rename": 20, "append": 20, "device_get": 100}


@contextlib.contextmanager
def injected(seed: str, log: pathlib.Path) -> Iterator[None]:
    """Let randomly drawn calls in this process fail within the block, and log them.

    The disk refuses some of the writes that are retried, and one call of a random kind
    fails.
    """
    rng = random.Random(seed)
    last = rng.choice(sorted(CALLS))
    last_number = rng.randrange(GAPS.get(last, 8))
    errors = exceptions()
    refusals = [kind for kind in errors if kind.startswith("OSError")]
    is_retried, num_refused = False, 0
    real_retry = StageState.retry_io

    def retry_io(self, write):
        nonlocal is_retried
        is_retried = True
        try:
            return real_retry(self, write)
        finally:
            is_retried = False

    def failing(name, real):
        numbers = itertools.count()

        def call(*args, **settings):
            nonlocal num_refused
            kind, number = None, next(numbers)
            if name == last and number == last_number:
                kind = rng.choice(list(errors))
            elif (
                name in WRITES
                and is_retried
                and num_refused < MAX_REFUSALS
                and rng.random() < SHARE
            ):
                kind, num_refused = rng.choice(refusals), num_refused + 1
            if kind is None:
                return real(*args, **settings)
            with open(log, "a") as file:
                file.write(json.dumps([seed, name, number, kind]) + "\n")
            raise errors[kind]

        return call

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(StageState, "retry_io", retry_io))
        patches.enter_context(mock.patch.object(console, "RETRY_WAITS", (0.02, 0.1)))
        for name, (module, owner, function) in CALLS.items():
            target = importlib.import_module(module)
            target = getattr(target, owner) if owner else target
            call = failing(name, getattr(target, function))
            patches.enter_context(mock.patch.object(target, function, call))
        yield


def train(folder: pathlib.Path, seeds: list[str]) -> int:
    """Start the run in this process once for each seed."""
    from rsearch import train as command

    words = [str(word) for word in arguments(folder / "disturbed", **_settings())]
    for seed in seeds:
        try:
            with injected(seed, folder / "injections.jsonl"):
                code = run_command(command.command, words)
        except BaseException as error:  # from our own code: a traceback and code 1
            code = f"1, {type(error).__name__}"
        print(f"{seed}: code {code}", flush=True)
        if code == 0:
            _step_back(folder / "disturbed")
    return 0


def _settings():
    return {**SHORT, **ALGORITHMS["grpo"], "checkpoint__retry_seconds": 30}


def _step_back(run):
    """Delete all but the first checkpoint of each stage, so that work is left to do."""
    from rsearch.runtime import checkpoint

    for stage in ("sft", "rl"):
        folder = run / stage / checkpoint.FOLDER
        for step in checkpoint.steps(folder)[1:] if folder.is_dir() else ():
            checkpoint.delete_step(folder / str(step))
    (run / "results.json").unlink(missing_ok=True)


def disturb(folder: pathlib.Path, injections: int, seed: int) -> list[str]:
    """Train with this many injections; return how it differs from a run without any."""
    whole = folder / "whole"
    done = run_python("-m", "rsearch.train", *arguments(whole, **_settings()))
    assert done.returncode == 0, done.stderr
    log, codes = folder / "injections.jsonl", collections.Counter()
    for start in itertools.count():
        count = len(log.read_text().splitlines()) if log.exists() else 0
        if count >= injections:
            break
        seeds = ",".join(f"{seed}.{start}.{count}.{i}" for i in range(20))
        command = ("-m", "tests.chaos.injections", "once", folder, seeds)
        done = run_python(*command)
        assert done.returncode == 0, done.stderr
        lines = [line.partition(": code ") for line in done.stdout.splitlines()]
        codes.update(code for begun, _, code in lines if begun in seeds.split(","))
        counts = ", ".join(f"{code} ({n})" for code, n in codes.most_common())
        console.note(f"{count} injections; ends of starts by code: {counts}")
    last = arguments(folder / "disturbed", **_settings())
    done = run_python("-m", "rsearch.train", *last)
    assert done.returncode == 0, done.stderr
    return differences(folder / "disturbed", whole, saves_more=True)


def main(argv) -> int:
    """Run the command; return 1 if an error is untyped or the runs differ."""
    if argv[:1] == ["once"]:
        return train(pathlib.Path(argv[1]), argv[2].split(","))
    flags = parse_flags(argv, flags=FLAGS, positional=("what",))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(flags["workdir"] or folder)
        folder.mkdir(parents=True, exist_ok=True)
        if flags["what"] == MATRIX:
            count, wrong = matrix(folder)
            title = f"{count} injections at {len(DOORS)} doors"
        elif flags["what"] == RUN:
            wrong = disturb(folder, flags["injections"], flags["seed"])
            title = f"{flags['injections']} injections"
        else:
            raise ValueError(f"{flags['what']!r}: must be {MATRIX} or {RUN}")
    for line in wrong:
        print(line)
    print(f"{title}: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_command(main))

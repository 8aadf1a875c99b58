"""Encode the passages of a corpus and build their ScaNN index, or index their words.

    python -m rsearch.index --corpus=FILE --encoder=MODEL --out=DIRECTORY
    python -m rsearch.index --corpus=FILE --kind=bm25 --out=DIRECTORY
    python -m rsearch.index --corpus=FILE --encoder=MODEL --vectors=FILE --out=DIRECTORY

With --vectors the passages are not encoded: the file has the vector of each, as
FILE.npy, a flat index of faiss, or Parquet with columns id and vector. The encoder,
which must be the one that made them, encodes the queries.

The same command resumes where it was stopped. It prints what was built, the recall
against exact search and, with --questions, the recall of their supporting passages.

Several hosts share the work on a directory that all reach. Hosts that start together
connect, as in training:

    python -m rsearch.index ... --coordinator=auto

In a SLURM array give each task --worker=I/N; the last to finish builds the index:

    python -m rsearch.index ... --worker=$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
"""

import math
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence

from rsearch.config.recipes import REQUIRED, parse_flags, run_command
from rsearch.data.corpus import Corpus
from rsearch.data.questions import load_questions, supporting_passages
from rsearch.data.records import say_left_out
from rsearch.hosts import processes
from rsearch.retrieval.bm25 import K1, B, open_bm25
from rsearch.retrieval.encoder import load_encoder
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import BM25, open_index
from rsearch.retrieval.index_build import (
    build_bm25,
    build_index,
    encode_share,
    plan_index,
)
from rsearch.retrieval.vector_files import VectorFile
from rsearch.runtime.connections import check_source
from rsearch.runtime.console import note, table
from rsearch.types import Question, SearchFn

FLAGS = {
    "corpus": (REQUIRED, "JSONL of passages, plain or gzip: {id, contents}"),
    "encoder": (
        "",
        'directory or hub id of a BERT model, or "hashed"; --kind=bm25 alone has none',
    ),
    "vectors": (
        "",
        "the passages' vectors, not encoded again: .npy, flat faiss index or Parquet",
    ),
    "out": (REQUIRED, "directory of the index; goes on with one left unfinished"),
    "family": ("", "prefixes and pooling: e5, bge, minilm or declared"),
    "max_query_tokens": (0, "of an encoded question; 0 = the model's"),
    "max_passage_tokens": (0, "of an encoded passage; 0 = the model's"),
    "hashed_dim": (512, "features of the hashed encoder's vectors"),
    "cache": ("", "directory for the corpus's offsets; default: beside the corpus"),
    "on_bad": (
        "raise",
        "a bad record of the corpus or the questions is an error, or is counted: skip",
    ),
    "kind": (
        "auto",
        "brute_force, quantized or partitioned; auto chooses by size; bm25 = of words",
    ),
    "bm25_k1": (K1, "how slowly repetitions of a word in a passage stop to count"),
    "bm25_b": (B, "how much the length of a passage counts, 0 to 1"),
    "leaves_to_search": (
        0,
        "parts a query looks at, of a partitioned index; 0 chooses",
    ),
    "reorder": (0, "candidates compared exactly, where codes find them; 0 chooses"),
    "dims_per_block": (0, "dimensions that share a 4-bit code; 0 chooses"),
    "vector_dtype": ("float32", "of the vectors on disk: float32 or float16"),
    "reorder_dtype": (
        "float32",
        "of the vectors beside the codes in memory: or bfloat16, int8",
    ),
    "shard_size": (0, "passages encoded between two saves; 0 chooses"),
    "parts": (1, "with a ScaNN index each, that hosts can share"),
    "worker": ("", "I/N: encode the I-th of N shares, from 0; the last one builds"),
    "questions": ("", "questions with supporting passages, to measure recall with"),
    "top_k": (5, "passages a question that count"),
    **processes.FLAGS,
}


# The flags that an index of words shares with one of vectors.
SHARED = ("corpus", "out", "cache", "on_bad", "kind", "questions", "top_k")
OF_WORDS = ("bm25_k1", "bm25_b")


def main(argv: Sequence[str]) -> int:
    """Run the command; see --help."""
    flags = parse_flags(argv, flags=FLAGS)
    _check_flags(flags)
    if flags["kind"] == BM25:
        _build_bm25(flags)
        return 0
    lengths = ("max_query_tokens", "max_passage_tokens")
    settings = ("leaves_to_search", "reorder", "dims_per_block", "shard_size")
    for name in (*settings, *lengths):
        if flags[name] < 0:
            raise ValueError(f"--{name}={flags[name]}, expected 0 or more")
    for name, least in (("hashed_dim", 1), ("top_k", 1), ("parts", 1)):
        if flags[name] < least:
            raise ValueError(f"--{name}={flags[name]}, expected at least {least}")
    worker = _worker(flags["worker"])
    if worker and flags["coordinator"]:
        raise ValueError(
            "--worker is for hosts without --coordinator: give one of them"
        )
    with processes.connected(**{name: flags[name] for name in processes.FLAGS}):
        _build(flags, worker, {name: flags[name] for name in lengths})
    return 0


def _check_flags(flags):
    """Raise a ValueError for a flag that the kind of index has no use for."""
    is_of_words = flags["kind"] == BM25
    unused = FLAGS.keys() - {*SHARED, *OF_WORDS} if is_of_words else OF_WORDS
    for name in FLAGS:
        if name in unused and flags[name] != FLAGS[name][0]:
            kind = f"--kind={flags['kind']}"
            raise ValueError(f"--{name}={flags[name]} has no meaning with {kind}")
    if not (is_of_words or flags["encoder"]):
        raise ValueError("--encoder=... is missing; --help shows the flags")


def _build_bm25(flags):
    """Build an index of words, and print what was built."""
    started = time.monotonic()
    if flags["top_k"] < 1:
        raise ValueError(f"--top_k={flags['top_k']}, expected at least 1")
    questions = _questions(flags["questions"], flags["on_bad"])
    corpus = _open_corpus(flags)
    k1, b = (flags[name] for name in OF_WORDS)
    manifest = build_bm25(corpus, flags["out"], k1=k1, b=b)
    rows = [
        ("passages", str(len(corpus))),
        ("search", "BM25, {variant}, k1 = {k1}, b = {b}".format(**manifest["bm25"])),
        ("seconds to build", str(manifest["seconds"])),
    ]
    engine = None
    if questions:
        words, _ = open_bm25(flags["out"], corpus=corpus, verify=False)
        engine = SearchEngine(
            words, None, corpus, top_k=flags["top_k"], fingerprint=manifest["digest"]
        )
    _print_table(flags, rows, corpus, engine, questions, started)


def _open_corpus(flags):
    return Corpus(flags["corpus"], cache=flags["cache"] or None, on_bad=flags["on_bad"])


def _build(flags, worker, lengths):
    """Encode the corpus, build its index, and print what was built."""
    started = time.monotonic()
    # Questions that cannot be read are refused before hours of encoding.
    questions = _questions(flags["questions"], flags["on_bad"])
    check_source(flags["encoder"], "--encoder")
    corpus = _open_corpus(flags)
    encoder = load_encoder(
        flags["encoder"],
        family=flags["family"] or None,
        dim=flags["hashed_dim"],
        **lengths,
    )
    vector_file = VectorFile(flags["vectors"]) if flags["vectors"] else None
    out = pathlib.Path(flags["out"])
    settings = {
        "kind": flags["kind"],
        "leaves_to_search": flags["leaves_to_search"] or None,
        "reorder": flags["reorder"] or None,
        "dims_per_block": flags["dims_per_block"] or None,
        "reorder_dtype": flags["reorder_dtype"],
        "vector_dtype": flags["vector_dtype"],
        "shard_size": flags["shard_size"] or None,
        "num_parts": flags["parts"],
        "vector_file": vector_file,
    }
    if worker and not _is_last(corpus, encoder, out, settings, *worker):
        return
    manifest = build_index(corpus, encoder, out, waits=bool(worker), **settings)
    if not processes.is_host0():
        return
    engine = None
    if questions:
        nearest = open_index(out, corpus=corpus, encoder=encoder, verify=False).nearest
        engine = SearchEngine(nearest, encoder, corpus, top_k=flags["top_k"])
    _print_table(flags, _rows(manifest), corpus, engine, questions, started)


def _print_table(flags, rows, corpus, engine, questions, started):
    """Print what was built, and what `engine` finds for the questions if there are."""
    if corpus.num_skipped:
        rows.append(("bad records left out", str(corpus.num_skipped)))
    if questions:
        recall, num = supporting_recall(engine, questions, top_k=flags["top_k"])
        name = f"recall@{flags['top_k']} of supporting passages"
        rows.append((name, f"{recall:.4f} ({num} questions)"))
    rows.append(("seconds of this run", f"{time.monotonic() - started:.1f}"))
    table(f"Index {flags['out']}", ("", "value"), rows)


def _worker(text):
    """Return (number, number of workers) of "I/N", or () of ""."""
    if not text:
        return ()
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--worker={text}: write I/N, with I from 0 to N - 1")
    return int(number), int(count)


def _is_last(corpus, encoder, out, settings, worker, num_workers):
    """Encode a worker's share; return whether no shard is missing then."""
    plan = plan_index(corpus, encoder, **settings)
    num_missing = encode_share(
        corpus,
        encoder,
        out,
        plan,
        worker=worker,
        num_workers=num_workers,
        vector_file=settings["vector_file"],
    )
    if num_missing:
        note(
            f"worker {worker} of {num_workers} has ended its share; of all shards "
            f"{num_missing} are missing yet, and the last worker builds the index"
        )
    return not num_missing


def _questions(source, on_bad):
    if not source:
        return []
    questions, problems = load_questions(source, on_bad=on_bad)
    say_left_out(source, problems, note)
    # Hours of encoding come before their recall.
    check_supported(questions)
    return questions


def check_supported(questions: Iterable[Question]) -> None:
    """Refuse questions of which none names its supporting passages.

    Raises:
        ValueError: says what their metadata would have to have.
    """
    if not any(supporting_passages(question)[1] for question in questions):
        raise ValueError(
            "none of the questions names its supporting passages: expected metadata "
            "with supporting_ids, supporting_titles, supporting_facts or paragraphs"
        )


def _rows(manifest):
    recall, partition = manifest["recall"], manifest["partition"]
    vectors = manifest["vectors"]
    rows = [
        ("passages", str(manifest["corpus"]["num_passages"])),
        ("dimensions", str(manifest["encoder"]["dim"])),
        ("vectors", vectors["dtype"] + (" of --vectors" if "file" in vectors else "")),
    ]
    if partition is None:
        rows.append(("search", "brute force"))
    else:
        leaves = "{leaves_to_search} of {num_leaves} leaves".format(**partition)
        scanned = leaves if partition["num_leaves"] > 1 else "all codes"
        rows.append(("search", f"{scanned}, {partition['reorder']} reordered"))
        rows.append(("dimensions of a code", str(partition["dims_per_block"])))
    value = math.nan if recall["value"] is None else recall["value"]
    measured = f"{value:.4f} ({recall['num_queries']} {recall['queries']})"
    rows.append((f"recall@{recall['top_k']} of ScaNN against exact search", measured))
    rows.append(("seconds to build", str(manifest["seconds"])))
    return rows


def supporting_recall(
    search: SearchFn, questions: Sequence[Question], *, top_k: int
) -> tuple[float, int]:
    """Return the mean share of a question's supporting passages that are retrieved.

    Args:
        search: called with the questions' texts.
        questions: their metadata names the supporting passages, see
            `supporting_passages`. Questions that name none do not count.
        top_k: passages a question that count.

    Returns:
        (recall in [0, 1], number of questions that count).

    Raises:
        ValueError: no question names any.
    """
    check_supported(questions)
    rows = [(q.text, *supporting_passages(q)) for q in questions]
    rows = [row for row in rows if row[2]]
    total = 0.0
    for (_, key, expected), passages in zip(rows, search([row[0] for row in rows])):
        retrieved = {key(passage) for passage in (passages or ())[:top_k]}
        total += len(expected & retrieved) / len(expected)
    return total / len(rows), len(rows)


if __name__ == "__main__":
    sys.exit(run_command(main))

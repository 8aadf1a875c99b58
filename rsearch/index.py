"""Encode the passages of a corpus and build their ScaNN index, or index their words.

    python -m rsearch.index --corpus=FILE --encoder=MODEL --family=e5 --out=DIRECTORY
    python -m rsearch.index --corpus=FILE --encoder=hashed --out=DIRECTORY
    python -m rsearch.index --corpus=FILE --kind=bm25 --out=DIRECTORY

With --vectors=FILE the passages are not encoded. The file holds a vector for each of
them: .npy, a flat faiss index, or Parquet with columns id and vector. The encoder must
be the one that made these vectors; it encodes the queries.

The same command resumes an interrupted build. It prints a summary of the index, its
recall against exact search and, with --questions, its recall of their supporting
passages.

Several hosts can share the work if all of them can access the directory. Hosts that
start together connect as they do for training:

    python -m rsearch.index ... --coordinator=auto

In a SLURM array give each task --worker=I/N; the last task to finish builds the index:

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
from rsearch.data.records import report_skipped
from rsearch.hosts import processes
from rsearch.retrieval.bm25 import K1, B, open_bm25
from rsearch.retrieval.encoder import check_family, load_encoder
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.index import BM25, open_index
from rsearch.retrieval.index_build import (
    build_bm25,
    build_index,
    encode_worker_shards,
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
        'directory or hub id of a BERT model, or "hashed"; not used by --kind=bm25',
    ),
    "vectors": (
        "",
        "file with the passages' vectors: .npy, flat faiss index or Parquet",
    ),
    "out": (REQUIRED, "directory of the index; an unfinished build there is resumed"),
    "family": ("", "prefixes and pooling of a BERT model: e5, bge, minilm or declared"),
    "max_query_tokens": (0, "tokens of an encoded query; 0 = the model's limit", 0),
    "max_passage_tokens": (0, "tokens of an encoded passage; 0 = the model's limit", 0),
    "hashed_dim": (512, "dimensions of the hashed encoder's vectors", 1),
    "cache": ("", "directory for the corpus's offsets; default: next to the corpus"),
    "on_bad": (
        "raise",
        "bad records of the corpus or the questions are an error; skip counts them",
    ),
    "kind": (
        "auto",
        "brute_force, quantized, partitioned or bm25 (lexical); auto chooses by size",
    ),
    "bm25_k1": (K1, "BM25's k1: a larger value lets repeated words count for more"),
    "bm25_b": (B, "BM25's b: how strongly scores are normalised by length, 0 to 1"),
    "leaves_to_search": (
        0,
        "partitions that a query searches, in a partitioned index; 0 = automatic",
        0,
    ),
    "reorder": (0, "quantized candidates that are rescored exactly; 0 = automatic", 0),
    "dims_per_block": (0, "dimensions that share a 4-bit code; 0 = automatic", 0),
    "vector_dtype": ("float32", "dtype of the vectors on disk: float32 or float16"),
    "reorder_dtype": (
        "float32",
        "dtype of the vectors for rescoring: float32, bfloat16 or int8",
    ),
    "shard_size": (0, "passages encoded between two saves; 0 = automatic", 0),
    "parts": (1, "number of ScaNN indexes to split into, which hosts can share", 1),
    "worker": ("", "I/N: encode share I of N, from 0; the last worker builds"),
    "questions": ("", "questions with supporting passages, to measure recall"),
    "top_k": (5, "passages retrieved for a question when recall is measured", 1),
    **processes.FLAGS,
}


# The flags that a lexical index shares with an index of vectors.
SHARED_FLAGS = ("corpus", "out", "cache", "on_bad", "kind", "questions", "top_k")
BM25_FLAGS = ("bm25_k1", "bm25_b")
LENGTHS = ("max_query_tokens", "max_passage_tokens")
AUTOMATIC = ("leaves_to_search", "reorder", "dims_per_block", "shard_size")  # if 0


def main(argv: Sequence[str]) -> int:
    """Run the command; see --help."""
    flags = parse_flags(argv, flags=FLAGS)
    _check_flags(flags)
    if flags["kind"] == BM25:
        _build_bm25(flags)
        return 0
    worker = _parse_worker(flags["worker"])
    if worker and flags["coordinator"]:
        raise ValueError(
            "--worker is for hosts without --coordinator: give one of them"
        )
    with processes.connected(**{name: flags[name] for name in processes.FLAGS}):
        _build(flags, worker)
    return 0


def _check_flags(flags):
    """Raise ValueError for a flag without a meaning for this kind and encoder."""
    is_lexical = flags["kind"] == BM25
    unused = {"kind": FLAGS.keys() - {*SHARED_FLAGS, *BM25_FLAGS}}
    if not is_lexical:
        is_hashed = flags["encoder"] == "hashed"
        model_flags = {"family", *LENGTHS} if is_hashed else {"hashed_dim"}
        unused = {"kind": BM25_FLAGS, "encoder": model_flags}
    for other, names in unused.items():
        for name in FLAGS:
            if name in names and flags[name] != FLAGS[name][0]:
                raise ValueError(
                    f"--{name}={flags[name]} has no meaning with "
                    f"--{other}={flags[other]}"
                )
    if is_lexical:
        return
    if not flags["encoder"]:
        raise ValueError("--encoder=... is missing; --help shows the flags")
    if flags["encoder"] != "hashed":  # before hours of reading a large corpus
        check_family(flags["family"] or None)


def _build_bm25(flags):
    """Build a lexical index and print a summary of it."""
    start_time = time.monotonic()
    questions = _read_questions(flags["questions"], flags["on_bad"])
    corpus = _open_corpus(flags)
    k1, b = (flags[name] for name in BM25_FLAGS)
    manifest = build_bm25(corpus, flags["out"], k1=k1, b=b)
    rows = [
        ("passages", str(len(corpus))),
        ("search", "BM25, {variant}, k1 = {k1}, b = {b}".format(**manifest["bm25"])),
        ("seconds to build", str(manifest["seconds"])),
    ]
    engine = None
    if questions:
        bm25, _ = open_bm25(flags["out"], corpus=corpus, verify=False)
        engine = SearchEngine(
            bm25, None, corpus, top_k=flags["top_k"], fingerprint=manifest["digest"]
        )
    _print_table(flags, rows, corpus, engine, questions, start_time)


def _open_corpus(flags):
    return Corpus(flags["corpus"], cache=flags["cache"] or None, on_bad=flags["on_bad"])


def _build(flags, worker):
    """Encode the corpus, build its index and print a summary of it."""
    start_time = time.monotonic()
    # Refuse unreadable questions before hours of encoding.
    questions = _read_questions(flags["questions"], flags["on_bad"])
    check_source(flags["encoder"], "--encoder")
    corpus = _open_corpus(flags)
    encoder = load_encoder(
        flags["encoder"],
        family=flags["family"] or None,
        dim=flags["hashed_dim"],
        **{name: flags[name] for name in LENGTHS},
    )
    vector_file = VectorFile(flags["vectors"]) if flags["vectors"] else None
    out = pathlib.Path(flags["out"])
    settings = {
        "kind": flags["kind"],
        "reorder_dtype": flags["reorder_dtype"],
        "vector_dtype": flags["vector_dtype"],
        "num_parts": flags["parts"],
        "vector_file": vector_file,
        **{name: flags[name] or None for name in AUTOMATIC},
    }
    if worker and not _encode_share(corpus, encoder, out, settings, *worker):
        return
    manifest = build_index(corpus, encoder, out, waits=bool(worker), **settings)
    if not processes.is_host0():
        return
    engine = None
    if questions:
        nearest = open_index(out, corpus=corpus, encoder=encoder, verify=False).nearest
        engine = SearchEngine(nearest, encoder, corpus, top_k=flags["top_k"])
    _print_table(flags, _summary_rows(manifest), corpus, engine, questions, start_time)


def _print_table(flags, rows, corpus, engine, questions, start_time):
    """Print a summary of the index and, if there are questions, their recall."""
    if corpus.num_skipped:
        rows.append(("bad records left out", str(corpus.num_skipped)))
    if questions:
        recall, num_questions = supporting_recall(
            engine, questions, top_k=flags["top_k"]
        )
        name = f"recall@{flags['top_k']} of supporting passages"
        rows.append((name, f"{recall:.4f} ({num_questions} questions)"))
    rows.append(("seconds of this run", f"{time.monotonic() - start_time:.1f}"))
    table(f"Index {flags['out']}", ("", "value"), rows)


def _parse_worker(text):
    """Return (number, number of workers) for "I/N", or () for ""."""
    if not text:
        return ()
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--worker={text}: write I/N, with I from 0 to N - 1")
    return int(number), int(count)


def _encode_share(corpus, encoder, out, settings, worker, num_workers):
    """Encode a worker's share and return whether all shards now exist."""
    plan = plan_index(corpus, encoder, **settings)
    num_missing = encode_worker_shards(
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
            f"worker {worker} of {num_workers} has finished its share; {num_missing} "
            "shards are still missing, and the last worker builds the index"
        )
    return not num_missing


def _read_questions(source, on_bad):
    if not source:
        return []
    questions, problems = load_questions(source, on_bad=on_bad)
    report_skipped(source, problems, note)
    # Checked now, because recall is measured only after hours of encoding.
    check_supported(questions)
    return questions


def check_supported(questions: Iterable[Question]) -> None:
    """Refuse questions if none of them names its supporting passages.

    Raises:
        ValueError: lists the metadata that would name them.
    """
    if not any(supporting_passages(question)[1] for question in questions):
        raise ValueError(
            "none of the questions names its supporting passages: expected metadata "
            "with supporting_ids, supporting_titles, supporting_facts or paragraphs"
        )


def _summary_rows(manifest):
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
        scope = leaves if partition["num_leaves"] > 1 else "all codes"
        rows.append(("search", f"{scope}, {partition['reorder']} reordered"))
        rows.append(("dimensions of a code", str(partition["dims_per_block"])))
    value = math.nan if recall["value"] is None else recall["value"]
    recall_text = f"{value:.4f} ({recall['num_queries']} {recall['queries']})"
    heading = f"recall@{recall['top_k']} of ScaNN against exact search"
    return [
        *rows,
        (heading, recall_text),
        ("seconds to build", str(manifest["seconds"])),
    ]


def supporting_recall(
    search: SearchFn, questions: Sequence[Question], *, top_k: int
) -> tuple[float, int]:
    """Return the mean share of a question's supporting passages that are retrieved.

    Args:
        search: called with the questions' texts.
        questions: questions whose metadata names the supporting passages; see
            `supporting_passages`. Questions without any are ignored.
        top_k: number of retrieved passages that count for a question.

    Returns:
        (recall in [0, 1], number of questions that were counted).

    Raises:
        ValueError: no question names a supporting passage.
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

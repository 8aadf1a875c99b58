"""Write a corpus from published corpora in any of their layouts.

A source is one of
    - JSON Lines, a JSON list, Parquet or a dataset on the hub (see
      `rsearch.data.sources`), with records that `rsearch.data.corpus` reads;
    - a table of tab-separated values whose first line names the columns, including id
      and text, such as DPR's and KILT's tables of 100-word passages;
    - lines of the form "1<tab>Title: A Text: B" (R1-Searcher) or "1<tab>A   B"
      (RAG-R1); the title may be missing.

Articles, such as Wikipedia pages or KILT's lists of paragraphs, are cut into passages
of a given number of words, separated by white space.
"""

import array
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from rsearch.data.corpus import IDS, parse_record
from rsearch.data.records import BadRecords, check_text, decode_record, quote
from rsearch.data.sources import json_records, read_records, table_records
from rsearch.runtime.console import progress
from rsearch.runtime.files import replacing
from rsearch.runtime.jsonl import (
    BOM,
    GZIP_ERRORS,
    MAX_LINE_BYTES,
    file_kind,
    jsonl_lines,
    open_text,
)

TITLE_PREFIX = re.compile(r"^Title: (.*?) Text: +|^(.*?)   |^")
HEADING = "Section::::"  # how KILT marks such paragraphs
BULLET = re.compile(r"^BULLET::::-?")  # in numbered lists "BULLET::::1."


def write_corpus(
    sources: Sequence[str],
    out: str | os.PathLike,
    *,
    words: int = 0,
    prefixes: Sequence[str] = (),
    on_bad: str = "raise",
) -> tuple[int, BadRecords]:
    """Write the passages of these sources into one file, in their order.

    Args:
        sources: at least one source.
        out: path of the file to write, JSON Lines of {"id", "contents"}. It must not
            exist yet, and it appears only when it is complete.
        words: words per passage; each record is then an article. 0 takes each record
            as one passage.
        prefixes: [len(sources)] a prefix for the ids of each source; empty for none.
        on_bad: "raise" makes a bad record an error; "skip" leaves it out.

    Returns:
        The number of passages, and the bad records.

    Raises:
        ValueError: a bad record, two passages with the same id, or no passage at all.
        OSError: a source cannot be read, or `out` exists or cannot be written.
    """
    prefixed_sources = list(zip(sources, prefixes or itertools.repeat("")))
    bad_records = BadRecords(on_bad)
    # 8 bytes a passage; 29 million ids as text would need gigabytes.
    id_hashes = array.array("Q")
    with replacing(out, overwrites=False) as file:
        passages = _passages(prefixed_sources, words, bad_records)
        for _, passage_id, line in progress(passages, "writing passages"):
            id_hashes.append(xxhash.xxh3_64_intdigest(passage_id.encode()))
            file.write(line)
        if not id_hashes:
            first_problem = (
                f"; first {bad_records.problems[0]}" if bad_records.num else ""
            )
            raise ValueError(f"{', '.join(sources)}: no passage at all{first_problem}")
        sorted_hashes = np.sort(np.frombuffer(id_hashes, np.uint64))
        repeated_hashes = sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]]
        if len(repeated_hashes):
            _refuse_repeated(
                _passages(prefixed_sources, words, BadRecords(on_bad)), repeated_hashes
            )
    return len(id_hashes), bad_records


def _refuse_repeated(passages, hashes):
    """Raise a ValueError for the first id used twice, among ids with these hashes."""
    hashes, origins = set(hashes.tolist()), {}
    for origin, passage_id, _ in passages:
        if xxhash.xxh3_64_intdigest(passage_id.encode()) in hashes:
            if passage_id in origins:
                raise ValueError(
                    f"{origin}: field id: {quote(passage_id)} was used at "
                    f"{origins[passage_id]} already; with several corpora, give "
                    "--prefixes"
                )
            origins[passage_id] = origin


def _passages(prefixed_sources, words, bad_records):
    """Yield (origin, id, line of the corpus) for each passage."""
    for source, prefix in prefixed_sources:
        for origin, raw in _records(source, bad_records):
            try:
                passages = _make_passages(decode_record(raw), words)
                rows = [(prefix + name, contents) for name, contents in passages]
                lines = [corpus_line(*row) for row in rows]
            except ValueError as error:
                bad_records.add(origin, error)
                continue
            for number, ((passage_id, _), line) in enumerate(zip(rows, lines)):
                location = f"{origin} passage {number}" if words else origin
                yield location, passage_id, line


def corpus_line(passage_id: str, contents: str) -> bytes:
    """Return the line of a corpus that holds a passage.

    Raises:
        ValueError: the passage is too long.
    """
    row = {"id": passage_id, "contents": contents}
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a passage of {len(line)} bytes, more than {MAX_LINE_BYTES}")
    return line


def _make_passages(record: dict, words: int) -> list[tuple[str, str]]:
    """Return the (id, contents) of a record's passages."""
    if not words:
        return [parse_record(record)]
    article_id, contents = parse_record(_article(record))
    title, _, text = contents.partition("\n")
    text_words = text.split()
    if not text_words:
        raise ValueError(f"field text: the article {quote(title)} has no words")
    texts = [
        " ".join(text_words[start : start + words])
        for start in range(0, len(text_words), words)
    ]
    return [(f"{article_id}-{n}", f"{title}\n{text}") for n, text in enumerate(texts)]


def _article(record: dict[str, Any]) -> dict[str, Any]:
    """Return an article as a record with one text, joining KILT's paragraphs.

    An article without an id gets its title as the id.
    """
    record = dict(record)
    if record.get("title") is None and "wikipedia_title" in record:
        record["title"] = record["wikipedia_title"]
    if all(record.get(name) is None for name in IDS):
        record["id"] = check_text(record.get("title"), "id or title")
    paragraphs = record.get("text")
    if isinstance(paragraphs, list):
        for number, paragraph in enumerate(paragraphs):
            if not isinstance(paragraph, str):
                raise ValueError(
                    f"field text[{number}]: expected text, got {quote(paragraph)}"
                )
        # The first paragraph of KILT's articles is their title.
        if paragraphs and paragraphs[0].strip() == record.get("title"):
            paragraphs = paragraphs[1:]
        texts = [p for p in paragraphs if not p.startswith(HEADING)]
        record["text"] = " ".join(BULLET.sub("", text) for text in texts)
    return record


def _records(source: str, bad_records: BadRecords) -> Iterator[tuple[str, Any]]:
    """Yield (origin, record) for each record, as `read_records` does."""
    path = pathlib.Path(source)
    if not path.is_file() or file_kind(path) in ("empty", "parquet"):
        return read_records(source)
    try:
        with open_text(path) as file:
            first_line = file.readline(MAX_LINE_BYTES + 1).removeprefix(BOM).strip()
    except GZIP_ERRORS as error:
        raise ValueError(f"{path}: truncated or damaged gzip data: {error}") from None
    columns = first_line.decode("utf-8", "replace").lower().split("\t")
    if first_line.startswith((b"{", b"[")):
        return json_records(path)
    if {"id", "text"} <= {*columns}:
        return _table_records(path)
    if len(columns) == 2 and columns[0].strip().isdecimal():
        return _numbered_records(path, bad_records)
    raise ValueError(
        f"{path}:1: neither JSON, nor a table whose first line names the columns id, "
        f"text and title, nor a number, a tab and a passage: {quote(columns)}"
    )


def _table_records(path):
    """Yield (file:line, record or its error) of a table, its columns in lower case."""
    for origin, row in table_records(path, "\t"):
        if isinstance(row, dict):
            row = {name.lower(): value for name, value in row.items()}
        yield origin, row


def _numbered_records(path, bad_records):
    """Yield (file:line, record) of lines with a number, a tab and a passage."""
    for number, line in jsonl_lines(path):
        text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        passage_id, tab, text = text.partition("\t")
        if not tab or not passage_id.strip().isdecimal():
            bad_records.add(
                f"{path}:{number}", "expected a number, a tab and a passage"
            )
            continue
        contents = TITLE_PREFIX.sub(r"\1\2\n", text)
        yield f"{path}:{number}", {"id": passage_id, "contents": contents}

"""Read records from files and the Hugging Face hub, each with its origin.

The hub is read through `datasets`. Files are read here, because an error must name its
line, and because `datasets` leaves a copy of every file it reads in the user's home.
"""

import collections
import csv
import itertools
import os
import pathlib
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from rsearch.data.sets import PREFIX, find_set
from rsearch.runtime.boundary import REQUESTS, describe_error
from rsearch.runtime.connections import check_hub, describe_hub
from rsearch.runtime.files import expand
from rsearch.runtime.jsonl import (
    BOM,
    GZIP_ERRORS,
    MAX_LINE_BYTES,
    decode_json,
    file_kind,
    jsonl_lines,
    max_unpacked_bytes,
    open_text,
)

MAX_LIST_BYTES = 1 << 31  # limit of a JSON list, which is read whole
TABLES = {".csv": ",", ".tsv": "\t"}  # end of a table's name -> separator of columns
SUFFIXES = (".jsonl", ".json", *TABLES)
SUFFIXES += (*(f"{suffix}.gz" for suffix in SUFFIXES), ".parquet")
_FIELDS = rb'(?:"(?:Domain|Split|VerifiedEval|Version)"\s*:\s*["\w.-]+\s*,\s*)*+'
DOCUMENT = re.compile(rb'\s*\{\s*(?:\n\s*"|' + _FIELDS + rb'"Data"\s*:\s*\[)')
"""Start of a file that is a single JSON object, not JSON Lines: a brace alone in its
line and then a field, or TriviaQA's list of questions, before or after other fields."""
STATE_FILE = "state.json"  # marks a directory that `Dataset.save_to_disk` wrote
HUB_NAME = re.compile(r"(.+?)(?::([\w.-]+))?(?:@([^@]+))?")


def read_records(source: str | os.PathLike) -> Iterator[tuple[str, Any]]:
    """Yield all records of a source, in its order.

    Args:
        source: one of
            - JSON Lines (.jsonl, .json; plain or gzip), a JSON list (.json), or an
              object with a list `Data` (TriviaQA);
            - a table whose first line names its columns (.csv, .tsv; plain or gzip);
            - a Parquet file (.parquet);
            - 'owner/name:config@split' on the hub, for example
              'RUC-NLPIR/FlashRAG_datasets:hotpotqa@dev'. Config and split may be left
              out; the default split is 'train';
            - 'set:NAME' or 'set:NAME=FILE', a published set of `rsearch.data.sets`;
            - a directory laid out as on the hub, in place of 'owner/name', or one that
              `save_to_disk` wrote, where '@split' selects one of several splits.

    Yields:
        (origin, record): where the record came from, and its value. A line of JSON
        Lines comes as unparsed bytes, and a bad row of a table as a ValueError, so that
        it does not hide the others. `decode_record` reads all three.

    Raises:
        ValueError: a source that is none of these, an empty or damaged file, a set
            whose size is not the published one, anything the hub refuses.
        OSError: the file cannot be read.
    """
    if not os.fspath(source):  # as a path it would be the working directory
        raise ValueError("the name of a file or data set is empty")
    source = str(expand(source))
    if source.startswith(PREFIX):
        return _set_records(source, *find_set(source))
    path = pathlib.Path(source)
    if path.is_file():
        return _file_records(path)
    if source.endswith(SUFFIXES):
        raise ValueError(f"{source}: there is no such file")
    return _hub_records(source, *_hub_name(source))


def _set_records(source, set_source, size):
    """Yield the records of a published set; refuse any other number of them."""
    count = 0
    for record in read_records(set_source):
        yield record
        count += 1
    if size not in (None, count):
        raise ValueError(
            f"{source}: {set_source} has {count} questions, expected {size}"
        )


def _file_records(path):
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: expected a file named {', '.join(SUFFIXES)}")
    kind = file_kind(path)
    if kind == "empty":
        raise ValueError(f"{path}: the file is empty")
    is_parquet = path.name.endswith(".parquet")
    if is_parquet != (kind == "parquet"):
        problem = "not a Parquet file"
        if not is_parquet:
            problem = "a Parquet file, not JSON or a table"
        raise ValueError(f"{path}: {problem}")
    if is_parquet:
        return _parquet_records(path)
    separator = TABLES.get(pathlib.Path(path.name.removesuffix(".gz")).suffix)
    return table_records(path, separator) if separator else json_records(path)


def json_records(path: str | os.PathLike) -> Iterator[tuple[str, Any]]:
    """Yield (file:line, bytes) of JSON Lines, or (file: record n, value) of a list.

    A single object on several lines is one record, or TriviaQA's list `Data` of them.
    """
    try:
        with open_text(path) as file:
            start = file.readline(MAX_LINE_BYTES + 1).removeprefix(BOM)
            if start.strip() == b"{":
                start += file.readline(MAX_LINE_BYTES + 1)
            is_object = DOCUMENT.match(start) is not None
            is_one_value = is_object or start.lstrip().startswith(b"[")
            text = start + file.read(MAX_LIST_BYTES) if is_one_value else b""
    except GZIP_ERRORS as error:
        raise ValueError(f"{path}: truncated or damaged gzip data: {error}") from None
    if not is_one_value:
        yield from ((f"{path}:{line}", raw) for line, raw in jsonl_lines(path))
        return
    if len(text) >= MAX_LIST_BYTES:
        raise ValueError(
            f"{path}: a JSON {'object' if is_object else 'list'} of {MAX_LIST_BYTES} "
            "bytes or more; JSON Lines, which are read a line at a time, may be longer"
        )
    try:
        values = decode_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if is_object:
        questions = values.get("Data")
        values = questions if isinstance(questions, list) else [values]
    for row, value in enumerate(values, 1):
        yield f"{path}: record {row}", value


def table_records(
    path: str | os.PathLike, separator: str
) -> Iterator[tuple[str, dict[str, str] | ValueError]]:
    """Yield (file:line, record or its error) of a table whose first line names columns.

    Quoted fields may contain separators and line ends. Columns without a name, which
    spreadsheets and pandas write, are left out.

    Raises:
        ValueError: a bad first line, a line that is too long, damaged gzip data.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    numbered_lines = jsonl_lines(path)
    unread = collections.deque()  # lines to read again
    record_lines = []  # those of the current record

    def open_rows():
        return csv.reader(iter(next_line, None), delimiter=separator, strict=True)

    def next_line():
        pair = unread.popleft() if unread else next(numbered_lines, None)
        if pair is None:
            return None
        record_lines.append(pair)
        if b"\0" in pair[1]:
            raise csv.Error("line contains NUL")
        return pair[1].decode("utf-8", "surrogateescape")

    rows = open_rows()
    try:
        names = next(rows, [])
    except csv.Error as error:
        raise ValueError(f"{path}:1: {error}") from None
    if not any(names):
        raise ValueError(f"{path}:1: expected the names of columns, got a blank line")
    for name, count in collections.Counter(map(str.lower, names)).items():
        if name and count > 1:
            raise ValueError(f"{path}:1: column {reprlib.repr(name)}: given twice")
    while True:
        record_lines.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            first_line, last_line = record_lines[0][0], record_lines[-1][0]
            # After a quote that is not closed, the record includes further lines. They
            # are read again, as records of their own.
            lines = f"{first_line}-{last_line}" if len(record_lines) > 1 else first_line
            unread.extendleft(reversed(record_lines[1:]))
            rows = open_rows()
            yield f"{path}:{lines}", ValueError(str(error))
            continue
        if row is None:
            return
        if len(row) == len(names):
            record = {name: text for name, text in zip(names, row) if name}
        else:
            problem = f"{len(row)} columns, expected {len(names)}: {reprlib.repr(row)}"
            record = ValueError(problem if row else "a blank line")
        yield f"{path}:{record_lines[0][0]}", record


def _parquet_records(path):
    import pyarrow.parquet as pq

    row = 0
    try:
        _check_parquet(path)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}: row {row}", record
    except REQUESTS:
        raise
    # A damaged file may contain anything, such as a date in the year 300,000.
    except BaseException as error:
        message = describe_error(error)
        raise ValueError(f"{path}: damaged after row {row}: {message}") from None


def _check_parquet(path):
    """Refuse a Parquet file with duplicate columns or too much data for its size."""
    import pyarrow.parquet as pq

    bytes_left = limit = max_unpacked_bytes(path)
    with pq.ParquetFile(path) as file:
        columns = [file.schema.column(i) for i in range(len(file.schema))]
        bytes_left -= _declared_bytes(file.metadata)
    paths = [column.path for column in columns]
    if duplicates := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(f"field {duplicates[0]}: given twice")
    # A text that a million rows share is stored once. Read as a dictionary, it is cheap
    # to find out how many bytes the rows will take.
    text_columns = [c.path for c in columns if c.physical_type == "BYTE_ARRAY"]
    if bytes_left >= 0:
        bytes_left = limit
        with pq.ParquetFile(path, read_dictionary=text_columns) as file:
            # Arrow cannot join the nested texts of two row groups in one batch.
            groups = ([group] for group in range(file.num_row_groups))
            for batch in itertools.chain.from_iterable(
                file.iter_batches(row_groups=group) for group in groups
            ):
                bytes_left -= sum(map(_value_bytes, batch.columns))
                if bytes_left < 0:
                    break
    if bytes_left < 0:
        raise ValueError(
            f"its values take more than {limit} bytes, far more than expected of a "
            "file of this size; if that is intended, write them as JSON Lines"
        )


def _declared_bytes(metadata):
    """Return the bytes of columns that a Parquet file declares, shared texts once."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(i) for group in groups for i in range(metadata.num_columns)]
    return sum(max(c.total_uncompressed_size, 8 * c.num_values) for c in chunks)


def _value_bytes(array):
    """Return the bytes that an Arrow array's values take if rows share none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary)
        return pc.sum(pc.take(lengths, array.indices)).as_py() or 0
    if isinstance(array, pa.StructArray):
        return sum(map(_value_bytes, array.flatten()))
    if isinstance(array, pa.MapArray):
        # Unlike other arrays' children, keys and items are not sliced with the array.
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        children = [
            child.slice(start, end - start) for child in (array.keys, array.items)
        ]
        return sum(map(_value_bytes, children))
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        return _value_bytes(array.flatten())
    return array.nbytes


def _hub_name(source):
    """Return the (name or directory, config or None, split) that a source names."""
    if pathlib.Path(source).is_dir():
        return source, None, "train"
    match = HUB_NAME.fullmatch(source)
    name, config, split = match.groups() if match else (source, None, None)
    if not pathlib.Path(name).is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(
            f"{source!r}: neither a file nor a data set on the hub, which is written "
            "owner/name:config@split"
        )
    return name, config, split or "train"


def _hub_records(source, name, config, split):
    """Yield (source: row n, record) through `datasets`."""
    is_local = pathlib.Path(name).is_dir()
    if not is_local:
        check_hub(f"data set {source!r}")
    import datasets

    folder = _saved_folder(source, name, config, split)
    if folder is not None:
        yield from _saved_records(source, folder)
        return
    try:
        # Not streamed: streaming imports torch where it is installed.
        rows = datasets.load_dataset(name, config, split=split)
    except REQUESTS:
        raise
    except BaseException as error:  # from the hub, httpx or a damaged file
        # The text of a DatasetGenerationError is always the same: name its cause.
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            error = error.__cause__ or error
        text = " ".join(str(error).split())
        hint = "" if is_local else f" (nor is {source} a file or directory here)"
        hint += "" if is_local else describe_hub(text)
        raise ValueError(
            f"{source}: {type(error).__name__}: {text.rstrip('.')}{hint}"
        ) from None
    for row, record in enumerate(rows, 1):
        yield f"{source}: row {row}", record


def _saved_folder(source, name, config, split):
    """Return the directory that `Dataset.save_to_disk` wrote, or None."""
    folder = pathlib.Path(name)
    if (folder / STATE_FILE).is_file():
        if config is not None or split != "train":
            raise ValueError(f"{source}: {name} is a single data set without splits")
        return folder
    is_split = config is None and (folder / split / STATE_FILE).is_file()
    return folder / split if is_split else None


def _saved_records(source, folder):
    import datasets

    row = 0
    try:
        # Drop the format it was saved with, which may be a torch one.
        rows = datasets.load_from_disk(folder).with_format(None)
        for row, record in enumerate(rows, 1):
            yield f"{source}: row {row}", record
    except Exception as error:  # damaged files may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{source}: damaged after row {row}: {text}") from None

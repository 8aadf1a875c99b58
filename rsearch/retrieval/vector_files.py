"""Read a corpus's vectors, computed elsewhere, from a file.

    FILE.npy      [n, D] float32 or float16, as numpy.save writes it
    FILE.parquet  a column `id`, and a column `vector` with lists of D numbers
    FILE          a faiss IndexFlatIP or IndexFlatL2, as write_index writes it

Arrays are memory-mapped and read one shard at a time. Of a Parquet file, one row group
is in memory. The vectors are used unchanged and must be like those of an encoder here:
finite and of length 1. For such vectors the nearest by distance are also the nearest by
product, so it does not matter which of the two the faiss index was made for.

A flat faiss index is little-endian: its kind in 4 bytes (IxFI products, IxF2
distances), int32 D, int64 n, two unused int64, a byte that says whether it is trained,
its metric as int32 (0 products, 1 distances), uint64 n * D, then the float32 numbers.
"""

import os
import struct
from typing import Any

import numpy as np

from rsearch.runtime import digests, files
from rsearch.runtime.boundary import boundary

MAX_LENGTH_ERROR = 0.01  # of a unit vector: the error of rounding to bfloat16
NPY, PARQUET = b"\x93NUMPY", b"PAR1"
FAISS_HEADER = struct.Struct("<4siqqq?iQ")
FAISS_KINDS = {b"IxFI": 0, b"IxF2": 1}  # kind -> metric
ID, VECTOR = "id", "vector"  # columns of Parquet


class VectorFile:
    """A file with the vectors of a corpus's passages, in the order of the corpus.

    Args:
        path: path of the file; its first bytes determine its kind.

    Attributes:
        path: path of the file.
        digest: digest of its bytes.
        dim: width of the vectors.

    Raises:
        ValueError: the file is of another kind or damaged, or its numbers are of
            another type.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = files.expand(path)
        with open(self.path, "rb") as file:
            head = file.read(FAISS_HEADER.size)
        self._array = self._parquet = None
        if head.startswith(NPY):
            self._array = _open_npy(self.path)
        elif head.startswith(PARQUET):
            self._parquet = _Parquet(self.path)
        else:
            self._array = _open_faiss(self.path, head)
        source = self._parquet if self._array is None else self._array
        self._num, self.dim = source.shape
        self.digest = digests.cached(self.path, "vectors", files.digest_file)

    def __len__(self) -> int:
        return self._num

    def check_fits(self, corpus: Any, encoder: Any) -> None:
        """Refuse vectors whose number or width does not fit.

        Args:
            corpus: has `len` and `path`.
            encoder: has `dim`; it encodes the queries.

        Raises:
            ValueError: names the file and both numbers.
        """
        if len(self) != len(corpus):
            raise ValueError(
                f"{self.path}: {len(self)} vectors, but {corpus.path} has "
                f"{len(corpus)} passages"
            )
        if self.dim != encoder.dim:
            raise ValueError(
                f"{self.path}: vectors of {self.dim} numbers, but the encoder's "
                f"queries have {encoder.dim}"
            )

    def rows(self, corpus: Any, start: int, stop: int) -> np.ndarray:
        """Return the [stop - start, D] float32 vectors of these passages, checked.

        Args:
            corpus: has `passages(indices)`; read only if the file contains ids.
            start, stop: positions of the passages, stop excluded.

        Raises:
            ValueError: a vector is not finite, not of length 1, or belongs to another
                passage; names the file and the row, from 0.
        """
        if self._array is not None:
            rows = np.array(self._array[start:stop], np.float32)
        else:
            ids = [passage.id for passage in corpus.passages(range(start, stop))]
            rows = self._parquet.rows(start, ids)
        # A norm is not finite if one of the numbers is not.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        bad_rows = np.flatnonzero(~(np.abs(lengths - 1) <= MAX_LENGTH_ERROR))
        if len(bad_rows):
            row = rows[bad_rows[0]]
            columns = np.flatnonzero(~np.isfinite(row))
            location = f"{self.path}: row {start + bad_rows[0]}"
            if len(columns):
                raise ValueError(
                    f"{location}: number {columns[0]} is {row[columns[0]]}"
                )
            raise ValueError(
                f"{location}: the vector has length {lengths[bad_rows[0]]:.6g}, but "
                "the encoder's have length 1: normalise all of them"
            )
        return rows


def _open_npy(path):
    with boundary(str(path)):  # its header may contain anything
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype not in (np.float32, np.float16) or array.ndim != 2:
        raise ValueError(
            f"{path}: shape {array.shape} of {array.dtype}, expected [n, D] of float32 "
            "or float16"
        )
    _check_size(path, array.offset + array.nbytes)
    return array


def _open_faiss(path, head):
    if len(head) < FAISS_HEADER.size or head[:3] not in {k[:3] for k in FAISS_KINDS}:
        raise ValueError(
            f"{path}: begins with {head[:4]!r}: neither .npy nor Parquet nor a flat "
            "index of faiss (IndexFlatIP or IndexFlatL2)"
        )
    kind, dim, num, _, _, is_trained, metric, count = FAISS_HEADER.unpack(head)
    if FAISS_KINDS.get(kind) != metric or not is_trained:
        raise ValueError(
            f"{path}: a faiss index of kind {kind!r}, metric {metric}; expected "
            "IndexFlatIP or IndexFlatL2"
        )
    if dim < 1 or num < 1 or count != dim * num:
        raise ValueError(f"{path}: damaged: {count} numbers of {num} vectors of {dim}")
    _check_size(path, FAISS_HEADER.size + 4 * count)
    return np.memmap(path, "<f4", "r", offset=FAISS_HEADER.size, shape=(num, dim))


def _check_size(path, expected):
    actual = path.stat().st_size
    if actual != expected:
        raise ValueError(
            f"{path}: damaged: {actual} bytes, but its header implies {expected}"
        )


class _Parquet:
    """The columns of a Parquet file, with one row group in memory."""

    def __init__(self, path):
        import pyarrow.parquet as pq

        self._path = path
        self._group, self._number = None, -1
        with boundary(str(path)):
            # Read as a dictionary, so that an id shared by many rows is held once.
            self._file = pq.ParquetFile(path, read_dictionary=[ID])
            self._check_columns()
            num_rows, num_values = self._sizes()
        dim = num_values[0] // max(num_rows[0], 1) if num_rows else 0
        # Checked here, so that a group's memory is known before it is read.
        for group, (rows, values) in enumerate(zip(num_rows, num_values)):
            if dim < 1 or values != dim * rows:
                raise ValueError(
                    f"{path}: row group {group} has {values} numbers in {rows} "
                    f"vectors, expected {dim or 'some'} in each"
                )
        self._starts = np.cumsum([0, *num_rows])
        self.shape = (int(self._starts[-1]), dim)

    def _check_columns(self):
        import pyarrow as pa

        schema = self._file.schema_arrow
        if [schema.names.count(name) for name in (ID, VECTOR)] != [1, 1]:
            raise ValueError(
                f"{self._path}: the columns are {schema.names}, expected one {ID} and "
                f"one {VECTOR}"
            )
        kind = schema.field(VECTOR).type
        lists = pa.ListType | pa.LargeListType | pa.FixedSizeListType
        if not isinstance(kind, lists) or not pa.types.is_floating(kind.value_type):
            raise ValueError(
                f"{self._path}: column {VECTOR} is of {kind}, expected lists of floats"
            )

    def _sizes(self):
        """Return, for each row group, its number of rows and of vector elements."""
        metadata = self._file.metadata
        leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        column = [leaf.partition(".")[0] for leaf in leaves].index(VECTOR)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        num_values = [group.column(column).num_values for group in groups]
        return [group.num_rows for group in groups], num_values

    def rows(self, start, ids):
        """Return [len(ids), D] float32 from row `start` on, after checking the ids."""
        rows = np.empty((len(ids), self.shape[1]), np.float32)
        num_read = 0
        while num_read < len(ids):
            row = start + num_read
            number = int(np.searchsorted(self._starts, row, side="right")) - 1
            with boundary(str(self._path)):
                self._read_group(number)
                first = row - int(self._starts[number])
                block = self._group.slice(first, len(ids) - num_read)
                names = [str(value.as_py()) for value in block.column(ID)]
                self._check_ids(row, names, ids[num_read:])
                rows[num_read : num_read + len(names)] = self._numbers(row, block)
            num_read += len(names)
        return rows

    def _read_group(self, number):
        if number == self._number:
            return
        self._group = None  # one at a time
        self._group = self._file.read_row_group(number, [ID, VECTOR])
        self._number = number
        expected = self._starts[number + 1] - self._starts[number]
        if self._group.num_rows != expected:
            raise ValueError(
                f"{self._path}: row group {number} has {self._group.num_rows} rows, "
                f"but its header says {expected}"
            )

    def _check_ids(self, row, names, ids):
        for offset, (name, expected) in enumerate(zip(names, ids)):
            if name != expected:
                raise ValueError(
                    f"{self._path}: row {row + offset}: id {name[:60]!r}, but the "
                    f"corpus has {expected!r} there"
                )

    def _numbers(self, row, block):
        """Return a table's [n, D] vectors; its first row is row `row` of the file."""
        import pyarrow.compute as pc

        dim = self.shape[1]
        column = block.column(VECTOR)
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        bad_rows = np.flatnonzero(lengths != dim)
        if len(bad_rows):
            raise ValueError(
                f"{self._path}: row {row + bad_rows[0]}: {lengths[bad_rows[0]]} "
                f"numbers, expected {dim}"
            )
        # A missing number becomes NaN, which is refused later.
        flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(block), dim)

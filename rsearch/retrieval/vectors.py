"""Encode a corpus into vectors on disk, in shards that are written once and reused.

    vectors/00000.npy   [n, D] vectors of consecutive passages, in order
    vectors/00000.json  what they were made from, and the digest of the .npy file

A shard is complete once its .json file exists. A shard that is damaged, or was made
from something else, is encoded again.
"""

import contextlib
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rsearch.runtime import files
from rsearch.runtime.console import note, progress

DTYPES = ("float32", "float16")


class Vectors:
    """[N, D] vectors in consecutive blocks, in memory or memory-mapped from files.

    Args:
        blocks: arrays [n, D]; all but the last have the same n.
    """

    def __init__(self, blocks: Iterable[np.ndarray]):
        # Plain arrays: reading rows through a memmap object is slower.
        self.blocks = [np.asarray(block) for block in blocks]
        self._size = len(self.blocks[0])
        self.dim = self.blocks[0].shape[1]
        assert all(len(block) == self._size for block in self.blocks[:-1])

    def __len__(self) -> int:
        return self._size * (len(self.blocks) - 1) + len(self.blocks[-1])

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the [n, D] vectors at [n] positions, n > 0."""
        if len(self.blocks) == 1:
            return np.take(self.blocks[0], positions, axis=0)
        # Row by row: a mask for each block would cost more than a few of its rows.
        blocks, block_rows = np.divmod(positions, self._size)
        addresses = zip(blocks.tolist(), block_rows.tolist())
        rows = [self.blocks[block][row] for block, row in addresses]
        return np.concatenate(rows).reshape(-1, self.dim)

    def pair_scores(self, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return [n, k] float32 dot products, each computed by itself.

        In a matrix product, the rounding of a row depends on the other rows; equal
        vectors would then get unequal scores.

        Args:
            queries: [n, D] float32.
            positions: [n, k] positions of the vectors each query is compared with.
        """
        rows = self.rows(positions.reshape(-1)).reshape(*positions.shape, self.dim)
        return row_products(rows, queries[:, None])

    def all_scores(self, query: np.ndarray) -> np.ndarray:
        """Return the [N] float32 products of a [D] query with all vectors.

        Each is computed by itself, as in `pair_scores`.
        """
        step = 4096
        scores = [
            row_products(block[start : start + step], query)
            for block in self.blocks
            for start in range(0, len(block), step)
        ]
        return np.concatenate(scores)

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return [stop - start, D] float32: consecutive vectors.

        Args:
            start, stop: positions, stop excluded; at least one vector.
        """
        row_blocks = []
        while start < stop:
            block, row = divmod(start, self._size)
            rows = self.blocks[block][row : row + stop - start]
            row_blocks.append(np.asarray(rows, np.float32))
            start += len(rows)
        return np.concatenate(row_blocks)

    def array(self) -> np.ndarray:
        """Return all vectors in memory, [N, D] float32."""
        if len(self.blocks) == 1:
            return np.asarray(self.blocks[0], np.float32)
        out = np.empty((len(self), self.dim), np.float32)
        for number, block in enumerate(self.blocks):
            start = number * self._size
            out[start : start + len(block)] = block
        return out


def row_products(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return [..., n] float32 products of [..., n, D] rows and [..., 1, D] queries.

    Each row is a separate BLAS call, whose order of summation depends only on D and on
    the machine.
    """
    return np.vecdot(np.asarray(rows, np.float32), query)


def encode_shards(
    corpus: Any,
    encoder: Any,
    directory: str | pathlib.Path,
    numbers: Sequence[int],
    *,
    shard_size: int,
    dtype: str,
    made_from: str,
    vector_file: Any | None = None,
    lock: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
) -> list[str]:
    """Encode those of the given shards that are not encoded yet.

    Args:
        corpus: has `len` and `passages(indices)`, which returns a list of Passages.
        encoder: has `encode_passages`; passages that it cut are counted by its
            `num_cut`, if it has one.
        directory: directory of the shards; created if it is missing.
        numbers: numbers of the shards; see `count_shards`.
        dtype: dtype of the vectors on disk, one of DTYPES.
        made_from: text that is equal for equal corpus, encoder and settings.
        vector_file: the passages' vectors, which are then copied instead of encoded;
            see `rsearch.retrieval.vector_files.VectorFile`.
        lock: (name of a shard) -> context in which no other process writes it.

    Returns:
        [len(numbers)] digests of these shards.

    Raises:
        ValueError: the encoder returned a vector that is not finite, or a row of
            `vector_file` is not a valid vector of the encoder.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(exist_ok=True)
    digests, num_reused = [], 0
    num_cut = getattr(encoder, "num_cut", 0)  # before this call
    verb = "encoding" if vector_file is None else "copying"
    label = f"{verb} shards of {shard_size} passages"
    for number in progress(numbers, label):
        path = directory / shard_name(number)
        with lock(path.stem):
            digest = _finished_digest(path, made_from)
            num_reused += digest is not None
            if digest is None:
                start = number * shard_size
                stop = min(start + shard_size, len(corpus))
                if vector_file is None:
                    vectors = _encode(encoder, corpus.passages(range(start, stop)))
                else:
                    vectors = vector_file.rows(corpus, start, stop)
                digest = _write(path, vectors.astype(dtype), made_from)
        digests.append(digest)
    if num_reused:
        note(f"{num_reused} of {len(numbers)} shards existed already")
    note_cut_passages(encoder, num_cut)
    return digests


def note_cut_passages(encoder: Any, num_before: int = 0) -> None:
    """Say how many passages an encoder has cut to its limit, if it counts them.

    Args:
        encoder: may have `num_cut`, the number so far, and `max_passage_tokens`.
        num_before: those that are not counted.
    """
    if num_cut := getattr(encoder, "num_cut", 0) - num_before:
        limit = encoder.max_passage_tokens
        note(
            f"{num_cut:,} passages are longer than max_passage_tokens = {limit}: only "
            "their beginnings are encoded"
        )


def count_shards(num: int, shard_size: int) -> int:
    """Return the number of shards that `num` passages make."""
    return -(-num // shard_size)


def shard_name(number: int) -> str:
    """Return the name of the file with a shard's vectors."""
    return f"{number:05d}.npy"


def missing_shards(
    directory: str | pathlib.Path, numbers: Iterable[int], made_from: str
) -> list[int]:
    """Return the numbers of the unfinished shards, without reading vectors."""
    paths = {n: pathlib.Path(directory) / shard_name(n) for n in numbers}
    return [n for n, path in paths.items() if _recorded_digest(path, made_from) is None]


def open_vectors(directory: str | pathlib.Path, names: Iterable[str]) -> Vectors:
    """Map the vectors in these files into memory; only rows that are read use it."""
    directory = pathlib.Path(directory)
    return Vectors([np.load(directory / name, mmap_mode="r") for name in names])


def _encode(encoder, passages):
    vectors = encoder.encode_passages([passage.contents for passage in passages])
    assert vectors.shape == (len(passages), encoder.dim), vectors.shape
    bad_rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad_rows):
        raise ValueError(
            f"the encoder gave passage {passages[bad_rows[0]].id!r} a vector that is "
            f"not finite ({len(bad_rows)} of {len(passages)}): its weights are damaged"
        )
    return vectors


def _write(path, vectors, made_from):
    data = io.BytesIO()
    np.save(data, vectors, allow_pickle=False)
    files.replace(path, data.getbuffer())
    digest = files.digest_file(path)
    record = {"digest": digest, "made_from": made_from}
    files.replace(path.with_suffix(".json"), json.dumps(record).encode())
    return digest


def _finished_digest(path, made_from):
    """Return the digest of a shard if it is intact and made from the same, or None."""
    digest = _recorded_digest(path, made_from)
    if digest is None or (path.exists() and files.digest_file(path) == digest):
        return digest
    note(f"{path} is damaged: encoding it again")
    return None


def _recorded_digest(path, made_from):
    """Return the digest in a shard's record, or None if it was made differently."""
    record_path = path.with_suffix(".json")
    if not record_path.exists():
        return None
    try:
        record = json.loads(record_path.read_bytes())
        if record["made_from"] == made_from:
            return record["digest"]
        note(f"{path} was made from other inputs: encoding it again")
    except (ValueError, LookupError, TypeError, RecursionError):
        note(f"{path} is damaged: encoding it again")
    return None

"""Search a corpus by its words with BM25, without an encoder or an accelerator.

    bm25/words.json     the W words of the corpus, numbered by their positions
    bm25/starts.npy     [W + 1] int64: the first posting of each word, then P
    bm25/passages.npy   [P] int32: positions of the passages that contain the word
    bm25/scores.npy     [P] float32: what the word adds to that passage's score

The scores are Lucene's BM25, computed by bm25s (arXiv 2407.03618) when the index is
built. A search sums them over the words of a query, for which NumPy is enough. Only a
build imports bm25s, because the import makes JAX initialize its devices.
"""

import array
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rsearch.retrieval.index import (
    BM25,
    check_index_files,
    check_made_from,
    describe_inputs,
    read_index_manifest,
)
from rsearch.runtime import files
from rsearch.runtime.console import progress

WORD = re.compile(r"\w+")
WORDS = "words.json"
ARRAYS = {"starts": np.int64, "passages": np.int32, "scores": np.float32}
# Recorded in an index: a different rule for splitting words needs a different name.
TOKENIZER = r"lower-case \w+"
VARIANT = "lucene"
K1, B = 1.5, 0.75  # defaults
FINGERPRINT = f"{BM25} {K1} {B} {VARIANT} {TOKENIZER}"  # of indexes built in memory


class WordIndex:
    """An inverted index of passages; what a query finds depends on the query alone.

    Args:
        words: [W] distinct words.
        starts: [W + 1] int64, the first posting of each word, followed by P, the number
            of postings.
        passages: [P] int32 positions of passages, distinct for each word.
        scores: [P] float32, above 0.
    """

    def __init__(
        self,
        words: Sequence[str],
        starts: np.ndarray,
        passages: np.ndarray,
        scores: np.ndarray,
        *,
        num_passages: int,
    ):
        self._numbers = {word: number for number, word in enumerate(words)}
        self._starts, self._passages, self._scores = starts, passages, scores
        self._num_passages = num_passages

    def __len__(self) -> int:
        return self._num_passages

    def search(
        self, queries: Sequence[str], top_k: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return positions and scores of the passages that share words with each query.

        Passages with equal scores keep the order of the corpus. As in Lucene, a word
        that a query repeats counts once for each occurrence.

        Args:
            top_k: maximum number of passages per query. A passage that contains none of
                the query's words is never returned.
        """
        results = [self._search(query, top_k) for query in queries]
        return [row for row, _ in results], [scores for _, scores in results]

    def _search(self, query, top_k):
        totals = np.zeros(len(self), np.float32)
        for word in split_words(query):
            number = self._numbers.get(word)
            if number is not None:
                postings = slice(*self._starts[number : number + 2])
                totals[self._passages[postings]] += self._scores[postings]
        positions = np.flatnonzero(totals)
        scores = totals[positions]
        if len(scores) > top_k:
            # Keep all ties with the last score, so that the sort decides among them.
            is_candidate = scores >= np.partition(scores, -top_k)[-top_k]
            positions, scores = positions[is_candidate], scores[is_candidate]
        order = np.argsort(-scores, kind="stable")[:top_k]
        return positions[order], scores[order]


def split_words(text: str) -> list[str]:
    """Return the words of a text in order, as lower-case runs of letters and digits."""
    return WORD.findall(text.lower())


def postings_of(
    passages: Iterable, *, k1: float = K1, b: float = B
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the words of the passages, and the arrays of a WordIndex over them.

    Args:
        passages: objects with `contents`, in order.
        k1: how slowly the weight of a word that a passage repeats saturates.
        b: how strongly scores are normalized by passage length, 0 to 1.

    Returns:
        [W] words, empty if no passage has any, and {name from ARRAYS: array}.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs a line per index
    numbers: dict[str, int] = {}
    rows = []
    for passage in passages:
        words = split_words(passage.contents)
        row = (numbers.setdefault(word, len(numbers)) for word in words)
        rows.append(array.array("i", row))  # a list would take twice the memory
    if not numbers:
        empty = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
        return [], empty
    model = bm25s.BM25(k1=k1, b=b, method=VARIANT)
    tokenized = bm25s.tokenization.Tokenized(ids=rows, vocab=numbers)
    model.index(tokenized, create_empty_token=False, show_progress=False)
    keys = {"starts": "indptr", "passages": "indices", "scores": "data"}
    scores = {name: model.scores[key] for name, key in keys.items()}
    return [*numbers], {n: np.asarray(scores[n], dtype) for n, dtype in ARRAYS.items()}


def index_words(passages: Sequence) -> WordIndex:
    """Build an index of the words of passages in memory."""
    words, arrays = postings_of(passages)
    return WordIndex(words, **arrays, num_passages=len(passages))


def write_postings(folder: pathlib.Path, corpus: Any, *, k1: float, b: float) -> None:
    """Write the words of a corpus and their scores into a directory.

    Args:
        folder: the directory; replaced if it exists.
        corpus: has `len` and `path`, and yields its passages in order.
        k1, b: see `postings_of`.

    Raises:
        ValueError: the corpus has no words.
    """
    passages = progress(corpus, "reading the words of passages")
    words, arrays = postings_of(passages, k1=k1, b=b)
    if not words:
        raise ValueError(f"{corpus.path}: no passage has a word")
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted build
    folder.mkdir()
    files.replace(folder / WORDS, json.dumps(words).encode())
    for name, values in arrays.items():
        with files.replacing(folder / f"{name}.npy") as file:
            np.save(file, values, allow_pickle=False)


def open_bm25(
    path: str | os.PathLike, *, corpus: Any, verify: bool = True
) -> tuple[WordIndex, dict]:
    """Open a finished BM25 index of this corpus; return it and its manifest.

    Its arrays are memory-mapped, so memory is used only for what is read.

    Args:
        path, corpus, verify: see `rsearch.retrieval.index.open_index`.

    Raises:
        ValueError: there is no such index, its files differ from the manifest or do not
            fit together, or it was built from another corpus.
    """
    path = files.expand(path)
    manifest = read_index_manifest(path)
    if manifest.get("kind") != BM25:
        raise ValueError(f"{path} is an index of vectors, not of kind={BM25}")
    check_made_from(path, manifest, describe_inputs(corpus))
    text_settings = manifest["bm25"].get("tokenizer"), manifest["bm25"].get("variant")
    if text_settings != (TOKENIZER, VARIANT):
        raise ValueError(
            f"{path}: its tokenizer and variant are {text_settings}, but this program "
            f"uses {(TOKENIZER, VARIANT)}; build the index again"
        )
    if verify:
        check_index_files(path, manifest)
    folder = path / BM25
    arrays = {
        name: _open_array(folder / f"{name}.npy", ARRAYS[name]) for name in ARRAYS
    }
    words = _read_words(folder / WORDS)
    _check_postings(folder, words, **arrays, num_passages=len(corpus))
    return WordIndex(words, **arrays, num_passages=len(corpus)), manifest


def _open_array(path, dtype):
    try:
        # Unlike np.load, this reads only .npy, and never objects, which are pickles.
        values = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if values.dtype != dtype or values.ndim != 1:
        raise ValueError(
            f"{path} is damaged: {values.dtype} of shape {values.shape}, expected one "
            f"dimension of {np.dtype(dtype)}"
        )
    return np.asarray(values)


def _read_words(path):
    words = files.read_json(path)
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise ValueError(f"{path} is damaged: expected a JSON list of words")
    return words


def _check_postings(folder, words, *, starts, passages, scores, num_passages):
    """Raise a ValueError if the files of an index do not fit together."""
    if not words:
        raise ValueError(f"{folder / WORDS} is damaged: it has no words")
    if len(set(words)) != len(words):
        raise ValueError(f"{folder / WORDS} is damaged: a word occurs twice")
    if len(starts) != len(words) + 1:
        raise ValueError(
            f"{folder / 'starts.npy'} is damaged: {len(starts)} values for "
            f"{len(words)} words, expected {len(words) + 1}"
        )
    num_postings = len(passages)
    if len(scores) != num_postings or starts[0] != 0 or starts[-1] != num_postings:
        raise ValueError(
            f"{folder} is damaged: {num_postings} values in passages.npy, "
            f"{len(scores)} in scores.npy, and starts.npy runs from {starts[0]} to "
            f"{starts[-1]}"
        )
    if (np.diff(starts) < 1).any():
        raise ValueError(f"{folder / 'starts.npy'} is damaged: values do not increase")
    if passages.min() < 0 or passages.max() >= num_passages:
        raise ValueError(
            f"{folder / 'passages.npy'} is damaged: positions from {passages.min()} to "
            f"{passages.max()} in a corpus of {num_passages} passages"
        )
    # Written so that NaN fails the check: comparisons with NaN are False.
    if not (scores.min() > 0 and scores.max() < np.inf):
        raise ValueError(f"{folder / 'scores.npy'} is damaged: expected values above 0")

"""Rankings merged by reciprocal rank, with scores worked out by hand."""

import numpy as np
import pytest

from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.fused import FusedIndex
from rsearch.types import Passage
from tests.retrieval.fakes import FileCorpus, TableEncoder


class Ranking:
    """Ranks the same positions for every query."""

    dim = 16

    def __init__(self, positions, num):
        self._positions, self._num = np.array(positions, np.int64), num

    def __len__(self):
        return self._num

    def search(self, queries, top_k):
        row = self._positions[:top_k]
        return [row for _ in queries], [np.ones(len(row)) for _ in queries]


@pytest.mark.parametrize(
    ("by_vectors", "by_words", "expected"),
    [
        # 3 is second and first; 1, 0 and 2 are first, second and third of one ranking.
        ([1, 3, 2], [3, 0], {3: 1 / 62 + 1 / 61, 1: 1 / 61, 0: 1 / 62, 2: 1 / 63}),
        ([4, 2], [], {4: 1 / 61, 2: 1 / 62}),
        ([4, 2], [2, 4], {2: 1 / 61 + 1 / 62, 4: 1 / 61 + 1 / 62}),
    ],
)
def test_scores_are_sums_of_reciprocal_ranks(tmp_path, by_vectors, by_words, expected):
    corpus = FileCorpus([Passage(str(i), f"t{i}") for i in range(5)], tmp_path / "c")
    fused = FusedIndex(Ranking(by_vectors, 5), TableEncoder(), Ranking(by_words, 5))
    for top_k in (1, 2, 9):
        engine = SearchEngine(fused, None, corpus, top_k=top_k, fingerprint="f")
        for row in engine(["a", "b"]):
            actual = [(int(p.id), p.score) for p in row]
            assert [p for p, _ in actual] == [*expected][:top_k]
            scores = [*expected.values()][:top_k]
            assert [s for _, s in actual] == pytest.approx(scores)


def test_a_passage_that_both_rankings_place_low_can_come_first(tmp_path):
    """Both rankings are read beyond the number of passages that are returned."""
    first, second = [0, 1, 2, 3, 4, 9], [5, 6, 7, 8, 9]
    fused = FusedIndex(Ranking(first, 10), TableEncoder(), Ranking(second, 10))
    positions, _ = fused.search(["a"], 1)
    assert positions[0].tolist() == [9]

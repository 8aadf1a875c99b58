"""Which tokens the bars of a rollout's view stand for."""

import gzip
import json
import re

import pytest

from rsearch.evaluation.transcript_views import MAX_BARS, trained_views


@pytest.mark.parametrize("num_tokens", [2 * MAX_BARS, 2 * MAX_BARS - 1])
def test_each_token_has_one_bar(tmp_path, num_tokens):
    segment = {"source": "policy", "text": "x", "ids": list(range(num_tokens))}
    row = {"step": 0, "question": "?", "group": 0, "rollout": 0, "reward": 1.0}
    row |= {"question_id": "q", "outcome": "answered", "answer": "x", "queries": []}
    row |= {"advantage": 0.5, "segments": [segment]}
    (tmp_path / "rollouts").mkdir()
    with gzip.open(tmp_path / "rollouts" / "step_000000.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    (view,) = trained_views(tmp_path, 1)
    texts = [bar["text"].partition(",")[0] for bar in view["bars"]]
    numbers = [re.findall(r"\d+", text) for text in texts]
    named = [i for first, last in numbers for i in range(int(first), int(last) + 1)]
    assert named == list(range(num_tokens)) and len(numbers) == MAX_BARS

"""What the views of rollouts show, and which tokens their bars stand for."""

import gzip
import json
import re

import pytest

from rsearch.evaluation.transcript_views import (
    MAX_BARS,
    evaluated_views,
    trained_views,
)
from rsearch.runtime.jsonl import write_jsonl


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


def test_rollouts_that_no_normaliser_can_score_are_shown_without_scores(tmp_path):
    about = {"stage": "rl", "method": "protocol", "dataset": "d"}
    line = about | {"id": "q", "question": "Who?", "segments": []}
    line |= {"prediction": "x", "golden_answers": ["x"], "passages": [[{"id": "p"}]]}
    no_answer = {n: v for n, v in line.items() if n != "prediction"}
    newer = line | {"setting": "eval.normalize=newer"}
    write_jsonl(tmp_path / "transcripts.jsonl", [line, no_answer, newer])
    rows = [about | {"normalize": "squad"}]
    rows.append(about | {"setting": newer["setting"], "normalize": "newer"})
    (tmp_path / "results.json").write_text(json.dumps(rows))
    views = evaluated_views(tmp_path, ["rl"], 10)
    assert [view["scores"].get("em") for view in views] == [1.0, None, None]
    assert views[0]["passages"] == [[{"id": "p", "title": "", "score": None}]]


def test_lists_that_a_damaged_rollout_lacks_are_empty(tmp_path):
    segment = {"source": "policy", "text": "t", "ids": 3, "sampler_log_probs": True}
    line = {"step": 0, "question_id": "q", "question": "Who?", "answers": None}
    line |= {"queries": 1, "reward": 10**400, "advantage": 0.5, "segments": [segment]}
    folder = tmp_path / "rollouts"
    folder.mkdir()
    write_jsonl(folder / "step_000000.jsonl.gz", [line])
    (view,) = trained_views(tmp_path, 4)
    assert (view["answers"], view["bars"], view["num_searches"]) == ([], [], 0)
    assert view["segments"][0]["num_tokens"] == 0


@pytest.mark.parametrize(
    "fields", [{"prediction": 3}, {"golden_answers": "x"}, {"setting": ["x"]}]
)
def test_a_rollout_that_no_evaluation_wrote_is_refused(tmp_path, fields):
    line = {"stage": "rl", "method": "protocol", "dataset": "d", "id": "q"}
    line |= {"question": "Who?", "segments": [], **fields}
    write_jsonl(tmp_path / "transcripts.jsonl", [line])
    (name,) = fields
    with pytest.raises(ValueError, match=rf"transcripts\.jsonl:1: {name} = "):
        evaluated_views(tmp_path, ["rl"], 10)

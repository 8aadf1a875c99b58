"""Rows of results.json and the transcripts written with them."""

import numpy as np

from rsearch.evaluation import results
from rsearch.evaluation.predictions import read_predictions
from rsearch.rollout.health import NEEDLESS
from rsearch.types import Group
from tests.evaluation.test_scoring import GROUPS

ROW = {"stage": "rl", "step": 1, "method": "rag", "dataset": "d"}


def test_transcripts_name_seeds_and_samples():
    (first, second) = GROUPS[:2]
    asked = [Group(first.question, (*first.rollouts, *second.rollouts) * 2)]
    made_by = {"sampling.samples": 2, "sampling.seeds": [5, 6]}
    told = results.transcripts(asked, ROW | {"made_by": made_by})
    assert [(t["seed"], t["sample"]) for t in told] == [(5, 0), (5, 1), (6, 0), (6, 1)]
    assert len({t["id"] for t in told}) == 1


def test_transcripts_have_the_passages_of_each_search_and_the_reward(tmp_path):
    groups = GROUPS[:2]
    rewards = np.float32([[0.5], [np.nan]]), {"answer_em": np.float32([[1], [0]])}
    rows = results.transcripts(groups, ROW, rewards=rewards)
    searches = [len(g.rollouts[0].searches) for g in groups]
    passage = {"id": "p", "title": "Title", "score": 0.0}
    assert [r["passages"] for r in rows] == [[[passage]] * n for n in searches]
    assert [r["reward"] for r in rows] == [0.5, "NaN"]
    assert [r["reward_parts"] for r in rows] == [{"answer_em": 1}, {"answer_em": 0}]
    # They are read like those of earlier versions, which lack these fields.
    results.record_results(tmp_path, ROW | {"normalize": "squad"}, rows)
    assert results.read_transcripts(tmp_path) == rows
    ((predictions,),) = [read_predictions(tmp_path / "transcripts.jsonl").values()]
    assert [p["prediction"] for p in predictions] == [r["prediction"] for r in rows]
    (row, _) = results.transcripts(groups, ROW)
    assert "reward" not in row


def test_searches_of_samples_are_needless_if_direct_is_always_right(tmp_path):
    same = {"normalize": "squad", "questions": "x"}
    same["made_by"] = {"sampling.samples": 2, "sampling.seeds": [0]}
    searching, other = GROUPS[1].rollouts[0], GROUPS[0].rollouts[0]
    right, wrong = GROUPS[0].rollouts[0], GROUPS[2].rollouts[0]
    asked = {
        "direct": [(right, right), (right, wrong)],
        "protocol": [(searching, other), (searching, searching)],
    }
    for method, rollouts in asked.items():
        groups = [Group(g.question, r) for g, r in zip(GROUPS, rollouts, strict=False)]
        row = ROW | same | {"method": method}
        rows = results.record_results(tmp_path, row, results.transcripts(groups, row))
    assert rows[1][NEEDLESS] == 1 / 2

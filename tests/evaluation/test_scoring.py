"""Means over questions, and their intervals."""

import dataclasses
import json

import numpy as np
import pytest

from rsearch.evaluation.scoring import score_groups, score_rows, scores_of_rows
from rsearch.evaluation.statistics import bootstrap_interval, wilson_interval
from rsearch.tools.search import search_use
from rsearch.types import (
    Group,
    Outcome,
    Passage,
    Question,
    Rollout,
    Segment,
    Source,
)

ROWS = [
    {"golden_answers": ["Paris"], "prediction": "paris"},
    {"golden_answers": ["Paris"], "prediction": "Paris France city"},
    {"golden_answers": ["Paris", "Lyon"], "prediction": None},
    {"golden_answers": ["Nice"], "prediction": "Rome"},
]


def test_scores_are_means_of_the_rows_scores():
    expected = {"n": 4, "em": 0.25, "cover_em": 0.5, "f1": 0.375}
    actual = score_rows(ROWS, "squad")
    assert expected.items() <= actual.items()
    assert actual["em_95"] == [*wilson_interval(1, 4)]
    assert actual["cover_em_95"] == [*wilson_interval(2, 4)]
    assert actual["f1_95"] == [*bootstrap_interval([1, 0.5, 0, 0])]
    np.testing.assert_allclose(scores_of_rows(ROWS, "squad")["f1"], [1, 0.5, 0, 0])


def test_no_rows_have_no_mean():
    with pytest.raises(ValueError, match="no rows"):
        score_rows([], "squad")


SCORES = ("em", "f1", "cover_em")
OUTCOMES = tuple(o.value for o in Outcome)


def segment(source, text):
    ids = np.arange(len(text), dtype=np.int32)
    return Segment(source, ids, np.zeros(len(ids), np.float32), text)


def group(
    number, answer, golden, *, num_searches=0, outcome=Outcome.ANSWERED, **metadata
):
    """Return a rollout of 4 prompt tokens, 5 policy tokens and 3 for each search."""
    actual = (Passage("p", "Title\nText"),)
    searches = (search_use((f"query {number}",), (actual,)),) * num_searches
    shown = [segment(Source.SEARCH, "abc")] * num_searches
    segments = (segment(Source.PROMPT, "What"), segment(Source.POLICY, "12345"), *shown)
    question = Question(f"q{number}", f"Question {number}?", golden, metadata)
    rollout = Rollout(segments, answer, searches, outcome)
    return Group(question, (rollout,))


GROUPS = [
    group(0, "Paris", ("paris", "Lutetia")),  # exactly right
    group(1, "in Paris", ("Paris",), num_searches=2),  # F1 2/3, covers
    group(2, "Rome", ("Paris",), num_searches=1),  # wrong
    group(3, None, ("Paris",), num_searches=1, outcome=Outcome.TRUNCATED),
]


def test_a_summary_is_means_counts_and_intervals():
    row = score_groups(GROUPS, normalize="squad")
    assert row["n"] == 4
    assert row["em"] == 1 / 4
    assert row["f1"] == pytest.approx((1 + 2 / 3) / 4)
    assert row["cover_em"] == 2 / 4
    assert row["searches"] == (0 + 2 + 1 + 1) / 4
    assert row["policy_tokens"] == 5
    assert row["tokens"] == 4 + 5 + 3 * 4 / 4
    assert [row[o] for o in OUTCOMES] == [3, 0, 1, 0, 0]
    for name in SCORES:
        low, high = row[f"{name}_95"]
        assert 0 <= low <= row[name] <= high <= 1
    json.dumps(row, allow_nan=False)


def test_searches_are_counted_as_turns_as_queries_and_by_correctness():
    row = score_groups(GROUPS, normalize="squad")
    assert (row["searches_right"], row["searches_wrong"]) == (0, (2 + 1 + 1) / 3)
    assert row["unsearched"] == 1 / 4
    (parallel,) = group(0, "x", ("x",), num_searches=1).rollouts
    lookup = search_use(("a", "b", "c"), ((), (), ()))
    parallel = dataclasses.replace(parallel, tool_uses=(lookup, lookup))
    actual = score_groups([Group(GROUPS[0].question, (parallel,))], normalize="squad")
    assert (actual["searches"], actual["queries"]) == (2, 6)
    none = score_groups(GROUPS[:1], normalize="squad")
    assert (none["searches_right"], none["searches_wrong"]) == (0, None)


def test_notes_are_summarised_by_name():
    (rollout,) = GROUPS[0].rollouts
    notes = [("p", 0.2), ("p", 0.4), ("searched", 1.0)]
    noted = dataclasses.replace(rollout, notes=tuple(notes))
    groups = [
        Group(GROUPS[0].question, (noted, noted)),
        Group(GROUPS[1].question, (rollout, rollout)),
    ]
    assert score_groups(groups, normalize="squad")["notes"] == {
        "p": {
            "n": 4,
            "mean": pytest.approx(0.3),
            "quartiles": pytest.approx([0.2, 0.2, 0.3, 0.4, 0.4]),
        },
        "searched": {"n": 2, "mean": 1.0, "quartiles": [1.0] * 5},
    }
    assert score_groups(GROUPS, normalize="squad")["notes"] == {}


def test_a_summary_is_split_by_kind_of_question():
    asked = [
        group(0, "Paris", ("Paris",), kind="bridge", known=True, num_searches=1),
        group(1, "Rome", ("Paris",), kind="bridge", known=False, num_searches=2),
        group(2, "yes", ("yes",), kind="single", known=False),
        group(3, "no", ("no",)),
    ]
    row = score_groups(asked, normalize="squad")
    scores = dict.fromkeys(SCORES, 0.5)
    assert row["by_kind"] == {
        "bridge": {"n": 2, **scores, "searches": 1.5},
        "single": {"n": 1, **dict.fromkeys(SCORES, 1.0), "searches": 0.0},
    }
    assert row["by_known"] == {
        "known": {"n": 1, **dict.fromkeys(SCORES, 1.0), "searches": 1.0},
        "not known": {"n": 2, **scores, "searches": 1.0},
    }
    bare = score_groups(GROUPS, normalize="squad")
    assert bare["by_kind"] == {} == bare["by_known"]


@pytest.mark.fault(77, "mean over nothing")
def test_there_is_no_mean_if_all_rollouts_have_failed():
    def failed(number, outcome, kind):
        (rollout,) = group(0, None, ("x",)).rollouts
        rollout = dataclasses.replace(rollout, outcome=outcome, answer=None)
        question = Question(str(number), "?", ("x",), {"kind": kind})
        return Group(question, (rollout,))

    all_failed = [
        failed(0, Outcome.JUDGE_ERROR, "bridge"),
        failed(1, Outcome.TOOL_ERROR, "bridge"),
    ]
    row = score_groups(all_failed, normalize="squad")
    assert [row[name] for name in SCORES] == [None] * len(SCORES)
    assert row["em_95"] is None and (row["n"], row["judge_error"]) == (2, 1)
    wrong = failed(2, Outcome.MALFORMED, "single")
    row = score_groups([*all_failed, wrong], normalize="squad")
    assert row["em"] == 0.0
    assert [row["by_kind"][kind]["em"] for kind in ("bridge", "single")] == [None, 0.0]
    json.dumps(row, allow_nan=False)


def test_intervals_of_equal_scores_have_a_width():
    row = score_groups([GROUPS[0]] * 8, normalize="squad")
    assert row["em_95"] == row["cover_em_95"] == [pytest.approx(0.6756, abs=1e-4), 1]
    assert row["f1_95"] == [pytest.approx(0.05 ** (1 / 7)), 1]


def sampled(number, *answers, **metadata):
    rollouts = [group(number, a, ("Paris",)).rollouts[0] for a in answers]
    question = group(number, None, ("Paris",), **metadata).question
    return Group(question, tuple(rollouts))


def test_the_samples_of_a_question_do_not_count_as_questions():
    """Two seeds with two samples each have EM 0.5 and 0.75 on two questions."""
    groups = [
        sampled(0, "Paris", "Paris", "Paris", "Paris", kind="a"),
        sampled(1, "Rome", None, "Paris", "Rome", kind="b"),
    ]
    row = score_groups(groups, normalize="squad", num_seeds=2)
    assert (row["n"], row["rollouts"], row["answered"]) == (2, 8, 8)
    assert row["em"] == (1 + 1 / 4) / 2 and row["em_sd"] == pytest.approx(0.25 / 2**0.5)
    assert row["em_95"] == [*bootstrap_interval([1, 1 / 4])]
    assert {k: (v["n"], v["em"]) for k, v in row["by_kind"].items()} == {
        "a": (1, 1.0),
        "b": (1, 1 / 4),
    }
    lines = [
        {
            "prediction": r.answer,
            "golden_answers": ["Paris"],
            "sample_of": g.question.id,
        }
        for g in groups
        for r in g.rollouts
    ]
    scored = score_rows(lines, "squad")
    assert {name: row[name] for name in scored} == scored
    one_seed = score_groups(groups, normalize="squad")
    assert "em_sd" not in one_seed and one_seed["em_95"] == row["em_95"]
    assert not {"rollouts", "em_sd"} & score_groups(GROUPS, normalize="squad").keys()


def test_the_named_normalisation_is_used():
    asked = [group(0, "no-one", ("no one",))]
    assert score_groups(asked, normalize="squad")["em"] == 0
    assert score_groups(asked, normalize="r1_searcher")["em"] == 1

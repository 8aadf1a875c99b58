"""Compare stored rollouts with recomputed ones: what differs, and where."""

import copy

import pytest

from rsearch.evaluation.difference_table import report_differences
from rsearch.rollout.rollout_differences import (
    Comparison,
    compare_metrics,
    compare_rollouts,
)


def row(number, **fields):
    """Return a line of a step's file, with two turns; the second has two tokens."""
    turns = [
        {"source": "policy", "ids": [1], "log_probs": [-0.5]},
        {"source": "search", "ids": [2]},
        {"source": "policy", "ids": [3, 4], "log_probs": [-1.0, "-Infinity"]},
    ]
    return {
        "group": number // 2,
        "rollout": number % 2,
        "params": "ab",
        "outcome": "answered",
        "reward": 1.0,
        "reward_parts": {"em": 1.0, "judged": "NaN"},
        "in_loss": True,
        "advantage": 0.25,
        "segments": turns,
    } | fields


STORED = [row(i) for i in range(4)]


def changed(number, change):
    """Return the rollouts of STORED after applying `change` to one of them."""
    again = copy.deepcopy(STORED)
    change(again[number])
    return again


def set_log_prob(value):
    """Return a change that sets the log-prob of the second turn's first token."""
    return lambda row: row["segments"][2]["log_probs"].__setitem__(0, value)


def differing(comparisons):
    return [x for x in comparisons if x.num_different]


def test_values_of_tokens_are_counted_by_token_and_others_by_rollout():
    counts = {x.name: x.count for x in compare_rollouts(STORED, STORED)}
    once = ("params", "reward", "reward_em", "reward_judged", "in_loss")
    assert counts == dict.fromkeys(once, 4) | {"log_probs": 12, "advantage": 12}
    assert not differing(compare_rollouts(STORED, STORED))


@pytest.mark.parametrize(
    "change, expected",
    (
        (set_log_prob(-1.5), ("log_probs", 12, 1, 0.5)),
        (set_log_prob("-Infinity"), ("log_probs", 12, 1, None)),
        (lambda row: row["reward_parts"].update(em=0.0), ("reward_em", 4, 1, 1.0)),
        (lambda row: row.update(params="cd"), ("params", 4, 1, None)),
        # Recomputed per token: the stored number applies to all three.
        (
            lambda row: row.update(advantage=[0.25, 0.5, 0.25]),
            ("advantage", 12, 1, 0.25),
        ),
        (lambda row: row.update(advantage=None), ("advantage", 12, 3, None)),
    ),
)
def test_a_difference_is_reported_with_its_first_rollout(change, expected):
    (found,) = differing(compare_rollouts(STORED, changed(3, change)))
    assert found == Comparison(*expected, first=(1, 1))
    assert not differing(
        compare_rollouts(STORED, changed(3, change), excluded=(expected[0],))
    )


def test_the_report_says_whether_it_counts_tokens_or_rollouts(capsys):
    again = changed(3, set_log_prob(-1.5))
    comparisons = compare_rollouts(STORED, again) + compare_metrics({"l": 1}, {"l": 1})
    lines = [line | {"question_id": "q"} for line in STORED]
    assert report_differences(comparisons, lines) == 1
    equal, _, different = capsys.readouterr().out.partition("different")
    words = " ".join(equal.split())
    assert "params (4 rollouts)" in words and "advantage (12 tokens)" in words
    assert "metrics: l" in words and "12 tokens" in different


def test_the_tolerance_applies_only_after_the_first_num_exact_rollouts():
    again = changed(2, set_log_prob(-1.01))
    settings = dict(num_exact=2, tolerance=0.1)
    assert not differing(compare_rollouts(STORED, again, **settings))
    assert differing(compare_rollouts(STORED, again, num_exact=3, tolerance=0.1))
    # The tolerance never applies to rewards.
    again = changed(2, lambda row: row.update(reward=1.01))
    assert differing(compare_rollouts(STORED, again, **settings))


def test_the_samplers_log_probs_replace_log_probs_that_are_not_stored():
    def by_sampler(row):
        for turn in row["segments"]:
            if "log_probs" in turn:
                turn["sampler_log_probs"] = turn.pop("log_probs")

    stored = copy.deepcopy(STORED)
    for line in stored:
        by_sampler(line)
    again = changed(0, set_log_prob(-1.01))
    assert not differing(compare_rollouts(stored, again, tolerance=0.1))
    (found,) = differing(compare_rollouts(stored, again, tolerance=0.001))
    assert (found.name, found.first) == ("sampler_log_probs", (0, 0))


def test_reward_parts_of_a_rollout_with_a_judge_error_are_not_compared():
    stored = [row(0, outcome="judge_error", reward=0.0)]
    again = [row(0, outcome="judge_error", reward=0.0, reward_parts={"judged": 0.0})]
    assert not differing(compare_rollouts(stored, again))


def test_metrics_are_compared_by_name_and_a_missing_one_counts_as_different():
    stored = {"step": 3, "loss": 0.5, "kl": float("nan"), "reward": 1.0}
    assert not differing(compare_metrics(stored, {"loss": 0.5, "kl": float("nan")}))
    found = differing(compare_metrics(stored, {"loss": 0.25, "entropy": 1.0}))
    assert [(x.name, x.largest) for x in found] == [
        ("metrics.loss", 0.25),
        ("metrics.entropy", None),
    ]

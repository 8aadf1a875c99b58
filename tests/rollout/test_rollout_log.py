"""The rollouts that a stage stores at each step, with what was learnt from them."""

import gzip
import json
from typing import NamedTuple

import numpy as np
import pytest

from rsearch.rollout import rollout_log
from rsearch.rollout.records import encode_groups
from rsearch.rollout.rollout_log import (
    RolloutLog,
    learnt_advantages,
    read_rollouts,
    stored_steps,
)
from rsearch.rollout.stored_groups import stored_groups
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

PASSAGES = (Passage("p1", "A title\ntext", 0.25), Passage("p2", "Another\n", None))
PADDING = Passage("p3", "Third\n", -np.inf)  # as some services return it


class FakeBatch(NamedTuple):
    """The arrays of a step's batch from which values are stored, [M, b, T]."""

    advantage: np.ndarray
    from_policy: np.ndarray


def segment(source, ids, logp=0.0):
    ids = np.array(ids, np.int32)
    return Segment(source, ids, np.full(len(ids), logp, np.float32), f"<{ids}>")


def group(name):
    """Return a group: a rollout that searches, and one without signal (tool error)."""
    segments = (
        segment(Source.PROMPT, [1, 2]),
        segment(Source.POLICY, [3, 4], np.float32(-0.1)),
        segment(Source.SEARCH, [5]),
        segment(Source.POLICY, [6], -np.inf),
    )
    search = search_use(("who", "where"), ((PASSAGES[0],), (PASSAGES[1], PADDING)))
    good = Rollout(segments, "x", (search,), Outcome.ANSWERED)
    failed = Rollout(segments[:2], None, (), Outcome.TOOL_ERROR)
    question = Question(name, "Who?", ("x", "y"), {"kind": "bridge"})
    return Group(question, (good, failed))


def scored(count=2):
    rewards, terms = np.float32([1.1, 0]), {"judged": np.float32([0.3, np.nan])}
    return [(group(f"q{i}"), rewards, terms) for i in range(count)]


def batch(advantage):
    """Return a batch of two such groups with [T] advantages on their policy tokens."""
    learns = np.array([[0, 0, 1, 1, 0, 1], [0] * 6] * 2, bool)
    values = np.where(learns, np.float32(advantage), 0).astype(np.float32)
    return FakeBatch(values.reshape(2, 2, 6), learns.reshape(2, 2, 6))


def write(folder, step, advantage=(0, 0, 1, 1, 0, 1), *, groups=1, logp=None):
    log = RolloutLog(folder, groups)
    log.write(step, scored(), batch(advantage), logp, params="ab")
    return folder / "rollouts" / f"step_{step:06}.jsonl.gz"


def test_a_rollout_is_stored_with_tokens_rewards_passages_and_advantage(tmp_path):
    logp = np.arange(24, dtype=np.float32).reshape(2, 2, 6) / 7
    write(tmp_path, 12, logp=logp)
    first, second = read_rollouts(tmp_path, 12)
    assert [(r["step"], r["question_id"], r["group"]) for r in (first, second)] == [
        (12, "q0", 0)
    ] * 2
    assert first["answers"] == ["x", "y"] and first["kind"] == "bridge"
    assert (first["policy_version"], first["outcome"]) == (12, "answered")
    assert first["queries"] == ["who", "where"] and first["searches"] == 1
    assert first["passages"] == [
        [
            {"id": "p1", "title": "A title", "score": 0.25},
            {"id": "p2", "title": "Another", "score": None},
            {"id": "p3", "title": "Third", "score": "-Infinity"},
        ]
    ]
    assert [s["source"] for s in first["segments"]] == [
        "prompt",
        "policy",
        "search",
        "policy",
    ]
    assert [s["ids"] for s in first["segments"]] == [[1, 2], [3, 4], [5], [6]]
    # Numbers are read back as the same float32 values.
    assert np.float32(first["reward"]) == np.float32(1.1)
    turn = first["segments"][1]
    assert np.float32(turn["sampler_log_probs"]).tolist() == [np.float32(-0.1)] * 2
    np.testing.assert_array_equal(np.float32(turn["log_probs"]), logp[0, 0, 2:4])
    assert first["advantage"] == 1 and first["in_loss"]
    # Nothing is learnt from the other rollout, so it has no log-probabilities.
    assert second["advantage"] == 0 and not second["in_loss"]
    assert "log_probs" not in second["segments"][1]


def test_non_finite_numbers_are_stored_as_valid_json(tmp_path):
    path = write(tmp_path, 0)

    def refuse(name):
        raise AssertionError(name)

    lines = gzip.decompress(path.read_bytes()).splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert second["reward_parts"] == {"judged": "NaN"}
    assert first["segments"][3]["sampler_log_probs"] == ["-Infinity"]


def test_advantages_that_differ_by_token_are_stored_as_a_list(tmp_path):
    write(tmp_path, 0, (9, 9, 0.5, 0.25, 9, -1))
    assert read_rollouts(tmp_path, 0)[0]["advantage"] == [0.5, 0.25, -1]


def test_learnt_advantages_are_those_of_tokens_in_the_loss():
    values = learnt_advantages(batch((9, 9, 0.5, 0.25, 9, -1)))
    assert values.tolist() == [0.5, 0.25, -1] * 2


@pytest.mark.parametrize("groups", (0, 1, 5))
def test_no_more_groups_are_stored_than_asked_for_or_than_the_step_has(
    tmp_path, groups
):
    path = write(tmp_path, 0, groups=groups)
    lines = read_rollouts(tmp_path, 0) if path.exists() else []
    assert len(lines) == 2 * min(groups, 2)


def test_a_repeated_step_writes_the_same_bytes_and_removes_later_steps(tmp_path):
    paths = [write(tmp_path, step) for step in (0, 1, 2)]
    before = paths[1].read_bytes()
    assert write(tmp_path, 1).read_bytes() == before
    assert stored_steps(tmp_path) == [0, 1]


def test_the_folder_is_listed_only_after_a_start_or_a_roll_back(tmp_path, monkeypatch):
    """Listing it in every step would make the steps of a long run ever slower."""
    write(tmp_path, 7)  # left over from an earlier start
    looks = []
    step_files = rollout_log._step_files
    monkeypatch.setattr(
        rollout_log, "_step_files", lambda folder: looks.append(1) or step_files(folder)
    )
    log = RolloutLog(tmp_path, 1)
    for step, looked in ((0, 1), (1, 1), (2, 1), (1, 2), (2, 2)):
        log.write(step, scored(), batch(np.ones(6)), None, params="ab")
        assert len(looks) == looked
    assert stored_steps(tmp_path) == [0, 1, 2]


def test_a_step_without_an_update_is_stored_without_advantages(tmp_path):
    RolloutLog(tmp_path, 1).write(3, scored(), None, None, params="ab")
    row, _ = read_rollouts(tmp_path, 3)
    assert row["advantage"] is None and not row["in_loss"]


@pytest.mark.parametrize("line", ("[]", '{"step": 1}', '{"segments": [{}]}', "{"))
def test_an_invalid_line_is_refused_by_file_and_line(tmp_path, line):
    path = write(tmp_path, 0)
    path.write_bytes(gzip.compress(line.encode() + b"\n"))
    with pytest.raises(ValueError, match=r"step_000000\.jsonl\.gz:1: "):
        read_rollouts(tmp_path, 0)


def test_stored_groups_are_bit_identical_to_those_of_the_step(tmp_path):
    write(tmp_path, 0, groups=2)
    rows = read_rollouts(tmp_path, 0)
    groups, rewards = stored_groups(rows, {n: group(n).question for n in ("q0", "q1")})
    before = [group for group, _, _ in scored()]
    assert encode_groups(groups) == encode_groups(before)
    assert [g.question for g in groups] == [g.question for g in before]
    np.testing.assert_array_equal(rewards, [r for _, r, _ in scored()])


@pytest.mark.parametrize(
    "change, named",
    (
        (lambda rows: rows[0].pop("tools"), "'tools'"),
        (lambda rows: rows[0].pop("policy_version"), "'policy_version'"),
        (lambda rows: rows[0].update(reward=None), "reward = None"),
        (lambda rows: rows[0].update(reward_parts=[1]), "reward_parts = "),
        (lambda rows: rows.pop(), "group 1"),
        (lambda rows: rows[1]["segments"][1].update(ids=["x"]), "group 0, rollout 1"),
        (lambda rows: rows[1]["segments"][1].update(log_probs=2), "group 0, rollout 1"),
        (lambda rows: rows[2].update(reward=None), "group 1, rollout 0"),
        (lambda rows: rows[2].update(reward_parts=[]), "group 1, rollout 0"),
        (lambda rows: rows[2].update(policy_version="1"), "group 1, rollout 0"),
        (lambda rows: rows[2].update(group=[]), "group 1"),
        (lambda rows: rows[0].update(question_id="q9"), "'q9'"),
        (lambda rows: rows.clear(), "no rollout"),
    ),
)
def test_stored_rollouts_that_do_not_form_valid_groups_are_refused(
    tmp_path, change, named
):
    write(tmp_path, 0, groups=2)
    rows = read_rollouts(tmp_path, 0)
    change(rows)
    with pytest.raises(ValueError, match=named):
        stored_groups(rows, {n: group(n).question for n in ("q0", "q1")})

"""Rebuild the groups of a step from its stored rollouts."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.rollout.records import rollout_of
from rsearch.types import Group, Question, Rollout, Segment, Source

NUMBER = int | float | str  # a number that is not finite is a text
REQUIRED_FIELDS = {
    "tools": dict,
    "params": str,
    "policy_version": int,
    "reward": NUMBER,
    "reward_parts": dict,
    "in_loss": bool,
    "advantage": NUMBER | list | None,
}


def stored_groups(
    rows: Sequence[Mapping], questions: Mapping[str, Question]
) -> tuple[list[Group], np.ndarray]:
    """Return the Q groups in a step's lines, and their [Q, G] float32 rewards.

    Args:
        rows: lines from `rollout_log.read_rollouts`.
        questions: {id: question}, which must include the groups' questions.

    Raises:
        ValueError: a line is not in this version's format, a group lacks a rollout, or
            its question is missing.
    """
    if not rows:
        raise ValueError("no rollout is stored")
    for row in rows:
        for name, kind in REQUIRED_FIELDS.items():
            if name not in row:
                raise ValueError(
                    f"a rollout has no {name!r}: written by an earlier version"
                )
            if not isinstance(row[name], kind):
                raise ValueError(f"{_name(row)}: {name} = {row[name]!r:.60}")
    by_group = itertools.groupby(rows, key=lambda row: row.get("group"))
    members = [(group, list(lines)) for group, lines in by_group]
    size = max(len(lines) for _, lines in members)
    groups, rewards = [], []
    for number, (group, lines) in enumerate(members):
        numbers = [row.get("rollout") for row in lines]
        if group != number or numbers != list(range(size)):
            raise ValueError(f"group {number} lacks rollouts: it has {numbers}")
        name = lines[0]["question_id"]
        if name not in questions:
            raise ValueError(
                f"group {number}: config.data.train no longer has question {name!r}"
            )
        rollouts, group_rewards = zip(*map(_rollout_and_reward, lines), strict=True)
        groups.append(Group(questions[name], rollouts))
        rewards.append(group_rewards)
    return groups, np.array(rewards, np.float32)


def _rollout_and_reward(row) -> tuple[Rollout, float]:
    try:
        segments = [
            Segment(
                Source[segment["source"].upper()],
                np.array(segment["ids"], np.int32),
                _token_logp(segment, "sampler_log_probs"),
                segment["text"],
            )
            for segment in row["segments"]
        ]
        # The values below are only compared with recomputed ones.
        for segment in row["segments"]:
            _token_logp(segment, "log_probs")
        # The row has the outcome and the answer; `tools` has the calls and counts.
        return rollout_of({**row, **row["tools"]}, segments), float(row["reward"])
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        message = f"{_name(row)}: not a rollout in this version's format"
        raise ValueError(message) from None


def _name(row) -> str:
    """Return the name of a row's rollout in messages."""
    return f"group {row.get('group')}, rollout {row.get('rollout')}"


def _token_logp(segment, field) -> np.ndarray:
    """Return [n] float32 log-probabilities; zeros if the segment does not have them."""
    count = len(segment["ids"])
    values = segment.get(field, [0.0] * count)
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probabilities for {count} tokens")
    return np.array([float(x) for x in values], np.float32)

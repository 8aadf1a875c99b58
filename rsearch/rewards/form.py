"""Reward terms on a rollout's form, for any protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

from rsearch.protocols.base import Protocol
from rsearch.types import Question, Rollout


def format_ok(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    protocol: Protocol,
    good: float = 0.0,
    bad: float = -1.0,
) -> list[float]:
    """Return [G] `good` where the rollout followed its protocol throughout, else `bad`.

    It did if every turn held a valid action, the last action was an answer, and the
    policy itself wrote no tag of an observation.
    """
    tags = protocol.observation_tags()
    is_ok = [
        r.answer is not None
        and not r.num_malformed
        and not any(tag.search(turn) for tag in tags for turn in r.policy_texts)
        for r in rollouts
    ]
    return [good if ok else bad for ok in is_ok]


def overlong(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    max_tokens: int,
    buffer_tokens: int,
    penalty: float = 1.0,
) -> list[float]:
    """Return [G] DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), <= 0.

    With L = max_tokens and B = buffer_tokens: 0 up to L - B tokens, then falling
    linearly to -penalty at L, and -penalty beyond. Only tokens that the policy wrote
    are counted: it does not control the length of passages.

    Args:
        question, rollouts: a question and its group of rollouts.
        max_tokens: L, for all turns together.
        buffer_tokens: B, from 1 to L.
        penalty: 1 in the paper.
    """
    excess = [r.num_policy_tokens - (max_tokens - buffer_tokens) for r in rollouts]
    return [-penalty * min(max(e, 0) / buffer_tokens, 1.0) for e in excess]


def check_overlong(field: str, settings: Mapping[str, Any]) -> None:
    """Refuse a buffer that is empty or longer than the limit."""
    buffer, limit = settings["buffer_tokens"], settings["max_tokens"]
    if not 1 <= buffer <= limit:
        raise ValueError(
            f"{field}.buffer_tokens = {buffer}: must be from 1 to max_tokens = {limit}"
        )

"""Terms about a rollout's form that fit any protocol."""

from collections.abc import Sequence

from rsearch.protocols.tagged import mentions_tag
from rsearch.types import Question, Rollout

OBSERVATIONS = (  # tags around retrieved text, of any protocol: never the policy's own
    "information",
    "observation",
    "|begin_of_documents|",
    "|end_of_documents|",
    "|begin_search_result|",
    "|end_search_result|",
)


def format_ok(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    good: float = 0.0,
    bad: float = -1.0,
) -> list[float]:
    """[G] `good` where the rollout kept to its protocol to the end, else `bad`.

    It did if every turn held a valid action, the last one an answer, and the policy
    wrote no observation itself.
    """
    is_ok = [
        r.answer is not None
        and not r.num_malformed
        and not any(forges(r, tag) for tag in OBSERVATIONS)
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
    """[G] DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), <= 0.

    With L = max_tokens and B = buffer_tokens: 0 up to L - B tokens, then falling
    linearly to -penalty at L, and -penalty beyond. Only tokens that the policy wrote
    are counted: the length of passages is not its doing.

    Args:
        question, rollouts: of one group.
        max_tokens: L, of all turns together.
        buffer_tokens: B, from 1 to L.
        penalty: 1 in the paper.
    """
    assert 1 <= buffer_tokens <= max_tokens, (buffer_tokens, max_tokens)
    excess = [r.num_policy_tokens - (max_tokens - buffer_tokens) for r in rollouts]
    return [-penalty * min(max(e, 0) / buffer_tokens, 1.0) for e in excess]


def forges(rollout: Rollout, tag: str) -> bool:
    """Whether the policy itself wrote this tag, opening or closing."""
    return any(mentions_tag(turn, tag) for turn in rollout.policy_texts)

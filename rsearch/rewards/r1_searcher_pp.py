"""R1-Searcher++'s format and group rewards (Song et al. 2025, equations 3 to 6)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rsearch.rewards.answers import answer_cover_em
from rsearch.rewards.r1_searcher import is_garbled, searches_ok
from rsearch.rewards.reading import Normalize, Order
from rsearch.types import Question, Rollout

BEGIN_SEARCH, END_SEARCH = "<|begin_external_search|>", "<|end_external_search|>"
RESULT_TAGS = ("<|begin_search_result|>", "<|end_search_result|>")


def r1_searcher_pp_format(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    good: float = 0.0,
    bad: float = -2.0,
) -> list[float]:
    """Return [G] `good` where the format is right, else `bad`: the paper's equation 3.

    It is right if every query is between its tags and was searched for, the policy
    wrote no search result itself, the final answer is in a box, and no text is garbled
    (`rsearch.rewards.r1_searcher.is_garbled`).
    """
    values = []
    for rollout in rollouts:
        is_right = (
            rollout.answer is not None
            and searches_ok(rollout, BEGIN_SEARCH, END_SEARCH, RESULT_TAGS)
            and not any(map(is_garbled, rollout.policy_texts))
        )
        values.append(good if is_right else bad)
    return values


def group_fewest_searches(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    eta: float = 2.0,
    over: Literal["all", "correct"] = "all",
    ddof: int = 0,
    normalize: Normalize = "r1_searcher",
    order: Order = "any",
    max_words: int = 10,
) -> list[float]:
    """Return [G] min(2 sigma^2, eta) for right rollouts that searched least, else 0.

    R1-Searcher++'s equations 5 and 6: sigma is the standard deviation of the number of
    searches. If all rollouts search equally often, the reward is 0. Rollouts that are
    no learning signal are neither counted nor rewarded.

    Args:
        question, rollouts: as in `answer_em`.
        eta: the largest reward.
        over: rollouts over which sigma is computed: "all", as in the formula, or the
            "correct" ones, as in the paper's text.
        ddof: 0 takes the population's deviation, 1 the sample's; the paper leaves it
            open. For fewer than ddof + 1 rollouts the deviation is 0.
        normalize, order, max_words: definition of a right answer, as in
            `answer_cover_em`; equation 4.
    """
    settings = {"normalize": normalize, "order": order, "max_words": max_words}
    is_right = np.array(answer_cover_em(question, rollouts, **settings), bool)
    is_signal = np.array([r.outcome.is_signal for r in rollouts], bool)
    is_right &= is_signal
    if not is_right.any():
        return [0.0] * len(rollouts)
    num_searches = np.array([len(r.searches) for r in rollouts])
    sample = num_searches[is_signal if over == "all" else is_right]
    variance = sample.var(ddof=ddof) if len(sample) > ddof else 0.0
    is_paid = is_right & (num_searches == num_searches[is_right].min())
    return np.where(is_paid, min(2 * variance, eta), 0.0).tolist()

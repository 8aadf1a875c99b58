"""Return the budgets of a rollout that a configuration sets."""

from ml_collections import ConfigDict

from rsearch.rollout.conversation import Limits


def configured_limits(c: ConfigDict) -> Limits:
    """Return the limits of a rollout that config.rollout sets."""
    r = c.rollout
    return Limits(
        max_searches=r.max_searches,
        max_prompt_tokens=r.max_prompt_tokens,
        max_turn_tokens=r.max_turn_tokens,
        max_observation_tokens=r.max_observation_tokens,
        forced_final_turn=r.forced_final_turn,
        cuts_tags=r.cut_tags,
    )

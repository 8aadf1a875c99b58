"""Settings with which a learner is made."""

import pytest

from rsearch.setup.learners import policy_settings
from tests.small_run import config, load_setup, quick_compilation

__all__ = ["quick_compilation"]


@pytest.mark.parametrize(
    "fields, tokens",
    [
        ({}, 4 * 24),  # three turns that search and the final one
        ({"rollout__forced_final_turn": False}, 3 * 24),
        ({"rollout__max_searches": 0}, 24),
        ({"rl__loss_tokens": 7}, 7),
    ],
)
def test_a_constant_mean_divides_by_the_most_tokens_that_turns_can_have(fields, tokens):
    sizes = {"stages": ("rl",), "rl__loss_mean": "constant"}
    setup = load_setup(config(**{"rollout__max_searches": 3} | sizes | fields))
    settings = policy_settings(setup)
    assert (settings["loss_mean"], settings["loss_tokens"]) == ("constant", tokens)

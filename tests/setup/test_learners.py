"""Settings with which a learner is made."""

import jax.numpy as jnp
import pytest

from rsearch.setup.learners import policy_optimizer, policy_settings, value_settings
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


@pytest.mark.parametrize(
    "policy_mean, critic_mean",
    [("token", "token"), ("sequence", "token"), ("micro_token", "sequence")],
)
def test_a_critics_micro_batches_have_one_row_in_the_public_code(
    policy_mean, critic_mean
):
    run = config(rl__algorithm="ppo", rl__loss_mean=policy_mean)
    assert value_settings(run)["loss_mean"] == critic_mean


def test_a_decay_ends_at_a_tenth_if_at_first_only_the_critic_learns():
    fields = {"rl__algorithm": "ppo", "rl__decay": True, "critic__pretrain_steps": 2}
    fields |= {"rl__steps": 5, "rl__updates_per_step": 2, "rl__micro_batch": 4}
    optimizer = policy_optimizer(config(**fields), "rl")
    params = {"gate": jnp.zeros(1)}
    state, changes = optimizer.init(params), []
    for _ in range((5 - 2) * 2):
        # Adam divides a constant gradient by itself: a change is the rate.
        change, state = optimizer.update({"gate": jnp.full(1, 0.1)}, state, params)
        changes.append(float(change["gate"][0]))
    assert changes[-1] / changes[0] == pytest.approx(0.1, rel=1e-3)

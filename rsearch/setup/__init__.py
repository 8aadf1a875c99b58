"""From a configuration to the objects of a run. Nothing below takes a config."""

from rsearch.setup.agents import load_agent, recorded_agent
from rsearch.setup.beginnings import merged_weights
from rsearch.setup.engines import (
    make_baseline,
    make_host,
    make_rollouts,
    replay_demonstrations,
)
from rsearch.setup.learners import (
    fresh_state,
    frozen,
    has_critic,
    make_critic,
    make_learner,
    resting,
    state_shapes,
    weight_shapes,
)
from rsearch.setup.setup import Setup, Shared, check_names, initial_params, load_setup

__all__ = [
    "Setup",
    "Shared",
    "check_names",
    "fresh_state",
    "frozen",
    "has_critic",
    "initial_params",
    "load_agent",
    "load_setup",
    "make_baseline",
    "make_critic",
    "make_host",
    "make_learner",
    "make_rollouts",
    "merged_weights",
    "recorded_agent",
    "replay_demonstrations",
    "resting",
    "state_shapes",
    "weight_shapes",
]

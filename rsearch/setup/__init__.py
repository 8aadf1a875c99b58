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
    has_critic,
    make_trainer,
    make_weight_merge,
    offload_reference,
    state_shapes,
    weight_shapes,
)
from rsearch.setup.setup import Setup, Shared, check_names, initial_params, load_setup
from rsearch.setup.stages import (
    load_rewriter,
    memory_settings,
    record_services,
    rl_parts,
)

__all__ = [
    "Setup",
    "Shared",
    "check_names",
    "fresh_state",
    "has_critic",
    "initial_params",
    "load_agent",
    "load_rewriter",
    "load_setup",
    "make_baseline",
    "make_host",
    "make_rollouts",
    "make_trainer",
    "make_weight_merge",
    "memory_settings",
    "merged_weights",
    "offload_reference",
    "record_services",
    "recorded_agent",
    "replay_demonstrations",
    "rl_parts",
    "state_shapes",
    "weight_shapes",
]

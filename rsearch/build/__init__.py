"""From a configuration to the objects of a run. Nothing below takes a config."""

from rsearch.build.agents import load_agent
from rsearch.build.engines import (
    make_baseline,
    make_host,
    make_learner,
    make_rollouts,
    replay_demonstrations,
)
from rsearch.build.setup import Setup, Shared, initial_params, load_setup

__all__ = [
    "Setup",
    "Shared",
    "initial_params",
    "load_agent",
    "load_setup",
    "make_baseline",
    "make_host",
    "make_learner",
    "make_rollouts",
    "replay_demonstrations",
]

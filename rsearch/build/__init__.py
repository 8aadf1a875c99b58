"""From a configuration to the objects of a run. Nothing below takes a config."""

from rsearch.build.engines import (
    baseline_chats,
    demonstrations,
    make_baseline,
    make_host,
    make_learner,
    make_rollouts,
)
from rsearch.build.setup import Setup, initial_params, load_setup

__all__ = [
    "Setup",
    "baseline_chats",
    "demonstrations",
    "initial_params",
    "load_setup",
    "make_baseline",
    "make_host",
    "make_learner",
    "make_rollouts",
]

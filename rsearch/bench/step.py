"""Measure the time of a step of reinforcement learning, and of its parts."""

import collections
import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from rsearch.bench.comparison import OURS, Bench, Measurement, make_row
from rsearch.config.stage_plan import kind_of, stage_configs
from rsearch.data.order import step_items
from rsearch.rewards.group import reward_groups
from rsearch.runtime.console import progress
from rsearch.setup.learners import make_trainer, offload_reference
from rsearch.setup.load import load_setup
from rsearch.setup.rollouts import make_host, make_rollouts, replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages import sft
from rsearch.stages.policy_update import update_policy

CONFIG = "configs/quickstart.py"
FLAGS = {"stage": ("", "stage to measure; the first RL stage if not given")}
PARTS = ("place", "prefill", "decode", "reward", "score", "update", "idle")


class Clock:
    """Counts the seconds of each part of a step."""

    def __init__(self):
        self.seconds = collections.Counter()

    def timed(self, name: str, function: Callable) -> Callable:
        """Return the function, but with its time counted until the device is done."""

        @functools.wraps(function)
        def call(*args, **settings):
            start_time = time.perf_counter()
            result = jax.block_until_ready(function(*args, **settings))
            self.seconds[name] += time.perf_counter() - start_time
            return result

        return call

    def watch(self, name: str, owner: object, *methods: str) -> None:
        """Time these methods of an object from now on."""
        for method in methods:
            setattr(owner, method, self.timed(name, getattr(owner, method)))


def measure(
    start: Callable[[], Bench], config: ConfigDict, *, stage: str
) -> list[Measurement]:
    """Return seconds of the parts of a step, as the median of several steps.

    A policy with random weights is first trained by the recipe's supervised stage, so
    that it searches. The PARTS, with "idle" for the rest, add up to the whole step;
    "search" runs in the engine's thread, mostly at the same time as "decode".

    Args:
        start: probes the machine.
        stage: name of the RL stage to measure; "" is the first one.

    Raises:
        ValueError: there is no such stage.
    """
    stages = [s for s, _ in stage_configs(config) if kind_of(s) == "rl"]
    if not stages or stage not in ("", *stages):
        stage_names = ", ".join(stages) or "none"
        raise ValueError(f"--stage={stage}: must be an RL stage: {stage_names}")
    bench = start()  # first: the setup takes this process's accelerator
    stage = stage or stages[0]
    setup = load_setup(dict(stage_configs(config))[stage])
    params = initial_params(setup)
    if setup.source is None and "sft" in config.stages:
        params = _train_supervised(config, params)
    params = offload_reference(setup, params)
    steps = _time_steps(setup, params, bench.repeats)
    totals = [step["whole"] for step in steps]
    case = f"step of {config.name}"
    tokens = [step["tokens"] / step["whole"] for step in steps]
    rows = [
        make_row(f"{case}: whole", OURS, "s", totals),
        make_row(f"{case}: tokens written", OURS, "tokens/s", tokens),
    ]
    for name in (*PARTS, "search"):
        seconds = [step[name] for step in steps]
        share = float(np.median([s / total for s, total in zip(seconds, totals)]))
        counts = {"share of the step": share}
        rows.append(make_row(f"{case}: {name}", OURS, "s", seconds, counts=counts))
    return rows


def _train_supervised(config, params):
    """Return the parameters after the recipe's supervised stage."""
    setup = load_setup(dict(stage_configs(config))["sft"])
    with tempfile.TemporaryDirectory(prefix="rsearch-bench-") as folder:
        rollouts = replay_demonstrations(setup)
        return sft.run(
            sft.SFTStage(
                setup.config,
                pathlib.Path(folder),
                make_trainer(setup, "sft"),
                rollouts,
            ),
            params,
        )


def _time_steps(setup, params, repeats) -> list[dict]:
    """Return {part: seconds} of each step except the first, which compiles."""
    c = setup.config
    clock = Clock()
    host = make_host(setup)
    host.tools["search"] = clock.timed("search", host.tools["search"])
    roll_out = make_rollouts(
        setup,
        host,
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=c.rollout.group_size,
        is_step=True,
    )
    clock.watch("prefill", roll_out.sampler, "prefill", "admit", "extend")
    clock.watch("decode", roll_out.sampler, "decode")
    trainer = make_trainer(setup, "rl")
    timed_functions = {
        name: clock.timed(name.partition("_")[0], function)
        for name in ("score", "update", "score_values", "update_values")
        if (function := getattr(trainer, name)) is not None
    }
    trainer = dataclasses.replace(trainer, **timed_functions)
    reward = clock.timed("reward", reward_groups)
    base = trainer.base_of(params)
    state = trainer.fresh_state(params)
    reference = params if c.rl.kl_coef else None

    def place_params(params):
        return roll_out.place_params(trainer.for_decoding(params, base))

    timed_place = clock.timed("place", place_params)
    root = jax.random.key(c.seed)
    steps = []
    for step in progress(range(1 + repeats), "steps"):
        indices = step_items(
            len(setup.train), c.rl.questions_per_step, seed=c.seed, step=step
        )
        clock.seconds.clear()
        start_time = time.perf_counter()
        groups = roll_out(
            timed_place(state.params),
            [setup.train[i] for i in indices],
            jax.random.fold_in(root, step),
        )
        terms = c.reward.to_dict()
        rewards, _, groups = reward(
            groups, terms, protocol=setup.protocol, judge=setup.judge
        )
        state, _ = update_policy(
            c,
            trainer,
            state,
            groups,
            rewards,
            num_tokens=setup.num_tokens,
            # At first only a critic may learn, which is less than a step's work.
            step=c.critic.pretrain_steps + step,
            base=base,
            reference=reference,
        )
        total = time.perf_counter() - start_time
        counted_seconds = sum(clock.seconds[name] for name in PARTS)
        steps.append(
            {name: clock.seconds[name] for name in (*PARTS, "search")}
            | {"whole": total, "idle": total - counted_seconds}
            | {"tokens": sum(r.num_policy_tokens for g in groups for r in g.rollouts)}
        )
    return steps[1:]

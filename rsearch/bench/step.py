"""A whole step of reinforcement measured, and what its time goes to."""

import collections
import dataclasses
import functools
import pathlib
import tempfile
import time

import jax
import numpy as np

from rsearch.bench.comparison import OURS, Bench, Row, row_of
from rsearch.config.stage_plan import kind_of, stage_configs
from rsearch.data.order import take
from rsearch.rewards.group import reward_groups
from rsearch.runtime.console import progress
from rsearch.setup.learners import make_trainer
from rsearch.setup.load import load_setup
from rsearch.setup.rollouts import make_host, make_rollouts, replay_demonstrations
from rsearch.setup.weights import initial_params
from rsearch.stages import sft
from rsearch.stages.policy_update import update_policy

CONFIG = "configs/quickstart.py"
FLAGS = {"stage": ("", "that is measured; the first that reinforces where not given")}
PARTS = ("place", "prefill", "decode", "reward", "score", "update", "idle")


class Clock:
    """Seconds that go to each part of a step."""

    def __init__(self):
        self.seconds = collections.Counter()

    def timed(self, part: str, function):
        """The function, its time counted until the device has done what it asked."""

        @functools.wraps(function)
        def call(*args, **settings):
            started = time.perf_counter()
            found = jax.block_until_ready(function(*args, **settings))
            self.seconds[part] += time.perf_counter() - started
            return found

        return call

    def watch(self, part: str, owner, *names):
        """Times these methods of an object from now on."""
        for name in names:
            setattr(owner, name, self.timed(part, getattr(owner, name)))


def measure(bench: Bench, config, *, stage) -> list[Row]:
    """Seconds of the parts of a step, by the median of several steps.

    A policy that has no weights of its own is first trained by the supervised stage, as
    the recipe has it, so that it searches. The parts that use the device, and "idle",
    which is the rest, make the whole; "search" is what the engine's thread takes,
    mostly beside "decode".

    Args:
        bench: see `Bench`.
        config: a recipe.
        stage: name of the stage to measure; "" is the first of its kind.

    Raises:
        ValueError: there is no such stage.
    """
    found = [s for s, _ in stage_configs(config) if kind_of(s) == "rl"]
    if not found or stage not in ("", *found):
        there = ", ".join(found) or "none"
        raise ValueError(f"--stage={stage}: stages that reinforce: {there}")
    stage = stage or found[0]
    setup = load_setup(dict(stage_configs(config))[stage])
    params = initial_params(setup)
    if setup.source is None and "sft" in config.stages:
        params = _imitated(config, params)
    told = _steps(setup, params, bench.repeats)
    whole = [one["whole"] for one in told]
    case = f"step of {config.name}"
    tokens = [one["tokens"] / one["whole"] for one in told]
    rows = [
        row_of(f"{case}: whole", OURS, "s", whole),
        row_of(f"{case}: tokens written", OURS, "tokens/s", tokens),
    ]
    for part in (*PARTS, "search"):
        seconds = [one[part] for one in told]
        share = float(np.median([s / w for s, w in zip(seconds, whole)]))
        counts = {"share of the step": share}
        rows.append(row_of(f"{case}: {part}", OURS, "s", seconds, counts=counts))
    return rows


def _imitated(config, params):
    """The parameters after the recipe's supervised stage."""
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


def _steps(setup, params, repeats) -> list[dict]:
    """{part: seconds} of each step but the first, which compiles."""
    c, clock = setup.config, Clock()
    host = make_host(setup)
    host.tools["search"] = clock.timed("search", host.tools["search"])
    roll_out = make_rollouts(
        setup,
        host,
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=c.rollout.group_size,
    )
    clock.watch("prefill", roll_out.sampler, "prefill", "admit", "extend")
    clock.watch("decode", roll_out.sampler, "decode")
    trainer = make_trainer(setup, "rl")
    timed = {
        name: clock.timed(name.partition("_")[0], function)
        for name in ("score", "update", "score_values", "update_values")
        if (function := getattr(trainer, name)) is not None
    }
    trainer = dataclasses.replace(trainer, **timed)
    reward = clock.timed("reward", reward_groups)
    base = trainer.base_of(params)
    state = trainer.fresh_state(params)
    reference = params if c.rl.kl_coef else None

    def placed(params):
        return roll_out.place_params(trainer.for_decoding(params, base))

    place = clock.timed("place", placed)
    root, told = jax.random.key(c.seed), []
    for step in progress(range(1 + repeats), "steps"):
        chosen = take(len(setup.train), c.rl.questions_per_step, seed=c.seed, step=step)
        clock.seconds.clear()
        started = time.perf_counter()
        groups = roll_out(
            place(state.params),
            [setup.train[i] for i in chosen],
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
            step=step,
            base=base,
            reference=reference,
        )
        whole = time.perf_counter() - started
        used = sum(clock.seconds[part] for part in PARTS)
        told.append(
            {part: clock.seconds[part] for part in (*PARTS, "search")}
            | {"whole": whole, "idle": whole - used}
            | {"tokens": sum(r.num_policy_tokens for g in groups for r in g.rollouts)}
        )
    return told[1:]

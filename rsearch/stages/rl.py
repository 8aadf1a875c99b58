"""Reinforcement stage: roll out, reward, compare within groups, update."""

import collections
import dataclasses
import math
import time

import jax
import numpy as np

from rsearch import build, console
from rsearch.compiles import num_compiles
from rsearch.data.order import take
from rsearch.learn.batch import pack, split
from rsearch.learn.update import with_advantages
from rsearch.metrics import MetricsLog
from rsearch.rewards.group import reward_group
from rsearch.stages.state import open_state, save_state
from rsearch.types import Outcome

STAGE_KEY = 2  # folded into the seed: what this stage draws, no other does


def run(setup: build.Setup, evaluator, params, folder, *, stage="rl", memory=None):
    """Trains by reinforcement, from where an earlier start of this stage stopped.

    Args:
        setup: of the run.
        evaluator: of held-out questions, asked every config.eval.every_steps.
        params: of the policy before this stage; they stay the reference.
        folder: of this stage: checkpoints, metrics.jsonl, curves.
        stage: its name.
        memory: what is memorised beside (see `rsearch.stages.memory`), or None.

    Returns:
        The policy's parameters after the stage.
    """
    c = setup.config
    learner, first, state = open_state(setup, "rl", params, folder)
    if first >= c.rl.steps:
        return state.params
    roll_out = build.make_rollouts(
        setup,
        build.make_host(setup),
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=c.rollout.group_size,
    )
    reference = params if c.rl.kl_coef else None
    root = jax.random.fold_in(jax.random.key(c.seed), STAGE_KEY)
    with MetricsLog(folder, first_step=first) as metrics:
        for step in range(first, c.rl.steps):
            clock = _Clock()
            chosen = take(
                len(setup.train), c.rl.questions_per_step, seed=c.seed, step=step
            )
            questions = [setup.train[i] for i in chosen]
            key = jax.random.fold_in(root, step)
            groups = roll_out(
                roll_out.place(state.params), questions, key, on_wave=_teller(c, step)
            )
            clock.lap("rollout")
            groups, rewards, measured = reward(setup, groups)
            clock.lap("reward")
            state, learnt = learn(setup, learner, state, reference, groups, rewards)
            clock.lap("update")
            measured |= learnt | clock.seconds | {"compiles": num_compiles()}
            done = step + 1
            if c.eval.every_steps and done % c.eval.every_steps == 0:
                row, _ = evaluator(state.params, "protocol")
                measured |= {f"dev_{n}": row[n] for n in ("em", "f1", "searches")}
            metrics.write(step, measured)
            if done % c.log_every == 0 or done == c.rl.steps:
                console.note(_line(done, c.rl.steps, measured))
            save_state(setup, "rl", done, state, folder)
    return state.params


def reward(setup: build.Setup, groups):
    """What the rollouts earn.

    Returns:
        The groups (a rollout whose judge failed has that outcome), [Q, G] rewards, and
        {name: number} for the log; means are over rollouts that are a signal.
    """
    terms = setup.config.reward.to_dict()
    judged, totals, parts = [], [], collections.defaultdict(list)
    for group in groups:
        total, by_term, group = reward_group(group, terms, judge=setup.judge)
        judged.append(group)
        totals.append(total)
        for name, values in by_term.items():
            parts[name].append(values)
    rewards = np.stack(totals)
    rollouts = [r for group in judged for r in group.rollouts]
    is_signal = np.array([r.outcome.is_signal for r in rollouts]).reshape(rewards.shape)
    measured = {"reward": _mean(rewards[is_signal])}
    for name, values in parts.items():
        values = np.stack(values)
        # NaN is left in a term of weight 0, whose judge could not be asked.
        measured[f"reward_{name}"] = _mean(values[is_signal & ~np.isnan(values)])
    spread = [np.ptp(r[s]) > 0 for r, s in zip(rewards, is_signal) if s.any()]
    measured["groups_with_spread"] = _mean(spread)
    measured["searches"] = _mean([len(r.searches) for r in rollouts])
    measured["policy_tokens"] = _mean([r.num_policy_tokens for r in rollouts])
    measured["tokens"] = _mean([r.num_tokens for r in rollouts])
    for outcome in Outcome:
        measured[outcome.value] = _mean([r.outcome == outcome for r in rollouts])
    return judged, rewards, measured


def _mean(values) -> float:
    """0 of nothing: a step without signal is counted, not NaN."""
    return float(np.mean(values)) if len(values) else 0.0


def learn(setup: build.Setup, learner, state, reference, groups, rewards):
    """Optimizer steps on one step's rollouts: the new state and their mean metrics.

    Where none of an update's rollouts is a signal there is no update, for the
    optimizer's momentum would move the policy all the same.

    Args:
        reference: parameters that the policy is kept near, or None.
        groups: Q groups of G.
        rewards: [Q, G].
    """
    s = setup.config.rl
    batches = split(
        pack(groups, rewards, setup.num_tokens), s.updates_per_step, s.micro_batch
    )
    batches = [batch for batch in batches if batch.is_signal.any()]
    if not batches:
        console.note("rl: no rollout of this step is a signal; nothing is learnt")
        return state, {}
    # All rows are scored before the first update: it reuses the policy's buffers.
    ready = []
    for batch in batches:
        batch = learner.put(batch)
        if s.behavior == "scored":
            batch = batch._replace(behavior_logp=learner.score(state.params, batch))
        if reference is not None:
            batch = batch._replace(reference_logp=learner.score(reference, batch))
        ready.append(
            with_advantages(
                batch,
                group_size=len(groups[0].rollouts),
                normalize_std=s.normalize_std,
                eps=s.std_eps,
                kl_coef=s.kl_coef if s.kl_place == "reward" else 0.0,
                kl_kind=s.kl_kind,
            )
        )
    measured = []
    for batch in ready:
        state, metrics = learner.update(state, batch)
        measured.append(jax.device_get(metrics))
    mean = jax.tree.map(lambda *values: float(np.mean(values)), *measured)
    return state, mean


def _teller(c, step):
    """Says how far the rollouts are, where they take long."""
    last = time.monotonic()

    def on_wave(done):
        nonlocal last
        if time.monotonic() - last > console.SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            total = c.rl.questions_per_step
            console.note(f"rl: step {step + 1}: rolled out {done}/{total} questions")

    return on_wave


def _line(done, steps, measured):
    """One step for people."""
    seconds = sum(v for name, v in measured.items() if name.endswith("_seconds"))
    dev = f", dev EM {measured['dev_em']:.3f}" if "dev_em" in measured else ""
    return (
        f"rl: step {done}/{steps} reward {measured['reward']:.3f}, "
        f"{measured['searches']:.2f} searches, {measured['policy_tokens']:.0f} tokens, "
        f"entropy {measured.get('entropy', math.nan):.3f}{dev} ({seconds:.1f} s)"
    )


@dataclasses.dataclass
class _Clock:
    """Seconds of the parts of a step."""

    seconds: dict = dataclasses.field(default_factory=dict)
    last: float = dataclasses.field(default_factory=time.monotonic)

    def lap(self, name):
        now = time.monotonic()
        self.seconds[f"{name}_seconds"], self.last = now - self.last, now

"""Reinforcement stage: roll out, reward, compare, update.

`run` is the loop, top to bottom. The parts of a step are in `stages.groups` (which
questions, and what is measured of their rollouts), `stages.policy_update` (from groups
and rewards to optimizer steps) and `stages.ahead` (rollouts beside the update).
"""

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Sequence

import jax
import xxhash
from ml_collections import ConfigDict

from rsearch.config.fields import to_json
from rsearch.hosts import processes
from rsearch.learn.trainer import Trainer
from rsearch.rollout.records import (
    Rewarded,
    RolloutCache,
    decode_rewarded,
    encode_rewarded,
    params_fingerprint,
)
from rsearch.rollout.rollout_log import RolloutLog, learnt_advantages
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.runtime import console
from rsearch.runtime.compiles import num_compiles
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.metrics import LapTimer, MetricsLog
from rsearch.stages.ahead import PendingStep, RolloutsAhead, SampledStep
from rsearch.stages.groups import (
    conversations,
    distributions,
    groups_and_rewards,
    sample_groups,
    with_rewards,
)
from rsearch.stages.policy_update import update_policy
from rsearch.stages.state import StageState
from rsearch.types import Params, Question

STAGE_KEY = 2  # folded into the seed: what this stage draws, no other does
MAX_TEXTS = 4  # conversations of a step in TensorBoard


@dataclasses.dataclass(frozen=True)
class RLStage:
    """The objects of a reinforcement stage.

    Attributes:
        config: of the stage.
        folder: of the stage: checkpoints, metrics.jsonl, curves.
        trainer: compiled updates.
        rollouts: (params, questions, key) -> groups.
        score: groups -> ([Q, G] rewards, {term: [Q, G]}, groups).
        health: groups -> how they search, see `rsearch.rollout.health`.
        questions: to learn from.
        num_tokens: T, of the longest conversation.
        inputs: {name: fingerprint} of what rollouts depend on beside the configuration.
        name: of the stage.
        run_id: of the run, which its checkpoints name.
        evaluate: params -> {"em", "f1", "searches"} on held-out questions.
        memory: the set T to memorise (see `rsearch.stages.memory`), or None.
    """

    config: ConfigDict
    folder: pathlib.Path
    trainer: Trainer
    rollouts: RolloutEngine
    score: Callable
    health: Callable
    questions: Sequence[Question]
    num_tokens: int
    inputs: dict[str, str]
    name: str = "rl"
    run_id: str = ""
    evaluate: Callable | None = None
    memory: object = None


def run(stage: RLStage, params: Params):
    """Train by reinforcement, from where an earlier start of this stage stopped.

    Args:
        stage: its objects.
        params: of the policy before this stage; they stay the reference. If the stage
            trains adapters, they become what it returns, and must not be touched again.

    Returns:
        The policy's parameters after the stage.
    """
    # The newest checkpoint, or a fresh state that copies the policy.
    c, trainer = stage.config, stage.trainer
    state = StageState(
        c,
        "rl",
        trainer,
        params,
        stage.folder,
        name=stage.name,
        run_id=stage.run_id,
    )
    base = trainer.base_of(params)
    if state.is_over:
        return trainer.final_weights(state.train_state.params, base)
    # Without a KL term no pass through the reference is needed.
    reference = params if c.rl.kl_coef else None
    journal = AppendLog(stage.folder, "rollouts")  # those since the last checkpoint
    # Rollouts in the journal count only for the configuration and inputs that made
    # them: a changed one rolls out again. What is stored for people makes none.
    settings = {name: value for name, value in c.to_dict().items() if name != "log"}
    made_from = json.dumps(stage.inputs, sort_keys=True) + to_json(settings)
    made_from = xxhash.xxh3_128(made_from.encode("utf-8", "surrogatepass")).hexdigest()
    log = MetricsLog(stage.folder, first_step=state.num_rows)
    rollout_log = RolloutLog(stage.folder, c.log.rollouts)
    ahead = RolloutsAhead(stage.folder, made_from, stage.questions)
    # What the rollouts of all steps have in common.
    begin = functools.partial(next_rollouts, stage, journal, made_from)
    num_restarts = stage.rollouts.num_restarts

    with state.save_on_preemption(), log, ahead:
        if c.rl.max_staleness:
            # A checkpoint needs the rollouts of the next step: the policy that sampled
            # them is no longer there when it is restored.
            state.keep_beside = ahead.store
            if not ahead.restore(state.done, state.roll_backs) and state.done:
                console.note(
                    f"{stage.name}: no rollouts of step {state.done + 1} are stored; "
                    "the newest policy samples them"
                )
        if state.pending_metrics is not None:  # stopped before this row was written
            finish_step(stage, state, base, journal, log)
        while state.done < c.rl.steps:
            state.stop_if_preempted()
            # A step taken again after a roll-back has other questions and rollouts.
            step, attempt, timer = state.done, state.roll_backs, LapTimer()

            # With max_staleness they were sampled while the step before learned, by the
            # policy from before it.
            sampled = ahead.take(step, attempt)
            timer.lap("rollout")
            # The copy that decodes may have another layout and dtype.
            decoding = stage.rollouts.place_params(
                trainer.for_decoding(state.train_state.params, base)
            )
            # Always so without max_staleness; with it where a stage begins, or begins
            # again after a roll-back.
            if sampled is None:
                # Most of a step's time: see rollout.scheduler.
                pending = begin(decoding, step, attempt, timer)
                sampled = SampledStep(*pending.sample(), pending.params, step)
                del pending
            scored, metrics = sampled.scored, sampled.metrics
            # If the KV cache is too small for all rows, some rollouts restart.
            if c.rollout.cache_tokens:
                metrics["restarts"] = stage.rollouts.num_restarts - num_restarts
                num_restarts = stage.rollouts.num_restarts
            # The next step's, beside this step's update.
            if c.rl.max_staleness:
                metrics["staleness"] = step - sampled.version
                if step + 1 < c.rl.steps:
                    if not c.rollout.devices:  # the update reuses buffers of the state
                        decoding = jax.tree.map(lambda x: x.copy(), decoding)
                    pending = begin(
                        decoding, step + 1, attempt, LapTimer(), ahead.check
                    )
                    ahead.begin(pending, step + 1, attempt, version=step)
                    del pending
            del decoding  # the update needs its room
            # The update reuses the state's buffers: once begun it must come to its end.
            processes.check_preempted(on_all_hosts=True)

            groups, rewards = groups_and_rewards(scored)
            # For TensorBoard; texts take room, hence of evaluated steps alone.
            is_last = step + 1 == c.rl.steps
            num_texts = MAX_TEXTS if is_last or is_evaluated(c, step + 1) else 0
            log.draw(step, distributions(scored), conversations(scored, num_texts))

            # R1-Searcher++ memorises what this step's correct searches have found.
            memory_rows = []
            if stage.memory is not None:
                metrics |= stage.memory.collect(step, groups)
                memory_rows = stage.memory.rows(step)
                timer.lap("memory")

            # For people: some groups with what is learnt from them, see rollout_log,
            # and a histogram of what each token of all groups is reinforced by.
            def record(batch, logp, step=step, sampled=sampled):
                state.retry_io(
                    lambda: rollout_log.write(
                        step,
                        sampled.scored,
                        batch,
                        logp,
                        params=sampled.params,
                        version=sampled.version,
                    )
                )
                if batch is not None:
                    log.draw(step, {"advantage": learnt_advantages(batch)})

            # The gradient: advantages, loss and optimizer steps, see policy_update.
            train_state, update_metrics = update_policy(
                c,
                trainer,
                state.train_state,
                groups,
                rewards,
                num_tokens=stage.num_tokens,
                step=step,
                base=base,
                reference=reference,
                memory_rows=memory_rows,
                guards=state.guards,
                record=record,
            )
            timer.lap("update")
            # First of all: what the state had before has gone into the update.
            metrics |= update_metrics
            state.advance(train_state, pending_metrics=metrics)
            del train_state  # a roll-back has no room for two
            # A checkpoint needs the next rollouts, and an evaluation their devices.
            if state.is_due(step + 1) or is_evaluated(c, step + 1):
                ahead.wait()
                timer.lap("rollout")
            metrics |= timer.seconds | {"compiles": num_compiles()}
            finish_step(stage, state, base, journal, log)
    return trainer.final_weights(state.train_state.params, base)


def step_key(seed: int, stage_name: str, step: int, attempt: int = 0) -> jax.Array:
    """Return the random key of one step's rollouts."""
    key = jax.random.fold_in(jax.random.key(seed), stage_key(stage_name))
    if attempt:
        key = jax.random.fold_in(key, attempt)
    return jax.random.fold_in(key, step)


def stage_key(name: str) -> int:
    """Return the number that is folded into the seed of a stage of this name."""
    return STAGE_KEY if name == "rl" else zlib.crc32(name.encode()) & 0x7FFFFFFF


def next_rollouts(
    stage: RLStage,
    journal: AppendLog,
    made_from: str,
    params: Params,
    step: int,
    attempt: int,
    timer: LapTimer,
    check: Callable[[], None] = lambda: None,
) -> PendingStep:
    """Return how to roll out and reward the groups of a step.

    Args:
        stage: its objects.
        journal: of rollouts that have ended since the last checkpoint.
        made_from: fingerprint of all but the policy that rollouts follow from.
        params: of the policy, as `place_params` of the rollout engine returns them.
        step: from 0.
        attempt: roll-backs so far.
        timer: gets the laps.
        check: called now and then; what it raises ends the rollouts.
    """
    c = stage.config
    # Rollouts that had ended before an interruption are the same only if the policy is,
    # to the bit: hence its fingerprint.
    fingerprint = params_fingerprint(params)
    rollout_cache = RolloutCache(journal, [made_from, step, attempt, fingerprint])
    # A function of seed, stage and step: what is drawn does not depend on how often the
    # run was interrupted.
    key = step_key(c.seed, stage.name, step, attempt)
    roll_out = functools.partial(
        play, stage, params, key, rollout_cache, timer, step, check
    )
    # Hosts roll out different questions and then all have all groups: each computes the
    # same batch, so that no host has to send it.
    if processes.num_hosts() > 1:
        roll_out = functools.partial(play_on_all_hosts, roll_out, timer)
    # Nothing is sampled yet: the caller does it, perhaps in a thread beside an update.
    sample = functools.partial(
        sample_groups,
        roll_out,
        stage.questions,
        num_questions=c.rl.questions_per_step,
        rounds=c.rl.dynamic_sampling_rounds,
        seed=c.seed,
        step=step,
        attempt=attempt,
        health=stage.health,
    )
    return PendingStep(sample, fingerprint)


def play(
    stage: RLStage,
    params: Params,
    key: jax.Array,
    rollout_cache: RolloutCache,
    timer: LapTimer,
    step: int,
    check: Callable[[], None],
    questions: Sequence[Question],
) -> list[Rewarded]:
    """Roll out the questions on this host, and reward their groups."""
    total = stage.config.rl.questions_per_step
    note = console.note_now_and_then(
        lambda done: (
            f"{stage.name}: step {step + 1}: rolled out {done}/{total} questions"
        )
    )

    # After each question: a stage that has failed does not wait for the others.
    def on_done(done):
        check()
        note(done)

    # Sampling on the devices, tools on the host; see rollout.scheduler.
    # What has ended before an interruption is read, and not sampled again.
    groups = stage.rollouts(
        params, questions, key, on_done=on_done, finished=rollout_cache
    )
    timer.lap("rollout")
    if rollout_cache.num_reused:
        console.note(
            f"{stage.name}: step {step + 1}: {rollout_cache.num_reused} rollouts had "
            "ended before"
        )
    rewarded = with_rewards(*stage.score(groups))
    timer.lap("reward")
    return rewarded


def play_on_all_hosts(
    roll_out: Callable, timer: LapTimer, questions: Sequence[Question]
) -> list[Rewarded]:
    """Roll out on each host its share of the questions, and exchange the groups."""
    rewarded = processes.map_hosts(
        roll_out, questions, encode=encode_rewarded, decode=decode_rewarded
    )
    timer.lap("exchange")
    return rewarded


def finish_step(
    stage: RLStage,
    state: StageState,
    base: Params | None,
    journal: AppendLog,
    log: MetricsLog,
) -> None:
    """Evaluate, log, check and save the last step."""
    # Evaluation may take minutes: a stop in it saves the step with the metrics so
    # far, and the next start comes back here (`pending_metrics`).
    c, metrics, done = stage.config, state.pending_metrics, state.done
    if is_evaluated(c, done):
        weights = stage.trainer.for_decoding(state.train_state.params, base)
        scores = stage.evaluate(weights)
        metrics |= {f"dev_{name}": scores[name] for name in ("em", "f1", "searches")}
    state.retry_io(lambda: log.write(done - 1, metrics))
    if done % c.log_every == 0 or done == c.rl.steps:
        console.note(step_line(stage.name, done, c.rl.steps, metrics))
    collapse = state.guards.on_step(done - 1, metrics)
    # A state that is about to be undone is not saved.
    if collapse is None or c.guards.on_collapse == "stop":
        state.save_if_due()
    if state.is_saved:
        journal.clear()
    if collapse is not None:
        state.handle_collapse(collapse, log)


def is_evaluated(c: ConfigDict, done: int) -> bool:
    """Return whether the policy is evaluated after so many steps."""
    return c.eval.every_steps > 0 and done % c.eval.every_steps == 0


def step_line(name: str, done: int, num_steps: int, metrics: dict) -> str:
    """Return one line on a step, for people."""
    seconds = sum(v for key, v in metrics.items() if key.endswith("_seconds"))

    def shown(name):
        # Without an update there is no entropy, without a valid rollout no reward.
        return "-" if metrics.get(name) is None else f"{metrics[name]:.3f}"

    dev = f", dev EM {shown('dev_em')}" if "dev_em" in metrics else ""
    return (
        f"{name}: step {done}/{num_steps} reward {shown('reward')}, "
        f"{metrics['searches']:.2f} searches, {metrics['policy_tokens']:.0f} tokens, "
        f"entropy {shown('entropy')}{dev} ({seconds:.1f} s)"
    )

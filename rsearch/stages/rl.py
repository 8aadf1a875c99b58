"""The reinforcement-learning stage: roll out, reward, compare, update.

`run` is the loop and reads from top to bottom. The parts of a step are in
`stages.groups` (its questions, and the metrics of their rollouts),
`stages.policy_update` (from groups and rewards to optimizer steps) and `stages.ahead`
(rollouts that run during the update).
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

from rsearch.config.spec import base_fields
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

STAGE_KEY = 2  # folded into the seed, so that no other stage has the same draws
MAX_TEXTS = 4  # conversations per step in TensorBoard


@dataclasses.dataclass(frozen=True)
class RLStage:
    """The objects and settings of a reinforcement-learning stage.

    Attributes:
        config: configuration of the stage.
        folder: folder of the stage, for checkpoints, metrics.jsonl and curves.
        trainer: the compiled functions that train.
        rollouts: (params, questions, key) -> groups.
        score: groups -> ([Q, G] rewards, {term: [Q, G]}, groups).
        health: groups -> search metrics, see `rsearch.rollout.health`.
        questions: questions to learn from.
        num_tokens: T, tokens of the longest conversation.
        inputs: {name: fingerprint} of everything that rollouts depend on, except the
            configuration.
        name: name of the stage.
        run_id: id of the run, which its checkpoints record.
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
    """Train by reinforcement learning, continuing where an earlier start stopped.

    Args:
        stage: objects and settings of the stage.
        params: the policy's parameters before this stage; they remain the reference. If
            the stage trains adapters, the result takes over their buffers, so that they
            must not be used again.

    Returns:
        The policy's parameters after the stage.
    """
    # Restore the newest checkpoint, or start from a copy of the policy.
    c, trainer = stage.config, stage.trainer
    state = StageState(
        c, "rl", trainer, params, stage.folder, name=stage.name, run_id=stage.run_id
    )
    base = trainer.base_of(params)
    journal = AppendLog(stage.folder, "rollouts")  # rollouts since the last checkpoint
    if state.is_over:
        journal.clear()  # the run may have been killed right after its last save
        return trainer.final_weights(state.train_state.params, base)
    # Without a KL term, the reference model is not needed.
    reference = params if c.rl.kl_coef else None
    # Stored rollouts are reused only with the configuration and inputs that they were
    # made from. Fields that may change when a run resumes do not count: with
    # max_staleness, a step would otherwise learn from rollouts of another policy.
    settings = {
        name: c[name]
        for name, field in base_fields().items()
        if not field.may_change and name != "rl.steps"
    }
    made_from = json.dumps(
        [stage.inputs, settings], sort_keys=True, default=ConfigDict.to_dict
    )
    made_from = xxhash.xxh3_128(made_from.encode()).hexdigest()
    log = state.retry_io(lambda: MetricsLog(stage.folder, first_step=state.num_rows))
    rollout_log = RolloutLog(stage.folder, c.log.rollouts)
    rollouts_ahead = RolloutsAhead(stage.folder, made_from, stage.questions)
    # The arguments that the rollouts of all steps share.
    prepare_rollouts = functools.partial(next_rollouts, stage, journal, made_from)
    num_restarts = stage.rollouts.num_restarts

    with state.save_on_preemption(), log, rollouts_ahead:
        if c.rl.max_staleness:
            # A checkpoint needs the rollouts of the next step, because the policy that
            # sampled them no longer exists when it is restored.
            state.store_with_checkpoint = rollouts_ahead.store
            is_restored = rollouts_ahead.restore(state.num_done, state.roll_backs)
            if not is_restored and state.num_done:
                console.note(
                    f"{stage.name}: no rollouts of step {state.num_done + 1} are "
                    "stored; the newest policy samples them"
                )
        if state.pending_metrics is not None:  # stopped before this row was written
            finish_step(stage, state, base, journal, log)
        while state.num_done < c.rl.steps:
            state.stop_if_preempted()
            # A step repeated after a roll-back has different questions and rollouts.
            step, attempt, timer = state.num_done, state.roll_backs, LapTimer()

            # With max_staleness, this step's rollouts were sampled during the update of
            # the previous step, by the policy from before that update.
            sampled = rollouts_ahead.take(step, attempt)
            timer.lap("rollout")
            # The copy used for decoding may have another layout and dtype.
            weights = stage.rollouts.place_params(
                trainer.for_decoding(state.train_state.params, base)
            )
            # Always the case without max_staleness; with it, only when the stage starts
            # or goes back to an earlier step.
            if sampled is None:
                # This takes most of a step's time, see rollout.scheduler.
                pending = prepare_rollouts(weights, step, attempt, timer)
                sampled = SampledStep(*pending.sample(), pending.params, step)
                del pending
            results, metrics = sampled.scored, sampled.metrics
            # If the KV cache is too small for all rows, some rollouts restart.
            if c.rollout.cache_tokens:
                metrics["restarts"] = stage.rollouts.num_restarts - num_restarts
                num_restarts = stage.rollouts.num_restarts
            # Start the next step's rollouts, which run during this step's update.
            if c.rl.max_staleness:
                metrics["staleness"] = step - sampled.version
                if step + 1 < c.rl.steps:
                    if not c.rollout.devices:  # the update reuses the state's buffers
                        weights = jax.tree.map(lambda x: x.copy(), weights)
                    pending = prepare_rollouts(
                        weights, step + 1, attempt, LapTimer(), rollouts_ahead.check
                    )
                    rollouts_ahead.begin(pending, step + 1, attempt, version=step)
                    del pending
            del weights  # the update needs its memory
            # The update reuses the state's buffers: once started, it must finish.
            processes.check_preempted(on_all_hosts=True)

            groups, rewards = groups_and_rewards(results)
            # For TensorBoard. Texts take space: only for evaluated steps and the last.
            is_last = step + 1 == c.rl.steps
            num_texts = MAX_TEXTS if is_last or is_evaluated(c, step + 1) else 0
            log.draw(step, distributions(results), conversations(results, num_texts))

            # R1-Searcher++ memorises what the searches of correct rollouts have found.
            memory_rows = []
            if stage.memory is not None:
                metrics |= stage.memory.collect(step, groups)
                state.retry_io(stage.memory.write)
                memory_rows = stage.memory.rows(step)
                timer.lap("memory")

            # For people: some groups with what is learnt from them, see rollout_log,
            # and a histogram of the advantages of all tokens that are learnt from.
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
                name=stage.name,
                base=base,
                reference=reference,
                memory_rows=memory_rows,
                guards=state.guards,
                record=record,
            )
            timer.lap("update")
            # Do this first: the update has reused the buffers of the old state.
            metrics |= update_metrics
            state.advance(train_state, pending_metrics=metrics)
            del train_state  # a roll-back has no memory for two states
            # A checkpoint needs the next rollouts; an evaluation needs their devices.
            if state.is_due(step + 1) or is_evaluated(c, step + 1):
                rollouts_ahead.wait()
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
    """Return the number to fold into the seed for a stage of this name."""
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
    """Prepare to roll out and reward the groups of a step.

    Args:
        stage: objects and settings of the stage.
        journal: journal of rollouts that have finished since the last checkpoint.
        made_from: fingerprint of everything that rollouts depend on, except the policy.
        params: the policy's parameters, from the rollout engine's `place_params`.
        step: step number, from 0.
        attempt: number of roll-backs so far.
        timer: records the laps.
        check: called from time to time; an exception that it raises ends the rollouts.
    """
    c = stage.config
    # Rollouts that finished before an interruption are reused only if the policy is the
    # same, bit for bit: hence its fingerprint.
    fingerprint = params_fingerprint(params)
    rollout_cache = RolloutCache(journal, [made_from, step, attempt, fingerprint])
    # Draws depend on seed, stage, step and roll-backs, but not on how often the run was
    # interrupted.
    key = step_key(c.seed, stage.name, step, attempt)
    roll_out = functools.partial(
        play, stage, params, key, rollout_cache, timer, step, check
    )
    # Hosts roll out different questions and then exchange all groups. Each computes the
    # same batch, so that no host has to send it.
    if processes.num_hosts() > 1:
        roll_out = functools.partial(play_on_all_hosts, roll_out, timer)
    # Nothing is sampled yet: the caller does it, perhaps in a thread during an update.
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
    note_progress = console.note_now_and_then(
        lambda num_done: (
            f"{stage.name}: step {step + 1}: rolled out {num_done}/{total} questions"
        )
    )

    # Check after each question, so that a failed stage does not wait for the others.
    def on_done(num_done):
        check()
        note_progress(num_done)

    # Sampling runs on the devices and tools on the host, see rollout.scheduler.
    # Rollouts that finished before an interruption are read and not sampled again.
    groups = stage.rollouts(
        params, questions, key, on_done=on_done, rollout_cache=rollout_cache
    )
    timer.lap("rollout")
    if rollout_cache.num_reused:
        console.note(
            f"{stage.name}: step {step + 1}: {rollout_cache.num_reused} rollouts had "
            "already finished"
        )
    results = with_rewards(*stage.score(groups))
    timer.lap("reward")
    return results


def play_on_all_hosts(
    roll_out: Callable, timer: LapTimer, questions: Sequence[Question]
) -> list[Rewarded]:
    """Roll out a share of the questions on each host, and exchange the groups."""
    results = processes.map_hosts(
        roll_out, questions, encode=encode_rewarded, decode=decode_rewarded
    )
    timer.lap("exchange")
    return results


def finish_step(
    stage: RLStage,
    state: StageState,
    base: Params | None,
    journal: AppendLog,
    log: MetricsLog,
) -> None:
    """Evaluate, log, check and save the last step."""
    # Evaluation may take minutes. If the run is stopped during it, the step is saved
    # with the metrics so far, and the next start resumes here (`pending_metrics`).
    c, metrics, num_done = stage.config, state.pending_metrics, state.num_done
    if is_evaluated(c, num_done):
        weights = stage.trainer.for_decoding(state.train_state.params, base)
        scores = stage.evaluate(weights)
        metrics |= {f"dev_{name}": scores[name] for name in ("em", "f1", "searches")}
    state.retry_io(lambda: log.write(num_done - 1, metrics))
    if num_done % c.log_every == 0 or num_done == c.rl.steps:
        console.note(step_line(stage.name, num_done, c.rl.steps, metrics))
    collapse = state.guards.on_step(num_done - 1, metrics)
    # A state that is about to be rolled back is not saved.
    if collapse is None or c.guards.on_collapse == "stop":
        state.save_if_due()
    if state.is_saved:
        journal.clear()
    if collapse is not None:
        state.handle_collapse(collapse, log)


def is_evaluated(c: ConfigDict, num_done: int) -> bool:
    """Return whether the policy is evaluated after this many steps."""
    return c.eval.every_steps > 0 and num_done % c.eval.every_steps == 0


def step_line(name: str, num_done: int, num_steps: int, metrics: dict) -> str:
    """Return a one-line summary of a step, for people."""
    seconds = sum(v for key, v in metrics.items() if key.endswith("_seconds"))

    def format_metric(name):
        # Without an update there is no entropy; without a valid rollout, no reward.
        return "-" if metrics.get(name) is None else f"{metrics[name]:.3f}"

    dev = f", dev EM {format_metric('dev_em')}" if "dev_em" in metrics else ""
    return (
        f"{name}: step {num_done}/{num_steps} reward {format_metric('reward')}, "
        f"{metrics['searches']:.2f} searches, {metrics['policy_tokens']:.0f} tokens, "
        f"entropy {format_metric('entropy')}{dev} ({seconds:.1f} s)"
    )

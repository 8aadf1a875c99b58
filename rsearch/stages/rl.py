"""Reinforcement stage: roll out, reward, compare, update."""

import dataclasses
import json
import time
import zlib
from collections.abc import Sequence

import jax
import numpy as np
import xxhash

from rsearch import setup as build
from rsearch.config.fields import to_json
from rsearch.data.order import take
from rsearch.hosts import processes
from rsearch.rewards.group import reward_groups
from rsearch.rollout.records import Rewarded, RolloutCache, fingerprint, share_rewarded
from rsearch.runtime import console
from rsearch.runtime.compiles import num_compiles
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.metrics import MetricsLog
from rsearch.runtime.recorded import record_search
from rsearch.stages.learning import Learning, has_spread, signals
from rsearch.stages.state import Progress
from rsearch.text.suspicion import suspects
from rsearch.types import Outcome, Source

SEEDS = 1 << 32  # of runs: what is drawn again has another beyond these
STAGE_KEY = 2  # folded into the seed: what this stage draws, no other does


def run(setup: build.Setup, evaluator, params, folder, *, stage="rl", memory=None):
    """Trains by reinforcement, from where an earlier start of this stage stopped.

    Args:
        setup: of the stage.
        evaluator: of held-out questions, asked every config.eval.every_steps.
        params: of the policy before this stage; they stay the reference. If it trains
            adapters, they become what it returns, and must not be touched again.
        folder: of this stage: checkpoints, metrics.jsonl, curves.
        stage: its name.
        memory: what is memorised beside (see `rsearch.stages.memory`), or None.

    Returns:
        The policy's parameters after the stage.
    """
    c, progress = setup.config, Progress(setup, "rl", params, folder, stage=stage)
    learner, base = progress.learner, build.frozen(setup, params)

    def decoded():
        return learner.plain(progress.state.params, base, dtype=setup.model.dtype)

    if progress.is_over:
        return learner.left(progress.state.params, base)
    critic = build.make_critic(setup)[0] if build.has_critic(setup, "rl") else None
    reference = params if c.rl.kl_coef else None
    learning = Learning(setup, learner, critic, reference, base, progress.guards)
    setup, journal = _recorded(setup, folder), AppendLog(folder, "rollouts")
    take_step = _steps(setup, learning, decoded, stage, memory, journal)

    def measure(step, measured):
        """The last of what is measured of a step, and its row."""
        done = step + 1
        if c.eval.every_steps and done % c.eval.every_steps == 0:
            row, _ = evaluator(decoded(), "protocol")
            measured |= {f"dev_{n}": row[n] for n in ("em", "f1", "searches")}
        progress.outlast(lambda: metrics.write(step, measured))
        if done % c.log_every == 0 or done == c.rl.steps:
            console.note(_line(stage, done, c.rl.steps, measured))
        collapse = progress.guards.check(step, measured)
        # What is gone back from is not saved.
        if collapse is None or c.guards.on_collapse == "stop":
            progress.save_if_due()
        if progress.is_saved:
            journal.clear()
        if collapse is not None:
            progress.heed(collapse, metrics)

    with progress.kept(), MetricsLog(folder, first_step=progress.num_rows) as metrics:
        if progress.owed is not None:
            measure(progress.done - 1, progress.owed)
        while progress.done < c.rl.steps:
            progress.begin_step()
            step, draw = progress.done, progress.roll_backs
            state, measured = take_step(step, draw, progress.state)
            progress.advance(state, owed=measured)
            del state  # going back, there is no room for two
            measure(step, measured)
    return learner.left(progress.state.params, base)


def _recorded(setup, folder):
    """The setup, whose services are asked once for each thing in all starts."""
    c, own = setup.config, {}
    if c.retrieval.url:
        own["search"] = record_search(setup.search, AppendLog(folder, "searches"))
    for name in ("judge", "writer"):
        generate = getattr(setup, name)
        if generate is not None:
            own[name] = build.recorded_agent(c, name, generate, folder)
    return dataclasses.replace(setup, **own)


def _steps(setup, learning, decoded, stage, memory, journal):
    """The function of (step, draw, state) that takes a step: (state after, measured).

    The draw counts how often the step may have been taken before, to be undone: another
    one has other questions and other rollouts.
    """
    c = setup.config
    roll_out = build.make_rollouts(
        setup,
        build.make_host(setup),
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=c.rollout.group_size,
    )
    root = jax.random.fold_in(jax.random.key(c.seed), stage_key(stage))
    told = json.dumps(setup.inputs, sort_keys=True) + to_json(c)
    made_from = xxhash.xxh3_128(told.encode("utf-8", "surrogatepass")).hexdigest()

    def decoding(step, draw):
        """The policy as it decodes, and what it has written of this step."""
        params = roll_out.place_params(decoded())
        own = [made_from, step, draw, fingerprint(params)]
        return params, RolloutCache(journal, own)

    def take_step(step, draw, state):
        clock, restarts = _Clock(), roll_out.num_restarts
        own = jax.random.fold_in(root, draw) if draw else root
        key = jax.random.fold_in(own, step)
        groups, rewards, measured = _played(
            setup, roll_out, decoding, (step, draw), key, clock, stage=stage
        )
        # The update reuses the state's buffers: once begun it must come to its end.
        processes.check_preempted(on_all_hosts=True)
        if c.rollout.cache_tokens:
            measured["restarts"] = roll_out.num_restarts - restarts
        rows = []
        if memory is not None:
            measured |= memory.collect(step, groups, rewards)
            rows = memory.rows(step)
            clock.lap("memory")
        state, learnt = learning(state, groups, rewards, step=step, memory=rows)
        clock.lap("update")
        return state, measured | learnt | clock.seconds | {"compiles": num_compiles()}

    return take_step


def stage_key(stage: str) -> int:
    """What is folded into the seed of a stage of this name."""
    if stage == "rl":
        return STAGE_KEY
    return zlib.crc32(stage.encode()) & 0x7FFFFFFF


def _played(setup, roll_out, decoding, turn, key, clock, *, stage):
    """As `gather`, of what the policy plays; its copy that decodes ends with this."""
    step, draw = turn
    params, finished = decoding(step, draw)
    teller = _teller(setup.config, stage, step)

    def play(own):
        groups = roll_out(params, own, key, on_done=teller, finished=finished)
        clock.lap("rollout")
        found = rewarded(setup, groups)
        clock.lap("reward")
        return found

    def play_all(questions):
        found = share_rewarded(play, questions)
        if processes.num_hosts() > 1:
            clock.lap("exchange")
        return together(found)

    found = gather(setup, play_all, step, draw=draw)
    if finished.num_reused:
        known = f"{finished.num_reused} rollouts had ended before"
        console.note(f"{stage}: step {step + 1}: {known}")
    return found


def gather(setup: build.Setup, play, step: int, *, draw: int = 0):
    """The groups that a step learns from.

    With config.rl.refill_rounds, groups whose rollouts all earn the same give way to
    those of further questions: DAPO's dynamic sampling (arXiv 2503.14476 section 3.2),
    but bounded. The further questions are those behind the step's own in its share of
    the stream.

    Args:
        setup: of the stage.
        play: (questions) -> (groups, [Q, G] rewards, measured), as `together` says.
        step: which.
        draw: which of the step's.

    Returns:
        Groups and rewards of config.rl.questions_per_step questions, and what was
        measured on the step's own.
    """
    s, num = setup.config.rl, len(setup.train)
    size = s.questions_per_step
    count = min(size * (1 + s.refill_rounds), max(num, size))
    seed = setup.config.seed + draw * SEEDS
    chosen = take(num, count, seed=seed, step=step)
    questions = [setup.train[i] for i in chosen]
    groups, rewards, measured = play(questions[:size])
    if not s.refill_rounds:
        return groups, rewards, measured
    groups, rewards = list(groups), rewards.copy()
    waiting, num_asked = questions[size:], size
    for _ in range(s.refill_rounds):
        flat = np.flatnonzero(~has_spread(groups, rewards))
        asked, waiting = waiting[: len(flat)], waiting[len(flat) :]
        if not asked:
            break
        more, earned, _ = play(asked)
        num_asked += len(asked)
        good = np.flatnonzero(has_spread(more, earned))
        for place, i in zip(flat, good):  # what is left over stays as it was
            groups[place], rewards[place] = more[i], earned[i]
    measured["questions_asked"] = num_asked
    measured["groups_learnt_from"] = _mean(has_spread(groups, rewards))
    return groups, rewards, measured


def rewarded(setup: build.Setup, groups) -> list[Rewarded]:
    """What the rollouts earn; one whose judge failed has that outcome."""
    terms = setup.config.reward.to_dict()
    rewards, parts, judged = reward_groups(groups, terms, judge=setup.judge)
    return [
        Rewarded(group, rewards[i], {name: part[i] for name, part in parts.items()})
        for i, group in enumerate(judged)
    ]


def together(found: Sequence[Rewarded]):
    """The groups, their [Q, G] rewards, and {name: number} for the log.

    Means are over rollouts that are a signal.
    """
    groups = tuple(one.group for one in found)
    rewards = np.stack([one.rewards for one in found])
    rollouts = [r for group in groups for r in group.rollouts]
    is_signal = signals(groups)
    measured = {"reward": _mean(rewards[is_signal])}
    for name in found[0].parts:
        values = np.stack([one.parts[name] for one in found])
        # NaN is left in a term of weight 0, whose judge could not be asked.
        measured[f"reward_{name}"] = _mean(values[is_signal & ~np.isnan(values)])
    spread = has_spread(groups, rewards)
    measured["groups_with_spread"] = _mean(spread[is_signal.any(axis=1)])
    measured["searches"] = _mean([len(r.searches) for r in rollouts])
    measured["policy_tokens"] = _mean([r.num_policy_tokens for r in rollouts])
    measured["tokens"] = _mean([r.num_tokens for r in rollouts])
    measured["empty_answers"] = _mean([not (r.answer or "").strip() for r in rollouts])
    suspicious = [suspects(p) for r in rollouts for p in r.found]
    measured["suspicious_passages"] = _mean(suspicious)
    measured["repeated_text"] = _mean([_repeats(r) for r in rollouts])
    for outcome in Outcome:
        measured[outcome.value] = _mean([r.outcome == outcome for r in rollouts])
    return groups, rewards, measured


def _repeats(rollout) -> bool:
    """Whether the policy has written the same turn twice."""
    turns = [s.text for s in rollout.segments if s.source == Source.POLICY]
    return len(set(turns)) < len(turns)


def _mean(values) -> float:
    """0 of nothing: a step without signal is counted, not NaN."""
    return float(np.mean(values)) if len(values) else 0.0


def _teller(c, stage, step):
    """Says how far the rollouts are, where they take long."""
    last = time.monotonic()

    def on_done(done):
        nonlocal last
        if time.monotonic() - last > console.SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            total = c.rl.questions_per_step
            console.note(
                f"{stage}: step {step + 1}: rolled out {done}/{total} questions"
            )

    return on_done


def _line(stage, done, steps, measured):
    """One step for people."""
    seconds = sum(v for name, v in measured.items() if name.endswith("_seconds"))
    dev = f", dev EM {measured['dev_em']:.3f}" if "dev_em" in measured else ""
    # Without an update of the policy, as while the critic is trained alone, none.
    entropy = f"{measured['entropy']:.3f}" if "entropy" in measured else "-"
    return (
        f"{stage}: step {done}/{steps} reward {measured['reward']:.3f}, "
        f"{measured['searches']:.2f} searches, {measured['policy_tokens']:.0f} tokens, "
        f"entropy {entropy}{dev} ({seconds:.1f} s)"
    )


@dataclasses.dataclass
class _Clock:
    """Seconds of the parts of a step."""

    seconds: dict = dataclasses.field(default_factory=dict)
    last: float = dataclasses.field(default_factory=time.monotonic)

    def lap(self, name):
        now = time.monotonic()
        name = f"{name}_seconds"
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

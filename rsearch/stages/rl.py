"""Reinforcement stage: roll out, reward, compare, update."""

import dataclasses
import time
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from rsearch import build, console, hosts
from rsearch.compiles import num_compiles
from rsearch.data.order import take
from rsearch.learn.advantages import with_advantages
from rsearch.learn.batch import Batch, cut, pack, pack_segments, parts
from rsearch.learn.objectives import sampler_gap
from rsearch.learn.packing import packed
from rsearch.metrics import MetricsLog
from rsearch.models.sharding import num_shards, on_device
from rsearch.rewards.group import reward_groups
from rsearch.rollout.sending import Rewarded, share_rewarded
from rsearch.stages.state import open_state, save_state, tell_if_skipped
from rsearch.types import Outcome

STAGE_KEY = 2  # folded into the seed: what this stage draws, no other does


def run(setup: build.Setup, evaluator, params, folder, *, stage="rl", memory=None):
    """Trains by reinforcement, from where an earlier start of this stage stopped.

    Args:
        setup: of the stage.
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
    base = build.frozen(setup, params)
    if first >= c.rl.steps:
        return learner.plain(state.params, base)
    critic = build.make_critic(setup)[0] if build.has_critic(setup, "rl") else None
    roll_out = build.make_rollouts(
        setup,
        build.make_host(setup),
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=c.rollout.group_size,
    )
    reference = params if c.rl.kl_coef else None
    learning = Learning(setup, learner, critic, reference, base)

    def decoding():
        own = learner.plain(state.params, base, dtype=setup.model.dtype)
        return roll_out.place(own)

    root = jax.random.fold_in(jax.random.key(c.seed), stage_key(stage))
    with MetricsLog(folder, first_step=first) as metrics:
        for step in range(first, c.rl.steps):
            clock, restarts = _Clock(), roll_out.num_restarts
            key = jax.random.fold_in(root, step)
            groups, rewards, measured = _played(
                setup, roll_out, decoding, step, key, clock, stage=stage
            )
            if c.rollout.cache_tokens:
                measured["restarts"] = roll_out.num_restarts - restarts
            rows = []
            if memory is not None:
                measured |= memory.collect(step, groups, rewards)
                rows = memory.rows(step)
                clock.lap("memory")
            state, learnt = learning(state, groups, rewards, step=step, memory=rows)
            clock.lap("update")
            measured |= learnt | clock.seconds | {"compiles": num_compiles()}
            done = step + 1
            if c.eval.every_steps and done % c.eval.every_steps == 0:
                row, _ = evaluator(learner.plain(state.params, base), "protocol")
                measured |= {f"dev_{n}": row[n] for n in ("em", "f1", "searches")}
            metrics.write(step, measured)
            if done % c.log_every == 0 or done == c.rl.steps:
                console.note(_line(stage, done, c.rl.steps, measured))
            save_state(setup, "rl", done, state, folder)
    return learner.plain(state.params, base)


def stage_key(stage: str) -> int:
    """What is folded into the seed of a stage of this name."""
    if stage == "rl":
        return STAGE_KEY
    return zlib.crc32(stage.encode()) & 0x7FFFFFFF


def _played(setup, roll_out, decoding, step, key, clock, *, stage):
    """As `gather`, of what the policy plays; its copy that decodes ends with this."""
    params = decoding()
    teller = _teller(setup.config, stage, step)

    def play(own):
        groups = roll_out(params, own, key, on_done=teller)
        clock.lap("rollout")
        found = rewarded(setup, groups)
        clock.lap("reward")
        return found

    def play_all(questions):
        found = share_rewarded(play, questions)
        if hosts.num_hosts() > 1:
            clock.lap("exchange")
        return together(found)

    return gather(setup, play_all, step)


def gather(setup: build.Setup, play, step: int):
    """The groups that a step learns from.

    With config.rl.refill_rounds, groups whose rollouts all earn the same give way to
    those of further questions: DAPO's dynamic sampling (arXiv 2503.14476 section 3.2),
    but bounded. The further questions are those behind the step's own in its share of
    the stream.

    Args:
        setup: of the stage.
        play: (questions) -> (groups, [Q, G] rewards, measured), as `together` says.
        step: which.

    Returns:
        Groups and rewards of config.rl.questions_per_step questions, and what was
        measured on the step's own.
    """
    s, num = setup.config.rl, len(setup.train)
    size = s.questions_per_step
    count = min(size * (1 + s.refill_rounds), max(num, size))
    chosen = take(num, count, seed=setup.config.seed, step=step)
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


def has_spread(groups, rewards):
    """[Q] bool, whether a group's rollouts that are a signal earn different rewards."""
    signal = [[r.outcome.is_signal for r in group.rollouts] for group in groups]
    return np.array(
        [np.ptp(r[s]) > 0 if any(s) else False for r, s in zip(rewards, signal)], bool
    )


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
    is_signal = np.array([r.outcome.is_signal for r in rollouts]).reshape(rewards.shape)
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
    for outcome in Outcome:
        measured[outcome.value] = _mean([r.outcome == outcome for r in rollouts])
    return groups, rewards, measured


def _mean(values) -> float:
    """0 of nothing: a step without signal is counted, not NaN."""
    return float(np.mean(values)) if len(values) else 0.0


@dataclasses.dataclass(frozen=True)
class Learning:
    """What turns a step's rollouts into optimizer steps.

    Attributes:
        setup: of the stage.
        learner: of the policy.
        critic: of the value model; None without one.
        reference: parameters that the policy is kept near, or None; they may rest in
            the memory of the hosts.
        base: frozen weights that the states' adapters stand beside, or None.
    """

    setup: build.Setup
    learner: object
    critic: object = None
    reference: object = None
    base: object = None

    def __call__(self, state, groups, rewards, *, step=0, memory=()):
        """Optimizer steps on one step's rollouts: the new state and mean metrics.

        Where none of an update's rollouts is a signal there is no update, for the
        optimizer's momentum would move the policy all the same.

        Args:
            state: the TrainState; its buffers are reused.
            groups: Q groups of G.
            rewards: [Q, G].
            step: which; the critic learns alone at first.
            memory: rows of segments to memorise, config.rl.memorise_rows at most.
        """
        s = self.setup.config.rl
        learns = _learns(s, groups, rewards)
        whole = pack(
            groups,
            rewards,
            self.setup.num_tokens,
            learns=learns,
            masks_retrieved=s.mask_retrieved,
        )
        useful = [part.from_policy.any() for part in parts(whole, s.updates_per_step)]
        if not any(useful):
            console.note("rl: no rollout of this step is a signal; nothing is learnt")
            return state, {}
        # All rows are scored before the first update: it reuses the policy's buffers.
        batch = self.learner.put(self._cut(whole))
        is_ready = step >= self.setup.config.critic.pretrain_steps
        learns_policy = self.critic is None or is_ready
        batch, gap = self._scored(
            state, batch, len(groups[0].rollouts), updates=learns_policy
        )
        memory = self._memory(memory)
        measured = []
        for part, is_useful in zip(parts(batch, s.updates_per_step), useful):
            if not is_useful:
                continue
            metrics = {}
            if self.critic is not None:
                critic, metrics = self.critic.update(state.critic, part, self.base)
                state = state._replace(critic=critic)
            if learns_policy:
                state, told = self.learner.update(state, part, memory, self.base)
                metrics |= told
            measured.append(jax.device_get(metrics))
            tell_if_skipped("rl", step, measured[-1])
        mean = jax.tree.map(lambda *values: float(np.mean(values)), *measured)
        # Later updates compare with a policy that has moved: only the first tells.
        gap = measured[0]["logp_gap"] if gap is None else gap
        return state, mean | {"sampler_gap": float(gap)}

    def _scored(self, state, batch: Batch, group_size: int, *, updates):
        """The batch with log-probabilities, values and advantages, and a gap.

        The gap is the mean difference of the sampler's log-probabilities and the
        trainer's; None where the first update tells it for nothing.
        """
        s, gap = self.setup.config.rl, None
        if s.behavior == "scored" or not updates:
            logp = self.learner.score(state.params, batch, self.base)
            gap = sampler_gap(logp, batch, with_retrieved=not s.mask_retrieved)
        if s.behavior == "scored":
            if s.tis_cap:
                batch = batch._replace(sampled_logp=batch.behavior_logp)
            batch = batch._replace(behavior_logp=logp)
        if self.reference is not None:
            logp = self.learner.score(on_device(self.reference), batch)
            batch = batch._replace(reference_logp=logp)
        if self.critic is not None:
            values = self.critic.score(state.critic.params, batch, self.base)
            batch = batch._replace(values=values)
        kl_coef = None
        if s.kl_coef and s.kl_place == "reward":
            kl_coef = s.kl_coef if state.kl_coef is None else state.kl_coef
        batch = with_advantages(
            batch,
            algorithm=s.algorithm,
            group_size=group_size,
            normalize_std=s.normalize_std,
            eps=s.std_eps,
            ddof=s.std_ddof,
            gamma=s.gamma,
            lam=s.gae_lambda,
            over_response=s.advantage_mask == "response",
            kl_coef=kl_coef,
            kl_kind=s.kl_kind,
        )
        return batch, gap

    def _memory(self, rows):
        """Rows to memorise as a Batch of a size that never changes; None without."""
        s = self.setup.config.rl
        if not s.memorise_coef:
            return None
        rows = [*rows, *[()] * (s.memorise_rows - len(rows))]
        assert len(rows) == s.memorise_rows, len(rows)
        batch = pack_segments(rows, self.setup.num_tokens)
        return self.learner.put(self._cut(batch))

    def _cut(self, batch: Batch) -> Batch:
        """Micro-batches, each in as few rows as it takes."""
        batch = cut(batch, self.setup.config.rl.micro_batch)
        return packed(batch, multiple=num_shards(self.setup.mesh))


def _learns(s, groups, rewards):
    """[Q, G] bool, which rollouts are in the loss, those without signal aside."""
    learns = np.ones(rewards.shape, bool)
    if s.refill_rounds:
        learns &= has_spread(groups, rewards)[:, None]
    if s.mask_truncated:  # DAPO's overlong filtering, arXiv 2503.14476 section 3.4
        learns &= np.array(
            [[r.outcome != Outcome.TRUNCATED for r in g.rollouts] for g in groups]
        )
    return learns


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

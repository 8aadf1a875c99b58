"""What turns a step's rollouts into optimizer steps."""

import dataclasses
import math

import jax
import numpy as np

from rsearch import setup as build
from rsearch.hosts.offload import on_device
from rsearch.learn.advantages import with_advantages
from rsearch.learn.batch import Batch, cut, pack, pack_segments, parts
from rsearch.learn.objectives import sampler_gap
from rsearch.learn.packing import packed
from rsearch.models.sharding import num_shards
from rsearch.runtime import console
from rsearch.stages.guards import Guards
from rsearch.types import Outcome


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
        guards: hear of each update; None without.
    """

    setup: build.Setup
    learner: object
    critic: object = None
    reference: object = None
    base: object = None
    guards: Guards | None = None

    def __call__(self, state, groups, rewards, *, step=0, memory=()):
        """Optimizer steps on one step's rollouts: the new state and mean metrics.

        `in_loss` is the share of rollouts with tokens in the loss, as it is masked.
        Where none of an update's rollouts is a signal, or a reward is not finite, there
        is no update: the optimizer's momentum would move the policy all the same.

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
            return state, {"in_loss": 0.0}
        worst = _worst(groups, rewards)
        if self.guards is not None and not math.isfinite(worst):
            self.guards.look(step, {"reward": worst}, whole, state.params)
            return state, {"in_loss": 0.0}
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
            if self.guards is not None:
                self.guards.look(step, measured[-1], part, state.params)
        mean = jax.tree.map(lambda *values: float(np.mean(values)), *measured)
        mean["in_loss"] = float(np.mean(whole.from_policy.any(axis=1)))
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


def _worst(groups, rewards) -> float:
    """The largest reward, or one that is not finite, of rollouts that are a signal."""
    return float(np.max(np.abs(rewards[signals(groups)]), initial=0.0))


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


def has_spread(groups, rewards):
    """[Q] bool, whether a group's rollouts that are a signal earn different rewards."""
    signal = signals(groups)
    return np.array(
        [np.ptp(r[s]) > 0 if any(s) else False for r, s in zip(rewards, signal)], bool
    )


def signals(groups):
    """[Q, G] bool, the rollouts that are a signal."""
    return np.array([[r.outcome.is_signal for r in g.rollouts] for g in groups], bool)

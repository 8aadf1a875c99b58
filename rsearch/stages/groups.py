"""Choose the groups that a step of RL learns from, and measure their rollouts."""

from collections.abc import Callable, Sequence

import numpy as np

from rsearch.data.order import step_items
from rsearch.rollout.health import RECALL_BY_SEARCH
from rsearch.rollout.records import Rewarded
from rsearch.text.suspicion import is_suspicious
from rsearch.types import Group, Outcome, Question, Rollout, Source

SEED_STRIDE = 1 << 32  # larger than the seeds of runs; added for each attempt


def sample_groups(
    play: Callable[[Sequence[Question]], list[Rewarded]],
    questions: Sequence[Question],
    *,
    num_questions: int,
    rounds: int,
    seed: int,
    step: int,
    attempt: int = 0,
    health: Callable[[Sequence[Group]], dict] | None = None,
) -> tuple[list[Rewarded], dict[str, float | None]]:
    """Return the groups that a step learns from.

    With `rounds`, groups whose rollouts all earn the same reward are replaced by groups
    of more questions: DAPO's dynamic sampling (arXiv 2503.14476 section 3.2), but
    bounded. These questions come after the step's own in its share of the stream.

    Args:
        play: rolls out questions and scores them.
        questions: the stage's questions; seed and step decide which a step gets.
        num_questions: Q, questions per step.
        rounds: the most rounds of more questions; 0 keeps all groups as they are.
        seed: seed of the run.
        step: step number, from 0.
        attempt: how often the step was taken before and undone by a roll-back.
        health: measures how groups search, see `rsearch.rollout.health`.

    Returns:
        Q groups with their rewards, and the metrics of the step's own questions.
    """
    # Reserve the questions of all rounds, however few are needed, so that a step's
    # share of the stream does not depend on what was rolled out.
    count = min(num_questions * (1 + rounds), max(len(questions), num_questions))
    seed += attempt * SEED_STRIDE
    stream = [
        questions[i] for i in step_items(len(questions), count, seed=seed, step=step)
    ]
    results = play(stream[:num_questions])
    metrics = summarize(results)
    if health is not None:
        health_metrics = health([r.group for r in results])
        # A curve needs a single number, so the recall after each search has a name.
        by_turn = enumerate(health_metrics.pop(RECALL_BY_SEARCH), start=1)
        health_metrics |= {f"supporting_recall_{t}": x for t, x in by_turn}
        # A share of nothing is left out, so that it neither keeps nor violates a bound.
        metrics |= {name: x for name, x in health_metrics.items() if x is not None}
    if not rounds:
        return results, metrics
    reserve, num_asked = stream[num_questions:], num_questions
    for _ in range(rounds):
        slots = np.flatnonzero(~has_reward_variance(*groups_and_rewards(results)))
        # One new question per group without variance, and no more, so that a round
        # costs at most as much as the first.
        batch, reserve = reserve[: len(slots)], reserve[len(slots) :]
        if not batch:
            break
        new_results = play(batch)
        num_asked += len(batch)
        indices = np.flatnonzero(has_reward_variance(*groups_and_rewards(new_results)))
        # If too few new groups have variance, the last of the old groups stay.
        for slot, i in zip(slots, indices):
            results[slot] = new_results[i]
    metrics["questions_asked"] = num_asked
    has_variance = has_reward_variance(*groups_and_rewards(results))
    metrics["groups_learnt_from"] = _mean(has_variance)
    return results, metrics


def with_rewards(
    rewards: np.ndarray, terms: dict[str, np.ndarray], groups: Sequence[Group]
) -> list[Rewarded]:
    """Return each group with its rewards.

    Args:
        rewards, terms, groups: from `rewards.group.reward_groups`.
    """
    return [
        Rewarded(group, rewards[i], {name: values[i] for name, values in terms.items()})
        for i, group in enumerate(groups)
    ]


def groups_and_rewards(scored: Sequence[Rewarded]) -> tuple[list[Group], np.ndarray]:
    """Return the Q groups and their [Q, G] rewards."""
    return [r.group for r in scored], np.stack([r.rewards for r in scored])


def summarize(scored: Sequence[Rewarded]) -> dict[str, float | None]:
    """Return {metric: number or None} for the groups of a step.

    Means of rewards are over valid rollouts; a mean over nothing is None.
    """
    groups, rewards = groups_and_rewards(scored)
    # Counts are over all rollouts, means of rewards over the valid ones.
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    is_valid = valid_rollouts(groups)
    metrics = {"reward": _mean(rewards[is_valid])}
    for name in scored[0].terms:
        values = np.stack([r.terms[name] for r in scored])
        # A term of weight 0 keeps its NaN where its judge failed.
        metrics[f"reward_{name}"] = _mean(values[is_valid & ~np.isnan(values)])
    has_variance = has_reward_variance(groups, rewards)
    metrics["groups_with_spread"] = _mean(has_variance[is_valid.any(axis=1)])
    metrics["searches"] = _mean([len(r.searches) for r in rollouts])
    metrics["tool_calls"] = _mean([len(r.tool_uses) for r in rollouts])
    metrics["policy_tokens"] = _mean([r.num_policy_tokens for r in rollouts])
    metrics["tokens"] = _mean([r.num_tokens for r in rollouts])
    metrics["empty_answers"] = _mean([not (r.answer or "").strip() for r in rollouts])
    suspicious = [is_suspicious(passage) for r in rollouts for passage in r.passages]
    metrics["suspicious_passages"] = _mean(suspicious or [False])  # 0 without passages
    metrics["repeated_text"] = _mean([_repeats_a_turn(r) for r in rollouts])
    for outcome in Outcome:
        metrics[outcome.value] = _mean([r.outcome == outcome for r in rollouts])
    return metrics


def distributions(scored: Sequence[Rewarded]) -> dict[str, np.ndarray]:
    """Return {metric: the values whose mean `summarize` returns}."""
    groups, rewards = groups_and_rewards(scored)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "reward": rewards[valid_rollouts(groups)],
        "searches": np.array([len(r.searches) for r in rollouts]),
        "policy_tokens": np.array([r.num_policy_tokens for r in rollouts]),
    }


def conversations(scored: Sequence[Rewarded], count: int) -> list[str]:
    """Return the first rollouts of up to `count` groups, as texts with rewards."""
    texts = []
    for group, rewards, _ in scored[:count]:
        # One per group, since the others begin with the same question.
        segments = group.rollouts[0].segments
        conversation = "\n".join(s.text.strip("\n") for s in segments)
        texts.append(f"reward {rewards[0]:.3g}\n\n{conversation}")
    return texts


def valid_rollouts(groups: Sequence[Group]) -> np.ndarray:
    """Return [Q, G] bool, True for rollouts that give a learning signal."""
    return np.array([[r.outcome.is_signal for r in g.rollouts] for g in groups], bool)


def has_reward_variance(groups: Sequence[Group], rewards: np.ndarray) -> np.ndarray:
    """Return [Q] bool, True if a group's valid rollouts earn different rewards."""
    return np.array(
        [
            np.ptp(row[is_valid]) > 0 if any(is_valid) else False
            for row, is_valid in zip(rewards, valid_rollouts(groups))
        ],
        bool,
    )


def rollouts_in_loss(
    groups: Sequence[Group],
    rewards: np.ndarray,
    *,
    needs_variance: bool,
    mask_truncated: bool,
) -> np.ndarray:
    """Return [Q, G] bool, the rollouts to learn from, provided that they are valid.

    Args:
        groups: Q groups of G.
        rewards: [Q, G].
        needs_variance: whether to leave out groups whose rollouts all earn the same.
        mask_truncated: whether to leave truncated rollouts out of the loss, but not of
            their group's statistics: DAPO's overlong filtering (arXiv 2503.14476, 3.4).
    """
    in_loss = np.ones(rewards.shape, bool)
    if needs_variance:
        in_loss &= has_reward_variance(groups, rewards)[:, None]
    if mask_truncated:
        in_loss &= np.array(
            [[r.outcome != Outcome.TRUNCATED for r in g.rollouts] for g in groups]
        )
    return in_loss


def _repeats_a_turn(rollout: Rollout) -> bool:
    # A policy that has collapsed often writes one turn again and again.
    turns = [s.text for s in rollout.segments if s.source == Source.POLICY]
    return len(set(turns)) < len(turns)


def _mean(values) -> float | None:
    """Return the mean; None of no values, which is not the same as 0."""
    return float(np.mean(values)) if len(values) else None

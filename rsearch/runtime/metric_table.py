"""Describe each field of metrics.jsonl, for its curves and for docs/metrics.md.

METRICS is the only list of the fields. A name with "*" stands for every name of that
form. docs/metrics.md is generated from it:

    python -c "from rsearch.runtime.metric_table import metrics_page as page; \
print(page(), end='')" > docs/metrics.md
"""

import fnmatch

GROUPS = {
    "reward": "rewards of the rollouts",
    "eval": "scores on held-out questions and rows",
    "rollout": "how the policy answers: lengths, outcomes, searches",
    "policy": "how far the policy has moved, and how certain it is",
    "optim": "the optimizer and the critic",
    "perf": "time and compiled programs",
}
OTHER = "other"  # group of a name that is not in the table

METRICS: dict[str, tuple[str, str]] = {  # name -> (group, meaning)
    "reward": ("reward", "mean reward of the rollouts without a failed tool or judge"),
    "reward_*": (
        "reward",
        "mean of one reward term before weighting, over the same rollouts",
    ),
    "groups_with_spread": (
        "reward",
        "share of groups whose rollouts have different rewards; the other groups have "
        "advantages of 0 if advantages are relative to the group",
    ),
    "groups_learnt_from": (
        "reward",
        "the same share after `rl.dynamic_sampling_rounds` have replaced groups",
    ),
    "dev_em": ("eval", "exact match, every `eval.every_steps`: 0 to 1"),
    "dev_f1": ("eval", "F1 of the same answers: 0 to 1"),
    "dev_searches": ("eval", "searches per question in the same answers"),
    "validation_loss": (
        "eval",
        "loss on the demonstrations held out by `sft.validation_share`",
    ),
    "searches": ("rollout", "searches per rollout"),
    "tool_calls": ("rollout", "tool calls per rollout, searches included"),
    "policy_tokens": ("rollout", "tokens per rollout that the policy wrote"),
    "tokens": ("rollout", "tokens per rollout: prompt, policy and observations"),
    "answered": ("rollout", "share of rollouts that end with an answer"),
    "malformed": ("rollout", "share of rollouts that break the protocol"),
    "truncated": (
        "rollout",
        "share of rollouts that end because a budget of tokens or searches is used up",
    ),
    "tool_error": (
        "rollout",
        "share of rollouts with a failed tool call; they are not learnt from",
    ),
    "judge_error": (
        "rollout",
        "share of rollouts whose judge failed; they are not learnt from",
    ),
    "empty_answers": (
        "rollout",
        "share of rollouts without an answer or with an empty one",
    ),
    "repeated_text": (
        "rollout",
        "share of rollouts in which the policy writes a turn twice",
    ),
    "suspicious_passages": (
        "rollout",
        "share of passages that contain tags, control characters or orders to a model",
    ),
    "copied_queries": ("rollout", "share of queries that are the question itself"),
    "repeated_queries": (
        "rollout",
        "share of queries that equal an earlier query of the same rollout",
    ),
    "unsupported_answers": (
        "rollout",
        "share of answers after searches that no retrieved passage contains; yes, no "
        "and empty answers are left out",
    ),
    "forged_observations": (
        "rollout",
        "share of rollouts in which the policy writes the tag of an observation",
    ),
    "cut_observations": (
        "rollout",
        "share of tool calls, searches included, whose observation was cut to "
        "`rollout.max_observation_tokens`",
    ),
    "supporting_recall": (
        "rollout",
        "share of a question's supporting passages that a rollout has retrieved",
    ),
    "supporting_recall_*": ("rollout", "the same after the first, second, ... search"),
    "questions_asked": (
        "rollout",
        "questions of the step, including those of `rl.dynamic_sampling_rounds`",
    ),
    "restarts": (
        "rollout",
        "rollouts that restarted because `rollout.cache_tokens` were used up",
    ),
    "staleness": (
        "rollout",
        "steps by which the policy that sampled lags behind the one that is trained: "
        "0, or 1 with `rl.max_staleness`",
    ),
    "memory_asked": (
        "rollout",
        "R1-Searcher++: requests to the rewriter; a question's rollouts that found the "
        "same passages share one",
    ),
    "memory_kept": ("rollout", "R1-Searcher++: rows added to the memorised set"),
    "memory_size": ("rollout", "R1-Searcher++: rows of the memorised set"),
    "entropy": ("policy", "mean entropy of the policy's tokens, in nats"),
    "kl": ("policy", "mean KL to the reference model per token, by `rl.kl_kind`"),
    "kl_coef": ("policy", "weight of the KL, which `rl.kl_controller` adapts"),
    "clip_fraction": (
        "policy",
        "share of the policy's tokens whose ratio is clipped; 0 if a step has one "
        "update, on rollouts of the same policy",
    ),
    "logp_gap": (
        "policy",
        "mean absolute difference between the log-probabilities and the old ones, per "
        "token",
    ),
    "sampler_gap": (
        "policy",
        "mean absolute difference between the sampler's and the trainer's "
        "log-probabilities before the first update: rounding, unless something is "
        "wrong",
    ),
    "tis_weight": ("policy", "mean weight of truncated importance sampling"),
    "in_loss": ("policy", "share of rollouts with tokens in the loss"),
    "loss": (
        "optim",
        "the loss that is minimised: the surrogate in RL, near 0 by construction; the "
        "negative log-likelihood in SFT",
    ),
    "memory_loss": ("optim", "R1-Searcher++: loss on the memorised rows"),
    "grad_norm": ("optim", "norm of the gradient before clipping"),
    "critic_loss": ("optim", "the value model's clipped squared error"),
    "critic_grad_norm": ("optim", "norm of the value model's gradient"),
    "value": ("optim", "mean of the value model's predictions"),
    "return": ("optim", "mean of the returns that it is trained to predict"),
    "seconds": ("perf", "duration of an SFT step"),
    "rollout_seconds": ("perf", "time for the rollouts, with their searches"),
    "reward_seconds": ("perf", "time for the reward terms"),
    "exchange_seconds": ("perf", "time for exchanging groups between hosts"),
    "memory_seconds": ("perf", "R1-Searcher++: time for the rewriter"),
    "update_seconds": ("perf", "time for the optimizer steps"),
    "compiles": (
        "perf",
        "programs compiled since the start; constant after the first step",
    ),
}


def describe_metric(name: str) -> tuple[str, str]:
    """Return (group, meaning) of a field; (OTHER, "") if it has no entry."""
    if name in METRICS:
        return METRICS[name]
    patterns = [p for p in METRICS if "*" in p and fnmatch.fnmatchcase(name, p)]
    return METRICS[max(patterns, key=len)] if patterns else (OTHER, "")


def curve_name(name: str) -> str:
    """Return TensorBoard's "group/name"; "reward/<term>" for a reward term."""
    group, _ = describe_metric(name)
    return f"{group}/{name.removeprefix('reward_') if group == 'reward' else name}"


def metrics_page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [
        "# The fields of metrics.jsonl",
        "",
        "RUN/STAGE/metrics.jsonl has a line for each step, with its `step` from 0. "
        "TensorBoard and\n`python -m rsearch.report` draw the same numbers in the "
        "groups below: `searches` is\n`rollout/searches` there, and the term "
        "`reward_answer_em` is `reward/answer_em`. A mean over nothing is\nnull or "
        'left out, and a number that is not finite is a string: "NaN", "Infinity" or '
        '"-Infinity".',
        "",
        "This page is generated from the table in `rsearch/runtime/metric_table.py`.",
    ]
    for group, topic in GROUPS.items():
        lines += ["", f"## {group}: {topic}", "", "| field | what it is |", "|---|---|"]
        lines += [
            f"| `{name}` | {meaning} |"
            for name, (of_group, meaning) in METRICS.items()
            if of_group == group
        ]
    return "\n".join([*lines, ""])

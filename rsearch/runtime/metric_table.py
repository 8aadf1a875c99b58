"""Say what each field of metrics.jsonl is: for its curves, and for docs/metrics.md.

METRICS is the only list of them. A name with "*" stands for every name of that form.
docs/metrics.md is made of it:

    python -c "from rsearch.runtime.metric_table import metrics_page as page; \
print(page(), end='')" > docs/metrics.md
"""

import fnmatch

GROUPS = {
    "reward": "what rollouts earn",
    "eval": "scores on held-out questions and rows",
    "rollout": "how the policy answers: lengths, outcomes, searches",
    "policy": "how far the policy has moved, and how sure it is",
    "optim": "the optimizer and the critic",
    "perf": "time and programs",
}
OTHER = "other"  # of a name that is not in the table

METRICS: dict[str, tuple[str, str]] = {  # name -> (group, meaning)
    "reward": ("reward", "mean reward of the rollouts that no tool or judge failed"),
    "reward_*": (
        "reward",
        "mean of one reward term before its weight, over the same rollouts",
    ),
    "groups_with_spread": (
        "reward",
        "share of groups whose rollouts earn different rewards; the others have "
        "advantages of 0 where these compare a group's rollouts",
    ),
    "groups_learnt_from": (
        "reward",
        "the same share after `rl.dynamic_sampling_rounds` have exchanged groups",
    ),
    "dev_em": ("eval", "exact match, every `eval.every_steps`: 0 to 1"),
    "dev_f1": ("eval", "F1 of the same answers: 0 to 1"),
    "dev_searches": ("eval", "searches a question in the same answers"),
    "validation_loss": (
        "eval",
        "loss of the demonstrations held out by `sft.validation_share`",
    ),
    "searches": ("rollout", "searches a rollout"),
    "tool_calls": ("rollout", "calls of tools a rollout, searches among them"),
    "policy_tokens": ("rollout", "tokens a rollout that the policy wrote"),
    "tokens": ("rollout", "tokens a rollout: prompt, policy and observations"),
    "answered": ("rollout", "share of rollouts that end with an answer"),
    "malformed": ("rollout", "share that break the protocol"),
    "truncated": ("rollout", "share that a budget of tokens or searches ends"),
    "tool_error": ("rollout", "share whose search failed; not learnt from"),
    "judge_error": ("rollout", "share whose judge failed; not learnt from"),
    "empty_answers": ("rollout", "share without an answer or with an empty one"),
    "repeated_text": ("rollout", "share in which the policy writes a turn twice"),
    "suspicious_passages": (
        "rollout",
        "of the passages, the share with tags, control characters or orders in them",
    ),
    "copied_queries": ("rollout", "of all queries, those that are the question itself"),
    "repeated_queries": (
        "rollout",
        "of all queries, those that an earlier one of the same rollout equals",
    ),
    "unsupported_answers": (
        "rollout",
        "of the answers after searches, those that no passage found contains; without "
        "yes, no and empty ones",
    ),
    "forged_observations": (
        "rollout",
        "share of rollouts in which the policy writes the tag of an observation",
    ),
    "cut_observations": (
        "rollout",
        "of all searches, those whose passages were cut to "
        "`rollout.max_observation_tokens`",
    ),
    "supporting_recall": (
        "rollout",
        "of a question's supporting passages, the share that a rollout has found",
    ),
    "supporting_recall_*": ("rollout", "the same after the first, second, ... search"),
    "questions_asked": (
        "rollout",
        "questions of the step, with those of `rl.dynamic_sampling_rounds`",
    ),
    "restarts": (
        "rollout",
        "rollouts that restarted because `rollout.cache_tokens` were used up",
    ),
    "staleness": (
        "rollout",
        "steps that the policy that sampled had not learnt from: 0, or 1 with "
        "`rl.max_staleness`",
    ),
    "memory_asked": ("rollout", "R1-Searcher++: rollouts passed to the rewriter"),
    "memory_kept": ("rollout", "R1-Searcher++: new rows of the set that is memorised"),
    "memory_size": ("rollout", "R1-Searcher++: rows of the set that is memorised"),
    "entropy": ("policy", "mean entropy of the policy's tokens, in nats"),
    "kl": ("policy", "mean KL to the reference a token, by `rl.kl_kind`"),
    "kl_coef": ("policy", "weight of the KL, which `rl.kl_controller` moves"),
    "clip_fraction": (
        "policy",
        "share of the policy's tokens whose ratio is clipped; 0 where a step has one "
        "update, from rollouts of the same policy",
    ),
    "logp_gap": (
        "policy",
        "mean distance of log-probabilities from the old ones, a token",
    ),
    "sampler_gap": (
        "policy",
        "mean distance of the sampler's log-probabilities from the trainer's before "
        "the first update: rounding, unless something is wrong",
    ),
    "tis_weight": ("policy", "mean weight of truncated importance sampling"),
    "in_loss": ("policy", "share of rollouts with tokens in the loss"),
    "loss": (
        "optim",
        "the loss that is minimised: the surrogate in RL, near 0 by its making; the "
        "negative log-likelihood in SFT",
    ),
    "memory_loss": ("optim", "R1-Searcher++: loss of the rows that are memorised"),
    "grad_norm": ("optim", "norm of the gradient before it is clipped"),
    "critic_loss": ("optim", "the value model's squared error, clipped"),
    "critic_grad_norm": ("optim", "norm of the value model's gradient"),
    "value": ("optim", "mean of the value model's predictions"),
    "return": ("optim", "mean of the returns that they are to predict"),
    "seconds": ("perf", "of a step of SFT"),
    "rollout_seconds": ("perf", "of the rollouts, with their searches"),
    "reward_seconds": ("perf", "of the reward terms"),
    "exchange_seconds": ("perf", "of the exchange of groups between hosts"),
    "memory_seconds": ("perf", "R1-Searcher++: of the rewriter"),
    "update_seconds": ("perf", "of the optimizer's steps"),
    "compiles": ("perf", "programs compiled since the start; constant after a step"),
}


def describe_metric(name: str) -> tuple[str, str]:
    """Return (group, meaning) of a field; (OTHER, "") of one that has no entry."""
    if name in METRICS:
        return METRICS[name]
    patterns = [p for p in METRICS if "*" in p and fnmatch.fnmatchcase(name, p)]
    return METRICS[max(patterns, key=len)] if patterns else (OTHER, "")


def curve_name(name: str) -> str:
    """Return "group/name", as TensorBoard has it; "reward/<term>" of a reward term."""
    group, _ = describe_metric(name)
    return f"{group}/{name.removeprefix('reward_') if group == 'reward' else name}"


def metrics_page() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# The fields of metrics.jsonl",
        "",
        "RUN/STAGE/metrics.jsonl has a line for each step, with its `step` from 0. "
        "TensorBoard and\n`python -m rsearch.report` draw the same numbers, in the "
        "groups below: `searches` is\n`rollout/searches` there, the term "
        "`reward_answer_em` is `reward/answer_em`. A mean over nothing is\nnull, and a "
        'number that is not finite a text: "NaN", "Infinity", "-Infinity".',
        "",
        "This page is made of the table in `rsearch/runtime/metric_table.py`.",
    ]
    for group, about in GROUPS.items():
        lines += ["", f"## {group}: {about}", "", "| field | what it is |", "|---|---|"]
        lines += [
            f"| `{name}` | {meaning} |"
            for name, (of_group, meaning) in METRICS.items()
            if of_group == group
        ]
    return "\n".join([*lines, ""])

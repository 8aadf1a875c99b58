"""Scores of many predictions, and how far they could be from the truth by chance."""

from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.evaluation.statistics import bootstrap_interval, wilson_interval
from rsearch.text import normalize as text
from rsearch.types import Group, Outcome

METRICS = {
    "em": text.exact_match,
    "cover_em": text.cover_exact_match,
    "f1": text.f1,
}
# What an answer costs: calls of the model, tokens that it read and scored beside those
# that it wrote (`policy_tokens`), passages read, words of the answer; and
# the share of documents that prompts had no room for.
COSTS = ("model_calls", "prompt_tokens", "scored_tokens", "documents", "answer_words")
COSTS += ("left_out",)
BINARY = ("em", "cover_em")  # of a question either 0 or 1


def scores_of_rows(rows: Sequence[Mapping], normalize: str) -> dict[str, np.ndarray]:
    """Return each row's scores.

    Args:
        rows: [n] with `prediction` (None where there is none) and `golden_answers`.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.

    Returns:
        {"em", "cover_em", "f1"}, each [n] float64 in [0, 1].
    """
    return {
        name: np.array(
            [
                metric(row["prediction"], row["golden_answers"], normalize=normalize)
                for row in rows
            ],
            np.float64,
        )
        for name, metric in METRICS.items()
    }


def scores_of_groups(groups: Sequence[Group], normalize: str) -> dict[str, np.ndarray]:
    """Return {score of METRICS: [n] of the rollouts of all groups, in order}.

    Args:
        groups: any number.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.
    """
    rows = [
        {"prediction": r.answer, "golden_answers": g.question.golden_answers}
        for g in groups
        for r in g.rollouts
    ]
    return scores_of_rows(rows, normalize)


def score_rows(rows: Sequence[Mapping], normalize: str) -> dict:
    """Return means over rows with their intervals, as in `scores_of_rows`.

    Returns:
        {"n": int, "em", "cover_em", "f1": fractions from 0 to 1, and "<score>_95"
        of each: [low, high]}, see `score_interval`.

    Raises:
        ValueError: there are no rows, so there is no mean.
    """
    if not rows:
        raise ValueError("no rows to score")
    summary: dict = {"n": len(rows)}
    for name, values in scores_of_rows(rows, normalize).items():
        summary[name] = float(values.mean())
        summary[f"{name}_95"] = list(score_interval(name, values))
    return summary


def score_interval(name: str, values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of a score.

    Args:
        name: of METRICS. Those of BINARY have Wilson's interval, F1 the bootstrap's.
        values: [n] of questions, at least one.

    Returns:
        (low, high), fractions from 0 to 1.
    """
    if name in BINARY:
        return wilson_interval(int(values.sum()), len(values))
    return bootstrap_interval(values)


def score_groups(groups: Sequence[Group], *, normalize: str) -> dict:
    """Return means, intervals and counts over the rollouts of all groups.

    Args:
        groups: at least one.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.

    Returns:
        A dict of JSON values: `n` rollouts; the scores of METRICS as fractions, each
        with its interval (`score_interval`) as `<score>_95`, None where tools or judge
        failed in all of them (where they failed in some, these count as wrong); means
        over rollouts of `searches` (turns that searched), `queries`, `searches_right`
        and `searches_wrong` (over those whose answer is an exact match, and the others;
        None without any), `policy_tokens`, `tokens` and the costs of COSTS; a count for
        each outcome; and the first few of these again for each kind of question in
        `by_kind` and `by_known`, which are empty where questions have no such metadata.
    """
    pairs = [(g.question, r) for g in groups for r in g.rollouts]
    scores = scores_of_groups(groups, normalize)
    is_signal = np.array([r.outcome.is_signal for _, r in pairs], bool)
    summary: dict = {"n": len(pairs)}
    for name, values in scores.items():
        has_mean = is_signal.any()
        summary[name] = float(values.mean()) if has_mean else None
        summary[f"{name}_95"] = list(score_interval(name, values)) if has_mean else None
    searches = np.array([len(r.searches) for _, r in pairs], np.float64)
    is_right = scores["em"] == 1
    summary["searches"] = float(searches.mean())
    summary["searches_right"] = _mean(searches[is_right])
    summary["searches_wrong"] = _mean(searches[~is_right])
    num_queries = [sum(len(s.call.arguments) for s in r.searches) for _, r in pairs]
    summary["queries"] = float(np.mean(num_queries))
    summary["policy_tokens"] = float(np.mean([r.num_policy_tokens for _, r in pairs]))
    summary["tokens"] = float(np.mean([r.num_tokens for _, r in pairs]))
    summary |= {name: float(np.mean(x)) for name, x in _costs(pairs).items()}
    for outcome in Outcome:
        summary[outcome.value] = sum(r.outcome == outcome for _, r in pairs)
    kinds = [q.metadata.get("kind") for q, _ in pairs]
    summary["by_kind"] = _split(scores, searches, is_signal, kinds)
    known = [q.metadata.get("known") for q, _ in pairs]
    words = {True: "known", False: "not known"}
    known = [words.get(k) for k in known]
    summary["by_known"] = _split(scores, searches, is_signal, known)
    return summary


def _costs(pairs) -> dict[str, list[float]]:
    """Return {name of COSTS: of each rollout}."""
    rollouts = [rollout for _, rollout in pairs]
    return {
        "model_calls": [len(r.policy_texts) for r in rollouts],
        "prompt_tokens": [r.num_tokens - r.num_policy_tokens for r in rollouts],
        "scored_tokens": [r.num_scored for r in rollouts],
        "documents": [len(r.passages) for r in rollouts],
        "answer_words": [len((r.answer or "").split()) for r in rollouts],
        "left_out": [r.left_out for r in rollouts],
    }


def _split(scores, searches, is_signal, labels):
    """Return {label: {"n", means}} over the rows that have this label."""
    labels = np.array([label if isinstance(label, str) else "" for label in labels])
    split = {}
    for label in sorted(set(labels.tolist()) - {""}):
        rows = labels == label
        means = {
            name: _mean(values[rows]) if is_signal[rows].any() else None
            for name, values in scores.items()
        }
        means["searches"] = _mean(searches[rows])
        split[label] = {"n": int(rows.sum()), **means}
    return split


def _mean(values):
    return float(values.mean()) if len(values) else None

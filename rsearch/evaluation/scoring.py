"""Score many predictions, with intervals that say how much is due to chance."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rsearch.evaluation.statistics import bootstrap_interval, wilson_interval
from rsearch.llm.thoughts import answer_after_thoughts
from rsearch.text import normalize as text
from rsearch.types import Group, Outcome, Question, Rollout

METRICS = {
    "em": text.exact_match,
    "cover_em": text.cover_exact_match,
    "f1": text.f1,
}
# What an answer costs: calls of the model, tokens that it read and tokens it scored
# (those that it wrote are `policy_tokens`), passages read, and words of the answer.
# Also the share of documents that did not fit in prompts, and the shares of rollouts
# whose last reply was cut by its budget, with or without an answer, and that would have
# gone on if rounds and searches were not limited. `prompt_tokens` of the policy's own
# protocol count each token of a conversation once, since it stays in the KV cache;
# those of methods, `converse` included, count the whole prompt of each call, with the
# earlier replies in it. `tokens` differ in the same way.
COSTS = ("model_calls", "prompt_tokens", "scored_tokens", "documents", "answer_words")
COSTS += ("left_out", "cut_by_length", "at_limit")
BINARY = ("em", "cover_em")  # either 0 or 1 for a question


def scores_of_rows(rows: Sequence[Mapping], normalize: str) -> dict[str, np.ndarray]:
    """Return each row's scores.

    Args:
        rows: [n] with `prediction` (None where there is none) and `golden_answers`. A
            prediction's thoughts are removed; one within a thought is no answer.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.

    Returns:
        {"em", "cover_em", "f1"}, each [n] float64 in [0, 1].
    """
    answers = [answer_after_thoughts(row["prediction"] or "")[0] for row in rows]
    return {
        name: np.array(
            [
                metric(answer, row["golden_answers"], normalize=normalize)
                for answer, row in zip(answers, rows, strict=True)
            ],
            np.float64,
        )
        for name, metric in METRICS.items()
    }


def scores_of_questions(
    rows: Sequence[Mapping], normalize: str
) -> dict[str, np.ndarray]:
    """Return each question's scores: means over its rows, which are its samples.

    Args:
        rows: see `scores_of_rows`. If a question has several samples, `sample_of` is
            its id in each of their rows; in a question's only row it is None or absent.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.

    Returns:
        {"em", "cover_em", "f1"}, each [n] float64 in [0, 1], in the order of the
        questions' first rows.
    """
    numbers: dict = {}
    names = [row.get("sample_of") or i for i, row in enumerate(rows)]
    question_numbers = np.array(
        [numbers.setdefault(name, len(numbers)) for name in names], int
    )
    counts = np.bincount(question_numbers)
    return {
        name: np.bincount(question_numbers, values) / counts
        for name, values in scores_of_rows(rows, normalize).items()
    }


def scores_of_groups(groups: Sequence[Group], normalize: str) -> dict[str, np.ndarray]:
    """Return {name in METRICS: [n] scores of the rollouts of all groups, in order}.

    Args:
        groups: any number of groups.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.
    """
    rows = [
        {"prediction": r.answer, "golden_answers": g.question.golden_answers}
        for g in groups
        for r in g.rollouts
    ]
    return scores_of_rows(rows, normalize)


def score_rows(rows: Sequence[Mapping], normalize: str) -> dict:
    """Return means over questions with their intervals; see `scores_of_questions`.

    Returns:
        {"n": number of questions, "em", "cover_em", "f1": fractions from 0 to 1, and
        for each score "<score>_95": [low, high]}, see `score_interval`.

    Raises:
        ValueError: there are no rows, so there is no mean.
    """
    if not rows:
        raise ValueError("no rows to score")
    scores = scores_of_questions(rows, normalize)
    summary: dict = {"n": len(scores["em"])}
    for name, values in scores.items():
        summary[name] = float(values.mean())
        summary[f"{name}_95"] = list(score_interval(name, values))
    return summary


def score_interval(name: str, values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of a score.

    Args:
        name: name in METRICS. Scores of BINARY get Wilson's interval; F1 and means over
            samples get the bootstrap's.
        values: [n] scores of at least one question. With several samples, each is the
            mean over a question's samples, which are not independent draws.

    Returns:
        (low, high), fractions from 0 to 1.
    """
    if name in BINARY and np.isin(values, (0, 1)).all():
        return wilson_interval(int(values.sum()), len(values))
    return bootstrap_interval(values)


def score_groups(
    groups: Sequence[Group], *, normalize: str, num_seeds: int = 1
) -> dict:
    """Return means, intervals and counts over the rollouts of all groups.

    Args:
        groups: at least one; all have the same number of rollouts.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.
        num_seeds: number of seeds that a group's rollouts were sampled with; rollouts
            of the same seed are adjacent.

    Returns:
        A dict of JSON values. `n` counts questions, and `rollouts` rollouts if a
        question has several. The scores of METRICS are fractions, each with its
        interval over questions (`score_interval`) as `<score>_95`. They are None if
        tools or judge failed in all rollouts; failures in some count as wrong answers.
        Means over rollouts are `searches` (turns that searched), `queries`,
        `searches_right` and `searches_wrong` (over rollouts whose answer is an exact
        match, and over the others; None without any), `policy_tokens`, `tokens` and
        the costs of COSTS; tokens are None if an endpoint did not count them.
        `unsearched` is the share of rollouts without a search.
        Each outcome has its count of rollouts. `too_long` counts questions whose
        prompt was too long to be read. With several seeds, `<score>_sd` is the sample
        standard deviation of the score between them. `by_kind` and `by_known` have
        `n`, the scores and `searches` for each kind of question; they are empty if
        questions have no such metadata. `notes` has, for each name of a method's notes,
        `n`, the `mean`, and as `quartiles` the least number, the three quartiles and
        the greatest.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    scores = scores_of_groups(groups, normalize)
    is_signal = np.array([r.outcome.is_signal for r in rollouts], bool)

    def by_question(values: np.ndarray) -> np.ndarray:
        return values.reshape(len(groups), -1).mean(axis=1)

    summary: dict = {"n": len(groups)}
    if len(rollouts) > len(groups):
        summary["rollouts"] = len(rollouts)
    means = {name: by_question(values) for name, values in scores.items()}
    for name, values in scores.items():
        has_mean = is_signal.any()
        summary[name] = float(means[name].mean()) if has_mean else None
        interval = score_interval(name, means[name]) if has_mean else ()
        summary[f"{name}_95"] = list(interval) or None
        if num_seeds > 1:
            seed_means = values.reshape(len(groups), num_seeds, -1).mean(axis=(0, 2))
            summary[f"{name}_sd"] = float(seed_means.std(ddof=1)) if has_mean else None
    searches = np.array([len(r.searches) for r in rollouts], np.float64)
    is_right = scores["em"] == 1
    summary["searches"] = float(searches.mean())
    summary["unsearched"] = float((searches == 0).mean())
    summary["searches_right"] = _mean(searches[is_right])
    summary["searches_wrong"] = _mean(searches[~is_right])
    num_queries = [sum(len(s.call.arguments) for s in r.searches) for r in rollouts]
    summary["queries"] = float(np.mean(num_queries))
    costs = _costs(rollouts).items()
    summary |= {n: None if None in x else float(np.mean(x)) for n, x in costs}
    summary["too_long"] = sum(all(map(_is_too_long, g.rollouts)) for g in groups)
    for outcome in Outcome:
        summary[outcome.value] = sum(r.outcome == outcome for r in rollouts)
    question_values = means, by_question(searches), by_question(is_signal) > 0
    kinds = [g.question.metadata.get("kind") for g in groups]
    summary["by_kind"] = _split(*question_values, kinds)
    known_labels = [g.question.metadata.get("known") for g in groups]
    words = {True: "known", False: "not known"}
    known_labels = [words.get(k) for k in known_labels]
    summary["by_known"] = _split(*question_values, known_labels)
    summary["notes"] = _summarize_notes(rollouts)
    return summary


def _summarize_notes(rollouts) -> dict[str, dict]:
    """Return {name: distribution of its numbers} of the notes in rollouts."""
    values: dict[str, list[float]] = {}
    for name, value in (note for r in rollouts for note in r.notes):
        values.setdefault(name, []).append(value)
    return {
        name: {
            "n": len(numbers),
            "mean": float(np.mean(numbers)),
            "quartiles": np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1]).tolist(),
        }
        for name, numbers in values.items()
    }


def _is_too_long(rollout):
    """Return whether the first prompt was longer than its budget."""
    return rollout.outcome == Outcome.TRUNCATED and not rollout.policy_texts


def _num_read_and_written(rollout) -> tuple[int | None, int | None]:
    """Return the numbers of tokens; None if an endpoint did not count some."""
    if rollout.endpoint_tokens is None:
        return None, None
    num_read, num_written = rollout.endpoint_tokens
    num_read += rollout.num_tokens - rollout.num_policy_tokens
    return num_read, num_written + rollout.num_policy_tokens


def _costs(rollouts) -> dict[str, list[float | None]]:
    """Return {a kind of tokens, or a name in COSTS: its value in each rollout}."""
    tokens = [_num_read_and_written(r) for r in rollouts]
    return {
        "policy_tokens": [num_written for _, num_written in tokens],
        "tokens": [None if None in nums else sum(nums) for nums in tokens],
        "model_calls": [len(r.policy_texts) for r in rollouts],
        "prompt_tokens": [num_read for num_read, _ in tokens],
        "scored_tokens": [r.num_scored for r in rollouts],
        "documents": [len(r.passages) for r in rollouts],
        "answer_words": [len((r.answer or "").split()) for r in rollouts],
        "left_out": [r.left_out for r in rollouts],
        "cut_by_length": [float(r.is_cut) for r in rollouts],
        "at_limit": [float(r.is_at_limit) for r in rollouts],
    }


def _split(scores, searches, is_signal, labels):
    """Return {label: {"n", means}} over the questions that have the label."""
    labels = np.array([label if isinstance(label, str) else "" for label in labels])
    means_by_label = {}
    for label in sorted(set(labels.tolist()) - {""}):
        rows = labels == label
        means = {
            name: _mean(values[rows]) if is_signal[rows].any() else None
            for name, values in scores.items()
        }
        means["searches"] = _mean(searches[rows])
        means_by_label[label] = {"n": int(rows.sum()), **means}
    return means_by_label


def _mean(values):
    return float(values.mean()) if len(values) else None


def run_evaluation(
    roll_out: Callable[[list[str]], list[Rollout]],
    questions: Sequence[Question],
    *,
    normalize: str = "squad",
) -> tuple[dict, list[Rollout]]:
    """Answer questions and score the answers.

    Args:
        roll_out: (texts of questions) -> a Rollout for each, such as the method
            `rollout` of what `rsearch.load_policy` returns.
        questions: at least one question, with golden answers.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.

    Returns:
        Means, intervals and counts (see `score_groups`), and the rollouts.

    Raises:
        ValueError: there are no questions, one of them cannot be answered, or an
            argument or the result of `roll_out` has another type.
    """
    questions = list(questions)
    if not questions:
        raise ValueError("no questions to evaluate on")
    _check_types("questions", questions, Question)
    _check_golden_answers(questions)
    rollouts = list(roll_out([question.text for question in questions]))
    _check_types("results of roll_out", rollouts, Rollout)
    if len(rollouts) != len(questions):
        raise ValueError(
            f"roll_out returned {len(rollouts)} rollouts for {len(questions)} "
            "questions: must be one for each"
        )
    groups = [Group(q, (r,)) for q, r in zip(questions, rollouts, strict=True)]
    return score_groups(groups, normalize=normalize), rollouts


def _check_golden_answers(questions):
    """Refuse questions whose every answer would silently count as wrong.

    `("Paris")`, without a comma, is a text, whose letters would be the golden answers.
    """
    for question in questions:
        golden = question.golden_answers
        is_sequence = isinstance(golden, list | tuple)
        if not (is_sequence and golden and all(isinstance(x, str) for x in golden)):
            raise ValueError(
                f"question {question.id!r}: golden_answers = {golden!r}: must be a "
                'tuple of at least one text, such as ("Paris",)'
            )


def _check_types(name, values, kind):
    """Refuse values of another type, which a Python caller has passed."""
    for value in values:
        if not isinstance(value, kind):
            raise ValueError(
                f"{name}: must be of type {kind.__module__}.{kind.__name__}, got "
                f"{repr(value)[:200]}"
            )

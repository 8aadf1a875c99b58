"""Measure how well a policy searches, in training steps and in evaluations.

Everything is computed on the host from strings, in time linear in their length. Texts
are compared after `rsearch.text.normalize.DEFAULT_NORMALIZER`, whichever normaliser
scores a run's answers, so that the numbers of all runs can be compared.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rsearch.data.questions import bare_title, supporting_passages
from rsearch.text.normalize import CLOSED_ANSWERS, DEFAULT_NORMALIZER, NORMALIZERS
from rsearch.types import Group, Question, Rollout

RECALL_BY_SEARCH = "supporting_by_turn"
NEEDLESS = "needless_searches"
NOTABLE = {  # metric of `search_health`, or NEEDLESS -> value from which it is notable
    "copied_queries": 0.5,
    "repeated_queries": 0.1,
    "unsupported_answers": 0.5,
    "forged_observations": 0.01,
    "cut_observations": 0.25,
    NEEDLESS: 0.5,
}
HEALTH = ("supporting_recall", *NOTABLE)

# Answers such as "yes", which no passage needs to contain.
_CLOSED_ANSWERS = CLOSED_ANSWERS["flashrag"]


def search_health(
    groups: Sequence[Group],
    *,
    tags: Sequence[re.Pattern] = (),
    titles: Mapping[str, Collection[str]] | None = None,
) -> dict[str, float | list[float] | None]:
    """Return search metrics over all rollouts, as shares from 0 to 1.

    A share of an empty set is None. Failed rollouts count like the others.

    Args:
        groups: any number of groups.
        tags: patterns of observation tags, see `Protocol.observation_tags`.
        titles: {question id: titles of its supporting passages}, for questions whose
            supporting passages are not taken from their metadata.

    Returns:
        A dict of
        `copied_queries`: share of queries that equal the question once normalised;
        `repeated_queries`: share of queries that equal an earlier query of the same
        rollout once normalised;
        `unsupported_answers`: of the answers given after searches that found any
        passage, the share whose normalised words do not appear in sequence in any of
        these passages. Empty answers, yes and no are left out;
        `forged_observations`: of the rollouts in which the policy wrote anything, the
        share in which it wrote an observation tag itself;
        `cut_observations`: share of executed calls whose observation was cut to its
        budget, so that the policy did not read the end of what was found;
        `supporting_recall`: share of a question's supporting passages that the searches
        of a rollout found, averaged over the rollouts of questions whose supporting
        passages are known; a rollout without searches counts as 0; and
        `supporting_by_turn`: a list of the same recall after the first search, the
        second and so on, up to the most searches of any of these rollouts. A rollout
        with fewer searches keeps its last value.
    """
    pairs = [(g.question, r) for g in groups for r in g.rollouts]
    is_copied, is_repeated = [], []
    for question, rollout in pairs:
        queries = _queries(rollout)
        normal_question = _normalise(question.text)
        is_copied += [query == normal_question for query in queries]
        is_repeated += [query in queries[:i] for i, query in enumerate(queries)]
    policy_texts = [
        rollout.policy_texts for _, rollout in pairs if rollout.policy_texts
    ]
    is_forged = [
        any(tag.search(text) for tag in tags for text in texts)
        for texts in policy_texts
    ]
    num_calls = sum(len(rollout.tool_uses) for _, rollout in pairs)
    num_cut = sum(rollout.num_cut_observations for _, rollout in pairs)
    curves = [
        curve
        for question, rollout in pairs
        if (curve := _recall_curve(question, rollout, titles or {})) is not None
    ]
    return {
        "copied_queries": _mean(is_copied),
        "repeated_queries": _mean(is_repeated),
        "unsupported_answers": _unsupported_answers([r for _, r in pairs]),
        "forged_observations": _mean(is_forged),
        "cut_observations": num_cut / num_calls if num_calls else None,
        "supporting_recall": _mean([curve[-1] for curve in curves]),
        # The first point of a curve is the recall before any search.
        RECALL_BY_SEARCH: [
            float(np.mean([curve[min(turn, len(curve) - 1)] for curve in curves]))
            for turn in range(1, max(map(len, curves), default=0))
        ],
    }


def needless_searches(
    has_searched: Mapping[str, float], direct_is_right: Mapping[str, bool]
) -> float | None:
    """Return the share of searched questions among those that need no search.

    Args:
        has_searched: {question id: whether the policy searched for it, as 0 or 1; with
            several samples, the share that did}.
        direct_is_right: {question id: whether the same policy's answer without any
            search is an exact match}.

    Returns:
        Of the questions in both mappings that are answered correctly without a search,
        the share that was searched for; None if there are no such questions.
    """
    right_names = [name for name, is_right in direct_is_right.items() if is_right]
    return _mean([has_searched[name] for name in right_names if name in has_searched])


def _queries(rollout: Rollout) -> list[str]:
    """Return all queries of a rollout, normalised, in order."""
    return [
        _normalise(query) for use in rollout.searches for query in use.call.arguments
    ]


def _normalise(text):
    """Return the normalised text; the stripped text itself if nothing is left of it."""
    return NORMALIZERS[DEFAULT_NORMALIZER](text) or text.strip()


def _unsupported_answers(rollouts):
    """Return `unsupported_answers` of `search_health`."""

    # The rollouts of a group find the same passages again and again.
    @functools.cache
    def pad_words(text):
        # Spaces at both ends, so that "art" is not found in "party".
        return f" {_normalise(text)} "

    return _mean(
        [
            not any(f" {answer} " in pad_words(p.contents) for p in rollout.passages)
            for rollout in rollouts
            if (answer := _normalise(rollout.answer or ""))
            not in {"", *_CLOSED_ANSWERS}
            and rollout.passages
        ]
    )


def _recall_curve(
    question: Question, rollout: Rollout, titles: Mapping[str, Collection[str]]
) -> list[float] | None:
    """Return the recall before any search and after each; None if it is unknown."""
    if question.id in titles:
        key, expected = bare_title, set(titles[question.id])
    else:
        key, expected = supporting_passages(question)
    if not expected:
        return None
    curve, retrieved = [0.0], set()
    for use in rollout.searches:
        retrieved |= {key(passage) for hits in use.result.data for passage in hits}
        curve.append(len(expected & retrieved) / len(expected))
    return curve


def _mean(values):
    return float(np.mean(values)) if values else None

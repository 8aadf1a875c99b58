"""Reward terms that compare the answer with the golden ones."""

from collections.abc import Sequence

from rsearch.rewards.reading import AnswerScope, Normalize, Order, answer_in
from rsearch.text import normalize as text
from rsearch.types import Question, Rollout


def answer_em(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    normalize: Normalize = "squad",
    right: float = 1.0,
    wrong: float = 0.0,
    scope: AnswerScope = "policy",
    empty_matches: bool = False,
) -> list[float]:
    """Return [G] `right` where the answer equals a golden one, else `wrong`.

    This is the whole reward of Search-R1 and RAG-R1.

    Args:
        question: question with its golden answers.
        rollouts: [G] rollouts of this question.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.
        right, wrong: the two values; R1-Searcher's equation 5 has 1 and -1.
        scope: where the answer is read, as in `rsearch.rewards.reading.answer_in`.
        empty_matches: as in `rsearch.text.normalize.exact_match`.
    """
    settings = {"normalize": normalize, "empty_matches": empty_matches}
    scores = (
        text.exact_match(answer_in(r, scope), question.golden_answers, **settings)
        for r in rollouts
    )
    return [right if score else wrong for score in scores]


def answer_f1(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    normalize: Normalize = "squad",
    decimals: int | None = None,
    scope: AnswerScope = "policy",
    empty_matches: bool = False,
) -> list[float]:
    """Return [G] F1 of the answer's words, in [0, 1].

    This is R-Search's equation 3 and, with the other normaliser, R1-Searcher's
    equation 4.

    Args:
        question, rollouts, normalize, scope, empty_matches: as in `answer_em`.
        decimals: decimals to round each value to, as in `rounded`; R-Search's public
            code keeps 2.
    """
    settings = {"normalize": normalize, "empty_matches": empty_matches}
    gold = question.golden_answers
    return [
        rounded(text.f1(answer_in(r, scope), gold, **settings), decimals)
        for r in rollouts
    ]


def answer_cover_em(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    normalize: Normalize = "r1_searcher",
    order: Order = "any",
    max_words: int = 0,
    right: float = 1.0,
    wrong: float = 0.0,
    scope: AnswerScope = "policy",
    empty_matches: bool = False,
) -> list[float]:
    """Return [G] `right` where the answer has all words of a golden one, else `wrong`.

    Args:
        question, rollouts, normalize, scope, empty_matches: as in `answer_em`.
        order: order of the words, as in `rsearch.text.normalize.cover_exact_match`.
        max_words: a longer answer is wrong, so that listing everything known does not
            pay; R1-Searcher++ allows 10 (its equation 4), and 0 sets no limit.
        right, wrong: the two values; the first stage of R1-Searcher's public Llama run
            has 1 and -1.
    """
    values = []
    for rollout in rollouts:
        answer = answer_in(rollout, scope)
        is_long = bool(max_words) and len((answer or "").split()) > max_words
        covers = text.cover_exact_match(
            answer,
            question.golden_answers,
            normalize=normalize,
            order=order,
            empty_matches=empty_matches,
        )
        values.append(right if covers and not is_long else wrong)
    return values


def rounded(value: float, decimals: int | None) -> float:
    """Round `value` to this many decimals; None returns it unchanged."""
    return value if decimals is None else round(value, decimals)

"""What a rollout earns: terms that a recipe names, weighs and sums.

A term is `(question, rollouts, **settings) -> [G]` floats. It sees all rollouts of one
question, reads what the policy itself wrote (`answer`, `policy_texts`) and whether the
engine was asked (`searches`), and never the decoded whole: no passage earns anything.
NaN says that a judge was needed and could not be asked; `rsearch.rewards.group` takes
such a rollout out of learning.
"""

import math
from collections.abc import Sequence

from rsearch import text
from rsearch.protocols.tagged import boxes, mentions_tag
from rsearch.types import GenerateFn, Question, Rollout

EVIDENCE = "original_evidence"
OBSERVATION = "observation"
OBSERVATIONS = ("information", OBSERVATION)  # of any protocol: never the policy's own


def answer_em(
    question: Question, rollouts: Sequence[Rollout], *, normalize: str = "squad"
) -> list[float]:
    """[G] 1 where the answer is exactly right, else 0: Search-R1's whole reward.

    Args:
        question: with its golden answers.
        rollouts: [G] of this question.
        normalize: a key of `rsearch.text.NORMALIZERS`.
    """
    gold = question.golden_answers
    return [text.exact_match(r.answer, gold, normalize=normalize) for r in rollouts]


def answer_f1(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    normalize: str = "squad",
    decimals: int | None = None,
) -> list[float]:
    """[G] F1 of the answer's words, in [0, 1]; R-Search's equation 3.

    Args:
        question, rollouts, normalize: as in `answer_em`.
        decimals: rounds each value; R-Search's public code keeps 2.
    """
    gold = question.golden_answers
    return [
        _rounded(text.f1(r.answer, gold, normalize=normalize), decimals)
        for r in rollouts
    ]


def answer_cover_em(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    normalize: str = "r1_searcher",
    max_words: int = 0,
) -> list[float]:
    """[G] 1 where the answer holds every word of a golden one, else 0.

    Args:
        question, rollouts, normalize: as in `answer_em`.
        max_words: a longer answer earns 0, so that listing all that is known does not
            pay; R1-Searcher++ allows 10, and 0 is no limit.
    """
    gold = question.golden_answers
    return [
        0.0
        if max_words and len((r.answer or "").split()) > max_words
        else text.cover_exact_match(r.answer, gold, normalize=normalize)
        for r in rollouts
    ]


def format_ok(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    good: float = 0.0,
    bad: float = -1.0,
) -> list[float]:
    """[G] `good` where the rollout kept to its protocol to the end, else `bad`.

    It did if every turn held a valid action, the last one an answer, and the policy
    wrote no observation itself.
    """
    is_ok = [
        r.answer is not None
        and not r.num_malformed
        and not any(_forges(r, tag) for tag in OBSERVATIONS)
        for r in rollouts
    ]
    return [good if ok else bad for ok in is_ok]


def evidence_f1(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    judge: GenerateFn,
    normalize: str = "squad",
    decimals: int | None = None,
    indicator: str = "executed",
) -> list[float]:
    """[G] F1 of a judge's answer from the evidence alone; R-Search's equation 4.

    The evidence is the last box of the policy's own text. An empty or missing one earns
    0 and no judge is asked; nor is one where there was no search, and so nothing that
    the box could be evidence of, or where the rollout is no learning signal.

    Args:
        question, rollouts: as in `answer_em`.
        judge: the cross-family model; all evidence is sent to it in one call.
        normalize, decimals: as in `answer_f1`.
        indicator: what counts as a search, as in `r_search_format`.

    Returns:
        [G] in [0, 1]; NaN where the judge could not be asked.
    """
    evidence = {}
    for position, rollout in enumerate(rollouts):
        found = _boxes(rollout, EVIDENCE)
        searched = _searched(rollout, indicator)
        if rollout.outcome.is_signal and searched and found and found[-1]:
            evidence[position] = found[-1]
    values = [0.0] * len(rollouts)
    if not evidence:
        return values
    chats = [_judge_messages(question, e) for e in evidence.values()]
    replies = judge(chats)
    assert len(replies) == len(chats), (len(replies), len(chats))
    for position, reply in zip(evidence, replies, strict=True):
        if reply is None:
            values[position] = math.nan
            continue
        value = text.f1(reply, question.golden_answers, normalize=normalize)
        values[position] = _rounded(value, decimals)
    return values


def r_search_format(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    evidence: float = 0.2,
    answer: float = 0.2,
    indicator: str = "executed",
    empty_gets_format: bool = False,
) -> list[float]:
    """[G] what R-Search pays for form: its equation 5, with its public code's values.

    `answer` is earned by exactly one answer box that is not empty. `evidence` is earned
    by exactly one evidence box that is not empty where the policy searched, and by none
    at all where it did not.

    Args:
        question, rollouts: as in `answer_em`.
        evidence: gamma_e.
        answer: gamma_a.
        indicator: what counts as a search. "executed": one that the engine was asked;
            a policy that writes an observation itself then earns nothing here.
            "tags", as in the public code: its own observation counts like a search.
        empty_gets_format: pay `evidence` to a rollout without search even if it never
            answered; the public code does, so that an empty reply earns it.
    """
    values = []
    for rollout in rollouts:
        if indicator == "executed" and _forges(rollout, OBSERVATION):
            values.append(0.0)
            continue
        answers, found = _boxes(rollout, "answer"), _boxes(rollout, EVIDENCE)
        if _searched(rollout, indicator):
            pays_evidence = len(found) == 1 and bool(found[0])
        else:
            has_answered = bool(answers) or empty_gets_format
            pays_evidence = not found and has_answered
        pays_answer = len(answers) == 1 and bool(answers[0])
        values.append(evidence * pays_evidence + answer * pays_answer)
    return values


TERMS = {
    "answer_em": answer_em,
    "answer_f1": answer_f1,
    "answer_cover_em": answer_cover_em,
    "format_ok": format_ok,
    "evidence_f1": evidence_f1,
    "r_search_format": r_search_format,
}


def _judge_messages(question, evidence):
    """R-Search's Table 5. Concatenated, since either text may hold braces."""
    return [
        {
            "role": "user",
            "content": "Answer the question based on the given passages. Only give me "
            "the answer and do not output any other words.\n\nThe following are given "
            f"passages:\n{evidence}\n\nQuestion: {question.text}\nAnswer:",
        }
    ]


def _boxes(rollout, tag):
    """The texts in the policy's own boxes; one never spans two turns."""
    return [content for turn in rollout.policy_texts for content in boxes(turn, tag)]


def _forges(rollout, tag):
    return any(mentions_tag(turn, tag) for turn in rollout.policy_texts)


def _searched(rollout, indicator):
    assert indicator in ("executed", "tags"), indicator
    if indicator == "tags" and _boxes(rollout, OBSERVATION):
        return True
    return bool(rollout.searches)


def _rounded(value, decimals):
    return value if decimals is None else round(value, decimals)

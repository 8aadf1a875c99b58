"""R-Search's evidence and format rewards (Zhao et al. 2025, equations 4 and 5)."""

import math
from collections.abc import Sequence
from typing import Literal

from rsearch.protocols.plain import evidence_messages
from rsearch.protocols.tagged import EVIDENCE_TAG
from rsearch.rewards.answers import rounded
from rsearch.rewards.reading import (
    Normalize,
    first_close_texts,
    policy_boxes,
    transcript,
)
from rsearch.text import normalize as text
from rsearch.types import GenerateFn, Question, Rollout

OBSERVATION = "observation"
PROMPT_WORD = "and"  # the text between the system prompt's own answer tags


def evidence_f1(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    judge: GenerateFn,
    normalize: Normalize = "squad",
    decimals: int | None = None,
    indicator: Literal["executed", "tags"] = "executed",
    scope: Literal["policy", "transcript"] = "policy",
    empty_matches: bool = False,
) -> list[float]:
    """Return [G] F1 of a judge's answer from the evidence; R-Search's equation 4.

    The evidence is the last evidence box. The reward is 0, without calling the judge,
    if that is empty or missing, if there was no search, and so nothing that the box
    could be evidence of, or if the rollout is no learning signal.

    Args:
        question, rollouts: as in `answer_em`.
        judge: a model of another family; all evidence is sent to it in one call.
        normalize, decimals: as in `answer_f1`.
        indicator, scope: what counts as a search and as a box, as in `r_search_format`.
        empty_matches: as in `rsearch.text.normalize.f1`.

    Returns:
        [G] in [0, 1]; NaN where the call of the judge failed.
    """
    evidence = {}
    for position, rollout in enumerate(rollouts):
        boxes = _boxes(rollout, EVIDENCE_TAG, scope)
        has_searched = _has_searched(rollout, indicator, scope)
        if rollout.outcome.is_signal and has_searched and boxes and boxes[-1]:
            evidence[position] = boxes[-1]
    values = [0.0] * len(rollouts)
    if not evidence:
        return values
    chats = [evidence_messages(question.text, e) for e in evidence.values()]
    replies = judge(chats)
    assert len(replies) == len(chats), (len(replies), len(chats))
    for position, reply in zip(evidence, replies, strict=True):
        if reply is None:
            values[position] = math.nan
            continue
        value = text.f1(
            reply,
            question.golden_answers,
            normalize=normalize,
            empty_matches=empty_matches,
        )
        values[position] = rounded(value, decimals)
    return values


def r_search_format(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    evidence: float = 0.2,
    answer: float = 0.2,
    indicator: Literal["executed", "tags"] = "executed",
    unsearched_evidence_pays: bool = True,
    empty_gets_format: bool = False,
    forged_pays: bool = False,
    scope: Literal["policy", "transcript"] = "policy",
) -> list[float]:
    """Return [G] R-Search's format reward: equation 5, values of the public code.

    Exactly one answer box that is not empty earns `answer`. Exactly one evidence box
    that is not empty earns `evidence` if the policy searched; if it did not, any answer
    earns it.

    Args:
        question, rollouts: as in `answer_em`.
        evidence: gamma_e.
        answer: gamma_a.
        indicator: what counts as a search. "executed": a search that the engine ran.
            "tags", as in the public code: any observation in the scope.
        unsearched_evidence_pays: False, as in the public code, pays `evidence` without
            a search only if there is no evidence box.
        empty_gets_format: whether to pay `evidence` to a rollout without search even if
            it never answered; the public code does, so that an empty reply earns it.
        forged_pays: False pays nothing to a policy that writes an observation itself,
            whatever else is right; the public code takes it for one of the engine's.
        scope: where boxes are read. "policy": the policy's own turns. "transcript", as
            in the public code: the whole text, in which the first box of each kind is
            the prompt's; retrieved boxes count, and the answer "and" earns nothing,
            because it is the text between the prompt's own tags.
    """
    values = []
    for rollout in rollouts:
        tags = f"<{OBSERVATION}>", f"</{OBSERVATION}>"
        is_forged = any(tag in turn for turn in rollout.policy_texts for tag in tags)
        if is_forged and not forged_pays:
            values.append(0.0)
            continue
        answers = _boxes(rollout, "answer", scope)
        evidence_boxes = _boxes(rollout, EVIDENCE_TAG, scope)
        if _has_searched(rollout, indicator, scope):
            pays_evidence = len(evidence_boxes) == 1 and bool(evidence_boxes[0])
        else:
            has_answered = bool(answers) or empty_gets_format
            pays_evidence = has_answered and (
                unsearched_evidence_pays or not evidence_boxes
            )
        unpaid_answers = ("",) if scope == "policy" else ("", PROMPT_WORD)
        pays_answer = len(answers) == 1 and answers[0] not in unpaid_answers
        values.append(evidence * pays_evidence + answer * pays_answer)
    return values


def _boxes(rollout, tag, scope):
    if scope == "policy":
        return policy_boxes(rollout, tag)
    return first_close_texts(transcript(rollout), tag)[1:]  # the first is the prompt's


def _has_searched(rollout, indicator, scope):
    if indicator == "executed":
        return bool(rollout.searches)
    has_observation = bool(_boxes(rollout, OBSERVATION, scope))
    return has_observation or (scope == "policy" and bool(rollout.searches))

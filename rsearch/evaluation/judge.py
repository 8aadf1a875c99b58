"""Ask a model whether predicted answers are right, and how far it agrees with EM.

Only the first word of a judge's reply counts. A reply that does not begin with one of
the prompt's verdict words is no verdict: it scores 0, and such replies are counted.
Failed calls are counted as well, but have no score.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rsearch.llm.thoughts import answer_after_thoughts
from rsearch.protocols.judging import PROMPTS, judging_messages
from rsearch.types import GenerateFn

GOLDS = ("list", "any")
_MARKS = "*_`\"'“”‘’.!()[]"  # around a word, such as **True**.
_SEPARATORS = re.compile(r"[\s;:]|,(?!\d)")  # 0,5 is one word, which is no grade


class Prediction(NamedTuple):
    """An answer to judge; `answer` is None or blank if there is none."""

    question: str
    golden_answers: tuple[str, ...]
    answer: str | None


class Verdict(NamedTuple):
    """The score that a judge gives one prediction.

    Attributes:
        score: from 0 to 1; None if it depends on a call that failed.
        is_parsed: False if the score is 0 because a reply did not begin with one of the
            prompt's verdict words.
        replies: replies of the judge, one for each call; None for a call that failed.
    """

    score: float | None
    is_parsed: bool
    replies: tuple[str | None, ...]


def judge_answers(
    predictions: Sequence[Prediction],
    ask: GenerateFn,
    *,
    prompt: str,
    golds: str,
) -> list[Verdict]:
    """Return a verdict on each prediction.

    Args:
        predictions: predictions to judge. One whose answer is blank without its
            thoughts is wrong without a call, and equal ones are asked once.
        ask: the judge, which gets all chats in one call.
        prompt: key of `rsearch.protocols.judging.PROMPTS`.
        golds: "list" shows all golden answers in one chat; "any" asks about each of
            them and takes the best score.

    Raises:
        ValueError: the number of replies is not the number of chats.
    """
    assert golds in GOLDS, golds
    chats = [_chats(prediction, prompt, golds) for prediction in predictions]
    # Each chat is a single message, so its text identifies it.
    unique_chats = {
        chat[0]["content"]: chat
        for prediction_chats in chats
        for chat in prediction_chats
    }
    answers = ask(list(unique_chats.values())) if unique_chats else []
    if len(answers) != len(unique_chats):
        raise ValueError(
            f"the judge returned {len(answers)} replies to {len(unique_chats)} chats"
        )
    replies = dict(zip(unique_chats, answers, strict=True))
    return [
        _verdict([replies[chat[0]["content"]] for chat in prediction_chats], prompt)
        for prediction_chats in chats
    ]


def _chats(prediction, prompt, golds):
    """Return the chats that a verdict needs; none for a blank answer."""
    question, golden, answer = prediction
    answer, _ = answer_after_thoughts(answer or "")
    if answer is None:
        return []
    answer_sets = [golden] if golds == "list" else [(gold,) for gold in golden]
    return [
        judging_messages(question, answers, answer.strip(), prompt=prompt)
        for answers in answer_sets
    ]


def _verdict(replies, prompt):
    """Return the verdict that follows from the replies, one for each call."""
    scores = [parse_reply(r, prompt=prompt) for r in replies if r is not None]
    best = max([s for s in scores if s is not None], default=0.0)
    if None in replies and best < 1:
        return Verdict(None, True, tuple(replies))
    is_parsed = best > 0 or None not in scores
    return Verdict(best, is_parsed, tuple(replies))


def parse_reply(reply: str, *, prompt: str) -> float | None:
    """Return the score that a reply's first word stands for; None for other words.

    Thoughts are removed first; a thought without an end leaves nothing of a reply.

    Args:
        prompt: key of `rsearch.protocols.judging.PROMPTS` that it was asked with.
    """
    answer, _ = answer_after_thoughts(reply)
    word = _SEPARATORS.split((answer or "").strip(), maxsplit=1)[0]
    return PROMPTS[prompt].scores.get(word.strip(_MARKS).lower())


def summarize_verdicts(
    verdicts: Sequence[Verdict], exact: Sequence[float], searches: Sequence[int]
) -> dict:
    """Return what a row of results records about a judge.

    Args:
        verdicts: [n] verdicts of the judge.
        exact: [n] exact match of the same predictions, 0 or 1.
        searches: [n] number of turns of each that searched.

    Returns:
        `judge` is the mean score, in which an unparsed reply counts as 0 and a failed
        call does not count. `judge_agreement` is the share of parsed verdicts that
        equal exact match. Both are None without any. `judge_unparsed` counts unparsed
        replies, and `judge_failed` predictions without a score. `judge_right_em_wrong`
        and `judge_wrong_em_right` count verdicts of 1 and 0 that contradict exact
        match; the second should be about 0. `judge_right_steps` is the mean number of
        steps of predictions with a score of 1, None without any. Each search is a step,
        and so is the answer (ReaRAG's Figure 3, arXiv 2503.21729).
    """
    pairs = [
        (v, em) for v, em in zip(verdicts, exact, strict=True) if v.score is not None
    ]
    score_pairs = [(v.score, em) for v, em in pairs if v.is_parsed]
    steps = [1 + n for v, n in zip(verdicts, searches, strict=True) if v.score == 1]
    return {
        "judge": float(np.mean([v.score for v, _ in pairs])) if pairs else None,
        "judge_agreement": float(np.mean([s == e for s, e in score_pairs]))
        if score_pairs
        else None,
        "judge_unparsed": len(pairs) - len(score_pairs),
        "judge_failed": len(verdicts) - len(pairs),
        "judge_right_em_wrong": sum(s == 1 and em == 0 for s, em in score_pairs),
        "judge_wrong_em_right": sum(s == 0 and em == 1 for s, em in score_pairs),
        "judge_right_steps": float(np.mean(steps)) if steps else None,
    }

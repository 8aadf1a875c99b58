"""Ask a model whether predicted answers are right, and say how far it agrees with EM.

A judge's reply counts by its first word alone. What is no such word is no verdict: it
scores 0 and is counted, and so is a call that has failed, which has no score.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rsearch.llm.thoughts import answer_after_thoughts
from rsearch.protocols.judging import PROMPTS, judging_messages
from rsearch.types import GenerateFn

GOLDS = ("list", "any")
_MARKS = "*_`\"'“”‘’.!()[]"  # around a word, as in **True**.
_BETWEEN = re.compile(r"[\s,;:]+")


class Prediction(NamedTuple):
    """An answer to be judged; `answer` is None or blank where there is none."""

    question: str
    golden_answers: tuple[str, ...]
    answer: str | None


class Verdict(NamedTuple):
    """The score that a judge gives one prediction.

    Attributes:
        score: from 0 to 1; None where a call has failed, and the score hangs on it.
        is_parsed: False where the score is 0 because a reply was none of the prompt's
            words.
        replies: of the judge, one a call; None for a call that has failed.
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
        predictions: a blank one is wrong without a call, and equal ones are asked once.
        ask: the judge; one call has all chats.
        prompt: a key of `rsearch.protocols.judging.PROMPTS`.
        golds: "list" shows all golden answers at once; "any" asks for each of them and
            takes the best score.

    Raises:
        ValueError: the judge has returned another number of replies.
    """
    assert golds in GOLDS, golds
    chats = [_chats(prediction, prompt, golds) for prediction in predictions]
    # A chat is one message here: its text stands for it.
    unique = {chat[0]["content"]: chat for several in chats for chat in several}
    answers = ask(list(unique.values())) if unique else []
    if len(answers) != len(unique):
        raise ValueError(
            f"the judge returned {len(answers)} replies to {len(unique)} chats"
        )
    replies = dict(zip(unique, answers, strict=True))
    return [
        _verdict([replies[chat[0]["content"]] for chat in several], prompt)
        for several in chats
    ]


def _chats(prediction, prompt, golds):
    """Return the chats that a verdict takes; none for a blank answer."""
    question, golden, answer = prediction
    if not (answer or "").strip():
        return []
    shown = [golden] if golds == "list" else [(gold,) for gold in golden]
    return [
        judging_messages(question, answers, answer.strip(), prompt=prompt)
        for answers in shown
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
    """Return the score that a reply's first word means; None for any other word.

    Thoughts are no part of a reply, and a thought without an end leaves nothing of it.

    Args:
        reply: of the judge.
        prompt: a key of `rsearch.protocols.judging.PROMPTS`, which it was asked.
    """
    answer, _ = answer_after_thoughts(reply)
    word = _BETWEEN.split((answer or "").strip(), maxsplit=1)[0]
    return PROMPTS[prompt].scores.get(word.strip(_MARKS).lower())


def summarize_verdicts(
    verdicts: Sequence[Verdict], exact: Sequence[float], searches: Sequence[int]
) -> dict:
    """Return what a row of results says of a judge.

    Args:
        verdicts: [n] of the judge.
        exact: [n] exact match of the same predictions, 0 or 1.
        searches: [n] turns of each that searched.

    Returns:
        `judge`, the mean score, where an unparsed reply counts as 0 and a failed call
        does not count, and `judge_agreement`, the share of parsed verdicts that equal
        exact match, both None without any; counts of unparsed replies
        (`judge_unparsed`), of predictions without a score (`judge_failed`), and of
        verdicts of 1 and 0 against exact match: `judge_right_em_wrong` and
        `judge_wrong_em_right`, which should be about 0; and `judge_right_steps`, the
        mean steps of those with a score of 1, None without any. A search is a step, and
        so is the answer (ReaRAG's Figure 3, arXiv 2503.21729).
    """
    pairs = [
        (v, em) for v, em in zip(verdicts, exact, strict=True) if v.score is not None
    ]
    parsed = [(v.score, em) for v, em in pairs if v.is_parsed]
    steps = [1 + n for v, n in zip(verdicts, searches, strict=True) if v.score == 1]
    return {
        "judge": float(np.mean([v.score for v, _ in pairs])) if pairs else None,
        "judge_agreement": float(np.mean([s == e for s, e in parsed]))
        if parsed
        else None,
        "judge_unparsed": len(pairs) - len(parsed),
        "judge_failed": len(verdicts) - len(pairs),
        "judge_right_em_wrong": sum(s == 1 and em == 0 for s, em in parsed),
        "judge_wrong_em_right": sum(s == 0 and em == 1 for s, em in parsed),
        "judge_right_steps": float(np.mean(steps)) if steps else None,
    }

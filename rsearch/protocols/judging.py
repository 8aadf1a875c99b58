"""The prompts that ask a model whether a predicted answer is right."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rsearch.types import Messages


class JudgePrompt(NamedTuple):
    """An instruction to a judge, and the scores that its replies stand for.

    Attributes:
        instruction: text before the question, the golden answer and the prediction.
        scores: {first word of a reply, in lower case: score from 0 to 1}.
    """

    instruction: str
    scores: Mapping[str, float]


PROMPTS = {
    # As printed by R1-Searcher (section 3.1) and R1-Searcher++ (appendix).
    "r1_searcher": JudgePrompt(
        "Given a Question and its Golden Answer, verify whether the Predicted Answer "
        "is correct. The prediction is correct if it fully aligns with the meaning and "
        "key information of the Golden Answer. Respond with True if the prediction is "
        "correct and False otherwise.",
        MappingProxyType({"true": 1.0, "false": 0.0}),
    ),
    # ReaRAG's judge has these three grades; its prompt is not published, so the
    # wording is ours.
    "graded": JudgePrompt(
        "Given a Question and its Golden Answer, grade the Predicted Answer. Respond "
        "with 1 if it fully aligns with the meaning and key information of the Golden "
        "Answer, with 0.5 if it is correct in part, and with 0 otherwise. Respond with "
        "the number alone.",
        MappingProxyType({"1": 1.0, "1.0": 1.0, "0.5": 0.5, "0": 0.0, "0.0": 0.0}),
    ),
}


def judging_messages(
    question: str, golden_answers: Sequence[str], prediction: str, *, prompt: str
) -> Messages:
    """Return the chat that asks a judge about one predicted answer.

    Args:
        question: question that was asked.
        golden_answers: answers, each of which is right; several are joined by "or".
        prediction: answer to judge.
        prompt: a key of PROMPTS.
    """
    content = (
        f"{PROMPTS[prompt].instruction}\n\nQuestion: {question}\n\n"
        f"Golden Answer: {' or '.join(golden_answers)}\n\n"
        f"Predicted Answer: {prediction}"
    )
    return [{"role": "user", "content": content}]

"""Let a model ask itself: Self-Ask (Press et al., arXiv 2210.03350)."""

import re

from rsearch.llm.requests import Generate, Search
from rsearch.methods.base import Kit, ask_chat, few_shot
from rsearch.methods.reading import rag_messages
from rsearch.types import Question

INTERMEDIATE, FINAL = "\nIntermediate answer:", "\nSo the final answer is:"
STOP = ("Intermediate answer:", "\nQuestion:")
STEP = re.compile(
    r"follow up:[ \t]*(?P<query>\S.*)|so the final answer is:(?P<answer>.*)",
    re.IGNORECASE,
)


def self_ask(
    question: Question,
    kit: Kit,
    *,
    rounds: int = 5,
    forces_answer: bool = True,
    top_k: int = 0,
):
    """Search with the follow-up questions that the model asks before it answers.

    A raw-text prompt with 4 examples of ours, as many as the paper has. The passages of
    a follow-up are read by `rag`'s reader, whose answer is put where the model expects
    it; without any the model goes on by itself. Of several follow-ups in one reply the
    first counts. FlashRAG's port is Ret-Robust's, with passages of the question first.

    Args:
        question: that is answered.
        kit: of the evaluation.
        rounds: follow-ups, at most.
        forces_answer: whether a model that ends without an answer is made to give one,
            as by the authors; otherwise there is none.
        top_k: passages of each search that are read; 0 is all that it returns.
    """
    opening = f"Question: {question.text}\nAre follow up questions needed here:"
    prompt = f"{few_shot('self_ask')}\n\n{opening}"
    for searches in range(rounds + 1):
        completion = yield Generate(prompt, kit.thought_tokens, STOP)
        step = STEP.search(completion.text)
        if step is not None and step["answer"] is not None:
            return _stripped(step["answer"])
        if step is None or searches == rounds:
            prompt += completion.text.rstrip()
            break
        query = step["query"].strip()
        (passages,) = yield Search((query,), top_k or None)
        messages = rag_messages(kit, query, passages)
        answer = yield from ask_chat(messages, kit.answer_tokens)
        prompt += completion.text[: step.end()] + INTERMEDIATE
        if answer:
            prompt += f" {' '.join(answer.split()).removesuffix('.')}."
    if not forces_answer:
        return None
    completion = yield Generate(prompt + FINAL, kit.answer_tokens, ("\n",))
    return _stripped(completion.text) or None


def _stripped(answer: str) -> str:
    return answer.strip().removesuffix(".")

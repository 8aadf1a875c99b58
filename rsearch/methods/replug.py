"""REPLUG: mix a model's predictions from prompts with one passage each.

Shi et al., arXiv 2301.12652; the retriever is not tuned (their second method, LSR).
FlashRAG's port averages logits with weights score / sum(score), which may be negative,
and so chooses different tokens.
"""

from collections.abc import Sequence

import numpy as np

from rsearch.llm.requests import Mix, Search
from rsearch.methods.base import Kit, answer_of, check_settings
from rsearch.methods.reading import rag_messages
from rsearch.types import Passage, Question

# Needs of an endpoint what a mixture of prompts with passages needs.
PROBE = Mix(([{"role": "user", "content": "Hello"}],), (1.0,), 1)


def replug(question: Question, kit: Kit, *, temperature: float = 1.0, top_k: int = 0):
    """Continue one prompt for each passage with the tokens likeliest under all of them.

    The probability of a token is its mean over the prompts, weighted by the passages'
    scores. With one passage this is `rag`.

    Args:
        temperature: temperature of the softmax over a search's scores. Scores of a
            dense retriever differ little, so at 1 its passages weigh almost the same.
        top_k: number of passages to read; 0 reads all that the search returns.

    Raises:
        ValueError: a passage has no score, or the temperature is too low.
    """
    (passages,) = yield Search((question.text,), top_k or None)
    weights = mixture_weights(passages, temperature)
    # A weight may underflow to 0 if other scores are far higher.
    weighted_passages = [
        (p, w) for p, w in zip(passages, weights, strict=True) if w > 0
    ]
    prompts = [rag_messages(kit, question.text, (p,)) for p, _ in weighted_passages]
    completion = yield Mix(
        tuple(prompts) or (rag_messages(kit, question.text, ()),),
        tuple(w for _, w in weighted_passages) or (1.0,),
        kit.answer_tokens,
    )
    return answer_of(completion)


def mixture_weights(passages: Sequence[Passage], temperature: float) -> list[float]:
    """Return the softmax of the passages' scores, each divided by a temperature.

    Raises:
        ValueError: a passage has no score, or the temperature is too low.
    """
    is_in_range = temperature >= 1e-6  # a score divided by less may overflow
    check_settings("replug", ("temperature", temperature, is_in_range, "1e-6 or above"))
    for passage in passages:
        if passage.score is None:
            raise ValueError(
                "config.eval.methods names 'replug', which weighs passages by their "
                f"scores, but the search has no score for passage {passage.id!r}"
            )
    if not passages:
        return []
    logits = np.array([p.score for p in passages], np.float64) / temperature
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()).tolist()

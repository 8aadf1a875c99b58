"""FLARE: search with the next sentence if the model is unsure of it.

Jiang et al., arXiv 2305.06983, with 4 examples of ours in place of their 8. FlashRAG's
port makes no first search, uses thresholds of 0.2, and asks for the bare answer, so it
rarely searches.
"""

from collections.abc import Sequence

import numpy as np

from rsearch.llm.requests import STOPPED, Generate, Search
from rsearch.methods.base import (
    AT_LIMIT,
    Kit,
    Note,
    check_settings,
    few_shot,
    text_of,
)
from rsearch.methods.reading import MARK_PATTERN, marked_answer, shown_passages
from rsearch.text.sentences import has_first_sentence, sentences
from rsearch.types import Question

# Needs of an endpoint what a draft needs.
PROBE = Generate("Question:", 1, wants_logp=True)


def flare(
    question: Question,
    kit: Kit,
    *,
    theta: float = 0.8,
    beta: float = 0.4,
    always: bool = False,
    draft_tokens: int = 64,
    max_tokens: int = 256,
    top_k: int = 0,
):
    """Draft each sentence; if it is doubtful, search with it and redraft it.

    It notes the least probability of a token of each draft, and whether it searched
    with the draft.

    Args:
        theta: a sentence is doubtful if any token has at most this probability; 0 makes
            none doubtful.
        beta: tokens with at most this probability are left out of the query.
        always: whether every sentence is doubtful.
        draft_tokens: token budget of a draft.
        max_tokens: token budget of all sentences; none is begun once it is used up.
        top_k: number of passages to show from each search; 0 shows all.

    Raises:
        ValueError: a token budget is 0, and so there are no answers.
    """
    check_settings(
        "flare",
        ("draft_tokens", draft_tokens, draft_tokens >= 1, "at least 1"),
        ("max_tokens", max_tokens, max_tokens >= 1, "at least 1"),
    )
    (passages,) = yield Search((question.text,), top_k or None)
    chain, num_tokens = "", 0
    while num_tokens < max_tokens:

        def draft(passages=passages, chain=chain):
            context = shown_passages(kit, passages)
            end = f"Question: {question.text}\nAnswer:{chain}"
            prompt = "\n\n".join(filter(None, [few_shot("flare"), context, end]))
            return Generate(
                prompt,
                draft_tokens,
                stop=("\n",),
                wants_logp=True,
                is_enough=has_first_sentence,
            )

        completion = yield draft()
        tokens = first_sentence(completion.tokens)
        probs = np.exp(completion.logp[: len(tokens)])
        is_doubtful = bool(tokens) and (always or not (probs > theta).all())
        if tokens:
            yield Note("sentence_least_prob", probs.min())
            yield Note("sentence_searched", is_doubtful)
        if is_doubtful:
            query = masked_query(tokens, probs, beta) or question.text
            (passages,) = yield Search((query,), top_k or None)
            completion = yield draft(passages)
            tokens = first_sentence(completion.tokens)
        sentence = "".join(tokens).strip()
        if not sentence:
            break
        chain += f" {sentence}"
        num_tokens += len(tokens)
        is_last = len(tokens) == len(completion.tokens) and completion.end == STOPPED
        if is_last or MARK_PATTERN.search(text_of(completion, chain)):
            break
    else:
        yield AT_LIMIT
    return marked_answer(text_of(completion, chain))


def masked_query(tokens: Sequence[str], probs: Sequence[float], beta: float) -> str:
    """Return a sentence with spaces for unlikely tokens; "" if no other is left.

    Args:
        tokens: [n] pieces of the sentence.
        probs: [n] probability of each token.
        beta: probability that a token must exceed.
    """
    words = (t if p > beta else " " for t, p in zip(tokens, probs, strict=True))
    return "".join(words).strip()


def first_sentence(tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of the first sentence of a text."""
    first = next(iter(sentences("".join(tokens))), "")
    # `sentences` changes white space, so only other characters are counted.
    size, end = len("".join(first.split())), 0
    while size > 0:
        size -= len("".join(tokens[end].split()))
        end += 1
    return tuple(tokens[:end])

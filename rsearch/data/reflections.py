"""Make Self-RAG's demonstrations (arXiv 2310.11511) from answers and gold passages."""

from collections.abc import Sequence

from rsearch.data.demonstrations import RAW, Demonstration
from rsearch.protocols.self_rag import (
    FULL,
    IRRELEVANT,
    NO_RETRIEVAL,
    NO_SUPPORT,
    PARTIAL,
    RELEVANT,
    RETRIEVAL,
    UTILITY,
    opening,
    opening_with_passage,
    opening_without_search,
)
from rsearch.text.normalize import cover_exact_match, exact_match, f1
from rsearch.types import Question

ANSWER = "answer without a search"  # a kind of demonstrations


def reflections(
    question: Question,
    direct: str | None,
    rag: str | None,
    passages: Sequence[tuple[str, bool]],
    *,
    normalize: str,
) -> list[tuple[str, Demonstration]]:
    """Return (kind, demonstration) pairs of what a model should say about a question.

    The model should search iff `direct` is wrong and `rag` is right. A gold passage is
    relevant and followed by the answer `rag`; any other passage is irrelevant and
    followed by `direct`. A gold passage supports an answer fully if it contains it, and
    partially if it contains a word of it. The utility is 5 if the answer is an exact
    match, else 1. Only the model's words are learnt: passages are part of the prompt.

    Args:
        direct, rag: the model's answers without and with passages; None if missing.
        passages: (contents, whether it is gold) of the passages that a search finds.
        normalize: a key of NORMALIZERS.
    """

    def is_right(answer: str | None) -> bool:
        golden = question.golden_answers
        return exact_match(answer, golden, normalize=normalize) > 0

    def utility(answer: str) -> str:
        return list(UTILITY)[-1 if is_right(answer) else 0]

    def demonstration(texts: Sequence[str], reply: str) -> Demonstration:
        chat = ({"role": "user", "content": "".join(texts)},)
        return Demonstration(question, (reply,), method=RAW, messages=chat)

    should_search = not is_right(direct) and is_right(rag)
    token = RETRIEVAL if should_search else NO_RETRIEVAL
    pairs = [(token, demonstration([opening(question.text)], token))]
    if direct:
        reply = f"{direct}{utility(direct)}"
        prompt = opening_without_search(question.text)
        pairs.append((ANSWER, demonstration(prompt, reply)))
    for contents, is_gold in passages:
        token, answer = (RELEVANT, rag) if is_gold else (IRRELEVANT, direct)
        if not answer:
            continue
        support = support_of(answer, contents, normalize=normalize) if is_gold else ""
        reply = f"{token}{answer}{support}{utility(answer)}"
        prompt = opening_with_passage(question.text, contents)
        pairs.append((token, demonstration(prompt, reply)))
    return pairs


def support_of(answer: str, contents: str, *, normalize: str) -> str:
    """Return the token that says how well a passage supports an answer.

    Args:
        answer: the model's answer.
        contents: the passage's contents.
        normalize: a key of NORMALIZERS.
    """
    is_contained = cover_exact_match(
        contents, (answer,), normalize=normalize, order="contiguous"
    )
    if is_contained:
        return FULL
    score = f1(contents, (answer,), normalize=normalize)
    return PARTIAL if score else NO_SUPPORT

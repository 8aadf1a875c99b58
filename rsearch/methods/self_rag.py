"""Self-RAG: a model that says whether to search, and grades passages and its answers.

Asai et al., arXiv 2310.11511, after the short-form variant of the authors' code. It
needs a model trained on their reflection tokens: selfrag/selfrag_llama2_7b, whose
vocabulary has them as control tokens, or a model that was trained here to spell them,
on the demonstrations of the data stage's method `self_rag`:

    python -m rsearch.evaluate --workdir=RUN --methods=self_rag:spelled=true
"""

from collections.abc import Collection, Sequence

import numpy as np

from rsearch.llm.requests import Generate, Score, Search, TextWithMarkers
from rsearch.methods.base import Kit, check_settings, text_of
from rsearch.protocols.self_rag import (
    GRADES,
    NO_RETRIEVAL,
    RELEVANCE,
    RETRIEVAL,
    TOKENS,
    answer_text,
    opening,
    opening_with_passage,
    opening_without_search,
)
from rsearch.types import Question


def self_rag(
    question: Question,
    kit: Kit,
    *,
    threshold: float = 0.2,
    w_rel: float = 1.0,
    w_sup: float = 1.0,
    w_use: float = 1.0,
    max_tokens: int = 100,
    top_k: int = 0,
    spelled: bool = False,
):
    """Answer after each passage, if the model asks for any; return the best answer.

    Args:
        threshold: search if P([Retrieval]) is more than this share of its sum with
            P([No Retrieval]): never at 1, always below 0.
        w_rel, w_sup, w_use: weights of relevance, support and utility in the score of
            an answer, to which the mean likelihood of its tokens is added.
        max_tokens: token budget of an answer with its reflection tokens.
        top_k: number of passages to read; 0 reads all that the search returns.
        spelled: whether the model was trained to spell reflection tokens. Then their
            text is scored, whatever tokens the tokenizer has.

    Raises:
        ValueError: the token budget is 0, and so there are no answers.
    """
    has_budget = max_tokens >= 1
    check_settings("self_rag", ("max_tokens", max_tokens, has_budget, "at least 1"))

    def prompt(*texts: str) -> TextWithMarkers | str:
        return "".join(texts) if spelled else TextWithMarkers(texts)

    def score(texts: tuple[str, ...], answer_start: str, token: str) -> Score:
        if spelled:
            return Score(TextWithMarkers(("".join(texts), "", answer_start)), token)
        return Score(
            TextWithMarkers((*texts[:-1], texts[-1] + answer_start)),
            token,
            is_mark=True,
        )

    start = opening(question.text), ""
    probes = yield [score(start, "", token) for token in (RETRIEVAL, NO_RETRIEVAL)]
    passages = ()
    if shares([probe.logp.sum() for probe in probes])[0] > threshold:
        (passages,) = yield Search((question.text,), top_k or None)
    if not passages:
        bare_prompt = prompt(*opening_without_search(question.text))
        return answer_text(text_of((yield Generate(bare_prompt, max_tokens))))
    fronts = [
        opening_with_passage(question.text, kit.shorten(p.contents)) for p in passages
    ]
    completions = yield [
        Generate(prompt(*front), max_tokens, wants_logp=True) for front in fronts
    ]
    # The text before each grade; None if an answer lacks that grade.
    grade_prefixes = [
        [text_before(c.text, grade) for grade in GRADES] for c in completions
    ]
    grade_scores = yield [
        score(front, text, token)
        for front, texts in zip(fronts, grade_prefixes)
        for text, grade in zip(texts, GRADES)
        if text is not None
        for token in grade
    ]
    logps = iter([s.logp.sum() for s in grade_scores])
    scores = [
        answer_score(
            completion.logp,
            [
                None if text is None else [next(logps) for _ in grade]
                for text, grade in zip(texts, GRADES)
            ],
            (w_rel, w_sup, w_use),
        )
        for completion, texts in zip(completions, grade_prefixes)
    ]
    return answer_text(text_of(completions[int(np.argmax(scores))]))


def shares(logps: Sequence[float]) -> np.ndarray:
    """Return [n] probabilities divided by their sum.

    Args:
        logps: [n] logarithms of the probabilities.
    """
    probs = np.exp(np.asarray(logps, np.float64) - np.max(logps))
    return probs / probs.sum()


def text_before(text: str, grade: Collection[str]) -> str | None:
    """Return the text of an answer before its grade; None if it has no such grade.

    Relevance grades the passage, so no text comes before it.
    """
    if grade is RELEVANCE:
        return ""
    starts = [at for token in grade if (at := text.find(token)) >= 0]
    return text[: min(starts)] if starts else None


def answer_score(
    logp: np.ndarray,
    grades: Sequence[Sequence[float] | None],
    weights: Sequence[float],
) -> float:
    """Return the score of an answer after a passage; missing parts add nothing.

    Args:
        logp: [n] log-probability of each of the answer's tokens.
        grades: for each of GRADES, the log-probabilities of its tokens, or None.
        weights: weight of each grade.
    """
    score = float(np.exp(np.mean(logp))) if len(logp) else 0.0
    for weight, logps, grade in zip(weights, grades, GRADES, strict=True):
        if logps is not None:
            score += weight * float(shares(logps) @ list(grade.values()))
    return score


def check_tokens(control_tokens: Collection[str]) -> None:
    """Refuse a tokenizer without reflection tokens.

    Raises:
        ValueError: a reflection token is missing; names the first.
    """
    for token in TOKENS:
        if token not in control_tokens:
            raise ValueError(
                f"config.eval.methods names 'self_rag', but the tokenizer has no token "
                f"{token!r}: expected a model trained on reflection tokens, such as "
                "selfrag/selfrag_llama2_7b, or 'self_rag:spelled=true' for one trained "
                "here to spell them"
            )

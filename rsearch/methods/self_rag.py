"""Self-RAG: a model that says whether to search, and grades passages and its answers.

Asai et al., arXiv 2310.11511, the short form of its authors' code. It wants a model
that has learnt their reflection tokens, as selfrag/selfrag_llama2_7b has: control
tokens of its vocabulary.
"""

import re
from collections.abc import Collection, Sequence

import numpy as np

from rsearch.llm.requests import Generate, Marked, Score, Search
from rsearch.methods.base import Kit
from rsearch.types import Question

RETRIEVAL, NO_RETRIEVAL = "[Retrieval]", "[No Retrieval]"
PARAGRAPH, END_OF_PARAGRAPH = "<paragraph>", "</paragraph>"
# The tokens that grade a passage and an answer, each with its value.
RELEVANCE = {"[Relevant]": 1.0, "[Irrelevant]": 0.0}
SUPPORT = {
    "[Fully supported]": 1.0,
    "[Partially supported]": 0.5,
    "[No support / Contradictory]": 0.0,
}
UTILITY = {f"[Utility:{i}]": (i - 3) / 2 for i in range(1, 6)}
GRADES = (RELEVANCE, SUPPORT, UTILITY)
TOKENS = (RETRIEVAL, NO_RETRIEVAL, PARAGRAPH, END_OF_PARAGRAPH)
TOKENS += tuple(token for grade in GRADES for token in grade)
# What is no part of an answer.
REFLECTION = re.compile(
    "|".join(map(re.escape, (*TOKENS, "[Continue to Use Evidence]")))
)


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
):
    """Answer behind each passage, if the model wants any, and return the best answer.

    Args:
        question: that is answered.
        kit: of the evaluation.
        threshold: it searches where P([Retrieval]) is more than this share of its sum
            with P([No Retrieval]); at 1 never, below 0 always.
        w_rel, w_sup, w_use: what relevance, support and utility count in the score of
            an answer, beside the mean likelihood of its tokens.
        max_tokens: of an answer with its reflection tokens.
        top_k: passages that are read; 0 is all that the search returns.
    """
    prompt = f"### Instruction:\n{question.text}\n\n### Response:\n"
    probes = yield [Score(prompt, t, is_mark=True) for t in (RETRIEVAL, NO_RETRIEVAL)]
    passages = ()
    if shares([probe.logp.sum() for probe in probes])[0] > threshold:
        (passages,) = yield Search((question.text,), top_k or None)
    if not passages:
        completion = yield Generate(Marked((prompt, NO_RETRIEVAL)), max_tokens)
        return answer_text(completion.text)
    opening = prompt, RETRIEVAL + PARAGRAPH
    fronts = [(*opening, kit.shorten(p.contents)) for p in passages]
    completions = yield [
        Generate(Marked((*front, END_OF_PARAGRAPH)), max_tokens, wants_logp=True)
        for front in fronts
    ]
    # The text that each grade stands behind; None where an answer lacks that grade.
    befores = [[text_before(c.text, grade) for grade in GRADES] for c in completions]
    scored = yield [
        Score(Marked((*front, END_OF_PARAGRAPH + text)), token, is_mark=True)
        for front, texts in zip(fronts, befores)
        for text, grade in zip(texts, GRADES)
        if text is not None
        for token in grade
    ]
    logps = iter([s.logp.sum() for s in scored])
    scores = [
        answer_score(
            completion.logp,
            [
                None if text is None else [next(logps) for _ in grade]
                for text, grade in zip(texts, GRADES)
            ],
            (w_rel, w_sup, w_use),
        )
        for completion, texts in zip(completions, befores)
    ]
    return answer_text(completions[int(np.argmax(scores))].text)


def shares(logps: Sequence[float]) -> np.ndarray:
    """Return [n] probabilities divided by their sum.

    Args:
        logps: [n] their logarithms.
    """
    probs = np.exp(np.asarray(logps, np.float64) - np.max(logps))
    return probs / probs.sum()


def text_before(text: str, grade: Collection[str]) -> str | None:
    """Return what an answer says before it gives a grade; None where it gives none.

    Relevance is that of the passage: it stands before all else.

    Args:
        text: of the answer.
        grade: one of GRADES.
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
    """Return the score of an answer behind a passage; what is missing counts nothing.

    Args:
        logp: [n] log-probability of each of its tokens.
        grades: of each of GRADES the log-probabilities of its tokens, None without.
        weights: of each.
    """
    score = float(np.exp(np.mean(logp))) if len(logp) else 0.0
    for weight, logps, grade in zip(weights, grades, GRADES, strict=True):
        if logps is not None:
            score += weight * float(shares(logps) @ list(grade.values()))
    return score


def answer_text(text: str) -> str | None:
    """Return an answer without its reflection tokens; None where nothing remains."""
    return " ".join(REFLECTION.sub(" ", text).split()) or None


def check_tokens(control_tokens: Collection[str]) -> None:
    """Refuse a tokenizer without reflection tokens.

    Args:
        control_tokens: the spellings of those that it has.

    Raises:
        ValueError: names the first that is missing.
    """
    for token in TOKENS:
        if token not in control_tokens:
            raise ValueError(
                f"config.eval.methods names 'self_rag', but the tokenizer has no token "
                f"{token!r}: expected a model that has learnt reflection tokens, such "
                "as selfrag/selfrag_llama2_7b"
            )

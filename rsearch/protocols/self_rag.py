"""Self-RAG's text format: its prompt, and the tokens by which a model reflects.

Asai et al., arXiv 2310.11511. In a published model each of them is a control token; a
model that is tuned here spells them out.
"""

import re

RETRIEVAL, NO_RETRIEVAL = "[Retrieval]", "[No Retrieval]"
PARAGRAPH, END_OF_PARAGRAPH = "<paragraph>", "</paragraph>"
RELEVANT, IRRELEVANT = "[Relevant]", "[Irrelevant]"
FULL, PARTIAL = "[Fully supported]", "[Partially supported]"
NO_SUPPORT = "[No support / Contradictory]"
# The tokens that grade a passage and an answer, each with its value.
RELEVANCE = {RELEVANT: 1.0, IRRELEVANT: 0.0}
SUPPORT = {FULL: 1.0, PARTIAL: 0.5, NO_SUPPORT: 0.0}
UTILITY = {f"[Utility:{i}]": (i - 3) / 2 for i in range(1, 6)}
GRADES = (RELEVANCE, SUPPORT, UTILITY)
TOKENS = (RETRIEVAL, NO_RETRIEVAL, PARAGRAPH, END_OF_PARAGRAPH)
TOKENS += tuple(token for grade in GRADES for token in grade)
# Reflection tokens are not part of an answer.
REFLECTION = re.compile(
    "|".join(map(re.escape, (*TOKENS, "[Continue to Use Evidence]")))
)


def opening(question: str) -> str:
    """Return the prompt before the model decides whether to search."""
    return f"### Instruction:\n{question}\n\n### Response:\n"


def opening_without_search(question: str) -> tuple[str, str]:
    """Return the prompt for an answer without a search: a text and a token."""
    return opening(question), NO_RETRIEVAL


def opening_with_passage(question: str, passage: str) -> tuple[str, str, str, str]:
    """Return the prompt for an answer after a passage: alternating texts and tokens.

    Args:
        question: question to answer.
        passage: the passage's title, a line feed and its text.
    """
    return opening(question), RETRIEVAL + PARAGRAPH, passage, END_OF_PARAGRAPH


def answer_text(text: str) -> str | None:
    """Return an answer without its reflection tokens; None if nothing remains."""
    return " ".join(REFLECTION.sub(" ", text).split()) or None

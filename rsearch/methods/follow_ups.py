"""Write demonstrations of Self-Ask's steps (Press et al., arXiv 2210.03350) from facts.

A model that does not follow worked examples can learn the steps of `self_ask` and
`rearter` from them.
"""

from collections.abc import Sequence

from rsearch.data.demonstrations import RAG, RAW, Demonstration
from rsearch.methods.self_ask import FINAL, INTERMEDIATE, first_chain
from rsearch.types import Question

FOLLOW_UP, ANSWER, READING = "follow-up", "final answer", "reading"  # kinds
Triple = tuple[str, str, str]  # subject, relation and object


def question_about(triple: Triple) -> str:
    """Return the question for the object of a fact."""
    subject, relation, _ = triple
    return f"What is the {relation} of {subject}?"


def follow_ups(
    question: Question, triples: Sequence[Triple]
) -> list[tuple[str, Demonstration]]:
    """Return (kind, demonstration) pairs: each step to the answer, and readings.

    The prompt of a step is that of `self_ask` after the steps before it. A reading is
    the answer of `rag` to a follow-up.

    Args:
        question: question with a golden answer; the first is learnt.
        triples: facts to ask for, in this order.
    """
    prompt, opening = first_chain(question.text).prompt, " Yes."
    pairs = []

    def step(kind: str, text: str) -> None:
        chat = ({"role": "user", "content": prompt},)
        pairs.append((kind, Demonstration(question, (text,), RAW, messages=chat)))

    for triple in triples:
        query, value = question_about(triple), triple[2]
        text = f"{opening}\nFollow up: {query}{INTERMEDIATE}"
        step(FOLLOW_UP, text)
        # As `self_ask` writes the answer of its reader.
        prompt, opening = f"{prompt}{text} {value.removesuffix('.')}.", ""
        # A search may have a corpus for each question's id.
        sub_question = Question(question.id, query, (value,))
        pairs.append((READING, Demonstration(sub_question, (value,), RAG)))
    # `self_ask` reads one line.
    step(ANSWER, f"{FINAL} {' '.join(question.golden_answers[0].split())}")
    return pairs

"""Self-RAG's training targets, labelled by golden answers and passages."""

import pytest

from rsearch.data.reflections import ANSWER, reflections, support_of
from rsearch.protocols.self_rag import (
    opening,
    opening_with_passage,
    opening_without_search,
)
from rsearch.types import Question

ASKED = Question("q", "Where?", ("Rome",))
GOLD, OTHER = ("Rome\nIt is Rome.", True), ("Paris\nRome is far.", False)


def made(direct, rag, *passages):
    """Return [(kind, prompt, text to learn)] for the question."""
    rows = reflections(ASKED, direct, rag, passages, normalize="squad")
    assert all(d.method == "raw" and d.question == ASKED for _, d in rows)
    return [(kind, d.messages[0]["content"], *d.turns) for kind, d in rows]


@pytest.mark.parametrize(
    ("direct", "rag", "token"),
    [
        ("Oslo", "the Rome!", "[Retrieval]"),
        (None, "Rome", "[Retrieval]"),
        ("Rome", "Rome", "[No Retrieval]"),
        ("Rome", "Oslo", "[No Retrieval]"),
        ("Oslo", "Oslo", "[No Retrieval]"),
        (None, None, "[No Retrieval]"),
    ],
)
def test_retrieval_is_learnt_if_only_rag_answers_right(direct, rag, token):
    first, *others = made(direct, rag)
    assert first == (token, opening("Where?"), token)
    utility = "[Utility:5]" if direct == "Rome" else "[Utility:1]"
    behind = "".join(opening_without_search("Where?"))
    assert others == ([(ANSWER, behind, f"{direct}{utility}")] if direct else [])


def test_gold_passages_are_relevant_and_others_are_not():
    _, _, gold, other = made("Oslo", "Rome", GOLD, OTHER)
    behind = [
        "".join(opening_with_passage("Where?", text)) for text, _ in (GOLD, OTHER)
    ]
    said = "[Relevant]Rome[Fully supported][Utility:5]"
    assert gold == ("[Relevant]", behind[0], said)
    # After an irrelevant passage, the model says what it says without a passage.
    assert other == ("[Irrelevant]", behind[1], "[Irrelevant]Oslo[Utility:1]")
    kinds = [kind for kind, *_ in made(None, "Rome", GOLD, OTHER)]
    assert kinds == ["[Retrieval]", "[Relevant]"]


@pytest.mark.parametrize(
    ("answer", "token"),
    [
        ("the river Po.", "[Fully supported]"),
        ("Po river", "[Partially supported]"),
        ("river Rhine", "[Partially supported]"),
        ("Rhine", "[No support / Contradictory]"),
        ("Pot", "[No support / Contradictory]"),
    ],
)
def test_support_depends_on_how_much_of_the_answer_a_passage_holds(answer, token):
    assert support_of(answer, "Turin\nOn the river Po.", normalize="squad") == token

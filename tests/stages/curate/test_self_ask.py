"""Questions for which Self-Ask's steps can be written, and those left out."""

import types

from rsearch.stages.curate.self_ask import gold_follow_ups
from rsearch.types import Passage, Question

TRIPLES = [["Rome", "country", " Italy "], ["Italy", "currency", "Euro"]]
QUESTIONS = [
    Question("a", "A?", ("Euro",), {"evidences": TRIPLES}),
    Question("b", "B?", ("Euro",), {}),
    Question("c", "C?", ("Euro",), {"evidences": TRIPLES[:1]}),  # its search fails
    Question("d", "D?", ("Lira",), {"evidences": [["Italy", "currency", "Lira"]]}),
    Question("e", "E?", ("Euro",), {"evidences": [["Rome", "country"], TRIPLES[1]]}),
    Question("world", "F?", ("Paris",), {}),
]
PASSAGES = {
    "What is the country of Rome?": (Passage("1", "Rome\nIt lies in Italy."),),
    "What is the currency of Italy?": (
        Passage("2", "Rome\nIt is old."),
        Passage("3", "Italy\nIt has the Euro."),
    ),
    "What is the capital of France?": (Passage("4", "France\nIts capital is Paris."),),
}


def test_questions_whose_facts_are_all_in_passages_are_selected():
    calls = []

    def passages_of(queries, ids):
        calls.append(list(zip(queries, ids, strict=True)))
        return [None if i == "c" else PASSAGES[q] for q, i in calls[-1]]

    hop = types.SimpleNamespace(subject="France", relation="capital", object="Paris")
    curate = types.SimpleNamespace(normalize="squad", order="contiguous")
    stage = types.SimpleNamespace(
        config=types.SimpleNamespace(curate=curate),
        questions=QUESTIONS,
        passages_of=passages_of,
        world=types.SimpleNamespace(hops={"world": [hop]}),
    )
    selection = gold_follow_ups(stage)
    assert [(d.name, d.is_kept) for d in selection.decisions] == [
        ("facts: 2", True),
        ("no gold facts", False),
        ("search failed", False),
        ("fact in no passage", False),
        ("facts: 1", True),
        ("facts: 1", True),
    ]
    country, currency, capital = PASSAGES
    pairs = [(currency, "d"), (currency, "e"), (capital, "world")]
    assert calls == [[(country, "a"), (currency, "a"), (country, "c"), *pairs]]
    ids = [d.question.id for _, d in selection.demonstrations]
    assert ids == [
        "a",
        "a/0",
        "a",
        "a/1",
        "a",
        *["e", "e/0", "e"],
        "world",
        "world/0",
        "world",
    ]


def test_no_question_with_facts_selects_nothing():
    stage = types.SimpleNamespace(
        config=types.SimpleNamespace(curate=None),
        questions=QUESTIONS[1:2],
        passages_of=lambda queries, ids: [None for _ in queries],
        world=None,
    )
    selection = gold_follow_ups(stage)
    assert [d.name for d in selection.decisions] == ["no gold facts"]
    assert not selection.demonstrations

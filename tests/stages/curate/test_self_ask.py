"""Questions for which Self-Ask's steps can be written, and those left out."""

import types

from rsearch.methods.follow_ups import ANSWER, FOLLOW_UP, READING
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.stages.curate.self_ask import gold_follow_ups
from rsearch.stages.curate.summary import draw_at_most
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


def stage(questions=QUESTIONS, passages_of=None, tokens=64):
    """Return a data stage over these questions."""
    hop = types.SimpleNamespace(subject="France", relation="capital", object="Paris")
    curate = types.SimpleNamespace(normalize="squad", order="contiguous")
    rollout = types.SimpleNamespace(max_observation_tokens=tokens)
    return types.SimpleNamespace(
        config=types.SimpleNamespace(curate=curate, rollout=rollout),
        questions=questions,
        passages_of=passages_of
        or (lambda queries, ids: [PASSAGES[q] for q in queries]),
        world=types.SimpleNamespace(hops={"world": [hop]}),
        tokenizer=train_tokenizer(["It is Rome. "] * 3, vocab_size=300),
    )


def test_questions_whose_facts_are_all_in_passages_are_selected():
    calls = []

    def passages_of(queries, ids):
        calls.append(list(zip(queries, ids, strict=True)))
        return [None if i == "c" else PASSAGES[q] for q, i in calls[-1]]

    selection = gold_follow_ups(stage(passages_of=passages_of))
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
    assert ids == [*["a"] * 5, *["e"] * 3, *["world"] * 3]


def test_readings_stay_with_the_question_that_they_were_made_from():
    questions = [QUESTIONS[0], QUESTIONS[4], QUESTIONS[5]]
    selection = gold_follow_ups(stage(questions))
    drawn = draw_at_most(selection, questions, 1, seed=0)
    num_facts = {"facts: 1": 1, "facts: 2": 2}
    (number,) = [num_facts[d.name] for d in drawn.decisions if d.is_kept]
    assert [kind for kind, _ in drawn.demonstrations] == [
        *[FOLLOW_UP, READING] * number,
        ANSWER,
    ]


def test_facts_beyond_the_budget_of_a_prompt_are_not_taught():
    selection = gold_follow_ups(stage(QUESTIONS[5:], tokens=20))
    assert [d.name for d in selection.decisions] == ["cut off"]
    assert not selection.demonstrations


def test_no_question_with_facts_selects_nothing():
    selection = gold_follow_ups(
        stage(QUESTIONS[1:2], lambda queries, ids: [None for _ in queries])
    )
    assert [d.name for d in selection.decisions] == ["no gold facts"]
    assert not selection.demonstrations

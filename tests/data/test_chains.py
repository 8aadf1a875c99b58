"""Chains of thoughts and actions: the filters, and the gold data behind them."""

import dataclasses
import json
import time

import pytest

from rsearch.data.chains import (
    THOUGHT,
    ablation_messages,
    chain,
    chain_fault,
    decomposition,
    gold_passages,
    split_chain,
)
from rsearch.data.curation import attempt_of
from rsearch.data.questions import load_questions
from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS
from rsearch.tools.search import search_call
from rsearch.types import Answer, Outcome, Passage, Question
from tests.rewards.play import PARIS, play

REARAG = PROTOCOLS["rearag"]
SEEN = Passage("written from p", "\nIts capital is Paris.")


def step(number, action, thought="I see."):
    return REARAG.write(Step(number, thought, action))


def found(*turns, passages=(SEEN,)):
    return attempt_of(REARAG, play(REARAG, turns, passages))


FIRST, LAST = step(1, search_call("capital")), step(2, Answer("It is Paris"))


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ((FIRST, LAST), ""),
        ((step(1, Answer("Paris")),), ""),  # F1 is 1, without a search
        ((FIRST, step(2, Answer("London"))), "no overlap"),
        ((FIRST, step(3, Answer("Paris"))), "numbering"),
        ((FIRST, FIRST, step(3, Answer("Paris"))), "numbering"),
        ((step(2, search_call("q")), step(3, Answer("Paris"))), "numbering"),
        ((FIRST, LAST.partition("\n")[2]), "numbering"),
        ((FIRST,), "unfinished"),
    ],
)
def test_a_chain_is_learnt_if_its_steps_are_in_order_and_its_answer_overlaps(
    turns, why
):
    assert chain_fault(REARAG, PARIS, found(*turns), normalize="squad") == why


def test_a_search_engine_failure_is_reported_as_a_tool_error():
    attempt = dataclasses.replace(found(FIRST), outcome=Outcome.TOOL_ERROR)
    assert chain_fault(REARAG, PARIS, attempt, normalize="squad") == "tool_error"


def test_a_step_without_an_observation_is_refused():
    attempt = dataclasses.replace(found(FIRST, LAST), observations=("", ""))
    assert chain_fault(REARAG, PARIS, attempt, normalize="squad") == "structure"


def test_a_chain_keeps_the_observations_it_was_shown():
    made = chain(REARAG, PARIS, found(FIRST, LAST))
    assert made.turns == (FIRST, LAST)
    assert made.observations == ("Its capital is Paris.",)
    assert made.context_turns == 0


GOLD = {
    "context": {
        "title": ["France", "Spain", "Paris"],
        "sentences": [["A land. ", "In Europe."], ["Madrid."], ["A city."]],
    },
    "supporting_facts": {"title": ["Paris", "France"], "sent_id": [0, 0]},
}


def test_gold_passages_are_the_supporting_ones_in_the_metadata():
    question = Question("q", "?", ("x",), GOLD)
    contents = [p.contents for p in gold_passages(question, (), {})]
    assert contents == ["France\nA land. In Europe.", "Paris\nA city."]


def test_gold_passages_of_nq_are_the_positive_passages_of_dpr(tmp_path):
    record = {"id": "nq_1", "question": "who?", "golden_answers": ["x"]}
    positive = {"title": "Paris", "text": " A city. ", "score": 1000}
    path = tmp_path / "nq.jsonl"
    path.write_text(json.dumps({**record, "positive_ctxs": [positive]}) + "\n")
    ((question,), _) = load_questions(path)
    (passage,) = gold_passages(question, (), {})
    assert passage.contents == "Paris\nA city."
    for bad, field in ((["x"], r"positive_ctxs\[0\]"), ("x", "positive_ctxs")):
        wrong = dataclasses.replace(question, metadata={"positive_ctxs": bad})
        with pytest.raises(ValueError, match=field):
            gold_passages(wrong, (), {})


def test_passages_of_2wikimultihopqa_have_their_sentences_under_content():
    context = {"title": ["Paris"], "content": [["A city."]]}
    question = Question("q", "?", ("x",), {**GOLD, "context": context})
    (passage,) = gold_passages(question, (), {})
    assert passage.contents == "Paris\nA city."


AS_PUBLISHED = {
    "context": [
        ["France", ["A land. ", " In Europe."]],
        ["Spain", ["Madrid."]],
        ["Paris", ["A city."]],
    ],
    "supporting_facts": [["Paris", 0], ["France", 0], ["France", 1]],
}
PARAGRAPHS = [
    {"idx": 0, "title": "Paris", "paragraph_text": "A city.", "is_supporting": True},
    {"idx": 1, "title": "Paris", "paragraph_text": "A myth.", "is_supporting": False},
    {"idx": 2, "title": "Paris", "paragraph_text": "A land. ", "is_supporting": True},
]


@pytest.mark.parametrize(
    "metadata",
    [
        AS_PUBLISHED,
        {**AS_PUBLISHED, "context": GOLD["context"]},
        {**AS_PUBLISHED, "supporting_facts": GOLD["supporting_facts"]},
        {**AS_PUBLISHED, "paragraphs": None},
    ],
)
def test_hotpotqas_passages_may_be_pairs_of_title_and_sentences(metadata):
    question = Question("q", "?", ("x",), metadata)
    contents = [p.contents for p in gold_passages(question, (), {})]
    assert contents == ["France\nA land. In Europe.", "Paris\nA city."]


def test_musiques_passages_are_the_marked_paragraphs_whatever_their_titles():
    question = Question("q", "?", ("x",), {"paragraphs": PARAGRAPHS})
    passages = gold_passages(question, (), {})
    assert [p.contents for p in passages] == ["Paris\nA city.", "Paris\nA land."]
    assert len({p.id for p in passages}) == 2


CONTEXT = GOLD["context"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context": "France"}, r"field context: .* title and sent.* or a list of pai"),
        ({"context": [["France"]]}, r"context\[0\]: expected a list of two, a title"),
        ({"context": [["Paris", "A city."]]}, r"context\[0\]\[1\]: .* list of texts"),
        ({"context": [[["Paris"], []]]}, r"context\[0\]\[0\]: expected text, got \['P"),
        ({"context": {"title": ["France"]}}, "field context: expected an object"),
        ({"context": {**CONTEXT, "title": 1.5}}, r"context\.title: .* texts, got 1\.5"),
        (
            {"context": {**CONTEXT, "title": ["France", 3, "Paris"]}},
            r"field context\.title\[1\]: expected text, got 3",
        ),
        (
            {"context": {**CONTEXT, "sentences": [["A land."]]}},
            r"context\.sentences: expected a list of 3 lists .* got \[\['A land\.'\]\]",
        ),
        (
            {"context": {**CONTEXT, "sentences": [[], ["Madrid."], "A city."]}},
            r"context\.sentences\[2\]: expected a list of texts, got 'A city\.'",
        ),
        (
            {"context": {**CONTEXT, "sentences": [[], [None], []]}},
            r"context\.sentences\[1\]\[0\]: expected text, got None",
        ),
        (
            {"context": {**CONTEXT, "sentences": [["\ud800"], [], []]}},
            "half a surrogate pair",
        ),
        ({"supporting_facts": "Paris"}, "field supporting_facts: .* with title or a"),
        ({"supporting_facts": ["Paris"]}, r"facts\[0\]: expected a list of two"),
        ({"supporting_facts": [[7, 0]]}, r"facts\[0\]\[0\]: expected text, got 7"),
        ({"supporting_facts": [["Rome", 0]]}, "its gold passages are not known"),
        ({"paragraphs": "Paris"}, "field paragraphs: expected a list of objects with"),
        ({"paragraphs": [{"title": "x"}]}, r"paragraphs\[0\]: .* and is_supporting"),
        (
            {"paragraphs": [PARAGRAPHS[0], {**PARAGRAPHS[1], "title": 3}]},
            r"paragraphs\[1\]\.title: expected text, got 3",
        ),
        (
            {"paragraphs": [{**PARAGRAPHS[0], "paragraph_text": None}]},
            r"paragraphs\[0\]\.paragraph_text: expected text, got None",
        ),
        (
            {"paragraphs": [{**PARAGRAPHS[0], "is_supporting": "no"}]},
            r"paragraphs\[0\]\.is_supporting: expected true or false, got 'no'",
        ),
        (
            {"context": None, "paragraphs": PARAGRAPHS[1:2]},
            "question q: its gold passages are not known: .*on_bad = 'skip'",
        ),
        ({"supporting_facts": {"title": [["Paris"]]}}, r"facts\.title\[0\]: .* text"),
        ({"context": None}, "question q: its gold passages are not known"),
        ({"supporting_facts": {"title": ["Rome"]}}, "its gold passages are not known"),
    ],
)
def test_malformed_gold_annotations_are_refused_by_field_name(changed, message):
    question = Question("q", "?", ("x",), {**GOLD, **changed})
    with pytest.raises(ValueError, match=message):
        gold_passages(question, (), {})


def test_gold_passages_may_be_looked_up_by_title():
    known = {"France": SEEN}
    question = Question("q", "?", ("x",))
    assert gold_passages(question, ["France", "France", "?"], known) == (SEEN,)
    with pytest.raises(ValueError, match="question q: its gold passages"):
        gold_passages(question, (), {})


def test_the_ablation_prompt_holds_the_answer_and_the_decomposition():
    parts = decomposition(PARIS, [("Which country?", "France", "A land.")])
    system, user = ablation_messages(PARIS, parts)
    assert "Ground-truth answer:\nParis" in user["content"]
    expected = (
        user["content"].partition("Decompositions:\n")[2].rpartition("\nReasoning")[0]
    )
    assert json.loads(expected) == [
        {"question": "Which country?", "answer": "France", "context": "A land."}
    ]
    # The prompt's example is itself a chain that passes the filter.
    example = system["content"].rpartition("Reasoning process with function call:")[2]
    shown = split_chain(REARAG, example.strip())
    question = Question("example", "?", ("1905",))
    assert chain_fault(REARAG, question, shown, normalize="squad") == ""
    assert shown.observations[0] == "Yuma County"


def test_musiques_decomposition_is_read():
    records = [{"id": 7, "question": "a?", "answer": "b"}]
    question = Question("q", "?", ("x",), {"question_decomposition": records})
    assert decomposition(question, ()) == [
        {"question": "a?", "answer": "b", "context": ""}
    ]
    with pytest.raises(ValueError, match="question q1: its decomposition"):
        decomposition(PARIS, ())


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([], "its decomposition is not known"),
        ("a? b", r"field question_decomposition: .* got 'a\? b'"),
        (["a?"], r"question_decomposition\[0\]: .* question and answer, got 'a\?'"),
        ([{"question": "a?"}], r"question_decomposition\[0\]: .* and answer"),
        (
            [{"question": 3, "answer": "b"}],
            r"\[0\]\.question: .* text, got int 3",
        ),
        (
            [{"question": "a?", "answer": "b", "context": 4}],
            r"\[0\]\.context: expected text, got 4",
        ),
    ],
)
def test_a_malformed_decomposition_is_refused_by_field_name(message, why):
    question = Question("q", "?", ("x",), {"question_decomposition": message})
    with pytest.raises(ValueError, match=why):
        decomposition(question, ())


def test_a_whole_reply_is_split_into_turns_and_observations():
    reply = f"Sure.\n{FIRST}\nObservation 1: Paris it is.\n{LAST}\n<|completed|> more"
    attempt = split_chain(REARAG, reply)
    assert attempt.turns == (FIRST, LAST)
    assert attempt.answer == "It is Paris" and attempt.outcome == Outcome.ANSWERED
    assert chain_fault(REARAG, PARIS, attempt, normalize="squad") == ""
    assert chain(REARAG, PARIS, attempt).observations == ("Paris it is.",)


@pytest.mark.parametrize("reply", ["", "Thought 1:", f"{FIRST}\nThought 2: and", "x"])
def test_a_reply_without_a_final_answer_is_unfinished(reply):
    attempt = split_chain(REARAG, reply)
    assert chain_fault(REARAG, PARIS, attempt, normalize="squad") == "unfinished"


def test_a_hundred_thousand_empty_lines_are_matched_within_a_second():
    started = time.monotonic()
    assert THOUGHT.findall("\n" * 100_000 + " Thought 3: so") == ["3"]
    assert time.monotonic() - started < 1

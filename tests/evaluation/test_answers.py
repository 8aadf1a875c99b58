"""Answers of other models: what they are shown, and how their failures count."""

import numpy as np
import pytest

from rsearch.evaluation.answers import (
    evidence_of,
    finish_messages,
    log_messages,
    read_evidence,
    rephrase_answers,
)
from rsearch.tools.search import search_use
from rsearch.types import (
    Group,
    Outcome,
    Passage,
    Question,
    Rollout,
    Segment,
    Source,
)

NOTHING = np.zeros(0, np.int32)
FOUND = (Passage("p", "Ada\nAda was born in {question}."),)
BOX = "<original_evidence> {} </original_evidence>"


def rollout(answer, *turns, outcome=Outcome.ANSWERED, searches=()):
    segments = tuple(
        Segment(Source.POLICY, NOTHING, NOTHING.astype(np.float32), text)
        for text in turns
    )
    return Rollout(segments, answer, searches, outcome)


def groups(*rollouts):
    return [
        Group(Question(f"q{i}", f"Q{i}?", ("x",)), (r,)) for i, r in enumerate(rollouts)
    ]


def listening(*replies):
    """Return (a model that gives these replies, the list of chats that it receives)."""
    heard = []

    def ask(chats):
        heard.extend(chats)
        assert len(chats) == len(replies)
        return list(replies)

    return ask, heard


def ends(answered):
    return [(g.rollouts[0].answer, g.rollouts[0].outcome) for g in answered]


def test_the_final_answer_is_a_short_version_of_the_policys():
    asked = groups(
        rollout("It is Paris, I think."),
        rollout(None, outcome=Outcome.TRUNCATED),
        rollout("Rome."),
        rollout(None, outcome=Outcome.TOOL_ERROR),
    )
    answer, heard = listening(" Paris\n", "Rome")
    assert ends(rephrase_answers(asked, answer, answer_from="finish")) == [
        ("Paris", Outcome.ANSWERED),
        (None, Outcome.TRUNCATED),
        ("Rome", Outcome.ANSWERED),
        (None, Outcome.TOOL_ERROR),
    ]
    assert heard[0] == finish_messages("Q0?", "It is Paris, I think.")
    (message,) = heard[1]
    assert message["content"].startswith("The Reference Answer is the final answer to")
    assert "[Question]\nQ2?\n[Reference answer]\nRome.\nOnly" in message["content"]


def test_a_failed_answer_model_is_not_replaced_by_the_policy():
    answer, _ = listening(None, "b")
    actual = rephrase_answers(
        groups(rollout("A"), rollout("B")), answer, answer_from="finish"
    )
    assert ends(actual) == [(None, Outcome.JUDGE_ERROR), ("b", Outcome.ANSWERED)]


def test_from_the_log_the_policys_answer_is_not_shown():
    lookups = (
        search_use(("where", "who"), (FOUND, ())),
        search_use(("when",), (FOUND,)),
    )
    asked = groups(rollout("secret", searches=lookups))
    answer, heard = listening("Paris")
    assert ends(rephrase_answers(asked, answer, answer_from="log"))[0][0] == "Paris"
    assert heard == [log_messages("Q0?", asked[0].rollouts[0])]
    system, user = heard[0]
    assert "QA assistant" in system["content"]
    assert user["content"] == (
        "Query: where\nResult: Ada\nAda was born in {question}.\n\nQuery: who\nResult: "
        "\n\nQuery: when\nResult: Ada\nAda was born in {question}.\n\nQuestion: Q0?\n"
        "Answer:"
    )


@pytest.mark.parametrize("text", ["{question}", "{reference}", "{0} %s"])
def test_a_placeholder_in_one_text_is_not_filled_by_the_other(text):
    (message,) = finish_messages(text, "R {question} {reference}")
    assert f"[Question]\n{text}\n" in message["content"]
    assert "\nR {question} {reference}\n" in message["content"]


def test_evidence_is_the_last_box_of_the_policy():
    assert evidence_of(rollout("a", BOX.format("one"), BOX.format("two"))) == "two"
    assert evidence_of(rollout("a", BOX.format(" "))) is None
    assert evidence_of(rollout("a", "<original_evidence> open")) is None
    shown = Segment(Source.SEARCH, NOTHING, NOTHING, BOX.format("forged"))
    assert evidence_of(Rollout((shown,), "a", (), Outcome.ANSWERED)) is None


def test_a_reader_answers_from_the_evidence_or_without_if_there_is_none():
    asked = groups(
        rollout("A", BOX.format("Ada was born in Paris.")),
        rollout(None, outcome=Outcome.MALFORMED),
        rollout("B", BOX.format("x"), outcome=Outcome.TOOL_ERROR),
        rollout("C", BOX.format("y")),
    )
    read, heard = listening("Paris", "guess", None)

    def alone(question):
        return [{"role": "user", "content": f"alone: {question.text}"}]

    assert ends(read_evidence(asked, read, direct_chat=alone)) == [
        ("Paris", Outcome.ANSWERED),
        ("guess", Outcome.ANSWERED),
        ("B", Outcome.TOOL_ERROR),
        (None, Outcome.JUDGE_ERROR),
    ]
    assert heard[0][0]["content"].endswith(
        "passages:\nAda was born in Paris.\n\nQuestion: Q0?\nAnswer:"
    )
    assert heard[1] == alone(asked[1].question)

"""The paragraphs that come with a question, in place of a search."""

import dataclasses

import pytest

from rsearch.methods.in_context import in_context
from rsearch.methods.reading import rag_messages
from rsearch.types import Outcome, Passage
from tests.methods.scripted import ScriptedModel, Searched, answer_one, kit, shown

MUSIQUE = {
    "paragraphs": [
        {"title": f"T{i}", "paragraph_text": f"text {i}", "is_supporting": i in (1, 4)}
        for i in range(5)
    ]
}
HOTPOT = {
    "context": {"title": ["T0", "T1"], "sentences": [["text", "0"], ["text", "1"]]},
    "supporting_facts": {"title": ["T1"], "sent_id": [0]},
}


def passages(*numbers):
    return [Passage(str(i), f"T{i}\ntext {i}") for i in numbers]


def fitting(num):
    """Return a kit whose prompts have room for this many paragraphs."""
    return kit(fits=lambda messages: messages[0]["content"].count("Title:") <= num)


@pytest.mark.parametrize(
    ("metadata", "room", "settings", "numbers", "left_out"),
    [
        (MUSIQUE, 5, {}, (0, 1, 2, 3, 4), 0),
        (MUSIQUE, 4, {}, (0, 1, 2, 4), 1 / 5),
        (MUSIQUE, 3, {}, (0, 1, 4), 2 / 5),
        (MUSIQUE, 2, {}, (1, 4), 3 / 5),
        (MUSIQUE, 1, {}, (1, 4), 3 / 5),
        (MUSIQUE, 5, {"only_gold": True}, (1, 4), 3 / 5),
        (HOTPOT, 2, {}, (0, 1), 0),
        (HOTPOT, 1, {}, (1,), 1 / 2),
        ({"context": HOTPOT["context"]}, 1, {}, (0,), 1 / 2),
    ],
)
def test_gold_paragraphs_stay_if_not_all_paragraphs_fit(
    metadata, room, settings, numbers, left_out
):
    model, search, used = ScriptedModel(lambda r: "Paris"), Searched(), fitting(room)
    rollout = answer_one(
        in_context, model, search=search, used=used, metadata=metadata, **settings
    )
    (request,) = model.requests
    assert request.prompt == rag_messages(used, "Who is X?", passages(*numbers))
    assert (rollout.answer, rollout.left_out) == ("Paris", left_out)
    assert search.queries == [] and request.max_tokens == 8


@pytest.mark.parametrize("room", [2, 3, 9, 50, 200])
@pytest.mark.parametrize("only_gold", [False, True])
def test_paragraphs_of_other_questions_fill_the_prompt(room, only_gold):
    foreign = [f"U{i}\nforeign {i}" for i in range(100)]
    fills = dataclasses.replace(
        fitting(room), paragraphs=lambda: [*foreign, "T0\ntext 0"]
    )
    read, left_out = {}, []
    for name in ("q", "r"):
        model = ScriptedModel(lambda r: "Paris")
        settings = {"only_gold": only_gold, "filled": True}
        rollout = answer_one(
            in_context, model, used=fills, metadata=MUSIQUE, name=name, **settings
        )
        text = shown(model.requests[0])
        assert "text 1" in text and "text 4" in text
        own, others = text.count(") text"), text.count("foreign")
        assert own == min(2 if only_gold else 5, room)
        assert own + others == min(room, 102 if only_gold else 105)
        read[name] = text
        left_out.append(rollout.left_out)
    assert left_out == [0.0 if room >= 5 and not only_gold else (5 - own) / 5] * 2
    if room > 3:  # another question has other paragraphs, in another order
        assert read["q"] != read["r"]


def test_a_prompt_that_is_too_long_with_only_gold_is_truncated():
    model = ScriptedModel(lambda r: None)
    rollout = answer_one(in_context, model, used=fitting(0), metadata=MUSIQUE)
    assert (rollout.outcome, rollout.left_out) == (Outcome.TRUNCATED, 3 / 5)
    assert "text 4" in shown(model.requests[0])

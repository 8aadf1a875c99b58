"""Methods with a single model call, and their prompts."""

import dataclasses

import numpy as np
import pytest

from rsearch.methods import reading
from rsearch.protocols import plain
from rsearch.types import Outcome
from tests.methods.scripted import (
    ScriptedModel,
    Searched,
    answer_one,
    completion,
    kit,
    shown,
)


def test_direct_uses_the_configured_prompt():
    model = ScriptedModel(lambda r: " Paris ")
    rollout = answer_one(reading.direct, model)
    assert (rollout.answer, rollout.outcome) == ("Paris", Outcome.ANSWERED)
    (request,) = model.requests
    assert request.max_tokens == 8
    assert request.prompt[0]["content"] == plain.DIRECT.system
    assert request.prompt[1]["content"] == "Question: Who is X?"
    answer_one(reading.direct, model, used=kit(direct="Say: {question}"))
    (message,) = model.requests[-1].prompt
    assert message == {"role": "user", "content": "Say: Who is X?"}


def test_rag_shows_the_passages_of_one_search():
    model, search = ScriptedModel(lambda r: "Paris"), Searched()
    short = kit(shorten=lambda text: text[:50])
    rollout = answer_one(reading.rag, model, search=search, used=short)
    assert search.queries == ["Who is X?"]
    assert len(rollout.passages) == 3 and len(rollout.searches) == 1
    text = "Doc 1(Title: Who is X? 1) text 1\nDoc 2(Title: Who is X? 2) text 2"
    assert shown(model.requests[0]).count(text[:50]) == 1
    assert text[:51] not in shown(model.requests[0])
    assert rollout.num_cut_observations == 1
    rollout = answer_one(reading.rag, model, top_k=1)
    assert [p.id for p in rollout.passages] == ["Who is X?-1"]
    assert rollout.num_cut_observations == 0


def test_rag_cot_without_passages_is_cot():
    """The prompts are the same, so at temperature 0 the answers are too."""
    asked = []
    for program, search in ((reading.cot, None), (reading.rag_cot, Searched(0))):
        model = ScriptedModel(lambda r: "x. So the answer is: Paris.")
        assert answer_one(program, model, search=search).answer == "Paris"
        asked.append(model.requests)
    assert asked[0] == asked[1] and asked[0][0].max_tokens == 16


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("So the answer is: no.", "no"),
        ("so the answer is A\nSo the final answer is: St. Louis.\nBye", "St. Louis"),
        ("So the answer is:\nParis", "Paris"),
        ("The answer is Paris", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_answer_mark_counts(reply, answer):
    assert reading.marked_answer(reply) == answer


def test_a_missing_answer_is_truncated_or_malformed():
    for is_cut, outcome in ((True, Outcome.TRUNCATED), (False, Outcome.MALFORMED)):
        model = ScriptedModel(lambda r, cut=is_cut: completion("Hm", is_cut=cut))
        rollout = answer_one(reading.cot, model)
        assert (rollout.answer, rollout.outcome) == (None, outcome)
        # The reply ends at the mark, where the answer would begin.
        end = completion(f"{reading.MARK} .", is_cut=is_cut)
        rollout = answer_one(reading.cot, ScriptedModel(lambda r, end=end: end))
        assert (rollout.answer, rollout.outcome) == (None, outcome)
    thinking = ScriptedModel(lambda r: "<think>Paris")
    assert answer_one(reading.direct, thinking).outcome == Outcome.MALFORMED


@pytest.mark.parametrize(
    ("reply", "answer"), [("Paris, or", None), ("Or?</think> Paris", "Paris")]
)
def test_the_template_may_open_a_thought(reply, answer):
    written = dataclasses.replace(
        completion(reply, is_cut=True, prompt="Who is X?<|assistant|><think>\n"),
        prompt_ids=np.arange(9, dtype=np.int32),
    )
    rollout = answer_one(reading.direct, ScriptedModel(lambda r: written))
    assert rollout.answer == answer
    assert rollout.outcome == (Outcome.ANSWERED if answer else Outcome.TRUNCATED)


def test_a_text_of_the_prompt_opens_no_thought():
    """An endpoint does not report its prompts, which end after the template."""
    written = completion("Paris", prompt="user: Who is X? <think>")
    rollout = answer_one(reading.direct, ScriptedModel(lambda r: written))
    assert rollout.answer == "Paris"

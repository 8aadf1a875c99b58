"""The conversation of a protocol, run as a program."""

import dataclasses

import pytest

from rsearch.methods.conversing import converse
from rsearch.methods.table import make_program
from rsearch.protocols.table import PROTOCOLS
from rsearch.types import Outcome
from tests.methods.scripted import (
    ScriptedModel,
    Searched,
    answer_one,
    completion,
    kit,
)

PLAYED = PROTOCOLS["search_r1"]


def turn(text, stop=None, **more):
    return dataclasses.replace(completion(text, **more), stop=stop)


def saying(*turns):
    waiting = list(turns)
    return ScriptedModel(lambda request: waiting.pop(0))


def test_a_model_searches_and_answers():
    model = saying(
        turn("Hm. <search> X ", "</search>"), turn("So. <answer> Bo ", "</answer>")
    )
    search = Searched(1)
    rollout = answer_one(converse, model, search=search)
    assert (rollout.answer, rollout.outcome) == ("Bo", Outcome.ANSWERED)
    assert search.queries == ["X"]
    first, second = model.requests
    assert first.prompt == second.prompt == PLAYED.messages("Who is X?")
    assert first.stop == PLAYED.stop_strings and first.continued == ""
    assert second.continued == (
        "Hm. <search> X </search>\n\n<information>Doc 1(Title: X 1) text 1"
        "</information>\n\n"
    )


@pytest.mark.parametrize(
    ("said", "queries", "answer"),
    [
        (turn("<search> X "), ["X"], "Bo"),
        (turn("<answer> Al "), [], "Al"),
        # The model stopped by itself or ran out of budget: no tag was written.
        (turn("<search> X ", ""), [], "Bo"),
        (turn("<search> X ", None, is_cut=True), [], "Bo"),
        (turn("<search>  ", "</search>"), [], "Bo"),
    ],
)
def test_an_unnamed_stop_string_is_the_one_that_completes_an_action(
    said, queries, answer
):
    search = Searched()
    model = saying(said, turn("<answer>Bo", "</answer>"))
    assert answer_one(converse, model, search=search).answer == answer
    assert search.queries == queries
    if not queries and answer == "Bo":
        assert model.requests[1].continued.endswith(PLAYED.invalid_message)


@pytest.mark.parametrize("max_searches", [0, 2])
def test_one_turn_follows_the_last_search(max_searches):
    turns = [turn(f"<search> {i} ", "</search>") for i in range(9)]
    model, search = saying(*turns), Searched()
    rollout = answer_one(converse, model, search=search, max_searches=max_searches)
    # A budget of searches has ended it, as in the rollouts of a policy.
    assert (rollout.answer, rollout.outcome) == (None, Outcome.TRUNCATED)
    assert len(search.queries) == max_searches
    assert len(model.requests) == max_searches + 1


def test_passages_are_cut_and_the_tags_around_them_stay():
    model = saying(turn("<search> X ", "</search>"), turn("<answer>Bo", "</answer>"))
    answer_one(converse, model, used=kit(shorten=lambda text: text[:5]))
    assert model.requests[1].continued.endswith("<information>Doc 1</information>\n\n")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_can_be_played(name):
    plays = PROTOCOLS[name]
    model = ScriptedModel(lambda request: turn("nothing", ""))
    answer_one(converse, model, protocol=name, max_searches=1)
    first = model.requests[0]
    shown = first.continued if plays.is_chat else first.prompt
    assert shown.endswith(plays.opening)
    assert isinstance(first.prompt, str) != plays.is_chat
    assert len(model.requests) == (1 if plays.invalid_message is None else 2)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match="did you mean search_r1"):
        make_program("converse:protocol=search_r2")

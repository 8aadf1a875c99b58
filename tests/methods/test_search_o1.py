"""Search-o1: a model that searches within its reasoning."""

import dataclasses

import pytest

from rsearch.methods import search_o1 as module
from rsearch.methods.search_o1 import final_information, last_steps, search_o1
from rsearch.types import Outcome
from tests.methods.scripted import (
    ScriptedModel,
    Searched,
    answer_one,
    completion,
    kit,
    shown,
)

BEGIN, END = module.BEGIN_RESULT, module.END_RESULT


def ask(query):
    return f"Hm. {module.BEGIN_QUERY} {query} "


def thinking(*turns, reading="So:\n**Final Information**\n\nIt is Bo."):
    """Return a model that writes these turns, and `reading` about documents."""
    waiting = list(turns)
    return ScriptedModel(
        lambda r: reading if "Task Instruction" in shown(r) else waiting.pop(0)
    )


def test_a_query_is_searched_and_its_passages_are_read():
    model, search = thinking(ask("X Y"), r"Thus \boxed{Bo}."), Searched()
    short = kit(shorten=lambda text: text[:30])
    rollout = answer_one(search_o1, model, search=search, used=short, top_k=1)
    assert rollout.answer == "Bo" and search.queries == ["X Y"]
    first, reading, second = model.requests
    assert "limited to 10." in shown(first) and "step by step" in shown(first)
    assert shown(first).endswith("\\boxed{YOUR_ANSWER}.\n\nQuestion:\nWho is X?\n\n")
    assert first.stop == second.stop == (module.END_QUERY,) and not first.continued
    said = f"Hm. {module.BEGIN_QUERY} X Y {module.END_QUERY}"
    assert second.continued == f"{said}\n\n{BEGIN}It is Bo.{END}\n\n"
    assert second.prompt == first.prompt and reading.stop == ()
    assert "Pages:**\nDoc 1(Title: X Y 1) text 1\n" in shown(reading)
    assert f"Steps:**\nStep 1: {said}\n" in shown(reading)
    assert 'query "X Y"' in shown(reading)
    answer_one(search_o1, model := thinking("x"), asks_to_think=False)
    assert "step by step" not in shown(model.requests[0])


def test_with_a_limit_of_zero_no_search_is_run():
    model, search = thinking(ask("X"), r"\boxed{Bo}"), Searched()
    rollout = answer_one(search_o1, model, search=search, max_searches=0)
    assert search.queries == [] and rollout.answer == "Bo"
    assert model.requests[1].continued.endswith(
        f"\n{BEGIN}\n{module.TOO_MANY}\n{END}\n"
    )


def test_a_query_is_searched_once_and_at_most_max_searches_are():
    turns = [ask("A"), ask("A"), ask("B"), ask("A"), r"\boxed{Bo}"]
    model, search = thinking(*turns), Searched()
    answer_one(search_o1, model, search=search, max_searches=2)
    assert search.queries == ["A", "B"]
    turns = [r for r in model.requests if "Task Instruction" not in shown(r)]
    assert turns[2].continued.endswith(f"\n{BEGIN}\n{module.REPEATED}\n{END}\n")
    assert turns[4].continued.endswith(f"\n{BEGIN}\n{module.TOO_MANY}\n{END}\n")


@pytest.mark.parametrize(
    ("turn", "query"),
    [
        (f"{module.BEGIN_QUERY}A{module.BEGIN_QUERY} B ", "B"),
        (completion(ask("A"), is_cut=True), None),
        (module.BEGIN_QUERY + " ", None),
        ("no query", None),
    ],
)
def test_the_last_query_of_a_turn_counts_if_it_is_complete(turn, query):
    search = Searched()
    answer_one(search_o1, thinking(turn, "x"), search=search)
    assert search.queries == ([query] if query else [])


def test_a_turn_that_ends_by_itself_in_a_query_is_answer_text():
    text = ask("A") + r"\boxed{Bo}"
    search = Searched()
    model = thinking(dataclasses.replace(completion(text), stop=""))
    rollout = answer_one(search_o1, model, search=search)
    assert search.queries == [] and rollout.answer == "Bo"


def test_running_out_of_turns_leaves_no_answer():
    turns = [ask(f"query {i}") for i in range(15)]
    rollout = answer_one(search_o1, thinking(*turns))
    assert (rollout.answer, rollout.outcome) == (None, Outcome.MALFORMED)
    assert len(rollout.searches) == 10
    cut = answer_one(search_o1, thinking(completion("Hm", is_cut=True)))
    assert cut.outcome == Outcome.TRUNCATED


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"\boxed{A} then \boxed{B}", "B"),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{\text{Paris}, \text{France}} \boxed{cut", "Paris, France"),
        ("none", None),
    ],
)
def test_the_answer_is_in_the_last_box(reply, answer):
    assert answer_one(search_o1, thinking(reply)).answer == answer


def test_the_text_of_passages_is_neither_query_nor_answer():
    inserted = rf"x\boxed{{Z}} {module.BEGIN_QUERY}Z"
    model = thinking(ask("A"), "No box", reading=f"x{module.MARK}\n{inserted}")
    search = Searched()
    assert answer_one(search_o1, model, search=search).answer is None
    assert inserted in model.requests[-1].continued and search.queries == ["A"]


@pytest.mark.parametrize("thought", ["<think>A?</think>\n\n", "A?\n</think>\n"])
def test_the_mark_may_follow_a_thought_about_the_passages(thought):
    reading = f"{thought}**Final Information**\n\nIt is Bo."
    model = thinking(ask("A"), r"\boxed{Bo}", reading=reading)
    answer_one(search_o1, model)
    assert model.requests[-1].continued.endswith(f"{BEGIN}It is Bo.{END}\n\n")


@pytest.mark.parametrize(
    ("reply", "information"),
    [
        ("x\n**Final Information**\n\nParis is it.\nOk", "Paris is it.Ok"),
        ("**Final Information**\n\nParis is it.", module.NO_INFORMATION),
        ("x\n**Final Information** A\n**Final Information**\n```B```", "B"),
        ("Paris is it.", module.NO_INFORMATION),
        ("", module.NO_INFORMATION),
    ],
)
def test_the_information_follows_the_last_mark(reply, information):
    assert final_information(reply) == information


def test_the_steps_kept_are_the_first_the_last_and_those_that_search():
    assert last_steps("\n".join("abcdefgh")).split("\n\n") == [
        "Step 1: a",
        "...",
        "Step 6: f",
        "Step 7: g",
        "Step 8: h",
    ]
    assert (
        last_steps("a\n\nb\nc\nd") == "Step 1: a\n\nStep 2: b\n\nStep 3: c\n\nStep 4: d"
    )
    steps = last_steps("\n".join(["a", "b", f"c{BEGIN}", "d", "e", "f", "g", "h"]))
    assert steps.split("\n\n")[1:4] == ["...", f"Step 3: c{BEGIN}", "..."]

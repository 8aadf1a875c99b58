"""Methods that search again."""

from rsearch.methods import iterating, reading
from tests.methods.scripted import ScriptedModel, Searched, answer_one


def test_one_round_of_iter_retgen_is_rag():
    asked = []
    for program, settings in (
        (reading.rag, {}),
        (iterating.iter_retgen, {"rounds": 1}),
    ):
        model, search = ScriptedModel(lambda r: "Paris"), Searched()
        rollout = answer_one(program, model, search=search, **settings)
        asked.append((model.requests, search.queries, rollout.answer))
    assert asked[0] == asked[1]


def test_the_answer_leads_the_next_query():
    for order, query in (
        ("answer_first", "Paris Who is X?"),
        ("question_first", "Who is X? Paris"),
    ):
        model, search = ScriptedModel(lambda r: "Paris"), Searched()
        rollout = answer_one(
            iterating.iter_retgen, model, search=search, query_order=order
        )
        assert search.queries == ["Who is X?", query, query]
        assert len(rollout.searches) == 3 and len(model.requests) == 3
        assert "Who is X? 1" not in model.requests[1].prompt[0]["content"].replace(
            query, ""
        )


def test_an_empty_answer_asks_the_same_again():
    search = Searched()
    answer_one(iterating.iter_retgen, ScriptedModel(lambda r: ""), search=search)
    assert search.queries == ["Who is X?"] * 3

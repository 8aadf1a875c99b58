"""Self-Ask: a model that asks itself follow-up questions."""

import re

import pytest

from rsearch.methods.base import few_shot
from rsearch.methods.self_ask import self_ask
from rsearch.types import Outcome
from tests.methods.scripted import ScriptedModel, Searched, answer_one, kit, shown


def asking(*replies, reader="Bo"):
    """Return a model that continues raw texts with `replies` and answers chats."""
    waiting = list(replies)
    return ScriptedModel(
        lambda r: waiting.pop(0) if isinstance(r.prompt, str) else reader
    )


def test_a_follow_up_is_searched_and_its_answer_is_written_after_it():
    model = asking(
        " Yes.\nFollow up: Who wrote X?\n",
        "\nFollow up: Where was Bo born?\n",
        "\nSo the final answer is: St. Louis.\n\nbye",
        reader="Bo.\nSo the final answer is: Hm",
    )
    search = Searched()
    short = kit(shorten=lambda text: text[:30])
    rollout = answer_one(self_ask, model, search=search, top_k=1, used=short)
    assert rollout.answer == "St. Louis" and rollout.outcome == Outcome.ANSWERED
    assert search.queries == ["Who wrote X?", "Where was Bo born?"]
    assert [len(use.result.data[0]) for use in rollout.searches] == [1, 1]
    first, reader, second, _, third = model.requests
    own_text = few_shot("self_ask") + "\n\nQuestion: Who is X?\n"
    own_text += "Are follow up questions needed here:"
    assert first.prompt == own_text and "Intermediate answer:" in first.stop
    assert "Doc 1(Title: Who wrote X? 1) t" in shown(reader) and reader.max_tokens == 8
    assert "Question: Who wrote X?" in shown(reader)
    answer = "\nIntermediate answer: Bo. So the final answer is: Hm."
    own_text += f" Yes.\nFollow up: Who wrote X?{answer}"
    assert second.prompt == own_text
    assert third.prompt == f"{own_text}\nFollow up: Where was Bo born?{answer}"


def test_the_first_follow_up_of_a_reply_counts():
    search = Searched()
    model = asking("Follow up: A?\nFollow up: B?\nSo the final answer is: x", "", " C.")
    assert answer_one(self_ask, model, search=search).answer == "C"
    assert search.queries == ["A?"] and "B?" not in model.requests[2].prompt


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (" No.\nSo the final answer is: no", "no"),
        (" No.\nso the final answer is: A\nSo the final answer is: B", "A"),
        (" No. It is A", None),
        (" Follow up:\n", None),
    ],
)
def test_an_answer_follows_its_mark(reply, answer):
    rollout = answer_one(self_ask, asking(reply), forces_answer=False)
    assert rollout.answer == answer and not rollout.searches
    assert (rollout.outcome == Outcome.MALFORMED) == (answer is None)


def test_a_model_that_gives_no_answer_or_asks_too_often_is_made_to_answer():
    for replies, num_searches in (
        ((" It is.\n",), 0),
        (("\nFollow up: A?\n",) * 3, 2),
        (("",), 0),
    ):
        model = asking(*replies, " Bo\n")
        rollout = answer_one(self_ask, model, rounds=2)
        assert rollout.answer == "Bo" and len(rollout.searches) == num_searches
        last = model.requests[-1]
        assert last.prompt.endswith(replies[-1].rstrip() + "\nSo the final answer is:")
        assert last.stop == ("\n",) and last.max_tokens == 8
    assert answer_one(self_ask, asking("", " ")).outcome == Outcome.MALFORMED


def test_a_model_continues_by_itself_if_its_passages_hold_no_answer():
    model = asking("Follow up: A?", " Bo.\nSo the final answer is: Bo", reader="")
    assert answer_one(self_ask, model).answer == "Bo"
    assert model.requests[-1].prompt.endswith("Follow up: A?\nIntermediate answer:")


def test_the_four_examples_search_and_end():
    examples = few_shot("self_ask").split("\n\n")
    assert len(examples) == 4
    for example in examples:
        first, needed, *steps, last = example.splitlines()
        assert first.startswith("Question: ") and needed.endswith("here: Yes.")
        assert len(steps) == 4 and last.startswith("So the final answer is: ")
        assert all(re.match(r"(Follow up|Intermediate answer): ", x) for x in steps)

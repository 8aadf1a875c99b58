"""The answer of every method is read after a model's thoughts, never in them."""

import dataclasses
import re

import numpy as np
import pytest

from rsearch.methods import search_o1
from rsearch.methods.flare import flare
from rsearch.methods.iterating import ircot
from rsearch.methods.self_ask import self_ask
from rsearch.methods.table import METHODS, NEEDS_EXTRA_INPUTS, make_program
from rsearch.types import Outcome
from tests.methods.scripted import (
    ScriptedModel,
    Searched,
    answer_one,
    completion,
    shown,
)

# `converse` has its protocol's tags around thoughts and answers.
GENERAL = [m for m in METHODS if m not in (*NEEDS_EXTRA_INPUTS, "converse")]
SPELLINGS = [*GENERAL, "ircot:answers=chain", "self_rag:spelled=true"]
# Whatever announces an answer in some method.
ANSWER = r"[Final Content] So the final answer is: {0} \boxed{{{0}}}"


def with_tokens(text):
    tokens = re.findall(r"\s?\S+", text)
    return completion(text, tokens=tokens, logp=[-0.1] * len(tokens))


def answered(spelling, text):
    """Return the rollout of a method with a model that always replies with a text."""

    def score(request):
        tokens = re.findall(r"\s?\S+\s*$|\s?\S+|\s", request.text)
        return tokens, np.full(len(tokens), -0.1)

    model = ScriptedModel(lambda request: with_tokens(text), score=score)
    return answer_one(make_program(spelling), model)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_thought_without_an_end_is_no_answer(spelling):
    answer = ANSWER.format("Paris")
    assert "Paris" in answered(spelling, answer).answer
    for text in (f"<think>hm {answer}", f"{answer} <think>or"):
        rollout = answered(spelling, text)
        assert (rollout.answer, rollout.outcome) == (None, Outcome.MALFORMED)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_answer_in_a_thought_does_not_count(spelling):
    texts = ANSWER.format("London"), ANSWER.format("Paris")
    answer = answered(spelling, "<think>{}</think> {}".format(*texts)).answer
    assert "Paris" in answer and "London" not in answer


def writing(*texts):
    """Return a model that writes these texts; Reason-in-Documents finds nothing."""
    waiting = list(texts)
    return ScriptedModel(
        lambda r: with_tokens(
            "No" if "Task Instruction" in shown(r) else waiting.pop(0)
        )
    )


def test_search_o1_searches_in_a_thought_that_later_turns_end():
    query, search = f"{search_o1.BEGIN_QUERY}A", Searched()
    turns = [f"<think>{query}", r"\boxed{London}?</think>\boxed{Paris}"]
    rollout = answer_one(search_o1.search_o1, writing(*turns), search=search)
    assert search.queries == ["A"] and rollout.answer == "Paris"
    turns = [f"<think>{query}", r"so \boxed{London}"]
    assert answer_one(search_o1.search_o1, writing(*turns)).answer is None


@pytest.mark.parametrize(
    ("end", "answer"), [("", None), (r"</think>\boxed{Paris}", "Paris")]
)
def test_the_template_may_open_the_thought_in_which_search_o1_searches(end, answer):
    def reply(request):
        is_first = not request.continued
        text = f"{search_o1.BEGIN_QUERY}A" if is_first else rf"\boxed{{London}}{end}"
        written = completion("No" if "Task Instruction" in shown(request) else text)
        prompt = "<|assistant|><think>\n" if is_first else "no information"
        ids = np.arange(9, dtype=np.int32)
        return dataclasses.replace(written, prompt_text=prompt, prompt_ids=ids)

    assert answer_one(search_o1.search_o1, ScriptedModel(reply)).answer == answer


@pytest.mark.parametrize(
    ("program", "settings"), [(flare, {"theta": 0.0}), (ircot, {"answers": "chain"})]
)
def test_a_chain_of_sentences_may_begin_with_a_thought(program, settings):
    sentences = ["<think>Al is b. x", "So</think> it is. x", "So the answer is: Paris."]
    assert answer_one(program, writing(*sentences), **settings).answer == "Paris"
    sentences = ["<think>Al is b. x", "So the answer is: London. x", "", ""]
    assert answer_one(program, writing(*sentences), **settings).answer is None


def test_a_follow_up_in_a_thought_is_no_step():
    search = Searched()
    turns = ["<think>Follow up: A?</think>\nFollow up: B?", " Bo.", "<think>So", "Al."]
    model = writing(*turns)
    assert answer_one(self_ask, model, search=search).answer == "Al"
    assert search.queries == ["B?"]
    assert "think" not in model.requests[-1].prompt

"""FLARE: a model that searches with the sentences it is unsure of."""

import re

import numpy as np
import pytest

from rsearch.methods.base import few_shot
from rsearch.methods.flare import first_sentence, flare, masked_query
from rsearch.methods.reading import marked_answer
from rsearch.types import Outcome
from tests.methods.scripted import ScriptedModel, Searched, answer_one, completion

TOKENS = ("Joe", " Biden", " attended", " the", " University", " of")
TOKENS += (" Pennsylvania", ".")
PROBS = (0.95, 0.99, 0.85, 0.98, 0.45, 0.97, 0.30, 0.9)
MASKED = "Joe Biden attended the University of ."


@pytest.mark.parametrize(
    ("theta", "beta", "query"),
    [
        (0.8, 0.4, MASKED),
        (0.4, 0.4, MASKED),
        (0.2, 0.2, None),
        (0.96, 0.0, "".join(TOKENS)),
        (1.0, 0.0, "".join(TOKENS)),
        (0.0, 0.0, None),
    ],
)
def test_an_uncertain_sentence_is_the_query_without_unlikely_tokens(theta, beta, query):
    draft = completion("".join(TOKENS), tokens=TOKENS, logp=np.log(PROBS))
    model, search = ScriptedModel(lambda request: draft), Searched()
    rollout = answer_one(flare, model, search=search, theta=theta, beta=beta)
    assert search.queries == ["Who is X?", *([query] if query else [])]
    notes = dict(rollout.notes)
    assert notes["sentence_least_prob"] == pytest.approx(min(PROBS))
    assert notes["sentence_searched"] == bool(query)


def test_a_query_of_only_unlikely_tokens_is_empty():
    assert masked_query(("No", "."), (0.1, 0.15), 0.2) == ""


def test_the_first_sentence_ends_at_a_token_boundary():
    text = " He lives in the  U.S. now. Mr. X died."
    tokens = re.findall(r"\s?\S+|\s", text)
    assert "".join(first_sentence(tokens)) == " He lives in the  U.S. now."
    assert first_sentence(()) == first_sentence((" ",)) == ()


def drafting(*texts, p=0.5):
    """Return a model that writes these texts, each word a token of probability `p`."""
    waiting = list(texts)

    def reply(request):
        text = waiting.pop(0)
        tokens = re.findall(r"\s?\S+", text)
        return completion(text, tokens=tokens, logp=[np.log(p)] * len(tokens))

    return ScriptedModel(reply)


@pytest.mark.parametrize(
    ("settings", "searches"),
    [
        (
            {"theta": 1.0, "beta": 0.0},
            ["Who is X?", "A is b.", "So the answer is: Rome."],
        ),
        ({"always": True, "theta": 0.0, "beta": 0.5}, ["Who is X?"] * 3),
        ({"theta": 0.0}, ["Who is X?"]),
    ],
)
def test_sentences_are_written_anew_behind_a_search(settings, searches):
    pair = [" A is b. More.", " So the answer is: Rome. More."]
    texts = pair if len(searches) == 1 else [x for x in pair for _ in range(2)]
    model, search = drafting(*texts), Searched()
    rollout = answer_one(flare, model, search=search, **settings)
    assert search.queries == searches and rollout.answer == "Rome"
    last = model.requests[-1]
    assert last.prompt.endswith("Question: Who is X?\nAnswer: A is b.")
    assert f"(Title: {searches[-1]} 1)" in last.prompt and last.wants_logp


def test_a_chain_ends_when_its_text_or_its_budget_ends():
    for texts, settings in (
        ([" A is b."], {}),
        ([""], {}),
        ([" A is b. More."] * 2, {"max_tokens": 4}),
    ):
        model = drafting(*texts, p=0.9)
        rollout = answer_one(flare, model, **settings)
        assert (rollout.answer, rollout.outcome) == (None, Outcome.MALFORMED)
        assert len(model.requests) == len(texts)


def test_the_four_examples_end_with_an_answer():
    examples = few_shot("flare").split("\n\n")
    assert len(examples) == 4 and all(map(marked_answer, examples))

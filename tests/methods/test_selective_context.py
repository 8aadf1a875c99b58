"""Selective-Context: passages without what the model could have guessed."""

import math

import numpy as np
import pytest

from rsearch.methods.reading import rag
from rsearch.methods.selective_context import (
    is_informative,
    selective_context,
    split_units,
)
from rsearch.types import Passage
from tests.methods.scripted import ScriptedModel, answer_one, shown

FOUND = (
    Passage("1", "A b\nParis is  big. It is old."),
    Passage("2", "C\nHe left!"),
    Passage("3", "D\n"),
)


@pytest.mark.parametrize(
    ("values", "ratio", "kept"),
    [
        ([1, 4, 2, 3], 0.5, [4, 3]),
        ([2, 2, 2, 5], 0.5, [2, 2, 2, 5]),
        ([1, 2, 3, 4, 5], 0.2, [2, 3, 4, 5]),
        ([1, 2, 3, 4, 5], 0.35, [3, 4, 5]),
        ([1, 2, 3, 4, 5], 0.5, [3, 4, 5]),
        ([1, 2, 3, 4, 5], 0, [1, 2, 3, 4, 5]),
        ([1, 2, 3, 4, 5], 1, [5]),
        ([1, math.nan, 3], 1, [math.nan, 3]),
        ([], 0.5, []),
    ],
)
def test_units_below_the_percentile_are_left_out(values, ratio, kept):
    stays = is_informative(values, ratio)
    assert [v for v, s in zip(values, stays, strict=True) if s] == kept


def test_a_units_value_is_the_mean_or_the_sum_of_its_tokens():
    tokens, information = ("New", "Yo", "rk", " fell"), (0.5, 0.5, 0.5, 1.2)
    for unit_value, value in (("mean", 0.5), ("sum", 1.5)):
        units = split_units(tokens, information, "word", unit_value)
        assert units == [("NewYork", pytest.approx(value)), (" fell", 1.2)]
    assert [t for t, _ in split_units(tokens, information, "token", "mean")] == [
        *tokens
    ]
    (unit,) = split_units(tokens, information, "sentence", "mean")
    assert unit == ("NewYork fell", pytest.approx(0.675))


@pytest.mark.parametrize(
    ("unit_value", "kept"), [("mean", [" fell"]), ("sum", ["NewYork"])]
)
def test_the_mean_drops_a_unit_of_several_tokens_that_the_sum_keeps(unit_value, kept):
    tokens, information = ("New", "Yo", "rk", " fell"), (0.5, 0.5, 0.5, 1.2)
    units = split_units(tokens, information, "word", unit_value)
    stays = is_informative([value for _, value in units], 0.5)
    assert [t for (t, _), s in zip(units, stays, strict=True) if s] == kept


def test_information_is_in_nats():
    logp = np.log([0.5, 0.25, 0.125])
    units = split_units(("a", " b", " c"), -logp, "word", "mean")
    assert [v for _, v in units] == pytest.approx([0.6931, 1.3863, 2.0794], abs=1e-4)


def scoring(information):
    """Return a model whose tokens are words with the space before them."""

    def score(request):
        assert request.prefix == ""
        first, *words = request.text.split(" ")
        tokens = [first, *(f" {word}" for word in words)]
        return tokens, [math.log(information.get(t.strip(), 0.5)) for t in tokens]

    return ScriptedModel(lambda r: "Paris", score=score)


def test_words_and_sentences_that_could_be_guessed_are_not_shown():
    rare = dict.fromkeys(("Paris", "old.", "left!"), 0.125)
    for level, text in (
        ("word", "Doc 1(Title: A b) Paris old.\nDoc 2(Title: C) left!\nDoc 3(T"),
        ("token", "Doc 1(Title: A b) Paris old.\nDoc 2(Title: C) left!\nDoc 3(T"),
        ("sentence", "Doc 1(Title: A b) \nDoc 2(Title: C) He left!\nDoc 3(T"),
    ):
        model = scoring(rare)
        settings = {"level": level, "ratio": 0.7}
        rollout = answer_one(
            selective_context, model, search=lambda q: [FOUND], **settings
        )
        assert text in shown(model.requests[-1]), level
        assert rollout.num_scored == 8 and rollout.answer == "Paris"


@pytest.mark.parametrize("level", ["sentence", "word", "token"])
@pytest.mark.parametrize("found", [FOUND, FOUND[2:], ()])
def test_with_nothing_left_out_it_is_rag_up_to_white_space(level, found):
    asked = []
    for program, settings in (
        (selective_context, {"ratio": 0.0, "level": level}),
        (rag, {}),
    ):
        model = scoring({})
        answer_one(program, model, search=lambda q: [found], **settings)
        asked.append(shown(model.requests[-1]).split())
    assert asked[0] == asked[1]


def test_a_ratio_beyond_1_is_refused():
    with pytest.raises(ValueError, match=r"ratio = 1\.5"):
        answer_one(selective_context, scoring({}), ratio=1.5)

"""LongLLMLingua: passages ranked by the question's likelihood, then compressed."""

import numpy as np
import pytest

from rsearch.methods import longllmlingua as lingua
from rsearch.methods.reading import rag
from rsearch.types import Passage
from tests.methods.scripted import ScriptedModel, Searched, answer_one, shown


@pytest.mark.parametrize(
    "deltas", [[], [0], [0.3, -0.3], [0.3, 0, -0.3], [0.3, 0.15, 0, -0.15, -0.3]]
)
def test_ratios_fall_with_the_rank(deltas):
    num = len(deltas)
    ratios = lingua.passage_ratios([98] * num, (100 * num + 1) / 2, 0.3)
    assert ratios == pytest.approx([0.5 + delta for delta in deltas])


def test_ratios_and_segments_of_three_passages():
    ratios = lingua.passage_ratios([98] * 3, 150.5, 0.3)
    assert ratios == pytest.approx([0.8, 0.5, 0.2])
    assert lingua.passage_ratios([98] * 3, 300, 0.3)[0] == 1
    assert lingua.passage_ratios([98] * 3, -5, 0.0) == [0] * 3
    assert lingua.segment_plan([100] * 3, [0.8, 0.5, 0.2]) == [
        [(100, 0.8), (99, 0.5)],
        [(1, 0.5), (100, 0.2)],
    ]
    assert lingua.segment_plan([0, 599, 1], [1, 0.5, 0]) == [
        [(199, 0.5)],
        [(200, 0.5)],
        [(200, 0.5)],
        [(1, 0)],
    ]


@pytest.mark.parametrize(
    ("ratio", "threshold", "kept"),
    [
        (0.6, 0.5, [2, 1]),
        (0.4, 1, [2]),
        (0.2, 2, []),
        (0, 2, []),
        (1, -np.inf, [0.1, 2, 0.5, -0.3, 1]),
    ],
)
def test_tokens_above_the_threshold_stay(ratio, threshold, kept):
    values = np.array([0.1, 2, 0.5, -0.3, 1])
    assert lingua.contrast_threshold(values, ratio) == threshold
    assert values[values > threshold].tolist() == kept


def model_of(likely=()):
    """Return a model of word tokens that ranks passage 2 first, then 3 and 1."""

    def score(request):
        first, *rest = request.text.split(" ")
        tokens = [first, *(f" {word}" for word in rest)]
        if lingua.CUE in request.text:
            order = ["X? 2)", "X? 3)", "X? 1)"]
            rank = [i for i, x in enumerate(order) if x in request.prefix]
            return tokens, [-1.0 - rank[0]] * len(tokens)
        is_asked = request.prefix.startswith("Who is X?\n\n")
        # No two values are equal, since only those above the threshold stay.
        return tokens, [
            -1.0 - i / 1e4 if is_asked and t.strip() in likely else -2.0 - i / 1e5
            for i, t in enumerate(tokens)
        ]

    return ScriptedModel(lambda r: "Paris", score=score)


@pytest.mark.parametrize(("rate", "num"), [(0.339, 2), (0.342, 3), (1, 3)])
def test_the_budget_keeps_the_passage_that_crosses_it(rate, num):
    """For 3 + 3 x 100 tokens, a rate of 0.34 has the target 0.34 x 303 - 3 = 100."""
    passages = [Passage(f"{i}", f"X? {i}\n" + "word " * 96) for i in (1, 2, 3)]
    model = model_of()
    answer_one(lingua.longllmlingua, model, search=lambda q: [passages], rate=rate)
    assert model.requests[4].text.count("Title") == num


def test_four_of_five_passages_are_within_the_budget():
    """The target is 0.55 (1 + 12 + 5 x 100) - 1 - 12 = 269.15; passages exceed it."""
    assert lingua.num_within_budget([100] * 5, 269.15 + lingua.SLACK) == 4
    # Here the question has all 13 tokens, since there is no instruction.
    passages = [Passage(f"{i}", f"X? {i % 3 + 1}\n" + "word " * 96) for i in range(5)]
    model, asked = model_of(), " ".join(["Who is X?", *["b"] * 10])
    answer_one(lingua.longllmlingua, model, text=asked, search=lambda q: [passages])
    assert model.requests[6].text.count("Title") == 4


def test_at_rate_1_the_ratio_of_all_tokens_is_below_1():
    """tau = S / (S + 2N + 1), so rate 1 without a spread is a case of its own."""
    ratios = lingua.passage_ratios([98] * 5, 490, 0.0)
    assert ratios == pytest.approx([490 / (490 + 2 * 5 + 1)] * 5)


def test_without_compression_it_is_rag_in_the_order_of_the_ranks():
    def again(queries):
        first, second, third = Searched()(queries)[0]
        return [(second, third, first)]

    asked = []
    for program, search, settings in (
        (lingua.longllmlingua, Searched(), {"rate": 1.0, "spread": 0.0}),
        (rag, again, {}),
    ):
        model = model_of()
        answer_one(program, model, search=search, **settings)
        asked.append(model.requests[-1])
    assert asked[0] == asked[1]


def test_words_that_the_question_makes_likelier_stay():
    model = model_of({"text", "3)"})
    rollout = answer_one(lingua.longllmlingua, model, rate=0.9, spread=0.0)
    text = shown(model.requests[-1])
    assert "text" in text and "Title" not in text and rollout.answer == "Paris"
    assert text.count("Who is X?") == 1 and rollout.num_scored > 0


def test_later_segments_are_scored_after_what_is_left_of_earlier_ones():
    passage = Passage("1", "X? 2)\n" + "dull good " * 150)

    def search(queries):
        return [(passage,)]

    model = model_of({"good"})
    answer_one(lingua.longllmlingua, model, search=search, rate=0.6)
    *_, alone, behind, asked = model.requests
    assert behind.prefix == "Who is X?\n\n" + alone.prefix and "good" in alone.prefix
    assert "dull" not in alone.prefix and "dull" in alone.text
    assert "dull" not in shown(asked) and "good" in shown(asked)


def test_a_segment_after_which_nothing_is_left_is_no_context_of_the_next():
    passage = Passage("1", "X? 2)\n" + "dull " * 300)
    model = model_of()
    # Of all tokens, only those above the second largest contrast stay.
    settings = {"search": lambda queries: [(passage,)], "rate": 0.017, "spread": 0.0}
    answer_one(lingua.longllmlingua, model, **settings)
    alone, behind = model.requests[-3:-1]
    assert (alone.prefix, behind.prefix) == ("", "Who is X?\n\n")
    assert 0 < len(alone.text.split()) < 300


@pytest.mark.parametrize(("name", "value"), [("rate", float("nan")), ("spread", 2.0)])
def test_a_setting_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        answer_one(lingua.longllmlingua, model_of(), **{name: value})


def test_without_passages_it_is_rag():
    asked = []
    for program in (lingua.longllmlingua, rag):
        model = model_of()
        answer_one(program, model, search=Searched(0))
        asked.append(model.requests[-1])
    assert asked[0] == asked[1]

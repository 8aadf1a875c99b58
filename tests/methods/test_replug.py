"""RePlug: a mixture of the predictions for each passage."""

import pytest

from rsearch.llm.requests import Mix
from rsearch.methods.reading import rag, rag_messages
from rsearch.methods.replug import mixture_weights, replug
from rsearch.types import Outcome, Passage
from tests.methods.scripted import ScriptedModel, Searched, answer_one, kit


def scored(*scores):
    return tuple(Passage(str(i), f"T{i}\nx{i}", s) for i, s in enumerate(scores))


@pytest.mark.parametrize(
    ("scores", "temperature", "weights"),
    [
        ((0.86, 0.84, 0.80), 1.0, (0.342, 0.336, 0.322)),
        ((2, 1, 0), 0.01, (1, 0, 0)),
        ((1, -0.5), 1.0, (0.8176, 0.1824)),
        ((0, 0), 1.0, (0.5, 0.5)),
        ((1e4,), 1.0, (1,)),
        ((), 1.0, ()),
    ],
)
def test_weights_are_the_softmax_of_the_scores(scores, temperature, weights):
    result = mixture_weights(scored(*scores), temperature)
    assert result == pytest.approx(weights, abs=6e-4)


def test_weights_have_the_four_digits_of_the_worked_example():
    result = mixture_weights(scored(2, 1, 0), 1.0)
    assert result == pytest.approx((0.6652, 0.2447, 0.0900), abs=5e-5)


def test_each_passage_has_its_own_prompt_in_one_mixture():
    model = ScriptedModel(lambda r: " Paris ")
    passages = scored(2, 1, -2000)
    rollout = answer_one(replug, model, search=lambda q: [passages])
    (request,) = model.requests
    assert isinstance(request, Mix) and request.max_tokens == 8
    assert request.prompts == tuple(
        rag_messages(kit(), "Who is X?", (p,)) for p in passages[:2]
    )
    assert sum(request.weights) == pytest.approx(1) and min(request.weights) > 0
    assert (rollout.answer, rollout.outcome) == ("Paris", Outcome.ANSWERED)


def test_with_one_passage_or_none_it_is_rag():
    for num, settings in ((3, {"top_k": 1}), (0, {})):
        asked = []
        for program in (replug, rag):
            model, search = ScriptedModel(lambda r: "Paris"), Searched(num)
            rollout = answer_one(program, model, search=search, **settings)
            (request,) = model.requests
            prompts = getattr(request, "prompts", None) or (request.prompt,)
            asked.append((prompts, request.max_tokens, rollout.answer))
        assert asked[0] == asked[1] and len(asked[0][0]) == 1


def test_passages_without_scores_and_too_low_a_temperature_are_refused():
    for passages, settings, words in (
        (scored(1.0, None), {}, "'replug'.*'1'"),
        (scored(1.0), {"temperature": 0.0}, r"temperature = 0\.0"),
        (scored(20.0, 1.0), {"temperature": 1e-310}, r"temperature = 1e-310"),
    ):
        with pytest.raises(ValueError, match=words):
            answer_one(
                replug, ScriptedModel(str), search=lambda q, p=passages: [p], **settings
            )

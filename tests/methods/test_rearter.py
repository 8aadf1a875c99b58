"""ReARTeR: steps chosen and rewritten by a value that is learnt from labels."""

import functools
import json
import re

import numpy as np
import pytest

from rsearch.methods.rearter import CRITICISE, first_step_value, label_steps, rearter
from rsearch.methods.self_ask import self_ask
from rsearch.methods.step_values import features, fit_logistic
from rsearch.methods.table import demanded_inputs, needs_samples
from rsearch.types import Outcome
from tests.methods.scripted import ScriptedModel, Searched, answer_one, kit, shown

STEP = "Follow up: is it {}?\nIntermediate answer: Bo."
RATES = {digit: digit / 10 for digit in range(1, 10)}


def embed(texts):
    """Return unit vectors, each along its text's first digit, or 0 without a digit."""
    digits = [re.search(r"\d", text) for text in texts]
    return np.eye(10)[[0 if d is None else int(d[0]) for d in digits]]


KIT = kit(embed=embed, embed_passages=embed)


def write_labels(path, rates=RATES):
    """Write labels of steps that have one digit each; return the path."""
    chains = [[STEP.format(digit)] for digit in rates]
    row = {"question": "When?", "chains": chains, "success": [*rates.values()]}
    path.write_text(json.dumps(row) + "\n")
    return str(path)


def asks(digit):
    """Return a step in the words of the model."""
    return f"\nFollow up: is it {digit}?\n"


def answers(answer):
    return f"\nSo the final answer is: {answer}\n"


def asking(*replies, critic="It is vague.", rewritten=""):
    """Return a model that continues raw texts with `replies` and also answers chats."""
    waiting = list(replies)

    def reply(request):
        if isinstance(request.prompt, str):
            return waiting.pop(0)
        if CRITICISE in shown(request):
            return critic
        return rewritten if "A critic says" in shown(request) else "Bo"

    return ScriptedModel(reply)


def raw_prompts(model):
    """Return what follows the examples in each raw text that the model was shown."""
    prompts = [r.prompt for r in model.requests if isinstance(r.prompt, str)]
    return [p.rpartition("follow up questions needed here:")[2] for p in prompts]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4, 0.8], 0.6),
        ([0.4, 0.42, 0.9], 0.41),
        ([0.2, 0.4, 0.8], 0.4),
        ([0.6, 0.3], 0.45),
        ([0.5], 0.5),
    ],
)
def test_the_value_of_a_path_looks_ahead_until_its_steps_stop_rising(values, expected):
    assert first_step_value(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("replies", "answer"),
    [
        ((asks(1), asks(2), answers("Al")), "Al"),
        ((" No." + answers("Al"),), "Al"),
        (("Nothing.",), None),
        ((asks(1), "Nothing."), None),
        ([asks(digit) for digit in range(1, 6)], None),
    ],
)
def test_one_path_without_a_threshold_is_a_chain_of_self_ask(tmp_path, replies, answer):
    models, searches = [], []
    for program, settings in (
        (
            rearter,
            {"paths": 1, "threshold": 0.0, "labels": write_labels(tmp_path / "t")},
        ),
        (self_ask, {"rounds": 4, "forces_answer": False}),
    ):
        models.append(asking(*replies))
        searches.append(Searched())
        rollout = answer_one(
            program, models[-1], search=searches[-1], used=KIT, top_k=1, **settings
        )
        assert rollout.answer == answer
        assert (rollout.outcome == Outcome.MALFORMED) == (answer is None)
        assert rollout.is_at_limit == (len(replies) == 5)
    assert models[0].requests == models[1].requests
    assert searches[0].queries == searches[1].queries


def test_the_first_step_of_the_best_path_is_taken(tmp_path):
    # The paths' values are 5, 4, 6 at first, and (5 + 1) / 2, (4 + 9) / 2, (6 + 2) / 2
    # with one step of lookahead.
    model = asking(*map(asks, "546192"), answers(7), answers(9), answers(8))
    search = Searched()
    rollout = answer_one(
        rearter,
        model,
        search=search,
        used=KIT,
        labels=write_labels(tmp_path / "t"),
        lookahead=1,
        threshold=0.0,
    )
    assert rollout.answer == "9"
    assert search.queries == [f"is it {digit}?" for digit in "546192"]
    prompts = raw_prompts(model)
    taken = f"\n{STEP.format(4)}"
    assert prompts[:3] == ["", "", ""] and prompts[6:] == [taken] * 3
    assert prompts[3:6] == [f"\n{STEP.format(digit)}" for digit in "546"]
    generated = [s.text for s in rollout.segments if s.source.name == "POLICY"]
    assert len(generated) == 9 + 6  # over all paths, since each of them costs


@pytest.mark.parametrize(
    ("rewritten", "critic", "taken"),
    [
        ("Better: Follow up: is it 7?", "Vague.", " Yes.\n" + STEP.format(7)),
        ("I cannot.", "Vague.", "\n" + STEP.format(1)),
        ("Follow up: is it 7?", "<think>cut", "\n" + STEP.format(1)),
        ("So the final answer is: Cy.", "Vague.", None),
    ],
)
def test_a_step_of_low_value_is_criticised_and_rewritten_once(
    tmp_path, rewritten, critic, taken
):
    model = asking(asks(1), asks(2), answers("Al"), critic=critic, rewritten=rewritten)
    rollout = answer_one(
        rearter,
        model,
        used=KIT,
        labels=write_labels(tmp_path / "t", {1: 0.2, 2: 0.2, 7: 0.9}),
        paths=1,
        lookahead=1,
        threshold=0.45,
    )
    criticising = [r for r in model.requests if CRITICISE in shown(r)]
    words = "Question: Who is X?", STEP.format(1), STEP.format(2)
    assert all(word in shown(criticising[0]) for word in words)
    assert rollout.answer == ("Cy" if taken is None else "Al")
    assert raw_prompts(model)[2:] == ([] if taken is None else [taken])


def test_labels_are_shares_of_continuations_that_end_in_an_exact_match():
    model = asking(
        *(asks(1), "Nothing."),  # two traces
        answers("the gold."),  # the first continues
        *(answers("gold"), asks(2), "No.", answers("Y")),  # four from its step
        *(answers("x"),),
    )
    program = functools.partial(label_steps, golden={"q": ("X", "Gold")})
    row = json.loads(answer_one(program, model, used=KIT).answer)
    first, final = STEP.format(1), "So the final answer is: the gold."
    assert row == {
        "question": "Who is X?",
        "chains": [[first], ["Nothing."], [first, final]],
        "success": [0.5, 0.0, 1.0],
    }


@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
def test_the_gradient_at_the_fitted_regression_is_zero(penalty):
    rng = np.random.default_rng(0)
    questions, chains = rng.normal(size=(2, 20, 4))
    questions /= np.linalg.norm(questions, axis=1, keepdims=True)
    chains /= np.linalg.norm(chains, axis=1, keepdims=True)
    inputs, rates = features(questions, chains), rng.uniform(size=20)
    assert (np.square(inputs).sum(axis=1) <= 4).all()
    weights = fit_logistic(inputs, rates, penalty)
    probs = 1 / (1 + np.exp(-inputs @ weights))
    gradient = inputs.T @ (probs - rates) / 20 + penalty * weights
    assert np.abs(gradient).max() < 1e-4 * penalty**0.5


ROW = {"question": "Who", "chains": [["a"], ["b"]], "success": [0.5, 1]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (None, "labels = ''"),
        ("", "no steps"),
        ({**ROW, "success": [0.5, 0.5]}, "success = 0.5"),
        ([], "labels:1.*question, chains, success"),
        ({**ROW, "id": "1"}, "labels:1.*question, chains, success"),
        ({**ROW, "question": 3}, "labels:1.*question = 3"),
        ({**ROW, "chains": [["a"], []]}, "labels:1.*chains"),
        ({**ROW, "chains": ["a", "b"]}, "labels:1.*chains"),
        ({**ROW, "success": [1]}, "labels:1.*success"),
        ({**ROW, "success": [True, 0]}, "labels:1.*success"),
        ({**ROW, "success": [1.5, 0]}, "labels:1.*success"),
        (
            {**ROW, "chains": [["so"], ["Follow up: x"]], "success": [0, 0]},
            "success = 0.0 of all steps.*1 of 2 are a follow-up or a final answer",
        ),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path, row, words):
    path = tmp_path / "labels"
    if row is not None:
        path.write_text(row if row == "" else json.dumps(row))
    spelling = "rearter" + ("" if row is None else f":labels={path}")
    with pytest.raises(ValueError, match=words):
        demanded_inputs([spelling])


@pytest.mark.parametrize(
    "setting",
    [
        {"paths": 0},
        {"lookahead": -1},
        {"steps": 0},
        {"threshold": 1.5},
        {"penalty": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, setting):
    ((name, value),) = setting.items()
    labels = write_labels(tmp_path / "t")
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        answer_one(rearter, asking(), used=KIT, labels=labels, **setting)


def test_inputs_are_the_labels_and_a_labelled_question_is_refused(tmp_path):
    spelling = f"rearter:labels={write_labels(tmp_path / 't')}"
    before = demanded_inputs([spelling])
    assert list(before) == ["eval.rearter"]
    with pytest.raises(ValueError, match="question q is among"):
        answer_one(
            rearter, asking(), text="When?", used=KIT, labels=str(tmp_path / "t")
        )
    write_labels(tmp_path / "t", {1: 0.0, 2: 1.0})
    assert demanded_inputs([spelling]) != before


def test_several_paths_need_samples():
    assert needs_samples("rearter:labels=x") and not needs_samples("self_ask")
    assert not needs_samples("rearter:paths=1:labels=x")

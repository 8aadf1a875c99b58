"""A judge at an endpoint is called, and paid for, only once for each answer."""

import pytest

from rsearch.config import recipes
from rsearch.evaluation.evaluator import Evaluator
from rsearch.setup.agents import load_agent
from tests.evaluation.test_scoring import group
from tests.llm.test_endpoint import ending, reply, serving

URL = "https://judge.example/v1"
REPLIES = {"a": "True", "b": "False", "c": "No idea."}  # others fail


class Judge:
    """A judge that replies by the predicted answer, and interrupts at `stops_at`."""

    def __init__(self, stops_at=None):
        self.asked, self.stops_at = [], stops_at

    def __call__(self, chats):
        texts = [chat[0]["content"].rpartition(": ")[2] for chat in chats]
        if self.stops_at in texts:
            raise KeyboardInterrupt
        self.asked += texts
        return [REPLIES.get(text[0]) for text in texts]


def judge(answers, folder, judging, **overrides):
    """Judge these answers in a new evaluation, and return the verdicts."""
    return judged(answers, folder, lambda config: judging, **overrides)[1]


def judged(answers, folder, load, **overrides):
    """Return (fields of the row, verdicts) of a new evaluation.

    Args:
        load: (configuration) -> the judge.
    """
    settings = {"source": URL, "name": "m", "max_concurrent": 1}
    fields = {f"models.eval_judge.{name}": x for name, x in settings.items()}
    named = {name.replace("__", "."): x for name, x in overrides.items()}
    config = recipes.apply_overrides(recipes.load("configs/base.py"), fields | named)
    evaluator = Evaluator(
        config,
        [],
        too_long=[],
        search=None,
        make_engine=dict,
        make_model=dict,
        kit=None,
        made_from=None,
        load_model=lambda role: load(config),
        health=None,
        score=None,
        inputs={},
        sampling={},
    )
    groups = [group(0, answer, ("Paris",)) for answer in answers]
    return evaluator.judge(groups, folder)


def test_a_repeated_evaluation_repeats_only_failed_calls(tmp_path):
    first, second = Judge(), Judge()
    answers = ["a", "b", "c", "down", "a"]
    verdicts = judge(answers, tmp_path, first)
    assert [v.score for v in verdicts] == [1, 0, 0, None, 1]
    assert first.asked == answers[:4]
    assert judge([*answers, "a new one"], tmp_path, second)[:5] == verdicts
    assert second.asked == ["down", "a new one"]


def test_an_evaluation_that_is_killed_loses_only_the_calls_in_flight(tmp_path):
    answers = [f"a{i}" for i in range(100)]
    first, second = Judge(stops_at="a70"), Judge()
    with pytest.raises(KeyboardInterrupt):
        judge(answers, tmp_path, first)
    assert len(first.asked) >= 50
    judge(answers, tmp_path, second)
    assert first.asked + second.asked == answers


@pytest.mark.parametrize(
    "change",
    [
        {"models__eval_judge__source": "https://other.example/v1"},
        {"models__eval_judge__name": "other"},
        {"models__eval_judge__temperature": 0.5},
        {"models__eval_judge__top_p": 0.5},
        {"models__eval_judge__max_reply_tokens": 8},
        {"eval__judge_prompt": "graded"},
        {"eval__judge_golds": "any"},
        # A local model is called again: it is free, and its weights may have changed.
        {"models__eval_judge__source": "stage:rl"},
    ],
)
def test_another_judge_is_called_and_the_firsts_verdicts_are_kept(tmp_path, change):
    for overrides, num_asked in (({}, 1), (change, 1), ({}, 0)):
        judging = Judge()
        judge(["a"], tmp_path, judging, **overrides)
        assert len(judging.asked) == num_asked


def test_the_way_a_judge_is_reached_may_change(tmp_path):
    judge(["a"], tmp_path, Judge())
    judging = Judge()
    settings = {"max_concurrent": 2, "timeout_seconds": 1.0, "api_key_env": "KEY"}
    changes = {f"models__eval_judge__{name}": x for name, x in settings.items()}
    judge(["a"], tmp_path, judging, **changes)
    assert judging.asked == []


# {answer: (the endpoint's reply, its score; None if there is no verdict)}
AT_ENDPOINT = {
    "is it": (reply("True"), 1),
    "is it.": (reply("true."), 1),
    "Rome": (reply("False"), 0),
    "in Rome": (reply("The answer is true"), None),
    "near Rome": (reply("Not true"), None),
    "thinks": (reply("<think>False? No.</think>\n\nTrue"), 1),
    "thinks elsewhere": (ending("True", "stop", reasoning_content="False?"), 1),
    "apologises": (reply("I'm sorry, I cannot judge this."), None),
    "is cut": (ending("True, because the", "length"), 1),
    "Paris": (reply("False"), 0),  # a lie: the answer is an exact match
}
NO_REPLY = {
    "says nothing": ending("", "stop"),
    "refuses": ending(None, "stop", refusal="I cannot help with that."),
    "is cut in a thought": ending("<think>True", "length"),
    "never stops thinking": ending("<think>True", "stop"),
}


def test_a_judge_at_an_endpoint_thinks_refuses_cuts_and_lies(tmp_path):
    """Only the first word after its thoughts counts; no reply is no score."""

    def behave(number, body):
        answer = body["messages"][0]["content"].rpartition(": ")[2]
        return NO_REPLY.get(answer) or AT_ENDPOINT[answer][0]

    answers = [*AT_ENDPOINT, *NO_REPLY, "", None]
    with serving(behave) as endpoint:
        row, verdicts = judged(
            answers,
            tmp_path,
            lambda config: load_agent(config, "eval_judge", None),
            models__eval_judge__source=endpoint.url,
            models__eval_judge__max_retries=0,
        )
    scores = [score for _, score in AT_ENDPOINT.values()]
    expected = [score or 0 for score in scores] + [None] * len(NO_REPLY) + [0, 0]
    assert [v.score for v in verdicts] == expected
    assert [not v.is_parsed for v in verdicts[: len(scores)]] == [
        score is None for score in scores
    ]
    assert len(endpoint.requests) == len(AT_ENDPOINT) + len(NO_REPLY)
    assert {body["temperature"] for _, body in endpoint.requests} == {0.0}
    assert row["judge"] == pytest.approx(5 / 12)
    names = "unparsed", "failed", "right_em_wrong", "wrong_em_right"
    assert [row[f"judge_{name}"] for name in names] == [3, 4, 5, 1]
    # Of the nine that have a verdict, only "Rome" and two blank ones agree with it.
    assert row["judge_agreement"] == pytest.approx(3 / 9)

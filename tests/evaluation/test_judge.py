"""A judge of answers: what counts as its verdict, and the prompts it receives."""

import gzip
import json
import random

import pytest

from rsearch.config.spec import base_fields
from rsearch.evaluation.judge import (
    GOLDS,
    Prediction,
    judge_answers,
    parse_reply,
    summarize_verdicts,
)
from rsearch.protocols.judging import PROMPTS, judging_messages

PARIS = Prediction("Where {golden}?", ("Paris", "Lutetia"), "paris, France")


def judging(replies):
    """Return (a judge that replies by the predicted answer, prompts it receives)."""
    heard = []

    def ask(chats):
        heard.extend(chat[0]["content"] for chat in chats)
        return [replies[c[0]["content"].rpartition(": ")[2]] for c in chats]

    return ask, heard


def verdict(*replies, golds="list", prompt="r1_searcher"):
    rest = iter(replies)
    prediction = PARIS._replace(
        golden_answers=tuple(f"g{i}" for i in range(len(replies)))
    )
    (actual,) = judge_answers(
        [prediction],
        lambda chats: [next(rest) for _ in chats],
        prompt=prompt,
        golds=golds,
    )
    return actual


@pytest.mark.parametrize(
    ("prompt", "reply", "score"),
    [
        ("r1_searcher", "True", 1),
        ("r1_searcher", "true.", 1),
        ("r1_searcher", "False", 0),
        ("r1_searcher", "The answer is true", None),
        ("r1_searcher", "Not true", None),
        ("r1_searcher", "", None),
        ("r1_searcher", "\n **TRUE**, since both name it", 1),
        ("r1_searcher", "False: it is not true", 0),
        ("r1_searcher", "True/False", None),
        ("r1_searcher", "Truest", None),
        ("r1_searcher", "1", None),
        ("r1_searcher", "<think>It is False.</think>\n\nTrue", 1),
        ("r1_searcher", "True <think> or is it", None),
        ("r1_searcher", "<think>True", None),
        ("r1_searcher", "<think>True</think>", None),
        ("r1_searcher", "I'm sorry, I can't help with that.", None),
        ("graded", "0.5", 0.5),
        ("graded", "1.", 1),
        ("graded", "0", 0),
        ("graded", "0.50001", None),
        ("graded", "-1", None),
        ("graded", "1/2", None),
        ("graded", "True", None),
        # A half in the notation of other languages is not the grade 0.
        ("graded", "0,5", None),
        ("graded", "0, since it is Lyon", 0),
    ],
)
def test_the_first_word_of_a_reply_is_its_verdict(prompt, reply, score):
    assert parse_reply(reply, prompt=prompt) == score
    actual = verdict(reply, prompt=prompt)
    assert actual == (score or 0, score is not None, (reply,))


@pytest.mark.parametrize(
    ("prompt", "replies", "score", "is_parsed"),
    [
        ("r1_searcher", ("False", "True"), 1, True),
        ("r1_searcher", ("False", "False"), 0, True),
        ("r1_searcher", ("what", "True"), 1, True),
        ("r1_searcher", ("what", "False"), 0, False),
        ("r1_searcher", (None, "True"), 1, True),
        ("r1_searcher", (None, "False"), None, True),
        ("r1_searcher", (None, "what"), None, True),
        ("graded", ("0.5", "0"), 0.5, True),
        ("graded", ("0.5", None), None, True),
    ],
)
def test_any_takes_the_best_verdict_of_one_call_per_golden_answer(
    prompt, replies, score, is_parsed
):
    actual = verdict(*replies, golds="any", prompt=prompt)
    assert actual == (score, is_parsed, replies)


def test_a_failed_call_gives_no_score():
    assert verdict(None).score is None


@pytest.mark.parametrize(
    ("field", "values"), [("eval.judge_prompt", PROMPTS), ("eval.judge_golds", GOLDS)]
)
def test_the_configuration_can_name_every_prompt_and_use_of_golden_answers(
    field, values
):
    assert all(map(base_fields()[field].bound.allows, values))


def test_the_prompt_is_the_published_one_and_texts_are_not_read_as_fields():
    (message,) = judging_messages(*PARIS, prompt="r1_searcher")
    assert message["role"] == "user"
    assert message["content"] == (
        "Given a Question and its Golden Answer, verify whether the Predicted Answer "
        "is correct. The prediction is correct if it fully aligns with the meaning and "
        "key information of the Golden Answer. Respond with True if the prediction is "
        "correct and False otherwise.\n\nQuestion: Where {golden}?\n\nGolden Answer: "
        "Paris or Lutetia\n\nPredicted Answer: paris, France"
    )


@pytest.mark.parametrize(("golds", "num_chats"), [("list", 2), ("any", 4)])
def test_equal_predictions_are_judged_once_and_blank_ones_are_wrong(golds, num_chats):
    nothing = [PARIS._replace(answer=answer) for answer in (None, "", " \n")]
    ask, heard = judging({"paris, France": "True", "Rome": "False"})
    items = [PARIS, PARIS._replace(answer="Rome"), PARIS, *nothing]
    actual = judge_answers(items, ask, prompt="r1_searcher", golds=golds)
    assert [v.score for v in actual] == [1, 0, 1, 0, 0, 0]
    assert all(v.is_parsed for v in actual)
    assert len(heard) == len(set(heard)) == num_chats

    def never(chats):
        raise AssertionError(chats)

    actual = judge_answers(nothing, never, prompt="r1_searcher", golds=golds)
    assert actual == [(0, True, ())] * 3


def test_a_prediction_is_judged_without_its_thoughts():
    texts = "<think>Rome?</think>\nLyon", "<think>Paris", "<think>Paris</think>"
    heard = []

    def ask(chats):
        heard.extend(chat[0]["content"] for chat in chats)
        return ["True"] * len(chats)

    items = [PARIS._replace(answer=text) for text in texts]
    verdicts = judge_answers(items, ask, prompt="r1_searcher", golds="list")
    assert [v.score for v in verdicts] == [1, 0, 0]
    (text,) = heard
    assert "Lyon" in text and "Rome" not in text


def test_verdicts_depend_on_neither_order_nor_batch():
    words = {"a": "True", "b": "False", "c": "what", "d": None, "e": "<think>"}
    items = [PARIS._replace(answer=word) for word in words] * 2

    def scores(items):
        ask = judging(words)[0]
        return judge_answers(items, ask, prompt="r1_searcher", golds="list")

    expected = scores(items)
    assert [scores([item])[0] for item in items] == expected
    order = random.Random(0).sample(range(len(items)), len(items))
    assert scores([items[i] for i in order]) == [expected[i] for i in order]


@pytest.mark.parametrize("replies", [[], ["True", "True"]])
def test_a_judge_with_another_number_of_replies_is_refused(replies):
    with pytest.raises(ValueError, match=f"{len(replies)} replies to 1 chats"):
        judge_answers([PARIS], lambda chats: replies, prompt="graded", golds="list")


def test_a_summary_counts_unparsed_replies_and_failed_calls_separately():
    verdicts = [verdict(r) for r in ("True", "True", "False", "False", "what", None)]
    assert summarize_verdicts(verdicts, [1, 0, 1, 0, 1, 0], [0, 2, 9, 9, 9, 9]) == {
        "judge": 0.4,
        "judge_agreement": 0.5,
        "judge_unparsed": 1,
        "judge_failed": 1,
        "judge_right_em_wrong": 1,
        "judge_wrong_em_right": 1,
        "judge_right_steps": (1 + 3) / 2,  # the searches and the answer
    }
    summary = summarize_verdicts([verdict(None)], [1], [1])
    assert summary["judge"] is None and summary["judge_agreement"] is None
    summary = summarize_verdicts([verdict("0.5", prompt="graded")], [0], [1])
    assert summary["judge"] == 0.5 and summary["judge_right_steps"] is None


def test_released_replies_give_the_published_score(shared_data):
    path = shared_data / "published" / "r1_searcher_hotpotqa_qwen.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        replies = [json.loads(line)["judge"] for line in lines]
    scores = [parse_reply(reply, prompt="r1_searcher") for reply in replies]
    assert len(scores) == 500 and sum(score or 0 for score in scores) == 375

"""One runner drives the programs of all questions, in batches."""

import dataclasses
import functools
import itertools
import json
import random
import re
import time
import zlib

import numpy as np
import pytest

from rsearch.evaluation.scoring import score_groups
from rsearch.hosts import preemption
from rsearch.llm.requests import Failure, Generate, Mix, Score, Search
from rsearch.methods import runner
from rsearch.methods.base import Note
from rsearch.methods.runner import run_program
from rsearch.methods.table import (
    METHODS,
    check_methods,
    make_program,
    method_settings,
)
from rsearch.rollout.records import RolloutCache, decode_groups, encode_groups
from rsearch.runtime.journal import AppendLog
from rsearch.types import Group, Outcome, Question
from tests.llm.test_endpoint import serving
from tests.llm.test_remote_model import asking, choice
from tests.methods.scripted import ScriptedModel, Searched, completion, kit, shown

QUESTIONS = [Question(str(i), f"Who is {i}?", ("gold",)) for i in range(30)]


def wandering(question, kit, *, rounds=3):
    """Ask and search together for up to `rounds` rounds, as the replies decide."""
    trail = question.text
    for _ in range(rounds):
        first, second = yield [Generate(trail, 8), Search((trail,), 2)]
        trail = f"{first.text}|{second[0][0].id}"
        if hash_of(trail) % 3 == 0:
            break
    (last,) = yield [Generate(trail, 8)]
    return last.text or None


def hash_of(text):
    return sum(map(ord, text))


def reply(request):
    return f"r{hash_of(shown(request)) % 1000}"


def run(program=wandering, questions=QUESTIONS, **settings):
    fields = dict(kit=kit(), model=ScriptedModel(reply), search=Searched())
    return run_program(program, questions, **fields | settings)


def answers(groups):
    return {g.question.id: g.rollouts[0].answer for g in groups}


def test_neither_question_order_nor_batch_rows_change_an_answer():
    expected = answers(run())
    assert len(set(expected.values())) > 10
    for num_rows in (1, 3, 64):
        mixed = random.Random(num_rows).sample(QUESTIONS, len(QUESTIONS))
        model = ScriptedModel(reply, num_rows=num_rows)
        assert answers(run(questions=mixed, model=model)) == expected
        assert max(model.batches) == min(4 * num_rows, len(QUESTIONS))


def test_delays_of_an_endpoint_and_of_a_search_change_no_answer():
    expected = answers(run())

    def delay(text, salt):
        time.sleep(zlib.crc32(f"{salt} {text}".encode()) % 21 / 1000)

    for salt, concurrency in ((1, 1), (2, 8), (3, 64)):
        finished, searched = [], Searched()

        def behave(number, body, salt=salt, finished=finished):
            delay(body["prompt"], salt)
            finished.append(body["prompt"])
            return choice(text=f"r{hash_of(body['prompt']) % 1000}")

        def search(queries, salt=salt, searched=searched):
            delay(queries[0], salt)
            return searched(queries)

        with serving(behave) as endpoint:
            model = asking(endpoint.url, concurrency=concurrency)
            assert answers(run(model=model, search=search)) == expected
        first = [q.text for q in QUESTIONS]
        in_order = [text for text in finished if text in first] == first
        assert in_order == (concurrency == 1)


@pytest.mark.parametrize("num_uncounted", [0, 1])
def test_costs_at_an_endpoint_are_its_counts_or_unknown(num_uncounted):
    def asking_twice(question, kit):
        yield [Generate(question.text, 8)] * 2
        return "x"

    def behave(number, body):
        is_counted = number >= num_uncounted
        usage = {"prompt_tokens": 10, "completion_tokens": 3} if is_counted else None
        return choice(text="x", usage=usage)

    with serving(behave) as endpoint:
        model = asking(endpoint.url, concurrency=1)
        groups = run(asking_twice, QUESTIONS[:2], model=model)
    row = score_groups(groups, normalize="squad")
    counts = [row[name] for name in ("prompt_tokens", "policy_tokens", "tokens")]
    assert counts == ([None] * 3 if num_uncounted else [20, 6, 26])
    assert row["model_calls"] == 2


def test_each_sample_of_a_question_has_draws_of_its_own(tmp_path):
    """They depend neither on the rest of the batch nor on answers before a kill."""

    def drawn(request):
        return f"{reply(request)} {hash(request.draw) % 1000}"

    draws = [(7, 0), (7, 1)]
    everything = run(model=ScriptedModel(drawn), draws=draws)
    assert [len(group.rollouts) for group in everything] == [2] * len(QUESTIONS)
    first = answers(everything)
    assert first == answers(
        run(model=ScriptedModel(drawn, num_rows=1), draws=draws[:1])
    )
    second = {g.question.id: g.rollouts[1].answer for g in everything}
    assert all(second[name] != answer for name, answer in first.items())
    # Two questions with the same text.
    twins = [Question(name, "Who?", ("gold",)) for name in "ab"]
    assert len({*answers(run(questions=twins, draws=draws)).values()}) == 1
    model = ScriptedModel(drawn)
    assert len({*answers(run(questions=twins, draws=draws, model=model)).values()}) == 2

    cache = RolloutCache(AppendLog(tmp_path, "answers"), [7])
    for i in (0, 5):
        cache.put(QUESTIONS[i], 1, everything[i].rollouts[1])
    cache = RolloutCache(AppendLog(tmp_path, "answers"), [7])
    again = run(model=ScriptedModel(drawn), draws=draws, cache=cache)
    assert cache.num_reused == 2 and encode_groups(again) == encode_groups(everything)


def test_an_answer_is_recorded_while_others_of_its_batch_are_written(tmp_path):
    """After a kill in the middle of a batch, only the others are asked again."""

    class Killed(Exception):
        pass

    class KilledModel(ScriptedModel):
        def generate(self, requests):
            for results in super().generate(requests):
                yield results[20:]
                raise Killed

    def asking(question, kit):
        return (yield Generate(question.text, 8)).text

    expected = answers(run(asking))
    with pytest.raises(Killed):
        run(
            asking,
            model=KilledModel(reply, num_rows=64),
            cache=RolloutCache(AppendLog(tmp_path, "answers"), [7]),
        )
    model = ScriptedModel(reply, num_rows=64)
    cache = RolloutCache(AppendLog(tmp_path, "answers"), [7])
    assert answers(run(asking, model=model, cache=cache)) == expected
    assert cache.num_reused == 10 and model.batches == [20]


def test_a_request_to_stop_acts_before_all_replies_are_written(monkeypatch):
    num_replies = 0

    class SlowModel(ScriptedModel):
        def generate(self, requests):
            nonlocal num_replies
            for result in itertools.chain(*super().generate(requests)):
                num_replies += 1
                if num_replies == 3:
                    monkeypatch.setattr(preemption, "is_stop_requested", lambda: True)
                yield [result]

    with pytest.raises(preemption.PreemptedError):
        run(model=SlowModel(reply, num_rows=64))
    assert num_replies == 3


def test_requests_of_the_same_kind_are_sent_in_one_call():
    model = ScriptedModel(reply, num_rows=64)
    run(model=model)
    assert model.batches[0] == 30 and len(model.batches) <= 4


@pytest.mark.parametrize(
    ("seconds_per_call", "seconds_per_query", "batches"),
    [
        (0.5, 0.0, [16, 4, 4, 4, 4]),
        # The first search, for all questions, takes longer than the model's calls.
        (0.0, 0.19, [16, 4, 4, 4, 4]),
        # One search shows that they are slow.
        (9.0, 0.0, [16, 4, 12]),
    ],
)
def test_slow_searches_wait_until_the_model_has_read_all_prompts(
    monkeypatch, seconds_per_call, seconds_per_query, batches
):
    """Fast ones are made at once, while the model holds what it has read."""
    now, sizes = 0.0, []
    monkeypatch.setattr(runner.time, "monotonic", lambda: now)

    class FourAtATime(ScriptedModel):
        def generate(self, requests):
            nonlocal now
            num = 0
            while batch := requests[num : num + 4]:
                now += 3.0
                yield list(enumerate(map(completion, map(reply, batch)), num))
                num += len(batch)

    def search(queries):
        nonlocal now
        now += seconds_per_call + seconds_per_query * len(queries)
        sizes.append(len(queries))
        return Searched()(queries)

    def searching_twice(question, kit):
        yield Search((question.text,))
        first = yield Generate(question.text, 8)
        yield Search((first.text,))
        return (yield Generate(first.text, 8)).text

    settings = dict(questions=QUESTIONS[:16], search=search)
    expected = answers(run(searching_twice, **settings))
    sizes.clear()
    model = FourAtATime(reply, num_rows=4)
    assert answers(run(searching_twice, model=model, **settings)) == expected
    assert sizes == batches


def test_a_program_does_not_see_the_golden_answers():
    seen = []

    def looking(question, kit):
        seen.append(question.golden_answers)
        return (yield Generate(question.text, 8)).text

    groups = run(looking)
    assert set(seen) == {()} and groups[0].question.golden_answers == ("gold",)


def test_a_rollout_has_the_texts_written_and_the_passages_found():
    (group,) = run(questions=QUESTIONS[:1])
    (rollout,) = group.rollouts
    assert len(rollout.policy_texts) == len(rollout.searches) + 1
    assert all(len(use.result.data[0]) == 2 for use in rollout.searches)
    assert rollout.outcome == Outcome.ANSWERED


def test_a_failed_search_and_a_long_prompt_end_only_their_question():
    def search(queries):
        hits = Searched()(queries)
        return [None if "is 3?" in q else h for q, h in zip(queries, hits, strict=True)]

    def long(request):
        return None if "is 4?" in shown(request) else reply(request)

    said = []
    groups = run(model=ScriptedModel(long), search=search, report_line=said.append)
    (line,) = said
    assert line.startswith("1 of 30 questions") and "max_prompt_tokens" in line
    outcomes = [g.rollouts[0].outcome for g in groups]
    assert outcomes[3] == Outcome.TOOL_ERROR and outcomes[4] == Outcome.TRUNCATED
    assert [o for i, o in enumerate(outcomes) if i not in (3, 4)] == [
        Outcome.ANSWERED
    ] * 28
    expected = answers(run())
    assert {**answers(groups), "3": expected["3"], "4": expected["4"]} == expected


def test_an_answer_that_is_cut_by_its_budget_counts_and_is_reported(tmp_path):
    """Of a reply that is cut before its last one, nothing is missing."""

    def asking(question, kit):
        yield Generate(f"first {question.text}", 8)
        return (yield Generate(f"last {question.text}", 8)).text

    def cut(request):
        name = re.fullmatch(r"(\w+) Who is (\d+)\?", shown(request)).groups()
        return completion("Bo", is_cut=name in {("last", "3"), ("first", "4")})

    cache = RolloutCache(AppendLog(tmp_path, "answers"), [7])
    groups = run(asking, model=ScriptedModel(cut), cache=cache)
    again = run(asking, model=ScriptedModel(None), cache=cache)
    for found in (groups, again):
        rollouts = [g.rollouts[0] for g in found]
        assert {(r.answer, r.outcome) for r in rollouts} == {("Bo", Outcome.ANSWERED)}
        assert [i for i, r in enumerate(rollouts) if r.is_cut] == [3]
    assert score_groups(groups, normalize="squad")["cut_by_length"] == 1 / 30


def test_a_failed_model_call_is_no_answer_but_a_judge_error():
    def failing(request):
        return Failure("HTTP 503") if "is 5?" in shown(request) else reply(request)

    groups = run(model=ScriptedModel(failing))
    outcomes = [g.rollouts[0].outcome for g in groups]
    assert outcomes.pop(5) == Outcome.JUDGE_ERROR
    assert {*outcomes} == {Outcome.ANSWERED}


@pytest.mark.parametrize("top_k", [-1, 4])
def test_a_number_of_passages_that_no_search_returns_is_refused(top_k):
    with pytest.raises(ValueError, match=rf" {top_k} passages per query.*top_k = 3"):
        run(functools.partial(METHODS["rag"], top_k=top_k))


def peeking(question, kit):
    """Refuse to start with a question that has golden answers."""
    if question.golden_answers:
        raise ValueError(f"golden answers of {question.id}")
    yield Search((question.text,), 4)


def test_a_methods_first_requests_are_checked_without_golden_answers():
    name = f"{__name__}:peeking"
    with pytest.raises(ValueError, match=rf"{name}.*4 passages per query.*top_k = 3"):
        check_methods(["direct", name], QUESTIONS, kit())
    check_methods(["direct", name], QUESTIONS, kit(top_k=4))


@pytest.mark.parametrize(
    "spelling",
    [
        "flare:draft_tokens=0",
        "flare:max_tokens=0",
        "search_o1:max_turns=0",
        "searchain:rounds=0",
        "self_rag:max_tokens=0",
    ],
)
def test_a_setting_with_which_no_question_has_an_answer_is_refused(spelling):
    with pytest.raises(ValueError, match=" = 0: must be at least 1"):
        run(make_program(spelling))


@pytest.mark.parametrize(
    "requests", ["Who?", None, (Search(("x",)), "Who?"), (Search((x,)) for x in "ab")]
)
def test_a_program_that_yields_what_is_no_request_is_refused(requests):
    def program(question, kit):
        yield requests

    with pytest.raises(ValueError, match="expected a request"):
        run(program)


CHAT = [{"role": "user", "content": "Who?"}]


@pytest.mark.parametrize(
    "request_, field",
    [
        (Search("who is it"), "queries = 'who is it'"),
        (Search(None), "queries"),
        (Search((3,)), "queries"),
        (Search(("who",), top_k="1"), "top_k = '1'"),
        (Generate(CHAT[0], 8), "prompt"),
        (Generate(["Who?"], 8), "prompt"),
        (Generate("Who?", None), "max_tokens"),
        (Generate("Who?", -1), "max_tokens"),
        (Generate(CHAT, 8, stop="</answer>"), "stop = '</answer>'"),
        (Generate(CHAT, 8, stop=("",)), "stop"),
        (Mix("Who?", (0.5, 0.5), 8), "prompts"),
        (Mix(("Who?",), (0.5, 0.5), 8), "weights"),
        (Score("Who?", None), "text"),
        (Score(None, "Ida"), "prefix"),
    ],
)
def test_a_request_with_a_field_of_a_wrong_type_is_refused(request_, field):
    def program(question, kit):
        yield request_

    name = type(request_).__name__
    with pytest.raises(ValueError, match=rf"{name} with {re.escape(field)}"):
        run(program)


@pytest.mark.parametrize("requests", [(), Search(("x",))])
def test_a_program_that_never_ends_is_refused(requests, monkeypatch):
    monkeypatch.setattr(runner, "MAX_YIELDS", 20)

    def program(question, kit):
        while True:
            yield requests

    with pytest.raises(ValueError, match="without an answer to question"):
        run(program)


def test_notes_are_recorded_in_order_and_those_that_are_no_numbers_refused():
    def program(question, kit, *, value=0.5):
        yield Note("share", value)
        (reply,) = yield [Generate(question.text, 8)]
        yield Note("share", True)
        return reply.text

    (first, *_) = run(program)
    assert first.rollouts[0].notes == (("share", 0.5), ("share", 1.0))
    for value in (float("nan"), np.inf, 10**400, "x", None):
        with pytest.raises(ValueError, match="expected a name and a finite number"):
            run(functools.partial(program, value=value))


@pytest.mark.parametrize("answer", [5, ["Paris"], b"Paris"])
def test_a_program_that_returns_what_is_no_text_is_refused(answer):
    def program(question, kit):
        yield Search((question.text,))
        return answer

    with pytest.raises(ValueError, match="expected text or None"):
        run(program)


def test_a_killed_evaluation_resumes(tmp_path):
    """Answered questions are not asked again, and nothing else changes."""
    expected = encode_groups(run())

    class Killed(Exception):
        pass

    def until(limit):
        left = [limit]

        def answer(request):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return reply(request)

        return ScriptedModel(answer, num_rows=2)

    asked = []
    for limit in (20, 30, 10**6):
        cache = RolloutCache(AppendLog(tmp_path, "answers"), ["rag", 1])
        model = until(limit)
        try:
            groups = run(model=model, cache=cache)
        except Killed:
            groups = None
        asked.append(cache.num_reused)
    assert encode_groups(groups) == expected
    assert asked[0] == 0 < asked[1] < asked[2]
    other = RolloutCache(AppendLog(tmp_path, "answers"), ["rag", 2])
    assert other.get(QUESTIONS[0], 0) is None


def test_scored_tokens_survive_the_journal():
    (group,) = run(questions=QUESTIONS[:1])
    rollout = group.rollouts[0]
    import dataclasses

    scored = Group(group.question, (dataclasses.replace(rollout, num_scored=7),))
    (decoded,) = decode_groups(encode_groups([scored]), [group.question])
    assert decoded.rollouts[0].num_scored == 7


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_settings_can_be_given_on_a_command_line(name):
    import inspect

    for parameter in inspect.signature(METHODS[name]).parameters.values():
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY:
            assert isinstance(parameter.default, bool | int | float | str), parameter
    assert json.dumps(name) and make_program(name)


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("ragg", "did you mean 'rag'"),
        ("protocl", "did you mean 'protocol'"),
        ("protocol:rounds=3", "protocol has no settings"),
        ("rag:k=3", "rag has the settings top_k, not 'k'"),
        ("rag:top_k=three", "must be a whole number"),
        ("ircot:rounds=-1", "rounds = '-1': must be 0 or more"),
        ("flare:theta=nan", "theta = 'nan': must be a number"),
        ("ircot:answers=chains", "answers = 'chains': must be reader or chain"),
        ("json:loads", "not a generator function"),
    ],
)
def test_unknown_methods_and_settings_are_refused(spelling, words):
    with pytest.raises(ValueError, match=r"config\.eval\.methods = ") as refused:
        make_program(spelling)
    assert words in str(refused.value)


def no_default(question, kit, *, prefix):
    yield Search((prefix,))


def no_text(question, kit, *, prefix=None):
    yield Search((prefix,))


def no_star(question, kit, rounds=2):
    yield Search((question.text,) * rounds)


def no_scalar(question, kit, *, words=("a", "b")):
    yield Search(words)


def no_kit(question):
    yield Search((question.text,))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_default", "'prefix'"),
        ("no_default:prefix=x", "'prefix'"),
        ("no_text:prefix=x", "NoneType"),
        ("no_kit", "too many positional arguments"),
    ],
)
def test_a_program_that_cannot_be_called_is_refused(name, words):
    with pytest.raises(ValueError, match=r"config\.eval\.methods = ") as refused:
        make_program(f"{__name__}:{name}")
    assert words in str(refused.value)
    assert make_program(f"{__name__}:no_text").keywords == {}


def test_a_setting_may_be_any_argument_after_the_kit():
    assert make_program(f"{__name__}:no_star:rounds=3").keywords == {"rounds": 3}


def test_the_settings_of_a_method_include_those_by_default():
    assert method_settings("iter_retgen:rounds=2") == {
        "rounds": 2,
        "query_order": "answer_first",
        "top_k": 0,
    }
    assert method_settings(f"{__name__}:no_star:rounds=3") == {"rounds": 3}
    assert method_settings(f"{__name__}:no_scalar") == {}
    assert method_settings("flare:theta=inf")["theta"] == "inf"
    assert method_settings("direct") == method_settings("protocol") == {}


def test_a_search_that_wants_question_ids_receives_them():
    def search(queries, question_ids):
        hits = Searched()(queries)
        return [
            [dataclasses.replace(p, id=f"{name}: {p.id}") for p in row]
            for row, name in zip(hits, question_ids, strict=True)
        ]

    search.wants_question_ids = True
    for group in run(search=search):
        (rollout,) = group.rollouts
        assert rollout.passages
        assert all(p.id.startswith(f"{group.question.id}: ") for p in rollout.passages)

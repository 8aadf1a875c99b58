"""Replayed demonstrations equal the rollouts of a policy that writes them."""

import dataclasses

import numpy as np
import pytest

from rsearch.protocols.table import PROTOCOLS
from rsearch.rollout.conversation import Host
from rsearch.rollout.replay import Script, replay, replay_together
from rsearch.types import Outcome, Source
from tests.rollout import tiny
from tests.rollout.scripted import (
    ANSWERS,
    LIMITS,
    SEARCHES,
    WHO,
    find,
    make_host,
    play,
)

LIMITS_OF_LONG_TURNS = dataclasses.replace(
    LIMITS, max_prompt_tokens=5000, max_turn_tokens=200
)


def assert_same(first, second):
    """Check that two rollouts are equal except for their log-probabilities."""
    assert len(first.segments) == len(second.segments)
    for a, b in zip(first.segments, second.segments):
        assert (a.source, a.text) == (b.source, b.text)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    assert first.searches == second.searches
    assert (first.answer, first.outcome) == (second.answer, second.outcome)


@pytest.mark.parametrize(
    "turns",
    [
        [ANSWERS],
        [SEARCHES, ANSWERS],
        [SEARCHES, "<search>city</search>", ANSWERS],
        [SEARCHES, SEARCHES, SEARCHES],
    ],
)
def test_a_replayed_demonstration_equals_the_rollout_that_writes_it(turns):
    ((group,), _) = play([turns])
    assert_same(replay(make_host(), WHO, turns), group.rollouts[0])


def test_scripts_that_are_replayed_together_search_in_one_batch_per_turn():
    batches = []

    def search(queries):
        batches.append(list(queries))
        return find(queries)

    second = "<search>city</search>"
    every = [[SEARCHES, ANSWERS], ["nothing"], [SEARCHES, second, ANSWERS], [ANSWERS]]
    scripts = [Script(WHO, turns) for turns in every]
    results = replay_together(make_host(search), scripts)
    assert [len(queries) for queries in batches] == [2, 1]
    for turns, result in zip(every, results, strict=True):
        if turns == ["nothing"]:
            assert "turn 1 has no action" in str(result)
        else:
            assert_same(result, replay(make_host(), WHO, turns))


@pytest.mark.parametrize(
    "turns, message",
    [
        ([], "0 turns do not end the conversation"),
        ([SEARCHES], "1 turns do not end the conversation"),
        ([ANSWERS, ANSWERS], "ended with turn 1 of 2"),
        ([SEARCHES] * 3 + [ANSWERS], "ended with turn 3 of 4"),
        (["nothing"], "turn 1 has no action: 'nothing'"),
        (["who " * 61 + ANSWERS], "tokens, more than rollout.max_turn_tokens = 60"),
        (["<search>bad</search>"], "the search of turn 1 failed"),
        ([ANSWERS + " and"], "beyond its action"),
        (["<search>a</search><answer>b</answer>"], "beyond its action"),
    ],
)
def test_a_demonstration_that_cannot_be_a_rollout_is_refused(turns, message):
    with pytest.raises(ValueError, match=f"question q: .*{message}"):
        replay(make_host(), WHO, turns)


def test_a_demonstration_with_too_long_a_prompt_is_refused():
    with pytest.raises(ValueError, match=r"question q: prompt of .*_tokens = 5"):
        replay(make_host(max_prompt_tokens=5), WHO, [ANSWERS])


def test_context_turns_are_part_of_the_prompt_and_not_learnt():
    turns = [SEARCHES, SEARCHES, ANSWERS]
    full = replay(make_host(), WHO, turns)
    for count in range(3):
        rollout = replay(make_host(), WHO, turns, context_turns=count)
        assert [s.token_ids.tolist() for s in rollout.segments] == [
            s.token_ids.tolist() for s in full.segments
        ]
        assert rollout.policy_texts == tuple(turns[count:])
        assert (rollout.answer, rollout.searches) == (full.answer, full.searches)
        sources = [s.source for s in rollout.segments]
        expected = [1, 2, 3, 2, 3, 2]
        for i in range(count):
            expected[1 + 2 * i] = 1
        assert sources == expected


def test_recorded_observations_are_shown_without_searching():
    calls = []
    host = make_host(search=calls.append)
    rollout = replay(host, WHO, [SEARCHES, ANSWERS], observations=["in the city"])
    shown = [s.text for s in rollout.segments if s.source == Source.SEARCH]
    assert shown == ["\n\n<information>in the city</information>\n\n"]
    assert calls == [] and len(rollout.searches) == 1
    replay(host, WHO, [ANSWERS], observations=[])


def test_context_and_observations_must_fit_the_turns():
    for count in (-1, 2, 3):
        with pytest.raises(ValueError, match=f"{count} turns of context leave none"):
            replay(make_host(), WHO, [SEARCHES, ANSWERS], context_turns=count)
    for observations in ([], ["a", "b"]):
        with pytest.raises(ValueError, match="observations for 2 turns"):
            replay(make_host(), WHO, [SEARCHES, ANSWERS], observations=observations)


def test_a_turn_without_a_stop_string_ends_with_the_end_of_text():
    host = Host(
        tiny.tokenizer(), PROTOCOLS["r1_searcher_pp"], find, LIMITS_OF_LONG_TURNS
    )
    search = "<|begin_external_search|> a <|end_external_search|>"
    rollout = replay(host, WHO, [search, r"so \boxed{city}"])
    eos = tiny.tokenizer().eos_ids[0]
    ends = [s.token_ids[-1] == eos for s in rollout.segments if s.source == 2]
    assert ends == [False, True]
    assert (rollout.answer, rollout.outcome) == ("city", Outcome.ANSWERED)


def test_without_a_forced_turn_the_last_search_may_end_a_demonstration():
    turns = [SEARCHES, SEARCHES]
    ((group,), _) = play([turns], host=make_host(forced_final_turn=False))
    (rollout,) = group.rollouts
    assert (rollout.outcome, len(rollout.searches)) == (Outcome.TRUNCATED, 2)
    assert_same(replay(make_host(forced_final_turn=False), WHO, turns), rollout)


def test_a_search_that_wants_question_ids_receives_them():
    ids = []

    def search(queries, question_ids):
        ids.extend(question_ids)
        return find(queries)

    search.wants_question_ids = True
    replay(make_host(search), WHO, [SEARCHES, ANSWERS])
    assert ids == [WHO.id]

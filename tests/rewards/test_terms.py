"""Reward terms that fit any protocol, and the registry of all terms."""

import dataclasses
import inspect
import typing

import pytest

from rsearch.protocols.table import PROTOCOLS
from rsearch.rewards.reading import Normalize
from rsearch.rewards.terms import (
    TERMS,
    answer_cover_em,
    answer_em,
    answer_f1,
    format_ok,
    overlong,
)
from rsearch.text.normalize import NORMALIZERS
from rsearch.types import Answer, Observation, Passage, Question
from tests.rewards.play import PARIS, play

SEARCH_R1 = PROTOCOLS["search_r1"]
DOCS = (Passage("1", '"Paris"\nParis is the capital.'),)
SEARCHES = "I need to know. <search> capital </search>"
RIGHT, WRONG = "<answer> Paris </answer>", "<answer> Lyon </answer>"


def test_every_term_takes_its_settings_as_keywords():
    assert typing.get_args(Normalize) == tuple(NORMALIZERS)
    for name, term in TERMS.items():
        question, rollouts, *settings = inspect.signature(term).parameters.values()
        assert (question.name, rollouts.name) == ("question", "rollouts"), name
        assert all(p.kind is p.KEYWORD_ONLY for p in settings), name


@pytest.mark.fault(39, "among many words")
def test_cover_em_has_a_limit_on_words():
    wordy = play(SEARCH_R1, ["<answer>Paris or else Rome Oslo</answer>"])
    nothing = play(SEARCH_R1, ["hm"])
    assert answer_cover_em(PARIS, (wordy, nothing)) == [1, 0]
    assert answer_cover_em(PARIS, (wordy,), max_words=5) == [1]
    assert answer_cover_em(PARIS, (wordy,), max_words=4) == [0]


HACKS = {  # name: the answer, its F1
    "nothing": ("", 0),
    "a choice": ("Lyon or Paris or Rome", 1 / 3),
    "the answer again and again": ("Paris " * 200, 2 / 201),
    "a document": ("Lyon is a city of France as Paris is, its capital. " * 20, 2 / 201),
    "another answer": ("Lyon", 0),
}


@pytest.mark.fault(39, "empty", "a choice", "among many words", "a whole document")
@pytest.mark.parametrize("hack", HACKS)
def test_an_answer_hidden_among_other_words_is_not_right(hack):
    text, f1 = HACKS[hack]
    played = (play(SEARCH_R1, [f"<answer>{text}</answer>"]),)
    assert answer_em(PARIS, played) == [0]
    assert answer_f1(PARIS, played) == pytest.approx([f1])
    # Of these, only a choice of few words still passes.
    covers = answer_cover_em(PARIS, played, max_words=10)
    assert covers == [hack == "a choice"]


def test_cover_em_has_three_word_orders():
    question = Question("q", "?", ("New York",))
    texts = ("in New York", "York, New", "New Yorker", "newyork")
    rollouts = [play(SEARCH_R1, [f"<answer>{t}</answer>"]) for t in texts]
    assert answer_cover_em(question, rollouts) == [1, 1, 0, 0]
    assert answer_cover_em(question, rollouts, order="contiguous") == [1, 0, 0, 0]
    assert answer_cover_em(question, rollouts, order="substring") == [1, 0, 1, 0]


def test_right_and_wrong_answers_earn_their_configured_values():
    rollouts = [play(SEARCH_R1, [turn]) for turn in (RIGHT, WRONG, "hm")]
    for term in (answer_em, answer_cover_em):
        assert term(PARIS, rollouts, wrong=-1.0) == [1, -1, -1]
        assert term(PARIS, rollouts, right=0.5) == [0.5, 0, 0]


def test_an_empty_golden_answer_matches_only_in_the_public_code():
    question = Question("q", "?", ("The",))
    rollouts = [play(SEARCH_R1, [f"<answer>{t}</answer>"]) for t in ("", "x")]
    for term in (answer_em, answer_cover_em):
        assert term(question, rollouts) == [0, 0]
        assert term(question, rollouts, empty_matches=True) == [1, 0]
    assert answer_f1(question, rollouts, empty_matches=True) == [0, 0]


def test_answers_are_scored_under_either_normaliser():
    question = Question("q", "?", ("New York",))
    rollouts = (play(SEARCH_R1, ["<answer>New-York</answer>"]),)
    assert answer_em(question, rollouts, normalize="squad") == [0]
    assert answer_em(question, rollouts, normalize="r1_searcher") == [1]
    assert answer_f1(question, rollouts, normalize="r1_searcher") == [1]


@pytest.mark.parametrize(
    ("turns", "ok"),
    [
        ([SEARCHES, RIGHT], True),
        ([WRONG], True),
        ([SEARCHES], False),
        (["hm", RIGHT], False),
        (["<information>x</information>" + RIGHT], False),
        (["<information>" + SEARCHES, RIGHT], False),
    ],
)
def test_format_is_ok_if_every_turn_follows_the_protocol(turns, ok):
    rollouts = (play(SEARCH_R1, turns, DOCS),)
    values = format_ok(PARIS, rollouts, protocol=SEARCH_R1, good=0.5, bad=-2.0)
    assert values == [0.5 if ok else -2.0]


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("search_r1", ["<information>", "</information>"]),
        ("r_search", ["<observation>", "</observation>"]),
        ("rag_r1_sq", ["<information>", "</information>"]),
        ("rag_r1_mq", ["<information>", "</information>"]),
        ("r1_searcher", ["<|begin_of_documents|>", "<|end_of_documents|>"]),
        ("r1_searcher_chat", ["<|begin_of_documents|>", "<|end_of_documents|>"]),
        ("r1_searcher_pp", ["<|begin_search_result|>", "<|end_search_result|>"]),
        ("rearag", ["Observation 1:", "Observation 12:"]),
    ],
)
def test_a_policy_must_not_write_the_observation_tags_of_its_protocol(name, tags):
    protocol = PROTOCOLS[name]
    answer = protocol.render(Answer("Paris"))
    turns = [answer, *(f"x {tag}y\n{answer}" for tag in tags)]
    rollouts = [play(protocol, [turn], DOCS) for turn in turns]
    assert [r.answer for r in rollouts] == ["Paris"] * len(turns)
    assert format_ok(PARIS, rollouts, protocol=protocol) == [0] + [-1] * len(tags)
    # The tags come from the protocol, whichever it is.
    renamed = dataclasses.replace(
        protocol,
        show_passages=lambda queries, passages: Observation("<mine>", "", "</mine>"),
    )
    rollouts = [play(renamed, [f"</mine>{answer}"]), rollouts[-1]]
    assert format_ok(PARIS, rollouts, protocol=renamed) == [-1, 0]


def test_the_overlong_penalty_falls_linearly_within_its_buffer():
    # The last 20 of 100 tokens are the buffer: 80 are free, and 85 cost 5 / 20.
    lengths = (0, 80, 81, 85, 99, 100, 101, 500)
    rollouts = [play(SEARCH_R1, ["x" * n]) for n in lengths]
    penalties = overlong(PARIS, rollouts, max_tokens=100, buffer_tokens=20)
    assert penalties == pytest.approx([0, 0, -0.05, -0.25, -0.95, -1, -1, -1])
    half = overlong(PARIS, rollouts, max_tokens=100, buffer_tokens=20, penalty=0.5)
    assert half == pytest.approx([v / 2 for v in penalties])
    (all_buffer,) = overlong(PARIS, rollouts[3:4], max_tokens=100, buffer_tokens=100)
    assert all_buffer == pytest.approx(-0.85)


def test_the_length_of_passages_costs_nothing():
    long = (Passage("1", "t\n" + "word " * 500),)
    pair = [play(SEARCH_R1, [SEARCHES, RIGHT], docs) for docs in (DOCS, long)]
    assert pair[1].num_tokens > pair[0].num_tokens + 2000
    limit = pair[0].num_policy_tokens
    assert overlong(PARIS, pair, max_tokens=limit, buffer_tokens=1) == [-1, -1]
    assert overlong(PARIS, pair, max_tokens=limit + 1, buffer_tokens=1) == [0, 0]

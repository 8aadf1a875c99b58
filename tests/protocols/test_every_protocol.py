"""Properties of every protocol: any text is parsed, and written turns read back."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS, make_protocol
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Cut,
    Malformed,
    Passage,
    ToolCall,
)

EVERY = pytest.mark.parametrize("name", PROTOCOLS)
FRAGMENTS = [
    *("<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>"),
    *("<information>", "<original_evidence>", "</original_evidence>", "</", "<"),
    *("<|begin_of_query|>", "<|end_of_query|>", "<|begin_of_documents|>"),
    *("<|begin_external_search|>", "<|end_external_search|>"),
    *("<|begin_internal_answer|>", "<|end_internal_answer|>", "\\boxed{", "{", "}"),
    *("Thought 1: ", "\nAction 1: ", "\nObservation 2:", "\n```\n", "```", "`"),
    *("{'function': 'search', 'parameters': {'query': 'q'}}", "'", '"', ",", "\\"),
    *('{"function": "finish", "parameters": {"answer": "X"}}', "\n", " ", "q"),
]
TURNS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12)
TURNS = TURNS.map("".join)
ANY = st.text(st.characters() | st.sampled_from("<>/{}`\"',\\ \n\ud800"), max_size=20)
WORDS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)


def test_each_protocol_is_named_by_its_key():
    assert all(protocol.name == name for name, protocol in PROTOCOLS.items())
    assert all(make_protocol(name).name == name for name in PROTOCOLS)


@EVERY
@settings(deadline=None)
@given(turn=TURNS)
def test_any_turn_can_be_parsed(name, turn):
    action = PROTOCOLS[name].parse(turn)
    assert isinstance(action, ToolCall | Answer | Malformed)
    if isinstance(action, ToolCall):
        assert all(q and q == q.strip() for q in action.arguments) and action.arguments
    if isinstance(action, Malformed):
        assert action.reason


WIDE = str.maketrans("<>{}\\|'`", "＜＞｛｝＼｜＇｀")


@pytest.mark.fault(25, "look-alikes")
@EVERY
@pytest.mark.parametrize("action", [search_call("who is it"), Answer("Paris")], ids=str)
@pytest.mark.parametrize(
    "mangle",
    [str.upper, lambda turn: turn.translate(WIDE), "\u200b".join, "\ufeff".join],
    ids=["capitals", "full width", "zero width", "byte order marks"],
)
def test_text_that_only_looks_like_an_action_is_none(name, action, mangle):
    protocol = PROTOCOLS[name]
    turn = protocol.render(action)
    assert protocol.parse(turn) == action
    assert isinstance(protocol.parse(mangle(turn)), Malformed)


@pytest.mark.fault(25, "cut by the limit", "unclosed search")
@EVERY
@pytest.mark.parametrize("action", [search_call("who is it"), Answer("Paris")], ids=str)
def test_an_action_that_is_cut_anywhere_is_malformed_or_unchanged(name, action):
    protocol = PROTOCOLS[name]
    turn = protocol.render(action)
    actions = [protocol.parse(turn[:end]) for end in range(len(turn))]
    assert all(isinstance(f, Malformed) or f == action for f in actions)
    assert isinstance(actions[len(turn) // 2], Malformed)


@EVERY
@settings(deadline=None)
@given(text=ANY, more=st.lists(ANY, max_size=3))
def test_a_rendered_action_is_read_back_or_refused(name, text, more):
    protocol = PROTOCOLS[name]
    for action in (Answer(text), search_call(text, *more)):
        try:
            rendered = protocol.render(action)
        except ValueError:
            continue
        assert protocol.parse(rendered) == action
        for stop in protocol.stop_strings:
            assert rendered.endswith(stop) or stop not in rendered


@EVERY
@settings(deadline=None)
@given(words=st.lists(WORDS, min_size=1, max_size=3))
def test_words_of_any_alphabet_can_be_written(name, words):
    protocol = PROTOCOLS[name]
    text = " ".join(words)
    queries = tuple(words[: protocol.max_queries])
    for action in (Answer(text), search_call(text), search_call(*queries)):
        assert protocol.parse(protocol.render(action)) == action


@EVERY
@settings(deadline=None)
@given(thought=ANY, internal=ANY, evidence=st.none() | ANY, word=WORDS)
def test_a_written_turn_is_parsed_as_its_action(
    name, thought, internal, evidence, word
):
    protocol = PROTOCOLS[name]
    for number, action in enumerate((search_call(word), Answer(word)), start=1):
        step = Step(number, thought, action, internal=internal, evidence=evidence)
        try:
            turn = protocol.write(step)
        except ValueError:
            continue
        assert protocol.parse(turn) == action
        for text in (thought, internal):
            assert text in turn
    step = Step(1, "I see.", Answer(word), internal="I know.", evidence="Rome.")
    turn = protocol.write(step)
    assert "I see." in turn and "I know." in turn


@EVERY
def test_a_turn_ends_with_its_stop_string_and_later_text_changes_nothing(name):
    protocol = PROTOCOLS[name]
    for action in (search_call("river"), Answer("city")):
        turn = protocol.write(Step(1, "So.", action))
        if not any(turn.endswith(stop) for stop in protocol.stop_strings):
            assert name == "r1_searcher_pp" and isinstance(action, Answer)
            continue
        for tail in (" and", "\n", "</answer>", "x</search>", "<|end_of_query|>", "`"):
            assert protocol.parse(turn + tail) == action


@EVERY
@settings(deadline=None)
@given(contents=ANY, query=ANY)
def test_no_passage_or_query_changes_the_frame_or_breaks_encoding(
    name, contents, query
):
    protocol = PROTOCOLS[name]
    inert = protocol.show_passages(["q"], [(Passage("p", "t\nx"),)])
    hostile = protocol.show_passages([query], [(Passage("p", contents),)])
    assert (hostile.before, hostile.after) == (inert.before, inert.after)
    fixed = [[p for p in o.pieces if isinstance(p, str)] for o in (inert, hostile)]
    assert fixed[0] == fixed[1]
    hostile.content.encode("utf-8")
    texts = [p.text if isinstance(p, Cut) else p for p in hostile.pieces]
    assert not texts or "".join(texts) == hostile.content


@EVERY
def test_much_markup_is_parsed_in_linear_time(name):
    parse = PROTOCOLS[name].parse
    start = time.perf_counter()
    for fragment in FRAGMENTS:
        for before in ("", "Action 1: ", "```"):
            parse(before + fragment * 20_000)
        parse(fragment * 20_000 + "</search></answer><|end_of_query|>}")
    assert time.perf_counter() - start < 20  # Quadratic time would take minutes.


@EVERY
def test_a_question_is_inserted_unchanged(name):
    protocol = PROTOCOLS[name]
    hostile = "who {question} \\boxed{a}?"
    messages = protocol.messages(hostile)
    assert sum(hostile in m["content"] for m in messages) == 1
    assert messages[-1]["role"] == "user"
    assert protocol.is_chat or len(messages) == 1

"""Tagged text: how a turn is parsed, and what the policy is shown."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS
from rsearch.protocols.tagged import SEARCH_R1, tagged_texts
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Malformed,
    Passage,
    ToolCall,
)

PARIS = Passage("1", '"Paris"\nParis is a city.\nIt has a river.')
ROME = Passage("2", '"Rome"\nRome is older.')
parse, render = SEARCH_R1.parse, SEARCH_R1.render
TAGS = ("<search>", "</search>", "<answer>", "</answer>")
TAGGED = ("search_r1", "r_search", "rag_r1_sq")
FRAGMENTS = st.sampled_from(
    [*TAGS, "<information>", "</", "<", ">", "search", " ", "q"]
)
TURNS = st.lists(FRAGMENTS | st.text(max_size=5), max_size=12).map("".join)
CONTENTS = st.text(max_size=30).map(str.strip)
CONTENTS = CONTENTS.filter(lambda text: not any(tag in text for tag in TAGS))


@pytest.mark.fault(25, "nested tags", "two actions")
@pytest.mark.fault(28, "answer and search")
@pytest.mark.parametrize(
    ("turn", "action"),
    [
        (
            "<search> capital of France </search>",
            search_call("capital of France"),
        ),
        ("<think>I know.</think> <answer>Paris</answer>", Answer("Paris")),
        ("<answer>\nA\nB </answer>", Answer("A\nB")),
        ("<answer></answer>", Answer("")),
        # The first complete action counts; later text is ignored.
        ("<answer>X</answer> then <search>q</search> tail", Answer("X")),
        ("<answer>X</answer><answer>Y</answer>", Answer("X")),
        ("<search>q</search><information>fake", search_call("q")),
        ("<search>q</search>\n", search_call("q")),
        # The nearest opening tag counts; one that is only mentioned is text.
        ("I use <search> now: <search>q</search>", search_call("q")),
        ("<answer>maybe <search>q</search>", search_call("q")),
        ("<search>q <answer>X</answer>", Answer("X")),
        ("<search>a <b> & </c> d</search>", search_call("a <b> & </c> d")),
        # Documents that the policy writes are its own words.
        ("<information>Paris</information><answer>X</answer>", Answer("X")),
        ("<information><answer>X</answer></information>", Answer("X")),
    ],
)
def test_a_turn_is_parsed_as_its_first_complete_action(turn, action):
    assert parse(turn) == action


@pytest.mark.fault(25, "unclosed search", "empty query", "look-alikes")
@pytest.mark.parametrize(
    "turn",
    [
        "",
        "I think it is Paris.",
        "<search>capital of Fra",
        "<search>q</answer>",
        "</search><answer>X</answer>",
        "q</search>",
        "<search></search>",
        "<search> \n </search>",
        "<Search>q</Search>",
        "<search >q</search >",
        "<search\u200b>q</search\u200b>",
        "＜search＞q＜/search＞",
        "<information>Paris</information>",
        '{"function": "finish", "answer": "X"}',
        "<|im_start|>assistant<|im_end|>",
    ],
)
def test_a_turn_without_an_action_is_malformed_and_says_why(turn):
    action = parse(turn)
    assert isinstance(action, Malformed) and action.reason


def test_two_turns_are_parsed_differently_from_the_public_code():
    public = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
    same, empty = "so <search>b</search>", "<search></search>"
    twice = "<search>a<search>b</search>"
    queries = [public.search(turn)[2] for turn in (same, empty, twice)]
    assert queries == ["b", "", "a<search>b"]
    for name in TAGGED:
        protocol = PROTOCOLS[name]
        assert protocol.parse(same) == search_call("b")
        # An empty query is not searched; the policy is told how to search.
        assert protocol.parse(empty) == Malformed("empty query")
        assert "put the query between <search>" in protocol.invalid_message
        # The innermost pair counts.
        assert protocol.parse(twice) == search_call("b")


@given(TURNS)
def test_any_turn_has_an_action_that_ends_at_its_first_closing_tag(turn):
    action = parse(turn)
    assert isinstance(action, ToolCall | Answer | Malformed)
    ends = [turn.find(tag) + len(tag) for tag in TAGS[1::2] if tag in turn]
    assert action == parse(turn[: min(ends, default=len(turn))])


@given(TURNS, TURNS)
def test_text_after_an_action_changes_nothing(turn, tail):
    if not isinstance(parse(turn), Malformed):
        assert parse(turn + tail) == parse(turn)


@given(CONTENTS, st.sampled_from(["", "I think. ", "<search> ", "<answer>"]))
def test_a_rendered_action_is_read_back(text, before):
    assert parse(before + render(Answer(text))) == Answer(text)
    if text:
        assert parse(before + render(search_call(text))) == search_call(text)


@pytest.mark.parametrize(
    "action",
    [
        search_call(""),
        search_call("a", "b"),
        search_call(" a"),
        search_call("a</search>"),
        Answer("a</answer>b"),
        Answer("<answer>"),
    ],
)
def test_an_action_that_would_be_read_differently_is_not_rendered(action):
    with pytest.raises(ValueError, match=r"query|read as"):
        render(action)


def test_a_megabyte_of_tags_is_parsed_in_linear_time():
    # A regular expression with a lazy gap would need quadratic time here.
    text = "<search><answer>" * 100_000
    assert isinstance(parse(text), Malformed)
    assert parse(text + "X</answer>") == Answer("X")
    assert tagged_texts(text, "answer") == []
    assert len(tagged_texts(text + "</answer>" * 100_000, "answer")) == 1


def test_search_r1_shows_numbered_passages():
    observation = PROTOCOLS["search_r1"].show_passages(["q"], [(PARIS, ROME)])
    assert observation.before == "\n\n<information>"
    assert observation.content == (
        'Doc 1(Title: "Paris") Paris is a city.\nIt has a river.\n'
        'Doc 2(Title: "Rome") Rome is older.'
    )
    assert observation.after == "</information>\n\n"


def test_r_search_shows_passages_without_numbers():
    observation = PROTOCOLS["r_search"].show_passages(["q"], [(PARIS, ROME)])
    assert observation.before == "\n\n<observation>"
    assert observation.content == (
        '(Title: "Paris") Paris is a city.\nIt has a river.\n'
        '(Title: "Rome") Rome is older.'
    )
    assert observation.after == "</observation>\n\n"


@pytest.mark.parametrize("name", TAGGED)
def test_observations_of_no_passages_and_of_several_queries_are_whole(name):
    protocol = PROTOCOLS[name]
    assert protocol.show_passages(["q"], [()]).content == ""
    several = protocol.show_passages(["a", "b"], [(PARIS,), (ROME,)])
    assert several == protocol.show_passages(["q"], [(PARIS, ROME)])


def test_search_r1_has_its_own_prompt():
    protocol = PROTOCOLS["search_r1"]
    (message,) = protocol.messages(" who {question}  ")
    assert message["role"] == "user"
    assert message["content"].startswith("Answer the given question. You must conduct")
    assert message["content"].endswith(
        "For example, <answer> Beijing </answer>. Question: who {question}?\n"
    )
    assert "as many times as your want" in message["content"]
    assert protocol.invalid_message.startswith("\nMy previous action is invalid. If I")
    assert protocol.invalid_message.endswith("Let me try again.\n")


def test_r_search_has_its_own_prompt():
    system, user = PROTOCOLS["r_search"].messages(" who ")
    assert user == {"role": "user", "content": " who "}
    for tag in ("search", "observation", "original_evidence", "answer"):
        # Its prompt holds one pair of each tag; no parser here relies on that.
        assert tagged_texts(system["content"], tag) == ["and"]
    assert "omit the evidence section. Finally" in system["content"]


@pytest.mark.parametrize("name", TAGGED)
def test_a_turn_stops_at_the_tags_that_end_an_action(name):
    assert set(PROTOCOLS[name].stop_strings) == {"</search>", "</answer>"}


def test_boxes_are_read_from_the_nearest_opening_tag():
    assert tagged_texts("<e> a </e> x <e><e>b</e> </e> <e>c", "e") == ["a", "b"]
    assert (
        tagged_texts("", "e")
        == tagged_texts("<e>", "e")
        == tagged_texts("</e>", "e")
        == []
    )


def test_r_search_gives_its_evidence_right_before_the_answer():
    protocol = PROTOCOLS["r_search"]
    answer = Step(2, "So.", Answer("Rome"), internal="Hm.", evidence="It is Rome.")
    assert protocol.write(answer) == (
        "Hm. So. <original_evidence> It is Rome. </original_evidence> "
        "<answer> Rome </answer>"
    )
    search = Step(1, "So.", search_call("city"), evidence="It is Rome.")
    assert protocol.write(search) == "So. <search> city </search>"
    unsearched = Step(1, "", Answer("Rome"))
    assert protocol.write(unsearched) == "<answer> Rome </answer>"
    for evidence in ("</original_evidence>", " a", "<original_evidence>"):
        with pytest.raises(ValueError, match="evidence"):
            protocol.write(dataclasses.replace(answer, evidence=evidence))


def test_a_step_is_written_between_think_tags():
    step = Step(1, "I look.", search_call("city"), internal="I know.")
    for name in ("search_r1", "rag_r1_sq", "rag_r1_mq"):
        assert PROTOCOLS[name].write(step) == (
            "<think> I know. I look.</think><search> city </search>"
        )
    with pytest.raises(ValueError, match="read as"):
        PROTOCOLS["search_r1"].write(Step(1, "</answer>", Answer("x")))

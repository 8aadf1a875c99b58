"""The baselines' chats: filled in once and reworded on request; any reply answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols import plain
from rsearch.protocols.tagged import SEARCH_R1
from rsearch.types import Answer, Passage


@given(st.text())
def test_any_reply_is_the_answer_without_surrounding_space(reply):
    assert plain.parse(reply) == Answer(reply.strip())


def test_no_stop_string_ends_a_reply():
    for protocol in (plain.DIRECT, plain.RAG):
        assert protocol.stop_strings == ()
        assert protocol.invalid_message is None
        observed = protocol.show_passages(["q"], [(Passage("p", "T\nx"),)])
        assert (observed.before, observed.content, observed.after) == ("", "", "")


def test_direct_shows_only_the_question():
    system, user = plain.messages_with_passages(plain.DIRECT, "Who?", "ignored")
    assert user == {"role": "user", "content": "Question: Who?"}
    assert system["role"] == "system" and "own knowledge" in system["content"]
    assert "ignored" not in system["content"]


def test_rag_shows_the_passages_above_the_question():
    passages = [Passage("a", "One\nfirst text"), Passage("b", "Two\nsecond\nline")]
    shown = plain.write_passages(passages)
    assert shown == "Doc 1(Title: One) first text\nDoc 2(Title: Two) second\nline"
    system, user = plain.messages_with_passages(plain.RAG, "Who?", shown)
    assert user == {"role": "user", "content": "Question: Who?"}
    assert system["content"].endswith(f"given documents.\n\n{shown}")
    assert plain.write_passages([]) == ""


@given(st.text(), st.text())
def test_placeholders_in_inserted_texts_are_not_filled_in(question, passages):
    protocol = plain.reword(plain.RAG, user="<{passages}|{question}>")
    question, passages = question + "{passages}", "{question}" + passages + "{0}"
    (message,) = plain.messages_with_passages(protocol, question, passages)
    assert message == {"role": "user", "content": f"<{passages}|{question}>"}


def test_a_new_user_message_drops_the_system_message_unless_one_is_given():
    reworded = plain.reword(plain.DIRECT, user="{question}")
    assert (reworded.user, reworded.system) == ("{question}", None)
    reworded = plain.reword(plain.DIRECT, user="{question}", system="Go")
    assert (reworded.user, reworded.system) == ("{question}", "Go")
    reworded = plain.reword(plain.DIRECT, system="Go")
    assert (reworded.user, reworded.system) == (plain.DIRECT.user, "Go")


def test_only_the_given_fields_are_reworded():
    assert plain.reword(SEARCH_R1) == SEARCH_R1
    reworded = plain.reword(SEARCH_R1, invalid_message="No.")
    assert reworded.invalid_message == "No."
    assert (reworded.user, reworded.parse) == (SEARCH_R1.user, SEARCH_R1.parse)


@pytest.mark.parametrize("protocol", [plain.DIRECT, plain.RAG])
def test_a_question_with_braces_stays_unchanged(protocol):
    chat = plain.messages_with_passages(protocol, "{x} {} {question}?", "")
    assert chat[-1]["content"] == "Question: {x} {} {question}?"

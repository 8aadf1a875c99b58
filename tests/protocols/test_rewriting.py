"""The rewriting model's chat, and the replies that rest on recalled knowledge."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.base import Step
from rsearch.protocols.r1_searcher_pp import INTERNAL_TAGS
from rsearch.protocols.rewriting import (
    SYSTEM,
    recalled_answer,
    recalled_texts,
    rewriting_messages,
)
from rsearch.protocols.table import PROTOCOLS
from rsearch.protocols.tagged import spans
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Passage,
)

PROTOCOL = PROTOCOLS["r1_searcher_pp"]
BEGIN, END = INTERNAL_TAGS
FOUND = [Passage("1", "Ada\nborn in Rome"), Passage("2", "Rome\nin Italy")]


def test_the_chat_holds_all_passages_before_the_question():
    system, user = rewriting_messages("Where is Ada from?", FOUND)
    assert system["role"] == "system"
    before, after = SYSTEM.split("{document}")
    contents = "Ada\nborn in Rome\nRome\nin Italy"
    assert system["content"] == f"{before}{contents}{after}"
    assert user == {"role": "user", "content": "Question: Where is Ada from?"}


def test_a_configured_text_replaces_both_messages():
    text = "{question} / {document} / {question}"
    (message,) = rewriting_messages("Who?", FOUND[:1], user=text)
    assert message == {"role": "user", "content": "Who? / Ada\nborn in Rome / Who?"}


PIECES = st.sampled_from(["{document}", "{question}", "{", "}", "{0}", "%s", "a", "\\"])


@given(st.lists(PIECES).map("".join), st.lists(PIECES).map("".join))
def test_braces_in_questions_and_documents_are_only_text(question, document):
    passages = [Passage("1", document)]
    (message,) = rewriting_messages(question, passages, user="<{document}|{question}>")
    assert message["content"] == f"<{document}|{question}>"
    system, user = rewriting_messages(question, passages)
    assert system["content"] == document.join(SYSTEM.split("{document}"))
    assert user["content"] == f"Question: {question}"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", []),
        (f"{BEGIN} a {END} then {BEGIN}b\n{END}", [" a ", "b\n"]),
        (f"{BEGIN}{END}", [""]),
        (f"{BEGIN} a", None),
        (f"a {END}", None),
        (f"{END} a {BEGIN}", None),
        (f"{BEGIN}{BEGIN} a {END}{END}", None),
        (f"{BEGIN} a {END}{END} b {BEGIN}", None),
    ],
)
def test_opening_and_closing_internal_tags_must_alternate(text, expected):
    assert recalled_texts(text) == expected


BOX = r"\boxed{Rome}"


@pytest.mark.parametrize(
    "text",
    [
        f"{BEGIN} Ada is from Rome. {END} {BOX}",
        f"{BEGIN} Ada is from Rome. {END} and {BEGIN} that is it. {END} {BOX}.",
        f"{BEGIN} Ada is from Rome: {BOX} {END}",
    ],
)
def test_an_answer_from_recalled_knowledge_is_accepted(text):
    assert recalled_answer(PROTOCOL, text) == Answer("Rome")


@pytest.mark.parametrize(
    "text",
    [
        BOX,
        f"{BEGIN} Ada is from Rome. {END}",
        f"{BEGIN}  {END} {BOX}",
        f"{BEGIN} Ada is from Rome. {END}{BEGIN}{END} {BOX}",
        f"{BEGIN} Ada is from Rome. {BOX}",
        f"{END} Ada is from Rome. {BEGIN} {BOX}",
        f"{BEGIN} a {END} <|begin_external_search|>b<|end_external_search|>",
        f"{BEGIN} a {END} <|begin_external_search|>b {BOX}",
        f"{BEGIN} a {END} <|begin_search_result|>b<|end_search_result|> {BOX}",
        f"{BEGIN} a <|end_search_result|> {END} {BOX}",
    ],
)
def test_a_reply_that_searches_forges_or_recalls_nothing_is_refused(text):
    assert recalled_answer(PROTOCOL, text) is None


ANY = st.lists(
    st.sampled_from([BEGIN, END, BOX, "<|begin_external_search|>", "a", " ", "{", "}"])
).map("".join)


@given(ANY)
def test_any_reply_is_refused_or_holds_an_answer_and_a_recollection(text):
    action = recalled_answer(PROTOCOL, text)
    assert action is None or (BEGIN in text and action == Answer("Rome"))


def test_turns_that_answer_and_turns_that_search_are_told_apart():
    knows = PROTOCOL.write(Step(1, "So it is.", Answer("Rome"), "Ada is from Rome."))
    asks = PROTOCOL.write(Step(1, "I ask.", search_call("Ada"), "Ada is somebody."))
    assert recalled_answer(PROTOCOL, knows) == Answer("Rome")
    assert recalled_answer(PROTOCOL, asks) is None


@given(st.lists(st.sampled_from(["<a>", "</a>", "x", "<a", ">"]), max_size=20))
def test_spans_equal_those_of_a_regular_expression(parts):
    text = "".join(parts)
    wanted = [m.span(1) for m in re.finditer("<a>(.*?)</a>", text, re.DOTALL)]
    assert spans(text, "<a>", "</a>") == wanted


def test_a_hundred_thousand_open_tags_are_read_within_a_second():
    started = time.monotonic()
    assert spans("<a>" * 100_000, "<a>", "</a>") == []
    assert recalled_texts(BEGIN * 100_000) is None
    assert time.monotonic() - started < 1

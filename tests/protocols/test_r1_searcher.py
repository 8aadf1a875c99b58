"""R1-Searcher: its tags, its queries, and the transcripts its authors published."""

import gzip
import json
import re

import pytest

from rsearch.protocols.table import PROTOCOLS
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Malformed,
    Passage,
    ToolCall,
)

BASE, CHAT = PROTOCOLS["r1_searcher"], PROTOCOLS["r1_searcher_chat"]
BEGIN, END = "<|begin_of_query|>", "<|end_of_query|>"


@pytest.mark.parametrize(
    "turn, action",
    [
        (f"I look. {BEGIN} river city{END}", search_call("river city")),
        (f"{BEGIN}a{BEGIN} b {END}", search_call("b")),
        (
            f'{BEGIN} "river"\n  "city\t x" {END} more',
            search_call("river city x"),
        ),
        (f"{BEGIN}a{END}{BEGIN}b{END}", search_call("a")),
        (f"{BEGIN}a{END} <answer> X </answer>", search_call("a")),
        ("so </think>\n\n<answer> X </answer>", Answer("X")),
        ("so </think>\n\n<answer> X </answer> and more", Answer("X")),
        ("<answer> a <answer> X </answer>", Answer("X")),
        (f"<answer> X </answer> {BEGIN}a{END}", Answer("X")),
        ("<answer></answer>", Answer("")),
    ],
)
def test_a_turn_is_parsed_as_its_first_complete_action(turn, action):
    for protocol in (BASE, CHAT):
        assert protocol.parse(turn) == action


@pytest.mark.parametrize(
    "turn",
    [
        "",
        f"{BEGIN} {END}",
        f'{BEGIN} "" {END}',
        f"a{END}",
        f"{BEGIN} unfinished",
        "<search>a</search>",
        "</answer>",
        "I stop here.",
    ],
)
def test_any_other_turn_ends_the_rollout(turn):
    for protocol in (BASE, CHAT):
        assert isinstance(protocol.parse(turn), Malformed)
        assert protocol.invalid_message is None


def test_the_base_model_reads_raw_text_and_starts_in_an_open_thought():
    (message,) = BASE.messages(" who ")
    assert message["content"].startswith("The User asks a question, and the Assistant")
    assert message["content"].endswith("\n\nUser: who \nAssistant: ")
    assert not BASE.is_chat and BASE.opening == "<think>"
    assert BASE.stop_strings == (END, "</answer>")


def test_the_chat_model_reads_a_system_message_and_the_question():
    system, user = CHAT.messages(" who ")
    assert user == {"role": "user", "content": " who "}
    assert system["content"].startswith(
        "You are a helpful assistant.\nGiven a question"
    )
    assert CHAT.is_chat and CHAT.opening == "<think>"


def test_documents_are_numbered_lines():
    documents = (
        Passage("1", "Paris\nA city."),
        Passage("2", "Title: Rome Text:  Old."),
    )
    shown = BASE.show_passages(["q"], [documents])
    assert shown.before + shown.content + shown.after == (
        "\n\n<|begin_of_documents|>\n(1)Paris A city.\n(2)Title: Rome Text:  Old.\n"
        "<|end_of_documents|>\n\n"
    )
    assert BASE.show_passages(["q"], [()]).content == "None"


def public_reading(transcript):
    """Return (queries, answer) of a transcript as the public rollout and reward do.

    A query is the text after the last begin tag of a segment. A segment ends with the
    end tag, after which the documents are inserted. The answer is the text after the
    last <answer>.
    """
    queries = []
    before, *after = transcript.split("<|end_of_query|>")
    for segment in [before, *after][: len(after)]:
        last_turn = segment.split("<|end_of_documents|>")[-1]
        assert "<|begin_of_query|>" in last_turn
        query = last_turn.split("<|begin_of_query|>")[-1].replace('"', "").strip()
        queries.append(re.sub(r"\s+", " ", query))
    return queries, transcript.split("<answer>")[-1].split("</answer>")[0].strip()


@pytest.mark.parametrize("name, count", [("hotpotqa", 500), ("bamboogle", 125)])
def test_published_transcripts_are_read_as_their_authors_read_them(
    shared_data, name, count
):
    path = shared_data / "published" / f"r1_searcher_{name}_qwen.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == count
    documents = re.compile(
        r"\n\n<\|begin_of_documents\|>\n.*?<\|end_of_documents\|>\n\n", re.DOTALL
    )
    total, reworded = 0, []
    for row in rows:
        turns = documents.split(row["transcript"])
        *searches, answer = map(BASE.parse, turns)
        assert all(isinstance(action, ToolCall) for action in searches)
        queries, expected = public_reading(row["transcript"])
        assert [action.arguments[0] for action in searches] == queries
        assert len(searches) == row["transcript"].count("<|begin_of_documents|>\n")
        assert answer == Answer(expected)
        if answer.text != row["predicted_answer"].strip():
            reworded.append((answer.text, row["predicted_answer"]))
        total += len(searches)
    assert round(total / count, 2) == {"hotpotqa": 2.11, "bamboogle": 1.98}[name]
    # In one row the published prediction differs from its transcript.
    other = [("27 July 1953", "July 27, 1953")]
    assert reworded == {"hotpotqa": [], "bamboogle": other}[name]

"""Observations that a model writes: what it is shown, and what becomes of failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.writing import PROMPTS, write_observations, writing_messages
from rsearch.types import Passage

FOUND = {
    "who": (Passage("a", "Ada\nAda made it.", 0.9), Passage("b", "Bo\nBo did not.")),
    "when": (Passage("c", "Cy\nIn 1901.", 0.5),),
    "": (),
    "broken": None,
}


def search(queries):
    return [FOUND[query] for query in queries]


def listening(replies):
    """A writer with these replies, and the list of the chats that it is asked."""
    heard = []

    def write(chats):
        heard.extend(chats)
        return [replies[len(heard) - len(chats) + i] for i in range(len(chats))]

    return write, heard


def test_the_writer_sees_the_passages_of_its_query_alone_and_is_told_to_stay_there():
    write, heard = listening([" Ada did.\n", "1901"])
    first, second = write_observations(search, write)(["who", "when"])
    assert heard[0] == [
        {
            "role": "user",
            "content": "#Context\nAda\nAda made it.\n\nBo\nBo did not.\n\n"
            "#Instruction\nAnswer the query based on the given Context. **Do not "
            "provide answer from your own knowledge!!**.\nQuery: who\nResponse:",
        }
    ]
    assert "1901" in heard[1][0]["content"] and "Ada" not in heard[1][0]["content"]
    assert first == (Passage("written from a, b", "\nAda did.", 0.9),)
    assert second[0].text == "1901" and second[0].title == ""


def test_the_papers_words_are_an_alternative():
    chat = writing_messages("Q?", FOUND["when"], prompt="unless_comparison")
    assert "comparison type" in chat[0]["content"]
    assert chat[0]["content"].endswith("Question: Q?\nResponse:")
    with pytest.raises(ValueError, match="must be one of context_only, unless_comp"):
        write_observations(search, None, prompt="paper")


def test_a_failed_search_or_writer_is_a_failed_search_and_nothing_found_stays_nothing():
    write, heard = listening([None, "1901"])
    queries = ["broken", "who", "", "when"]
    broken, who, nothing, when = write_observations(search, write)(queries)
    assert broken is None and who is None and nothing == ()
    assert when[0].text == "1901" and len(heard) == 2
    assert write_observations(search, None)(["", "broken"]) == [(), None]
    assert write_observations(search, None)([]) == []


def test_equal_queries_are_searched_and_written_once():
    write, heard = listening(["Ada."])
    first, second = write_observations(search, write)(["who", "who"])
    assert first == second and len(heard) == 1


@given(st.text(), st.text())
def test_neither_query_nor_passage_can_fill_the_others_place(query, contents):
    for hostile in (contents, contents + "{query}{passages}"):
        (message,) = writing_messages(
            query, (Passage("p", hostile),), prompt="context_only"
        )
        head, _, tail = PROMPTS["context_only"].partition("{passages}")
        tail = tail.replace("{query}", query)
        assert message["content"] == head + hostile.strip() + tail

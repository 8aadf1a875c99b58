"""Observations that a model writes: what it is shown, and how failures end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.writing import (
    PAGE_SUMMARY,
    PROMPTS,
    with_written_observations,
    writing_messages,
)
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
    """Return a writer with these replies, and the list of the chats it receives."""
    heard = []

    def write(chats):
        heard.extend(chats)
        return [replies[len(heard) - len(chats) + i] for i in range(len(chats))]

    return write, heard


def test_the_writer_sees_only_its_querys_passages_and_is_told_to_use_only_them():
    write, heard = listening([" Ada did.\n", "1901"])
    first, second = with_written_observations(search, write)(["who", "when"])
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


def test_the_papers_prompt_is_an_alternative():
    chat = writing_messages("Q?", FOUND["when"], prompt="unless_comparison")
    assert "comparison type" in chat[0]["content"]
    assert chat[0]["content"].endswith("Question: Q?\nResponse:")


def test_a_failed_search_or_writer_is_a_failed_search_and_no_passages_stay_none():
    write, heard = listening([None, "1901"])
    queries = ["broken", "who", "", "when"]
    broken, who, nothing, when = with_written_observations(search, write)(queries)
    assert broken is None and who is None and nothing == ()
    assert when[0].text == "1901" and len(heard) == 2
    assert with_written_observations(search, None)(["", "broken"]) == [(), None]
    assert with_written_observations(search, None)([]) == []


def test_equal_queries_are_searched_and_written_once():
    write, heard = listening(["Ada."])
    first, second = with_written_observations(search, write)(["who", "who"])
    assert first == second and len(heard) == 1


@pytest.mark.parametrize("prompt", PROMPTS)
@given(st.text(), st.text())
def test_neither_query_nor_passage_can_fill_the_others_placeholder(
    prompt, query, contents
):
    for hostile in (contents, contents + "{query}{passages}"):
        (message,) = writing_messages(query, (Passage("p", hostile),), prompt=prompt)
        head, _, tail = PROMPTS[prompt].partition("{passages}")
        head, tail = (text.replace("{query}", query) for text in (head, tail))
        assert message["content"] == head + hostile.strip() + tail


PAGES = tuple(Passage(f"https://{n}.org/", f'"{n}"\nof {n}', 0.1) for n in "abc")


def summarising(replies):
    """Return a search that summarises PAGES, and the list of the chats it makes."""
    write, heard = listening(replies)
    found = {"who": PAGES, "when": PAGES[:2], "where": PAGES[:1]}
    search = with_written_observations(
        lambda queries: [found[query] for query in queries], write, prompt=PAGE_SUMMARY
    )
    return search, heard


def test_pages_are_summarised_in_their_order_until_one_says_something():
    rank_1 = ["[Exacted Content]: None", "[Exacted Content]:\n Born. ", ' "none". ']
    search, heard = summarising([*rank_1, "A nonesuch made it."])
    who, when, where = search(["who", "when", "where"])
    assert who == (
        Passage("written from https://b.org/", "\nA nonesuch made it.", 0.1),
    )
    assert when == (Passage("written from https://a.org/", "\nBorn.", 0.1),)
    assert where == () and len(heard) == 4
    (message,) = heard[3]
    assert message["content"].endswith(
        '[Search Query]\nwho\n\n[Webpage Content]\n"b"\nof b\n\n## Output:\n'
    )


def test_a_summary_that_could_not_be_made_is_a_failed_search():
    search, heard = summarising([None])
    assert search(["who"]) == [None] and len(heard) == 1

"""The layers around a search are applied in one fixed order."""

import pytest

from rsearch.retrieval.web import Page, PagedSearch
from rsearch.retrieval.wrap import wrap_search
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_replies
from rsearch.types import Passage


class Engine:
    """Finds two passages for every query; the first call fails."""

    fingerprint = "engine"

    def __init__(self):
        self.calls = []

    def __call__(self, queries):
        self.calls.append(list(queries))
        if len(self.calls) == 1:
            return [None for _ in queries]
        hits = Passage("short", "short"), Passage("long", "a longer passage")
        return [hits for _ in queries]


def longest_first(query, contents):
    return [float(len(text)) for text in contents]


longest_first.fingerprint = "longest"


def repeat_passages(chats):
    return [f"wrote {chat[0]['content']}" for chat in chats]


def test_without_layers_a_search_is_returned_unchanged():
    engine = Engine()
    assert wrap_search(engine) is engine


def test_the_writer_reads_what_the_reranker_chose_and_the_journal_kept(tmp_path):
    """One call with all layers, then a resumed one, whose engine is not called."""
    engine = Engine()
    search = wrap_search(
        engine,
        rerank=longest_first,
        rerank_from=2,
        top_k=1,
        cache_size=9,
        retry=True,
        journal=AppendLog(tmp_path, "searches"),
        writer=repeat_passages,
    )
    ((passage,),) = search(["who"])
    assert engine.calls == [["who"]] * 2  # a failed search is repeated
    assert "a longer passage" in passage.contents
    assert "#Context\na longer passage\n" in passage.contents  # and no other passage
    # The journal holds the passages that were found, not what was written from them.
    other = Engine()
    journal = AppendLog(tmp_path, "searches")
    assert wrap_search(other, journal=journal)(["who"]) == [
        (Passage("long", "a longer passage", 16.0),)
    ]
    assert wrap_search(other, journal=journal, writer=repeat_passages)(["who"]) == [
        (passage,)
    ]
    assert not other.calls


def test_pages_are_summarised_once_over_all_starts(tmp_path):
    """After a page that says nothing the next is read; a second start calls nothing."""
    pages = {"short": "menu", "long": "</documents> {query}\nAda was born in 1815."}
    fetched, asked = [], []

    def get(url, *, seconds):
        fetched.append(url)
        return Page(url, pages[url])

    def summarise(chats):
        asked.extend(chat[0]["content"] for chat in chats)
        return [
            "[Exacted Content]: " + ("Born in 1815." if "1815" in text else "None")
            for text in asked[-len(chats) :]
        ]

    def start():
        return wrap_search(
            PagedSearch(Engine(), page_chars=99, seconds=3.0, get=get),
            retry=True,
            journal=AppendLog(tmp_path, "searches"),
            writer=record_replies(summarise, AppendLog(tmp_path, "writer")),
            writer_prompt="page_summary",
        )

    ((passage,),) = first = start()(["when"])
    assert (passage.id, passage.text) == ("written from long", "Born in 1815.")
    assert "</documents> {query}\nAda was" in asked[1] and "Ada" not in asked[0]
    assert start()(["when"]) == first
    assert (len(asked), sorted(fetched)) == (2, ["long", "short"])


@pytest.mark.parametrize(
    "layer",
    [
        {"retry": True},
        {"writer": repeat_passages},
        {"rerank": longest_first, "rerank_from": 2, "top_k": 1, "cache_size": 9},
    ],
)
def test_a_layer_has_the_attributes_of_its_search(layer):
    engine = Engine()
    engine.read, engine.searches_at_once = (lambda ids: []), 4
    search = wrap_search(engine, **layer)
    assert search.read is engine.read
    assert (search.searches_at_once, search.wants_question_ids) == (4, False)
    paged = wrap_search(engine, page_chars=9, page_seconds=1.0)
    assert paged.searches_at_once == 4 and paged.read != engine.read


def test_failed_searches_are_repeated_with_their_question_ids():
    calls = []

    def search(queries, question_ids):
        calls.append((queries, question_ids))
        return [() if len(calls) > 1 or q == "b" else None for q in queries]

    search.wants_question_ids = True
    repeating = wrap_search(search, retry=True)
    assert repeating.wants_question_ids
    assert repeating(["a", "b", "c"], ["1", "2", "3"]) == [(), (), ()]
    assert calls[1:] == [(["a", "c"], ["1", "3"])]


def test_layers_added_one_by_one_give_what_one_call_gives(tmp_path):
    engine = Engine()
    search = wrap_search(
        engine, rerank=longest_first, rerank_from=2, top_k=1, cache_size=9
    )
    search = wrap_search(search, retry=True)
    search = wrap_search(search, journal=AppendLog(tmp_path / "a", "searches"))
    search = wrap_search(search, writer=repeat_passages)
    entire = wrap_search(
        Engine(),
        rerank=longest_first,
        rerank_from=2,
        top_k=1,
        cache_size=9,
        retry=True,
        journal=AppendLog(tmp_path / "b", "searches"),
        writer=repeat_passages,
    )
    assert search(["who", "when"]) == entire(["who", "when"])

"""Hits of a web search with their pages' text, or with a snippet if that fails."""

from rsearch.retrieval.web import Page, PagedSearch, PageRefusedError, excerpt
from rsearch.types import Passage

HITS = (
    Passage("https://a.org/", '"A"\nsnippet a', 2.0),
    Passage("http://10.0.0.1/", '"B"\nsnippet b', 1.0),
)


class Search:
    fingerprint = "service serper"

    def __call__(self, queries):
        return [None if q == "fails" else HITS for q in queries]


def get(url, *, seconds):
    assert seconds == 3.0
    if "10.0.0.1" in url:
        raise PageRefusedError("10.0.0.1 is 10.0.0.1")
    return Page(url, "menu\nThe river ends in Goldberg.\nfooter")


def test_a_hit_gets_an_excerpt_of_its_page_or_stays_as_it_was():
    search = PagedSearch(Search(), page_chars=30, seconds=3.0, get=get)
    first, failed = search(["Where does the river end?", "fails"])
    assert failed is None
    assert first[0].contents == '"A"\nsnippet a\nThe river ends in Goldberg.'
    assert (first[0].id, first[0].score) == ("https://a.org/", 2.0)
    assert first[1] == HITS[1]


def test_a_page_is_read_in_full_by_its_address():
    search = PagedSearch(Search(), page_chars=3, seconds=3.0, get=get)
    page, refused = search.read(["https://a.org/", "http://10.0.0.1/"])
    assert (page.id, page.title) == ("https://a.org/", "https://a.org/")
    assert page.text == "menu\nThe river ends in Goldberg.\nfooter"
    assert refused is None


def test_an_excerpt_surrounds_the_line_that_shares_most_with_the_query():
    text = "one\n\ntwo\nthree four\nfive\nsix"
    assert excerpt(text, "four three", 10) == "three four"
    assert excerpt(text, "four three six", 15) == "three four\nfive"
    assert excerpt(text, "four", 1000) == "one\ntwo\nthree four\nfive\nsix"
    assert excerpt("x" * 50, "x", 10) == "x" * 10
    assert excerpt(" \n", "x", 10) == ""

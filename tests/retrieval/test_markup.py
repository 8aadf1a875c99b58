"""Visible text of a page, against the standard library's parser; hostile pages."""

import html.parser
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.retrieval.web import HIDDEN, html_to_text

LENGTH = 1 << 20  # maximum size of a page
HOSTILE = {
    "tags that do not end": "<a ",
    "quotes that do not end": "<a b='",
    "values without quotes": '<a =" ',
    "comments that do not end": "<!--",
    "scripts that do not end": "<script>",
    "tags in tags": "<a",
    "end tags without a name": "</",
    "no tags": "<",
    "references": "&amp;",
    "numbers of no character": "&#1",
    "declarations": "<![foo[",
}


class Reference(html.parser.HTMLParser):
    """The same by the standard library's parser, which is slow."""

    def __init__(self, markup):
        super().__init__()
        self.parts, self._hidden = [], 0
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._hidden += tag in (*HIDDEN, "script", "style")

    def handle_endtag(self, tag):
        if tag in (*HIDDEN, "script", "style"):
            self._hidden = max(0, self._hidden - 1)

    def handle_data(self, data):
        if not self._hidden and data.strip():
            self.parts.append(" ".join(data.split()))


PIECES = st.sampled_from(
    [
        *("<p>", "</p>", "<br/>", "<B class='x'>", "</b >", '<a href="/?a>b">'),
        *("</a>", "<svg>", "</svg>", "<head>", "</HEAD>", "<svg/>", "<!-- <p> -->"),
        *("<script>if (a<b) {}</script>", "<style>p > a {}</style>", "<!DOCTYPE html>"),
        *("text", " two\n words ", "&amp;", "&#65;", "caf\u00e9", "1 < 2", "it's"),
        *("<p title=it's>", "<img alt = 'a > b'>", "&lt;p&gt;", "<!---->"),
    ]
)


@given(st.lists(PIECES, max_size=12).map(" ".join))
def test_the_text_of_a_page_is_that_of_the_standard_librarys_parser(markup):
    """Only line ends differ: that parser ends one at each sign that may begin a tag."""
    assert html_to_text(markup).split() == " ".join(Reference(markup).parts).split()


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_page_is_read_quickly(words):
    began = time.monotonic()
    html_to_text("<p>seen</p>" + words * (LENGTH // len(words)))
    assert time.monotonic() - began < 20  # instead of hours


def test_the_end_tag_of_a_head_may_be_omitted():
    assert html_to_text("<head><title>not seen</title><body>seen") == "seen"


def test_text_around_a_hostile_part_is_read():
    assert html_to_text("<p>seen</p><![foo[bar]]> too <a href='") == "seen\ntoo"
    assert html_to_text("seen &#" + "1" * 9999 + "; too") == "seen \ufffd too"

"""RAG-R1: Search-R1's tags, and a variant with several queries per turn.

The single-query prompt is Table 1 of the paper, which is Search-R1's; that for several
queries is Table 2. Passages are shown as in the public code: `Doc 1: title   text`.
With several queries the results are JSON, {"query": [...], "documents": [...]}, with
each query's documents at the same position as the query.
"""

import json
import re
from collections.abc import Callable, Sequence

from rsearch.protocols.base import Protocol, replace_surrogates
from rsearch.protocols.tagged import SEARCH_R1, listed, plain_join, tagged
from rsearch.types import Cut, Observation, Passage

OPENING_TAG, CLOSING_TAG = "\n<information>\n", "\n</information>\n"
MAX_QUERIES = 3  # "using up to three queries each time"
LIST_ITEM = re.compile(r'(?:"[^"]*"|[^,])+')
QUOTED_ITEM = re.compile(r'"((?:[^"]|"")*)"')
# What may follow the last backslash in half an escape, or in half of a UTF-16 pair.
HALF_ESCAPES = [re.compile(r) for r in ("", r"u[0-9a-fA-F]{0,3}", r"u[dD][89abAB]..")]


def split_quoted(text: str) -> tuple[str, ...]:
    """Split a list of queries at the commas outside double quotes.

    A query that is quoted as a whole loses its quotes, and two quotes in it stand for
    one, as in CSV (RFC 4180). A quote that is never closed is an ordinary character.
    """
    queries = []
    for item in LIST_ITEM.findall(text):
        item = item.strip()
        match = QUOTED_ITEM.fullmatch(item)
        queries.append(match[1].replace('""', '"').strip() if match else item)
    return tuple(query for query in queries if query)


def split_naive(text: str) -> tuple[str, ...]:
    """Split a list of queries at every comma, as the public code does."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def join_quoted(queries: Sequence[str]) -> str:
    """Join queries so that `split_quoted` returns them; quote only where needed.

    An empty query, or one with space around it, does not survive.
    """
    items = []
    for query in queries:
        escaped_query = query.replace('"', '""')
        # Tested with another query after it, into which an open quote would reach.
        is_plain = split_quoted(f'{query},"') == (query, '"')
        items.append(query if is_plain else f'"{escaped_query}"')
    return ", ".join(items)


def _format_document(number: int, passage: Passage) -> str:
    contents = passage.contents.replace("\n", "   ", 1)
    return f"Doc {number}: {contents}"


def ends_outside_escape(text: str) -> bool:
    r"""Return whether the inside of a JSON string may end here, not within `\u00e9`.

    Args:
        text: start of what json.dumps writes between the quotes.
    """
    for half_escape in HALF_ESCAPES:
        for length in range(min(6, len(text) + 1)):
            head, tail = text[: len(text) - length], text[len(text) - length :]
            backslashes = len(head) - len(head.rstrip("\\"))
            if half_escape.fullmatch(tail) and backslashes % 2:
                return False
    return True


def json_results(*, ascii_only: bool) -> Callable[..., Observation]:
    """Return a `show_passages` that writes JSON, indented by two.

    Args:
        ascii_only: whether to escape characters beyond ASCII, as the public code does.
    """

    def escape(text: str) -> str:
        return json.dumps(replace_surrogates(text), ensure_ascii=ascii_only)[1:-1]

    def cut(text: str, *, is_echo: bool = False) -> Cut:
        return Cut(escape(text), is_echo=is_echo, may_end=ends_outside_escape)

    def list_pieces(items):
        for i, item in enumerate(items):
            yield '",\n    "' if i else '"'
            yield item
        yield '"'

    def show_passages(queries: Sequence[str], passages: Sequence[Sequence[Passage]]):
        echoes = [cut(query, is_echo=True) for query in queries]
        documents = []
        for hits in passages:
            lines = [
                _format_document(i, passage) for i, passage in enumerate(hits, start=1)
            ]
            documents.append(cut("\n".join(lines).strip()))
        pieces = (
            '{\n  "query": [\n    ',
            *list_pieces(echoes),
            '\n  ],\n  "documents": [\n    ',
            *list_pieces(documents),
            "\n  ]\n}",
        )
        texts = [p.text if isinstance(p, Cut) else p for p in pieces]
        return Observation(OPENING_TAG, "".join(texts), CLOSING_TAG, pieces)

    return show_passages


def multi_query(
    *,
    quotes_keep_commas: bool = True,
    json_ascii: bool = False,
    max_queries: int = MAX_QUERIES,
) -> Protocol:
    """Return RAG-R1 with several queries per turn.

    Args:
        quotes_keep_commas: whether a comma between double quotes belongs to its query;
            the public code splits at every comma.
        json_ascii: whether results are escaped to ASCII, as in the public code.
        max_queries: how many queries of one turn are searched; the public code searches
            all.
    """
    return tagged(
        "rag_r1_mq",
        system=None,
        user=(
            "Answer the given question. You must conduct reasoning inside <think> and "
            "</think> first every time you get new information. After reasoning, if "
            "you find you lack some knowledge, you can call a search engine by "
            "<search> query_1,query_2 </search> and it will return the top searched "
            "results for each query between <information> and </information>. You can "
            "search as many times as your want, using up to three queries each time. "
            "If you find no further external knowledge needed, you can directly "
            "provide the answer inside <answer> and </answer>, without detailed "
            "illustrations. For example, <answer> Beijing </answer>. "
            "Question: {question}\n"
        ),
        add_question_mark=True,
        show_passages=json_results(ascii_only=json_ascii),
        split=split_quoted if quotes_keep_commas else split_naive,
        join=join_quoted if quotes_keep_commas else plain_join,
        max_queries=max_queries,
        with_settings=multi_query,
    )


RAG_R1_SQ = tagged(
    "rag_r1_sq",
    system=None,
    user=SEARCH_R1.user,
    add_question_mark=True,
    show_passages=listed(OPENING_TAG, CLOSING_TAG, _format_document),
)
"""RAG-R1 (2025) with one query per turn, the system instruction of its Table 1."""

RAG_R1_MQ = multi_query()
"""RAG-R1 with up to three queries per turn, the system instruction of its Table 2."""

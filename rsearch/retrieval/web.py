"""Hits of a web search with what their pages say, where these can be had."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rsearch.retrieval.fetch import Page, RefusedError, fetch
from rsearch.types import Passage

FETCHES = 16  # pages at once
WORD = re.compile(r"\w+")


class PagedSearch:
    """A SearchFn whose passages are pages: each hit's id is the URL of one.

    A page that cannot be had leaves the hit as it was. Of a long page those lines are
    kept that share most words with query and hit.

    Args:
        search: finds the hits, such as a RemoteSearch of a web search.
        page_chars: of a page that a passage keeps.
        seconds: for each page.
        get: fetches one.

    Attributes:
        fingerprint: equal ones find the same way.
    """

    def __init__(
        self,
        search,
        *,
        page_chars: int,
        seconds: float,
        get: Callable[..., Page] = fetch,
    ):
        self._search, self._chars, self._seconds = search, page_chars, seconds
        self._get = get
        self.fingerprint = f"{search.fingerprint} pages {page_chars}"

    def __str__(self):
        """What is searched."""
        return f"{self._search}, with pages"

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """[queries] passages of each, as the search orders them; None where it failed.

        Args:
            queries: texts.
        """
        found = self._search(queries)
        hits = {
            (query, hit): hit
            for query, own in zip(queries, found, strict=True)
            for hit in own or ()
        }
        with ThreadPoolExecutor(FETCHES) as pool:
            pages = dict(zip(hits, pool.map(self._page, hits), strict=True))
        return [
            None if own is None else tuple(pages[query, hit] for hit in own)
            for query, own in zip(queries, found, strict=True)
        ]

    def _page(self, asked) -> Passage:
        query, hit = asked
        try:
            page = self._get(hit.id, seconds=self._seconds)
        except RefusedError:
            return hit
        text = excerpt(page.text, f"{query} {hit.text}", self._chars)
        if not text:
            return hit
        return Passage(hit.id, f"{hit.title}\n{hit.text}\n{text}", hit.score)


def excerpt(text: str, wanted: str, chars: int) -> str:
    """Consecutive lines of a text, those around the one that shares most words.

    Args:
        text: hostile.
        wanted: words that are looked for.
        chars: of the excerpt, at most.
    """
    lines = [line[:chars] for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    words = set(WORD.findall(wanted.lower()))
    shared = [len(words & set(WORD.findall(line.lower()))) for line in lines]
    first = last = max(range(len(lines)), key=shared.__getitem__)
    size = len(lines[first])
    while True:  # grows to the better side, as long as there is room
        before = shared[first - 1] if first else -1
        after = shared[last + 1] if last + 1 < len(lines) else -1
        place = first - 1 if before > after else last + 1
        if max(before, after) < 0 or size + 1 + len(lines[place]) > chars:
            return "\n".join(lines[first : last + 1])
        size += 1 + len(lines[place])
        first, last = min(first, place), max(last, place)

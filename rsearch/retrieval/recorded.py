"""What a service has found, kept: a run that goes on is shown the same text again."""

import json
from collections.abc import Sequence

from rsearch.journal import Journal
from rsearch.types import Passage, SearchFn


class Recorded:
    """A SearchFn that asks another once for each query, in all starts of a stage.

    What a service finds may change at any time, and a policy has then learnt from what
    nobody can find again. A search that has failed is not kept.

    Args:
        search: of the service.
        journal: of the stage's searches, never cleared.
    """

    def __init__(self, search: SearchFn, journal: Journal):
        self._search, self._journal = search, journal

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """[queries] passages of each, best first; None where the search has failed."""
        found = {query: self._kept(query) for query in dict.fromkeys(queries)}
        new = [query for query, passages in found.items() if passages is None]
        if new:
            for query, passages in zip(new, self._search(new), strict=True):
                found[query] = passages
                if passages is not None:
                    told = [[p.id, p.contents, p.score] for p in passages]
                    self._journal.add(["search", query], json.dumps(told).encode())
        return [found[query] for query in queries]

    def _kept(self, query):
        body = self._journal.get(["search", query])
        if body is None:
            return None
        return tuple(Passage(*told) for told in json.loads(body))

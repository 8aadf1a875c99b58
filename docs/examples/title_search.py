"""A search engine: passages whose title occurs in the query, the longest title first.

Any function that returns each query's passages, best first, is a search engine. None in
place of a query's passages means that its search failed. The result must depend only on
the query, since a resumed run searches again.
"""

import functools
import json
import os

from rsearch.types import Passage


@functools.cache
def corpus():
    """Return [(title in lower case, passage)] of the file that CORPUS names."""
    with open(os.environ["CORPUS"], encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    passages = [Passage(row["id"], row["contents"]) for row in rows]
    return [(passage.title.strip('"').lower(), passage) for passage in passages]


def find(queries):
    """Return the passages of each query."""
    results = []
    for query in queries:
        hits = [hit for hit in corpus() if hit[0] in query.lower()]
        hits.sort(key=lambda hit: -len(hit[0]))
        results.append([passage for _, passage in hits])
    return results

"""A search engine: passages whose title stands in the query, the longest title first.

Any function (queries) -> for each query its passages, best first, is a search engine;
None in place of a query's passages says that its search failed. It must depend on the
query alone: a resumed run asks again.
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

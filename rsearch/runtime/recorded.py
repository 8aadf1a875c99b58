"""What services have answered, kept: a run that goes on is told the same again.

What a service finds, or a model at an endpoint replies, may be another thing at any
time, and a policy has then learnt from what nobody can be told again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence

from rsearch.runtime.in_flight import InFlight
from rsearch.runtime.journal import Journal
from rsearch.types import GenerateFn, Passage, SearchFn


def recorded_search(search: SearchFn, journal: Journal) -> SearchFn:
    """A SearchFn that asks another once for each query, in all starts of a stage.

    Args:
        search: of a service. A search that has failed, which is None, is not kept.
        journal: of the stage's searches, never cleared.

    Returns:
        It, of which as many calls may overlap as of the other.
    """

    def told(passages):
        return [[p.id, p.contents, p.score] for p in passages]

    def heard(rows):
        return tuple(Passage(*row) for row in rows)

    answer = _asking_once(search, journal, told, heard)
    answer.searches_at_once = getattr(search, "searches_at_once", 1)
    return answer


def recorded_replies(generate: GenerateFn, journal: Journal) -> GenerateFn:
    """A GenerateFn that asks another once for each chat, in all starts of a stage.

    Args:
        generate: of an endpoint. A call that has failed, which is None, is not kept.
        journal: of what this model has replied in the stage, never cleared.
    """
    return _asking_once(generate, journal, str, str)


def _asking_once(ask: Callable, journal: Journal, told: Callable, heard: Callable):
    """`ask` with a memory: of answers, written as `told` and read as `heard`."""
    in_flight = InFlight()

    def known(names):
        bodies = {name: journal.get([name]) for name in names}
        return {n: heard(json.loads(b)) for n, b in bodies.items() if b is not None}

    def answer(asked: Sequence) -> list:
        names = [_name(one) for one in asked]
        named = dict(zip(names, asked, strict=True))

        def ask_and_keep(new):
            values = ask([named[name] for name in new])
            for name, value in zip(new, values, strict=True):
                if value is not None:
                    journal.add([name], json.dumps(told(value)).encode())
            return values

        found = in_flight(names, known=known, ask=ask_and_keep)
        return [found[name] for name in names]

    return answer


def _name(asked) -> str:
    """Of a query or a chat, which may have any length."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

"""Record what services answer, so that a resumed run sees the same answers.

A retriever or a model at an endpoint may answer differently at any time, and the policy
has then learnt from text that no later start could see again. `record_search` and
`record_replies` wrap a service with an AppendLog; `SingleFlight` keeps threads that ask
for one key at the same time from asking twice.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future

from rsearch.runtime.journal import AppendLog
from rsearch.types import GenerateFn, Passage, SearchFn, copy_search_attributes


def record_search(search: SearchFn, log: AppendLog) -> SearchFn:
    """Return a SearchFn that asks another once for each query, over all starts.

    Args:
        search: of a service. A search that has failed, which is None, is not recorded.
        log: of the stage's searches, never cleared.

    Returns:
        The SearchFn; as many of its calls may overlap as of the other.
    """

    def to_json(passages):
        return [[p.id, p.contents, p.score] for p in passages]

    def from_json(rows):
        return tuple(Passage(*row) for row in rows)

    return copy_search_attributes(search, _record(search, log, to_json, from_json))


def record_replies(
    generate: GenerateFn, log: AppendLog, *, made_from: Sequence = ()
) -> GenerateFn:
    """Return a GenerateFn that asks another once for each chat, over all starts.

    Args:
        generate: of an endpoint. A call that has failed, which is None, is not
            recorded.
        log: of this model's replies, never cleared.
        made_from: JSON values that a reply follows from beside its chat. With others it
            is asked for again; a stage's model has none, as the run is bound to it.
    """
    return _record(generate, log, str, str, made_from=made_from)


def _record(
    ask: Callable,
    log: AppendLog,
    to_json: Callable,
    from_json: Callable,
    *,
    made_from: Sequence = (),
):
    """Return `ask` behind a log of its answers, stored as `to_json` of each."""
    single_flight = SingleFlight()

    def read_log(keys):
        bodies = {key: log.get([*made_from, key]) for key in keys}
        return {k: from_json(json.loads(b)) for k, b in bodies.items() if b is not None}

    def ask_recorded(requests: Sequence) -> list:
        keys = [_key_of(request) for request in requests]
        request_of = dict(zip(keys, requests, strict=True))

        def ask_and_record(new_keys):
            answers = ask([request_of[key] for key in new_keys])
            for key, answer in zip(new_keys, answers, strict=True):
                if answer is not None:
                    body = json.dumps(to_json(answer)).encode()
                    log.add([*made_from, key], body)
            return answers

        answers = single_flight(keys, known=read_log, ask=ask_and_record)
        return [answers[key] for key in keys]

    return ask_recorded


def _key_of(request) -> str:
    """Return a digest: a query or a chat may have any length."""
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()


class SingleFlight:
    """A call that several threads may make at once, each key in flight only once.

    A caller whose key is already in flight waits for it, and gets the same value or the
    same exception.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._in_flight: dict[Hashable, Future] = {}

    def __call__(
        self,
        keys: Iterable[Hashable],
        *,
        known: Callable[[Sequence], dict],
        ask: Callable[[Sequence], Sequence],
    ) -> dict:
        """Return {key: value} of all these keys.

        Args:
            keys: some may be the same.
            known: (keys) -> {key: value} of those that need not be asked for.
            ask: (keys) -> the value of each. It stores what later callers shall find as
                known before it returns: from then on they may claim the keys.

        Raises:
            BaseException: as raised by `known` or `ask`, of this caller or of the one
                that had claimed a key.
        """
        # Keys are claimed before they are looked up: another thread may store an
        # answer between the two.
        claimed, futures = self._claim(keys)
        values = {}
        try:
            if claimed:
                values |= self._resolve(known(claimed))
            missing = [key for key in claimed if key not in values]
            if missing:
                values |= self._resolve(dict(zip(missing, ask(missing), strict=True)))
        except BaseException as error:
            with self._lock:
                for key in claimed:
                    if key not in values:
                        self._in_flight.pop(key).set_exception(error)
            raise
        # Waiting comes last: two callers could otherwise wait for each other's keys.
        return values | {key: future.result() for key, future in futures.items()}

    def _claim(self, keys):
        """Claim keys; return those, and {key: Future} of keys that are in flight."""
        claimed = []
        futures = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._in_flight:
                    futures[key] = self._in_flight[key]
                else:
                    self._in_flight[key] = Future()
                    claimed.append(key)
        return claimed, futures

    def _resolve(self, values):
        """Hand {key: value} to all threads that wait for these keys; return it."""
        with self._lock:
            for key, value in values.items():
                self._in_flight.pop(key).set_result(value)
        return values

"""Record the answers of services, so that a resumed run sees the same answers.

A retriever or a model at an endpoint may answer differently at any time; the policy
would then have learnt from text that no later start can see again. `record_search` and
`record_replies` wrap a service with an AppendLog. `SingleFlight` keeps threads that
request the same key at the same time from calling the service twice.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future

from rsearch.runtime.journal import AppendLog
from rsearch.types import GenerateFn, Passage, SearchFn, copy_search_attributes


def record_search(search: SearchFn, log: AppendLog) -> SearchFn:
    """Return a SearchFn that calls another one once per query, across all starts.

    Args:
        search: SearchFn of a service. A failed search, whose result is None, is not
            recorded.
        log: log of the stage's searches, which is never cleared.

    Returns:
        The SearchFn; as many of its calls may overlap as calls of `search`.
    """

    def to_json(passages):
        return [[p.id, p.contents, p.score] for p in passages]

    def from_json(rows):
        return tuple(Passage(*row) for row in rows)

    return copy_search_attributes(search, _add_log(search, log, to_json, from_json))


def record_replies(
    generate: GenerateFn, log: AppendLog, *, made_from: Sequence = ()
) -> GenerateFn:
    """Return a GenerateFn that calls another one once per chat, across all starts.

    Args:
        generate: GenerateFn of an endpoint. A failed call, whose result is None, is not
            recorded.
        log: log of this model's replies, which is never cleared.
        made_from: JSON values that, besides the chat, determine a reply. If they
            change, the endpoint is called again. A stage's model has none, because the
            run is bound to it.
    """
    return _add_log(generate, log, str, str, made_from=made_from)


def _add_log(
    call: Callable,
    log: AppendLog,
    to_json: Callable,
    from_json: Callable,
    *,
    made_from: Sequence = (),
):
    """Wrap `call` with a log of its answers, each stored in the form of `to_json`."""
    single_flight = SingleFlight()

    def read_log(keys):
        bodies = {key: log.get([*made_from, key]) for key in keys}
        return {k: from_json(json.loads(b)) for k, b in bodies.items() if b is not None}

    def call_recorded(requests: Sequence) -> list:
        # Digests, since a query or a chat may have any length.
        texts = [json.dumps(request).encode() for request in requests]
        keys = [hashlib.sha256(text).hexdigest() for text in texts]
        requests_by_key = dict(zip(keys, requests, strict=True))

        def call_and_record(new_keys):
            answers = call([requests_by_key[key] for key in new_keys])
            for key, answer in zip(new_keys, answers, strict=True):
                if answer is not None:
                    body = json.dumps(to_json(answer)).encode()
                    log.add([*made_from, key], body)
            return answers

        answers = single_flight(keys, read_stored=read_log, fetch=call_and_record)
        return [answers[key] for key in keys]

    return call_recorded


class SingleFlight:
    """A call for several threads in which each key is in flight only once.

    If a caller's key is already in flight, it waits for that call, and gets the same
    value or the same exception.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._in_flight: dict[Hashable, Future] = {}

    def __call__(
        self,
        keys: Iterable[Hashable],
        *,
        read_stored: Callable[[Sequence], dict],
        fetch: Callable[[Sequence], Sequence],
    ) -> dict:
        """Return {key: value} of all these keys.

        Args:
            keys: the keys, perhaps with repetitions.
            read_stored: (keys) -> {key: value} of the keys whose values are stored.
            fetch: (keys) -> the value of each key. Before it returns it must store the
                values for `read_stored`, because later callers may then claim the keys.

        Raises:
            BaseException: as raised by `read_stored` or `fetch`, in this call or in the
                call that had claimed a key.
        """
        # Keys are claimed before the lookup; otherwise another thread might store an
        # answer between the two.
        claimed_keys, futures = self._claim(keys)
        values = {}
        try:
            if claimed_keys:
                values |= self._resolve(read_stored(claimed_keys))
            missing = [key for key in claimed_keys if key not in values]
            if missing:
                values |= self._resolve(dict(zip(missing, fetch(missing), strict=True)))
        except BaseException as error:
            with self._lock:
                for key in claimed_keys:
                    if key not in values:
                        self._in_flight.pop(key).set_exception(error)
            raise
        # Waiting comes last; otherwise two callers could wait for each other's keys.
        return values | {key: future.result() for key, future in futures.items()}

    def _claim(self, keys):
        """Claim keys; return the claimed ones, and {key: Future} of those in flight."""
        claimed_keys, futures = [], {}
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._in_flight:
                    futures[key] = self._in_flight[key]
                else:
                    self._in_flight[key] = Future()
                    claimed_keys.append(key)
        return claimed_keys, futures

    def _resolve(self, values):
        """Pass {key: value} to all threads that wait for these keys, and return it."""
        with self._lock:
            for key, value in values.items():
                self._in_flight.pop(key).set_result(value)
        return values

"""What several threads ask for at once, asked for by one of them and told to all."""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future


class InFlight:
    """Keys that are being asked for, each by one caller at a time; of several threads.

    Who asks for a key meanwhile waits, and has the same value or the same exception.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._claimed: dict[Hashable, Future] = {}

    def __call__(
        self,
        keys: Iterable[Hashable],
        *,
        known: Callable[[Sequence], dict],
        ask: Callable[[Sequence], Sequence],
    ) -> dict:
        """{key: value} of all these keys.

        Args:
            keys: some may be the same.
            known: (keys) -> {key: value} of those that need not be asked for.
            ask: (keys) -> the value of each. What later callers shall find as known is
                stored when it returns: from then on they may claim the keys.

        Raises:
            BaseException: what `known` or `ask` has raised, here or for who had a key.
        """
        # Claimed before it is looked for: it may be stored between the two.
        own, others = self._claim(keys)
        found = {}
        try:
            if own:
                found |= self._settle(known(own))
            left = [key for key in own if key not in found]
            if left:
                found |= self._settle(dict(zip(left, ask(left), strict=True)))
        except BaseException as error:
            with self._lock:
                for key in own:
                    if key not in found:
                        self._claimed.pop(key).set_exception(error)
            raise
        # Last: two callers could wait for each other's.
        return found | {key: future.result() for key, future in others.items()}

    def _claim(self, keys):
        """The keys that are this caller's from now on, and {key: Future} of others'."""
        own, others = [], {}
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._claimed:
                    others[key] = self._claimed[key]
                else:
                    self._claimed[key] = Future()
                    own.append(key)
        return own, others

    def _settle(self, values):
        """Tells {key: value} to all that wait for these keys; gives it back."""
        with self._lock:
            for key, value in values.items():
                self._claimed.pop(key).set_result(value)
        return values

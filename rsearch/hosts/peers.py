"""A watch over the other processes of a run: none waits for ever for one that is gone.

Each tells the first host's key-value store that it is alive, once a second, and looks
what the others tell. One that has failed, was told to stop, or is not heard of ends all
of them, by name, whatever they are waiting for.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

from rsearch.hosts import preemption

FAILED = "rsearch/failed/"  # where the first to fail says so
ALIVE = "rsearch/alive/"  # + number: the latest beat, and who it is from
LEFT = "rsearch/left/"  # + number: it ends now
PREEMPTED = "was told to stop"
BEAT_SECONDS = 1.0
LEAVING_SECONDS = 3.0  # for the others to end before the first host does
GRACE_SECONDS = 10.0  # for a host to end by itself, once one has failed
LONGEST_WAIT = 7 * 86_400_000  # milliseconds that one host may work while others wait

_waits = itertools.count()  # how often all have waited for each other


def await_all() -> None:
    """Waits for all processes, however long they work.

    An exchange does not: over CPUs, Gloo gives it up after half an hour.
    """
    from jax._src import distributed  # its barriers have no public name

    client = distributed.global_state.client
    if client is not None:
        client.wait_at_barrier(f"rsearch/waits/{next(_waits)}", LONGEST_WAIT)


class Peers:
    """What a host knows of the others.

    Args:
        client: of JAX's distributed runtime: its key-value store.
        index: number of this host.
        stall_seconds: one that is not heard of for so long is given up; 0 = nobody is,
            as where a library may keep all of Python waiting for minutes.
    """

    def __init__(self, client, index: int, stall_seconds: float):
        self._client, self._index, self._stall = client, index, stall_seconds
        self._heard: dict[int, tuple[str, float]] = {}  # the last beat, and when
        self._last_loop = time.monotonic()
        self.is_over = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator:
        """Within it this host beats, and ends where another has failed."""
        threads = [
            threading.Thread(target=own, daemon=True)
            for own in (self._watch, self._guard)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.is_over.set()
            threads[1].join()
            # It may be waiting for a host that is gone.
            threads[0].join(2 * BEAT_SECONDS)

    def tell(self, error: str) -> None:
        """Tells the others with what this host has failed."""
        with contextlib.suppress(Exception):  # another has failed before
            self._client.key_value_set(f"{FAILED}first", f"{self._index} {error}")

    def leave(self) -> None:
        """Tells the first host that this one ends now."""
        self._client.key_value_set(f"{LEFT}{self._index}", "now")

    def await_others(self, count: int) -> None:
        """Time for so many others to end: JAX aborts those whose first host is gone."""
        end = time.monotonic() + LEAVING_SECONDS
        with contextlib.suppress(Exception):  # the store is closed: they are gone
            while len(self._client.key_value_dir_get(LEFT)) < count:
                if time.monotonic() > end:
                    return
                time.sleep(0.05)
        time.sleep(0.1)

    def await_silence(self) -> None:
        """Time in which a host that is gone is missed, and ends this one by its name.

        What fails here in an exchange has mostly failed there.
        """
        if self._stall:
            self.is_over.wait(self._stall + 3 * BEAT_SECONDS)

    def end_later(self) -> None:
        """Ends this process when the others have ended, unless it does so by itself."""
        late = threading.Timer(3 * GRACE_SECONDS, os._exit, (1,))
        late.daemon = True
        late.start()

    def _watch(self):
        number = 0
        while not self.is_over.wait(BEAT_SECONDS):
            number += 1
            try:
                beat = f"{number} {socket.gethostname()}"
                name = f"{ALIVE}{self._index}"
                self._client.key_value_set(name, beat, allow_overwrite=True)
                beats = self._client.key_value_dir_get(ALIVE)
                failed = self._client.key_value_dir_get(FAILED)
            except Exception:  # the first host is gone, or slow: see `_guard`
                continue
            self._last_loop = time.monotonic()
            if failed:
                return self._follow(failed[0][1])
            stalled = self._stalled(beats)
            if stalled is not None:
                self._give_up(stalled)

    def _stalled(self, beats) -> str | None:
        """Who has not been heard of for too long, if somebody has not."""
        now = time.monotonic()
        for name, beat in beats:
            number = int(name.rpartition("/")[2])
            if self._heard.get(number, ("",))[0] != beat:
                self._heard[number] = beat, now
            elif self._stall and now - self._heard[number][1] > self._stall:
                return f"host {number} ({beat.partition(' ')[2]})"
        return None

    def _follow(self, told):
        """Ends as the host that has failed says, some time after it."""
        number, _, error = told.partition(" ")
        is_preempted = error == PREEMPTED
        what = error if is_preempted else f"has failed: {error}"
        preemption.tell(f"error: host {number} {what}")
        if not self.is_over.wait(GRACE_SECONDS):
            os._exit(preemption.EXIT_CODE if is_preempted else 1)

    def _guard(self):
        """Looks whether the first host still answers the watch."""
        while not self.is_over.wait(BEAT_SECONDS):
            if self._stall and time.monotonic() - self._last_loop > self._stall:
                self._give_up("host 0, where the run's hosts meet,")

    def _give_up(self, who):
        """A machine that hangs is no fault of the run's: it is to be begun again."""
        silent = f"has not been heard of for {self._stall:g} s"
        preemption.tell(f"error: {who} {silent}; ending")
        os._exit(preemption.EXIT_CODE)

"""Heartbeats between the hosts of a run, so that none waits for ever for a lost one.

Each host writes a heartbeat to the first host's key-value store once a second, and
reads those of the others. When a host fails, receives a request to stop, or falls
silent, every other host prints its name and ends, whatever it is waiting for.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from rsearch.hosts import preemption

FAILURE_PREFIX = "rsearch/failed/"  # the first failure: host number and error
ALIVE = "rsearch/alive/"  # + host number: its latest beat and its host name
EXIT_PREFIX = "rsearch/left/"  # + host number: that host is about to end
PREEMPTED = "was told to stop"
BEAT_SECONDS = 1.0
LEAVING_SECONDS = 3.0  # how long the first host waits for the others to end
GRACE_SECONDS = 10.0  # how long a host may take to end after another has failed
MAX_WAIT_MS = 7 * 86_400_000  # how long one host may work while the others wait

_barrier_ids = itertools.count()


def wait_for_all_hosts() -> None:
    """Wait until all processes have reached this call, however long that takes.

    A collective would not wait as long: on CPUs, Gloo gives up after half an hour.
    """
    from jax._src import distributed  # its barriers have no public name

    client = distributed.global_state.client
    if client is not None:
        client.wait_at_barrier(f"rsearch/waits/{next(_barrier_ids)}", MAX_WAIT_MS)


class Peers:
    """The heartbeat of this host, and its view of the other hosts.

    Args:
        client: client of JAX's distributed runtime, which has the key-value store.
        stall_seconds: a host that is silent for this long counts as lost; 0 = never,
            for runs in which a library may hold Python's GIL for minutes.
    """

    def __init__(self, client: Any, index: int, stall_seconds: float):
        self._client = client
        self._index = index
        self._stall = stall_seconds
        self._last_beats: dict[int, tuple[str, float]] = {}  # (beat, time it changed)
        self._last_loop = time.monotonic()
        self.is_over = threading.Event()

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Send heartbeats within the block; end the process if another host fails."""
        watch = threading.Thread(target=self._watch, daemon=True)
        guard = threading.Thread(target=self._guard, daemon=True)
        watch.start()
        guard.start()
        try:
            yield
        finally:
            self.is_over.set()
            guard.join()
            # The watch thread may be blocked in a call to a lost host.
            watch.join(2 * BEAT_SECONDS)

    def report_failure(self, error: str) -> None:
        """Tell the other hosts that this one has failed, and with which error."""
        with contextlib.suppress(Exception):  # another host has reported a failure
            self._client.key_value_set(
                f"{FAILURE_PREFIX}first", f"{self._index} {error}"
            )

    def report_exit(self) -> None:
        """Tell the first host that this one is about to end."""
        self._client.key_value_set(f"{EXIT_PREFIX}{self._index}", "now")

    def wait_for_exits(self, count: int) -> None:
        """Give `count` other hosts time to end; JAX aborts any that outlive host 0."""
        end = time.monotonic() + LEAVING_SECONDS
        with contextlib.suppress(Exception):  # the store is closed: they have ended
            while len(self._client.key_value_dir_get(EXIT_PREFIX)) < count:
                if time.monotonic() > end:
                    return
                time.sleep(0.05)
        time.sleep(0.1)

    def wait_for_stall(self) -> None:
        """Give the watch thread time to notice that another host is lost.

        A collective that fails here has usually failed because of another host. The
        watch thread prints that host's name as it ends this process.
        """
        if self._stall:
            self.is_over.wait(self._stall + 3 * BEAT_SECONDS)

    def exit_after_grace(self) -> None:
        """End this process after the others' grace period, if it has not ended yet."""
        timer = threading.Timer(3 * GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _watch(self):
        """Write this host's heartbeat, and read those of the others, once a second."""
        for number in itertools.count():
            # The first one is sent at once, so that the others miss a host that is lost
            # in its first second.
            if number and self.is_over.wait(BEAT_SECONDS):
                return
            try:
                beat = f"{number} {socket.gethostname()}"
                name = f"{ALIVE}{self._index}"
                self._client.key_value_set(name, beat, allow_overwrite=True)
                beats = self._client.key_value_dir_get(ALIVE)
                failures = self._client.key_value_dir_get(FAILURE_PREFIX)
            except Exception:  # the first host is lost or slow: see `_guard`
                continue
            self._last_loop = time.monotonic()
            if failures:
                return self._end_with_failed_host(failures[0][1])
            stalled_host = self._find_stalled(beats)
            if stalled_host is not None:
                self._end_for_silence(stalled_host)

    def _find_stalled(self, beats) -> str | None:
        """Return a host that has been silent for too long, for messages, or None."""
        now = time.monotonic()
        for name, beat in beats:
            number = int(name.rpartition("/")[2])
            if self._last_beats.get(number, ("",))[0] != beat:
                self._last_beats[number] = beat, now
            elif self._stall and now - self._last_beats[number][1] > self._stall:
                return f"host {number} ({beat.partition(' ')[2]})"
        return None

    def _end_with_failed_host(self, report):
        """End this process once the grace period after another's failure is over."""
        number, _, error = report.partition(" ")
        is_preempted = error == PREEMPTED
        reason = error if is_preempted else f"has failed: {error}"
        preemption.write_stderr(f"error: host {number} {reason}")
        if self.is_over.wait(GRACE_SECONDS):
            return
        if is_preempted:
            os._exit(preemption.EXIT_CODE)
        # As it exits, the failed host waits until all hosts have disconnected. If this
        # one ended first, JAX would abort that process, with a long stack trace.
        disconnect = threading.Thread(target=self._client.shutdown, daemon=True)
        disconnect.start()
        disconnect.join(LEAVING_SECONDS)
        time.sleep(0.1)  # until the first host's service has replied to the others
        os._exit(1)

    def _guard(self):
        """End this process if the first host no longer answers the watch thread."""
        while not self.is_over.wait(BEAT_SECONDS):
            if self._stall and time.monotonic() - self._last_loop > self._stall:
                self._end_for_silence("host 0, the coordinator,")

    def _end_for_silence(self, host):
        """End this process because a host is silent.

        The exit code asks for a restart, because a machine that hangs is not the run's
        fault.
        """
        silence = f"has not been heard from for {self._stall:g} s"
        preemption.write_stderr(f"error: {host} {silence}; ending")
        os._exit(preemption.EXIT_CODE)

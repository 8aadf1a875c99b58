"""Machines that are taken away: what a run does when it is told to stop.

SIGTERM, SIGINT, SIGUSR1 or SIGHUP asks a run to stop. It comes to a moment at which
what it has is whole, saves that, and ends with code 75: the same command goes on from
there. Where nothing would be lost it ends at once; where saving takes longer than its
grace, it ends without, and goes on from its last checkpoint. A second signal ends it at
once.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class PreemptedError(BaseException):
    """The run was told to stop; like KeyboardInterrupt nobody else handles it."""


class OutageError(PreemptedError):
    """What the run asks is away for too long: it is saved, and to be begun again."""


class _Watch:
    """What is known of the signals that have come."""

    def __init__(self):
        self.asked = threading.Event()
        self.lock = threading.Lock()
        self.holders = 0  # blocks of `holding` under way
        self.leave = None  # called before this process ends itself
        self.late = None  # the timer of the grace


_watch = _Watch()
_last_words = None  # called before `leave` ends the process


@contextlib.contextmanager
def watching(grace_seconds: float):
    """Within it the signals ask to stop; for the main thread of a process.

    A thread hears them at once, whatever the main thread is in: a compilation or a
    search lets no handler of Python's run.

    Args:
        grace_seconds: from the first signal until the process ends unsaved.
    """
    global _watch
    _watch = watch = _Watch()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {name: signal.getsignal(name) for name in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # under nohup
        del before[signal.SIGHUP]
    for name in before:
        signal.signal(name, lambda *_: None)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    hearing = threading.Thread(
        target=_hear, args=(ours, watch, grace_seconds), daemon=True
    )
    hearing.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for name, handler in before.items():
            signal.signal(name, handler)
        theirs.close()  # which ends the thread
        hearing.join()
        ours.close()
        if watch.late is not None:
            watch.late.cancel()
        _watch = _Watch()


def _hear(ours, watch, grace_seconds):
    """Waits for signals until the other end is closed."""
    while heard := ours.recv(1):
        name = signal.Signals(heard[0]).name
        if watch.asked.is_set():
            _end(watch, f"{name} again: ending at once")
        with watch.lock:
            watch.asked.set()
            if not watch.holders:
                _end(watch, f"{name}: nothing here is unsaved; ending")
        tell(f"{name}: saving what is unsaved, at most {grace_seconds:g} s")
        told = "the grace is over; ending without a save"
        watch.late = threading.Timer(grace_seconds, _end, (watch, told))
        watch.late.daemon = True
        watch.late.start()


def tell(text: str) -> None:
    """One line on stderr, from any thread: rich's console may be in use."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _end(watch, text):
    """Ends the process, whatever its other threads are in."""
    tell(text)
    if watch.leave is not None:
        with contextlib.suppress(Exception):
            watch.leave()
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def holding():
    """Within it there is something to be saved: who is here calls `check` often."""
    watch = _watch
    with watch.lock:
        watch.holders += 1
    try:
        yield
    finally:
        with watch.lock:
            watch.holders -= 1
        # Told while what was held was put away: nobody inside asks any more.
        if not watch.holders and sys.exc_info()[0] is None:
            check()


def is_asked() -> bool:
    """Whether this process was told to stop."""
    return _watch.asked.is_set()


def check() -> None:
    """Raises PreemptedError if the process was told to stop."""
    if is_asked():
        raise PreemptedError


def leave(code: int) -> None:
    """Ends the process with an exit code, of a run that was told to stop promptly.

    Python would wait for a search that goes on in a thread.
    """
    if code == EXIT_CODE:
        sys.stdout.flush()
        sys.stderr.flush()
        if _last_words is not None:
            with contextlib.suppress(Exception):
                _last_words()
        os._exit(code)
    sys.exit(code)


def before_leave(say) -> None:
    """Has `say()` called as the last thing that `leave` does."""
    global _last_words
    _last_words = say


def before_end(leave) -> None:
    """Has `leave()` called before a signal ends the process without an exception."""
    _watch.leave = leave

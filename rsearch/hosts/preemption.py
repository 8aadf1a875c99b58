"""Stop cleanly when a machine is taken away: signals, a grace period, exit code 75.

SIGTERM, SIGINT, SIGUSR1 or SIGHUP asks a run to stop. It continues to the next point
at which its state is consistent, saves that state and ends with code 75; the same
command resumes there. If nothing is unsaved, the run ends immediately. If saving takes
longer than the grace period, it ends without saving and resumes from its last
checkpoint. A second signal ends it immediately.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ERASE_BAR = b"\r\x1b[2K\x1b[?25h"  # erases the terminal's line and shows the cursor


class PreemptedError(BaseException):
    """A request to stop; like KeyboardInterrupt, it is not an Exception."""


class OutageError(PreemptedError):
    """A service has been unreachable for too long: the run saves and stops."""


class _SignalState:
    """The signal state of one `handle_signals` block: requests, callbacks and timer."""

    def __init__(self):
        self.stop_requested = threading.Event()
        self.lock = threading.Lock()
        self.num_deferring = 0  # number of open `defer_exit` blocks
        self.callbacks = []  # called before a signal ends this process
        self.grace_timer = None


_state = _SignalState()
_release = None  # keeps the sockets of `exit_on_signals` open
_exit_callback = None  # called before `exit_process` ends the process


@contextlib.contextmanager
def handle_signals(grace_seconds: float) -> Iterator[None]:
    """Turn signals into requests to stop within the block; for the main thread.

    A separate thread reads the signals, because no Python handler runs while the main
    thread is in a compilation or a search.

    Args:
        grace_seconds: time from the first signal until the process ends without saving.
    """
    global _state
    state = _SignalState()
    release = _redirect_signals(state, grace_seconds)
    _state = state
    try:
        yield
    finally:
        release()
        if state.grace_timer is not None:
            state.grace_timer.cancel()
        _state = _SignalState()


def exit_on_signals() -> None:
    """End the process with EXIT_CODE on a signal, from now on.

    A command calls this in its main thread before slow imports, during which a signal
    would end it with another code. A `handle_signals` block takes over while it lasts.
    """
    global _release
    _release = _redirect_signals(_SignalState(), 0.0)


def _redirect_signals(state, grace_seconds):
    """Start a thread that reads the signals; return a function that undoes this.

    No signal is lost in the switch: at any moment either this thread or the previous
    handler receives it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(
        target=_listen, args=(reader, state, grace_seconds), daemon=True
    )
    listener.start()
    handlers = {name: signal.getsignal(name) for name in SIGNALS}
    if handlers[signal.SIGHUP] == signal.SIG_IGN:  # under nohup
        del handlers[signal.SIGHUP]
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for name in handlers:
        # Python writes to the wake-up descriptor only for signals with a handler.
        signal.signal(name, lambda *_: None)

    def release():
        for name, handler in handlers.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(wakeup)
        writer.close()  # this ends the thread
        listener.join()
        reader.close()

    return release


def _listen(reader, state, grace_seconds):
    """Read signal numbers until the other end is closed."""
    while data := reader.recv(1):
        # Every signal with a handler sends its number here, even SIGALRM.
        if data[0] not in SIGNALS:
            continue
        name = signal.Signals(data[0]).name
        if state.stop_requested.is_set():
            _end(state, f"{name} again: ending immediately")
        with state.lock:
            state.stop_requested.set()
            if not state.num_deferring:
                _end(state, f"{name}: nothing is unsaved; ending")
        write_stderr(f"{name}: saving, for at most {grace_seconds:g} s")
        message = "the grace period is over; ending without saving"
        state.grace_timer = threading.Timer(grace_seconds, _end, (state, message))
        state.grace_timer.daemon = True
        state.grace_timer.start()


def write_stderr(text: str) -> None:
    """Write one line to stderr from any thread; another may be using rich's console.

    Control characters are escaped, since another host's error may quote a web page.
    """

    def escape(character):
        if character.isprintable():
            return character
        return character.encode("unicode_escape", "backslashreplace").decode()

    text = "".join(map(escape, text))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _end(state, text):
    """End the process, whatever its other threads are doing."""
    write_stderr(text)
    for callback in reversed(state.callbacks):
        with contextlib.suppress(Exception):
            callback()
    # A progress bar that is not closed would leave the terminal without a cursor.
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, ERASE_BAR)
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def defer_exit() -> Iterator[None]:
    """Keep signals from ending the process within the block, which has unsaved state.

    The code within the block calls `raise_if_stopping` often.
    """
    state = _state
    with state.lock:
        state.num_deferring += 1
    try:
        yield
    finally:
        with state.lock:
            state.num_deferring -= 1
        # A signal may have arrived while the last state was being saved, after the
        # block's last call of `raise_if_stopping`.
        if not state.num_deferring and sys.exc_info()[0] is None:
            raise_if_stopping()


def is_stop_requested() -> bool:
    """Return whether a signal has asked this process to stop."""
    return _state.stop_requested.is_set()


def raise_if_stopping() -> None:
    """Raise PreemptedError if a signal has asked this process to stop."""
    if is_stop_requested():
        raise PreemptedError


def exit_process(code: int) -> None:
    """End the process with an exit code; immediately if it is EXIT_CODE.

    Python's own exit would wait for searches that still run in threads.
    """
    if code == EXIT_CODE:
        sys.stdout.flush()
        sys.stderr.flush()
        if _exit_callback is not None:
            with contextlib.suppress(Exception):
                _exit_callback()
        os._exit(code)
    sys.exit(code)


def set_exit_callback(callback: Callable[[], None]) -> None:
    """Have `exit_process` call `callback()` just before it ends with EXIT_CODE."""
    global _exit_callback
    _exit_callback = callback


@contextlib.contextmanager
def before_signal_exit(callback: Callable[[], None]) -> Iterator[None]:
    """Have `callback()` called if a signal ends the process within the block."""
    callbacks = _state.callbacks
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)

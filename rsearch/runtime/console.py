"""Print notes, progress and tables for people, on a terminal or to a log file.

Notes and progress go to stderr, results to stdout. Since text may come from a model or
a retrieved page, all of it is printed literally: markup is not interpreted, and control
characters are escaped.
"""

import contextlib
import errno
import io
import math
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from rsearch.hosts import preemption, processes

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk
RETRY_WAITS = 1.0, 60.0  # first and longest wait, in seconds, before writing again
PLAIN_WIDTH = 200  # columns of a rule in a file
FILE_COLUMNS = 80  # of a drawing in a file
NUMBER = re.compile(r"[-+\d.± ]*")  # a numeric cell, with any deviation or interval
SECONDS_BETWEEN_LINES = 15.0  # of progress, if stderr is not a terminal


def clean(text: str) -> str:
    """Return `text` with every control character escaped, as in a Python string.

    Line feeds and tabs are kept. Escape sequences, carriage returns, C1 controls, marks
    that reverse the writing direction, zero-width characters and lone surrogates are
    not, since a terminal would act on them or fail on them.
    """
    return "".join(_visible(character) for character in str(text))


def clean_line(text: str) -> str:
    """Return `clean` text on one line: line feeds and tabs are escaped as well.

    Untrusted text could otherwise add a row to a table, or a line to a log.
    """
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


def _visible(character):
    if character in "\n\t" or character.isprintable():
        return character
    # Cc controls, Cf invisible formats, Cs surrogates, Zl and Zp line breaks.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape", "backslashreplace").decode()
    return character


def open_streams() -> None:
    """Make stdin, stdout and stderr safe for any text, and usable if they are closed.

    Characters that an encoding lacks are escaped as in a Python string. A descriptor
    that the shell has closed becomes /dev/null; otherwise the next file to be opened
    would get its number and receive what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            assert descriptor == number, (descriptor, number)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def note(text: str) -> None:
    """Print one line, with the time of day, on stderr."""
    console = _console(sys.stderr)
    stamp = time.strftime("%H:%M:%S")
    with unless_full():
        console.print(Text(f"{stamp} {clean_line(text)}"), soft_wrap=True)


def note_now_and_then(text: Callable[..., str]) -> Callable[..., None]:
    """Return a function that notes `text(*args)`, but not at every call.

    Notes are at least SECONDS_BETWEEN_LINES apart, and the first comes that long after
    this call.
    """
    last_time = time.monotonic()

    def note_if_due(*args):
        nonlocal last_time
        now = time.monotonic()
        if now - last_time > SECONDS_BETWEEN_LINES:
            last_time = now
            note(text(*args))

    return note_if_due


@contextlib.contextmanager
def unless_full():
    """Ignore errors of a full disk: the log loses lines, but the run continues.

    All errors are ignored once a signal has asked the run to stop: the terminal may
    have sent it as it was closed, and Control-C also ends a program that reads the log.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in DISK_FULL_ERRORS
        if not is_full and not preemption.is_stop_requested():
            raise


def retry_io(write: Callable[[], Any], *, seconds: float, held: str) -> Any:
    """Return the result of a write to disk; note and retry one that fails.

    A full disk need not end a run: someone can free space, and nothing is lost. Several
    hosts do not wait, since each would have to know about the others' disks.

    Args:
        write: writes; it may be called again after a failure.
        seconds: how long to retry.
        held: what is held in memory meanwhile, with its verb, for the notes.

    Raises:
        OSError: writing failed for this time, or once with several hosts.
        PreemptedError: writing fails, and the run was told to stop.
    """
    # Waits double: a disk that stays full should not fill the log as well.
    wait, longest_wait = RETRY_WAITS
    end = time.monotonic() + seconds
    while True:
        try:
            return write()
        except OSError as error:
            message, seconds_left = str(error), end - time.monotonic()
            if seconds_left <= 0 or processes.num_hosts() > 1:
                raise
        note(f"{message}; retrying for {seconds_left:.0f} s, {held} held in memory")
        # In short sleeps, so that a signal is noticed soon.
        retry_time = time.monotonic() + min(wait, seconds_left)
        while time.monotonic() < retry_time:
            if preemption.is_stop_requested():
                raise preemption.PreemptedError(f"not written: {message}")
            time.sleep(0.1)
        wait = min(2 * wait, longest_wait)


def block(title: str, text: str) -> None:
    """Print a titled text, such as a transcript, on stdout."""
    console = stdout_console()
    console.rule(Text(clean_line(title)), align="left", characters="-")
    console.print(Text(clean(text)), soft_wrap=True)


def columns() -> int:
    """Return the width of the terminal on stdout; FILE_COLUMNS if it is a file."""
    return terminal_width() or FILE_COLUMNS


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence],
    *,
    optional: Sequence[str] = (),
    hint: str = "",
    is_wide: bool = False,
) -> None:
    """Print a table on stdout; no cell is truncated or wrapped.

    If the terminal is too narrow, optional columns are hidden, and a line names them.
    If the other columns do not fit either, each row is printed as lines of headings and
    values. To a file, all columns are printed.

    Args:
        columns: [n] headings.
        rows: sequences of n values; numbers are right-aligned, floats get four digits,
            and None becomes '-'.
        optional: headings of columns that may be hidden, the most important first.
        hint: where to see hidden columns; printed after their names.
        is_wide: whether to print all columns, however narrow the terminal is.
    """
    # Widths are measured after escaping for the stream's encoding; see `open_streams`.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"

    def escape(text):
        return text.encode(encoding, "backslashreplace").decode(encoding)

    headings = [escape(clean_line(heading)) for heading in columns]
    lines = [[escape(_cell(value)) for value in row] for row in rows]
    assert all(len(line) == len(columns) for line in lines), (columns, lines)
    cells = list(zip(headings, *lines, strict=True))
    widths = [max(map(cell_len, column)) + len(" │ ") for column in cells]
    room = math.inf if is_wide else terminal_width() or math.inf
    shown_indices = _fitting_columns(columns, widths, optional, room - len("│"))
    has_room = sum(widths[i] for i in shown_indices) < room
    console = _console(sys.stdout, None if room < math.inf else sum(widths) + 1)
    if title:
        console.print(Text(escape(clean_line(title))), soft_wrap=room == math.inf)
    if has_room:
        grid = Table()
        for i in shown_indices:
            is_number = bool(lines) and all(map(NUMBER.fullmatch, cells[i][1:]))
            justify = "right" if is_number else "left"
            grid.add_column(Text(headings[i]), justify=justify, no_wrap=True)
        for line in lines:
            grid.add_row(*(Text(line[i]) for i in shown_indices))
        console.print(grid)
    else:
        for line in lines:
            record = Table.grid(padding=(0, 2))
            record.add_column(no_wrap=True)
            record.add_column(overflow="fold")
            for i in shown_indices:
                record.add_row(Text(headings[i]), Text(line[i]))
            console.rule(characters="-", style="")
            console.print(record)
    hidden_headings = [h for i, h in enumerate(headings) if i not in shown_indices]
    if hidden_headings:
        console.print(Text(f"hidden: {', '.join(hidden_headings)}; {clean_line(hint)}"))


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout; None if stdout is not a terminal."""
    console = _console(sys.stdout)
    return console.width if console.is_terminal else None


def _fitting_columns(columns, widths, optional, room):
    """Return the positions of the columns to show, in their order."""
    shown_indices = {i for i, heading in enumerate(columns) if heading not in optional}
    for heading in optional:
        i = columns.index(heading)
        if sum(widths[j] for j in {*shown_indices, i}) <= room:
            shown_indices.add(i)
    return sorted(shown_indices)


def _cell(value):
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else clean_line(value)


def progress(items: Iterable, label: str, *, total: int | None = None) -> Iterator:
    """Yield the items, and show the progress on stderr.

    On a terminal this is a progress bar; elsewhere a line from time to time and at the
    end.

    Args:
        total: number of items; None uses the length of `items`, if it has one.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)
    console, label = _console(sys.stderr), clean_line(label)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as bar:
            yield from bar.track(items, total=total, description=label)
        return
    start = time.monotonic()

    def progress_line(num_done):
        total_part = "" if total is None else f"/{total}"
        return f"{label} {num_done}{total_part} ({time.monotonic() - start:.1f} s)"

    note_line = note_now_and_then(progress_line)
    num_done = 0
    for num_done, item in enumerate(items, 1):
        yield item
        note_line(num_done)
    note(progress_line(num_done))


class _Console(Console):
    """A console that leaves handling a closed pipe to the command."""

    def on_broken_pipe(self):
        """Raise the BrokenPipeError; Rich's own method would end the process."""
        raise


def stdout_console() -> Console:
    """Return a console on the current stdout; its texts must be `clean`."""
    return _console(sys.stdout)


def _console(stream, width=None):
    """Return a new console on a stream; tests and services replace `sys.stdout`.

    Its width is the terminal's unless `width` is given.
    """
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return _Console(
        file=stream,
        width=width or (None if is_terminal else PLAIN_WIDTH),
        quiet=not processes.is_host0(),
        highlight=False,
        markup=False,
        emoji=False,
    )

"""Text from models and web pages is shown, never obeyed."""

import io
import os
import re
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.hosts import preemption
from rsearch.runtime import console


@given(st.text(st.characters(codec=None)))
def test_cleaned_text_contains_nothing_that_a_terminal_obeys(text):
    cleaned = console.clean(text)
    cleaned.encode("utf-8")  # no lone surrogates either
    controls = {unicodedata.category(c) for c in set(cleaned) - set("\n\t")}
    assert not controls & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not set(cleaned) & set("\x1b\r\x07\x08\x7f\x9b\u202e\u200b\u2028")
    assert console.clean(cleaned) == cleaned


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_printable_text_is_shown_unchanged(text):
    assert console.clean(text) == text


def test_escape_sequence_is_written_out():
    assert console.clean("a\x1b[31mred\r\n\tb\u202ec") == (
        "a\\x1b[31mred\\r\n\tb\\u202ec"
    )


def test_notes_are_lines_on_stderr_with_markup_unchanged(capsys):
    console.note("[bold]x[/bold] :smile: \x1b[2J " + "long " * 100)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.match(r"\d\d:\d\d:\d\d \[bold\]x\[/bold\] :smile: \\x1b\[2J long", err)


def test_table_aligns_numbers_and_keeps_hostile_cells_plain(capsys):
    rows = [["direct", 0.123456, 7, None], ["[red]rag\x1b[0m", 0.5, 12345, None]]
    console.table("scores [x]", ["method", "em", "n", "none"], rows)
    out = capsys.readouterr().out
    assert "scores [x]" in out and "[red]rag\\x1b[0m" in out
    assert "0.1235" in out and "\x1b" not in out
    line = next(line for line in out.splitlines() if "direct" in line)
    assert re.search(r"direct\s+│\s+0\.1235 │\s+7 │\s+- │", line)


@pytest.mark.fault(87, "control characters")
def test_untrusted_text_adds_no_line_to_a_table_or_a_log(capsys):
    forged = "a\n12:00:00 verified\tb\r"
    console.table(forged, [forged], [[forged], ["b"]])
    plain = capsys.readouterr().out
    console.table("a", ["a"], [["a"], ["b"]])
    assert plain.count("\n") == capsys.readouterr().out.count("\n")
    assert plain.count("a\\n12:00:00 verified\\tb\\r") == 3
    console.note(forged)
    list(console.progress([1], forged))
    assert capsys.readouterr().err.count("\n") == 2
    preemption.write_stderr(f"error: host 1 {forged}\x1b[2J")
    assert capsys.readouterr().err == (
        "error: host 1 a\\n12:00:00 verified\\tb\\r\\x1b[2J\n"
    )


def test_a_table_may_be_empty_but_not_ragged(capsys):
    console.table("nothing", ["a", "b"], [])
    assert "a" in capsys.readouterr().out
    with pytest.raises((AssertionError, IndexError)):
        console.table("ragged", ["a", "b"], [[1]])


def test_block_shows_a_transcript_verbatim(capsys):
    text = "<search>[q]</search>\n<information>\x1b]0;title\x07</information>"
    console.block("example 1", text)
    out = capsys.readouterr().out
    assert "<search>[q]</search>\n<information>\\x1b]0;title\\x07</information>" in out


def test_progress_yields_every_item_and_ends_with_a_line(capsys):
    assert list(console.progress(range(5), "encoding")) == [0, 1, 2, 3, 4]
    err = capsys.readouterr().err
    assert re.search(r"encoding 5/5 \(\d+\.\d s\)\n$", err) and err.count("\n") == 1


def test_progress_counts_if_the_total_is_unknown(capsys):
    assert list(console.progress(iter("ab"), "reading")) == ["a", "b"]
    assert "reading 2 (" in capsys.readouterr().err


def test_progress_prints_a_line_from_time_to_time(capsys, monkeypatch):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    list(console.progress(range(3), "steps"))
    assert capsys.readouterr().err.count("\n") == 4


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(console.progress(range(3), "[x]")) == [0, 1, 2]
    assert "[x]" in terminal.getvalue() and "3/3" in terminal.getvalue()


COMMAND = """
import os, sys
from rsearch.config import recipes as config
from rsearch.runtime import console

def main(argv):
    how = argv[0]
    if how == "--help":
        config.parse_flags(argv, flags={})
    if how == "other":
        there, here = os.pipe()
        os.close(there)
        os.write(here, b"x")  # a pipe of our own, not what is printed
    for _ in range({"once": 1}.get(how, 5000)):
        if how == "note":
            console.note("a line")
        elif how == "table":
            console.table("title", ["a"], [["b"]])
        else:
            print("a line")

sys.exit(config.run_command(main, sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["print", "table", "once", "--help", "note"])
def test_a_command_whose_reader_is_gone_exits_quietly(how):
    there, here = os.pipe()
    os.close(there)
    streams = {"stdout": here, "stderr": subprocess.PIPE}
    if how == "note":
        streams = {"stdout": subprocess.PIPE, "stderr": here}
    done = subprocess.run([sys.executable, "-c", COMMAND, how], timeout=120, **streams)
    os.close(here)
    assert done.returncode == 141
    assert not done.stdout and not done.stderr


def test_a_broken_pipe_that_is_not_the_output_keeps_its_traceback():
    command = [sys.executable, "-c", COMMAND, "other"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 1 and b"BrokenPipeError" in done.stderr


def test_periodic_notes_are_some_seconds_apart(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "note", lines.append)
    call = console.note_now_and_then(lambda done: f"{done} done")
    for seconds in (1.0, 15.0, 15.5, 20.0, 30.5, 31.0):
        now[0] = seconds
        call(seconds)
    assert lines == ["15.5 done", "31.0 done"]

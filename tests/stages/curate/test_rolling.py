"""A data stage's journal: whole waves are kept, and damaged lines are named."""

import json

import pytest

from rsearch.data.curation import Attempt, to_record
from rsearch.stages.curate.rolling import JOURNAL, WaveLog
from rsearch.tools.search import search_use
from rsearch.types import (
    Outcome,
    Passage,
)

RECORD = to_record(
    Attempt(
        ("search", "answer"),
        ("shown", ""),
        (search_use(("q",), ((Passage("p", "title\ntext", 0.5),),)),),
        "Paris",
        Outcome.ANSWERED,
    )
)


def test_waves_are_read_back_by_pass_and_round(tmp_path):
    journal = WaveLog(tmp_path)
    journal.append("first", 0, ["a", "b"], [[RECORD], []])
    journal.append("first", 1, ["a"], [[RECORD, RECORD]])
    journal.append("retry", 0, ["b"], [[RECORD]])
    again = WaveLog(tmp_path)
    assert again.rows == journal.rows
    assert {name: len(actual) for name, actual in again.records("first").items()} == {
        "a": 3,
        "b": 0,
    }
    assert again.records("first", 1) == {"a": [RECORD, RECORD]}
    assert again.records("none") == {}


def test_records_are_in_the_order_of_rounds_after_a_wave_was_rolled_out_again(tmp_path):
    """Of a damaged first line, of which a later stage counts the first right one."""
    journal = WaveLog(tmp_path)
    second, first = RECORD | {"answer": "Rome"}, RECORD
    journal.append("first", 1, ["a"], [[second]])
    journal.append("first", 0, ["a"], [[first]])
    assert journal.records("first") == {"a": [first, second]}


def test_a_half_written_wave_is_dropped(tmp_path):
    WaveLog(tmp_path).append("first", 0, ["a"], [[RECORD]])
    whole = (tmp_path / JOURNAL).read_bytes()
    for end in (len(whole) // 2, len(whole) - 1):
        (tmp_path / JOURNAL).write_bytes(whole + whole[:end])
        assert len(WaveLog(tmp_path).rows) == 1
        assert (tmp_path / JOURNAL).read_bytes() == whole


WAVE = {"pass": "first", "round": 0, "ids": ["a"], "records": [[RECORD]]}


@pytest.mark.fault(84, "damaged wave of rollouts")
@pytest.mark.parametrize(
    "damage",
    [
        "{",
        [],
        3,
        {},
        WAVE | {"ids": ["a", "b"]},
        WAVE | {"ids": [["a"]]},
        WAVE | {"round": "0"},
        WAVE | {"pass": None},
        WAVE | {"records": [3]},
        WAVE | {"records": [[RECORD | {"outcome": "won"}]]},
        WAVE | {"records": [[{"turns": []}]]},
        WAVE | {"records": [[RECORD | {"searches": [{"queries": ["q"]}]}]]},
    ],
    ids=repr,
)
def test_a_line_that_is_no_wave_is_named_and_set_aside(tmp_path, damage, capsys):
    WaveLog(tmp_path).append("first", 0, ["a"], [[RECORD]])
    text = damage if isinstance(damage, str) else json.dumps(damage)
    before = (tmp_path / JOURNAL).read_text()
    (tmp_path / JOURNAL).write_text(f"{before}{text}\n{before}")
    assert WaveLog(tmp_path).rows == [WAVE, WAVE]
    assert f"{JOURNAL}:2: " in capsys.readouterr().err
    assert (tmp_path / JOURNAL).read_text() == before * 2
    assert (tmp_path / f"{JOURNAL}.damaged").read_text() == text + "\n"

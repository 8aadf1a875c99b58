"""JSON Lines: one reader, lenient for a run's own files, strict for users' files."""

import gzip
import json

import pytest

from rsearch.runtime.jsonl import (
    append_jsonl,
    jsonl_lines,
    read_jsonl,
    recover_jsonl,
    write_jsonl,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def test_rows_come_back_as_written(path):
    rows = [{"a": 1, "text": "\u2028 \x00 line\nfeed \ud800"}, {}]
    write_jsonl(path, rows)
    assert read_jsonl(path) == read_jsonl(path, strict=True) == rows


def test_a_last_line_without_line_feed_counts_only_in_a_users_file(path):
    path.write_text('{"a": 1}\n{"a": 2}')
    assert read_jsonl(path) == [{"a": 1}]
    assert read_jsonl(path, strict=True) == [{"a": 1}, {"a": 2}]
    recover_jsonl(path, on_bad=print)
    append_jsonl(path, {"a": 3})
    assert read_jsonl(path) == [{"a": 1}, {"a": 3}]
    assert path.with_name("rows.jsonl.damaged").read_bytes() == b'{"a": 2}\n'


@pytest.mark.parametrize("line", ["not json", "", "[" * 100_000, "\udcff"])
def test_a_bad_line_is_named_or_left_out_as_the_caller_says(path, line):
    text = f'{{"a": 1}}\n{line}\n{{"a": 2}}\n'
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: "):
        read_jsonl(path)
    messages = []
    assert read_jsonl(path, on_bad=messages.append) == [{"a": 1}, {"a": 2}]
    assert len(messages) == 1 and messages[0].startswith(f"{path}:2: ")


@pytest.mark.parametrize("line", ['{"a": NaN}', '{"a": -1e999}', '{"a": 1, "a": 2}'])
def test_nan_and_repeated_keys_are_refused_if_strict(path, line):
    path.write_text(line + "\n")
    assert len(read_jsonl(path)) == 1
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: "):
        read_jsonl(path, strict=True)


def test_a_value_that_the_caller_refuses_is_a_bad_line(path):
    def parse(row):
        if row["a"] < 0:
            raise ValueError("negative")
        return row["a"]

    write_jsonl(path, [{"a": 1}, {"a": -1}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: negative"):
        read_jsonl(path, parse=parse)
    assert read_jsonl(path, parse=parse, on_bad=lambda _: None) == [1]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_compression_and_byte_order_marks_change_nothing(path, pack):
    path.write_bytes(pack(b"\xef\xbb\xbf1\r\n2\n"))
    assert read_jsonl(path) == [1, 2]
    assert list(jsonl_lines(path)) == [(1, b"1\r\n"), (2, b"2\n")]


@pytest.mark.fault(63, "blank last lines")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("end", [b"\n", b"\n\n", b"\r\n \t\r\n", b" "])
def test_blank_lines_at_the_end_are_not_counted(path, pack, end):
    path.write_bytes(pack(b"1\n\n2\n" + end))
    assert list(jsonl_lines(path)) == [(1, b"1\n"), (2, b"\n"), (3, b"2\n")]
    path.write_bytes(pack(end))
    assert list(jsonl_lines(path)) == []


@pytest.mark.fault(65, "gzip of questions")
def test_a_gzip_file_that_expands_too_much_is_not_read_to_the_end(path):
    path.write_bytes(gzip.compress(b"1" + b" " * (1 << 20) + b"\n") * 70)
    with pytest.raises(ValueError, match=r"rows\.jsonl: .* after line 6\d"):
        for _ in jsonl_lines(path):
            pass


def test_a_line_beyond_the_limit_is_named(path):
    path.write_text(json.dumps("x" * 50) + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .* 40 bytes"):
        list(jsonl_lines(path, max_line_bytes=40))


def test_nan_is_not_written(path):
    with pytest.raises(ValueError):
        write_jsonl(path, [{"a": float("nan")}])
    with pytest.raises(ValueError):
        append_jsonl(path, float("nan"))
    assert not path.exists()

import gzip
import json
import os
import pathlib
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rsearch.data.corpus as corpus_module
from rsearch.data.corpus import Corpus
from rsearch.types import Passage

TWO = b'{"id": "a", "contents": "\\"T\\"\\ntext"}\n{"id": 7, "contents": "U\\nmore"}\n'
PASSAGES = [Passage("a", '"T"\ntext'), Passage("7", "U\nmore")]


def written(folder, data, name="corpus.jsonl"):
    path = folder / name
    path.write_bytes(data)
    return path


def lines(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def builds(monkeypatch):
    """Return a list that gets the path of each corpus that is scanned in full."""
    seen = []
    build = corpus_module.build_cache

    def counted(path, files):
        seen.append(path)
        return build(path, files)

    monkeypatch.setattr(corpus_module, "build_cache", counted)
    return seen


@pytest.mark.fault(10, "byte order mark", "CRLF")
@pytest.mark.parametrize(
    "data",
    [
        TWO,
        TWO[:-1],
        TWO.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + TWO,
        b"\xef\xbb\xbf" + TWO.replace(b"\n", b"\r\n")[:-2],
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_line_endings_a_bom_and_gzip_change_no_passage(tmp_path, data, pack):
    with Corpus(written(tmp_path, pack(data))) as corpus:
        assert len(corpus) == 2
        assert list(corpus) == PASSAGES
        assert corpus.passages(np.array([1, 0, 1])) == [PASSAGES[i] for i in (1, 0, 1)]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: not text.isspace()
)


@given(st.lists(texts, min_size=1, max_size=8), st.booleans())
def test_written_passages_are_read_back(tmp_path_factory, contents, is_ascii):
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"id": i, "contents": text} for i, text in enumerate(contents)]
    data = "\n".join(json.dumps(row, ensure_ascii=is_ascii) for row in rows)
    with Corpus(written(folder, data.encode())) as corpus:
        assert [passage.contents for passage in corpus] == contents
        assert corpus.passage(len(rows) - 1) == Passage(
            str(len(rows) - 1), contents[-1]
        )


BAD = {
    b"": "blank line",
    b"  \r": "blank line",
    b'{"id": "x", "contents": ': "invalid JSON at column 25",
    b'{"id": "x", "contents": "\xff"}': "invalid UTF-8 at byte 26",
    b'{"id": "x", "contents": NaN}': "NaN is not JSON",
    b'{"id": "x", "contents": "a", "contents": "b"}': "field contents: given twice",
    b'["x"]': "expected a JSON object, got list ['x']",
    b"[" * 100_000: "JSON nested too deeply",
    b'{"id": "x", "n": ' + b"1" * 5000 + b', "contents": "a"}': "digits",
    b'{"contents": "a"}': "field id: missing",
    b'{"id": 1.5, "contents": "a"}': "field id: expected text, got float 1.5",
    b'{"id": true, "contents": "a"}': "field id: expected text, got bool True",
    b'{"id": "", "contents": "a"}': "field id: expected text, got ''",
    b'{"id": "x"}': "field contents: missing",
    b'{"id": "x", "title": "a"}': "field contents: missing",
    b'{"id": "x", "contents": null}': "field contents: expected text, got NoneType",
    b'{"id": "x", "contents": " "}': "field contents: expected text, got ' '",
    b'{"id": "x", "contents": "ab\\ud800"}': "field contents: half a surrogate pair",
    b'{"id": "x", "title": 3, "text": "a"}': "field title: expected text, got 3",
    b'{"id": "x", "title": "a", "text": []}': "field text: expected text, got list",
    b'{"id": "a", "contents": "b"}': "field id: 'a' was used on line 1 already",
    b'{"id": "7", "contents": "b"}': "field id: '7' was used on line 2 already",
}


@pytest.mark.fault(9, "truncated", "invalid UTF-8", "wrong type")
@pytest.mark.fault(12, "duplicate ids")
@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_bad_record_is_named_and_leaves_no_offsets(tmp_path, line, pack):
    path = written(tmp_path, pack(TWO + line + b"\n" + TWO))
    with pytest.raises(ValueError) as error:
        Corpus(path, cache=tmp_path / "cache")
    assert str(error.value).startswith(f"{path}:3: ")
    assert BAD[line] in str(error.value)
    assert not os.listdir(tmp_path / "cache")


def test_different_ids_with_the_same_hash_are_not_duplicates(tmp_path, monkeypatch):
    path = written(tmp_path, TWO)
    monkeypatch.setattr(corpus_module.xxhash, "xxh3_64_intdigest", lambda _: 5)
    assert len(Corpus(path)) == 2


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "empty"),
        (gzip.compress(b"", mtime=0), "empty"),
        (b"\n", ":1: blank line"),
        (b"PAR1....PAR1", "Parquet"),
        (bytes(range(256)), ":1: invalid"),
        (gzip.compress(TWO, mtime=0)[:-12], "truncated or damaged gzip data after"),
        (
            gzip.compress(TWO * 9, mtime=0)[:20]
            + b"????"
            + gzip.compress(TWO * 9, mtime=0)[24:],
            "gzip data",
        ),
    ],
)
def test_a_file_that_is_no_corpus_is_refused(tmp_path, data, message):
    path = written(tmp_path, data)
    with pytest.raises(ValueError, match=message) as error:
        Corpus(path)
    assert str(path) in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_corpus_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        Corpus(tmp_path / "nothing.jsonl")


def test_a_pipe_and_a_directory_are_no_corpora(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match=f"{path}: not a file"):
            Corpus(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_opening_a_corpus_again_reads_only_the_offsets(tmp_path, builds, pack):
    path = written(tmp_path, pack(TWO))
    first = Corpus(path)
    second = Corpus(path)
    assert len(builds) == 1
    assert list(second) == list(first) == PASSAGES
    assert second.fingerprint == first.fingerprint


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_changed_corpus_is_noticed(tmp_path, builds, pack):
    path = written(tmp_path, pack(TWO))
    old = Corpus(path)
    written(tmp_path, pack(TWO.replace(b"text", b"next")))
    new = Corpus(path)
    assert len(builds) == 2
    assert new.passage(0).text == "next"
    assert new.fingerprint != old.fingerprint


def test_a_change_that_keeps_size_and_time_is_noticed(tmp_path, builds):
    path = written(tmp_path, TWO)
    Corpus(path)
    status = path.stat()
    path.write_bytes(TWO.replace(b"text", b"next"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Corpus(path).passage(0).text == "next"


def test_a_change_to_an_open_corpus_never_yields_a_wrong_passage(tmp_path):
    path = written(tmp_path, TWO)
    corpus = Corpus(path)
    with open(path, "r+b") as file:
        file.write(b" " * 20)
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1: .* was changed after"):
        corpus.passage(0)


def test_an_open_corpus_stays_readable_after_its_file_is_replaced(tmp_path):
    path = written(tmp_path, TWO)
    corpus = Corpus(path)
    os.replace(written(tmp_path, b"{}", "new"), path)
    assert corpus.passages([0, 1]) == PASSAGES


def test_the_fingerprint_depends_on_the_text_not_on_compression(tmp_path):
    plain = Corpus(written(tmp_path, TWO))
    packed = Corpus(written(tmp_path, gzip.compress(TWO, mtime=0), "other.jsonl.gz"))
    assert plain.fingerprint == packed.fingerprint
    assert plain.fingerprint != Corpus(written(tmp_path, TWO[:-1], "c")).fingerprint


@pytest.mark.fault(84, "damaged offsets of a corpus")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-8],
        lambda data: data[:-8] + bytes(8),
        lambda data: data[:-16] + bytes([data[-16] ^ 1]) + data[-15:],
        lambda data: b"\xff" + data[1:],
        lambda data: data.replace(b'"version": 1', b'"version": 0'),
        lambda data: data.replace(b'"num": 2', b'"num":"2'),
        lambda data: data.replace(b'"num"', b'"nun"'),
        lambda data: b"[" * 4096 + data[4096:],
        lambda data: b"[]".ljust(4096) + data[4096:],
    ],
)
def test_a_damaged_offsets_file_is_written_again(tmp_path, builds, damage):
    path = written(tmp_path, TWO)
    Corpus(path)
    offsets = tmp_path / "corpus.jsonl.offsets"
    offsets.write_bytes(damage(offsets.read_bytes()))
    assert list(Corpus(path)) == PASSAGES
    assert len(builds) == 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "line",
    [b"a" * (40 << 20), b'{"id": "x", "contents": "%b"}\n' % (b"a" * (1 << 24))],
    ids=["endless", "a little too long"],
)
def test_a_line_that_is_too_long_is_refused_before_more_is_read(tmp_path, line, pack):
    path = written(tmp_path, pack(TWO + line))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a line has more than 16777216 bytes"):
            Corpus(path)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("value", [1 << 62, 10**6, 0])
def test_an_offset_beyond_the_corpus_reads_nothing_and_is_named(tmp_path, value):
    path = written(tmp_path, TWO)
    with Corpus(path) as corpus:
        with open(tmp_path / "corpus.jsonl.offsets", "r+b") as offsets:
            offsets.seek(-8, os.SEEK_END)
            offsets.write(value.to_bytes(8, "little"))
        for read in (lambda: list(corpus), lambda: corpus.passage(1)):
            with pytest.raises(ValueError, match=r"offsets is damaged: .* delete it"):
                read()


def test_a_lost_or_changed_unpacked_text_is_written_again(tmp_path, builds):
    path = written(tmp_path, gzip.compress(TWO, mtime=0), "corpus.jsonl.gz")
    Corpus(path)
    plain = tmp_path / "corpus.jsonl.gz.plain"
    plain.unlink()
    assert list(Corpus(path)) == PASSAGES
    plain.write_bytes(TWO.replace(b"text", b"next"))
    assert list(Corpus(path)) == PASSAGES
    assert len(builds) == 3


def test_corpora_with_the_same_file_name_can_share_a_cache(tmp_path, builds):
    for folder, data in (("one", TWO), ("two", TWO.replace(b"text", b"next"))):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, data)
    cache = tmp_path / "deep" / "cache"
    for _ in range(2):
        one = Corpus(tmp_path / "one" / "corpus.jsonl", cache=cache)
        two = Corpus(tmp_path / "two" / "corpus.jsonl", cache=cache)
    assert (one.passage(0).text, two.passage(0).text) == ("text", "next")
    assert len(builds) == 2
    assert os.listdir(tmp_path / "one") == ["corpus.jsonl"]


def test_a_corpus_in_a_read_only_directory_needs_another_cache(tmp_path):
    folder = tmp_path / "read_only"
    folder.mkdir()
    path = written(folder, TWO)
    folder.chmod(0o555)
    with pytest.raises(ValueError, match="name another directory"):
        Corpus(path)
    with pytest.raises(ValueError, match="name another directory"):
        Corpus(path, cache=path)
    assert len(Corpus(path, cache=tmp_path / "cache")) == 2
    folder.chmod(0o755)


@pytest.mark.parametrize("index", [-1, 2, 10**12])
def test_there_is_no_passage_outside_the_corpus(tmp_path, index):
    with pytest.raises(IndexError, match=f"passage {index} of a corpus of 2"):
        Corpus(written(tmp_path, TWO)).passage(index)


def test_a_closed_corpus_cannot_be_read(tmp_path):
    with Corpus(written(tmp_path, TWO)) as corpus:
        pass
    corpus.close()
    with pytest.raises(OSError):
        corpus.passage(0)


def test_threads_read_the_same_passages(tmp_path):
    rows = [{"id": i, "contents": f"t{i}\n" + "x" * (i % 97)} for i in range(3000)]
    corpus = Corpus(written(tmp_path, lines(rows)))
    wrong = []

    def read(seed):
        for i in np.random.default_rng(seed).integers(0, 3000, 1500):
            if corpus.passage(i) != Passage(str(i), rows[i]["contents"]):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lines_longer_than_a_chunk_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK_BYTES", 7)
    monkeypatch.setattr(corpus_module, "LINES_AT_ONCE", 2)
    rows = [{"id": i, "contents": f"t{i}\n" + "y" * i} for i in range(25)]
    for pack, name in ((bytes, "a"), (gzip.compress, "b")):
        corpus = Corpus(written(tmp_path, pack(lines(rows)), name))
        assert [p.contents for p in corpus] == [row["contents"] for row in rows]


def test_a_scan_that_was_killed_starts_over(tmp_path):
    path = written(tmp_path, TWO)
    program = (
        "import os, sys, rsearch.data.corpus as c\n"
        "c.os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "c.Corpus(sys.argv[1])\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=root)
    assert done.returncode == -9
    assert not (tmp_path / "corpus.jsonl.offsets").exists()
    assert list(Corpus(path)) == PASSAGES


def test_a_corpus_that_is_open_when_the_program_ends_prints_nothing(tmp_path):
    program = (
        "import sys\n"
        "from rsearch.data.corpus import Corpus\n"
        "from rsearch.retrieval.encoder import HashedNgrams\n"
        "from rsearch.retrieval.engine import engine_in_memory\n"
        "corpus = Corpus(sys.argv[1])\n"
        "engine_in_memory(corpus, HashedNgrams(8), top_k=1)(['a'])\n"
    )
    command = [sys.executable, "-c", program, str(written(tmp_path, TWO))]
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr


def test_real_passages_equal_those_that_json_reads(tmp_path, shared_data):
    path = shared_data / "hotpotqa" / "corpus.jsonl.gz"
    with gzip.open(path) as file:
        rows = [json.loads(line) for line in file]
    with Corpus(path, cache=tmp_path) as corpus:
        assert len(corpus) == len(rows) == 17_097
        assert all(
            (p.id, p.contents) == (row["id"], row["contents"])
            for p, row in zip(corpus, rows, strict=True)
        )
        assert corpus.passage(16_000).contents == rows[16_000]["contents"]


ROW = {"id": "x", "title": "Nile", "text": "A river."}
LAYOUTS = {
    "FlashRAG": ({"id": "x", "contents": "Nile\nA river."}, "Nile\nA river."),
    "FlashRAG with more": ({**ROW, "contents": '"N"\nA.'}, '"N"\nA.'),
    "Search-R1": ({"id": "x", "contents": '"Nile"\nA river.'}, '"Nile"\nA river.'),
    "contents of null": ({**ROW, "contents": None}, "Nile\nA river."),
    "BEIR": (
        {"_id": "x", "title": "Nile", "text": "A river.", "metadata": {"url": "u"}},
        "Nile\nA river.",
    ),
    "BEIR without titles": ({"_id": "x", "text": "A river."}, "\nA river."),
    "Tevatron": ({"docid": "x", "title": "Nile", "text": "A."}, "Nile\nA."),
    "Atlas": ({**ROW, "section": "Delta"}, "Nile: Delta\nA river."),
    "Atlas, no section": ({**ROW, "section": ""}, "Nile\nA river."),
    "null title": ({**ROW, "title": None}, "\nA river."),
    "empty title": ({**ROW, "title": ""}, "\nA river."),
    "empty text": ({**ROW, "text": ""}, "Nile\n"),
    "null text": ({**ROW, "text": None}, "Nile\n"),
    "title with a line end": ({**ROW, "title": "The\r\nNile\n"}, "The Nile\nA river."),
}


@pytest.mark.fault(63, "a title or a text alone", "public layouts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_public_layouts_are_read_with_all_that_a_passage_is(tmp_path, name):
    record, contents = LAYOUTS[name]
    with Corpus(written(tmp_path, lines([record]))) as corpus:
        assert list(corpus) == [Passage("x", contents)]


@pytest.mark.parametrize(
    "record, field",
    [
        ({"id": "x", "title": "", "text": ""}, "field text"),
        ({"id": "x", "title": None, "text": " "}, "field text"),
        ({"_id": "x", "title": "", "text": None, "metadata": {}}, "field text"),
        ({"id": "x", "contents": "", "title": "", "text": ""}, "field text"),
        ({"_id": "1", "wikipedia_id": "1", "text": ["A", "B"]}, "field text.*KILT"),
        ({"id": "x", "title": "A", "text": [["A"]]}, "field text"),
        ({"id": "x", "title": ["A"], "text": "b"}, "field title"),
        ({"id": "x", "title": "A", "section": 3, "text": "b"}, "field section"),
        ({"pid": 3, "passage": "A river."}, "field id.*pid"),
        ({"docid": "x", "segment": "A river."}, "field contents.*segment"),
        ({"id": None, "contents": "A"}, "field id"),
        ({"_id": 1.5, "text": "A"}, "field _id"),
    ],
)
def test_records_that_are_no_passage_are_refused_by_field_name(tmp_path, record, field):
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:1: {field}"):
        Corpus(written(tmp_path, lines([record])))


@pytest.mark.fault(63, "public layouts")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "text", ["id\ttext\ttitle\n1\tA river.\tNile\n", "1\tA river.\n", "[]"]
)
def test_other_layouts_are_refused_with_the_command_that_converts_them(
    tmp_path, pack, text
):
    path = written(tmp_path, pack(text.encode()), "a corpus")
    with pytest.raises(
        ValueError, match=r"python -m rsearch\.corpus '.*a corpus'"
    ) as e:
        Corpus(path, on_bad="skip")
    assert str(e.value).startswith(f"{path}: ") and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "data, name",
    [
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\x00", "xz"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd"),
        (b"PK\x03\x04", "zip"),
        (TWO.decode().encode("utf-16"), "UTF-16"),
    ],
)
def test_an_unsupported_compression_or_encoding_is_named(tmp_path, data, name):
    path = written(tmp_path, data)
    with pytest.raises(ValueError, match=name) as error:
        Corpus(path)
    assert str(path) in str(error.value)


@pytest.mark.fault(63, "blank last lines")
@pytest.mark.parametrize("end", [b"\n", b"\r\n\r\n", b"  \n\t\n", b" ", b"\n" * 999])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_blank_lines_at_the_end_are_no_records(tmp_path, pack, end):
    path = written(tmp_path, pack(TWO + end))
    for _ in range(2):
        with Corpus(path) as corpus:
            assert list(corpus) == PASSAGES == corpus.passages([0, 1])


@pytest.mark.fault(64, "CRLF inside contents")
@pytest.mark.parametrize(
    "record",
    [
        {"id": "x", "contents": "Nile\r\nA river."},
        {"id": "x", "contents": "Nile\rA river."},
        {"id": "x", "title": "Nile\r", "text": "A river."},
        {"id": "x", "title": "Nile\r\n", "text": "A river."},
    ],
)
def test_no_carriage_return_is_left_in_a_title(tmp_path, record):
    with Corpus(written(tmp_path, lines([record]))) as corpus:
        passage = corpus.passage(0)
    assert (passage.title, passage.text) == ("Nile", "A river.")


@pytest.mark.fault(63, "on_bad=skip of a corpus")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_bad_records_are_left_out_counted_and_listed(tmp_path, capsys, builds, pack):
    bad = [b"{", b"", *list(BAD)[4:6], b'{"id": "7", "contents": "b"}', b"{}", b"[1]"]
    first, second = TWO.splitlines(keepends=True)
    data = b"\n".join([b"x", first + second + b"\n".join(bad), b"{", lines([ROW])])
    path = written(tmp_path, pack(data))
    for number in (1, 2):
        with Corpus(path, on_bad="skip") as corpus:
            assert len(builds) == 1
            assert corpus.num_skipped == 9
            assert [p.id for p in corpus] == ["a", "7", "x"]
            assert [corpus.passage(i).id for i in range(3)] == ["a", "7", "x"]
        told = capsys.readouterr().err
        assert "9 bad records" in told
        if number == 1:
            assert f"{path}:1: " in told and f"{path}:4: " in told
    # The cache made while skipping must not serve a reader that wants every record.
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1: "):
        Corpus(path)
    with Corpus(path, on_bad="skip") as corpus:
        assert len(corpus) == 3


def test_skipping_changes_nothing_if_no_record_is_bad(tmp_path, builds):
    path = written(tmp_path, TWO)
    with Corpus(path) as strict, Corpus(path, on_bad="skip") as lenient:
        assert lenient.fingerprint == strict.fingerprint
        assert list(lenient) == list(strict)
        assert lenient.num_skipped == 0
    assert len(builds) == 1


def test_a_corpus_with_only_bad_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="all 2 records are bad"):
        Corpus(written(tmp_path, b"{}\n{}\n"), on_bad="skip")
    with pytest.raises(ValueError, match="on_bad='ignore'"):
        Corpus(written(tmp_path, TWO), on_bad="ignore")


def largest_file(monkeypatch, folder):
    """Return a list that gets the largest file's size whenever a file is removed."""
    sizes = []
    unlink = os.unlink

    def measured(path, **options):
        sizes.append(max((p.stat().st_size for p in folder.iterdir()), default=0))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", measured)
    return sizes


@pytest.mark.fault(65, "gzip checked while it is unpacked")
def test_a_small_gzip_file_with_gigabytes_of_text_is_refused_early(
    tmp_path, monkeypatch
):
    block = gzip.compress(lines([{"id": "x", "contents": "y" * (8 << 20)}]))
    path = written(tmp_path, block * 10)  # 80 MiB of text
    cache = tmp_path / "cache"
    cache.mkdir()
    sizes = largest_file(monkeypatch, cache)
    with pytest.raises(ValueError, match=r"corpus\.jsonl"):
        Corpus(path, cache=cache, on_bad="skip")
    assert max(sizes) <= 64 << 20
    assert not os.listdir(cache)


@pytest.mark.fault(65, "gzip checked while it is unpacked")
def test_a_bad_record_stops_the_decompression(tmp_path, monkeypatch):
    rest = lines({"id": i, "contents": "y" * 4000} for i in range(4000))
    path = written(tmp_path, gzip.compress(TWO + b"{}\n" + rest))
    cache = tmp_path / "cache"
    cache.mkdir()
    sizes = largest_file(monkeypatch, cache)
    with pytest.raises(ValueError, match=r"corpus\.jsonl:3: "):
        Corpus(path, cache=cache)
    assert max(sizes) < 1 << 20
    assert not os.listdir(cache)


def test_a_text_larger_than_the_disk_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path, gzip.compress(TWO * 50))
    usage = corpus_module.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(corpus_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="more than 90 bytes"):
        Corpus(path, on_bad="skip")
    assert os.listdir(tmp_path) == [path.name]


def test_offsets_next_to_a_corpus_are_used_instead_of_new_ones(tmp_path, builds):
    path = written(tmp_path, TWO)
    Corpus(path)
    assert list(Corpus(path, cache=tmp_path / "cache")) == PASSAGES
    assert len(builds) == 1
    assert not (tmp_path / "cache").exists()

"""Files and hub datasets as a whole; test_questions covers single records."""

import gzip
import json
import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rsearch.data import sources
from rsearch.data.questions import load_questions
from rsearch.data.sources import _hub_name, read_records
from rsearch.models.hf.directory import find_model
from rsearch.runtime.jsonl import MAX_LINE_BYTES
from tests.data.test_questions import GOOD, jsonl, parquet, verl

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_json_list_is_read_like_lines(tmp_path):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([GOOD, {**GOOD, "id": "q2"}], indent=1))
    assert [q.id for q in load_questions(path)[0]] == ["q1", "q2"]
    path.write_text(json.dumps([GOOD, {**GOOD, "question": 3}]))
    with pytest.raises(
        ValueError, match=r"q\.json: record 2: field question: .* int 3"
    ):
        load_questions(path)
    path.write_text('[{"question":')
    with pytest.raises(ValueError, match=r"q\.json: invalid JSON at column 14"):
        load_questions(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"q\.json: holds no record"):
        load_questions(path)


@pytest.mark.fault(10, "byte order mark", "CRLF")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("end", [b"", b"\r"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_line_endings_a_bom_and_gzip_change_nothing(tmp_path, pack, end, start):
    line = json.dumps(GOOD).encode() + end
    other = json.dumps({**GOOD, "id": "q2"}).encode() + end
    path = jsonl(tmp_path, [start + line, other], pack=pack)
    assert [q.id for q in load_questions(path)[0]] == ["q1", "q2"]


@pytest.mark.fault(10, "empty")
@pytest.mark.parametrize(
    "name, data, message",
    [
        ("q.jsonl", b"", "the file is empty"),
        ("q.jsonl", gzip.compress(b"", mtime=0), "holds no record"),
        ("q.jsonl", b"PAR1....", "a Parquet file, not JSON"),
        ("q.jsonl", bytes(range(256)) * 9, "q.jsonl:1: invalid JSON"),
        ("q.jsonl", b"\x80\x02}q\x00.", "q.jsonl:1: invalid UTF-8"),
        ("q.txt", b"question,answer\n", "expected a file named .jsonl"),
        ("q.csv", b"question,answer\n", "holds no record"),
        ("q.csv", b"PAR1....", "a Parquet file, not JSON or a table"),
        ("q.tsv", b"\n", "q.tsv:1: expected the names of columns"),
        ("q.tsv", b"question\tanswer\tQuestion\n", "q.tsv:1: column 'question'"),
        ("q.csv", b'question,"answer\n', "q.csv:1: unexpected end of data"),
        ("q.csv", b"quest\0ion,answer\n", "q.csv:1: line contains NUL"),
        ("q.json", b"{\n", "q.json:1: invalid JSON at column 2"),
        ("q.json", b'{\n"Data": [\n', "q.json: invalid JSON at line 3"),
        ("q.json", b'{"Data": [', "q.json: invalid JSON at column 11"),
        ("q.json", b'{"Data": []}', "q.json: holds no record"),
        ("q.json", b'{\n"Data": 3}', "q.json: record 1: no known format"),
        ("q.json", b'{"Data": [3]}', "q.json: record 1: expected a JSON object"),
        ("q.parquet", b'{"question": "x"}', "not a Parquet file"),
        ("q.parquet", b"PAR1 and no more", "q.parquet: damaged after row 0"),
    ],
)
def test_a_file_that_holds_no_questions_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError) as error:
        load_questions(tmp_path / name)
    assert message in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for read in (load_questions, find_model):
        with pytest.raises(ValueError, match="is empty"):
            read("")


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_small_gzip_file_of_one_endless_line_is_not_read_whole(tmp_path, on_bad):
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (MAX_LINE_BYTES + 1)))
    assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match=r"q\.jsonl\.gz:1: a line of more"):
        load_questions(path, on_bad=on_bad)


def test_a_json_list_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LIST_BYTES", 1000)
    path = tmp_path / "q.json"
    path.write_text("[" + " " * 1000 + "]")
    with pytest.raises(ValueError, match=r"q\.json: a JSON list of 1000 bytes or more"):
        load_questions(path)


def test_an_object_of_a_list_of_questions_is_read_like_the_list(tmp_path):
    path = tmp_path / "q.json"
    rows = [GOOD, {**GOOD, "id": "q2"}]
    for value in ({"Data": rows, "Version": 1.0}, {"Domain": "Web", "Data": rows}):
        for indent in (None, 4):
            path.write_text(json.dumps(value, indent=indent))
            assert [q.id for q in load_questions(path)[0]] == ["q1", "q2"]
    path.write_text(json.dumps({"Data": [GOOD, {**GOOD, "question": 3}]}))
    with pytest.raises(ValueError, match=r"q\.json: record 2: field question: .* 3"):
        load_questions(path)
    # A question's own field of this name stays in its record.
    path.write_text(json.dumps({**GOOD, "metadata": {"Data": [1]}}))
    (question,) = load_questions(path)[0]
    assert question.metadata == {"Data": [1]}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("name", "separator"), [("q.csv", ","), ("q.tsv", "\t")])
def test_a_table_is_read_by_the_names_of_its_columns(
    tmp_path, name, separator, end, pack
):
    rows = [
        ("Question", "answer", "id"),
        (f'"Who{separator} ""he""?{end}"', '"[""Ada"", ""A""]"', "7"),
        ("Where?", "Ulm, Rome" if separator == "\t" else '"Ulm, Rome"', "8"),
    ]
    text = "\ufeff" + "".join(separator.join(row) + end for row in rows)
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        path.write_bytes(pack(text.encode()))
        questions, problems = load_questions(path)
        assert [q.text for q in questions] == [f'Who{separator} "he"?{end}', "Where?"]
        assert [q.golden_answers for q in questions] == [("Ada", "A"), ("Ulm, Rome",)]
        assert ([q.id for q in questions], problems) == (["7", "8"], [])


BAD_ROWS = {  # a bad row of a table: the line of its error, and what it names
    '"Why?","Ada"': ("2", "2 columns"),
    '"Why?","Ada","2","more"': ("2", "4 columns"),
    "": ("2", "a blank line"),
    '"Why" so?,Ada,2': ("2", "','"),
    '"Why?,Ada,2': ("2-3", "','"),
    "Wh\0y?,Ada,2": ("2", "NUL"),
    "Why\r?,Ada,2": ("2", "new-line"),
    ",Ada,2": ("2", "field question"),
    "Why?,,2": ("2", "field answer"),
    'Why?,"[""Ada"", 3]",2': ("2", "field answer"),
    'Why?,"[""Ada",2': ("2", "field answer"),
    "Why?,Ada,": ("2", "field id"),
    "Why?,A\udcffda,2": ("2", "field answer"),
    f"Why?,{'x' * (MAX_LINE_BYTES // 2)}\udcff,2": ("2", "field answer"),
}


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: ascii(row[:30]))
def test_a_bad_row_of_a_table_does_not_hide_the_others(tmp_path, row):
    lines, named = BAD_ROWS[row]
    path = tmp_path / "q.csv"
    text = f'question,answer,id\n{row}\n"Who?",Ada,3\n'
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as error:
        load_questions(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{lines}: ") and named in message
    assert "\n" not in message and len(message) < 400
    questions, problems = load_questions(path, on_bad="skip")
    assert [q.id for q in questions] == ["3"]
    assert problems == [message]


def test_a_field_of_a_table_that_is_too_long_is_an_error_of_its_lines(tmp_path):
    path = tmp_path / "q.tsv"
    line = "x" * (MAX_LINE_BYTES // 3) + "\n"
    path.write_text(f'question\tanswer\nWho?\tAda\nWhy?\t"{line * 4}"\n')
    with pytest.raises(ValueError, match=r"q\.tsv:3-5: field larger than field limit"):
        load_questions(path)
    path.write_text(f"question\tanswer\nWho?\t{line * 4}".replace("x\n", "xx"))
    with pytest.raises(ValueError, match=r"q\.tsv:2: a line of more than"):
        load_questions(path)


@pytest.mark.fault(10, "truncated gzip")
@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_truncated_gzip_file_is_refused_even_if_records_are_skipped(tmp_path, on_bad):
    path = jsonl(tmp_path, [GOOD], pack=lambda data: gzip.compress(data)[:-10])
    with pytest.raises(ValueError, match=r"q\.jsonl: truncated or damaged gzip data"):
        load_questions(path, on_bad=on_bad)


@pytest.mark.parametrize("place", [200, -200])
def test_a_damaged_parquet_file_is_refused(tmp_path, place):
    path = parquet(tmp_path, [verl(i, question=f"{i}?") for i in range(500)])
    data = bytearray(path.read_bytes())
    data[place : place + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"q\.parquet: damaged after row \d+"):
        load_questions(path)


@pytest.fixture
def saved(tmp_path):
    """Directories saved by `datasets`: a single dataset, and one with two splits."""
    import datasets

    rows = datasets.Dataset.from_list([GOOD, {**GOOD, "id": "q2"}])
    rows.with_format("numpy").save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "dev": rows}).save_to_disk(tmp_path / "two")
    return tmp_path


@pytest.mark.fault(64, "save_to_disk")
def test_datasets_written_by_save_to_disk_are_read(saved):
    for source in ("one", "one@train", "two", "two@train", "two@dev"):
        questions, _ = load_questions(f"{saved}/{source}")
        assert [q.id for q in questions] == ["q1", "q2"]
        assert questions[0].golden_answers == ("Ada", "A. L.")
    for source in ("one@dev", "one:nq", "two@test"):
        with pytest.raises(ValueError, match=f"{saved}/{source}: "):
            load_questions(f"{saved}/{source}")


def test_what_is_wrong_in_a_folder_of_files_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n{"quest\n')
    with pytest.raises(ValueError, match=rf"{tmp_path}: ArrowInvalid: .*JSON.* row 1"):
        load_questions(tmp_path)


@pytest.mark.fault(64, "save_to_disk")
@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff" * 99])
@pytest.mark.parametrize("name", ["state.json", "data-00000-of-00001.arrow"])
def test_a_damaged_saved_dataset_is_refused(saved, name, data):
    (saved / "one" / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{saved}/one: damaged after row 0: \w+"):
        load_questions(saved / "one")


def shared_text():
    """Return 40,000 rows that share one text of 900 kB."""
    rows = pa.array([0] * 40_000, pa.int32())
    return pa.DictionaryArray.from_arrays(rows, ["x" * 900_000])


ENDS = pa.array([0, 20_000, 40_000], pa.int32())
KEYS = ["k"] * 40_000
PARQUET_BOMBS = {
    "texts": shared_text,
    "lists": lambda: pa.ListArray.from_arrays(ENDS, shared_text()),
    "nested": lambda: pa.StructArray.from_arrays([shared_text()], ["content"]),
    "maps": lambda: pa.MapArray.from_arrays(ENDS, pa.array(KEYS), shared_text()),
    "declared": lambda: pa.array(["x" * (7 << 20)] * 10),
    "numbers": lambda: pa.nulls(9_000_000, pa.int8()).fill_null(1),
    "nulls": lambda: pa.nulls(9_000_000, pa.string()),
}


@pytest.fixture
def arrow_memory():
    """A memory pool that reports how much memory Arrow has taken."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    yield pool
    pa.set_memory_pool(before)


@pytest.mark.fault(65, "Parquet of gigabytes")
@pytest.mark.parametrize("name", PARQUET_BOMBS)
def test_a_small_parquet_file_with_gigabytes_of_data_is_refused_unread(
    tmp_path, name, arrow_memory
):
    path = tmp_path / "q.parquet"
    table = pa.table({"question": PARQUET_BOMBS[name]()})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 1 << 18
    pa.set_memory_pool(arrow_memory)
    with pytest.raises(ValueError, match=r"q\.parquet: .* 67108864 bytes"):
        list(read_records(path))
    assert arrow_memory.max_memory() < 64 << 20


def test_a_parquet_file_with_columns_of_every_type_is_read(tmp_path):
    maps = pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string()))
    table = pa.table(
        {
            "text": ["a", None, "\u00e9"],
            "category": pa.array(["a", "b", "a"]).dictionary_encode(),
            "map": maps,
            "list": [[], None, [None, "c"]],
            "pair": pa.array([["a", "b"]] * 3, pa.list_(pa.string(), 2)),
            "nested": [{"x": [{"y": "z"}]}, None, {"x": []}],
            "bytes": [b"\xff", b"", None],
        }
    )
    pq.write_table(table, tmp_path / "q.parquet", row_group_size=2)
    records = [record for _, record in read_records(tmp_path / "q.parquet")]
    assert records == table.to_pylist()


@pytest.mark.fault(65, "Parquet of gigabytes")
@pytest.mark.parametrize(
    "table, reason",
    [
        (
            pa.Table.from_arrays([pa.array(["a"])] * 2, ["q", "q"]),
            "field q: given twice",
        ),
        (pa.table({"q": pa.array([2**62], pa.timestamp("us"))}), "out of range"),
        (
            pa.table({"q": pa.array([2**31 - 1]).cast(pa.int32()).cast(pa.date32())}),
            "row 0",
        ),
    ],
)
def test_a_parquet_file_with_impossible_content_is_refused(tmp_path, table, reason):
    pq.write_table(table, tmp_path / "q.parquet")
    with pytest.raises(ValueError, match=rf"q\.parquet: .*{reason}"):
        list(read_records(tmp_path / "q.parquet"))


@pytest.mark.parametrize(
    "source, parts",
    [
        ("a/b", ("a/b", None, "train")),
        ("a/b@dev", ("a/b", None, "dev")),
        ("a/b:c", ("a/b", "c", "train")),
        (
            "RUC-NLPIR/FlashRAG_datasets:hotpotqa@dev[:50]",
            ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", "dev[:50]"),
        ),
    ],
)
def test_a_hub_source_is_split_into_name_configuration_and_split(source, parts):
    assert _hub_name(source) == parts


def test_a_hub_that_cannot_be_reached_is_an_error_that_names_the_source(monkeypatch):
    def load_dataset(name, config, split):
        raise ConnectionError(f"Couldn't reach {name!r}\non the Hub.")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ValueError) as error:
        load_questions("data/train")
    assert str(error.value) == (
        "data/train: ConnectionError: Couldn't reach 'data/train' on the Hub "
        "(nor is data/train a file or directory here)"
    )


def test_a_hub_dataset_is_read_without_torch_and_tensorflow(tmp_path):
    data = tmp_path / "repository"
    (data / "nq").mkdir(parents=True)
    record = {"ask": "Who?", "answer": {"aliases": ["Ada", "A"]}}
    jsonl(data / "nq", [record, {**record, "ask": "Why?"}], "dev.jsonl")
    card = (
        "---\nconfigs:\n- config_name: nq\n  data_files:\n"
        "  - split: dev\n    path: nq/dev.jsonl\n---\n"
    )
    (data / "README.md").write_text(card)
    program = f"""if True:
        import sys
        from rsearch.data.questions import load_questions
        fields = dict(question="ask", answers="answer.aliases")
        for q in load_questions("{data}:nq@dev", fields=fields)[0]:
            print(q.id, q.text, *q.golden_answers)
        for source in ("{data}:nq@test", "{data}:wiki@dev", "{data}:nq@dev"):
            try:
                load_questions(source)
            except ValueError as error:
                print(error)
        print([m for m in ("torch", "tensorflow", "jax") if m in sys.modules])
    """
    out = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert out[:2] == ["row_0 Who? Ada A", "row_1 Why? Ada A"]
    assert out[2].startswith(f'{data}:nq@test: ValueError: Unknown split "test"')
    assert out[3].startswith(f"{data}:wiki@dev: ValueError: BuilderConfig 'wiki'")
    assert out[4].startswith(f"{data}:nq@dev: row 1: no known format")
    assert out[5] == "[]"

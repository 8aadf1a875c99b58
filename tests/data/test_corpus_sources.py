"""Published corpora, read in their own layouts and written in ours."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rsearch.config.recipes import load, run_command
from rsearch.corpus import main
from rsearch.data.corpus import Corpus
from rsearch.world.world import make_world

DPR = 'id\ttext\ttitle\n1\t"A ""long"" river."\tNile\n2\tA city.\tCairo\n'
R1 = "1\tTitle: Nile Text:  A river.\n2\tCairo   A city.\n3\tno title\n"
BEIR = {"_id": "d1", "title": "Nile", "text": "A river.", "metadata": {"url": "u"}}
KILT = {
    "_id": "290",
    "wikipedia_id": "290",
    "wikipedia_title": "Nile",
    "text": [
        "Nile\n",
        "A long\n river.\n",
        "Section::::Use.\n",
        "BULLET::::- Ships\n",
        "BULLET::::1. Boats\n",
    ],
    "anchors": [{"text": "ships"}],
}
PAGE = {"id": "7", "url": "u", "title": "Cairo", "text": "one two\n\nthree  four five"}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def convert(folder, texts, *flags, pack=bytes):
    """Return the command's exit code and the path of its output for these texts."""
    paths = [folder / f"source{n}" for n in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_bytes(pack(text.encode()))
    out = folder / "corpus.jsonl"
    return run_command(main, [*map(str, paths), f"--out={out}", *flags]), out


def passages(path):
    with Corpus(path) as corpus:
        return {passage.id: passage.contents for passage in corpus}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (DPR, [], {"1": 'Nile\nA "long" river.', "2": "Cairo\nA city."}),
        (R1, [], {"1": "Nile\nA river.", "2": "Cairo\nA city.", "3": "\nno title"}),
        (lines(BEIR), [], {"d1": "Nile\nA river."}),
        (json.dumps([BEIR]), [], {"d1": "Nile\nA river."}),
        ("\ufeff" + lines({"id": 1, "contents": "Nilé\nx"}), [], {"1": "Nilé\nx"}),
        (
            lines(PAGE),
            ["--words=2"],
            {"7-0": "Cairo\none two", "7-1": "Cairo\nthree four", "7-2": "Cairo\nfive"},
        ),
        (lines(PAGE), ["--words=5"], {"7-0": "Cairo\none two three four five"}),
        (lines({"title": "A", "text": "b"}), ["--words=9"], {"A-0": "A\nb"}),
        (lines(KILT), ["--words=100"], {"290-0": "Nile\nA long river. Ships 1. Boats"}),
        (DPR, ["--words=1"], None),
    ],
)
def test_public_layouts_become_passages(tmp_path, pack, text, flags, expected):
    code, out = convert(tmp_path, [text], *flags, pack=pack)
    assert code == 0
    if expected is None:
        expected = {"1-0": "Nile\nA", "1-1": 'Nile\n"long"', "1-2": "Nile\nriver."}
        expected |= {"2-0": "Cairo\nA", "2-1": "Cairo\ncity."}
    assert passages(out) == expected
    assert [*tmp_path.glob(".partial*")] == []


def test_a_parquet_table_is_read(tmp_path):
    path = tmp_path / "pages.parquet"
    pq.write_table(pa.Table.from_pylist([PAGE]), path)
    out = tmp_path / "corpus.jsonl"
    assert run_command(main, [str(path), f"--out={out}", "--words=4"]) == 0
    assert passages(out) == {"7-0": "Cairo\none two three four", "7-1": "Cairo\nfive"}


def test_several_corpora_are_merged_if_their_ids_differ(tmp_path, capsys):
    code, out = convert(tmp_path, [DPR, R1])
    assert code == 2 and not out.exists()
    error = capsys.readouterr().err
    assert f"{tmp_path}/source1:1: field id: '1'" in error
    assert f"{tmp_path}/source0:2 already" in error and "--prefixes" in error
    code, out = convert(tmp_path, [DPR, R1], "--prefixes=,r1-")
    assert code == 0 and [*passages(out)] == ["1", "2", "r1-1", "r1-2", "r1-3"]


def test_a_corpus_that_is_named_twice_is_refused(tmp_path, capsys):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "1", "contents": "a"}\n')
    out = tmp_path / "out.jsonl"
    assert run_command(main, [str(path), str(path), f"--out={out}"]) == 2
    assert not out.exists()
    assert f"{path}:1: field id: '1' was used at" in capsys.readouterr().err


def test_the_embedded_worlds_passages_are_those_of_the_recipe(tmp_path, capsys):
    out, recipe = tmp_path / "world.jsonl", "world:configs/quickstart.py"
    assert run_command(main, [recipe, f"--out={out}"]) == 0
    c = load("configs/quickstart.py")
    world = make_world(seed=c.seed, **c.world)
    assert passages(out) == {p.id: p.contents for p in world.passages}
    for words in ([recipe, "--words=4"], [str(out), recipe]):
        assert run_command(main, [*words, f"--out={tmp_path / 'x'}"]) == 2
        assert f"{recipe}: must be the only FILE" in capsys.readouterr().err


def test_an_existing_output_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "corpus.jsonl"
    out.write_text("mine")
    assert convert(tmp_path, [DPR])[0] == 2
    assert f"--out={out}" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1\tA river.\tNile\n", "source0:1"),
        ("id\ttext\tid\n1\ta\t2\n", "source0:1"),
        ("id\ttext\ttitle\r1\ta\tA\r", "source0:1"),
        (DPR + "3\tno title\n", "source0:4"),
        (DPR + '3\t"A" river\tNile\n', "source0:4"),
        (DPR + '3\t"A river\tNile\n4\tA lake.\tChad\n', "source0:4-5"),
        (DPR + "3\t\t\n", "source0:4: field text"),
        (R1 + "four\n", "source0:4"),
        (R1 + "four\tA lake.\n", "source0:4"),
        ("title\ttext\nNile\tA river.\n", "source0:1: neither JSON, nor a table"),
        ("Nile\tA river.\n", "source0:1: neither JSON, nor a table"),
        (lines(BEIR, {"_id": "d2"}), "source0:2: field contents"),
        (lines(BEIR) + "{\n", "source0:2"),
        (lines(BEIR, KILT), "source0:2: field text"),
        ("plain text\n", "source0:1"),
        ("", "source0"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path, capsys, text, named):
    code, out = convert(tmp_path, [text])
    error = capsys.readouterr().err
    assert code == 2 and named in error and "Traceback" not in error
    assert not out.exists() and [*tmp_path.glob(".partial*")] == []


def test_a_byte_that_is_not_utf8_is_named(tmp_path, capsys):
    code, _ = convert(
        tmp_path, [DPR], pack=lambda text: text.replace(b"A city", b"\xe9")
    )
    error = capsys.readouterr().err
    assert code == 2 and "source0:3: field text: " in error and "not UTF-8" in error


def test_a_quote_that_is_not_closed_costs_only_its_own_record(tmp_path, capsys):
    text = DPR + '3\t"A river\tNile\n4\tA lake.\tChad\n5\tA "dry" lake.\tEyre\n'
    text += '6\t"A\nsea."\tAral\n7\t"A bay\tFundy\n8\tA cape.\tHorn\n'
    code, out = convert(tmp_path, [text], "--on_bad=skip")
    assert code == 0 and [*passages(out)] == ["1", "2", "4", "5", "6", "8"]
    assert passages(out)["6"] == "Aral\nA\nsea."
    printed, error = capsys.readouterr()
    assert "source0:4-6: " in error and "source0:9-10: " in error
    assert "bad records left out │ 2" in " ".join(printed.split())


def test_bad_records_are_left_out_and_counted(tmp_path, capsys):
    text = DPR + '3\tno title\n4\t"A" river\tNile\n5\tA lake.\tChad\n'
    code, out = convert(tmp_path, [text, "6\tA\nseven\n"], "--on_bad=skip")
    assert code == 0 and [*passages(out)] == ["1", "2", "5", "6"]
    printed, error = capsys.readouterr()
    assert "source0:4" in error and "source0:5" in error and "source1:2" in error
    assert "bad records left out │ 3" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("text", "flags", "named"),
    [
        (lines(PAGE), ["--words=-1"], "--words=-1"),
        (lines(PAGE), ["--prefixes=a,b"], "--prefixes=a,b"),
        (lines(PAGE), ["--on_bad=ignore"], "on_bad='ignore'"),
        (lines({"id": 1, "title": "A", "text": ""}), ["--words=9"], "field text"),
        (lines({"text": "b"}), ["--words=9"], "field id or title"),
        (lines({"id": 1, "text": ["a", 2]}), ["--words=9"], "field text[1]"),
        (lines({"id": 1, "title": "A", "text": []}), ["--words=9"], "field text"),
    ],
)
def test_bad_flags_and_unusable_records_are_refused(
    tmp_path, capsys, text, flags, named
):
    code, out = convert(tmp_path, [text], *flags)
    assert code == 2 and named in capsys.readouterr().err
    assert not out.exists()

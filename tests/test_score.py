"""The command that scores files of predictions, whoever made them."""

import gzip
import json

import pytest

from rsearch.config import recipes
from rsearch.config.recipes import run_command
from rsearch.evaluation.predictions import read_predictions
from rsearch.evaluation.statistics import macro_mean, wilson_interval
from rsearch.score import main
from rsearch.text.normalize import DEFAULT_NORMALIZER

GOOD = {"question": "q?", "golden_answers": ["Paris"], "prediction": "Paris"}


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def refusal(capsys):
    """A function that runs the command, expects a user error and returns its line."""

    def run(*argv):
        assert run_command(main, list(argv)) == 2
        captured = capsys.readouterr()
        assert not captured.out and captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hotpotqa", "58.0 65.4 71.9"), ("bamboogle", "45.6 52.8 57.7")],
)
def test_published_predictions_score_as_published(shared_data, capsys, name, expected):
    path = str(shared_data / "published" / f"r1_searcher_{name}_qwen.jsonl.gz")
    flags = [path, "--normalizer=r1_searcher"]
    assert run_command(main, [*flags, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["file"], scores["normalize"]) == (path, "r1_searcher")
    assert scores["n"] == {"hotpotqa": 500, "bamboogle": 125}[name]
    percent = [f"{100 * scores[k]:.1f}" for k in ("em", "cover_em", "f1")]
    assert percent == expected.split()

    assert run_command(main, flags) == 0
    table = capsys.readouterr().out
    assert all(number in table for number in (*expected.split(), "r1_searcher"))


def test_samples_of_a_question_count_as_one_question(tmp_path, capsys):
    rows = [
        GOOD | {"id": name, "seed": 0, "sample": i, "prediction": text}
        for name, texts in (("a", ("Paris", "x")), ("b", ("x", "x")))
        for i, text in enumerate(texts)
    ]
    assert main([write(tmp_path / "x.jsonl", *rows), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["n"], scores["em"]) == (2, 1 / 4)
    assert main([write(tmp_path / "x.jsonl", GOOD | {"sample": 1}), "--json"]) == 0


def test_thoughts_are_removed_and_an_unfinished_one_is_no_answer(tmp_path, capsys):
    texts = ["<think>maybe Paris", "<think>maybe London</think>\nParis"]
    rows = [GOOD | {"prediction": text} for text in texts]
    run = {"stage": "rl", "method": "direct", "id": "q", "segments": []}
    for extra in ({}, run):
        lines = [row | extra for row in rows]
        assert main([write(tmp_path / "x.jsonl", *lines), "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)
        assert [scores[name] for name in ("em", "cover_em", "f1")] == [0.5] * 3


def test_json_is_one_object_of_fractions(tmp_path, capsys):
    wrong = GOOD | {"prediction": "Paris it is, city"}
    path = write(tmp_path / "x.jsonl", GOOD, wrong, GOOD | {"prediction": None})
    assert main([path, "--json", "--normalizer=squad"]) == 0
    scores = json.loads(capsys.readouterr().out)
    expected = {"n": 3, "em": 1 / 3, "cover_em": 2 / 3, "f1": (1 + 2 / 5) / 3}
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert scores["em_95"] == [*wilson_interval(1, 3)]


def test_table_shows_percent_and_interval(tmp_path, capsys):
    path = write(tmp_path / "x.jsonl", GOOD, GOOD, GOOD | {"prediction": "Rome"})
    assert main([path]) == 0
    out = capsys.readouterr().out
    low, high = (f"{100 * x:.1f}" for x in wilson_interval(2, 3))
    assert f"66.7 ({low} to {high})" in out and DEFAULT_NORMALIZER in out


def test_the_default_normaliser_is_the_one_that_evaluation_uses(tmp_path, capsys):
    assert recipes.load("configs/base.py").eval.normalize == DEFAULT_NORMALIZER
    row = GOOD | {"golden_answers": ["New York"], "prediction": "New-York"}
    assert main([write(tmp_path / "x.jsonl", row), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["normalize"], scores["em"]) == (DEFAULT_NORMALIZER, 0)


def test_published_field_names_are_read_and_ours_take_precedence(tmp_path):
    rows = [
        {"question": "q", "golden_answer": "Paris", "predicted_answer": "Rome"},
        {"question": "q", "answer": ["Paris"], "pred_ans": "Rome"},
        {
            "question": "q",
            "golden_answers": "Paris",
            "answer": "Oslo",
            "prediction": "Rome",
            "pred_ans": "Oslo",
        },
    ]
    expected = {"question": "q", "golden_answers": ["Paris"], "prediction": "Rome"}
    (actual,) = read_predictions(write(tmp_path / "x.jsonl", *rows)).values()
    assert actual == [expected] * 3


@pytest.mark.fault(64, "intermediate_data.json")
def test_the_predictions_that_flashrag_saves_are_scored(tmp_path, capsys):
    item = {
        "id": "test_0",
        "question": "Who?",
        "golden_answers": ["Ada"],
        "metadata": {"answer_aliases": ["A. L."]},
        "output": {"raw_pred": "A. L.!", "pred": "A. L.", "metric_score": {"em": 0.0}},
    }
    path = tmp_path / "intermediate_data.json"
    path.write_text(json.dumps([item, {**item, "output": {"pred": None}}], indent=4))
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["em"] == 0.5
    path.write_text(json.dumps([item, {**item, "output": {"raw_pred": "Ada"}}]))
    with pytest.raises(
        ValueError, match=r"data\.json: record 2: field prediction \(or"
    ):
        read_predictions(str(path))


def test_gzip_byte_order_marks_line_ends_and_blank_lines_do_not_matter(tmp_path):
    line = json.dumps(GOOD).encode()
    plain = tmp_path / "misnamed.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line)
    packed = tmp_path / "misnamed.jsonl"
    packed.write_bytes(gzip.compress(line + b"\n" + line + b"\n"))
    for path in (plain, packed):
        assert read_predictions(path) == {(None, None, None, None): [GOOD, GOOD]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "q", "golden', "invalid JSON at column"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"a": 1, "a": 2}', "field a: given twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ({"golden_answers": ["x"], "prediction": ""}, "field question: missing"),
        (GOOD | {"question": 3}, "field question: expected text, got int 3"),
        ({"question": "q", "prediction": "x"}, "field golden_answers (or "),
        ({"question": "q", "answer": "x"}, "field prediction (or predicted_answer"),
        (GOOD | {"golden_answers": []}, "field golden_answers: holds no answer"),
        (GOOD | {"golden_answers": [" "]}, "field golden_answers[0]: expected text"),
        (GOOD | {"golden_answers": ["x", 1.5]}, "expected text, got float 1.5"),
        (
            GOOD | {"golden_answers": {"x": 1}},
            "field golden_answers: expected a text or",
        ),
        (
            GOOD | {"prediction": 7},
            "field prediction: expected text or null, got",
        ),
        (GOOD | {"stage": ["rl"]}, "field stage: expected text, got list"),
    ],
)
def test_bad_rows_are_named_by_file_line_and_field(tmp_path, refusal, row, message):
    path = write(tmp_path / "x.jsonl", GOOD, row)
    line = refusal(path, "--json")
    assert line.startswith(f"error: {path}:2: ") and message in line


def test_bytes_that_are_not_utf8_are_named(tmp_path, refusal):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"question": "\xff"}\n')
    assert f"{path}:1: invalid UTF-8 at byte 15" in refusal(str(path))


def test_a_truncated_gzip_file_is_named(tmp_path, refusal):
    path = tmp_path / "x.jsonl.gz"
    rows = "".join(json.dumps(GOOD | {"id": i}) + "\n" for i in range(999))
    packed = gzip.compress(rows.encode())
    path.write_bytes(packed[: len(packed) // 2])
    assert f"{path}: truncated or damaged gzip" in refusal(str(path))


def test_files_and_flags_that_cannot_be_used_are_named(tmp_path, refusal):
    assert "missing.jsonl" in refusal("missing.jsonl")
    assert "no rows" in refusal(write(tmp_path / "empty.jsonl"))
    path = write(tmp_path / "x.jsonl", GOOD)
    names = "squad or r1_searcher or flashrag"
    assert f"must be {names}" in refusal(path, "--normalizer=squat")
    assert "did you mean --normalizer" in refusal(path, "--normaliser=squad")
    assert "FILE.jsonl is missing" in refusal("--json")


def transcripts(path, **rights):
    """Write a run's file: {stage_dataset: number of its 4 questions that are right}."""
    rows = []
    for name, num_right in rights.items():
        stage, dataset = name.split("_")
        about = {"stage": stage, "method": "protocol", "dataset": dataset}
        for i in range(4):
            prediction = "Paris" if i < num_right else None
            rows.append({**GOOD, **about, "id": f"{i}", "prediction": prediction})
    return write(path, *rows[::2], *rows[1::2])  # in any order


def test_a_runs_transcripts_get_a_row_per_stage_method_and_dataset(tmp_path, capsys):
    run = transcripts(tmp_path / "transcripts.jsonl", sft_nq=1, rl_nq=2, rl_web=4)
    other = write(tmp_path / "x.jsonl", GOOD)
    # Named twice, in whatever spelling, a file counts once.
    respelled = f"{tmp_path}/./transcripts.jsonl"
    assert main([run, other, run, respelled, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ("file", "stage", "method", "dataset", "n", "em")
    assert [tuple(row.get(name) for name in names) for row in rows] == [
        (run, "sft", "protocol", "nq", 4, 0.25),
        (run, "rl", "protocol", "nq", 4, 0.5),
        (run, "rl", "protocol", "web", 4, 1.0),
        (other, None, None, None, 1, 1.0),
    ]
    assert main([run]) == 0
    out = capsys.readouterr().out
    assert "dataset" in out and "method" not in out and "transcripts" not in out


def test_a_macro_mean_follows_the_datasets_of_its_system(tmp_path, capsys):
    run = transcripts(tmp_path / "transcripts.jsonl", sft_nq=1, rl_nq=2, rl_web=4)
    assert main([run, "--json", "--macro"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (len(rows), rows[-1]["stage"], rows[-1]["n"]) == (4, "rl", 8)
    intervals = [wilson_interval(2, 4), wilson_interval(4, 4)]
    expected = macro_mean([0.5, 1.0], intervals)
    assert (rows[-1]["em"], tuple(rows[-1]["em_95"])) == expected


def test_a_macro_mean_states_its_number_of_datasets(tmp_path, capsys):
    rights = {"sft_nq": 1, "sft_web": 2, "rl_nq": 2, "rl_web": 4, "rl_pop": 3}
    run = transcripts(tmp_path / "transcripts.jsonl", **rights)
    assert main([run, "--macro"]) == 0
    out = capsys.readouterr().out
    assert "macro mean of 2 datasets" in out and "macro mean of 3 datasets" in out
    assert main([run, "--json", "--macro"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = [(row["stage"], row.get("datasets")) for row in rows]
    assert counts == [
        *([("sft", None)] * 2),
        *([("rl", None)] * 3),
        ("sft", 2),
        ("rl", 3),
    ]


def test_rows_of_two_settings_are_refused_and_both_settings_named(tmp_path, refusal):
    about = {"stage": "rl", "method": "protocol", "dataset": "nq"}
    rows = [GOOD | about, GOOD | about | {"setting": "rollout.max_searches=2"}]
    line = refusal(write(tmp_path / "t.jsonl", *rows), "--macro")
    assert "nq" in line and "no setting" in line and "rollout.max_searches=2" in line


def test_runs_in_two_folders_have_no_macro_mean(tmp_path, refusal):
    rows = {"nq": {"rl_nq": 2}, "web": {"rl_web": 4}}
    for name in rows:
        (tmp_path / name).mkdir()
    files = [transcripts(tmp_path / n / "t.jsonl", **rows[n]) for n in rows]
    line = refusal(*files, "--macro")
    assert "rl protocol is in " in line and all(name in line for name in files)
    files = [transcripts(tmp_path / f"{n}.jsonl", **rows[n]) for n in rows]
    assert main([*files, "--macro"]) == 0


def test_the_macro_mean_of_plain_files_says_that_they_count_as_one_system(
    tmp_path, capsys
):
    files = [write(tmp_path / f"{name}.jsonl", GOOD) for name in ("a1", "a2", "b1")]
    assert main([*files, "--macro"]) == 0
    assert "macro mean of 3 datasets as one system" in capsys.readouterr().out


def test_datasets_that_have_no_macro_mean_are_refused(tmp_path, refusal):
    first = transcripts(tmp_path / "a.jsonl", rl_nq=2, sft_web=2)
    second = transcripts(tmp_path / "b.jsonl", rl_nq=4)
    assert "has two datasets" in refusal(first, "--macro")
    file, respelled = write(tmp_path / "x.jsonl", GOOD), f"{tmp_path}/./x.jsonl"
    assert "has two datasets" in refusal(file, respelled, "--macro")
    line = refusal(first, second, "--macro")
    assert "dataset nq" in line and first in line and second in line

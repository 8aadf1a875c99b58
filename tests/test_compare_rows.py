"""rsearch.compare: which rows a table has, their settings and their intervals."""

import csv
import io
import json

from tests.test_compare import SCORES, cells, make, row, said

__all__ = ["said"]


def test_several_methods_and_datasets_can_be_chosen_by_name(said, tmp_path):
    rows = [row(method=m, dataset=d) for d in ("d", "e", "f,g") for m in "abc"]
    a = make(tmp_path / "a", *rows)
    b = make(tmp_path / "b", row(method="z"), seed=1)

    def chosen(*flags):
        columns, *lines = cells(said(a, b, "--markdown", *flags)[1].split("\n\n")[0])
        records = [dict(zip(columns, line, strict=True)) for line in lines]
        return [(line["method"], line.get("dataset")) for line in records]

    assert chosen("--method=c,a", "--dataset=d,e") == [
        *(("a", "d"), ("c", "d")),
        *(("a", "e"), ("c", "e")),
    ]
    assert chosen("--method=a, z", "--dataset=d") == [("a", None), ("z", None)]
    # A file's name may contain a comma.
    assert chosen("--method=a,b", "--dataset=f,g") == [("a", None), ("b", None)]
    # A file may be given by its bare name, as the table shows it, if that is unique.
    c = make(tmp_path / "c", *(row(dataset=d) for d in ("my/e", "my/g", "our/g")))
    assert said(c, "--markdown", "--dataset=e")[0] == 0
    assert "--dataset=g: the runs have my/e, my/g" in said(c, "--dataset=g")[2]
    for flags, wrong, known in (
        (["--method=a,x"], "--method=x", "a, b, c, z"),
        (["--method=all", "--dataset=d,x"], "--dataset=x", "d, e, f,g"),
    ):
        code, out, err = said(a, b, *flags)
        assert (code, out) == (2, "") and f"{wrong}: the runs have {known}" in err


def test_an_empty_name_is_not_the_working_directory(said, tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path / "run", row()))
    assert said(".")[0] == 0
    for argv in ([""], [".", ""]):
        code, _, error = said(*argv)
        assert code == 2 and "no run's directory" in error


def test_rows_of_different_settings_are_kept_apart(said, tmp_path):
    """Also if only the setting differs, and for grouped runs."""
    changed, hostile = "rollout.max_searches=2", "data.dev=a|b"
    for seed in (0, 1):
        make(tmp_path / f"s{seed}", row(), row(em=0.9, setting=changed), seed=seed)
    for flags, name in ((["--group"], "runs"), ([], "seed")):
        columns, *lines = cells(
            said(tmp_path, "--markdown", *flags)[1].split("\n\n")[0]
        )
        assert columns[2:5] == ["setting", name, "n"]
        rows = {(line[2], line[columns.index("EM")].split(" ")[0]) for line in lines}
        assert rows == {("", "50.0"), (changed, "90.0")}
        assert len(lines) == (2 if flags else 4)
    for flag in ("--csv", "--latex", "--wide"):
        out = said(tmp_path, flag)[1].replace("\\_", "_")
        assert out.count(changed) == 2 and "setting" in out
    shared = make(tmp_path / "shared", row(setting=hostile), seed=2)
    columns, line = cells(said(shared, "--markdown")[1].replace(r"a\|b", "a b"))
    assert line[columns.index("setting")] == "data.dev=a b"
    plain = make(tmp_path / "plain", row(setting=""), seed=3)
    assert "setting" not in said(plain, "--markdown")[1]


def test_json_and_csv_have_the_interval_of_each_score(said, tmp_path):
    intervals = {"em_95": [0.25, 0.5], "f1_95": [0.125, 0.75]}
    intervals["cover_em_95"] = [0.375, 1.0]
    older = row("sft")
    del older["em_95"]
    run = make(tmp_path / "run", row(**intervals), older)
    words = [run, "--stage=all"]
    first, second = json.loads(said(*words, "--json")[1])["rows"]
    (line, _) = csv.DictReader(io.StringIO(said(*words, "--csv")[1]))
    for name, (low, high) in intervals.items():
        fields = [name.replace("_95", end) for end in ("_low", "_high")]
        assert [first[f] for f in fields] == [float(line[f]) for f in fields]
        assert [first[f] for f in fields] == [low, high]
        assert [second[f] for f in fields] == [None, None]
    assert "12.5" not in said(*words, "--wide")[1]


def test_what_a_mean_over_runs_leaves_out_or_counts_twice_is_a_note(said, tmp_path):
    part = {"n": 9, **SCORES, "searches": 1.0}
    kinds = {"by_kind": {"single": part}}
    make(tmp_path / "0", row("start"), row(**kinds), seed=0)
    make(tmp_path / "copy", row("start"), row(**kinds), seed=0)
    make(tmp_path / "1", row(em=None, em_95=None), seed=1)
    notes = [
        "r_search rl protocol d: 2 runs have the seed 0",
        "r_search rl protocol d: EM is the mean of 2 of 3 runs",
        "r_search rl protocol d: EM before is the mean of 2 of 3 runs",
    ]
    for flags in ([], ["--markdown"], ["--latex"], ["--json"]):
        out = said(tmp_path, "--group", *flags)[1].replace(r"\_", "_")
        assert all(note in out for note in notes), out
    out = said(tmp_path / "0", "--group")[1]
    assert not any(note.partition(": ")[0] in out for note in notes)


def test_a_run_without_a_chosen_row_is_named_and_not_counted(said, tmp_path):
    runs = [make(tmp_path / "a", row(), row(method="rag")), make(tmp_path / "b", row())]
    code, out, err = said(*runs, "--method=rag")
    assert code == 0 and out.startswith("1 run,")
    (line,) = err.splitlines()
    assert str(runs[1]) in line and "--method=rag" in line
    assert said(*runs)[1].startswith("2 runs")


def test_a_run_that_is_named_twice_counts_once(said, tmp_path, monkeypatch):
    run = make(tmp_path / "dir of ünïcode" / "a run", row())
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run.parent)
    spellings = [(run, run), (run.parent, run), (f"{run}/", run), ("a run", run)]
    for names in (*spellings, (run, tmp_path / "link")):
        code, out, _ = said(*names, "--markdown", "--group")
        assert code == 0 and cells(out)[1][:3] == ["r_search", "rl", "1"]


def test_a_refused_row_may_lack_its_number_of_questions(said, tmp_path):
    other = row(questions="f2")
    del other["n"]
    runs = make(tmp_path / "a", row()), make(tmp_path / "b", other)
    code, _, err = said(*runs)
    assert code == 2 and "questions = f2" in err and "200 questions" in err


def test_names_of_methods_and_files_may_be_abbreviated(said, tmp_path):
    rows = [row("rl", method, "/x/d.jsonl") for method in ("skr:labels=a", "rag")]
    run = make(tmp_path / "run", *rows, row("rl", "skr:labels=a", "/y/e.jsonl"))
    out = said(run, "--method=skr", "--dataset=d.jsonl")[1]
    assert out.startswith("1 run, scores in percent: skr:labels=a, /x/d.jsonl\n")
    every = make(tmp_path / "every", row(), row("rl", "protocol", "org/all"))
    assert len(cells(said(every, "--markdown")[1])) == 3  # 'all' is no abbreviation
    two = make(tmp_path / "two", *rows, row("rl", "skr:labels=b"))
    code, _, err = said(two, "--method=skr")
    assert code == 2 and "--method=skr: the runs have rag, skr:labels=a, skr" in err


def test_rows_are_chosen_by_what_their_evaluation_changed(said, tmp_path):
    setting = "eval.samples=2, eval.top_k=3"
    changed = {"setting": setting, "made_by": {"retrieval.top_k": 3}}
    old = make(tmp_path / "old", row(em=0.3))
    run = make(tmp_path / "run", row(setting=""), row(em=0.1, **changed), seed=1)
    code, out, err = said(old, run)
    choice = "; --setting chooses between settings, --allow=retrieval.top_k marks"
    assert (code, out) == (2, "") and choice in err
    out = said(old, run, "--markdown", "--setting=none")[1]
    _, *lines = cells(out.partition("\n\n")[0])
    assert [line[0] for line in lines] == ["old", "run"]
    code, out, err = said(old, run, f"--setting={setting}")
    assert code == 0 and "10.0" in out and "50.0" not in out
    for name in ("markdown", "latex"):
        text = said(run, f"--{name}", f"--setting={setting}")[1].replace("\\", "")
        assert setting in text
        assert "setting" not in said(run, f"--{name}", "--setting=none")[1]
    assert f"{old}: not in the table" in err
    code, _, err = said(old, run, "--setting=eval.samples=2")
    assert code == 2
    assert f"--setting=eval.samples=2: the runs have {setting}; none" in err

"""rsearch.compare: rows chosen by name, their settings and their intervals."""

import csv
import io
import json

from tests.test_compare import cells, make, row, said

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

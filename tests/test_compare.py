"""rsearch.compare: rows, labels and numbers of one table over several runs."""

import csv
import io
import json
import re
import sys
import unicodedata

import pytest

from rsearch import compare
from rsearch.config.recipes import run_command

SCORES = {"em": 0.5, "f1": 0.625, "cover_em": 0.75}


def row(stage="rl", method="protocol", dataset="d", **more):
    counts = {"searches": 1.5, "queries": 2.0}
    counts |= {"searches_right": 1.25, "searches_wrong": None}
    about = {"stage": stage, "step": 1, "method": method, "dataset": dataset, "n": 200}
    about |= {
        "questions": "f1",
        "normalize": "squad",
        "made_by": {"retrieval.top_k": 1},
    }
    return {**about, **SCORES, "em_95": [0.4321, 0.5678], **counts, **more}


def make(folder, *rows, stages=("sft", "rl"), **fields):
    """Make a run's directory with these results."""
    config = {"name": "r_search", "seed": 0, "stages": list(stages), **fields}
    folder.mkdir(parents=True)
    whole = {"rsearch_workdir": 1, "config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    if rows:
        (folder / "results.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def said(capsys):
    """A function that runs the command and returns (exit code, stdout, stderr)."""

    def run(*argv):
        code = run_command(compare.main, [*map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes stdout a terminal of a given width."""

    def resize(width):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        for name, value in {"COLUMNS": width, "TERM": "xterm", "NO_COLOR": 1}.items():
            monkeypatch.setenv(name, str(value))

    return resize


def evaluated(folder, dataset="d", rights="1100", lines=None, **more):
    """Make a run with transcripts, in which a digit 1 stands for a right answer."""
    about = {"stage": "rl", "method": "protocol", "dataset": dataset}
    items = [
        {**about, "question": f"{i}?", "golden_answers": ["x"], "prediction": text}
        for i, text in enumerate(("x" if digit == "1" else None) for digit in rights)
    ]
    em = rights.count("1") / len(rights)
    counted = {"n": len(rights), "em": em}
    run = make(folder, row(dataset=dataset, **counted | more), seed=ord(folder.name[0]))
    lines = [json.dumps(item) for item in items] if lines is None else lines
    (run / "transcripts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run


def cells(markdown):
    lines = markdown.splitlines()
    split = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [split[0], *split[2:]]


def test_the_last_stage_with_its_own_protocol_is_shown(said, tmp_path):
    rows = [row("start"), row("sft"), row("rl", em=0.9), row("rl", "direct")]
    run = make(tmp_path / "run", *rows)
    code, out, _ = said(run, "--markdown")
    assert code == 0
    assert out.splitlines()[1] == "| --- | --- | ---: |" + " ---: |" * 10
    columns, values = cells(out)
    assert columns == [
        *("run", "stage", "seed", "n", "EM before", "EM", "95 % interval"),
        *("F1", "cover-EM", "searches", "queries", "when right", "when wrong"),
    ]
    assert values == [
        *("run", "rl", "0", "200", "50.0", "90.0", "43.2 - 56.8", "62.5", "75.0"),
        *("1.50", "2.00", "1.25", "-"),
    ]


def test_a_row_shows_the_same_methods_score_before_training(said, tmp_path):
    part = {"n": 9, **SCORES, "searches": 1.0}
    for seed, before in ((0, 0.1), (1, 0.2)):
        kinds = {"single": {**part, "em": before / 2}}
        start = row("start", em=before, by_kind=kinds)
        more = {"single": part, "bridge": part}
        rows = [start, row("start", "direct"), row("rl", em=0.9, by_kind=more)]
        make(tmp_path / f"{seed}", *rows, seed=seed)
    columns, values = cells(said(tmp_path, "--markdown", "--group")[1])
    assert values[columns.index("EM before")] == "15.0 ± 7.1"
    columns, *lines = cells(said(tmp_path / "0", "--markdown", "--by_kind")[1])
    actual = {line[2]: line[columns.index("EM before")] for line in lines}
    assert actual == {"single": "5.0", "bridge": "-"}
    for stage in ("start", "rl"):
        columns, *_ = cells(said(tmp_path, "--markdown", f"--stage={stage}")[1])
        assert ("EM before" in columns) == (stage == "rl")


def test_stages_and_methods_can_be_chosen(said, tmp_path):
    rows = [row(stage, method) for stage in ("start", "rl") for method in "ab"]
    run = make(tmp_path / "run", *rows)
    chosen = cells(said(run, "--markdown", "--stage=all", "--method", "all")[1])
    assert [line[1:3] for line in chosen] == [
        *(["stage", "method"], ["start", "a"], ["start", "b"]),
        *(["rl", "a"], ["rl", "b"]),
    ]
    (_, only) = cells(said(run, "--markdown", "--stage=start", "--method=b")[1])
    assert only[1] == "start"
    code, _, err = said(run, "--stage=rll")
    assert code == 2 and "--stage=rll: the runs have rl, start" in err
    assert "did you mean rl?" in err


def test_an_unfinished_run_shows_its_latest_stage(said, tmp_path):
    run = make(tmp_path / "run", row("start"), row("sft"))
    assert cells(said(run, "--markdown")[1])[1][1] == "sft"
    foreign = make(tmp_path / "other", row("some/model"))
    assert cells(said(foreign, "--markdown")[1])[1][1] == "some/model"


def test_runs_that_differ_only_in_their_seed_are_grouped(said, tmp_path):
    """Mean and sample deviation of 0.5, 0.6 and 0.7: 0.6 and 0.1."""
    for seed, em in enumerate((0.5, 0.6, 0.7)):
        make(tmp_path / f"s{seed}", row(em=em), seed=seed, rl={"steps": 9, "kl": 1})
    make(tmp_path / "ablation", row(em=0.1), rl={"steps": 9, "kl": 0})
    make(tmp_path / "short", row(em=0.2), rl={"steps": 3, "kl": 1})
    code, out, _ = said(tmp_path, "--group", "--markdown")
    assert code == 0
    actual = {line[0]: line[2:6] for line in cells(out)[1:]}
    assert actual == {
        "r_search rl.kl=1 rl.steps=9": ["3", "200", "60.0 ± 10.0", "62.5 ± 0.0"],
        "r_search rl.kl=0 rl.steps=9": ["1", "200", "10.0", "62.5"],
        "r_search rl.kl=1 rl.steps=3": ["1", "200", "20.0", "62.5"],
    }


@pytest.mark.parametrize("dataset", ["world:dev", "hotpotqa"])
def test_grouped_rows_are_compared_seed_by_seed(said, tmp_path, dataset):
    """Differences of 0.1, 0.2 and 0.3: 0.2, with t(2) 4.3027 x 0.1 / sqrt(3)."""
    for seed, em in enumerate((0.5, 0.3, 0.6)):
        is_drawn = dataset == "world:dev"
        asked = {"questions": f"seed {seed}" if is_drawn else "f", "dataset": dataset}
        kinds = [{"by_kind": {"single": {"n": 9, **SCORES, "em": x}}} for x in (0, 1)]
        a = row(em=em, **asked, **kinds[0])
        b = row(em=em + (seed + 1) / 10, searches=1.25, **asked, **kinds[1])
        make(tmp_path / f"a{seed}", a, seed=seed)
        make(tmp_path / f"b{seed}", b, seed=seed, name="better")
    asked["questions"] = asked["questions"].replace("2", "0")
    make(tmp_path / "c", row(**asked), name="once")
    select = f"--dataset={dataset}", "--group", "--markdown"
    code, out, err = said(tmp_path, *select)
    assert (code, err) == (0, "")
    columns, line = cells(out.split("\n\n")[-1])
    assert columns[:5] == ["row", "minus", "seeds", "EM difference", "EM interval"]
    assert line[:5] == ["better", "r_search", "3", "+20.0", "-4.8 to +44.8"]
    # Equal differences have no deviation that an interval could be computed from.
    assert line[-2:] == ["-0.25", "-"]
    kinds = said(tmp_path, *select, "--by_kind")[1]
    assert "| +100.0 | - |" in kinds
    (pair,) = json.loads(said(tmp_path, *select[:2], "--json")[1])["differences"]
    assert pair["differences"]["searches"] == [-0.25, None]


def test_fields_that_do_not_affect_training_do_not_separate_runs(said, tmp_path):
    a = make(tmp_path / "a", row(), mesh={"data": 1}, eval={"examples": 1})
    b = make(tmp_path / "b", row(), mesh={"data": 8}, eval={"examples": 2}, seed=1)
    (_, line) = cells(said(a, b, "--group", "--markdown")[1])
    assert line[:3] == ["r_search", "rl", "2"]


def test_many_differing_fields_are_counted_and_keep_runs_apart(said, tmp_path):
    for number in range(3):
        fields = {f"f{i}": number for i in range(9)}
        make(tmp_path / str(number), row(), **fields)
    lines = cells(said(tmp_path, "--group", "--markdown")[1])[1:]
    assert len({line[0] for line in lines}) == 3
    assert all("(and 5 more, " in line[0] for line in lines)


def test_kinds_of_questions_get_a_row_each(said, tmp_path):
    part = {"n": 80, **SCORES, "searches": 2.0}
    split = {"bridge": part, "single": {**part, "em": 1.0}}
    known = {"known": {**part, "n": 5}}
    run = make(tmp_path / "run", row(by_kind=split, by_known=known))
    columns, *lines = cells(said(run, "--by_kind", "--markdown")[1])
    assert " ".join(columns) == "run stage kind seed n EM F1 cover-EM searches"
    assert [line[2:6] for line in lines] == [
        *(["bridge", "0", "80", "50.0"], ["single", "0", "80", "100.0"]),
        ["known", "0", "5", "50.0"],
    ]
    none = make(tmp_path / "none", row())
    code, _, err = said(none, "--by_kind")
    assert code == 2 and "no row of these runs" in err


def test_results_of_older_runs_may_lack_some_numbers(said, tmp_path):
    old = row()
    for name in ("queries", "searches_right", "searches_wrong"):
        del old[name]
    a, b = make(tmp_path / "a", old), make(tmp_path / "b", row(), seed=1)
    lines = cells(said(a, b, "--markdown")[1])[1:]
    assert [line[9:11] for line in lines] == [["-", "-"], ["2.00", "1.25"]]
    (_, both) = cells(said(a, b, "--markdown", "--group")[1])
    assert both[7:10] == ["1.50 ± 0.00", "2.00", "1.25"]


def test_without_a_format_flag_a_table_is_drawn(said, tmp_path):
    code, out, _ = said(make(tmp_path / "run", row()))
    assert code == 0 and "1 run, scores in percent" in out and "│ run │ rl" in out


def test_a_name_cannot_break_the_markdown(said, tmp_path):
    run = make(tmp_path / "run", row(stage="a|b\nc"))
    lines = said(run, "--markdown", "--stage=all")[1].splitlines()
    assert len(lines) == 3 and "a\\|b c" in lines[2]


def test_rows_on_the_same_questions_are_compared_by_question(said, tmp_path):
    """Of 40 questions, 6 are right only in the second run, none only in the first."""
    first = evaluated(tmp_path / "a", rights="1" * 10 + "0" * 30)
    second = evaluated(tmp_path / "b", rights="1" * 16 + "0" * 24)
    code, out, err = said(first, second, "--markdown")
    assert (code, err) == (0, "")
    columns, line = cells(out.partition("\n\n")[2])
    assert columns[:4] == ["row", "minus", "n", "EM difference"]
    assert line[2:4] == ["40", "+15.0"] and line[0] != line[1]
    low, high = (float(x) for x in line[4].split(" to "))
    assert 0 < low < 15 < high < 30
    assert line[5] == f"{2 / 2**6:.4f}" and line[6] == "+15.0"
    assert "-15.0" in said(second, first)[1]
    for flag in ("--group", "--by_kind"):
        assert "McNemar" not in said(first, second, flag)[1]


def test_means_over_samples_are_compared_by_question(said, tmp_path):
    """4 questions have two samples each; the second run has one more sample right."""
    runs = []
    for name, rights in (("a", "10000000"), ("b", "11000000")):
        lines = [
            {"stage": "rl", "method": "protocol", "dataset": "d", "id": str(i // 2)}
            | {"question": f"{i // 2}?", "golden_answers": ["x"], "sample": i % 2}
            | {"prediction": "x" if right == "1" else None}
            for i, right in enumerate(rights)
        ]
        counted = {"n": 4, "em": rights.count("1") / 8}
        lines = list(map(json.dumps, lines))
        runs.append(evaluated(tmp_path / name, lines=lines, **counted))
    code, out, err = said(*runs, "--markdown")
    assert (code, err) == (0, "")
    _, line = cells(out.partition("\n\n")[2])
    assert line[2:4] == ["4", "+12.5"] and line[5] == "-"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"questions": "f2"}, "2 of 2 rows are not paired: no other row"),
        ({"normalize": "r1_searcher"}, "2 of 2 rows are not paired: no other row"),
        ({"normalize": ["x"]}, "do not name the questions"),
        ({"questions": None}, "do not name the questions"),
        ({"em": None}, "failed in all"),
        ({"em": 0.25}, "transcripts.jsonl and results.json differ on rl, protocol"),
        ({"n": 5}, "transcripts.jsonl and results.json differ on rl, protocol"),
        (
            {"n": 0, "stage": "sft"},
            "transcripts.jsonl and results.json differ on sft, protocol",
        ),
        ({"lines": ["{"]}, "transcripts.jsonl:1: invalid JSON"),
        (
            {
                "lines": [
                    '{"stage": "rl", "method": "protocol", "dataset": "d", '
                    f'"question": "{i}", "golden_answers": "x", "prediction": "{x}"}}'
                    for i, x in enumerate("xxyy")
                ]
            },
            "has other questions",
        ),
    ],
)
def test_rows_without_a_pair_are_shown_and_the_reason_is_given(
    said, tmp_path, changes, reason
):
    runs = evaluated(tmp_path / "a"), evaluated(tmp_path / "b", **changes)
    code, out, err = said(*runs, "--markdown", "--allow=questions,normalize")
    assert code == 0 and len(cells(out.partition("\n\n")[0])) == 3
    assert reason in err and "rows are not paired" in err


def test_rows_are_paired_with_the_first_row_on_the_same_questions(said, tmp_path):
    runs = [
        evaluated(tmp_path / str(i), dataset, questions=dataset)
        for i, dataset in enumerate("dede")
    ]
    (runs[3] / "transcripts.jsonl").unlink()
    code, out, err = said(*runs, "--markdown")
    (line,) = cells(out.partition("\n\n")[2])[1:]
    assert code == 0 and line[2:4] == ["4", "+0.0"] and line[5] == "1.0000"
    assert "1 of 4 rows are not paired: the other rows" in err
    assert "transcripts.jsonl is not there" in err


def made(**more):
    """Return a row with other values in `made_by`."""
    return row(made_by={"retrieval.top_k": 1} | more)


JUDGE = {"source": "j", "name": "", "temperature": 0.0, "top_p": 1.0}
JUDGE |= {"max_prompt_tokens": 9, "max_reply_tokens": 9, "prompt": "x", "golds": "any"}


@pytest.mark.parametrize(
    ("field", "values", "other", "unrelated"),
    [
        ("retrieval.top_k", "13", made(**{"retrieval.top_k": 3}), "world"),
        ("questions", ("f1", "f2"), row(questions="f2"), "retrieval"),
        ("normalize", ("squad", "flashrag"), row(normalize="flashrag"), "judged_by"),
    ],
)
def test_rows_measured_in_different_ways_are_refused_or_marked(
    said, tmp_path, field, values, other, unrelated
):
    a, b = make(tmp_path / "a", row()), make(tmp_path / "b", other, seed=1)
    for flags in ([], ["--group"], [f"--allow={unrelated}"]):
        code, out, err = said(a, b, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--allow={field}" in err
        assert all(x in err for x in (f"{field} = ", str(a), str(b), *values))
    for allow in (field, "all", f"sampling, {field}"):
        code, out, _ = said(a, b, "--markdown", f"--allow={allow}")
        lines = cells(out.partition("\n\n")[0])[1:]
        assert code == 0 and [line[0] for line in lines] == ["a", "b ¹"]
        assert f"\n¹ {field} = {values[1]}, not {values[0]}\n" in out
    # Rows that were measured in different ways have no common mean.
    lines = cells(said(a, b, "--group", "--markdown", "--allow=all")[1])
    assert [line[2] for line in lines[1:3]] == ["1", "1"]


def test_allow_accepts_only_names_of_fields(said, tmp_path):
    run = make(tmp_path / "run", row())
    code, out, err = said(run, "--allow=retrieval.topk")
    assert (code, out) == (2, "") and "--allow=retrieval.topk" in err
    assert "did you mean retrieval.top_k?" in err


def test_rows_of_older_runs_are_marked_and_not_refused(said, tmp_path):
    old = row()
    del old["made_by"]
    a, b = make(tmp_path / "a", row()), make(tmp_path / "b", old, seed=1)
    code, out, _ = said(a, b, "--markdown")
    lines = cells(out.partition("\n\n")[0])[1:]
    assert code == 0 and [line[0] for line in lines] == ["a", "b ¹"]
    assert "\n¹ not recorded: made_by\n" in out


def test_other_differences_are_shown_in_a_table(said, tmp_path):
    few, many = {"rollout.max_searches": 2}, {"rollout.max_searches": 4}
    runs = [
        make(tmp_path / name, made(**more) | {"start": 1}, seed=seed)
        for seed, (name, more) in enumerate(zip("abc", (few, few, many), strict=True))
    ]
    start = {"command": "train", "config": "", "inputs": {}, "count": 1}
    for run, commit in zip(runs, ("1" * 40, "2" * 40, ""), strict=True):
        code = {"commit": commit, "diff": "", "files": {}}
        starts = [start | {"code": code, "program": {"jax": "1.0"}}]
        (run / "run.json").write_text(json.dumps({"rsearch_run": 1, "starts": starts}))
    columns, *lines = cells(said(*runs, "--markdown")[1].split("\n\n")[1])
    assert columns == ["row", "rollout.max_searches", "code"]
    assert [line[:2] for line in lines] == [
        *(["a", "2"], ["b", "2"]),
        ["c", "4"],
    ]
    assert [line[2] for line in lines[:2]] == ["1" * 10, "2" * 10]
    assert "max_searches" not in said(*runs[:2], "--markdown")[1]
    # For grouped seeds the number of values is shown, and only if rows differ in it.
    assert "max_searches" not in said(*runs, "--group", "--markdown")[1]


def test_a_start_measured_in_another_way_is_not_the_em_before(said, tmp_path):
    for top_k, before in ((1, "50.0"), (2, None)):
        start = made(**{"retrieval.top_k": top_k}) | {"stage": "start"}
        run = make(tmp_path / str(top_k), start, row())
        code, out, err = said(run, "--markdown")
        columns, line = cells(out)
        actual = dict(zip(columns, line, strict=True)).get("EM before")
        assert (code, actual) == (0, before)
        assert ("retrieval.top_k = 2, not 1" in err) == (before is None)


def test_the_em_before_has_the_setting_of_its_row(said, tmp_path):
    changed = {"setting": "rollout.max_searches=8"}
    starts = [row("start", em=0.1), row("start", em=0.3, **changed)]
    for name, rows, expected in (
        ("a", [*starts, row(), row(**changed)], ["10.0", "30.0"]),
        ("b", [*starts[::-1], row(), row(**changed)], ["10.0", "30.0"]),
        ("c", [starts[0], row(**changed)], [None]),
    ):
        columns, *lines = cells(said(make(tmp_path / name, *rows), "--markdown")[1])
        actual = [dict(zip(columns, line)).get("EM before") for line in lines]
        assert actual[: len(expected)] == expected


def test_a_judges_verdicts_have_columns_if_there_are_any(said, tmp_path):
    numbers = {"judge": 0.625, "judge_agreement": 0.9, "judge_unparsed": 3}
    judged = row(judged_by=JUDGE, judge_failed=0, **numbers)
    a, b = make(tmp_path / "a", row()), make(tmp_path / "b", judged, seed=1)
    columns, *lines = cells(said(a, b, "--markdown")[1])
    at = columns.index("judge")
    assert columns[at : at + 4] == ["judge", "judge = EM", "unparsed", "failed"]
    shown = [line[at : at + 4] for line in lines]
    assert shown == [["-"] * 4, ["62.5", "90.0", "3", "0"]]
    assert "judge" not in said(a, "--markdown")[1]
    hot = row(judged_by={**JUDGE, "temperature": 0.5}, judge=0.5)
    c = make(tmp_path / "c", hot, seed=2)
    code, _, err = said(b, c)
    assert code == 2 and "judged_by.temperature = 0.5" in err


@pytest.mark.parametrize("flags", [[], ["--group"]])
def test_failed_calls_of_a_judge_are_never_hidden(said, tmp_path, terminal, flags):
    numbers = {"judge": 0.625, "judge_agreement": 0.9, "judge_unparsed": 3}
    for failed in (0, 17):
        judged = row(judged_by=JUDGE, judge_failed=failed, **numbers)
        run = make(tmp_path / f"{failed}", judged)
        terminal(100)
        code, out, _ = said(run, *flags)
        _, _, hidden = out.partition("hidden: ")
        assert code == 0 and "unparsed" in hidden
        assert ("failed" in hidden, "17" in out) == (not failed, bool(failed))


HOSTILE = "\x1b]0;t\x07 \u202etxet\u2066 a\\|b [x](http://x) ![](//y) <img src=x>"
HOSTILE += " `|` **b** &#124; www.z.org \u2028 \x9b2J \ud800 ~~c~~"


@pytest.mark.fault(87, "control characters", "Markdown")
@pytest.mark.parametrize("field", ["stage", "method", "dataset", "kind", "name"])
def test_hostile_text_of_a_run_is_shown_and_has_no_effect(said, tmp_path, field):
    kind = HOSTILE if field == "kind" else "one"
    rows = [row(by_kind={kind: {"em": 0.5}}), row(by_kind={"two": {}}, dataset="e")]
    fields = {"name": HOSTILE} if field == "name" else {}
    if field in rows[0]:
        rows[0][field] = HOSTILE
    run = make(tmp_path / "run", *rows, **fields)
    words = [run, "--stage=all", "--method=all"]
    words += ["--by_kind"] if field == "kind" else []
    # Rows that are not grouped have their directories' names.
    words += ["--group"] if field == "name" else []
    for flags in ([], ["--markdown"], ["--group"]):
        code, out, _ = said(*words, *flags)
        assert code == 0
        categories = {unicodedata.category(c) for c in set(out) - {"\n"}}
        assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    markdown = said(*words, "--markdown")[1]
    assert len(markdown.splitlines()) == 4 and "x1b" in markdown
    # Everything that Markdown would interpret has a backslash before it.
    marked = re.sub(r"\\[^\w\s]", "", "\n".join(markdown.splitlines()[2:]))
    assert not re.search(r"[\\`*<>\[\]&~]|://|www\.", marked)
    bars = [line.count("|") for line in marked.splitlines()]
    assert bars == [markdown.splitlines()[0].count("|")] * 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("em", "x", "row 2: em = 'x': expected a number or null"),
        ("n", True, "row 2: n = True: expected a number"),
        ("f1", float("nan"), "row 2: f1 = nan: expected a number"),
        ("em_95", [1], r"row 2: em_95 = [1]: expected two numbers"),
        ("em_95", [None, 1], "expected two numbers"),
        ("stage", 3, "row 2: stage = 3: expected text"),
        ("dataset", ["d"], "row 2: dataset = ['d']: expected text"),
        ("by_kind", [1], "row 2: by_kind = [1]: expected an object"),
        ("by_kind", {"single": 3}, "row 2: by_kind.single = 3: expected an object"),
        ("by_known", {"true": {"em": "x"}}, "row 2: by_known.true.em = 'x': expected"),
    ],
)
def test_damaged_results_are_refused_and_row_and_field_are_named(
    said, tmp_path, field, value, message
):
    run = make(tmp_path / "run", row(), {**row("sft"), field: value})
    for flags in ([], ["--group"], ["--by_kind"], ["--markdown"]):
        code, out, err = said(run, *flags)
        assert (code, out) == (2, "") and message in err and "results.json" in err


def test_a_path_that_is_not_a_valid_run_is_refused(said, tmp_path):
    (tmp_path / "empty").mkdir()
    broken = make(tmp_path / "broken")
    (broken / "results.json").write_text("[{")
    foreign = make(tmp_path / "foreign", row())
    (foreign / "config.json").write_text("{}")
    listed = make(tmp_path / "listed", row())
    (listed / "config.json").write_text('{"rsearch_workdir": 1, "config": []}')
    nameless = make(tmp_path / "nameless", row())
    text = (nameless / "config.json").read_text()
    (nameless / "config.json").write_text(text.replace('"name"', '"nam"'))
    make(tmp_path / "numbered", row(), name=1)
    three = make(tmp_path / "three", row()) / "config.json"
    three.write_text(re.sub(r'"stages": \[.*?\]', '"stages": 3', three.read_text()))
    for name, results in {"object": {"a": 1}, "short": [{"stage": "rl"}]}.items():
        (make(tmp_path / name) / "results.json").write_text(json.dumps(results))
    (tmp_path / "text").write_text("")
    for path, message in {
        "nowhere": "not there",
        "text": "a file",
        "listed": "not the config.json of a workdir",
        "nameless": "has no field 'name'",
        "three": "stages = 3: expected names",
        "numbered": "name = 1: expected text",
        "object": "not the results of a run",
        "short": "not the results of a run",
        "empty": "not a run: neither it nor a directory in it has config.json",
        "broken": "results.json is not JSON",
        "foreign": "config.json: not the config.json of a workdir",
    }.items():
        code, out, err = said(tmp_path / path)
        assert (code, out) == (2, "") and message in err and path in err
    fresh = make(tmp_path / "fresh")
    assert "has no results yet" in said(fresh)[2]
    assert "no run's directory" in said()[2]
    assert "did you mean --group?" in said(fresh, "--grup")[2]


def runs_of_two_recipes(folder):
    """Make two runs with different directories and fields, evaluated on 4 questions."""
    start = {"command": "train", "config": "", "inputs": {}, "count": 1}
    code = {"commit": "", "diff": "", "files": {}}
    record = {"rsearch_run": 1, "starts": [start | {"code": code, "program": {}}]}
    first = evaluated(folder / "a", rights="1100", judge=0.5, judged_by=JUDGE)
    second = evaluated(folder / "b", rights="1110", judge=0.75, judged_by=JUDGE)
    for run, lr in ((first, 0.001), (second, 0.0003)):
        (run / "run.json").write_text(json.dumps(record))
        body = json.loads((run / "config.json").read_text())
        body["config"] |= {"rl": {"lr": lr}, "seed": 0}
        (run / "config.json").write_text(json.dumps(body))
    return first, second


AT_80 = """\
2 runs, scores in percent: protocol, d
┏━━━━━┳━━━━━━━┳━━━━━━┳━━━┳━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━┳━━━━━━━┳━━━━━━━━━━┓
┃ run ┃ stage ┃ seed ┃ n ┃   EM ┃ 95 % interval ┃   F1 ┃ judge ┃ searches ┃
┡━━━━━╇━━━━━━━╇━━━━━━╇━━━╇━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━╇━━━━━━━╇━━━━━━━━━━┩
│ a   │ rl    │    0 │ 4 │ 50.0 │   43.2 - 56.8 │ 62.5 │  50.0 │     1.50 │
│ b   │ rl    │    0 │ 4 │ 75.0 │   43.2 - 56.8 │ 62.5 │  75.0 │     1.50 │
└─────┴───────┴──────┴───┴──────┴───────────────┴──────┴───────┴──────────┘
"""


@pytest.mark.parametrize("width", [80, 140, 20])
def test_a_table_fits_the_terminal_and_no_cell_is_cut(said, tmp_path, width, terminal):
    runs = runs_of_two_recipes(tmp_path)
    wide = said(*runs, "--wide", "--diff")[1]
    terminal(width)
    code, out, _ = said(*runs, "--diff")
    out = re.sub(r"\x1b\[\d*m", "", out)  # headings are bold
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    assert ("…" in out, "hidden: " in out) == (False, True)
    if width == 80:
        assert "hidden" not in wide and out.startswith(AT_80)
    if width >= 80:  # every cell is on one line of the wide table
        cells = [c.strip() for c in re.findall(r"[^│┃\n]*(?=[│┃])", out)]
        assert all(cell in wide for cell in cells) and "rl.lr" in cells
    else:
        assert re.search(r"^EM +50.0$", re.sub(" +\n", "\n", out), re.MULTILINE)
    out = said(*runs, "--wide", "--diff")[1]
    assert re.sub(r"\x1b\[\d*m", "", out) == wide


def test_json_csv_and_latex_have_what_the_table_has(said, tmp_path):
    runs = runs_of_two_recipes(tmp_path)
    document = json.loads(said(*runs, "--json", "--diff")[1])
    first, second = document["rows"]
    assert (
        first["directory"] == str(runs[0])
        and second["recipe"] == "r_search rl.lr=0.0003"
    )
    assert (first["em"], first["em_low"], second["em"]) == (0.5, 0.4321, 0.75)
    assert document["config"] == {"rl.lr": {"a": 0.001, "b": 0.0003}}
    (pair,) = document["differences"]
    assert pair["differences"]["em"][0] == 0.25 and pair["n"] == 4
    lines = list(csv.DictReader(io.StringIO(said(*runs, "--csv")[1])))
    assert [line["em"] for line in lines] == ["0.5", "0.75"]
    assert lines[0].keys() == first.keys()
    (mean, _) = json.loads(said(*runs, "--json", "--group")[1])["rows"]
    assert (mean["runs"], mean["em"], mean["em_sd"]) == (1, 0.5, None)
    latex = said(*runs, "--latex", "--diff")[1]
    assert latex.count(r"\begin{tabular}") == 3 and "when right" in latex
    assert r"43.2 - 56.8 & 62.5" in latex and "rl.lr" in latex


def test_a_directory_may_have_the_name_of_a_format(said, tmp_path, monkeypatch):
    make(tmp_path / "csv", row())
    monkeypatch.chdir(tmp_path)
    code, out, _ = said("csv")
    assert code == 0 and "│ csv │ rl" in out


def test_formats_can_be_written_to_files_while_the_table_is_printed(said, tmp_path):
    run = make(tmp_path / "run", row())
    files = {name: tmp_path / f"t.{name}" for name in ("json", "csv", "markdown")}
    code, out, _ = said(run, *(f"--{n}={path}" for n, path in files.items()))
    assert code == 0 and "│ run │ rl" in out
    for name, path in files.items():
        assert path.read_text() == said(run, f"--{name}")[1]
    for words in (["--json", "--csv"], ["--csv=missing/t"]):
        code, out, err = said(run, *words)
        assert (code, out, err.count("\n")) == (2, "", 1) and words[0] in err


def test_directories_with_the_same_name_are_shown_with_their_parents(said, tmp_path):
    for name in ("x", "y"):
        make(tmp_path / name / "run", row(), seed=ord(name))
    lines = cells(
        said(tmp_path / "x", tmp_path / "y", "--markdown")[1].split("\n\n")[0]
    )
    assert [line[0] for line in lines[1:]] == ["x/run", "y/run"]

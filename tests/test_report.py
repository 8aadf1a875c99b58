"""The report of runs: what it shows, and that untrusted text stays text on it."""

import errno
import gzip
import html.parser
import io
import json
import os
import re

import pytest
from matplotlib.image import imread

from rsearch import compare, report
from rsearch.config.recipes import run_command
from rsearch.evaluation import curves
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from tests.test_compare import evaluated, make, row

HOSTILE = (
    "</p><script>alert(1)</script><img src=x onerror=y> {{ 7 * 7 }} \x1b[2J \u202e"
)


class Page(html.parser.HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.names, self.text = set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def evaluated_run(folder, lr=0.1):
    """A run with results, metrics of three steps, a transcript and two rollouts."""
    more = {"by_kind": {}, "em": 0.0, "n": 1}
    name = {"name": f"recipe{HOSTILE}", "rl": {"lr": lr, "questions_per_step": 2}}
    run = make(folder, row(**more), stages=["rl"], rollout={"group_size": 3}, **name)
    segments = [{"source": "prompt", "text": "Who?"}]
    segments += [{"source": "search", "text": f"passage {HOSTILE}"}]
    about = {"stage": "rl", "method": "protocol", "dataset": "d", "id": HOSTILE}
    about |= {"question": HOSTILE, "golden_answers": ["x"], "prediction": HOSTILE}
    line = about | {"outcome": "answered", "queries": ["q"], "segments": segments}
    (run / "transcripts.jsonl").write_text(json.dumps(line) + "\n")
    (run / "rl" / "rollouts").mkdir(parents=True)
    rows = [
        {"step": i, "reward": i / 4, HOSTILE: i, "tool_error": 0.0}
        | {"policy_tokens": 10.0, "rollout_seconds": 4.0 + i}
        for i in range(3)
    ]
    text = "".join(f"{json.dumps(r)}\n" for r in rows)
    (run / "rl" / "metrics.jsonl").write_text(text)
    policy = {"source": "policy", "text": f"learnt {HOSTILE}", "ids": [5, 6]}
    policy["sampler_log_probs"] = [0.0, -1.0]
    rollouts = [
        {"step": 0, "question_id": "q", "question": "Where?", "answers": ["x"]}
        | {"group": 0, "rollout": i, "outcome": "answered", "answer": "y"}
        | {"reward": i, "reward_parts": {"answer_em": i}, "advantage": advantage}
        | {"queries": [], "passages": [[{"id": HOSTILE, "title": "t", "score": 0.5}]]}
        | {"segments": [*segments, policy]}
        for i, advantage in enumerate((-1.25, [0.5, "NaN"]))
    ]
    with gzip.open(run / "rl" / "rollouts" / "step_000000.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(r)}\n" for r in rollouts)
    write_starts(run, [("train", "c0ffee")], inputs={"data.train": HOSTILE})
    return run


def write_starts(run, starts, launches=(), inputs=None):
    """Write run.json with a (command, commit) for each start."""
    rows = [
        {"command": command, "config": "f", "program": {}, "inputs": inputs or {}}
        | {"code": {"commit": commit, "diff": "", "files": {}}, "count": 1}
        for command, commit in starts
    ]
    record = {"rsearch_run": 1, "starts": rows, "launches": list(launches)}
    (run / "run.json").write_text(json.dumps(record))


def test_a_report_shows_runs_and_runs_no_code_in_their_text(tmp_path, capsys):
    runs = [evaluated_run(tmp_path / "a"), evaluated_run(tmp_path / "b", lr=0.2)]
    out = tmp_path / "r.html"
    assert run_command(report.main, [*map(str, runs), f"--out={out}"]) == 0
    text = out.read_text()
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "link", "object", "p></p"}
    assert (
        not {name for name in page.names if name.startswith("on")}
        | {"src"} & page.names
    )
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert not set(text) & set("\x1b\u202e") and "49" not in page.text.split()
    # One string each from results, differing fields, transcripts, rollouts and starts.
    for shown in (
        "alert(1)",
        "{{ 7 * 7 }}",
        "43.2 – 56.8",
        "rl.lr",
        "Where?",
        "c0ffee",
    ):
        assert shown in page.text
    # The last step has six rollouts of ten tokens each, in 6 seconds.
    assert "policy_tokens_per_second" in page.text and " 10" in page.text
    assert text.count('<i class="down"') == 4 and "advantage -1.25" in text
    assert text.count("<svg") == 4 and "tool_error 0" in page.text
    assert run_command(report.main, [str(tmp_path), f"--out={tmp_path}/s.html"]) == 0
    assert (tmp_path / "s.html").read_text() == text  # the same from the runs' folder


def cells_of(page, section):
    """Return the texts of the cells of each row of a section's first tables."""
    text = re.search(f'<section id="{section}">(.*?)</section>', page, re.DOTALL)[1]
    rows = re.findall("<tr.*?</tr>", text, re.DOTALL)
    return [
        [re.sub("<[^>]*>", "", cell).strip() for cell in re.split("</t[dh]>", row)[:-1]]
        for row in rows
    ]


def test_rows_that_differ_in_dataset_or_setting_can_be_told_apart(tmp_path):
    runs, setting = [], "retrieval.top_k=5"
    for name in "ab":
        run = evaluated(tmp_path / name, rights="10")
        rows = [
            row(dataset=d, questions=d, setting=text, n=2, em=0.5, by_kind={})
            for d, text in (("d", ""), ("d", setting), ("e", ""))
        ]
        lines = (run / "transcripts.jsonl").read_text().splitlines()
        fields = {"id": "q", "segments": [{"source": "policy", "text": "x"}]}
        lines = [
            json.loads(line)
            | fields
            | {name: r[name] for name in ("dataset", "setting")}
            for r in rows
            for line in lines
        ]
        (run / "results.json").write_text(json.dumps(rows))
        write_jsonl(run / "transcripts.jsonl", lines)
        runs.append(report.read_run(run))
    page = report.report_page(runs, num_transcripts=12)
    head, *rows = cells_of(page, "results")
    assert head[:5] == ["run", "stage", "method", "dataset", "setting"]
    assert [line[3:5] for line in rows[:3]] == [["d", ""], ["d", setting], ["e", ""]]
    assert [line[:2] for line in rows[7:]] == [
        [f"a d, {setting}", "a d"],
        ["b d", "a d"],
        [f"b d, {setting}", "a d"],
        ["b e", "a e"],
    ]
    assert f"q, d, {setting}" in page and "q, e" in page


def test_large_numbers_are_not_in_powers_of_ten_and_no_p_value_is_0(tmp_path):
    # 2WikiMultihopQA has as many questions.
    run = make(tmp_path / "big", row(n=12576, seconds=45678.9, prompt_tokens=23456.7))
    better, worse = "1" * 1100, "0" * 1100
    folders = [evaluated(tmp_path / n, rights=x) for n, x in zip("ab", (better, worse))]
    runs = [report.read_run(path) for path in (run, *folders)]
    text = Page(report.report_page(runs, num_transcripts=0)).text
    assert "12576" in text and "45,679" in text and "23,457" in text
    assert "e+0" not in text and "< 0.0001" in text


def test_runs_that_share_a_color_have_swatches_like_their_lines(tmp_path):
    names = [f"{i:02}" for i in range(30)]
    runs = [report.read_run(make(tmp_path / name, row())) for name in names]
    page = report.report_page(runs, num_transcripts=0)
    swatches = re.findall(r'<span class="(swatch \w+)" style="(.*?)"></span>', page)
    assert len({*swatches}) == 28  # seven colors in each style of curves.STYLES
    for style in curves.STYLES[1:]:
        assert f".{style} {{" in page


def test_rows_of_earlier_versions_may_lack_numbers(tmp_path):
    for number in ("n", "em", "em_95", "f1", "searches"):
        old = row()
        del old[number]
        runs = [report.read_run(make(tmp_path / number, old))]
        assert "–" in Page(report.report_page(runs, num_transcripts=0)).text


def test_a_run_that_only_other_methods_evaluated_counts_as_evaluated(tmp_path):
    run = make(tmp_path / "a", row(method="rag", by_kind={}))
    page = report.report_page([report.read_run(run)], num_transcripts=0)
    assert "protocol not evaluated" in page and "not evaluated yet" not in page


def test_a_reward_that_no_float_can_hold_is_shown_as_it_is(tmp_path):
    run = evaluated_run(tmp_path / "a")
    (run / "rl" / "metrics.jsonl").unlink()  # its curves are not needed
    path = run / "rl" / "rollouts" / "step_000000.jsonl.gz"
    (first, second), huge = read_jsonl(path), 10**400
    write_jsonl(path, [first, {**second, "reward": huge}])
    assert run_command(report.main, [str(run), f"--out={tmp_path}/r.html"]) == 0
    page = (tmp_path / "r.html").read_text()
    assert f"<dd>{huge}; terms" in page and '<span class="reward">0.00</span>' in page


def test_searches_are_counted_not_their_parallel_queries(tmp_path):
    run = evaluated_run(tmp_path / "a")
    path = run / "transcripts.jsonl"
    line = json.loads(path.read_text())
    line |= {"queries": ["q", "r", "s"], "passages": [[], []]}
    write_jsonl(path, [line])
    page = report.report_page([report.read_run(run)], num_transcripts=4)
    assert "answered, 2 searches" in page


def test_each_launch_has_a_line_with_its_command_and_its_end(tmp_path):
    run, out = evaluated_run(tmp_path / "a"), tmp_path / "r.html"
    launch = {"start": 1, "directory": "/d", "host": f"h{HOSTILE}", "killed": False}
    launch |= {"argv": ["python", "-m", "x y", HOSTILE], "began": "Monday"}
    ends = [("Tuesday", 75), (None, None)]
    launches = [launch | {"ended": t, "exit_code": n} for t, n in ends]
    launches[1] |= {"killed": True}
    write_starts(run, [("train", "c0ffee")], launches)
    assert run_command(report.main, [str(run), f"--out={out}"]) == 0
    text = out.read_text()
    lines = [line for line in text.splitlines() if line.startswith("<tr><td>1</td>")]
    assert ["Tuesday</td><td>75" in line for line in lines] == [True, False]
    assert ["killed</td><td>-" in line for line in lines] == [False, True]
    assert all("Monday" in line and "&#39;x y&#39;" in line for line in lines)
    assert not Page(text).tags & {"script", "img"}


def test_the_first_start_that_trained_is_shown_however_many_evaluations_followed(
    tmp_path,
):
    run, out = evaluated_run(tmp_path / "a"), tmp_path / "r.html"
    commands = ["evaluate", "train", "train", *["evaluate"] * 30]
    starts = [(command, f"commit-{i}") for i, command in enumerate(commands)]
    launch = {"directory": "/d", "host": "h", "killed": False, "began": "Monday"}
    launch |= {"ended": "Tuesday", "exit_code": 0}

    def shown(count):
        launches = [
            launch | {"start": i + 1, "argv": [f"launch-{i}"]} for i in range(count)
        ]
        write_starts(run, starts[:count], launches)
        assert run_command(report.main, [str(run), f"--out={out}"]) == 0
        text = out.read_text()
        names = "commit", "launch"
        return [
            [i for i in range(count) if re.search(rf"\b{name}-{i}\b", text)]
            for name in names
        ]

    assert shown(4) == [[0, 1, 2, 3]] * 2
    assert shown(6) == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert shown(33) == [[1, *range(28, 33)], [1, *range(13, 33)]]


def test_curves_are_drawn_into_a_file(tmp_path, capsys):
    run = evaluated_run(tmp_path / "a")
    (run / "run.json").unlink()
    picture = tmp_path / "c.png"
    assert run_command(compare.main, [str(run), f"--plot={picture}"]) == 0
    height, width, _ = imread(picture).shape
    assert width > 1000 and height > 200


@pytest.mark.parametrize(
    ("names", "metric"),
    [
        ([f"search_r1_grpo_qwen2.5_3b_instruct_seed{i}" for i in range(9)], ""),
        ([f"s{i}" for i in range(10)], "reward"),
        (["a_very_long_name" * 5], "reward"),
        ([" "], "reward"),
    ],
)
def test_no_run_is_cut_off_the_legend_of_a_picture(tmp_path, names, metric):
    rows = [{"step": i} | {f"m{j}": i for j in range(4)} for i in range(2)]
    lines = "".join(f"{json.dumps(r | {'reward': r['step']})}\n" for r in rows)
    for name in names:
        (tmp_path / name / "rl").mkdir(parents=True)
        (tmp_path / name / "rl" / "metrics.jsonl").write_text(lines)
    folders = {name: tmp_path / name for name in names}
    contents = curves.plot("x.png", folders, ["rl"], [metric] if metric else [])
    picture = imread(io.BytesIO(contents))[:, :, :3]
    # Text and the legend's frame leave the picture's edges white.
    assert picture[:, [0, 1, -2, -1]].min() == 1 and picture[[0, 1]].min() == 1


def test_a_picture_that_the_disk_refuses_keeps_the_old_one(
    tmp_path, monkeypatch, capsys
):
    run = evaluated_run(tmp_path / "a")
    (run / "run.json").unlink()
    picture = tmp_path / "c.png"
    picture.write_bytes(b"old")

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    assert run_command(compare.main, [str(run), f"--plot={picture}"]) == 2
    assert f"No space left on device: {picture}" in capsys.readouterr().err
    assert picture.read_bytes() == b"old"


def test_chosen_curves_of_a_run_without_results_are_drawn(tmp_path, capsys):
    run = make(tmp_path / "a", stages=["rl"])
    (run / "rl").mkdir()
    rows = [{"step": i, "reward": i % 7 / 7, "searches": 1.0} for i in range(40)]
    text = "".join(f"{json.dumps(r)}\n" for r in rows)
    (run / "rl" / "metrics.jsonl").write_text(text)
    picture = tmp_path / "c.png"
    flags = [str(run), f"--plot={picture}"]
    assert run_command(compare.main, [*flags, "--curves=searches,reward"]) == 0
    assert imread(picture).shape[1] < 900  # two plots, not a row of four
    assert "no results yet; only its curves are drawn" in capsys.readouterr().err
    other = evaluated_run(tmp_path / "b")
    (other / "run.json").unlink()
    assert run_command(compare.main, [*flags, str(other)]) == 0  # with a row for b
    out, err = capsys.readouterr()
    assert "a: has no results yet" in err and "rl" in out
    assert run_command(compare.main, [*flags, "--curves=rewards"]) == 2
    assert "--curves=rewards: the runs have no such metric" in capsys.readouterr().err
    assert run_command(compare.main, [str(run), "--curves=reward"]) == 2
    assert "needs --plot=FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("rl/rollouts/step_000000.jsonl.gz", '{"question": 1}\n', ":1: step = None"),
        ("run.json", "3", "run.json: not the record of a run"),
        ("run.json", '{"starts": [], "launches": [{}]}', "run.json: not the record"),
        ("run.json", '{"starts": [], "launches": 3}', "run.json: not the record"),
        ("transcripts.jsonl", "{}\n", "stage = None: expected text"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, capsys, file, text, named):
    run = evaluated_run(tmp_path / "a")
    path = run / file
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    assert run_command(report.main, [str(run), f"--out={tmp_path}/r.html"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and not (tmp_path / "r.html").exists()

"""Tables of the papers: printed as in the texts, with our results next to them."""

import csv
import json
import re
import statistics

import pytest

from rsearch import tables
from rsearch.config.checks import validate
from rsearch.config.recipes import (
    apply_overrides,
    defaults,
    from_json,
    load,
    run_command,
)
from rsearch.config.stage_plan import check_plan
from rsearch.data.sets import SETS
from rsearch.evaluation import comparability
from rsearch.evaluation.figures import Bars, Panel, draw
from rsearch.evaluation.table_cells import REPLACED_PARTS, Measured, panels_of
from rsearch.evaluation.tables import find_table, read_row_curves, read_tables
from rsearch.methods.names import READER_METHODS
from rsearch.methods.table import METHODS, make_program
from tests.small_run import ROOT
from tests.test_compare import make, row

PAPERS = ROOT.parent / "shared" / "papers"
TABLES = read_tables()
ALL_ROWS = [(name, r) for name, table in TABLES.items() for r in table.rows]
QWEN = "Qwen/Qwen2.5-7B-Instruct"
METRICS = ("em", "f1", "cover_em", "judge", "searches", "seconds")
METRICS += ("unsearched", "judge_right_steps")


# Symbols that a text, since it comes from a web page, has in three notations.
SYMBOLS = {"R_group": "Rgroupsubscript", "L_M": "Msubscript"}


def flat(text):
    """Return a paper's text without markup and with single spaces between words."""
    text = re.sub(r"</?(table|tr|td|u)\b[^<>]*>", " ", text)
    for symbol, begin in SYMBOLS.items():
        text = re.sub(rf"{begin}.*?end_POSTSUBSCRIPT", symbol, text)
    text = re.sub(r"(?<=\d) / (?=\d)", " ", text)  # two numbers of a cell
    return " ".join(text.split())


def test_the_main_tables_are_complete():
    numbers = {name: len(table.rows) for name, table in TABLES.items()}
    main = {"rag_r1:3": 8, "r1_searcher:2": 30, "r1_searcher_pp:1": 12}
    main |= {"r_search:2": 18, "rearag:1": 9}
    assert numbers.items() >= main.items() and sum(main.values()) == 77


@pytest.mark.skipif(not PAPERS.is_dir(), reason="no texts of the papers")
@pytest.mark.parametrize("name", TABLES)
def test_every_number_follows_its_label_in_the_paper(name):
    text = flat((PAPERS / f"{name.partition(':')[0]}.txt").read_text())
    before = ("", "")
    for printed in TABLES[name].rows:
        numbers = " ".join(n for n in printed.numbers if n != "-")
        if not numbers:
            continue
        # A label may span the rows of two models.
        spans = [f"{printed.label} {numbers}", f"{printed.label} {printed.printed}"]
        if before[0] == printed.label:
            spans.append(f"{printed.label} {before[1]} {numbers}")
        # Figures have the numbers in their axes' names.
        each = [f"{printed.label}={n}" in text for n in numbers.split()]
        assert any(span in text for span in spans) or all(each), printed
        before = printed.label, numbers


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_consistent(name):
    table = TABLES[name]
    columns = [column.name for column in table.columns]
    keys = [printed.key for printed in table.rows]
    assert len({*columns}) == len(columns) and len({*keys}) == len(keys)
    for column in table.columns:
        assert bool(column.metric) == (column.set in SETS), column
        assert not (column.metric and column.mean_of), column
        assert {*column.mean_of} <= {*columns}, column
        assert column.metric in ("", *METRICS), column
    fields = {*comparability.FIELDS["search"], "sampling.temperature"}
    assert {*table.settings} <= fields
    assert len(table.title) <= 50
    for slip in table.slips:
        assert slip.row in ("", *keys) and {*slip.columns} <= {*columns}, slip
    for printed in table.rows:
        assert len(printed.numbers) == len(columns), printed
        assert printed.is_runnable == bool(printed.method or printed.recipe)
        assert bool(printed.stage) == bool(printed.recipe)
        assert all(n == "-" or float(n) >= 0 for n in printed.numbers)


@pytest.mark.parametrize("name", TABLES)
def test_an_average_is_the_mean_of_its_columns_unless_listed_as_a_slip(name):
    table = TABLES[name]
    names = [column.name for column in table.columns]
    slips = {(slip.row, column) for slip in table.slips for column in slip.columns}
    for printed in table.rows:
        values = dict(zip(names, printed.numbers, strict=True))
        for column in table.columns:
            text = values[column.name]
            is_slip = slips & {(printed.key, column.name), ("", column.name)}
            texts = [values[n] for n in column.mean_of]
            if "-" in (text, *texts) or not texts or is_slip:
                continue
            mean = statistics.fmean(map(float, texts))
            unit = 10 ** -len(text.partition(".")[2])
            assert abs(mean - float(text)) <= 1.01 * unit, (printed, column)


def test_the_means_listed_as_slips_are_wrong():
    table = TABLES["r1_searcher_pp:1"]
    names = [column.name for column in table.columns]
    (column,) = [column for column in table.columns if column.name == "Avg F1"]
    means = {}
    for printed in table.rows:
        values = dict(zip(names, map(float, printed.numbers), strict=True))
        mean = statistics.fmean(values[name] for name in column.mean_of)
        if abs(mean - values["Avg F1"]) > 0.1:
            means[printed.key] = mean
    assert {printed.key for printed in table.rows} - {*means} == {"sure"}
    assert means["ours"] == pytest.approx(53.7)
    assert means["search_o1"] == pytest.approx(41.9, abs=0.05)


# Questions of each set, where the paper does not take a whole one.
DRAWN = {"r1_searcher": 500, "r1_searcher_pp": 500, "r_search": 500, "rearag": 100}
WHOLE_SETS = ("bamboogle", "frames")


@pytest.mark.parametrize("name", TABLES)
def test_a_share_is_possible_unless_listed_as_a_slip(name):
    table, paper = TABLES[name], name.partition(":")[0]
    slips = {
        (slip.row, column)
        for slip in table.slips
        for column in slip.columns
        if "cannot be" in slip.text
    }
    impossible = set()
    for printed in table.rows:
        for column, text in zip(table.columns, printed.numbers, strict=True):
            if column.set in WHOLE_SETS:
                size = SETS[column.set].size
            elif (paper, column.set) == ("rearag", "iirc"):
                size = 200
            else:
                size = DRAWN.get(paper)
            is_share = column.metric in ("em", "cover_em", "judge") and text != "-"
            if not is_share or size is None:
                continue
            # ReaRAG's judge also gives half points.
            steps = size * (2 if (paper, column.metric) == ("rearag", "judge") else 1)
            unit = 10 ** -len(text.partition(".")[2])
            whole = 100 if table.is_percent else 1
            nearest = round(float(text) / whole * steps) / steps * whole
            if abs(nearest - float(text)) > 0.501 * unit:
                impossible.add((printed.key, column.name))
    assert impossible == slips


def test_every_method_and_every_recipe_of_a_row_is_valid():
    for method in {r.method for _, r in ALL_ROWS if r.method} - {*READER_METHODS}:
        make_program(method)
    configs = {
        recipe: load(recipe) for recipe in {r.recipe for _, r in ALL_ROWS} - {""}
    }
    configs[""] = from_json(defaults())
    validated = set()
    for _, printed in ALL_ROWS:
        config = configs[printed.recipe]
        settings = printed.settings + printed.asking
        if settings:
            config = apply_overrides(config, settings)
        if printed.recipe:
            is_read = printed.method in READER_METHODS  # by another model
            assert is_read or config.model.source == printed.model, printed
            assert printed.stage in config.stages, printed
        if printed.recipe and settings not in ((), *validated):
            validate(config)
            check_plan(config)
            validated.add(settings)


@pytest.fixture
def said(capsys):
    """A function that runs the command and returns (exit code, stdout, stderr)."""

    def run(*argv):
        code = run_command(tables.main, [*map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def result_row(stage, method="protocol", dataset="set:nq", model=QWEN, **more):
    made_by = {"model.source": model, "retrieval.top_k": 3}
    return row(stage, method, dataset, made_by=made_by, f1_95=None, **more)


def cells(said, name, runs, *flags):
    """Return our results in the CSV as {(row, column): (ours, low, high, n)}."""
    code, _, err = said(name, f"--runs={runs}", "--out=out.csv", *flags)
    assert code == 0, err
    with open("out.csv") as file:
        lines = [*csv.DictReader(file)]
    names = ("ours", "low", "high", "n")
    values = {(x["row"], x["column"]): tuple(x[n] for n in names) for x in lines}
    return {about: cell for about, cell in values.items() if any(cell)}


def test_the_list_counts_the_rows_that_can_be_reproduced(said):
    code, out, _ = said("--list")
    assert code == 0 and "30 / 30" in out and all(name in out for name in TABLES)


def test_a_table_is_printed_with_its_slips(said):
    code, out, _ = said("r1_searcher_pp:1")
    assert code == 0 and "64.2" in out and "25.0 %" in out


def test_results_of_a_run_fill_the_rows_of_its_recipe_and_methods(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [
        result_row("rl", em=0.4),
        result_row("rl", dataset="set:popqa[:500 by seed 3]", em=0.3, n=500),
        result_row("sft", em=0.1),
        result_row("rl", "ircot", em=0.2),  # of the trained policy
        result_row("start", "ircot:rounds=4", em=0.25),
        result_row("start", "ircot", "world:dev"),
        result_row("start", "rag", model="another/model"),
    ]
    make(tmp_path / "run", *rows, name="rag_r1", stages=["sft", "rl"])
    interval = ("0.4321", "0.5678")
    assert cells(said, "rag_r1:3", "run") == {
        ("mq", "NQ"): ("0.4", *interval, "200"),
        ("mq", "PopQA"): ("0.3", *interval, "500"),
        ("ircot", "NQ"): ("0.25", *interval, "200"),
    }
    code, out, _ = said("rag_r1:3", "--runs=run")
    assert code == 0 and "0.432-0.568" in out and "0.400" in out


def test_runs_of_one_recipe_fill_the_rows_that_have_their_settings(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    every = ["curate_sft", "sft", "curate_rl", "rl"]
    runs = {"a": (0.1, every, "rag_r1"), "b": (0.2, every, "rag_r1_no_filter")}
    runs["c"] = (0.3, [stage for stage in every if stage != "sft"], "rag_r1")
    for name, (em, stages, recipe) in runs.items():
        measured = result_row("rl", dataset="set:hotpotqa", em=em)
        more = {"name": recipe, "stages": stages}
        make(tmp_path / name, measured, {**measured, "stage": "sft", "em": 0.4}, **more)
    ours = cells(said, "rag_r1:4", "a,b,c")
    assert {row: cell[0] for (row, _), cell in ours.items()} == {
        "mq": "0.1",
        "mq_no_rl": "0.4",
        "mq_no_filter": "0.2",
        "mq_no_sft": "0.3",
    }


def test_a_row_of_ours_says_what_replaces_a_trained_part(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = "gpt-4o-mini"
    rows = [
        result_row("-", method, dataset="set:bamboogle", model=model, cover_em=0.4)
        for method in ("skr", "ircot")
    ]
    make(tmp_path / "run", *rows)
    _, out, _ = said("r1_searcher:2", "--runs=run")
    (line,) = [line for line in out.splitlines() if line.startswith("ours: ")]
    assert line.startswith("ours: skr_gpt: the search's encoder replaces SimCSE")
    assert "replaces" not in said("r1_searcher:2")[1]
    for method in REPLACED_PARTS:
        assert method in METHODS


def test_local_and_online_search_of_a_run_fill_two_rows(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [result_row("rl_answer", dataset="bamboogle", model="Qwen/Qwen2.5-7B")]
    setting = "retrieval.index=, retrieval.api=serper, retrieval.fetch_pages=True"
    made_by = rows[0]["made_by"] | {"retrieval.url": "https://search"}
    online = {"setting": setting, "cover_em": 0.5, "made_by": made_by}
    stages = ["rl_retrieve", "rl_answer"]
    make(tmp_path / "run", *rows, rows[0] | online, name="r1_searcher", stages=stages)
    ours = cells(said, "r1_searcher:fig6", "run", "--allow=retrieval")
    assert {row: cell[0] for (row, _), cell in ours.items()} == {
        "local": "75.0",
        "online": "50.0",
    }


def test_results_of_a_reader_fill_the_row_of_its_model(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reads = result_row("rl", "evidence", dataset="ircot_musique", em=0.25)
    reader = reads["made_by"] | {"models.reader.name": "glm-4-plus"}
    rows = [result_row("rl", dataset="ircot_musique"), {**reads, "made_by": reader}]
    make(tmp_path / "run", *rows)
    ours = cells(said, "r_search:fig2", "run")
    assert ours["evidence_glm", "MuSiQue EM"][0] == "25.0"
    assert {row for row, _ in ours} == {"evidence_glm"}
    assert "evidence of configs/r_search.py" in said("r_search:fig2")[1]


def test_seconds_come_from_questions_answered_one_at_a_time(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    alone = {"setting": "rollout.max_concurrent=1", "seconds": 1300.0, "n": 200}
    rows = [result_row("rl", dataset="hotpotqa", seconds=9.0)]
    rows += [result_row("rl", dataset="hotpotqa", **alone)]
    config = {"name": "rag_r1", "rollout.max_concurrent": 64}
    make(tmp_path / "run", *rows, **config)
    ours = cells(said, "rag_r1:5", "run")
    assert ours["mq", "HotpotQA Time"] == ("6.5", "", "", "200")
    assert ours["mq", "HotpotQA RC"][0] == "1.5"


def test_a_run_named_for_a_row_fills_only_that_row_whatever_its_recipe(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make(
        tmp_path / "a",
        result_row("rl", em=0.4),
        result_row("start", "rag"),
        name="mine",
    )
    make(tmp_path / "b", result_row("their/model", em=0.5, model="x"), name="mine")
    assert cells(said, "rag_r1:3", "a") == {
        ("rag", "NQ"): ("0.5", "0.4321", "0.5678", "200")
    }
    make(tmp_path / "c", result_row("rl", em=0.6), name="rag_r1")
    named = cells(said, "rag_r1:3", "c,mq=a,sq=b")
    assert {about: cell[0] for about, cell in named.items()} == {
        ("mq", "NQ"): "0.4",
        ("sq", "NQ"): "0.5",
    }


def test_a_run_that_fills_no_row_is_reported(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "tiny", result_row("rl", dataset="world:dev"), name="rag_r1")
    make(tmp_path / "run", result_row("rl"), name="rag_r1")
    code, _, err = said("rag_r1:3", "--runs=tiny")
    assert code == 2 and "tiny" in err
    code, _, err = said("rag_r1:3", "--runs=tiny,run")
    assert code == 0 and "tiny:" in err and "/run:" not in err


def test_an_average_of_ours_needs_all_of_its_columns(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = find_table("r_search:2")
    sets = list(dict.fromkeys(c.set for c in table.columns if c.set))
    rows = [result_row("rl", dataset=f"set:{name}", em=0.5, f1=0.75) for name in sets]
    make(tmp_path / "run", *rows[:-1])
    ours = cells(said, "r_search:2", "run")
    assert ours["ours_7b", "Avg. multi-hop"] == ("62.5", "", "", "")
    assert ("ours_7b", "Overall Avg.") not in ours
    assert ours["ours_7b", "HotpotQA F1"] == ("75.0", "", "", "200")


def test_an_average_over_questions_weights_datasets_by_their_size(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    counts = {"hotpotqa": 500, "2wikimultihopqa": 500, "bamboogle": 125, "musique": 500}
    rows = [
        result_row("rl", dataset=f"set:{name}", n=n, searches=1.0 if n == 500 else 14.0)
        for name, n in counts.items()
    ]
    make(tmp_path / "run", *rows, name="r1_searcher_pp")
    ours = cells(said, "r1_searcher_pp:4", "run")
    assert ours["ours", "Overall RC"] == ("2.0", "", "", "")
    assert ours["ours", "Bamboogle RC"] == ("14.0", "", "", "125")
    assert ("ours", "Correct") not in ours
    out = said("r1_searcher_pp:4", "--runs=run")[1]
    assert "14.00" in out and "2.00" in out


def with_metrics(folder, **curves):
    """Write metrics of ten steps: {field: first value}, which grows by 1 a step."""
    folder.mkdir()
    lines = [
        {"step": step} | {field: first + step for field, first in curves.items()}
        for step in range(10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_curves_of_runs_are_means_over_fifths_of_the_steps(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = ["rl"]
    for name, variant, first in (("a", "r_search", 0.0), ("b", "r_search_ppo", 10.0)):
        model = {"model.source": QWEN, "stages": stages}
        make(tmp_path / name, result_row("rl"), name=variant, **model)
        with_metrics(tmp_path / name / "rl", reward=first)
    ours = cells(said, "r_search:fig3", "a,b")
    assert {about: cell[0] for about, cell in ours.items()} == {
        (row, f"Training reward {i + 1}/5"): str(first + 2 * i + 0.5)
        for row, first in (("grpo_7b", 0), ("ppo_7b", 10))
        for i in range(5)
    }
    code, _, err = said("r_search:fig3", "--runs=a,a/../a")
    assert code == 2 and "grpo_7b" in err
    assert "18.50" in said("r_search:fig3", "--runs=a,b")[1]
    assert said("r_search:fig3", "--runs=a,b", "--plot=x.svg")[0] == 0
    text = (tmp_path / "x.svg").read_text()
    assert "R-Search (PPO)" in text and "Valid searches" not in text


def test_steps_whose_number_is_not_finite_are_left_out_of_a_curve(tmp_path):
    table = find_table("r_search:fig3")
    (field,) = {f for n, f in table.curves.items() if n == "Training reward"}
    (tmp_path / "rl").mkdir()
    values = (0.5, "NaN", None, "Infinity", 0.25)
    lines = [json.dumps({"step": i, field: x}) + "\n" for i, x in enumerate(values)]
    (tmp_path / "rl" / "metrics.jsonl").write_text("".join(lines))
    curves = read_row_curves(table, table.rows[0], tmp_path)
    assert curves == {"Training reward": [(0, 0.5), (4, 0.25)]}


def test_rows_with_the_same_curve_are_one_line_of_a_figure():
    table = find_table("r_search:fig3")
    values = {"ppo_3b": 1.0, "ppo_7b": 1.0, "grpo_3b": 2.0, "grpo_7b": 2.0}
    curves = {key: {n: [(0, x)] for n in table.curves} for key, x in values.items()}
    panels = panels_of(table, Measured({}, {}, curves=curves))
    assert [panel.title for panel in panels] == [*table.curves]
    for panel in panels:
        assert {line.points: line.label.count("(PPO)") for line in panel.series} == {
            ((0, 1.0),): 2,
            ((0, 2.0),): 0,
        }


def test_a_figure_has_bars_of_the_paper_and_of_our_run(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run", result_row("rl", dataset="bamboogle", cover_em=0.5))
    for suffix in ("png", "svg"):
        assert said("r_search:7", "--runs=run", f"--plot=x.{suffix}")[0] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "x.svg").read_text()
    assert "R-Search (GRPO) (grpo_7b)" in text and "(ppo_3b), paper" in text
    assert said("r1_searcher:fig6", "--plot=x.svg")[0] == 2  # no number yet


def test_all_rows_of_the_longest_table_have_their_own_color():
    number = max(len(table.rows) for table in read_tables().values())
    bars = [Bars(f"row {i}", i, [1.0], [None], False) for i in range(number)]
    picture = draw(".svg", "title", [Panel("em", ["set"], bars)]).decode()
    fills = re.findall(r"fill: (#\w+)", picture)
    assert len({*fills} - {"#ffffff", "#000000"}) == number


def test_the_result_on_more_questions_is_used_and_two_settings_are_refused(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first = result_row("rl", dataset="set:nq[:50]", n=50, em=0.1)
    make(tmp_path / "a", first, result_row("rl"), name="rag_r1")
    assert cells(said, "rag_r1:3", "a")["mq", "NQ"][3] == "200"
    both = [result_row("rl"), result_row("rl", setting="retrieval.top_k=5", em=0.7)]
    make(tmp_path / "b", *both, name="rag_r1")
    code, _, err = said("rag_r1:3", "--runs=b")
    assert code == 2 and "'mq'" in err and "--setting" in err
    chosen = cells(said, "rag_r1:3", "b", "--setting=retrieval.top_k=5")
    assert chosen["mq", "NQ"][0] == "0.7"
    assert cells(said, "rag_r1:3", "b", "--setting=-")["mq", "NQ"][0] == "0.5"


def test_results_measured_in_different_ways_are_refused_or_marked(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a", result_row("rl"), name="rag_r1")
    make(tmp_path / "b", result_row("rl", normalize="flashrag"), name="rag_r1_sq")
    code, _, err = said("rag_r1:3", "--runs=a,b")
    assert code == 2 and "normalize" in err
    code, out, _ = said("rag_r1:3", "--runs=a,b", "--allow=normalize")
    assert code == 0 and "0.500¹" in out and "¹ normalize" in out


def test_results_with_other_settings_than_the_papers_are_marked(
    said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run", result_row("rl", dataset="nq"))
    code, out, _ = said("r_search:2", "--runs=run")
    (note,) = [line for line in out.splitlines() if line.startswith("¹")]
    assert code == 0 and "50.0¹" in out
    assert "retrieval.top_k = 3" in note and "5" in note


@pytest.mark.parametrize(
    "argv, named",
    [
        (["rag_r1:9"], "rag_r1:9"),
        (["rag_r1:3", "--runs=nq=x"], "nq"),
        (["rag_r1:3", "--out=x.pdf"], "x.pdf: expected a name that ends in .md or "),
        (["rag_r1:3", "--runs=missing"], "missing"),
        (["rag_r1:3", "--plot=x.pdf"], "x.pdf"),
        (["rag_r1:3,rag_r1:4", "--plot=x.png"], "x.png"),
        (["rag_r1:3", "--allow=normalize"], "--runs"),
        ([], "table"),
    ],
)
def test_an_unknown_table_row_or_format_is_refused(
    said, tmp_path, monkeypatch, argv, named
):
    monkeypatch.chdir(tmp_path)
    code, out, err = said(*argv)
    assert (code, out) == (2, "") and named in err and err.count("\n") == 1


@pytest.mark.parametrize("suffix", [".md", ".tex"])
def test_a_file_has_the_papers_numbers_and_ours(said, tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run", result_row("rl", em=0.4), name="rag_r1")
    assert said("rag_r1:3", "--runs=run", f"--out=t{suffix}")[0] == 0
    text = (tmp_path / f"t{suffix}").read_text()
    (paper,) = [
        line for line in text.splitlines() if "RAG-R1-mq" in line and "0.423" in line
    ]
    assert "0.400" in text and paper.count("|" if suffix == ".md" else "&") > 8


@pytest.mark.parametrize(
    ("text", "line"),
    [("X = 1 / 0", ":1: ZeroDivisionError"), ("X =", ":1:"), ("X = 1", "TABLES")],
)
def test_a_broken_file_of_tables_is_named(tmp_path, text, line):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=f"mine.py.*{line}"):
        read_tables(tmp_path)

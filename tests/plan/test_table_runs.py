"""Costs of reproducing a table: each run once, and the questions of each row."""

import dataclasses

import pytest

from rsearch import tables
from rsearch.config.recipes import apply_overrides, load, run_command
from rsearch.evaluation.tables import PaperRow, PaperTable, columns_of
from rsearch.plan import command as plan
from rsearch.plan.machines import find_machine
from rsearch.plan.table_runs import runs_of, show_runs

QWEN = "Qwen/Qwen2.5-7B-Instruct"
RAG_R1 = "configs/rag_r1.py:sq"
TABLE = PaperTable(
    title="",
    source="",
    caption="",
    columns=columns_of({"A": "bamboogle", "B": "hotpotqa"}, {"J": "judge", "E": "em"}),
    rows=(
        PaperRow("rag", "", "1 1 1 1", QWEN, method="rag"),
        PaperRow("gpt", "", "1 1 1 1", "gpt-4o-mini", method="rag"),
        PaperRow("sft", "", "1 1 1 1", QWEN, recipe=RAG_R1, stage="sft"),
        PaperRow(
            *("rl", "", "1 1 1 1", QWEN),
            recipe=RAG_R1,
            stage="rl",
            asking=("eval.judge_golds=any",),
        ),
        PaperRow("no", "", "1 1 1 1", QWEN, reason="no code"),
    ),
)


def test_rows_after_stages_of_a_recipe_share_its_run():
    ((key, rows),) = runs_of(TABLE).items()
    assert key == (RAG_R1, ())
    assert [row.key for row in rows] == ["sft", "rl"]


def test_stages_and_questions_are_listed_without_a_machine(capsys):
    show_runs({"rag_r1:0": TABLE}, topology="", max_questions=500)
    said = capsys.readouterr()
    lines = [line for line in said.out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    stages = {row[1]: row[2:] for row in cells if len(row) == 6 and row[1] in STAGES}
    assert [*stages] == list(STAGES)
    assert stages["rl"][:3] == ["rl", "500", "8"]
    assert stages["sft"][1] == str(load(RAG_R1).sft.steps)
    asked = {row[0]: row[2] for row in cells if len(row) == 6 and row[0] in KEYS}
    assert asked == dict.fromkeys(KEYS, "625")
    assert "endpoint" in said.out and f"{4 * 625:,} times" in said.err


# Traces the programs of two stages.
@pytest.mark.slow
def test_a_run_of_two_tables_counts_once_in_the_sum(capsys):
    asked = dataclasses.replace(TABLE, rows=TABLE.rows[2:3])  # after sft
    tables_of = {"rag_r1:0": asked, "rag_r1:1": asked}
    show_runs(tables_of, topology="a100x8", max_questions=500)
    said = capsys.readouterr()
    table = said.out[said.out.index("device hours on a100x8") :]
    cells = [line.strip("│").split("│") for line in table.splitlines() if "│" in line]
    (name, runs, asks, unknown, gb), second = [[c.strip() for c in r] for r in cells]
    assert (name, unknown, second[1:]) == ("rag_r1:0", "0", [runs, asks, "0", gb])
    assert f"all runs, each once: {int(runs) / 8:,.0f} hours, {runs} device" in said.err
    assert float(gb) > 0 and int(runs) > 0


# Traces the programs of two stages, those of the first one twice.
@pytest.mark.slow
def test_a_stage_that_two_tables_need_counts_once_in_the_sum(capsys):
    settings = ["model.vocab_size=512", "eval.methods=()", "rl.steps=500"]
    about = dict(recipe="configs/quickstart.py", settings=tuple(settings))
    rows = [
        PaperRow(stage, "", "1 1 1 1", QWEN, stage=stage, **about)
        for stage in ("sft", "rl")
    ]
    tables_of = {
        f"rag_r1:{i}": dataclasses.replace(TABLE, rows=(row,), curves={"x": "y"})
        for i, row in enumerate(rows)
    }
    show_runs(tables_of, topology="a100x1", max_questions=500)
    said = capsys.readouterr().err
    sums = dict(
        line.strip()[line.index("runs") :].split(": ", 1)
        for line in map(str.strip, said.splitlines())
        if "device hours" in line and "runs" in line
    )
    assert sums["runs, each once"] == sums["runs"] != "0 hours, 0 device hours"


STAGES = ("curate_sft", "sft", "curate_rl", "rl")
KEYS = ("rag", "gpt", "sft", "rl")


def small(**overrides):
    shape = {
        "model.vocab_size": 512,
        "model.dtype": "bfloat16",
        "mesh.tensor": 2,
        "rollout.max_concurrent": 16,
        "stages": ("rl",),
    }
    return apply_overrides(load("configs/quickstart.py"), shape | overrides)


# Traces all programs of a step twice.
@pytest.mark.slow
def test_a_stages_hours_are_those_of_its_steps_on_all_hosts():
    machine, costs = find_machine("v5p-8"), []
    for hosts in (1, 2):  # with four chips each
        config = small(**{"rl.micro_batch": 1})
        several = dataclasses.replace(machine, hosts=hosts)
        ((stage, cost),) = plan.stage_costs(config, several, last="rl")
        assert (stage, cost.problem) == ("rl", "")
        assert cost.settings == ("rl.micro_batch=2",)  # one row for each shard
        assert cost.hours == cost.steps * cost.seconds / 3600 > 0
        costs.append(cost)
    # Two hosts decode twice the rows, each host on half of the chips.
    assert costs[1].seconds < costs[0].seconds and costs[1].gb >= costs[0].gb


def test_a_stage_that_a_machine_cannot_run_has_no_hours():
    machine = dataclasses.replace(find_machine("v5p-8"), hosts=2)
    c = small(**{"mesh.tensor": 4, "rl.micro_batch": 3})
    ((_, cost),) = plan.stage_costs(c, machine, last="rl")
    assert cost.problem and cost.hours is None
    assert plan.evaluation_cost(small(), None, 100).steps == 7  # batches of 16 rows
    sampled = small(**{"eval.samples": 4, "eval.seeds": 2})
    assert plan.evaluation_cost(sampled, None, 100).steps == 8 * 100 / 16


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--topology=a100x8"], "--topology=a100x8"),
        (["--max_questions=5"], "--max_questions=5"),
        (["--dry_run", "--runs=x"], "--runs=x"),
        (["--dry_run", "--max_questions=-1"], "--max_questions=-1"),
        (["--dry_run", "--topology=b100x8"], "--topology=b100x8"),
    ],
)
def test_flags_that_do_not_fit_a_dry_run_are_refused(argv, named, capsys):
    assert run_command(tables.main, ["rag_r1:3", *argv]) == 2
    assert named in capsys.readouterr().err

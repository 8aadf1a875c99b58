"""List the runs and evaluations that a paper's table needs, and what these would take.

Nothing is loaded or run. Gigabytes follow from the configurations alone; hours need a
machine, whose programs are estimated as `rsearch.plan` does for one that is not here. A
run's hours assume that every rollout uses its whole budget and that nothing waits.
Those of an evaluation assume as many conversations for each question as it samples;
those of a method assume one request with the passages of one search, although it may
make more. A step of a data stage or of an evaluation fills all rows of all hosts with
rollouts.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from rsearch.config.recipes import apply_overrides, fingerprint, load
from rsearch.data.sets import SETS
from rsearch.evaluation.tables import PaperRow, PaperTable
from rsearch.plan.command import Cost, evaluation_cost, stage_costs
from rsearch.plan.machines import find_machine
from rsearch.runtime import console

UNKNOWN = "?"
ENDPOINT = "endpoint"
JUDGE = "judge"  # metric of the columns that a judge fills
HEADS = ("steps", "devices", "GB each", "hours", "device hours")
NUM_WITHOUT_HOURS = 3  # the first HEADS, which need no machine


def runs_of(table: PaperTable) -> dict[tuple[str, tuple[str, ...]], list[PaperRow]]:
    """Return {(recipe, settings): rows after its stages} of the runs a table needs."""
    runs: dict[tuple, list[PaperRow]] = {}
    for row in table.rows:
        if row.recipe and row.is_runnable:
            runs.setdefault((row.recipe, row.settings), []).append(row)
    return runs


def show_runs(
    tables: Mapping[str, PaperTable], *, topology: str, max_questions: int
) -> None:
    """Print what tables need; for several tables, also what they take together.

    The cost of a run that several tables need is computed once.

    Args:
        tables: {"paper:number": the paper's table}.
        topology: a machine, see `find_machine`; "" leaves hours out, and takes the
            fewest devices that each mesh allows.
        max_questions: most questions of a set that are asked; 0 is all.

    Raises:
        ValueError: there is no such machine.
    """
    # Tracing a recipe takes seconds, but compiling it takes minutes.
    machine = find_machine(topology, compiles_for_gpus=False) if topology else None
    costed: dict[str, dict[str, Cost]] = {}
    totals, evaluation_costs = [], []
    for name, table in tables.items():
        runs = _show_stages(name, table, machine, costed)
        evaluations = _show_evaluations(name, table, machine, max_questions)
        gb = max((c.gb for _, c in runs + evaluations if c.gb), default=None)
        cells = [f"{_device_hours(costs):,.0f}" for costs in (runs, evaluations)]
        unknown = _num_unknown(runs) + _num_unknown(evaluations)
        totals.append([name, *cells, unknown, "-" if gb is None else f"{gb:.1f}"])
        evaluation_costs += evaluations
    if machine and len(tables) > 1:
        heads = ["table", "runs", "evaluations", "not known", "GB each"]
        console.table(f"device hours on {machine.name}", heads, totals)
        distinct_costs = [item for costs in costed.values() for item in costs.items()]
        console.note(f"all runs, each once: {_total(distinct_costs)}")
        console.note(f"all evaluations: {_total(evaluation_costs)}")


def _show_stages(name, table, machine, costed) -> list[tuple[str, Cost]]:
    """Print the stages of a table's runs; return (stage's name, its cost) for each.

    Args:
        machine: see `stage_costs`.
        costed: {configuration's fingerprint: {stage: cost}}, to which costs are added.
            An earlier table may have needed fewer stages of the same run.
    """
    costs, lines, runs = [], [], runs_of(table)
    if not runs:
        return []
    for (recipe, settings), rows in console.progress(runs.items(), f"{name}: runs"):
        config = apply_overrides(load(recipe), settings)
        last = max((row.stage for row in rows), key=config.stages.index)
        label = ", ".join([recipe, *settings])
        key = fingerprint(config)
        if last not in costed.get(key, ()):
            costed[key] = dict(stage_costs(config, machine, last=last))
        stages = config.stages[: config.stages.index(last) + 1]
        for i, stage in enumerate(stages):
            cost = costed[key][stage]
            keys = ", ".join(row.key for row in rows if row.stage == stage)
            lines.append(["" if i else label, stage, keys, *_cells(cost)])
            costs.append((f"{label}, {stage}", cost))
    _show_costs(name, "runs", ["recipe", "stage", "rows"], lines, costs, machine)
    return costs


def _show_evaluations(name, table, machine, max_questions) -> list[tuple[str, Cost]]:
    """Print the evaluations of a table's rows; return (row's key, cost) for each.

    A row of a model at an endpoint has no cost.
    """
    evaluations, lines, costs_by_key = [], [], {}
    rows = [row for row in table.rows if row.is_runnable]
    if not rows or table.curves:  # curves come from training
        return []
    # A method runs within the budgets of the paper's own recipe, if there is one for
    # its model.
    paper_recipe = f"configs/{name.partition(':')[0]}.py"
    trained_rows = sorted(
        (r for r in rows if r.recipe), key=lambda r: paper_recipe in r.recipe
    )
    recipes = {row.model: row.recipe for row in trained_rows}
    sets = dict.fromkeys(column.set for column in table.columns if column.set)
    num_questions = _num_questions(sets, max_questions)
    for row in console.progress(rows, f"{name}: evaluations"):
        config = _asked_config(row, recipes.get(row.model, paper_recipe))
        key = None if config is None else fingerprint(config)
        if config and key not in costs_by_key:
            costs_by_key[key] = evaluation_cost(config, machine, num_questions)
        made_by = f"{row.recipe} after {row.stage}" if row.recipe else row.method
        cost = costs_by_key.get(key)
        lines.append([row.key, made_by, num_questions or UNKNOWN, *_cells(cost)])
        evaluations += [(row.key, cost)] if cost else []
    heads = ["row", "made by", "questions"]
    _show_costs(name, "evaluations", heads, lines, evaluations, machine)
    judged_sets = {column.set for column in table.columns if column.metric == JUDGE}
    if judged_sets and (number := _num_questions(judged_sets, max_questions)):
        console.note(f"the judge is asked {number * len(rows):,} times at most")
    return evaluations


def _show_costs(name, kind, heads, lines, costs, machine):
    """Print costs, the settings that they need changed, and what cannot be run.

    Args:
        lines: cells of `heads`, then of HEADS.
    """
    heads = [*heads, *(HEADS if machine else HEADS[:NUM_WITHOUT_HOURS])]
    suffix = f" on {machine.name}" if machine else ""
    lines = [line[: len(heads)] for line in lines]
    console.table(f"{name}: {kind}{suffix}", heads, lines)
    notes: dict[str, list[str]] = {}
    for cost_name, cost in costs:
        for text in (", ".join(cost.settings), cost.problem):
            notes.setdefault(text, []).append(cost_name)
    for text in filter(None, notes):
        console.note(f"{'; '.join(notes[text])}: {text}")
    if machine:
        console.note(f"{kind}: {_total(costs)}")


def _total(costs):
    """Return a text with the sum of all costs."""
    hours = sum(c.hours or 0.0 for _, c in costs)
    text = f"{hours:,.0f} hours, {_device_hours(costs):,.0f} device hours"
    num_unknown = _num_unknown(costs)
    suffix = f", and {num_unknown} whose hours are not known" if num_unknown else ""
    return text + suffix


def _num_unknown(costs):
    """Return the number of costs whose hours are not known."""
    return sum(c.hours is None for _, c in costs)


def _device_hours(costs):
    """Return the device hours of those costs whose hours are known."""
    return sum((c.hours or 0.0) * c.devices for _, c in costs)


def _num_questions(sets, max_questions) -> int | None:
    """Return the number of questions of all sets; None if a size is not known."""
    sizes = [SETS[name].size or max_questions or None for name in sets]
    if None in sizes:
        return None
    return sum(min(size, max_questions or size) for size in sizes)


def _asked_config(row, recipe) -> ConfigDict | None:
    """Return the configuration for evaluating a row; None if it is at an endpoint."""
    if row.recipe:
        return apply_overrides(load(row.recipe), row.settings + row.asking)
    if "/" not in row.model:
        return None
    c = apply_overrides(load(recipe), {"model.source": row.model})
    r = c.rollout
    passage_tokens = c.eval.passage_tokens or r.max_observation_tokens
    request = {
        "max_searches": 0,
        "forced_final_turn": True,
        "max_prompt_tokens": r.max_prompt_tokens + passage_tokens,
        "max_turn_tokens": c.eval.answer_tokens or r.max_turn_tokens,
        "context_tokens": 0,
    }
    return apply_overrides(c, {f"rollout.{k}": v for k, v in request.items()})


def _cells(cost: Cost | None) -> list:
    """Return the cells of HEADS."""
    if cost is None:
        return ["-", ENDPOINT, "-", "-", "-"]
    steps = UNKNOWN if cost.steps is None else cost.steps
    gb = UNKNOWN if cost.gb is None else f"{cost.gb:.1f}"
    hours = [UNKNOWN, UNKNOWN]
    if cost.hours is not None:
        hours = [f"{cost.hours:.2f}", f"{cost.hours * cost.devices:.1f}"]
    return [steps, cost.devices, gb, *hours]

"""List the runs and evaluations that a paper's table needs, and what these would take.

Nothing is loaded or run. Gigabytes follow from the configurations alone; hours need a
machine, whose programs are reckoned as `rsearch.plan` does for one that is not here. A
run's hours are of steps in which every rollout uses its whole budget and nothing waits,
an evaluation's of one conversation for each question. A method's are of one request,
with the passages of one search: it may make more. A step of a data stage or of an
evaluation fills all rows of all hosts with rollouts.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from rsearch.config.recipes import apply_overrides, fingerprint, load
from rsearch.data.sets import SETS
from rsearch.evaluation.tables import PaperRow, PaperTable
from rsearch.plan.command import Cost, evaluation_cost, stage_costs
from rsearch.plan.machines import find_machine
from rsearch.runtime import console

UNKNOWN = "?"
ENDPOINT = "endpoint"
JUDGE = "judge"  # the metric of columns that a judge fills
HEADS = ("steps", "devices", "GB each", "hours", "device hours")
NUM_WITHOUT_HOURS = 3  # of HEADS


class TableRun(NamedTuple):
    """A run that some rows of a table need.

    Attributes:
        recipe: its configuration.
        settings: "field=value" of what differs from it.
        rows: that are evaluated after its stages.
    """

    recipe: str
    settings: tuple[str, ...]
    rows: tuple[PaperRow, ...]


def runs_of(table: PaperTable) -> list[TableRun]:
    """Return the runs that a table's rows need, each once."""
    rows_of: dict[tuple, list[PaperRow]] = {}
    for row in table.rows:
        if row.recipe and row.is_runnable:
            rows_of.setdefault((row.recipe, row.settings), []).append(row)
    return [TableRun(*key, tuple(rows)) for key, rows in rows_of.items()]


def show_runs(
    name: str, table: PaperTable, *, topology: str, max_questions: int
) -> None:
    """Print what a table needs.

    Args:
        name: of the table, "paper:number".
        table: of the paper.
        topology: a machine, see `find_machine`; "" leaves hours out, and takes as few
            devices as each mesh allows.
        max_questions: of a set that are asked; 0 is all.

    Raises:
        ValueError: no such machine.
    """
    machine = find_machine(topology) if topology else None
    columns = HEADS if machine else HEADS[:NUM_WITHOUT_HOURS]
    costs, lines = [], []
    for run in console.progress(runs_of(table), f"{name}: runs"):
        config = apply_overrides(load(run.recipe), run.settings)
        last = max((row.stage for row in run.rows), key=config.stages.index)
        label = ", ".join([run.recipe, *run.settings])
        for i, (stage, cost) in enumerate(stage_costs(config, machine, last=last)):
            keys = ", ".join(row.key for row in run.rows if row.stage == stage)
            cells = _cells(cost)[: len(columns)]
            lines.append(["" if i else label, stage, keys, *cells])
            costs.append((f"{label}, {stage}", cost))
    where = f" on {machine.name}" if machine else ""
    heads = ["recipe", "stage", "rows", *columns]
    console.table(f"{name}: runs{where}", heads, lines)
    evaluations, lines, known = [], [], {}
    rows = [row for row in table.rows if row.is_runnable]
    # A method is asked within the budgets of the paper's own recipe, if there is one
    # for its model.
    paper_recipe = f"configs/{name.partition(':')[0]}.py"
    trained = sorted(
        (r for r in rows if r.recipe), key=lambda r: paper_recipe in r.recipe
    )
    recipes = {row.model: row.recipe for row in trained}
    sets = dict.fromkeys(column.set for column in table.columns if column.set)
    num_questions = _num_questions(sets, max_questions)
    for row in console.progress(rows, f"{name}: evaluations"):
        config = _asked_config(row, recipes.get(row.model, paper_recipe))
        key = None if config is None else fingerprint(config)
        if key not in known:
            known[key] = config and _evaluation_cost(config, machine, num_questions)
        made_by = f"{row.recipe} after {row.stage}" if row.recipe else row.method
        cells = _cells(known[key])[: len(columns)]
        lines.append([row.key, made_by, num_questions or UNKNOWN, *cells])
        evaluations.append((row.key, known[key]))
    heads = ["row", "made by", "questions", *columns]
    console.table(f"{name}: evaluations{where}", heads, lines)
    notes: dict[str, list[str]] = {}
    for what, cost in [*costs, *evaluations]:
        for text in (", ".join(cost.settings), cost.problem) if cost else ():
            notes.setdefault(text, []).append(what)
    for text in filter(None, notes):
        console.note(f"{'; '.join(notes[text])}: {text}")
    if machine:
        console.note(f"runs: {_total(costs)}")
        console.note(f"evaluations: {_total(evaluations)}")
    judged = {column.set for column in table.columns if column.metric == JUDGE}
    if judged and (number := _num_questions(judged, max_questions)):
        console.note(f"the judge is asked {number * len(rows):,} times at most")


def _total(costs):
    """Return in words what all costs make together."""
    known = [c for _, c in costs if c is not None and c.hours is not None]
    others = sum(c is not None and c.hours is None for _, c in costs)
    hours = sum(c.hours for c in known)
    device_hours = sum(c.hours * c.devices for c in known)
    text = f"{hours:,.0f} hours, {device_hours:,.0f} device hours"
    return f"{text}, and {others} whose hours are not known" if others else text


def _num_questions(sets, max_questions) -> int | None:
    """Return the questions of all sets together; None where a size is not known."""
    sizes = [SETS[name].size or max_questions or None for name in sets]
    if None in sizes:
        return None
    return sum(min(size, max_questions or size) for size in sizes)


def _asked_config(row, recipe) -> ConfigDict | None:
    """Return what a row's policy or model is asked with; None of one at an endpoint."""
    if row.recipe:
        return apply_overrides(load(row.recipe), row.settings + row.asking)
    if "/" not in row.model:
        return None
    c = apply_overrides(load(recipe), {"model.source": row.model})
    r, shown = c.rollout, c.eval.passage_tokens or c.rollout.max_observation_tokens
    request = {
        "max_searches": 0,
        "forced_final_turn": True,
        "max_prompt_tokens": r.max_prompt_tokens + shown,
        "max_turn_tokens": c.eval.answer_tokens or r.max_turn_tokens,
        "context_tokens": 0,
    }
    return apply_overrides(c, {f"rollout.{k}": v for k, v in request.items()})


def _evaluation_cost(config, machine, num_questions) -> Cost:
    """Return what it takes to ask questions; their number may be None."""
    cost = evaluation_cost(config, machine, num_questions or 0)
    return cost if num_questions else cost._replace(steps=None)


def _cells(cost: Cost | None) -> list:
    """Return the cells of HEADS."""
    if cost is None:
        return ["-", ENDPOINT, "-", "-", "-"]
    hours = cost.hours
    steps = UNKNOWN if cost.steps is None else cost.steps
    gb = UNKNOWN if cost.gb is None else f"{cost.gb:.1f}"
    if hours is None:
        return [steps, cost.devices, gb, UNKNOWN, UNKNOWN]
    return [steps, cost.devices, gb, f"{hours:.2f}", f"{hours * cost.devices:.1f}"]

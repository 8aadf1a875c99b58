"""Show conversations and training rollouts: python -m rsearch.show RUN [--step=N] [...]

Without --step, the conversations of the last evaluated stage are shown. With --step,
the rollouts that the step was trained on are shown, of which config.log.rollouts groups
are stored: --step=12 as counted in metrics.jsonl, --step=last or --step=all.

Text that the policy wrote is plain with a bar before it, its queries are bold, and its
advantage is next to it. Text that it was shown is dim, and retrieved passages are in a
box; neither is trained on. Reward terms are shown before they are weighted.

    python -m rsearch.show runs/quickstart --wrong --searches=2
    python -m rsearch.show runs/quickstart --step=last --outcome=malformed
    python -m rsearch.show runs/quickstart --diff=runs/other --kind=bridge
"""

import pathlib
import reprlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation.results import normalizers_of, read_transcripts
from rsearch.evaluation.runs import ALL, LAST, last_stage, split_names
from rsearch.evaluation.scoring import scores_of_rows
from rsearch.rollout.rollout_log import read_rollouts, stored_steps
from rsearch.runtime.rollout_view import RolloutView, draw_rollouts
from rsearch.runtime.workdir import read_config

FLAGS = {
    "stage": (LAST, "a stage, 'start', 'last' or 'all'"),
    "step": ("", "RL step whose rollouts replace evaluations; or 'last', 'all'"),
    "method": ("protocol", "methods of config.eval.methods, a,b,..., or 'all'"),
    "dataset": (ALL, "datasets as named in results.json, a,b,..., or 'all'"),
    "outcome": ("", "answered, malformed, truncated, tool_error or judge_error"),
    "wrong": (False, "show only rollouts whose answer is no exact match"),
    "kind": ("", "kind of question, such as bridge"),
    "searches": (-1, "number of searches in the rollout", -1),
    "id": ("", "id of a question"),
    "limit": (5, "number of rollouts to show, from the first; 0 = all", 0),
    "diff": ("", "another run, whose rollouts of the same questions are shown too"),
}


def main(argv: Sequence[str]) -> int:
    """Read the arguments and the runs, and print rollouts."""
    flags = parse_flags(argv, flags=FLAGS, positional=("RUN",))
    run = pathlib.Path(flags["RUN"])
    rows = read_rows(run, flags)
    matches = [row for row in rows if _matches_filters(row, flags)]
    if not matches:
        raise ValueError(_no_match_message(run, rows, flags))
    other_rows: dict[tuple, dict] = {}
    # The last stages of two runs are compared, whatever their names.
    stage = ("stage",) if flags["stage"] == ALL else ()
    if flags["diff"]:
        other_run = pathlib.Path(flags["diff"])
        other_rows = {key_of(row, *stage): row for row in read_rows(other_run, flags)}
        matches = [row for row in matches if key_of(row, *stage) in other_rows]
        if not matches:
            raise ValueError(f"--diff={other_run}: has none of these questions")
    count = len(matches) if flags["limit"] == 0 else min(flags["limit"], len(matches))
    for row in matches[:count]:
        views = [view_of(row, run)]
        if other_rows:
            views.append(view_of(other_rows[key_of(row, *stage)], other_run))
        draw_rollouts(*views)
    print(f"{count} of {len(matches)} rollouts", end="")
    print("" if count == len(matches) else "; --limit=0 shows all of them")
    return 0


def read_rows(run: pathlib.Path, flags: dict[str, Any]) -> list[dict]:
    """Return the rollouts of a run from which the other flags choose.

    Args:
        flags: the command's flags; stage, step, method and dataset count here.

    Returns:
        Lines of transcripts.jsonl, or lines of steps with their `stage`; each has
        `verdict`, "right" or "wrong".

    Raises:
        ValueError: there is no run or no such rollout, or a line is malformed.
    """
    config = read_config(run)
    normalize = config["eval"]["normalize"]
    if flags["step"]:
        rows = _step_rows(run, flags, config["stages"])
        normalizers = [normalize] * len(rows)
    else:
        rows = _evaluation_rows(run, flags, config["stages"])
        normalizers = normalizers_of(run, rows, normalize)
    answers = [
        {
            "prediction": _value(row, str | None, "answer", "prediction"),
            "golden_answers": _texts(row, "answers", "golden_answers"),
        }
        for row in rows
    ]
    exact = [
        scores_of_rows([answer], name)["em"].item()
        for answer, name in zip(answers, normalizers, strict=True)
    ]
    return [
        row | {"verdict": "right" if em else "wrong"}
        for row, em in zip(rows, exact, strict=True)
    ]


def _evaluation_rows(run, flags, stages) -> list[dict]:
    """Return the lines of transcripts.jsonl that the flags choose."""
    if not (run / "transcripts.jsonl").exists():
        raise ValueError(f"{run}: not evaluated yet; --step=last shows RL rollouts")
    rows = read_transcripts(run)
    for name in ("dataset", "method", "stage"):
        known = list(dict.fromkeys(row[name] for row in rows))
        choice = flags[name]
        if choice == LAST and known:
            # Rows of an earlier stage come last if it was evaluated again.
            choice = last_stage(rows, stages) if name == "stage" else known[-1]
        choices = [choice] if name == "stage" else split_names(choice, known)
        for value in choices or [choice]:
            if value not in (ALL, *known):
                names = ", ".join(known) or "none"
                raise ValueError(f"--{name}={value}: {run} has evaluations of {names}")
        rows = [row for row in rows if ALL in choices or row[name] in choices]
    return rows


def _step_rows(run, flags, stages) -> list[dict]:
    """Return the stored rollouts of the wanted stage and step."""
    for name in ("method", "dataset"):
        if flags[name] != FLAGS[name][0]:
            raise ValueError(
                f"--{name}={flags[name]} and --step=... exclude each other: name one"
            )
    steps = {name: stored_steps(run / name) for name in stages}
    steps = {name: numbers for name, numbers in steps.items() if numbers}
    if not steps:
        raise ValueError(f"{run}: has no stored rollouts; was config.log.rollouts 0?")
    stage, step = flags["stage"], flags["step"]
    if stage == LAST:
        stage = list(steps)[-1]
    if stage not in (ALL, *steps):
        raise ValueError(f"--stage={stage}: {run} has steps of {', '.join(steps)}")
    rows = []
    for name in steps if stage == ALL else [stage]:
        step_numbers = {str(number): number for number in steps[name]}
        step_numbers[LAST] = steps[name][-1]
        if step not in (ALL, *step_numbers):
            first, last = steps[name][0], steps[name][-1]
            raise ValueError(f"--step={step}: {name} has steps {first} to {last}")
        for number in steps[name] if step == ALL else [step_numbers[step]]:
            lines = read_rollouts(run / name, number)
            rows += [line | {"stage": name} for line in lines]
    return rows


def key_of(row: dict, *more_names: str) -> tuple:
    """Return a key that is equal for two runs' rollouts of the same question.

    Worlds of different seeds have different questions with the same ids.

    Args:
        more_names: further fields that must be equal.
    """
    names = ("question", "step", "rollout", "method", "dataset", "seed", "sample")
    names += more_names
    setting = row.get("setting") or ""  # earlier versions wrote none
    return (_id_of(row), setting, *(row.get(name) for name in names))


def _id_of(row) -> str:
    return _value(row, str, "question_id", "id")


def _matches_filters(row, flags) -> bool:
    filters = {"outcome": flags["outcome"], "kind": flags["kind"]}
    return (
        all(value in ("", row.get(name)) for name, value in filters.items())
        and flags["id"] in ("", _id_of(row))
        # An earlier version wrote a rollout's queries but no passages.
        and flags["searches"] in (-1, len(_value(row, list, "passages", "queries")))
        and not (flags["wrong"] and row["verdict"] == "right")
    )


def _no_match_message(run, rows, flags) -> str:
    """Return the message for filters that match no rollout."""
    filters = ("outcome", "wrong", "kind", "searches", "id")
    words = " ".join(f"--{n}={flags[n]}" for n in filters if flags[n] != FLAGS[n][0])
    value_texts = []
    for name in ("outcome", "kind"):
        values = sorted({str(row[name]) for row in rows if row.get(name) is not None})
        value_texts += [f"{name} {' or '.join(values)}"] if values else []
    value_list = ", ".join(value_texts)
    return f"{run}: none of {len(rows)} rollouts has {words}; they have {value_list}"


def view_of(row: dict, run: pathlib.Path) -> RolloutView:
    """Return the view of a line of either file, ready to be drawn.

    Raises:
        ValueError: a field has a value that no run writes.
    """
    names = ["stage", "method", "dataset", "setting", "step", "kind", "group"]
    words = [_id_of(row)]
    for name in [*names, "rollout", "seed", "sample"]:
        value = row.get(name)
        if value not in (None, ""):
            words.append(f"{name} {value}" if isinstance(value, int) else str(value))
    advantage = row.get("advantage")
    if isinstance(advantage, list):
        advantage = [_number(x) for x in advantage] or None
    elif advantage is not None:
        advantage = _number(advantage)
    reward = row.get("reward")
    terms = _value(row, dict, "reward_parts") if reward is not None else {}
    return RolloutView(
        title="  ".join([*words, str(run)]),
        question=_value(row, str, "question"),
        answers=_texts(row, "answers", "golden_answers"),
        answer=_value(row, str | None, "answer", "prediction"),
        verdict=row["verdict"],
        outcome=_value(row, str, "outcome"),
        reward=None if reward is None else _number(reward),
        terms={name: _number(value) for name, value in terms.items()},
        in_loss=_value(row, bool, "in_loss") if "in_loss" in row else None,
        advantage=advantage,
        segments=[
            (
                _value(s, str, "source"),
                s["text"],
                len(_value(s, list, "ids", default=[])),  # an evaluation stores none
            )
            for s in row["segments"]
        ],
        queries=_texts(row, "queries"),
        # An earlier version wrote none.
        passages=[list(_hits(s)) for s in _value(row, list, "passages", default=[])],
    )


def _hits(search) -> Iterator[tuple[str, str, float | None]]:
    """Yield (id, title, score) of each passage of a search."""
    if not isinstance(search, list) or not all(isinstance(p, dict) for p in search):
        raise ValueError(f"passages: {reprlib.repr(search)}: expected passages")
    for passage in search:
        score = passage.get("score")
        score = None if score is None else _number(score)
        yield _value(passage, str, "id"), _value(passage, str, "title"), score


def _number(value) -> float:
    """Return a stored number as a float; those not finite are stored as names."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{reprlib.repr(value)}: expected a number") from None


def _texts(row, *names) -> list[str]:
    """Return the list of texts in the first of these fields that the row has."""
    values = _value(row, list, *names)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{names[0]} = {reprlib.repr(values)}: expected texts")
    return values


def _value(row, kind, *names, default=None):
    """Return the value of the first of these fields in a row; check its type."""
    name = next((name for name in names if name in row), names[0])
    value = row.get(name, default)
    if not isinstance(value, kind):
        row_id = reprlib.repr(row.get("question_id", row.get("id")))
        raise ValueError(
            f"{row_id}: {name} = {reprlib.repr(value)}: no run writes that"
        )
    return value


if __name__ == "__main__":
    sys.exit(run_command(main))

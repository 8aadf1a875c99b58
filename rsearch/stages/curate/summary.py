"""What a data stage has chosen, and its summary: of each question what became of it."""

import collections
import dataclasses
from collections.abc import Sequence

from rsearch.data.demonstrations import Demonstration
from rsearch.data.selection import first_drawn
from rsearch.runtime import console
from rsearch.types import Question


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one question.

    Attributes:
        name: the reason, in few words.
        kept: whether anything of it is kept.
        num_rollouts: that it took, in this stage or the one it took over from.
    """

    name: str
    kept: bool
    num_rollouts: int


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a method has chosen.

    Attributes:
        verdicts: one for each question of the stage, in their order.
        demonstrations: (kind, Demonstration) each, in the order of the questions.
        questions: records of questions.jsonl, likewise.
        notes: what people should know besides.
    """

    verdicts: Sequence[Verdict]
    demonstrations: Sequence[tuple[str, Demonstration]] = ()
    questions: Sequence[dict] = ()
    notes: Sequence[str] = ()


def check_chosen(method: str, chosen: Chosen, questions: Sequence[Question]) -> Chosen:
    """Return what a method has chosen, which must be a Chosen with all its verdicts.

    Args:
        method: its name in config.curate.method.
        chosen: what it returned.
        questions: of the stage.

    Raises:
        ValueError: it is something else.
    """
    what = f"config.curate.method = {method!r} returned"
    if not isinstance(chosen, Chosen):
        kind = type(chosen).__name__
        raise ValueError(f"{what} a {kind}: must be a {Chosen.__module__}.Chosen")
    if len(chosen.verdicts) != len(questions):
        raise ValueError(
            f"{what} {len(chosen.verdicts)} verdicts for {len(questions)} questions: "
            "must be one for each"
        )
    for kind, demonstration in chosen.demonstrations:
        if not isinstance(kind, str) or not isinstance(demonstration, Demonstration):
            raise ValueError(
                f"{what} {demonstration!r} among its demonstrations: must be pairs of "
                f"a kind and a {Demonstration.__module__}.Demonstration"
            )
    return chosen


def capped(
    chosen: Chosen, questions: Sequence[Question], most: int, *, seed: int
) -> Chosen:
    """What is chosen of at most `most` questions, drawn at random; 0 keeps all."""
    kept = [q for q, v in zip(questions, chosen.verdicts, strict=True) if v.kept]
    if not most or len(kept) <= most:
        return chosen
    ids = {kept[i].id for i in first_drawn(kept, most, seed=seed)}
    verdicts = [
        v
        if not v.kept or q.id in ids
        else Verdict(f"{v.name}, not drawn", False, v.num_rollouts)
        for q, v in zip(questions, chosen.verdicts, strict=True)
    ]
    return dataclasses.replace(
        chosen,
        verdicts=verdicts,
        demonstrations=[d for d in chosen.demonstrations if d[1].question.id in ids],
        questions=[record for record in chosen.questions if record["id"] in ids],
    )


def summarise(
    stage: str, method: str, chosen: Chosen, questions: Sequence[Question]
) -> dict:
    """The contents of summary.json; its counts add up.

    Returns:
        The questions, how many are kept, and the rollouts they took; the same for each
        verdict and for each kind of question, where the metadata tells it; and how many
        demonstrations of each kind were written.
    """
    verdicts = chosen.verdicts
    names = sorted({(not v.kept, v.name) for v in verdicts})
    kinds = sorted({str(q.metadata["kind"]) for q in questions if "kind" in q.metadata})
    of_kind = {
        kind: [
            v
            for q, v in zip(questions, verdicts, strict=True)
            if str(q.metadata.get("kind")) == kind
        ]
        for kind in kinds
    }
    made = collections.Counter(kind for kind, _ in chosen.demonstrations)
    return {
        "stage": stage,
        "method": method,
        **_counts(verdicts),
        "verdicts": [
            {"verdict": name, **_counts([v for v in verdicts if v.name == name])}
            for _, name in names
        ],
        "question_kinds": {kind: _counts(of_kind[kind]) for kind in kinds},
        "demonstrations": len(chosen.demonstrations),
        "demonstration_kinds": dict(sorted(made.items())),
        "notes": list(chosen.notes),
    }


def _counts(verdicts):
    return {
        "questions": len(verdicts),
        "kept": sum(v.kept for v in verdicts),
        "rollouts": sum(v.num_rollouts for v in verdicts),
    }


def show(summary: dict) -> None:
    """The summary as a table: what was kept, and why the rest was not."""
    rows = [
        (v["verdict"], v["questions"], v["kept"], v["rollouts"])
        for v in summary["verdicts"]
    ]
    rows.append(("all", summary["questions"], summary["kept"], summary["rollouts"]))
    title = f"{summary['stage']}: {summary['method']}"
    console.table(title, ("verdict", "questions", "kept", "rollouts"), rows)
    if summary["demonstrations"]:
        made = [*summary["demonstration_kinds"].items()]
        made.append(("all", summary["demonstrations"]))
        console.table(f"{summary['stage']}: written", ("kind", "demonstrations"), made)
    for line in summary["notes"]:
        console.note(f"{summary['stage']}: {line}")

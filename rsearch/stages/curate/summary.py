"""Summarise what a data stage has selected, and what became of each question."""

import collections
import dataclasses
from collections.abc import Sequence

from rsearch.data.demonstrations import Demonstration
from rsearch.data.selection import first_drawn
from rsearch.runtime import console
from rsearch.types import Question


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision about one question.

    Attributes:
        name: the reason, in a few words.
        is_kept: whether anything of it is written.
        num_rollouts: number of rollouts it took, in this stage or in the one whose
            rollouts were taken over.
    """

    name: str
    is_kept: bool
    num_rollouts: int


@dataclasses.dataclass(frozen=True)
class Selection:
    """The data that a method has selected.

    Attributes:
        decisions: one for each question of the stage, in order.
        demonstrations: pairs (kind, Demonstration), in the order of the questions.
        questions: records for questions.jsonl, in the same order.
        notes: other facts that people should know.
    """

    decisions: Sequence[Decision]
    demonstrations: Sequence[tuple[str, Demonstration]] = ()
    questions: Sequence[dict] = ()
    notes: Sequence[str] = ()


def check_selection(
    method: str, selection: Selection, questions: Sequence[Question]
) -> Selection:
    """Return the selection, after checking that it is what a method must return.

    Args:
        method: the method's name in config.curate.method.
        selection: what the method returned.
        questions: questions of the stage.

    Raises:
        ValueError: the method returned something else.
    """
    # The method may be the user's own function.
    head = f"config.curate.method = {method!r} returned"
    if not isinstance(selection, Selection):
        kind = type(selection).__name__
        raise ValueError(f"{head} a {kind}: must be a {Selection.__module__}.Selection")
    if len(selection.decisions) != len(questions):
        raise ValueError(
            f"{head} {len(selection.decisions)} decisions for {len(questions)} "
            "questions: must be one for each"
        )
    for decision in selection.decisions:
        if not isinstance(decision, Decision):
            raise ValueError(
                f"{head} {decision!r} among its decisions: must be of type "
                f"{Decision.__module__}.Decision"
            )
    for pair in selection.demonstrations:
        match pair:
            # Each character of a single text would be a turn.
            case (str(), Demonstration(_, [*turns])) if turns and all(
                isinstance(turn, str) for turn in turns
            ):
                continue
            case (str(), Demonstration(_, turns)):
                raise ValueError(
                    f"{head} a demonstration with turns = {turns!r}: must be a tuple "
                    "of at least one text"
                )
        raise ValueError(
            f"{head} {pair!r} among its demonstrations: must be pairs of a kind and a "
            f"{Demonstration.__module__}.Demonstration"
        )
    for record in selection.questions:
        names = ("id", "question", "golden_answers")
        if not isinstance(record, dict) or not all(name in record for name in names):
            raise ValueError(
                f"{head} {record!r} among its questions: must be dicts with "
                f"{', '.join(names)}, as rsearch.data.curation.question_record makes"
            )
    return selection


def draw_at_most(
    selection: Selection, questions: Sequence[Question], limit: int, *, seed: int
) -> Selection:
    """Keep what is selected from at most `limit` questions, drawn at random."""
    candidates = [
        q for q, v in zip(questions, selection.decisions, strict=True) if v.is_kept
    ]
    if not limit or len(candidates) <= limit:
        return selection
    # Draw questions, not rollouts: all demonstrations of a question stay or go.
    ids = {candidates[i].id for i in first_drawn(candidates, limit, seed=seed)}
    decisions = [
        v
        if not v.is_kept or q.id in ids
        else Decision(f"{v.name}, not drawn", False, v.num_rollouts)
        for q, v in zip(questions, selection.decisions, strict=True)
    ]
    return dataclasses.replace(
        selection,
        decisions=decisions,
        demonstrations=[d for d in selection.demonstrations if d[1].question.id in ids],
        questions=[record for record in selection.questions if record["id"] in ids],
    )


def selection_summary(
    stage: str, method: str, selection: Selection, questions: Sequence[Question]
) -> dict:
    """Return the contents of summary.json; its counts add up.

    Returns:
        The number of questions, how many are kept, and the rollouts they took; the same
        for each verdict and for each kind of question, if the metadata has it; and how
        many demonstrations of each kind were written.
    """
    decisions = selection.decisions
    # Reasons for keeping come first in the table.
    names = sorted({(not v.is_kept, v.name) for v in decisions})
    by_kind = collections.defaultdict(list)
    for question, decision in zip(questions, decisions, strict=True):
        if "kind" in question.metadata:
            by_kind[str(question.metadata["kind"])].append(decision)
    kind_counts = collections.Counter(kind for kind, _ in selection.demonstrations)
    return {
        "stage": stage,
        "method": method,
        **_counts(decisions),
        "verdicts": [
            {"verdict": name, **_counts([v for v in decisions if v.name == name])}
            for _, name in names
        ],
        "question_kinds": {kind: _counts(by_kind[kind]) for kind in sorted(by_kind)},
        "demonstrations": len(selection.demonstrations),
        "demonstration_kinds": dict(sorted(kind_counts.items())),
        "notes": list(selection.notes),
    }


def _counts(decisions):
    return {
        "questions": len(decisions),
        "kept": sum(v.is_kept for v in decisions),
        "rollouts": sum(v.num_rollouts for v in decisions),
    }


def show_summary(summary: dict) -> None:
    """Print the summary: what was selected, and why the rest was not."""
    rows = [
        (v["verdict"], v["questions"], v["kept"], v["rollouts"])
        for v in summary["verdicts"]
    ]
    # The last line is the sum, so that a reader can check that nothing is missing.
    rows.append(("all", summary["questions"], summary["kept"], summary["rollouts"]))
    title = f"{summary['stage']}: {summary['method']}"
    console.table(title, ("verdict", "questions", "kept", "rollouts"), rows)
    if summary["demonstrations"]:
        kinds = [*summary["demonstration_kinds"].items()]
        kinds.append(("all", summary["demonstrations"]))
        console.table(f"{summary['stage']}: written", ("kind", "demonstrations"), kinds)
    for line in summary["notes"]:
        console.note(f"{summary['stage']}: {line}")

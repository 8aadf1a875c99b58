"""Read what strategies have answered training questions: a run's transcripts.jsonl."""

import dataclasses
from collections.abc import Sequence

from rsearch.runtime.jsonl import read_jsonl


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A training question, and what strategies answered.

    Attributes:
        question: its text.
        golden_answers: those that count as right.
        answers: of each strategy; None where it gave none.
    """

    question: str
    golden_answers: tuple[str, ...]
    answers: tuple[str | None, ...]


def read_labels(
    strategies: Sequence[str], path: str, dataset: str, *, field: str
) -> tuple[Labelled, ...]:
    """Return the training questions of a file, in its order.

    Args:
        strategies: whose answers are wanted.
        path: of a transcripts.jsonl.
        dataset: whose rows are read; "" where those of the strategies are of one.
        field: that names the file, for messages.

    Raises:
        ValueError: a bad line, no rows, rows of several data sets or runs, or a
            question that some strategy has not answered.
        OSError: the file cannot be read.
    """
    field = f"{field} = {path!r}"
    if not path:
        raise ValueError(
            f"{field}: expected a transcripts.jsonl of rsearch.evaluate with rows of "
            f"{', '.join(strategies)} on training questions"
        )
    rows = [row for row in read_jsonl(path, parse=_parse_row) if row[0] in strategies]
    rows = [row for row in rows if not dataset or row[1] == dataset]
    datasets = sorted({row[1] for row in rows})
    if len(datasets) != 1:
        raise ValueError(
            f"{field}, dataset = {dataset!r}: expected rows of {', '.join(strategies)} "
            f"on one data set, got {', '.join(map(repr, datasets)) or 'none'}"
        )
    questions, answers = {}, {}
    for strategy, _, name, text, golden, prediction in rows:
        questions[name] = text, golden
        if (name, strategy) in answers:
            raise ValueError(
                f"{field}: several rows of {strategy} on question {name!r}: expected "
                "those of one stage and setting, and no samples"
            )
        answers[name, strategy] = prediction
    for name in questions:
        for strategy in strategies:
            if (name, strategy) not in answers:
                raise ValueError(f"{field}: no row of {strategy} on question {name!r}")
    return tuple(
        Labelled(text, golden, tuple(answers[name, s] for s in strategies))
        for name, (text, golden) in questions.items()
    )


def _parse_row(row):
    """Return (strategy, data set, id, question, golden answers, prediction)."""
    names = ("method", "dataset", "id", "question")
    if not isinstance(row, dict) or any(not isinstance(row.get(n), str) for n in names):
        raise ValueError(f"expected an object with texts as {', '.join(names)}")
    golden, prediction = row.get("golden_answers"), row.get("prediction")
    if not isinstance(golden, list) or any(not isinstance(g, str) for g in golden):
        raise ValueError("golden_answers: expected a list of texts")
    if not isinstance(prediction, str | None):
        raise ValueError("prediction: expected text or null")
    method, *fields = (row[n] for n in names)
    return method.partition(":")[0], *fields, tuple(golden), prediction

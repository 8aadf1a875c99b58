"""Read the labels that methods learn from: a run's answers, or files made for them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rsearch.runtime.jsonl import read_jsonl


@dataclasses.dataclass(frozen=True)
class LabelledQuestion:
    """A training question and the answers of several strategies.

    Attributes:
        question: text of the question.
        golden_answers: answers that count as right.
        answers: answer of each strategy; None if it gave none.
    """

    question: str
    golden_answers: tuple[str, ...]
    answers: tuple[str | None, ...]


def read_labels(
    strategies: Sequence[str], path: str, dataset: str, *, field: str
) -> tuple[LabelledQuestion, ...]:
    """Return the training questions of a file, in its order.

    Args:
        strategies: strategies whose answers are wanted.
        path: path of a transcripts.jsonl.
        dataset: dataset whose rows are read; "" if all rows of the strategies are of
            the same dataset.
        field: the configuration's field that names the file, for messages.

    Raises:
        ValueError: the file cannot be read, a bad line, no rows, rows of several
            datasets or runs, or a question without a row of some strategy.
    """
    field = f"{field} = {path!r}"
    if not path:
        raise ValueError(
            f"{field}: expected a transcripts.jsonl of rsearch.evaluate with rows of "
            f"{', '.join(strategies)} on training questions"
        )
    rows = _read_rows(path, field, parse=_parse_row)
    rows = [row for row in rows if row[0] in strategies]
    datasets = sorted({row[1] for row in rows})
    is_clear = dataset in datasets if dataset else len(datasets) == 1
    if not is_clear:
        raise ValueError(
            f"{field}, dataset = {dataset!r}: expected rows of {', '.join(strategies)} "
            f"on one data set; the file has {', '.join(map(repr, datasets)) or 'none'}"
        )
    rows = [row for row in rows if not dataset or row[1] == dataset]
    questions, answers = {}, {}
    for strategy, _, name, text, golden, prediction in rows:
        questions[name] = text, golden
        if (name, strategy) in answers:
            raise ValueError(
                f"{field}: several rows of {strategy} on question {name!r}: expected "
                "rows of one stage and setting, and no samples"
            )
        answers[name, strategy] = prediction
    for name in questions:
        for strategy in strategies:
            if (name, strategy) not in answers:
                raise ValueError(f"{field}: no row of {strategy} on question {name!r}")
    return tuple(
        LabelledQuestion(text, golden, tuple(answers[name, s] for s in strategies))
        for name, (text, golden) in questions.items()
    )


def _read_rows(path, field, **options):
    """Return the rows of a file that a field names, see `read_jsonl`."""
    try:
        return read_jsonl(path, **options)
    except OSError as error:
        raise ValueError(f"{field}: {error.strerror or error}") from None


def _parse_row(row):
    """Return (strategy, dataset, id, question, golden answers, prediction)."""
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


def read_label_file(
    path: str,
    row_type: type,
    *,
    method: str,
    flag: str,
    convert: Callable[..., tuple],
    fault: Callable[[Sequence[Any]], str],
) -> tuple:
    """Return the rows of a file of labels that rsearch.evaluate has made.

    Args:
        row_type: dataclass with the fields of a row; `question`, a text, comes first.
        method: name of the method that learns from the file.
        flag: flag of rsearch.evaluate that makes such files.
        convert: (values of the other fields) -> those of the dataclass; raises
            ValueError if they cannot be used.
        fault: (all rows) -> why they cannot be learnt from, or "".

    Raises:
        ValueError: the file cannot be read, a bad line, or rows with a `fault`.
    """
    field = f"config.eval.methods: {method}: labels = {path!r}"
    expected = f"expected a file of rsearch.evaluate --{flag}"
    if not path:
        raise ValueError(f"{field}: {expected}")
    names = [f.name for f in dataclasses.fields(row_type)]

    def parse(row):
        if not isinstance(row, dict) or sorted(row) != sorted(names):
            raise ValueError(f"expected an object with the fields {', '.join(names)}")
        question, *values = (row[name] for name in names)
        if not isinstance(question, str):
            raise ValueError(f"question = {question!r}: expected a text")
        return row_type(question, *convert(*values))

    rows = _read_rows(path, field, strict=True, parse=parse)
    if problem := fault(rows):
        raise ValueError(f"{field}: {problem}: {expected}")
    return tuple(rows)


def is_list_of_numbers(value: Any, size: int) -> bool:
    """Return whether a JSON value is a list of this many finite numbers."""
    is_list = isinstance(value, list) and len(value) == size
    return is_list and all(type(x) in (int, float) and math.isfinite(x) for x in value)


def labelled_chains(chains: Any, success: Any) -> tuple[tuple, tuple[float, ...]]:
    """Return chains of texts and the success rate of each, JSON values, as tuples.

    Raises:
        ValueError: the values are not such lists.
    """
    are_chains = isinstance(chains, list) and all(
        isinstance(steps, list) and steps and all(isinstance(s, str) for s in steps)
        for steps in chains
    )
    if not are_chains:
        raise ValueError("chains: expected a list of lists of texts")
    is_list = is_list_of_numbers(success, len(chains))
    if not is_list or not all(0 <= rate <= 1 for rate in success):
        raise ValueError("success: expected a number from 0 to 1 for each chain")
    return tuple(map(tuple, chains)), tuple(map(float, success))


def fault_of_success(success: Iterable[float]) -> str:
    """Return why no value can be learnt from these rates; "" if one can."""
    rates = set(success)
    if not rates:
        return "no steps"
    if len(rates) > 1:
        return ""
    return f"success = {rates.pop()} of all steps: none leads further than the others"

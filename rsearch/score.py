"""Score any predictions: python -m rsearch.score FILE.jsonl... [--json] [--macro]

Each line of a file, plain or gzip, is one question:

    {"question": "...", "golden_answers": ["..."], "prediction": "..."}

Golden answers are read as in files of questions, including aliases such as
`answer_aliases`; `prediction` is null if there is no answer; other fields are ignored.
The field names of published files are accepted too: `golden_answer`, `answer`,
`possible_answers` or `answers` for the golden answers; `predicted_answer`, `pred_ans`
or, as in FlashRAG's intermediate_data.json, `output.pred` for the prediction. If a
record has several of them, the first in this list counts. A file may also be one JSON
list.

Each file is a row of the table; a run's transcripts.jsonl gives a row for each stage,
method, dataset and setting. Intervals of exact match and cover exact match are Wilson
intervals; those of F1 are bootstrap intervals. --macro takes all files that name no
stage and no method as the predictions of one system, and refuses to average runs of
several folders.

Thoughts are removed from a prediction: all text up to its last closing mark, such as
</think>. A prediction that ends within a thought counts as no answer.

By default answers are normalised as by `rsearch.evaluate`: with "squad", the normaliser
of Search-R1 and R-Search. "r1_searcher" reproduces R1-Searcher's published numbers, and
"flashrag" computes F1 as that package does.
"""

import json
import os
import sys
from collections.abc import Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation.predictions import RUN, read_predictions
from rsearch.evaluation.scoring import METRICS, score_rows
from rsearch.evaluation.statistics import macro_scores
from rsearch.runtime.console import table
from rsearch.text.normalize import DEFAULT_NORMALIZER, NORMALIZERS

HEADINGS = {"em": "exact match", "cover_em": "cover exact match", "f1": "F1"}
MACRO = "macro mean"

FLAGS = {
    "json": (False, "print a JSON object per row, with fractions, and no table"),
    "macro": (
        False,
        "add means over datasets, each dataset counted once; files that name no stage "
        "and method count as one system's",
    ),
    "normalizer": (
        DEFAULT_NORMALIZER,
        "how answers are normalised: squad, r1_searcher or flashrag",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Read the arguments, score the files and print the table."""
    flags = parse_flags(argv, flags=FLAGS, positional=("FILE.jsonl...",))
    normalizer = flags["normalizer"]
    if normalizer not in NORMALIZERS:
        names = " or ".join(NORMALIZERS)
        raise ValueError(f"--normalizer={normalizer}: must be {names}")
    paths: dict[str, str] = {}  # real path -> the first of its spellings
    for path in flags["FILE.jsonl"]:
        paths.setdefault(os.path.realpath(path), path)
    rows = [
        {"file": path, **dict(zip(RUN, run, strict=True)), "normalize": normalizer}
        | score_rows(predictions, normalizer)
        for path in paths.values()
        for run, predictions in read_predictions(path).items()
    ]
    if flags["macro"]:
        rows += macro_rows(rows)
    if flags["json"]:
        for row in rows:
            record = {name: value for name, value in row.items() if value is not None}
            print(json.dumps(record, allow_nan=False))
        return 0
    name_columns = [n for n in ("file", *RUN) if len({row[n] for row in rows}) > 1]
    lines = [
        [_cell(row, name) for name in (*name_columns, "n")]
        + [_percent(row, n) for n in METRICS]
        for row in rows
    ]
    title = f"percent (95 % interval), answers normalised as {normalizer}"
    table(title, (*name_columns, "questions", *map(HEADINGS.get, METRICS)), lines)
    return 0


def macro_rows(rows: Sequence[dict]) -> list[dict]:
    """Return a row of means for each stage and method with several datasets.

    Args:
        rows: rows with `file`, the names of RUN, and the values of `score_rows`. For a
            row that names no dataset, the file counts as the dataset.

    Returns:
        Rows with the same keys, and MACRO as the file. `n` is the number of questions
        in all datasets, and `datasets` the number of datasets.

    Raises:
        ValueError: two rows have one dataset, a stage and method is in two folders,
            which may be two runs, or none has two datasets.
    """
    by_system: dict = {}
    for row in rows:
        sets = by_system.setdefault((row["stage"], row["method"]), {})
        name = row["dataset"] or row["file"]
        if name in sets:
            duplicates = sets[name], row
            sources = [r["file"] for r in duplicates]
            settings = [r["setting"] for r in duplicates]
            if settings[0] != settings[1]:
                words = [f"setting {s}" if s else "no setting" for s in settings]
                sources = [f"{x} ({s})" for x, s in zip(sources, words, strict=True)]
            raise ValueError(
                f"--macro: dataset {name} would count twice: {' and '.join(sources)}"
            )
        sets[name] = row
    means = []
    for (stage, method), sets in by_system.items():
        if len(sets) < 2:
            continue
        set_rows = list(sets.values())
        folders = {os.path.dirname(os.path.realpath(r["file"])) for r in set_rows}
        if len(folders) > 1 and (stage or method):
            raise ValueError(
                f"--macro: {' '.join(str(x) for x in (stage, method) if x)} is in "
                f"{' and '.join(dict.fromkeys(r['file'] for r in set_rows))}, which "
                "may be different runs: name files of one folder, such as "
                "rsearch.evaluate --sets=A,B writes"
            )
        row = {"file": MACRO, **dict.fromkeys(RUN), "stage": stage, "method": method}
        row["normalize"] = set_rows[0]["normalize"]
        row |= {"n": sum(r["n"] for r in set_rows), "datasets": len(set_rows)}
        means.append(row | macro_scores(set_rows, METRICS))
    if not means:
        raise ValueError("--macro: no stage and method has two datasets")
    return means


def _cell(row, name):
    """Return a cell; that of means counts datasets, which may differ by method."""
    if name != "file" or "datasets" not in row:
        return row[name]
    system = "" if row["stage"] or row["method"] else " as one system"
    return f"{row[name]} of {row['datasets']} datasets{system}"


def _percent(row, name):
    low, high = row[f"{name}_95"]
    return f"{100 * row[name]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


if __name__ == "__main__":
    sys.exit(run_command(main))

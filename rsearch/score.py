"""Score anybody's predictions: python -m rsearch.score FILE.jsonl... [--json] [--macro]

Each line of a file, plain or gzip, is one question:

    {"question": "...", "golden_answers": ["..."], "prediction": "..."}

Golden answers are read as those of question files are, aliases such as
`answer_aliases` included; `prediction` is null where there is no answer; other fields
are ignored. The names of published files are read too: `golden_answer`, `answer`,
`possible_answers` or `answers` for the golden answers; `predicted_answer`, `pred_ans`
or, as in FlashRAG's intermediate_data.json, `output.pred` for the prediction. Where a
record has several, the first of this list counts. A JSON list does for lines.

A file is a row of the table; of a run's transcripts.jsonl each stage, method and
dataset is. Intervals of exact and cover exact match are Wilson's, F1's a bootstrap.

Answers are normalised as `rsearch.evaluate` does by default, "squad", the normaliser of
Search-R1 and R-Search; "r1_searcher" reproduces R1-Searcher's published numbers, and
"flashrag" has that package's F1.
"""

import json
import sys
from collections.abc import Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.evaluation.predictions import RUN, read_predictions
from rsearch.evaluation.scoring import METRICS, score_rows
from rsearch.evaluation.statistics import macro_mean
from rsearch.runtime.console import table
from rsearch.text.normalize import DEFAULT_NORMALIZER, NORMALIZERS
from rsearch.text.spelling import did_you_mean

HEADINGS = {"em": "exact match", "cover_em": "cover exact match", "f1": "F1"}
MACRO = "macro mean"

FLAGS = {
    "json": (False, "prints a JSON object a row, fractions from 0 to 1, and no table"),
    "macro": (False, "adds means over data sets, each counted once"),
    "normalizer": (
        DEFAULT_NORMALIZER,
        "how answers are normalised: squad, r1_searcher or flashrag",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Read the arguments, score the files, and print the table."""
    flags = parse_flags(argv, flags=FLAGS, positional=("FILE.jsonl...",))
    normalizer = flags["normalizer"]
    if normalizer not in NORMALIZERS:
        names = " or ".join(NORMALIZERS)
        hint = did_you_mean(normalizer, list(NORMALIZERS))
        raise ValueError(f"--normalizer={normalizer}: must be {names}{hint}")
    rows = [
        {"file": path, **dict(zip(RUN, run, strict=True)), "normalize": normalizer}
        | score_rows(predictions, normalizer)
        for path in dict.fromkeys(flags["FILE.jsonl"])
        for run, predictions in read_predictions(path).items()
    ]
    if flags["macro"]:
        rows += macro_rows(rows)
    if flags["json"]:
        for row in rows:
            known = {name: value for name, value in row.items() if value is not None}
            print(json.dumps(known, allow_nan=False))
        return 0
    about = [n for n in ("file", *RUN) if len({row[n] for row in rows}) > 1]
    lines = [
        [_cell(row, name) for name in (*about, "n")]
        + [_percent(row, n) for n in METRICS]
        for row in rows
    ]
    title = f"percent (95 % interval), answers normalised as {normalizer}"
    table(title, (*about, "questions", *map(HEADINGS.get, METRICS)), lines)
    return 0


def macro_rows(rows: Sequence[dict]) -> list[dict]:
    """Return a row for each stage and method that several data sets were asked by.

    Args:
        rows: with `file`, the names of RUN, and what `score_rows` returns. The data
            set of rows that name none is their file.

    Returns:
        Rows of the same keys, MACRO as the file; `n` counts the questions of all sets,
        and `datasets` these.

    Raises:
        ValueError: two rows of one data set, or no two sets of one stage and method.
    """
    by_system: dict = {}
    for row in rows:
        sets = by_system.setdefault((row["stage"], row["method"]), {})
        name = row["dataset"] or row["file"]
        if name in sets:
            both = sets[name], row
            sources = [r["file"] for r in both]
            settings = [r["setting"] for r in both]
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
        several = list(sets.values())
        row = {"file": MACRO, **dict.fromkeys(RUN), "stage": stage, "method": method}
        row["normalize"] = several[0]["normalize"]
        row |= {"n": sum(r["n"] for r in several), "datasets": len(several)}
        for name in METRICS:
            mean, interval = macro_mean(
                [r[name] for r in several], [r[f"{name}_95"] for r in several]
            )
            row |= {name: mean, f"{name}_95": list(interval)}
        means.append(row)
    if not means:
        raise ValueError("--macro: no two data sets of one stage and method")
    return means


def _cell(row, name):
    """Return a cell of the table; methods may differ in the sets of their means."""
    if name == "file" and "datasets" in row:
        return f"{row[name]} of {row['datasets']} data sets"
    return row[name]


def _percent(row, name):
    low, high = row[f"{name}_95"]
    return f"{100 * row[name]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


if __name__ == "__main__":
    sys.exit(run_command(main))

"""Print how the values that a step has stored differ from recomputed ones."""

import textwrap
from collections.abc import Mapping, Sequence

from rsearch.rollout.rollout_differences import METRIC, Comparison
from rsearch.runtime import console

COLUMNS = ("quantity", "values", "differ", "largest", "first in")


def report_differences(
    comparisons: Sequence[Comparison], stored: Sequence[Mapping]
) -> int:
    """Print which quantities are equal, and a table of those that differ.

    Args:
        stored: lines of the step's file, which name the questions.

    Returns:
        The exit code, which is 1 if anything differs.
    """
    different = [x for x in comparisons if x.num_different]
    equal = [x for x in comparisons if x.count and not x.num_different]
    equal_names = [f"{x.name} ({x.count} {x.unit})" for x in equal if x.unit]
    print_sentence(f"equal in rollouts: {', '.join(equal_names) or 'nothing'}")
    equal_names = [
        x.name.removeprefix(METRIC) for x in equal if x.name.startswith(METRIC)
    ]
    if equal_names:
        print_sentence(f"equal in metrics: {', '.join(equal_names)}")
    if not different:
        return 0
    rows = [
        (
            x.name,
            f"{x.count} {x.unit}".rstrip(),
            x.num_different,
            x.largest,
            x.first and ":".join(map(str, x.first)),
        )
        for x in different
    ]
    console.table("different, first in group:rollout", COLUMNS, rows)
    first_members = {x.first for x in different}
    for row in stored:
        member = row["group"], row["rollout"]
        if member in first_members:
            name = ":".join(map(str, member))
            print_sentence(f"{name} answers question {row['question_id']}")
    return 1


def print_sentence(text: str) -> None:
    """Print a sentence in as many lines as the terminal needs."""
    text = console.clean_line(text)
    print(textwrap.fill(text, console.columns(), subsequent_indent="  "))

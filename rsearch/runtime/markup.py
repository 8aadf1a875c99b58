"""Write tables as Markdown, LaTeX and CSV, in which text of others stays text."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from rsearch.runtime.console import NUMBER, clean_line

LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {c: f"\\textsuperscript{{{i}}}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    # LaTeX's default font encoding, OT1, has other glyphs in their places.
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a cell is its text, whatever marks that holds."""
    is_number = [
        all(NUMBER.fullmatch(line[i]) for line in lines) for i in range(len(columns))
    ]
    rule = ["---:" if right else "---" for right in is_number]

    def joined(cells):
        return f"| {' | '.join(map(markdown_text, cells))} |\n"

    return joined(columns) + joined(rule) + "".join(map(joined, lines))


def markdown_text(value: object) -> str:
    """Return a text on one line, without columns, markup, HTML or links in it."""
    text = clean_line(" ".join(str(value).split()))
    return re.sub(r"([\\`*|<>\[\]&~]|:(?=//)|(?<=www)\.)", r"\\\1", text)


def latex_table(
    columns: Sequence[str], lines: Sequence[Sequence[str]], *, num_texts: int
) -> str:
    """Return a LaTeX tabular.

    Args:
        columns: headings.
        lines: texts of the cells.
        num_texts: columns of text, from the left; the others are aligned right.
    """
    shape = "l" * num_texts + "r" * (len(columns) - num_texts)
    rows = [" & ".join(map(latex_text, line)) + r" \\" for line in [columns, *lines]]
    body = [rf"\begin{{tabular}}{{{shape}}}", rows[0], r"\hline", *rows[1:]]
    return "\n".join([*body, r"\end{tabular}\par", ""])


def latex_text(value: object) -> str:
    """Return a text on one line in which LaTeX finds no command."""
    return clean_line(str(value)).translate(LATEX)


def csv_table(columns: Sequence[str], lines: Iterable[Sequence]) -> str:
    """Return the lines as CSV below their headings."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *lines])
    return stream.getvalue()

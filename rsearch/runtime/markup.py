"""Write tables as Markdown, LaTeX and CSV; untrusted text in cells is escaped."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from rsearch.runtime.console import NUMBER, clean_line

LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {c: f"\\textsuperscript{{{i}}}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    # After the end of a line, \\ takes these as its arguments.
    | {"*": "{*}", "[": "{[}"}
    # LaTeX's default font encoding, OT1, has other glyphs at these positions.
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; each cell shows its text literally."""
    is_number = [
        all(NUMBER.fullmatch(line[i]) for line in lines) for i in range(len(columns))
    ]
    rule = ["---:" if is_right else "---" for is_right in is_number]

    def join_cells(cells):
        return f"| {' | '.join(map(markdown_text, cells))} |\n"

    return join_cells(columns) + join_cells(rule) + "".join(map(join_cells, lines))


def markdown_text(value: object) -> str:
    """Return a text on one line, escaped: no columns, markup, HTML or links."""
    text = clean_line(" ".join(str(value).split()))
    # Between two letters or digits, an underscore is no markup.
    mark = r"[\\`*|<>\[\]&~$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\."
    return re.sub(f"({mark})", r"\\\1", text)


def latex_table(
    columns: Sequence[str], lines: Sequence[Sequence[str]], *, num_text_columns: int
) -> str:
    """Return a LaTeX tabular.

    Args:
        num_text_columns: number of text columns, from the left; the others are
            right-aligned.
    """
    shape = "l" * num_text_columns + "r" * (len(columns) - num_text_columns)
    rows = [" & ".join(map(latex_text, line)) + r" \\" for line in [columns, *lines]]
    body = [rf"\begin{{tabular}}{{{shape}}}", rows[0], r"\hline", *rows[1:]]
    return "\n".join([*body, r"\end{tabular}\par", ""])


def latex_text(value: object) -> str:
    """Return a text on one line, escaped so that LaTeX finds no command in it."""
    text = clean_line(str(value)).translate(LATEX)
    return re.sub("-(?=-)", "-{}", text)  # two hyphens, as of a flag, become a dash


def csv_table(columns: Sequence[str], lines: Iterable[Sequence]) -> str:
    """Return the headings and the lines below them as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *lines])
    return stream.getvalue()

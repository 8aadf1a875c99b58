"""Draw a paper's figure: bars of rows by column, or curves of training by step."""

import io
from collections.abc import Sequence
from typing import NamedTuple

SUFFIXES = (".png", ".svg")
# Inches.
PANEL_HEIGHT, BAR_WIDTH, MARKER_WIDTH, LETTER_WIDTH = 2.8, 0.13, 0.5, 0.065
LINE_HEIGHT = 0.17  # of a line of the legend
MIN_WIDTH, MAX_WIDTH = 4.0, 12.0  # of a panel; of a figure
DPI = 150
PAPER = {"alpha": 0.45, "hatch": "///"}  # style of bars with the paper's numbers


class Bars(NamedTuple):
    """The bars of a row, one for each group.

    Attributes:
        color: number of the row, which has the same color in all panels.
        values: heights of the bars; None where there is no bar.
        intervals: (low, high) of each value, or None.
        is_paper: whether the numbers are the paper's.
    """

    label: str
    color: int
    values: Sequence[float | None]
    intervals: Sequence[tuple[float, float] | None]
    is_paper: bool


class Line(NamedTuple):
    """A curve: a row's values by step."""

    label: str
    color: int
    points: Sequence[tuple[int, float]]


class Panel(NamedTuple):
    """Axes of a figure, with bars or with lines.

    Attributes:
        groups: names of the groups of bars; () for lines.
    """

    title: str
    groups: Sequence[str]
    series: Sequence[Bars] | Sequence[Line]


def draw(suffix: str, title: str, panels: Sequence[Panel]) -> bytes:
    """Return a figure, as the contents of a file.

    Args:
        suffix: end of the file's name, one of SUFFIXES.
        panels: at least one panel.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panel_width = max(map(_width_of, panels))
    num_columns = min(int(MAX_WIDTH // panel_width), len(panels))
    num_rows = -(-len(panels) // num_columns)
    width = panel_width * num_columns
    # Text stays text in a .svg, and the same numbers give the same file.
    settings = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8}
    with rc_context(settings):
        figure = Figure(layout="constrained")
        figure.suptitle(_literal(title))
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(num_rows, num_columns, i + 1)
            axes.set_title(_literal(panel.title))
            (_draw_bars if panel.groups else _draw_lines)(axes, panel)
        handles = {}
        for axes in figure.axes:
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        label_width = max(map(len, handles)) * LETTER_WIDTH + MARKER_WIDTH
        columns = max(1, int(width // label_width))
        num_lines = -(-len(handles) // columns)
        height = PANEL_HEIGHT * num_rows + LINE_HEIGHT * (num_lines + 2)
        figure.set_size_inches(width, height)
        figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=columns
        )
        metadata = {"Date": None} if suffix == ".svg" else None
        stream = io.BytesIO()
        figure.savefig(stream, format=suffix[1:], dpi=DPI, metadata=metadata)
    return stream.getvalue()


def _width_of(panel):
    """Return the width of a panel, in inches."""
    num_bars = sum(
        value is not None
        for bars in (panel.series if panel.groups else ())
        for value in bars.values
    )
    width = BAR_WIDTH * (num_bars + len(panel.groups))
    return min(max(MIN_WIDTH, width), MAX_WIDTH)


def _draw_bars(axes, panel):
    """Draw groups of bars; a group is as wide as the bars that it has."""
    from matplotlib import colormaps

    colors = colormaps["tab20"].colors + colormaps["tab20b"].colors
    start, ticks, names = 0.0, [], []
    for group, name in enumerate(panel.groups):
        present_bars = [b for b in panel.series if b.values[group] is not None]
        if not present_bars:
            continue
        names.append(_literal(name))
        ticks.append(start + (len(present_bars) - 1) / 2)
        for i, bars in enumerate(present_bars):
            value, interval = bars.values[group], bars.intervals[group]
            error = interval and [[value - interval[0]], [interval[1] - value]]
            label = f"{bars.label}{', paper' if bars.is_paper else ''}"
            axes.bar(
                start + i,
                value,
                width=0.9,
                yerr=error,
                color=colors[bars.color % len(colors)],
                label=_literal(label),
                error_kw={"elinewidth": 0.6, "capsize": 1},
                **(PAPER if bars.is_paper else {}),
            )
        start += len(present_bars) + 1
    axes.set_xticks(ticks, names, rotation=30, ha="right", rotation_mode="anchor")


def _draw_lines(axes, panel):
    """Draw curves by step."""
    from matplotlib import colormaps

    colors = colormaps["tab10"].colors
    for line in panel.series:
        steps, values = zip(*line.points, strict=True)
        color = colors[line.color % len(colors)]
        axes.plot(steps, values, color=color, label=_literal(line.label))
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _literal(text):
    """Return a text on one line, in which matplotlib finds no formula."""
    return "".join(filter(str.isprintable, text)).replace("$", r"\$")

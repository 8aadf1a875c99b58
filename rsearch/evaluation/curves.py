"""Draw the metrics of runs, stage by stage, with several runs in one plot."""

import io
import itertools
import math
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rsearch.runtime.console import clean_line
from rsearch.runtime.metric_table import GROUPS, OTHER, describe_metric
from rsearch.runtime.metrics import METRICS, is_finite, read_metrics

COLORS = ("#1f6fb4", "#d9730d", "#2e9e5b", "#b0408f", "#7a5fd0", "#a8861c", "#5a6b7b")
STYLES = ("solid", "dashed", "dotted", "dashdot")  # the next once colors run out
COLUMNS = 4  # plots side by side in a file
PLOT_SIZE = (3.2, 1.9)  # inches
# Sizes in a legend, in inches.
LINE_HEIGHT, LETTER_WIDTH, MARKER_WIDTH, COLUMN_SPACE = 0.21, 0.085, 0.5, 0.3
MAX_POINTS = 400  # of a line; a longer one is drawn as means of its points
NOISY_POINTS = 30  # of a line, from which a running mean is drawn over it


class Curve(NamedTuple):
    """A metric of one stage, in each run that has it.

    Attributes:
        group: group of the metric table, or OTHER.
        lines: {run's name: (steps, values)}.
    """

    stage: str
    group: str
    name: str
    lines: dict[str, tuple[list[float], list[float]]]

    @property
    def is_constant(self) -> bool:
        """Return whether all values of all runs are the same number."""
        return len({y for _, values in self.lines.values() for y in values}) <= 1


def read_curves(runs: Mapping[str, pathlib.Path], stages: Sequence[str]) -> list[Curve]:
    """Return the metrics of runs, by stage and group.

    Args:
        runs: {name: directory}.
        stages: names of stages, in order; a run that lacks a stage is left out of the
            stage's curves.

    Returns:
        Curves without values that are not numbers, or not finite.
    """
    curves = []
    for stage in stages:
        lines: dict[str, dict] = {}
        for run, folder in runs.items():
            file = folder / stage / METRICS
            for row in read_metrics(file) if file.is_file() else ():
                for name, value in row.items():
                    if name != "step" and is_finite(value):
                        steps, values = lines.setdefault(name, {}).setdefault(
                            run, ([], [])
                        )
                        steps.append(row["step"] + 1)
                        values.append(float(value))
        order = [*GROUPS, OTHER]
        stage_curves = [
            Curve(stage, describe_metric(n)[0], n, run_lines)
            for n, run_lines in lines.items()
        ]
        curves += sorted(stage_curves, key=lambda curve: order.index(curve.group))
    return curves


def plot(
    path: str,
    runs: Mapping[str, pathlib.Path],
    stages: Sequence[str],
    metrics: Sequence[str] = (),
) -> bytes:
    """Return a picture of metrics, with plots row by row, as a file's contents.

    Args:
        path: the file; the end of its name sets the format.
        runs, stages: see `read_curves`.
        metrics: names of metrics, in order; () draws all that change.

    Raises:
        ValueError: no run has metrics, or none has one of those named.
    """
    curves = read_curves(runs, stages)
    for name in metrics:
        if all(c.name != name for c in curves):
            raise ValueError(
                f"--curves={name}: the runs have no such metric; see docs/metrics.md"
            )
    named_curves = [c for name in metrics for c in curves if c.name == name]
    curves = named_curves or [c for c in curves if not c.is_constant]
    if not curves:
        raise ValueError(f"--plot={path}: the runs have no {METRICS} with two steps")
    columns = min(COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    width = columns * PLOT_SIZE[0]
    labels, legend_columns, legend_height = _lay_out_legend([*runs], width)
    figure = new_figure(width, rows * PLOT_SIZE[1] + legend_height + 0.3)
    for i, curve in enumerate(curves):
        axes = figure.add_subplot(rows, columns, i + 1)
        draw_curve(axes, curve, [*runs])
        title = clean_line(f"{curve.stage}: {curve.name}")
        axes.set_title(title, fontsize=8, parse_math=False)
    handles = [axes.plot([], [], **line_style(i))[0] for i in range(len(runs))]
    legend = figure.legend(
        handles, labels, loc="outside upper center", ncols=legend_columns
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    kind = path.rpartition(".")[2]
    # Without a date, the same numbers give the same file.
    metadata = {"Date": None} if kind == "svg" else {}
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=110, metadata=metadata)
    return stream.getvalue()


def _lay_out_legend(names, width) -> tuple[list[str], int, float]:
    """Return a legend's labels, columns and height, all within a width in inches."""
    max_letters = int((width - MARKER_WIDTH) / LETTER_WIDTH)
    labels = [textwrap.fill(clean_line(name), max_letters) for name in names]
    label_lines = [label.splitlines() or [""] for label in labels]
    longest = max(len(line) for lines in label_lines for line in lines)
    entry_width = longest * LETTER_WIDTH + MARKER_WIDTH + COLUMN_SPACE
    columns = max(1, int((width + COLUMN_SPACE) / entry_width))
    num_lines = math.ceil(len(labels) / columns) * max(map(len, label_lines))
    return labels, columns, num_lines * LINE_HEIGHT


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of a size in inches."""
    from matplotlib.figure import Figure  # the import takes a second

    return Figure(figsize=(width, height), layout="constrained")


def draw_curve(axes: Any, curve: Curve, names: Sequence[str]) -> None:
    """Draw the lines of a curve; long ones are pale, under their running means.

    Args:
        names: names of all runs; a run's position decides its color.
    """
    for i, name in enumerate(names):
        if name in curve.lines:
            steps, values = (_thin_line(x) for x in curve.lines[name])
            style = line_style(i)
            if len(values) >= NOISY_POINTS:
                axes.plot(steps, values, **style, alpha=0.25)
                values = _running_mean(values, len(values) // 10)
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, marker=marker, markersize=3, **style)
    axes.tick_params(labelsize=7)
    axes.yaxis.get_offset_text().set_size(7)
    axes.locator_params(nbins=4)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def color_and_style(position: int) -> tuple[int, str]:
    """Return the index in COLORS, and the entry of STYLES, of the run at a position."""
    cycle, color = divmod(position, len(COLORS))
    return color, STYLES[cycle % len(STYLES)]


def line_style(position: int) -> dict[str, Any]:
    """Return matplotlib's settings of the line of the run at a position."""
    color, style = color_and_style(position)
    return {"color": COLORS[color], "linestyle": style, "linewidth": 1.4}


def curve_svg(curve: Curve, names: Sequence[str]) -> str:
    """Return the <svg> element of a curve, whose text is in the page's font and color.

    Args:
        names: names of all runs; see `draw_curve`.
    """
    figure = new_figure(*PLOT_SIZE)
    draw_curve(figure.add_subplot(), curve, names)
    import matplotlib

    # Ids in the file are salted digests: pictures on one page must not share them.
    settings = {"svg.fonttype": "none", "svg.hashsalt": f"{curve.stage} {curve.name}"}
    stream = io.StringIO()
    with matplotlib.rc_context(settings):
        options = {"metadata": {"Date": None}, "transparent": True}
        figure.savefig(stream, format="svg", **options)
    return stream.getvalue()


def _running_mean(values, reach):
    """Return for each value the mean of those at most `reach` points away."""
    stretches = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [math.fsum(stretch) / len(stretch) for stretch in stretches]


def _thin_line(values):
    """Return a line's values, or means of stretches if there are too many to see."""
    if len(values) <= MAX_POINTS:
        return values
    edges = [i * len(values) // MAX_POINTS for i in range(MAX_POINTS + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]

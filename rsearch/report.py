"""Draw runs on one page: python -m rsearch.report RUN RUN... --out=report.html

The page shows the results with their intervals and costs, the curves of all stages with
the runs overlaid, the configuration next to the defaults, transcripts, stored rollouts,
and the environment of each run. It is one file of less than 2 MB that needs no network
and runs no script.
"""

import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rsearch.config.recipes import defaults, diff, fields, parse_flags, run_command
from rsearch.evaluation import curves
from rsearch.evaluation.comparability import value_text
from rsearch.evaluation.pairs import pair_rows
from rsearch.evaluation.runs import (
    LAST,
    ComparedRun,
    config_difference,
    find_runs,
    read_run,
    run_names,
    select_rows,
    stages_of,
    start_row,
)
from rsearch.evaluation.transcript_views import evaluated_views, trained_views
from rsearch.runtime import files
from rsearch.runtime.console import clean, note
from rsearch.runtime.identity import read_record
from rsearch.runtime.metric_table import GROUPS, describe_metric

FLAGS = {
    "out": ("report.html", "the output file"),
    "transcripts": (50, "number of transcripts and rollouts to show, over all runs", 0),
}
TEMPLATE = pathlib.Path(__file__).parent / "evaluation" / "report.html"
MAX_BYTES = 2_000_000
SCALES = (1.0, 0.5, 0.25, 0.1, 0.0)  # shares of transcripts to try until they fit
TRAIN = "train"  # the command of a start that trained
# The last starts and launches of a run are shown, and the first ones that trained.
MAX_STARTS = 5
MAX_LAUNCHES = 20
LAUNCH_COLUMNS = ("start", "began", "ended", "exit code", "host", "directory")
LAUNCH_COLUMNS += ("command line",)
DARK_COLORS = ("#5aa5e0", "#f0a35e", "#5fcb8b", "#dd7fbf", "#a897f0", "#d6b85c")
DARK_COLORS += ("#9fb0c0",)
SCORES = {"f1": "F1", "cover_em": "cover-EM"}
COSTS = {"searches": "searches", "model_calls": "calls", "prompt_tokens": "tokens read"}
COSTS |= {"policy_tokens": "tokens written", "seconds": "seconds"}
SPEED = "policy_tokens_per_second"


def main(argv: Sequence[str]) -> int:
    """Read the arguments and the runs and write the page."""
    flags = parse_flags(argv, flags=FLAGS, positional=("RUN...",))
    files.check_output("out", flags["out"])
    paths = find_runs(flags["RUN"])
    runs = [read_run(path, needs_results=False) for path in paths]
    page = report_page(runs, num_transcripts=flags["transcripts"])
    files.replace(flags["out"], page.encode())
    note(f"written: {flags['out']}, {len(page.encode()) / 1e6:.2f} MB")
    return 0


def report_page(runs: Sequence[ComparedRun], *, num_transcripts: int) -> str:
    """Return the page of several runs as HTML.

    Args:
        num_transcripts: number of transcripts over all runs; fewer are shown if the
            page would be too large.

    Raises:
        ValueError: a file of a run is damaged, or the page is too large
            without any transcript.
    """
    names = run_names([run.path for run in runs])
    cards = [_run_card(i, *pair) for i, pair in enumerate(zip(names, runs))]
    plots = _stages(runs, cards)
    for scale in SCALES:
        number = int(scale * num_transcripts)
        page = _render(runs, cards, plots, _transcripts(runs, cards, number))
        if len(page.encode()) <= MAX_BYTES:
            return page
    raise ValueError(f"a page of {len(runs)} runs is too large; name fewer")


def _render(runs, cards, stages, transcripts) -> str:
    """Return the page, with all untrusted text escaped and cleaned."""
    import jinja2

    def clean_value(value):
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return clean(value) if is_text else value

    environment = jinja2.Environment(
        autoescape=True,
        finalize=clean_value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    sections = [("runs", "Runs")]
    results = _results(runs, cards)
    texts, numbers = ["run", "stage", "method", "dataset"], ["n", "EM", "95 % interval"]
    texts += ["setting"] if any(row["setting"] for row in results) else []
    sections += [("results", "Results")] if results else []
    sections += [("curves", "Curves")] if stages else []
    sections.append(("configuration", "Configuration"))
    sections += [("transcripts", "Transcripts")] if transcripts else []
    environments = _environments(runs, cards)
    sections += [("environment", "Environment")] if environments else []
    recipes = dict.fromkeys(run.config["name"] for run in runs)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=", ".join(card["name"] for card in cards),
        summary=f"{len(runs)} run{'s' * (len(runs) > 1)} of {', '.join(recipes)}",
        footer="Made by rsearch.report from the files of the runs.",
        sections=sections,
        runs=cards,
        results=results,
        result_columns=[*texts, *numbers, *SCORES.values(), *COSTS.values()],
        pairs=_pairs(runs, cards),
        stages=stages,
        configuration=_configuration(runs),
        transcripts=transcripts,
        environments=environments,
        launch_columns=LAUNCH_COLUMNS,
        colors=curves.COLORS,
        dark_colors=DARK_COLORS,
    )


def _main_rows(run) -> list[dict]:
    """Return the rows of a run's last stage with the policy's own protocol."""
    return select_rows(run, stage=LAST, method="protocol", dataset="all")


def _run_card(position, name, run):
    """Return the contents of a run's card on the page."""
    rows = _main_rows(run)
    # Rows of earlier versions may lack a number.
    main_row = {**dict.fromkeys(("n", "em", "em_95")), **rows[0]} if rows else None
    facts = [("recipe", run.config["name"]), ("seed", run.config["seed"])]
    facts.append(("stages", ", ".join(run.config["stages"]) or "none"))
    if main_row:
        start = start_row(run, main_row) or {}
        if start.get("em") is not None:
            facts.append(("EM before", f"{100 * start['em']:.1f}"))
        if main_row.get("searches") is not None:
            facts.append(("searches", f"{main_row['searches']:.2f}"))
    facts.append(("directory", str(run.path)))
    # Only other methods may have been evaluated; they are in the table of results.
    missing = "protocol not evaluated" if run.rows else "not evaluated yet"
    color, line = curves.color_and_style(position)
    card = {"name": name, "color": color, "line": line, "facts": facts}
    card["missing"] = missing
    return {**card, "main": main_row, "questions": main_row and _questions(main_row)}


def _setting(row) -> str:
    """Return what a row's evaluation changed in the run's configuration."""
    return row.get("setting") or ""  # earlier versions wrote none


def _questions(row) -> str:
    """Return a row's dataset and setting, which distinguish the rows of a method."""
    return ", ".join(filter(None, (row["dataset"], _setting(row))))


def _results(runs, cards) -> list[dict]:
    """Return the rows of the table of all results."""
    rows = []
    for run, card in zip(runs, cards, strict=True):
        main_rows = _main_rows(run)
        for row in run.rows:
            numbers = [
                "–" if row.get(name) is None else f"{100 * row[name]:.1f}"
                for name in SCORES
            ]
            numbers += [
                "–" if row.get(name) is None else _cost(row[name]) for name in COSTS
            ]
            rows.append(
                {
                    **{name: row.get(name) for name in ("n", "em", "em_95")},
                    **{name: row[name] for name in ("stage", "method", "dataset")},
                    "setting": _setting(row),
                    "run": card,
                    "numbers": numbers,
                    "is_main": any(row is other for other in main_rows),
                }
            )
    return rows


def _cost(value):
    """Return a number in four digits, but a large one as an integer: 12,346 seconds."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _pairs(runs, cards) -> list[dict]:
    """Return the differences between main rows on the same questions."""
    sources = [
        (i, run.path, row) for i, run in enumerate(runs) for row in _main_rows(run)
    ]
    pairs, _ = pair_rows([(path, row) for _, path, row in sources])
    shown_pairs = []
    for pair in pairs:
        difference, (low, high) = pair.differences["em"]
        numbers = [f"{100 * difference:+.1f}", f"{100 * low:+.1f} to {100 * high:+.1f}"]
        numbers.append(pair.p_text or "–")
        pair_sources = (sources[pair.row], sources[pair.baseline])
        labels = [(cards[i], _questions(row)) for i, _, row in pair_sources]
        shown_pairs.append({"rows": labels, "n": pair.n, "numbers": numbers})
    return shown_pairs


def _stages(runs, cards) -> list[dict]:
    """Return the plots of each stage, grouped as in the metric table."""
    names = [card["name"] for card in cards]
    folders = {name: run.path for name, run in zip(names, runs, strict=True)}
    all_curves = curves.read_curves(folders, stages_of(runs))
    all_curves += _speeds(runs, names, all_curves)
    stages = []
    for stage in stages_of(runs):
        groups = []
        for group, description in {**GROUPS, curves.OTHER: "other fields"}.items():
            members = [c for c in all_curves if (c.stage, c.group) == (stage, group)]
            plots = [_plot(c, cards) for c in members if not c.is_constant]
            constant = [
                (c.name, next(iter(c.lines.values()))[1][-1])
                for c in members
                if c.is_constant
            ]
            if members:
                entry = {"name": group, "description": description, "plots": plots}
                groups.append({**entry, "constant": constant})
        if groups:
            stages.append({"name": stage, "groups": groups})
    return stages


def _speeds(runs, names, all_curves) -> list[curves.Curve]:
    """Return the curves of the tokens per second that policies wrote in rollouts.

    The speed is the rollouts' mean length times their number, over rollout_seconds. It
    is unknown if steps asked additional questions (rl.dynamic_sampling_rounds).
    """
    speeds: dict[str, dict] = {}
    by_name = {(c.stage, c.name): c.lines for c in all_curves}
    for (stage, metric), lines in by_name.items():
        seconds = by_name.get((stage, "rollout_seconds"), {})
        rounds = by_name.get((stage, "questions_asked"), {})
        for run, name in (
            zip(runs, names, strict=True) if metric == "policy_tokens" else ()
        ):
            if name not in lines or name not in seconds or name in rounds:
                continue
            num_rollouts = 1
            for field in ("rl.questions_per_step", "rollout.group_size"):
                override = f"overrides.{stage}.{field}"
                num_rollouts *= run.config.get(override, run.config[field])
            step_seconds = dict(zip(*seconds[name], strict=True))
            points = [
                (step, num_rollouts * tokens / step_seconds[step])
                for step, tokens in zip(*lines[name], strict=True)
                if step_seconds.get(step)
            ]
            if points:
                speeds.setdefault(stage, {})[name] = tuple(map(list, zip(*points)))
    return [
        curves.Curve(stage, "perf", SPEED, run_lines)
        for stage, run_lines in speeds.items()
    ]


def _plot(curve, cards) -> dict:
    """Return the plot of a curve with its title and the last value of each run."""
    from markupsafe import Markup  # a dependency of jinja2

    by_name = {card["name"]: card for card in cards}
    last = [(by_name[name], values[-1]) for name, (_, values) in curve.lines.items()]
    meaning = describe_metric(curve.name)[1]
    if curve.name == SPEED:
        meaning = "mean length of rollouts times their number, over rollout_seconds"
    svg = _apply_theme(curves.curve_svg(curve, [*by_name]))
    return {"name": curve.name, "meaning": meaning, "last": last, "svg": Markup(svg)}


def _apply_theme(svg: str) -> str:
    """Return an <svg> element with the page's colors and font, and fewer digits.

    The element holds only shapes and the numbers of the axes, no untrusted text.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for i, color in enumerate(curves.COLORS):
        svg = svg.replace(color, f"var(--c{i})")
    svg = svg.replace("#000000", "var(--soft)").replace("#b0b0b0", "var(--line)")
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    # Only shapes lose digits: the numbers of the axes are text elements.
    return re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\d\.\d)\d+", r"\1", d[0]), svg)


def _configuration(runs) -> list[dict]:
    """Return the fields that differ from the defaults or between the runs."""
    base = fields(defaults())
    changed_fields = {name for run in runs for name, _, _ in diff(base, run.config)}
    differing_fields = config_difference(runs)
    return [
        {
            "name": name,
            "default": value_text(base[name]) if name in base else "–",
            "cells": [
                value_text(run.config[name]) if name in run.config else "–"
                for run in runs
            ],
            "differs": name in differing_fields,
        }
        for name in sorted(changed_fields | differing_fields.keys())
    ]


def _transcripts(runs, cards, number) -> list[dict]:
    """Return groups of transcripts, at most `number` over all runs."""
    groups = []
    for i, (run, card) in enumerate(zip(runs, cards, strict=True)):
        share = number // len(runs) + (i < number % len(runs))
        stored_stages = [
            s for s in run.config["stages"] if (run.path / s / "rollouts").is_dir()
        ]
        trained_groups = []
        for stage in stored_stages:
            views = trained_views(run.path / stage, share // 2 // len(stored_stages))
            trained_groups.append((f"rollouts that {stage} was trained on", views))
        num_trained = sum(len(views) for _, views in trained_groups)
        views = evaluated_views(
            run.path, run.config["stages"], max(share - num_trained, 0)
        )
        right_views = [v for v in views if v["scores"].get("em")]
        wrong_views = [v for v in views if v["scores"] and not v["scores"]["em"]]
        unscored_views = [v for v in views if not v["scores"]]
        stage = views[0]["stage"] if views else ""
        titled_views = [
            (f"{stage}, wrong answers", wrong_views),
            (f"{stage}, right answers", right_views),
        ]
        titled_views += [(f"{stage}, answers", unscored_views), *trained_groups]
        groups += [
            {"run": card, "title": title, "views": members}
            for title, members in titled_views
            if members
        ]
    return groups


def _environments(runs, cards) -> list[dict]:
    """Return the starts and launches in the run.json of each run that has one."""
    environments = []
    for run, card in zip(runs, cards, strict=True):
        record = read_record(run.path)
        if record is None:
            continue
        starts, launches = record["starts"], record.get("launches", [])
        numbers = range(1, len(starts) + 1)
        training_starts = [n for n in numbers if starts[n - 1]["command"] == TRAIN]
        for number in _shown_numbers(numbers, training_starts, MAX_STARTS):
            start = starts[number - 1]
            title = f"start {number} of {len(starts)} {start.get('time', '')}".strip()
            entry = {"run": card, "title": title, "fields": _flat(start)}
            environments.append(entry)
        if launches:
            numbers = range(len(launches))
            rows = [_launch_cells(launch) for launch in launches]
            training_launches = [
                n for n in numbers if launches[n]["start"] in training_starts
            ]
            shown_launches = _shown_numbers(numbers, training_launches, MAX_LAUNCHES)
            title = f"the last {min(MAX_LAUNCHES, len(rows))} of {len(rows)} launches"
            if len(shown_launches) > MAX_LAUNCHES:
                title = f"the first launch that trained, and {title}"
            rows = [rows[n] for n in shown_launches]
            environments.append({"run": card, "title": title, "launches": rows})
    return environments


def _shown_numbers(numbers, training, count):
    """Return the last `count` numbers, preceded by the first that trained.

    Otherwise later evaluations would push out the one that trained the policy.
    """
    last = [*numbers][-count:]
    return [n for n in training[:1] if n not in last] + last


def _launch_cells(launch) -> list[str]:
    """Return the cells of LAUNCH_COLUMNS for an entry of `launches`."""
    is_killed, code = launch.get("killed"), launch.get("exit_code")
    return [
        *(str(launch[name]) for name in ("start", "began")),
        launch["ended"] or ("killed" if is_killed else "no end recorded"),
        "-" if code is None else str(code),
        launch["host"],
        launch["directory"],
        shlex.join(launch["argv"]),
    ]


def _flat(start: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each field of a start, without the digests of files."""
    code = {name: x for name, x in start["code"].items() if name != "files"}
    start = {**start, "code": code}
    return [
        (name, " ".join(map(str, v)) if isinstance(v, list) else value_text(v))
        for name, v in fields(start).items()
    ]


if __name__ == "__main__":
    sys.exit(run_command(main))

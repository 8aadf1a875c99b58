"""What a recipe would take on a TPU slice, compiled for it on a machine without one.

    python -m rsearch.plan --config=configs/r_search.py --topology=v5p:2x2x4 \\
        --config.mesh.fsdp=4 --config.mesh.tensor=4

Each program of a step (prefill, decode, score, update, ...) is compiled ahead of time
for these chips; nothing is loaded, and no array is made. Told are the memory of each
device against what it has, operations, bytes moved and sent, and the least time that
these allow (the roofline). A step is taken at its longest: every rollout writes and
reads all that its budgets allow. Of a data stage, and of the evaluation of what was
imitated, a step fills all rows once. For GPUs, which XLA compiles for only where there
is one, the same is reckoned from the traced programs (--topology=a100x8).
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from ml_collections import ConfigDict

from rsearch.config.checks import validate
from rsearch.config.recipes import parse_command_line, print_config
from rsearch.config.stage_plan import check_plan, kind_of, stage_configs
from rsearch.plan.costs import GB, check_context, memory_of, shape_of
from rsearch.plan.machines import GPU_SHARE, Machine, find_machine
from rsearch.plan.programs import filled_once, make_frame, stage_programs
from rsearch.plan.roofline import Estimate, estimate, reckoned
from rsearch.runtime import console, files
from rsearch.setup.checks import check_layout, check_names

FLAGS = {
    "topology": (None, "TPU slice to compile for, such as v5p:2x2x4, or a100x8"),
    "stage": ("", "the stage to plan; every one where not given"),
    "out": ("", "file for the same numbers as JSON"),
}
HEADS = (
    *("stage", "program", "calls", "GB in use", "of", "PFLOPs", "TB moved", "GB sent"),
    *("least seconds", "bound by"),
)
ADVICE = (
    "what to change: more chips (--topology, config.mesh.fsdp), config.mesh.tensor, "
    "fewer config.rollout.max_concurrent, config.model.remat=True, a smaller "
    "micro_batch, or config.model.dtype=bfloat16"
)


def main(
    config: ConfigDict, machine: Machine, *, only: str = ""
) -> dict[str, list[Estimate]]:
    """Return {stage: the estimates of its programs}, in order.

    What evaluates an imitation stage is beside it, as "<stage>, evaluation". A data
    stage whose model the run makes itself is left out.

    Args:
        config: of the run.
        machine: that it would run on.
        only: a stage; "" is all.

    Raises:
        ValueError: the configuration is not valid, or nothing can be compiled for it.
    """
    validate(config)
    check_names(config)
    check_plan(config)
    stages = stage_configs(config)
    if only:
        stages = [
            (stage, config_of_stage)
            for stage, config_of_stage in stages
            if stage == only
        ]
    if not stages:
        there = ", ".join(config.stages)
        raise ValueError(f"--stage={only}: must be one of {there}")
    estimates = {}
    for stage, config_of_stage in stages:
        validate(config_of_stage, num_devices=machine.num_devices)
        if (
            kind_of(stage) == "curate"
            and shape_of(config_of_stage.model.source, config_of_stage) is None
        ):
            continue
        frame = make_frame(config_of_stage, stage, machine)
        spec = frame.model.spec
        check_context(config_of_stage, stage, spec)
        check_layout(config_of_stage, spec)
        size, here = machine.num_devices, machine.host_devices
        memory = memory_of(config_of_stage, stage, spec, size, host_devices=here)
        programs = stage_programs(frame, stage, machine)
        estimates[stage] = _estimates(programs, memory, machine, stage)
        if memory.evaluating:
            name = f"{stage}, evaluation"
            programs = filled_once(
                make_frame(config_of_stage, "rl", machine), "sft", machine
            )
            memory = dataclasses.replace(memory, resident={}, rolling=memory.evaluating)
            estimates[name] = _estimates(programs, memory, machine, name)
    return estimates


def _estimates(programs, memory, machine, name):
    """Return the estimate of each program, compiled or else computed by hand."""
    if not machine.is_compiled_for:
        return [reckoned(program, memory) for program in programs]
    programs = console.progress(programs, f"{name}: programs compiled")
    return [estimate(program, machine) for program in programs]


def rows_of(
    estimates_of_stages: dict[str, list[Estimate]], machine: Machine
) -> list[dict]:
    """Return a row for each program in JSON values, per device."""
    rows = []
    for stage, estimates in estimates_of_stages.items():
        for item in estimates:
            seconds = item.seconds(machine.chip)
            bound = max(seconds, key=seconds.get)
            rows.append(
                {
                    "stage": stage,
                    "program": item.name,
                    "calls": item.calls,
                    "peak_bytes": item.peak,
                    "memory_bytes": machine.chip.memory,
                    "flops": item.flops,
                    "moved_bytes": item.moved.memory,
                    "sent_bytes": item.moved.sent,
                    "collectives": {op: n for op, (n, _) in item.moved.links.items()},
                    "seconds": seconds[bound],
                    "bound": bound,
                    "compile_seconds": item.compile_seconds,
                }
            )
    return rows


def show(rows: list[dict], config: ConfigDict, machine: Machine) -> bool:
    """Print the tables; return whether all fits."""
    shown = [
        (
            row["stage"],
            row["program"],
            round(row["calls"], 1),
            round(row["peak_bytes"] / GB, 2),
            round(row["memory_bytes"] / GB, 1),
            round(row["flops"] / 1e15, 3),
            round(row["moved_bytes"] / 1e12, 3),
            round(row["sent_bytes"] / GB, 2) if machine.is_compiled_for else "?",
            round(row["seconds"], 3),
            row["bound"],
        )
        for row in rows
    ]
    chips = f"{machine.num_devices} devices on {machine.num_hosts} hosts"
    if not machine.is_compiled_for:
        chips += f", {GPU_SHARE:.0%} of their memory"
    console.table(f"{config.name} on {machine.name}: {chips}, each", HEADS, shown)
    for stage in dict.fromkeys(row["stage"] for row in rows):
        total = sum(row["seconds"] for row in rows if row["stage"] == stage)
        console.note(
            f"{stage}: a step takes {total:,.1f} s at least, if every rollout uses its "
            "whole budget and nothing waits"
        )
    full = [row for row in rows if row["peak_bytes"] > row["memory_bytes"]]
    for row in full:
        console.note(
            f"does not fit: {row['stage']}, {row['program']}: "
            f"{row['peak_bytes'] / GB:.1f} GB of {row['memory_bytes'] / GB:.0f} GB"
        )
    if not machine.is_compiled_for:
        console.note(
            "an estimate: nothing was compiled, and what devices send each other, or "
            "XLA holds for a moment, is not in it"
        )
    planned = {row["stage"] for row in rows}
    not_planned = ", ".join(stage for stage in config.stages if stage not in planned)
    fits = f"fits {machine.name}" + (
        f"; not planned: {not_planned}" if not_planned else ""
    )
    console.note(ADVICE if full else fits)
    return not full


def command(argv: Sequence[str]) -> int:
    """Run the command; return 1 where the plan does not fit."""
    config, values = parse_command_line(argv, flags=FLAGS)
    if values["print_config"]:
        print_config(config)
        return 0
    if values["topology"] is None:
        raise ValueError("--topology: name one, such as v5p:2x2x4")
    if values["out"]:
        files.check_output("out", values["out"])
    machine = find_machine(values["topology"])
    rows = rows_of(main(config, machine, only=values["stage"]), machine)
    fits = show(rows, config, machine)
    if values["out"]:
        pathlib.Path(values["out"]).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if fits else 1

"""What a recipe would take on a TPU slice, compiled for it on a machine without one.

    python -m rsearch.plan --config=configs/r_search.py --topology=v5p:2x2x4 \\
        --config.mesh.fsdp=4 --config.mesh.tensor=4

Each program of a step (prefill, decode, score, update, ...) is compiled ahead of time
for these chips; nothing is loaded, and no array is made. Told are the memory of each
device against what it has, operations, bytes moved and sent, and the least time that
these allow (the roofline). A step is taken at its longest: every rollout writes and
reads all that its budgets allow. Of a data stage, and of the evaluation of what was
imitated, a step fills all slots once. For GPUs, which XLA compiles for only where there
is one, the same is reckoned from the traced programs (--topology=a100x8).
"""

import dataclasses
import json
import pathlib

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


def main(config, machine: Machine, *, only: str = "") -> dict[str, list[Estimate]]:
    """{stage: the estimates of its programs}, in order.

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
        stages = [(stage, own) for stage, own in stages if stage == only]
    if not stages:
        there = ", ".join(config.stages)
        raise ValueError(f"--stage={only}: must be one of {there}")
    found = {}
    for stage, own in stages:
        validate(own, num_devices=machine.num_devices)
        if kind_of(stage) == "curate" and shape_of(own.model.source, own) is None:
            continue
        frame = make_frame(own, stage, machine)
        spec = frame.model.spec
        check_context(own, stage, spec)
        check_layout(own, spec)
        size, here = machine.num_devices, machine.host_devices
        memory = memory_of(own, stage, spec, size, host_devices=here)
        programs = stage_programs(frame, stage, machine)
        found[stage] = _estimates(programs, memory, machine, stage)
        if memory.evaluating:
            name = f"{stage}, evaluation"
            programs = filled_once(make_frame(own, "rl", machine), "sft", machine)
            memory = dataclasses.replace(memory, resident={}, rolling=memory.evaluating)
            found[name] = _estimates(programs, memory, machine, name)
    return found


def _estimates(programs, memory, machine, name):
    """Of each program, compiled or, where that cannot be, reckoned."""
    if not machine.is_compiled_for:
        return [reckoned(program, memory) for program in programs]
    programs = console.progress(programs, f"{name}: programs compiled")
    return [estimate(program, machine) for program in programs]


def rows_of(found: dict[str, list[Estimate]], machine: Machine) -> list[dict]:
    """A row for each program, as JSON values; bytes and operations of each device."""
    rows = []
    for stage, estimates in found.items():
        for one in estimates:
            seconds = one.seconds(machine.chip)
            bound = max(seconds, key=seconds.get)
            rows.append(
                {
                    "stage": stage,
                    "program": one.name,
                    "calls": one.calls,
                    "peak_bytes": one.peak,
                    "memory_bytes": machine.chip.memory,
                    "flops": one.flops,
                    "moved_bytes": one.moved.memory,
                    "sent_bytes": one.moved.sent,
                    "collectives": {op: n for op, (n, _) in one.moved.links.items()},
                    "seconds": seconds[bound],
                    "bound": bound,
                    "compile_seconds": one.compile_seconds,
                }
            )
    return rows


def show(rows: list[dict], config, machine: Machine) -> bool:
    """Prints the tables; whether all fits."""
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
    left = ", ".join(stage for stage in config.stages if stage not in planned)
    fits = f"fits {machine.name}" + (f"; not planned: {left}" if left else "")
    console.note(ADVICE if full else fits)
    return not full


def command(argv) -> int:
    """The command; 1 where it does not fit."""
    config, given = parse_command_line(argv, flags=FLAGS)
    if given["print_config"]:
        print_config(config)
        return 0
    if given["topology"] is None:
        raise ValueError("--topology: name one, such as v5p:2x2x4")
    if given["out"]:
        files.check_output("out", given["out"])
    machine = find_machine(given["topology"])
    rows = rows_of(main(config, machine, only=given["stage"]), machine)
    fits = show(rows, config, machine)
    if given["out"]:
        pathlib.Path(given["out"]).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if fits else 1

"""Plan what a recipe takes on a TPU slice, compiling for it on a machine without one.

    python -m rsearch.plan --config=configs/r_search.py --topology=v5p:2x2x4 \\
        --config.mesh.fsdp=4 --config.mesh.tensor=4

Each program of a step (prefill, decode, score, update, ...) is compiled ahead of time
for these chips; nothing is loaded, and no array is made. For each device, the table
shows the memory in use and in total, operations, bytes moved and sent, and the least
time that these allow (the roofline). A step is planned at its longest: every rollout
writes and reads all that its budgets allow. A step of a data stage, or of the
evaluation after imitation, fills all rows once. For GPUs (--topology=a100x8) the
kernels are listed as well if JAX's CUDA plugin is installed (launch/gpu_plan.sh).
Without the plugin, and for a slice named by its type (--topology=v5p-32), the same is
estimated from the traced programs.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from rsearch.config.recipes import (
    apply_overrides,
    parse_command_line,
    print_config,
    validate,
)
from rsearch.config.stage_plan import (
    WEIGHT_KINDS,
    check_plan,
    kind_of,
    num_decode_rows,
    rollouts_of_step,
    stage_configs,
)
from rsearch.plan.costs import (
    GB,
    HOST_DEVICES,
    MOST_ROWS,
    SHARE,
    check_context,
    check_shared_devices,
    fewest_devices,
    memory_of,
    rollout_bytes,
    rollouts_of_question,
    shape_of,
    with_rows,
)
from rsearch.plan.likely import Lengths, likely_shares, read_lengths
from rsearch.plan.machines import GPU_SHARE, Machine, find_machine
from rsearch.plan.programs import (
    ROLLOUT_PROGRAMS,
    filled_once,
    make_context,
    stage_programs,
)
from rsearch.plan.roofline import (
    BANDWIDTH_EFFICIENCY,
    FLOPS_EFFICIENCY,
    Estimate,
    estimate,
    estimate_traced,
)
from rsearch.runtime import console, files
from rsearch.setup.checks import check_layout, check_names

FLAGS = {
    "topology": (None, "TPU slice to compile for, such as v5p:2x2x4, or a100x8"),
    "stage": ("", "stage to plan; all stages if not given"),
    "lengths": (
        "",
        "lengths of a likely step's rollouts: RUN/rl/metrics.jsonl, or "
        "searches=2,policy_tokens=300,tokens=1700",
    ),
    "out": ("", "file to write the same numbers to, as JSON"),
}
FULL = 0.95  # share of a device's memory; the rest is for what XLA holds temporarily
EVALUATION = "evaluation"  # in place of a stage's name
HEADS = (
    *("stage", "program", "calls", "GB in use", "of", "PFLOPs", "TB moved", "GB sent"),
    *("least seconds", "bound by"),
)
ADVICE = (
    "what to change: more chips (--topology, config.mesh.fsdp), config.mesh.tensor, "
    "fewer config.rollout.max_concurrent, config.model.remat=True, a smaller "
    "micro_batch, or config.model.dtype=bfloat16"
)


class Cost(NamedTuple):
    """The cost of a stage, or of an evaluation, on a machine.

    Attributes:
        steps: number of steps of a stage; if no weights change, how often all rows are
            filled. None if the number of questions is not known in advance.
        devices: devices of the machine, or the fewest that the mesh allows.
        gb: 10^9 bytes on each device at the peak; None for an unknown model.
        seconds: least seconds of a step; None without a machine.
        settings: "field=value" overrides that the machine needs; none changes a result.
        problem: why the machine cannot run it; "" if it can.
    """

    steps: int | None
    devices: int
    gb: float | None = None
    seconds: float | None = None
    settings: tuple[str, ...] = ()
    problem: str = ""

    @property
    def hours(self) -> float | None:
        """Return the least hours of all steps; None if they are not known."""
        if self.steps is None or self.seconds is None:
            return 0.0 if self.steps == 0 else None
        return self.steps * self.seconds / 3600


def stage_costs(
    config: ConfigDict, machine: Machine | None, *, last: str
) -> list[tuple[str, Cost]]:
    """Return (stage, its Cost) for the stages of a run, in order.

    Args:
        machine: machine to plan for; None takes the fewest devices each mesh allows.
    """
    costs = []
    for stage, c in stage_configs(config):
        c = _with_rows(c, stage, machine)
        kind, per_question = kind_of(stage), rollouts_of_question(c)
        steps = c[kind].steps if kind != "curate" else None
        if kind == "curate" and (c.data.max_train or not per_question):
            steps = _fills(c, c.data.max_train * per_question, machine)
        costs.append((stage, _cost(c, stage, machine, steps)))
        if stage == last:
            break
    return costs


def _with_rows(c, stage, machine):
    """Return a stage's configuration, with rollouts that fill the machine's memory."""
    if machine is None or c.rollout.max_concurrent:
        return c
    spec = shape_of(c.model.source, c)
    if spec is None:
        return c
    return with_rows(
        c,
        kind_of(stage),
        spec,
        num_devices=machine.num_devices,
        host_devices=machine.host_devices,
        memory=SHARE * machine.chip.memory,
    )


def evaluation_cost(
    c: ConfigDict, machine: Machine | None, num_questions: int | None
) -> Cost:
    """Return the Cost of asking a policy questions with its protocol.

    Each is asked config.eval.samples times for each of config.eval.seeds seeds.

    Args:
        machine: see `stage_costs`.
        num_questions: number of questions of all sets together; None if not known.
    """
    c = _with_rows(apply_overrides(c, {"trains": "policy"}), "sft", machine)
    fills = None
    if num_questions:
        fills = _fills(c, num_questions * c.eval.samples * c.eval.seeds, machine)
    return _cost(c, EVALUATION, machine, fills)


def _fills(c, num_rollouts, machine):
    """Return how often these rollouts fill all rows of all hosts."""
    hosts = machine.num_hosts if machine else 1
    return math.ceil(num_rollouts / (hosts * (c.rollout.max_concurrent or MOST_ROWS)))


def _cost(c, stage, machine, steps):
    """Return the Cost of a stage, or of EVALUATION."""
    devices, is_evaluation = fewest_devices(c), stage == EVALUATION
    try:
        if machine is None:
            return Cost(steps, devices, _peak_gb(c, stage, devices))
        devices = machine.num_devices
        settings = _settings_of_machine(c, stage, machine)
        c = apply_overrides(c, settings)
        if not is_evaluation:
            validate(c, num_devices=devices)
        estimate_programs = _of_evaluation if is_evaluation else _of_stage
        estimates = estimate_programs(c, stage, machine)
    except ValueError as error:
        return Cost(steps, devices, problem=str(error))
    seconds = sum(max(e.seconds(machine.chip).values()) for e in estimates)
    peak = max(e.peak for e in estimates)
    names = tuple(f"{name}={value}" for name, value in settings.items())
    is_full = peak > machine.chip.memory
    problem = f"more than {machine.chip.memory / GB:.1f} GB" if is_full else ""
    return Cost(steps, devices, peak / GB, seconds, names, problem)


def _peak_gb(c, stage, devices):
    """Return each device's peak memory in 10^9 bytes; None for an unknown model."""
    spec = shape_of(c.model.source, c)
    if spec is None:
        return None
    host_devices, is_evaluation = min(devices, HOST_DEVICES), stage == EVALUATION
    kind = "sft" if is_evaluation else stage
    memory = memory_of(c, kind, spec, devices, host_devices=host_devices)
    return (sum(memory.evaluating.values()) if is_evaluation else memory.peak) / GB


def _settings_of_machine(c, stage, machine):
    """Return {field: value} that a machine needs; none of them changes a result."""
    settings, kind = {}, kind_of(stage)
    shards = machine.num_devices // c.mesh.tensor or 1
    if kind in WEIGHT_KINDS and c[kind].micro_batch % shards:
        settings[f"{kind}.micro_batch"] = math.lcm(c[kind].micro_batch, shards)
    if machine.host_devices % c.mesh.tensor:
        settings["rollout.global_mesh"] = True
    return settings


def checked_stages(
    config: ConfigDict, machine: Machine, *, only: str = ""
) -> list[tuple[str, ConfigDict]]:
    """Check a configuration, and return (stage, its configuration) for each to plan.

    If config.rollout.max_concurrent is 0, it becomes the number of rollouts that fill
    the machine's memory.

    Args:
        only: the stage to plan; "" plans all.

    Raises:
        ValueError: the configuration is not valid, or not on this machine.
    """
    validate(config)
    check_names(config)
    check_plan(config)
    if only and only not in config.stages:
        raise ValueError(f"--stage={only}: must be one of {', '.join(config.stages)}")
    stages = []
    for stage, c in stage_configs(config):
        if only in ("", stage):
            check_shared_devices(c)
            validate(c, num_devices=machine.num_devices)
            stages.append((stage, _with_rows(c, stage, machine)))
    return stages


def estimates_of_stages(
    stages: Sequence[tuple[str, ConfigDict]], machine: Machine
) -> dict[str, list[Estimate]]:
    """Return {stage: the estimates of its programs}, in order.

    The evaluation after an imitation stage has its own key, "<stage>, evaluation". A
    data stage whose model the run makes itself is left out.

    Args:
        stages: stages from `checked_stages`.

    Raises:
        ValueError: a stage's programs cannot be compiled, or no stage's model is known.
    """
    estimates = {}
    known_stages = [
        (stage, c)
        for stage, c in stages
        if kind_of(stage) != "curate" or shape_of(c.model.source, c) is not None
    ]
    # If there is none, the first one is refused: a plan of nothing would always fit.
    for stage, c in known_stages or stages:
        estimates[stage] = _of_stage(c, stage, machine)
        if _memory(c, stage, machine).evaluating:
            name = f"{stage}, evaluation"
            estimates[name] = _of_evaluation(c, name, machine)
    return estimates


def _of_stage(c, stage, machine):
    """Return the estimates of a stage's programs."""
    one_host_config, one_host = _on_one_host(c, machine)
    frame = make_context(one_host_config, stage, one_host)
    spec = frame.model.spec
    check_context(c, stage, spec)
    check_layout(c, spec)
    programs = stage_programs(frame, stage, one_host)
    return _estimates(programs, _memory(c, stage, machine), machine, stage)


def _of_evaluation(c, name, machine):
    """Return the estimates of the programs that evaluate a policy."""
    one_host_config, one_host = _on_one_host(c, machine)
    frame = make_context(one_host_config, "rl", one_host)
    programs = filled_once(frame, "sft", one_host)
    memory = _memory(c, "sft", machine)
    memory = dataclasses.replace(memory, resident={}, rolling=memory.evaluating)
    return _estimates(programs, memory, machine, name)


def _memory(c, stage, machine):
    """Return the Memory that a stage takes on each device of a machine.

    Args:
        machine: with all of its hosts, since each holds the passages' vectors.
    """
    spec = shape_of(c.model.source, c)
    size, host_devices = machine.num_devices, machine.host_devices
    return memory_of(c, stage, spec, size, host_devices=host_devices)


def _on_one_host(c, machine):
    """Return (configuration, machine) with one host for all that stand-ins represent.

    Programs are traced for both. It has the rows of all hosts, for the policy and for
    the other models.

    Raises:
        ValueError: `tensor` spans hosts, but each rolls out on its own devices.
    """
    hosts = machine.hosts
    if hosts < 2:
        return c, machine
    if machine.host_devices % c.mesh.tensor and not c.rollout.global_mesh:
        raise ValueError(
            f"config.mesh.tensor = {c.mesh.tensor}: must divide the "
            f"{machine.host_devices} devices of each host, as each rolls out on its own"
        )
    rows = {
        f"rollout.{name}": hosts * c.rollout[name]
        for name in ("max_concurrent", "cache_tokens")
    }
    for name, section in c.models.items():
        rows[f"models.{name}.max_concurrent"] = hosts * section.max_concurrent
    return apply_overrides(c, rows), dataclasses.replace(machine, hosts=1)


def _estimates(programs, memory, machine, name):
    """Return the estimate of each program, which is compiled or else only traced."""
    if not machine.is_compiled_for:
        return [estimate_traced(program, memory) for program in programs]
    programs = console.progress(programs, f"{name}: programs compiled")
    return [estimate(program, machine) for program in programs]


def room_for_rollouts(
    c: ConfigDict, stage: str, machine: Machine, estimates: Sequence[Estimate]
) -> int:
    """Return how many concurrent rollouts fill `FULL` of each device's memory.

    Returns:
        The number on each host, no more than a step has; 0 if the KV cache has a fixed
        size (config.rollout.cache_tokens).
    """
    step_rollouts = rollouts_of_step(c, machine.num_hosts)
    rows = num_decode_rows(c.rollout.max_concurrent, step_rollouts)
    if c.rollout.cache_tokens:
        return 0
    spec = shape_of(c.model.source, c)
    row_bytes = rollout_bytes(c, kind_of(stage), spec, machine.host_devices)
    peak = max(e.peak for e in estimates if e.name in ROLLOUT_PROGRAMS)
    extra_rows = (FULL * machine.chip.memory - peak) / row_bytes
    return min(rows + math.floor(extra_rows), step_rollouts)


def rows_of(estimates: dict[str, list[Estimate]], machine: Machine) -> list[dict]:
    """Return a row of JSON values for each program, per device."""
    rows = []
    for stage, estimates_of_stage in estimates.items():
        for item in estimates_of_stage:
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
                    "kernels": item.kernels,
                }
            )
    return rows


def show(rows: list[dict], config: ConfigDict, machine: Machine) -> bool:
    """Print the tables; return whether everything fits."""
    table_rows = [
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
    configs = dict(stage_configs(config))
    chips = f"{machine.num_devices} devices on {machine.num_hosts} hosts"
    if machine.is_gpu:
        chips += f", {GPU_SHARE:.0%} of their memory"
    console.table(f"{config.name} on {machine.name}: {chips}, each", HEADS, table_rows)
    if machine.is_gpu and machine.is_compiled_for:
        _show_kernels(rows, machine)
    for stage in dict.fromkeys(row["stage"] for row in rows):
        total = sum(row["seconds"] for row in rows if row["stage"] == stage)
        kind = kind_of(stage) if stage in configs else ""
        steps = configs[stage][kind].steps if kind in WEIGHT_KINDS else 1
        console.note(
            f"{stage}: a step takes at least {total:,.1f} s if every rollout uses its "
            "whole budget and nothing waits"
            + (f"; {steps:,} steps: {steps * total / 3600:,.1f} h" if steps > 1 else "")
        )
    oversized = [row for row in rows if row["peak_bytes"] > row["memory_bytes"]]
    for row in oversized:
        console.note(
            f"does not fit: {row['stage']}, {row['program']}: "
            f"{row['peak_bytes'] / GB:.1f} GB of {row['memory_bytes'] / GB:.0f} GB"
        )
    if not machine.is_compiled_for:
        console.note(
            "an estimate: nothing was compiled, and it does not include what devices "
            "send each other or XLA's temporary buffers"
        )
    planned = {row["stage"] for row in rows}
    not_planned = ", ".join(stage for stage in config.stages if stage not in planned)
    suffix = f"; not planned: {not_planned}" if not_planned else ""
    console.note(ADVICE if oversized else f"fits {machine.name}{suffix}")
    return not oversized


def shares_of_stages(
    stages: Sequence[tuple[str, ConfigDict]], machine: Machine, lengths: Lengths
) -> dict[str, dict[str, float]]:
    """Return {stage: see `likely_shares`} for the stages that change weights.

    Raises:
        ValueError: the lengths exceed an RL stage's budgets, or no stage changes
            weights.
    """
    shares = {stage: {} for stage, _ in stages if kind_of(stage) in WEIGHT_KINDS}
    if not shares:
        names = ", ".join(stage for stage, _ in stages)
        raise ValueError(f"--lengths: {names} has no step that changes weights")
    for stage, c in stages:
        if kind_of(stage) == "rl":
            c, one_host = _on_one_host(c, machine)
            rollouts = rollouts_of_step(c, one_host.num_hosts)
            frame = make_context(c, stage, one_host)
            shares[stage] = likely_shares(frame, lengths, rollouts=rollouts)
    return shares


def show_likely(
    stages: Sequence[tuple[str, ConfigDict]],
    machine: Machine,
    estimates: dict[str, list[Estimate]],
    shares: dict[str, dict[str, float]],
    lengths: Lengths,
) -> dict[str, float]:
    """Print a likely step of each stage, and the hours of all; return the seconds.

    Returns:
        {stage: seconds of a step}, without data stages.
    """
    lines, seconds_of_step = [], {}
    for stage in shares:
        seconds_of_step[stage] = 0.0
        for item in estimates[stage]:
            share = shares[stage].get(item.name, 1.0)
            seconds = share * item.likely_seconds(machine.chip)
            seconds_of_step[stage] += seconds
            lines.append((stage, item.name, f"{share:.0%}", f"{seconds:,.1f}"))
    title = (
        f"a likely step: rollouts of {lengths.tokens:,.0f} tokens, "
        f"{lengths.policy_tokens:,.0f} of them by the policy, and "
        f"{lengths.searches:.3g} searches; {FLOPS_EFFICIENCY:.0%} of the peak FLOPs "
        f"and {BANDWIDTH_EFFICIENCY:.0%} of the bandwidth"
    )
    console.table(title, ("stage", "program", "of its longest", "seconds"), lines)
    configs, hours = dict(stages), 0.0
    for stage, seconds in seconds_of_step.items():
        steps = configs[stage][kind_of(stage)].steps
        hours += steps * seconds / 3600
        not_counted = "searches and rewards not counted"
        if kind_of(stage) != "rl":
            not_counted = "each demonstration at its longest"
        console.note(
            f"{stage}: a likely step takes {seconds:,.0f} s, {not_counted}; "
            f"{steps:,} steps take {steps * seconds / 3600:,.1f} h"
        )
    console.note(
        f"{', '.join(seconds_of_step)}: {hours:,.1f} h, "
        f"{hours * machine.num_devices:,.0f} device hours"
    )
    return seconds_of_step


def _show_kernels(rows, machine):
    """Print how often a step runs each kernel, by program."""
    lines = [
        (row["stage"], row["program"], name, f"{count:,.0f}")
        for row in rows
        for name, count in sorted(row["kernels"].items())
    ]
    heads = ("stage", "program", "kernel", "runs")
    console.table(f"kernels on {machine.name}, in a step", heads, lines)


def command(argv: Sequence[str]) -> int:
    """Run the command; return 1 if the plan does not fit."""
    config, values = parse_command_line(argv, flags=FLAGS)
    if values["print_config"]:
        print_config(config)
        return 0
    if values["topology"] is None:
        raise ValueError("--topology: name one, such as v5p:2x2x4")
    if values["out"]:
        files.check_output("out", values["out"])
    lengths = read_lengths(values["lengths"]) if values["lengths"] else None
    machine = find_machine(values["topology"])
    stages = checked_stages(config, machine, only=values["stage"])
    shares = lengths and shares_of_stages(stages, machine, lengths)
    if not config.rollout.max_concurrent:
        for stage, c in stages:
            if c.rollout.max_concurrent:  # it is not chosen for a model not yet known
                console.note(
                    f"{stage}: {c.rollout.max_concurrent} rollouts at once, "
                    f"cache_tokens = {c.rollout.cache_tokens}"
                )
    estimates = estimates_of_stages(stages, machine)
    rows = rows_of(estimates, machine)
    fits = show(rows, config, machine)
    for stage, c in stages:
        if kind_of(stage) == "rl":
            room = room_for_rollouts(c, stage, machine, estimates[stage])
            if room > c.rollout.max_concurrent:
                console.note(
                    f"{stage}: memory for about {room} rollouts at once, more than "
                    f"config.rollout.max_concurrent = {c.rollout.max_concurrent}"
                )
    if lengths:
        show_likely(stages, machine, estimates, shares, lengths)
    if values["out"]:
        files.replace(values["out"], (json.dumps(rows, indent=1) + "\n").encode())
    return 0 if fits else 1

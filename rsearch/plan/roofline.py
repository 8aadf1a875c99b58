"""Estimate programs' seconds, bytes and operations on a machine that is not here."""

import re
import time
from typing import NamedTuple

import jax

from rsearch.plan.costs import Memory
from rsearch.plan.flops import count_flops
from rsearch.plan.hlo import Traffic, kernels, moved, scaled
from rsearch.plan.machines import Chip, Machine
from rsearch.plan.programs import (
    ADMIT,
    ROLLOUT_PROGRAMS,
    STEP,
    Program,
    device_bytes,
)

PART_OF_A_SLICE = "device assignment should include all slice devices"
UNKNOWN_DEVICE = "Unexpected device_id"  # the same, if a collective names devices
NEEDED_MEMORY = re.compile(  # in the error of a program that does not fit
    r"(?:Used |HLO temporaries \()([\d.]+)([MGT])(?: of|\) exceeds available HBM)"
)
SIZES = {"M": 2**20, "G": 2**30, "T": 2**40}
# Shares of a chip's peaks that well-tuned programs reach: of its FLOPs in large matrix
# products, and of the bandwidth of its memory and links.
FLOPS_EFFICIENCY = 0.4
BANDWIDTH_EFFICIENCY = 0.6


class Estimate(NamedTuple):
    """What a program takes in one step, on each device.

    Attributes:
        calls: most calls in a step.
        peak: bytes of the device's memory in use while it runs, including everything
            else that stays there.
        flops: operations of its matrix products.
        moved: bytes from and to memory, and between devices.
        compile_seconds: seconds that compiling it took on this machine.
        kernels: {name: how often a step runs it}; {} if it was not compiled.
    """

    name: str
    calls: float
    peak: float
    flops: float
    moved: Traffic
    compile_seconds: float
    kernels: dict[str, float]

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Return {bound: seconds} of a step, each as if it were the only bound."""
        return {
            "FLOPs": self.flops / chip.flops,
            "memory": self.moved.memory / chip.bandwidth,
            "links": self.moved.sent / chip.link,
        }

    def likely_seconds(self, chip: Chip) -> float:
        """Return the seconds of a step at the efficiencies of well-tuned programs."""
        seconds = self.seconds(chip)
        moving = max(seconds["memory"], seconds["links"])
        return max(seconds["FLOPs"] / FLOPS_EFFICIENCY, moving / BANDWIDTH_EFFICIENCY)


def estimate(program: Program, machine: Machine) -> Estimate:
    """Compile a program for a machine, and return what it takes.

    Raises:
        ValueError: it cannot be compiled for the machine; the message says why.
    """
    flops = count_flops(program.function, program.args, rounds=program.rounds)
    start_time = time.monotonic()
    try:
        compiled = program.function.lower(*program.args).compile()
        peak = compiled.memory_analysis().peak_memory_in_bytes
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        match = NEEDED_MEMORY.search(str(error))
        if match is None:
            raise ValueError(_compile_error(program, machine, str(error))) from None
        peak, text = float(match[1]) * SIZES[match[2]], ""
    moved_bytes, counts = Traffic(0.0, {}), {}
    if text:
        moved_bytes = moved(text, rounds=program.rounds)
        counts = kernels(text, rounds=program.rounds)
    return Estimate(
        program.name,
        program.calls,
        peak + program.other_bytes,
        flops * program.calls / program.num_devices,
        scaled(moved_bytes, program.calls),
        time.monotonic() - start_time,
        {name: count * program.calls for name, count in counts.items()},
    )


def estimate_traced(program: Program, memory: Memory) -> Estimate:
    """Return what a program takes at least, without compiling it.

    Its memory is the estimate for the stage. It moves its arguments once per call, or
    once in every round of the loop of a program that rolls out; of all rows, admitting
    some reads none. What devices send each other is not included.
    """
    is_rolling = program.name in ROLLOUT_PROGRAMS
    phase = memory.rolling if is_rolling else memory.updating
    if program.name.endswith(STEP):
        phase = memory.stepping
    flops = count_flops(program.function, program.args, rounds=program.rounds)
    passes = program.calls * (program.rounds if is_rolling else 1)
    args = program.args[1:] if program.name == ADMIT else program.args
    return Estimate(
        program.name,
        program.calls,
        sum(memory.resident.values()) + sum(phase.values()),
        flops * program.calls / program.num_devices,
        Traffic(device_bytes(args) * passes, {}),
        0.0,
        {},
    )


def _compile_error(program, machine, message):
    """Return an error message for a program that does not compile."""
    if PART_OF_A_SLICE in message or UNKNOWN_DEVICE in message:
        return (
            f"{program.name}: {machine.name} has {machine.num_hosts} hosts, and each "
            "rolls out on its own devices; on v5e and v6e XLA compiles nothing for a "
            "part of a slice. --config.rollout.global_mesh=True rolls out on all of it"
        )
    return f"{program.name}: does not compile for {machine.name}: {message[:500]}"

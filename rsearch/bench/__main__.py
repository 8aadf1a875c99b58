"""python -m rsearch.bench rollout|train|retrieval|step|growth [flags]

Compare this package with those of its peers that are installed, on this machine and in
one run. The table gives medians of five repetitions, the hardware limit that bounds
each number, and the share of that bound that the number reaches.

    python -m rsearch.bench rollout --model=DIRECTORY --out=rollout.json
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Sequence

from rsearch.bench import growth, retrieval, rollout, step, train
from rsearch.bench.comparison import HEADS, Bench, cells, run_in_process
from rsearch.bench.machine import CHIP_NAMES, MachineBounds, probe
from rsearch.config.recipes import (
    parse_command_line,
    parse_flags,
    print_config,
    run_command,
)
from rsearch.runtime import console, files

KINDS = {
    "rollout": rollout,
    "train": train,
    "retrieval": retrieval,
    "step": step,
    "growth": growth,
}
SHARED = {
    "out": ("", "file to write the same numbers to, as JSON"),
    "repeats": (5, "repetitions of each measurement"),
}
ZERO_IS_ALLOWED = {"delay"}


def main(argv: Sequence[str]) -> int:
    """Run the command; see --help."""
    kind = argv[0] if argv else ""
    if kind in ("--help", "-h"):
        print(f"rsearch bench {'|'.join(KINDS)} --help lists the flags of each")
        return 0
    if kind not in KINDS:
        raise ValueError(f"the first argument must be one of {', '.join(KINDS)}")
    if sys.platform != "linux":
        raise ValueError("benchmarks read their memory from /proc, and so need Linux")
    module = KINDS[kind]
    flags = SHARED | module.FLAGS
    if hasattr(module, "CONFIG"):
        recipe = {"config": (module.CONFIG, "recipe to measure")}
        config, values = parse_command_line(argv[1:], flags=recipe | flags)
        if values.pop("print_config"):
            print_config(config)
            return 0
        del values["config"]
        measure = functools.partial(module.measure, config=config)
    else:
        values = parse_flags(argv[1:], flags=flags)
        measure = module.measure
    for name, value in values.items():
        minimum = int(name not in ZERO_IS_ALLOWED)
        if isinstance(value, int) and value < minimum:
            raise ValueError(f"--{name}={value}, expected at least {minimum}")
    out = values.pop("out")
    repeats = values.pop("repeats")
    if out:
        files.check_output("out", out)

    @functools.cache
    def start() -> Bench:
        """Probe the machine; a benchmark calls this once it has checked its flags."""
        # Probed elsewhere: this process would hold an accelerator until it exits.
        machine = run_in_process(probe)
        bounds = describe_bounds(machine)
        console.note(f"{machine.name}, {machine.cores} cores: {bounds}")
        return Bench(machine, repeats)

    rows = measure(start, **values)
    console.table(f"bench {kind}", HEADS, [cells(row) for row in rows])
    if out:
        content = {
            "machine": dataclasses.asdict(start().machine),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        pathlib.Path(out).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def describe_bounds(machine: MachineBounds) -> str:
    """Return a readable line with the machine's peak FLOP/s and bandwidth."""
    if not machine.flops:
        device_names = ", ".join(CHIP_NAMES)
        return f"its bounds are unknown and left out; known devices: {device_names}"
    flops = ", ".join(
        f"{flops / 1e9:,.0f} GFLOP/s in {dtype}"
        for dtype, flops in machine.flops.items()
    )
    source = "measured" if machine.is_measured else "as published by its maker"
    return f"{flops}, {machine.bandwidth / 1e9:,.1f} GB/s, {source}"


if __name__ == "__main__":
    sys.exit(run_command(main))

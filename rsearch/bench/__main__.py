"""python -m rsearch.bench rollout|train|retrieval|step [flags]

Measures this package beside its peers where they are installed, on this machine and
within one run: medians of five, the bound that each number meets, and its share of it.

    python -m rsearch.bench rollout --model=DIRECTORY --out=rollout.json
"""

import dataclasses
import functools
import json
import pathlib
import sys

from rsearch.bench import retrieval, rollout, step, train
from rsearch.bench.comparison import HEADS, OURS, Bench, Row, Subject, cells, compare
from rsearch.bench.machine import KINDS as KNOWN
from rsearch.bench.machine import Machine
from rsearch.config.recipes import (
    parse_command_line,
    parse_flags,
    print_config,
    run_command,
)
from rsearch.runtime import console, files

KINDS = {"rollout": rollout, "train": train, "retrieval": retrieval, "step": step}
SHARED = {
    "out": ("", "file for the same numbers as JSON"),
    "repeats": (5, "repetitions of each measurement"),
}
MAY_BE_0 = {"delay"}


def main(argv) -> int:
    """The command; see --help."""
    kind = argv[0] if argv else ""
    if kind in ("--help", "-h"):
        print(__doc__)
        return 0
    if kind not in KINDS:
        raise ValueError(f"the first argument must be one of {', '.join(KINDS)}")
    module = KINDS[kind]
    flags = SHARED | module.FLAGS
    if hasattr(module, "CONFIG"):
        recipe = {"config": (module.CONFIG, "recipe that is measured")}
        config, given = parse_command_line(argv[1:], flags=recipe | flags)
        if given.pop("print_config"):
            print_config(config)
            return 0
        measure = functools.partial(module.measure, config=config)
    else:
        given, measure = parse_flags(argv[1:], flags=flags), module.measure
    for name, value in given.items():
        least = int(name not in MAY_BE_0)
        if isinstance(value, int) and value < least:
            raise ValueError(f"--{name}={value}, expected at least {least}")
    out, repeats = given.pop("out"), given.pop("repeats")
    if out:
        files.check_output("out", out)
    machine = find_machine()
    console.note(f"{machine.name}, {machine.cores} cores: {bounds_of(machine)}")
    rows = measure(Bench(machine, repeats), **given)
    console.table(f"bench {kind}", HEADS, [cells(row) for row in rows])
    if out:
        pathlib.Path(out).write_text(
            json.dumps(as_json(machine, rows), indent=1) + "\n"
        )
    return 0


def find_machine() -> Machine:
    """The bounds of this machine, found in a process of its own."""
    probed = compare({OURS: Subject("rsearch.bench.machine")}, 1)[OURS][0]
    names = [field.name for field in dataclasses.fields(Machine)]
    return Machine(**{name: probed[name] for name in names})


def bounds_of(machine: Machine) -> str:
    """What the machine can do at best, for people."""
    if machine.flops is None:
        known = ", ".join(KNOWN)
        return f"its bounds are in no table, and left out; known: {known}"
    source = "measured" if machine.is_measured else "as its maker tells, in bfloat16"
    flops, bandwidth = machine.flops / 1e9, machine.bandwidth / 1e9
    return f"{flops:,.0f} GFLOP/s, {bandwidth:,.1f} GB/s, {source}"


def as_json(machine: Machine, rows: list[Row]) -> dict:
    """What --out holds: the machine, and the rows as the table has them."""
    return {
        "machine": dataclasses.asdict(machine),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(run_command(main))

"""Print the commands that produced a run: python -m rsearch.reproduce RUN

They check out the commit, apply the changes that were not committed, install the same
library versions, and train in a new directory, RUN-again. They are derived from
run.json: one block for each code version and command line that the run was trained
with, in order. A comment names the devices, since others round differently. A run that
was started from Python is trained with the configuration in its config.json.
"""

import itertools
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.hosts.processes import LIBRARIES, VARIABLES
from rsearch.runtime.console import clean
from rsearch.runtime.identity import read_launches
from rsearch.text.extension import CODE

# Trains with another run's configuration. Arguments: that run, the new directory.
TRAIN_LIKE = (
    "import sys; from rsearch.config.recipes import from_json; "
    "from rsearch.runtime.workdir import read_config; from rsearch.train import main; "
    "main(from_json(read_config(sys.argv[1])), sys.argv[2])"
)


def main(argv: Sequence[str]) -> int:
    """Read the argument and run.json and print the commands."""
    run = pathlib.Path(parse_flags(argv, flags={}, positional=("RUN",))["RUN"])
    blocks = {}
    for start, launch in read_launches(run):
        if start["command"] == "train":
            # Launches that only resumed the run are covered by the same commands.
            key = launch["start"], tuple(launch["argv"]), launch["directory"]
            blocks.setdefault(key, (start, launch))
    if not blocks:
        raise ValueError(f"{run}/run.json: records no command line of a training start")
    for start, launch in blocks.values():
        print(clean("\n".join(commands_of(run, start, launch))), end="\n\n")
    return 0


def commands_of(run: pathlib.Path, start: Mapping, launch: Mapping) -> list[str]:
    """Return the shell lines that reproduce a start.

    Args:
        start: the start's entry in `starts` of run.json.
        launch: the start's entry in `launches` of run.json.
    """
    code, program = start["code"], start["program"]
    lines = [f"# {launch['began']} on {launch['host']}, {program.get('devices', '?')}"]
    lines.append(f"cd {shlex.quote(launch['directory'])}")
    # An installed package also runs outside of its checkout. In a folder of the
    # checkout, git would apply only the changes below that folder.
    git, checkout = "git", launch.get("checkout", launch["directory"])
    if checkout != launch["directory"]:
        git = f"git -C {shlex.quote(checkout)}"
    if code["commit"]:
        lines.append(f"{git} checkout {shlex.quote(code['commit'])}")
    else:
        lines.append("# no commit: digests of the code's files are in run.json")
    if code["diff"]:
        diff = run.absolute() / f"code-{code['diff']}.diff"
        is_stored = diff.exists()
        lines.append(
            f"{git} apply {shlex.quote(str(diff))}"
            if is_stored
            else f"# changes that were not committed are not stored: {diff.name}"
        )
    pins = [f"{name}=={program[name]}" for name in LIBRARIES if name in program]
    lines.append(f"# Python {program.get('python', '?')}")
    lines.append(f"python -m pip install {shlex.join(pins)}")
    for name, digest in start["inputs"].items():
        if name.startswith(CODE):
            module = name.removeprefix(CODE)
            lines.append(f"# needs the module {module} with digest {digest}")
    variables = [f"{n}={shlex.quote(program[n])}" for n in VARIABLES if program.get(n)]
    if module_path := launch.get("module_path"):
        variables.append(f"PYTHONPATH={shlex.quote(module_path)}")
    new_workdir = run.absolute().with_name(f"{run.absolute().name}-again")
    if _is_train_command(launch["argv"]):
        arguments = [a for a in launch["argv"] if not a.startswith("--workdir=")]
        arguments.append(f"--workdir={new_workdir}")
    else:  # the same program would resume the run itself
        program_text = " ".join(shlex.join(launch["argv"]).split("\n"))
        lines.append(f"# it was started from Python by {program_text}")
        arguments = ["python", "-c", TRAIN_LIKE, str(run.absolute()), str(new_workdir)]
    lines.append(" ".join([*variables, shlex.join(arguments)]))
    return lines


def _is_train_command(argv):
    """Return whether a command line is that of rsearch.train or rsearch train."""
    return any(
        pair == ("-m", "rsearch.train")
        or (pathlib.PurePath(pair[0]).name, pair[1]) == ("rsearch", "train")
        for pair in itertools.pairwise(argv)
    )


if __name__ == "__main__":
    sys.exit(run_command(main))

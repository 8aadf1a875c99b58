"""Check that training killed again and again ends as if it had never been killed.

    python -m tests.chaos.resume --kills=20 --algorithm=grpo

trains a small model twice: once undisturbed, and once killed by SIGKILL that many times
and restarted each time. The kills fall into rollouts, searches, rewards, updates,
saves, renames and deletions. Then it compares the two runs bit by bit: parameters and
optimizer state in the checkpoints, the checkpoints' steps, metrics rows, and the
transcripts of the evaluation.
"""

import pathlib
import random
import signal
import sys
import tempfile
from collections.abc import Iterator

from rsearch.config.recipes import parse_flags, run_command
from rsearch.runtime import checkpoint, console
from rsearch.runtime.jsonl import read_jsonl
from rsearch.runtime.metrics import read_metrics
from tests.chaos.dying_run import PLACES
from tests.small_run import PPO, arguments, run_python, without_times

SHORT = dict(
    eval__at_start=False,
    eval__methods="('protocol',)",
    sft__steps=60,
    checkpoint__sft_steps=10,
    rl__steps=6,
    checkpoint__rl_steps=1,
)
ALGORITHMS = {
    "sft": dict(stages="('sft',)"),
    "grpo": {},
    "reinforce_pp": dict(rl__algorithm="reinforce_pp"),
    "ppo": PPO,
}
IN_SFT = ("update", "save", "rename", "garbage", "metrics")
LONGEST = {"rollout": 60.0, "update": 200.0, "save": 120.0, "garbage": 4.0}
FLAGS = {
    "kills": (20, "how often the run is killed, at random instants"),
    "algorithm": ("grpo", f"one of {', '.join(ALGORITHMS)}"),
    "seed": (0, "seed of the instants"),
    "workdir": ("", "directory that keeps both runs (default: a temporary one)"),
}


def moments(algorithm: str, seed: int) -> Iterator[tuple[str, int, float]]:
    """Yield forever (place, calls to let pass first, milliseconds into the call)."""
    rng = random.Random(f"{algorithm} {seed}")
    places = list(IN_SFT if algorithm == "sft" else PLACES)
    while True:
        rng.shuffle(places)
        for place in places:
            # A rename takes less than a millisecond, so it may have ended by then.
            yield place, rng.randrange(6), rng.uniform(0, LONGEST.get(place, 2.0))


def kill(algorithm: str, kills: int, seed: int, run: pathlib.Path) -> None:
    """Kill the run `kills` times, then let it finish."""
    own = arguments(run, **SHORT, **ALGORITHMS[algorithm])
    coming, count = moments(algorithm, seed), 0
    while count < kills:
        place, number, delay = next(coming)
        command = ("-m", "tests.chaos.dying_run", place, number, delay)
        done = run_python(*command, *own)
        if done.returncode == -signal.SIGKILL:
            count += 1
            console.note(f"kill {count}: {place} {number}, {delay:.1f} ms: {_at(run)}")
        elif done.returncode:
            raise RuntimeError(f"code {done.returncode}: {done.stderr}")
        else:  # the run ended before the kill, so that this start proves nothing
            console.note(f"ended before {place} {number}: going back one checkpoint")
            _step_back(run)
    _finish(own)


def _step_back(run):
    """Delete the newest checkpoint of the last stage, as a lost disk would."""
    folders = sorted(run.glob("*/checkpoints"), key=lambda p: p.parent.name != "sft")
    newest = checkpoint.latest(folders[-1])
    checkpoint.delete_step(folders[-1] / str(newest))
    (run / "results.json").unlink(missing_ok=True)


def _finish(own):
    done = run_python("-m", "rsearch.train", *own)
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {done.stderr}")


def _at(run):
    """Return the run's progress in words."""
    steps = {p.parent.name: checkpoint.latest(p) for p in run.glob("*/checkpoints")}
    return ", ".join(f"{stage} {step}" for stage, step in sorted(steps.items()))


def differences(
    ours: pathlib.Path, theirs: pathlib.Path, saves_more: bool = False
) -> list[str]:
    """Return how two runs differ; [] if they are equal to the bit.

    Args:
        ours: a run's directory.
        theirs: directory of the undisturbed run.
        saves_more: whether our run may have saved additional steps, as a failing run
            does before it ends; then only the last step and those that both runs have
            are compared.
    """
    wrong = []
    folders = sorted(p.relative_to(theirs) for p in theirs.glob("*/checkpoints"))
    for folder in folders:
        steps = checkpoint.steps(ours / folder), checkpoint.steps(theirs / folder)
        last = slice(-1, None) if saves_more else slice(None)
        if steps[0][last] != steps[1][last]:
            wrong.append(f"{folder}: steps {steps[0]}, not {steps[1]}")
            continue
        for step in sorted({*steps[0]} & {*steps[1]}):
            one, other = (
                checkpoint.read_manifest(run / folder, step) for run in (ours, theirs)
            )
            names = one["leaves"].keys() | other["leaves"].keys()
            wrong += [
                f"{folder}/{step}: {name}"
                for name in sorted(names)
                if one["leaves"].get(name) != other["leaves"].get(name)
            ]
            if one["meta"] != other["meta"]:
                wrong.append(f"{folder}/{step}: meta")
        rows = [
            without_times(read_metrics(run / folder.parent / "metrics.jsonl"))
            for run in (ours, theirs)
        ]
        if rows[0] != rows[1]:
            wrong.append(f"{folder.parent}/metrics.jsonl")
    texts = [read_jsonl(run / "transcripts.jsonl") for run in (ours, theirs)]
    if texts[0] != texts[1]:
        wrong.append("transcripts.jsonl")
    return wrong


def main(argv) -> int:
    """Run the command; return 1 if the runs differ."""
    given = parse_flags(argv, flags=FLAGS)
    algorithm, kills = given["algorithm"], given["kills"]
    if algorithm not in ALGORITHMS:
        raise ValueError(f"--algorithm={algorithm}: must be one of {list(ALGORITHMS)}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(given["workdir"] or folder)
        folder.mkdir(parents=True, exist_ok=True)
        _finish(arguments(folder / "whole", **SHORT, **ALGORITHMS[algorithm]))
        console.note("the undisturbed run has ended")
        kill(algorithm, kills, given["seed"], folder / "killed")
        wrong = differences(folder / "killed", folder / "whole")
    for what in wrong:
        print(f"differs: {what}")
    print(f"{algorithm}: {kills} kills, {'not equal' if wrong else 'equal to the bit'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_command(main))

"""List, verify or delete the checkpoints of a run.

    python -m rsearch.checkpoint ls|verify|gc DIRECTORY

DIRECTORY is the directory of a run or of a stage. `gc` deletes old checkpoints and torn
ones, that is, incomplete ones.
"""

import contextlib
import pathlib
import sys
from collections.abc import Sequence

from rsearch.config.recipes import parse_flags, run_command
from rsearch.runtime import files, run_directory
from rsearch.runtime.checkpoint import (
    FOLDER,
    LOWEST,
    MANIFEST,
    SET_ASIDE_REASONS,
    DamagedError,
    ForeignError,
    check_made_by,
    delete_step,
    read_manifest,
    step_folders,
    steps,
    verify,
)
from rsearch.runtime.console import note, table
from rsearch.runtime.workdir import CONFIG, read_run_id

VERIFY_FLAGS = {"step": (-1, "verify: check only the checkpoint of this step")}
GC_FLAGS = {
    "keep": (2, "gc: number of newest checkpoints to keep in each stage", 1),
    "damaged": (False, "gc: also delete checkpoints that were set aside as damaged"),
    "collapsed": (False, "gc: also delete checkpoints that a roll-back has set aside"),
    "dry_run": (False, "gc: print what would be deleted, and delete nothing"),
}
FLAGS = VERIFY_FLAGS | GC_FLAGS


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if a checkpoint is damaged or of another run."""
    flags = parse_flags(argv, flags=FLAGS, positional=("action", "directory"))
    actions = {"ls": _list, "verify": _verify_all, "gc": _collect_garbage}
    if flags["action"] not in actions:
        raise ValueError(f"{flags['action']!r}: must be one of {', '.join(actions)}")
    for name, (default, *_) in FLAGS.items():
        action = "verify" if name in VERIFY_FLAGS else "gc"
        if flags[name] != default and flags["action"] != action:
            raise ValueError(f"--{name} is only for {action}, not {flags['action']}")
    root = pathlib.Path(flags["directory"])
    if not root.is_dir():
        raise ValueError(f"{root}: no such directory")
    directories = [root] if any(_entries(root)) else sorted(root.rglob(FOLDER))
    if not directories:
        raise ValueError(f"{root}: holds no checkpoints")
    return actions[flags["action"]](root, directories, flags)


def _entries(directory):
    """Yield (folder, state); the state is "whole", "torn" or why it was set aside."""
    step_paths = {directory / str(step) for step in step_folders(directory)}
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        if folder in step_paths:
            yield folder, "whole" if (folder / MANIFEST).is_file() else "torn"
            continue
        step, reason, *_ = (*folder.name.split("."), "")
        if step.isdecimal() and reason in SET_ASIDE_REASONS:
            yield folder, reason


def _list(root, directories, flags):
    """Print a row for each checkpoint, oldest first."""
    rows = []
    for directory in directories:
        entries = [
            (int(f.name.partition(".")[0]), f, s) for f, s in _entries(directory)
        ]
        for _, folder, state in sorted(entries):
            with contextlib.suppress(FileNotFoundError):  # deleted by a run meanwhile
                paths = [p for p in folder.rglob("*") if p.is_file()]
                size = sum(p.stat().st_size for p in paths) / 2**20
                stage = directory.relative_to(root).parent.as_posix()
                if folder.exists():
                    rows.append((stage, folder.name, state, round(size, 3), len(paths)))
    table(str(root), ("stage", "step", "state", "MiB", "files"), rows)
    return 0


def _verify_all(root, directories, flags):
    """Verify the complete checkpoints, or the one of --step, without changing them."""
    num_damaged = 0
    only_step = flags["step"]
    steps_by_folder = {
        directory: [step for step in steps(directory) if only_step in (-1, step)]
        for directory in directories
    }
    if not any(steps_by_folder.values()):
        suffix = "" if only_step == -1 else f" of step {only_step}"
        raise ValueError(f"{root}: no stage has a complete checkpoint{suffix}")
    for directory, stage_steps in steps_by_folder.items():
        for step in stage_steps:
            try:
                verify(directory, step)
                _check_made_by(directory, step)
                note(f"{directory / str(step)}: verified")
            except Exception as error:
                if step not in steps(directory):  # by a run in progress
                    note(f"{directory / str(step)}: deleted meanwhile")
                elif isinstance(error, DamagedError | ForeignError):
                    num_damaged += 1
                    note(str(error))
                else:
                    raise
    return 1 if num_damaged else 0


def _check_made_by(directory, step):
    """Raise ForeignError if another run or stage made the checkpoint."""
    stage = directory.absolute().parent
    run_id = read_run_id(stage.parent) if (stage.parent / CONFIG).is_file() else ""
    expected = {"run": run_id, "stage": stage.name if run_id else ""}
    check_made_by(directory / str(step), read_manifest(directory, step), expected)


def _collect_garbage(root, directories, flags):
    """Delete old and torn checkpoints.

    Refused while a run is in progress, since an incomplete checkpoint may be one that
    the run is saving.
    """
    with contextlib.ExitStack() as locks:
        for run in {directory.absolute().parents[1] for directory in directories}:
            lock = run / run_directory.LOCK
            if lock.exists() and not locks.enter_context(files.locked(lock)):
                raise ValueError(f"{run}: in use by a run; wait for it to end")
        for directory in directories:
            newest_steps = steps(directory)[-flags["keep"] :]
            retained = {str(step) for step in newest_steps}
            # A stage that keeps its lowest loss ends with those weights.
            if newest_steps:
                meta = read_manifest(directory, newest_steps[-1])["meta"]
                retained |= {str(step) for step in meta.get(LOWEST, ())[:1]}
            for folder, state in _entries(directory):
                # A flag decides about those that were set aside.
                if folder.name in retained or not flags.get(state, True):
                    continue
                note(f"{folder}: {state}, {'would be ' * flags['dry_run']}deleted")
                if not flags["dry_run"]:
                    delete_step(folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

"""List, verify or delete the checkpoints of a run.

    python -m rsearch.checkpoint ls|verify|gc DIRECTORY

DIRECTORY is that of a run or of a stage. `gc` deletes old checkpoints and torn ones.
"""

import contextlib
import pathlib
import sys

from rsearch.config.recipes import parse_flags, run_command
from rsearch.runtime import files
from rsearch.runtime.checkpoint import ASIDE, FOLDER, delete_step, verify
from rsearch.runtime.console import note, table
from rsearch.runtime.manifest import MANIFEST, DamagedError, step_folders, steps

FLAGS = {
    "step": (-1, "verify: this one alone"),
    "keep": (2, "gc: newest checkpoints that stay in each stage"),
    "damaged": (False, "gc: deletes what was set aside as damaged, too"),
    "collapsed": (False, "gc: likewise, what a roll-back has set aside"),
    "dry_run": (False, "gc: tells what it would delete, and deletes nothing"),
}


def main(argv) -> int:
    """The command; 1 where something is damaged."""
    places = "action", "directory"
    given = parse_flags(argv, flags=FLAGS, positional=places)
    actions = {"ls": _list, "verify": _verify_all, "gc": _collect}
    if given["action"] not in actions:
        raise ValueError(f"{given['action']!r}: must be one of {', '.join(actions)}")
    if given["keep"] < 1:
        raise ValueError(f"--keep={given['keep']}: must be at least 1")
    root = pathlib.Path(given["directory"])
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such directory")
    found = [root] if any(_entries(root)) else sorted(root.rglob(FOLDER))
    if not found:
        raise ValueError(f"{root}: holds no checkpoints")
    return actions[given["action"]](root, found, given)


def _entries(directory):
    """(folder, state) of all that is there: "whole", "torn", or why it is set aside."""
    own = {directory / str(step) for step in step_folders(directory)}
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        if folder in own:
            yield folder, "whole" if (folder / MANIFEST).is_file() else "torn"
            continue
        step, _, why = folder.name.partition(".")
        if step.isdecimal() and (why := why.partition(".")[0]) in ASIDE:
            yield folder, why


def _list(root, found, given):
    """A row for each, the oldest first."""
    rows = []
    for directory in found:
        entries = sorted(_entries(directory), key=lambda e: (_number(e[0]), e[0].name))
        for folder, state in entries:
            own = [p for p in folder.rglob("*") if p.is_file()]
            size = sum(p.stat().st_size for p in own) / 2**20
            stage = directory.relative_to(root).parent.as_posix()
            rows.append((stage, folder.name, state, round(size, 3), len(own)))
    table(str(root), ("stage", "step", "state", "MiB", "files"), rows)
    return 0


def _number(folder):
    return int(folder.name.partition(".")[0])


def _verify_all(root, found, given):
    """Verifies all that count, and changes nothing."""
    num_damaged, asked = 0, given["step"]
    for directory in found:
        chosen = [asked] if asked >= 0 else steps(directory)
        for step in chosen:
            try:
                verify(directory, step)
                note(f"{directory / str(step)}: verified")
            except DamagedError as error:
                num_damaged += 1
                note(str(error))
    return 1 if num_damaged else 0


def _collect(root, found, given):
    """Deletes what is older than the newest, and what never was whole.

    Not beside a run: what is not whole there may be about to become so.
    """
    with contextlib.ExitStack() as held:
        for run in {directory.absolute().parents[1] for directory in found}:
            lock = run / files.LOCK
            if lock.exists() and not held.enter_context(files.locked(lock)):
                raise ValueError(f"{run}: in use by a run; wait for it to end")
        return _collected(found, given)


def _collected(found, given):
    for directory in found:
        kept = {str(step) for step in steps(directory)[-given["keep"] :]}
        for folder, state in _entries(directory):
            stays = not given[state] if state in ASIDE else folder.name in kept
            if stays:
                continue
            note(f"{folder}: {state}, {'would be ' * given['dry_run']}deleted")
            if not given["dry_run"]:
                delete_step(folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

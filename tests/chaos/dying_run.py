"""Run rsearch.train in a process that is killed in the middle of its work.

    python -m tests.chaos.dying_run PLACE NUMBER MILLISECONDS rsearch.train's arguments

PLACE is a key of PLACES, which names a function. When the process calls that function
for the NUMBER-th time, counted from 0, a thread waits for MILLISECONDS and then sends
SIGKILL. A run that never reaches that call ends by itself.
"""

import importlib
import itertools
import os
import signal
import sys
import threading
import time

PLACES = {  # module, class or "", function
    "rollout": ("rsearch.rollout.scheduler", "RolloutScheduler", "_decode"),
    "search": ("rsearch.rollout.scheduler", "RolloutScheduler", "_run_calls"),
    "reward": ("rsearch.stages.rl", "", "with_rewards"),
    "update": ("rsearch.learn.trainer", "Trainer", "put"),  # an update follows it
    "save": ("rsearch.runtime.storage", "", "write_tree"),
    "rename": ("rsearch.runtime.files", "", "replace"),
    "garbage": ("rsearch.runtime.checkpoint", "", "delete_step"),
    "metrics": ("rsearch.runtime.files", "", "append"),
}


def watch(place: str, number: int, milliseconds: float) -> None:
    """Patch the function at `place` so that its `number`-th call kills the process."""
    module, owner, name = PLACES[place]
    target = importlib.import_module(module)
    target = getattr(target, owner) if owner else target
    real, numbers = getattr(target, name), itertools.count()

    def die():
        time.sleep(milliseconds / 1e3)
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(*args, **settings):
        if next(numbers) == number:
            threading.Thread(target=die).start()
        return real(*args, **settings)

    setattr(target, name, watched)


def main(place, number, milliseconds, *arguments) -> int:
    """Run the command."""
    from rsearch import train
    from rsearch.config.recipes import run_command

    watch(place, int(number), float(milliseconds))
    return run_command(train.command, arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run rsearch.train in a process that dies without warning at a chosen moment.

    python -m tests.interrupted_run [SIGTERM@]PATTERN rsearch.train's arguments

PATTERN is a regular expression for the file operation about to happen, such as
'replace rl/checkpoints/2/manifest.json', with paths relative to the workdir. Before the
first operation that matches, the process sends itself SIGKILL, or the signal given. An
empty pattern matches nothing, and every operation is printed.
"""

import os
import pickle
import re
import signal
import sys
import time
import traceback

ABSENT = ("tensorflow", "tensorflow_text", "torch")


class Without:
    """A module finder that does not find the libraries in ABSENT."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


def watch(pattern, workdir):
    """Wrap the functions that write to disk so that `pattern` kills the process."""
    from rsearch.hosts import preemption
    from rsearch.runtime import files

    workdir = os.path.realpath(workdir)
    name, _, pattern = pattern.rpartition("@")
    left = [signal.Signals[name or "SIGKILL"]]

    def about_to(what, path):
        # A save's paths start with the directory's descriptor: /proc/self/fd/N/rl/...
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        moment = f"{what} {os.path.relpath(path, workdir)}"
        if pattern and left and re.search(pattern, moment):
            os.kill(os.getpid(), left.pop())
            # Wait for the thread that handles the signal: it may be late.
            end = time.monotonic() + 30
            while not preemption.is_stop_requested() and time.monotonic() < end:
                time.sleep(0.001)
        if not pattern:
            print("moment:", moment, flush=True)

    fsync, replace, append = os.fsync, os.replace, files.append

    def watched_fsync(descriptor):
        about_to("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watched_replace(source, target):
        about_to("replace", target)
        replace(source, target)

    def watched_append(file, data):
        about_to("append", file.name)
        append(file, data)
        about_to("appended", file.name)

    os.fsync, os.replace, files.append = watched_fsync, watched_replace, watched_append


def log_of_pickles():
    """Return a list that grows by a line for each pickle read from now on.

    Python reports every class or function that a pickle names to audit hooks, whichever
    way the pickle is read. Pickles that name none are noticed only if they are read by
    pickle's own functions.
    """
    heard = []

    def tell(what):
        frames = traceback.extract_stack()[:-2]
        heard.append(f"{what}: {' < '.join(str(f) for f in reversed(frames[-6:]))}")

    def audit(event, arguments):
        if event == "pickle.find_class":
            tell(f"a pickle names {arguments}")

    def telling(read):
        def wrapped(*arguments, **settings):
            tell(f"pickle.{read.__name__}")
            return read(*arguments, **settings)

        return wrapped

    sys.addaudithook(audit)
    pickle.load, pickle.loads = telling(pickle.load), telling(pickle.loads)
    return heard


def main(pattern, *arguments):
    heard = log_of_pickles()
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    (workdir,) = (a for a in arguments if a.startswith("--workdir="))
    watch(pattern, workdir.partition("=")[2])
    from rsearch import train
    from rsearch.config.recipes import run_command

    code = run_command(train.command, arguments)
    # scann tries to import tensorflow; an entry of None means that there is none.
    assert not {name for name in ABSENT if sys.modules.get(name)}
    assert not heard, "\n".join(heard)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

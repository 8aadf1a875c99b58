"""rsearch.train in a process that dies, without warning, at a moment of one's choice.

    python -m tests.interrupted_run [SIGTERM@]PATTERN rsearch.train's arguments

PATTERN is a regular expression over what is about to happen, such as
'replace rl/checkpoints/2/manifest.json', with paths below the workdir; the process ends
itself by SIGKILL, or sends itself another signal, before the first such moment. An
empty one matches nothing, and every moment is printed.
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
    """A finder of modules that does not find the libraries in ABSENT."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


def watch(pattern, workdir):
    """Wraps what writes to disk, so that `pattern` kills the process."""
    from rsearch.hosts import preemption
    from rsearch.runtime import files

    workdir = os.path.realpath(workdir)
    name, _, pattern = pattern.rpartition("@")
    left = [signal.Signals[name or "SIGKILL"]]

    def about_to(what, path):
        # A save goes by the descriptor of the directory: /proc/self/fd/N/rl/...
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        moment = f"{what} {os.path.relpath(path, workdir)}"
        if pattern and left and re.search(pattern, moment):
            os.kill(os.getpid(), left.pop())
            # The thread that hears it may be late, and the moment over.
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


def heard_of_pickles():
    """A list that grows by a line for each pickle that is read from now on.

    Python tells an audit hook of every class or function that a pickle names, whichever
    way it is read; those that name none are seen where they are read by pickle's own
    functions.
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
    heard = heard_of_pickles()
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    (workdir,) = (a for a in arguments if a.startswith("--workdir="))
    watch(pattern, workdir.partition("=")[2])
    from rsearch import train
    from rsearch.config.recipes import run_command

    code = run_command(train.command, arguments)
    # scann asks for tensorflow, and a None says that there is none.
    assert not {name for name in ABSENT if sys.modules.get(name)}
    assert not heard, "\n".join(heard)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A checkout for the launch scripts, with fake Pythons and a fake pip."""

import pathlib
import shutil
import signal
import stat
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Reports its version, makes virtual environments with itself as their Python, and logs
# calls of pip and of modules, the latter with the variable that FAKE_TELLS names.
PYTHON = """#!/bin/bash
log() { echo "$*" >>"$FAKE_LOG"; }
case "$1 $2 $3" in
  "-c "*) [[ "$2" == *version_info* ]] && exit $(( {minor} != 11 && {minor} != 12 )) ;;
  "--version  ") echo "Python 3.{minor}.0" ;;
  "-m venv "*)
    log "venv $3 of 3.{minor}"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo "PATH=$PWD/$3/bin:\\$PATH" >"$3/bin/activate"
    case $3 in /*) echo "PATH='$3/bin':\\$PATH" >"$3/bin/activate" ;; esac
    [ -z "$FAKE_NO_PIP" ] || exit 1
    touch "$3/has-pip" ;;
  "-m pip --version") [ -e "$(dirname "$0")/../has-pip" ] ;;
  "-m pip install")
    [ -z "$FAKE_SLOW" ] || sleep "$FAKE_SLOW"
    log "pip ${@: -1}"
    [ -z "$FAKE_PIP_FAILS" ] ;;
  *) log "$@"; [ -z "$FAKE_TELLS" ] || log "${!FAKE_TELLS}" ;;
esac
"""


class Checkout:
    """A checkout with the scripts, one line of requirements, and fake Pythons."""

    def __init__(self, folder):
        self.folder, self.bin, self.log = folder, folder / "bin", folder / "log"
        (folder / "repo" / "tests").mkdir(parents=True)
        self.repo, self.told = folder / "repo", ""
        shutil.copytree(ROOT / "launch", self.repo / "launch")
        self.require("a==1")
        (self.repo / "tests" / "requirements.txt").write_text("-r ../requirements.txt")
        self.bin.mkdir()
        self.link("bash", "dirname", "cksum", "tr", "touch", "rm", "mkdir", "cp")

    def require(self, line):
        (self.repo / "requirements.txt").write_text(line)

    def python(self, name, minor, folder=None):
        return self.program(name, PYTHON.replace("{minor}", str(minor)), folder)

    def program(self, name, text, folder=None):
        path = (folder or self.bin) / name
        path.unlink(missing_ok=True)  # `link` may have made it: spare the real program
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def link(self, *names):
        for name in names:
            (self.bin / name).symlink_to(shutil.which(name))

    def run(self, script, *arguments, **environment):
        """Run a script; return (exit code, stderr, lines logged by the fakes)."""
        self.log.write_text("")
        done = subprocess.run(
            [self.bin / "bash", self.repo / "launch" / script, *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), "FAKE_LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            # Tests that a shell has begun in the background ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.told = done.stdout
        return done.returncode, done.stderr, self.log.read_text().splitlines()

    def bash(self, command, **environment):
        """Run a command of bash in the checkout; return the finished process."""
        return subprocess.run(
            [self.bin / "bash", "-c", command],
            cwd=self.repo,
            env={"PATH": str(self.bin), "FAKE_LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)

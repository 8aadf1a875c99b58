"""The documents' commands about the embedded world, run by bash as they are printed.

They run in a copy of the checkout whose world is small, as are its pretrained models;
each learning stage takes two steps. Sweeps have at most two seeds.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import time

import pytest

from tests.document_commands import (
    COMMANDS_OF_DOCUMENTS,
    CONFIGS,
    DOCUMENTS,
    flags_of,
    program_of,
    run_bash,
    start_bash,
    texts_of,
    words_of,
)
from tests.hosts.test_processes import free_port
from tests.llm.test_endpoint import serving
from tests.runtime.test_trackers import FAKE
from tests.small_run import child_environment
from tests.small_world import make_checkout
from tests.test_document_commands import EXAMPLES, service

WORLD = re.compile(":tiny|=configs/quickstart|--trials=|--size=tiny|runs/search_r1 ")
DRY = re.compile("--dry_run|--commands|--print_config|--help")
# Other tests execute those of these documents, and all examples that train a policy.
ELSEWHERE = ("docs/evaluate.md", "docs/extend.md", "configs/FIDELITY.md")
TRAIN = "python -m rsearch.train --config=configs"
MADE = {  # what commands of other pages have made
    "runs/search_r1": f"""
        {TRAIN}/search_r1.py:tiny --workdir=runs/search_r1
    """,
    "runs/r_search": f"""
        {TRAIN}/r_search.py:tiny --workdir=runs/r_search
        python -m rsearch.export --workdir=runs/r_search --out=runs/r_search-model
    """,
    "--runs=runs/systems": f"""
        {TRAIN}/search_r1.py:tiny --workdir=runs/systems/search_r1
    """,
    "retrieval.index=index": """
        python -m rsearch.corpus world:configs/quickstart.py --out=corpus.jsonl
        python -m rsearch.index --corpus=corpus.jsonl --encoder=hashed --out=index
    """,
}


def is_about_the_world(text):
    """Return whether commands are about the embedded world or only read recipes."""
    lines = [" ".join(words) for words in words_of([text]) if program_of(words)]
    named = [line for line in lines if WORLD.search(line)]
    return bool(named) and all(line in named or DRY.search(line) for line in lines)


BLOCKS = [
    text
    for document in (*DOCUMENTS, *CONFIGS)
    if document not in ELSEWHERE
    for text in texts_of(document)
    if is_about_the_world(text) and ".sh" not in text and text not in EXAMPLES
]
IN_BLOCKS = {" ".join(words) for words in words_of([*BLOCKS, *EXAMPLES])}
SINGLE = [
    command
    for command in COMMANDS_OF_DOCUMENTS
    if command.name in ("rsearch.fidelity", "tests.test_faults")
    or (
        command.name in ("rsearch.tables", "rsearch.train")
        and is_about_the_world(command.text)
        and not DRY.search(command.text)
        and command.text not in IN_BLOCKS
        and command.document not in ELSEWHERE
    )
]
SERVING = [
    command
    for command in COMMANDS_OF_DOCUMENTS
    if command.name.removeprefix("rsearch.") in ("serve", "mcp", "retriever", "tool")
    if command.arguments and "=..." not in command.text
]
SERVERS = [command for command in SERVING if "--port=" in command.text]
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-03-26",
        "capabilities": {},
        "clientInfo": {"name": "a client", "version": "1"},
    },
}
ACCEPTED = {
    "Accept": "application/json, text/event-stream",
    "Content-Type": "application/json",
}
REQUESTS = {"rsearch.mcp": ("POST", "/mcp", json.dumps(INITIALIZE), ACCEPTED)}


def line_of(command):
    """Return a command as a line of bash."""
    return f"python -m {command.name} {shlex.join(command.arguments)}"


class Checkout:
    """A copy of the checkout, in which the world is small.

    Attributes:
        folder: its directory.
    """

    def __init__(self, folder):
        self.folder = folder
        make_checkout(folder)
        self._programs = folder / "bin"
        self._programs.mkdir()
        pip = self._programs / "pip"  # installs a tracker
        pip.write_text(f"cat > wandb.py <<'END'\n{FAKE}\nEND\n")
        pip.chmod(0o755)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").touch()
        self._environment = os.environ | child_environment()
        self._environment |= {
            "PYTHONPATH": str(folder),
            "RSEARCH_CACHE": str(folder / "cache"),
            "FAKE_TRACKER": str(folder),
            "SERPER_API_KEY": "x",
        }
        self._made = set()

    def prepare(self, lines):
        """Make what these commands need and other commands make."""
        for name, before in MADE.items():
            if name in lines and name not in self._made:
                self.run(before)
                self._made.add(name)

    def run(self, lines):
        """Run lines of bash, which must succeed; return what they print."""
        return run_bash(lines, self.folder, self._environment, [self._programs])

    def start(self, lines):
        """Start lines of bash."""
        return start_bash(lines, self.folder, self._environment, [self._programs])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("checkout"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [*BLOCKS, *map(line_of, SINGLE)],
    ids=lambda lines: " ".join(lines.split())[:90],
)
def test_the_commands_about_the_world_succeed(lines, checkout):
    checkout.prepare(lines)
    lines = re.sub(r"seed=0,1(,\d)+", "seed=0,1", lines)
    checkout.run(re.sub(r"dev_questions=\d+", "dev_questions=6", lines))
    for words in filter(program_of, words_of([lines])):
        flags = flags_of(words)
        outputs = [flags[name] for name in ("--out", "--plot") if name in flags]
        if "--workdir" in flags:
            outputs.append(f"{flags['--workdir']}/results.json")
        if not DRY.search(" ".join(words)):
            assert all((checkout.folder / name).exists() for name in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("command", SERVERS, ids=lambda command: command.text[:60])
def test_a_service_answers_until_it_is_stopped(command, checkout):
    port = free_port()
    line = re.sub(r"--port=\d+", f"--port={port}", line_of(command))
    if command.name == "rsearch.retriever":
        line += " --config.retrieval.encoder=hashed"
    checkout.prepare(line)
    process = checkout.start(f"exec {line}")
    status, deadline = 0, time.monotonic() + 300
    try:
        while status != 200 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError):  # it does not listen yet
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request(*REQUESTS.get(command.name, ("GET", "/health")))
                status = connection.getresponse().status
        assert status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)  # uvicorn raises it again
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [command for command in SERVING if command not in SERVERS],
    ids=lambda command: command.text[:60],
)
def test_a_policy_answers_the_caller(command, checkout):
    with serving(service) as endpoint:
        line = line_of(command).replace("=DIR", "=runs/r_search-model")
        line = line.replace("https://google.serper.dev", endpoint.url)
        checkout.prepare(line)
        printed = checkout.run(line)
    if "--question=" in command.text:
        assert json.loads(printed)["question"].startswith("Who")
    assert bool(endpoint.requests) == ("serper" in command.text)

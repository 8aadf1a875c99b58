"""A service that finds something else by now: a run goes on with what it had found."""

import http.server
import json
import signal

import pytest

from rsearch import checkpoint
from tests.running_server import running
from tests.small_run import arguments, run_python

SHORT = dict(
    eval__at_start=False,
    eval__methods="('protocol',)",
    rl__steps=1,
)
LAST = "fsync rl/checkpoints/1/tree"  # the step is over, and not yet saved


class Service(http.server.ThreadingHTTPServer):
    """Search-R1's dialect; each query finds itself, and the version."""

    def __init__(self):
        self.version, self.num_asked = "first", 0
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_asked += len(asked["queries"])
        rows = [
            [{"document": {"id": q, "contents": f"{q}\n{self.server.version}"}}]
            for q in asked["queries"]
        ]
        body = json.dumps({"result": rows}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def leaves(run):
    return checkpoint.read_manifest(run / "rl" / "checkpoints", 1)["leaves"]


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False], ids=["rollouts", "searches alone"])
def test_a_step_is_learnt_from_the_text_it_had_been_shown(tmp_path, is_kept):
    with running(Service()) as service:
        own = {"retrieval__url": f"http://127.0.0.1:{service.server_port}", **SHORT}
        whole, killed = (arguments(tmp_path / n, **own) for n in ("whole", "killed"))
        done = run_python("-m", "rsearch.train", *whole)
        assert done.returncode == 0, done.stderr
        done = run_python("-m", "tests.interrupted_run", LAST, *killed)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (tmp_path / "killed" / "rl" / "searches-0.journal").stat().st_size
        if not is_kept:
            (tmp_path / "killed" / "rl" / "rollouts-0.journal").unlink()
        service.version = "second"
        # The demonstrations of the stage before are another matter.
        accepted = [*killed, "--accept=sft.demonstrations"]
        done = run_python("-m", "rsearch.train", *accepted)
        assert done.returncode == 0, done.stderr
        assert ("had ended before" in done.stderr) == is_kept
    assert leaves(tmp_path / "killed") == leaves(tmp_path / "whole")

"""Services whose answers have changed: a resumed run uses their earlier answers."""

import http.server
import json
import signal

import pytest

from rsearch.runtime import checkpoint
from tests.running_server import running
from tests.small_run import arguments, run_python

SHORT = dict(
    eval__at_start=False,
    eval__methods="('protocol',)",
    rl__steps=1,
)
LAST = "fsync rl/checkpoints/1/tree"  # the step has ended and is not saved yet


class Service(http.server.ThreadingHTTPServer):
    """A retriever and a writer whose answers contain the service's version."""

    def __init__(self):
        self.version = "first"
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        version, rows = self.server.version, []
        for query in asked.get("queries", ()):
            rows.append(
                [{"document": {"id": query, "contents": f"{query}\n{version}"}}]
            )
        text = {"message": {"content": f"it is {version}"}}
        body = json.dumps({"result": rows, "choices": [text]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def leaves(run):
    return checkpoint.read_manifest(run / "rl" / "checkpoints", 1)["leaves"]


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False], ids=["rollouts", "only searches"])
def test_a_resumed_step_learns_from_the_text_it_was_first_shown(tmp_path, is_kept):
    with running(Service()) as service:
        url = f"http://127.0.0.1:{service.server_port}"
        own = {"retrieval__url": url, "models__writer__source": f"{url}/v1", **SHORT}
        own["models__writer__name"] = "any"
        whole, killed = (arguments(tmp_path / n, **own) for n in ("whole", "killed"))
        done = run_python("-m", "rsearch.train", *whole)
        assert done.returncode == 0, done.stderr
        done = run_python("-m", "tests.interrupted_run", LAST, *killed)
        assert done.returncode == -signal.SIGKILL, done.stderr
        for kind in ("searches", "writer"):
            journal = tmp_path / "killed" / "rl" / f"{kind}-0.journal"
            assert journal.stat().st_size
        if not is_kept:
            (tmp_path / "killed" / "rl" / "rollouts-0.journal").unlink()
        service.version = "second"
        # The demonstrations of the SFT stage may change; that is not tested here.
        accepted = [*killed, "--accept=sft.demonstrations"]
        done = run_python("-m", "rsearch.train", *accepted)
        assert done.returncode == 0, done.stderr
        assert ("had already finished" in done.stderr) == is_kept
    assert leaves(tmp_path / "killed") == leaves(tmp_path / "whole")

"""Keys and tokens appear in no file, output or argument, even if services echo them."""

import base64
import contextlib
import http.client
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.parse

import pytest

from rsearch import compare, export
from rsearch.models.hf import checkpoint as huggingface
from rsearch.retrieval.service import RemoteSearch
from rsearch.setup.load import load_setup
from rsearch.setup.weights import initial_params
from tests.hosts.test_processes import free_port
from tests.running_server import running
from tests.small_run import (
    ROOT,
    arguments,
    child_environment,
    config,
    one_device,
    quick_compilation,
)

__all__ = ["one_device", "quick_compilation"]
pytestmark = pytest.mark.usefixtures("one_device")
KEY = "canary+8f3a/%7Yq&=~wren"  # has characters that base64 and URLs encode
VARIABLE = "SECRET_OF_THE_TEST"


def spellings(key):
    """Yield the forms of a key in text: plain, quoted, in a URL, within base64."""
    yield from (key, json.dumps(key)[1:-1], repr(key)[1:-1], key[::-1])
    yield from (urllib.parse.quote(key, safe=safe) for safe in ("", "/", "/&=+~"))
    yield urllib.parse.quote_plus(key)
    yield key.encode().hex()
    for offset in range(3):  # of the key in the encoded bytes
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            whole = encode(b"-" * offset + key.encode()).decode().rstrip("=")
            yield whole[4:-3]  # the ends depend on the neighbouring bytes


SPELLINGS = {spelling.encode() for spelling in spellings(KEY)}


def find_key(named):
    """Return the names of the texts that contain the key."""
    return [name for name, text in named if any(s in text for s in SPELLINGS)]


def files_below(folder):
    """Yield (path, bytes) of each file, and each path itself as bytes."""
    for path in pathlib.Path(folder).rglob("*"):
        yield f"name of {path}", os.fsencode(path)
        if path.is_file():
            yield str(path), path.read_bytes()


def arguments_of(process):
    """Yield (name, bytes) of the arguments of a process and its children."""
    with contextlib.suppress(OSError):  # the process has just ended
        root = pathlib.Path(f"/proc/{process.pid}")
        children = [pid for f in root.glob("task/*/children") for pid in _words(f)]
        for pid in (str(process.pid), *children):
            yield (
                f"arguments of {pid}",
                pathlib.Path(f"/proc/{pid}/cmdline").read_bytes(),
            )


def _words(path):
    return path.read_text().split()


def test_the_spellings_find_a_key_in_any_encoding():
    for offset in range(5):
        text = b"x" * offset + KEY.encode() + b"rest"
        for encoded in (text, base64.b64encode(text), base64.urlsafe_b64encode(text)):
            assert find_key([("it", encoded)]) == ["it"]
    assert find_key([("URL", urllib.parse.urlencode({"k": KEY}).encode())]) == ["URL"]
    assert find_key([("nothing", b"canary")]) == []


class EchoHandler(http.server.BaseHTTPRequestHandler):
    """Requires the key and echoes it in every fourth reply, once in each of LEAKS."""

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        key = self.headers.get("X-API-KEY") or self.headers["Authorization"][7:]
        if key != KEY:
            return self.send(401, {"error": "who are you?"})
        numbers = self.server.numbers
        numbers[self.path] = number = numbers.get(self.path, -1) + 1
        leak, rest = divmod(number, 4)
        if self.server.always or (rest == 1 and leak < len(LEAKS)):
            return LEAKS[leak % len(LEAKS)](self, key)
        self.send(200, self.server.answer(self.path, body))

    def send(self, status, reply, reason=None, **headers):
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status, reason)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


LEAKS = (
    lambda handler, key: handler.send(500, {"error": f"the key {key} is too busy"}),
    lambda handler, key: handler.send(200, {"error": {"message": key}}),
    lambda handler, key: handler.send(429, b"", reason=key, Retry_After=key),
    lambda handler, key: handler.send(200, f"<html>{key}</html>".encode()),
    lambda handler, key: handler.send(503, base64.b64encode(key.encode())),
    lambda handler, key: handler.wfile.write(f"{key}\r\n\r\n".encode()),  # no status
)


def answer(path, body):
    """Return a correct reply to a search or a chat."""
    if "queries" in body:
        hit = {"document": {"id": "1", "contents": "a\nBorn here."}, "score": 1.0}
        return {"result": [[hit] for _ in body["queries"]]}
    if "q" in body:
        return {"organic": [{"title": "a", "link": "http://a", "snippet": "Born."}]}
    return {"choices": [{"message": {"content": "Born here."}}]}


@contextlib.contextmanager
def echoing_service(*, always=False):
    """Serve EchoHandler; yield its address and {path: number of its last request}."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), EchoHandler)
    server.numbers, server.always, server.answer = {}, always, answer
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}", server.numbers


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(VARIABLE, KEY)


def test_a_run_writes_the_keys_of_its_services_nowhere(tmp_path, capfd):
    """One service searches and one rewrites passages; each echoes the key."""
    with echoing_service() as (url, numbers):
        settings = dict(
            retrieval__url=url,
            retrieval__api_key_env=VARIABLE,
            retrieval__cache_size=0,
            models__writer__source=f"{url}/v1",
            models__writer__name="any",
            models__writer__api_key_env=VARIABLE,
            stages="('sft',)",
            sft__steps=2,
            sft__repeats=12,  # demonstrations search together, so many are needed
            eval__at_start=False,
            eval__methods="('protocol',)",
        )
        own = arguments(tmp_path / "run", **settings)
        command = [sys.executable, "-m", "rsearch.train", *own]
        seen = {}
        with open(tmp_path / "output", "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **child_environment()},
                stdout=output,
                stderr=output,
            )
            while process.poll() is None:
                seen |= dict(arguments_of(process))
                time.sleep(0.1)
        assert process.returncode == 0, (tmp_path / "output").read_text()
        export.main([*own, f"--out={tmp_path / 'model'}"])
    # Each has echoed the key in every way of LEAKS.
    assert {"/retrieve", "/v1/chat/completions"} == numbers.keys()
    assert all(number > 4 * len(LEAKS) for number in numbers.values()), numbers
    assert seen and (tmp_path / "run" / "results.json").exists()
    compare.main([str(tmp_path / "run")])
    captured = capfd.readouterr()
    named = [("stdout", captured.out.encode()), ("stderr", captured.err.encode())]
    assert not find_key([*seen.items(), *named, *files_below(tmp_path)])


@pytest.mark.parametrize("api", ["search_r1", "serper"])
def test_messages_about_a_failing_service_contain_no_key(api, capfd):
    with echoing_service(always=True) as (url, numbers):
        said = []
        search = RemoteSearch(
            url,
            api=api,
            top_k=1,
            api_key_env=VARIABLE,
            max_retries=0,
            outage_seconds=0.0,
            log=said.append,
        )
        for number in range(0, 4 * len(LEAKS), 4):
            numbers["/retrieve"] = numbers["/search"] = number - 1
            with pytest.raises(ValueError, match=r"config\.retrieval\.url") as raised:
                search.check()
            said += [
                str(raised.value),
                repr(raised.value),
                repr(raised.value.__context__),
            ]
        numbers["/retrieve"] = numbers["/search"] = -1
        assert search(["a"]) == [None]
    captured = capfd.readouterr()
    assert len(said) > 3 * len(LEAKS)
    texts = [
        *said,
        captured.out,
        captured.err,
        str(search),
        repr(search),
        search.fingerprint,
    ]
    assert not find_key([(text, text.encode()) for text in texts])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a small policy with its first weights."""
    setup = load_setup(config(), only_dev=True)
    folder = tmp_path_factory.mktemp("secrets") / "model"
    params = initial_params(setup)
    huggingface.export(folder, params, setup.model.spec, setup.tokenizer)
    return folder


def ask(port, body, *, path, token=KEY, kind="application/json"):
    """Return (status, everything else that a service sends back)."""
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    with contextlib.closing(asking):
        asking.request("POST", path, body, headers)
        reply = asking.getresponse()
        return reply.status, f"{reply.reason} {reply.headers}".encode() + reply.read()


@pytest.mark.parametrize("command", ["retriever", "tool"])
def test_a_service_reveals_its_token_to_nobody(command, tmp_path, model):
    words = [w for w in arguments(tmp_path) if not w.startswith("--workdir")]
    own = [f"--model={model}", "--serve"] if command == "tool" else []
    port = free_port()
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", f"rsearch.{command}", *words, *own),
                *(f"--port={port}", f"--token_env={VARIABLE}"),
            ],
            cwd=ROOT,
            env={**os.environ, **child_environment()},
            stdout=output,
            stderr=output,
        )
    path = "/search" if command == "tool" else "/retrieve"
    good = {"question": "Who?"} if command == "tool" else {"queries": ["Who?"]}
    bodies = [json.dumps(good), "{", "[]", '{"question": 1, "queries": 1}', '"\\ud83d"']
    try:
        while b"POST http" not in (tmp_path / "output").read_bytes():
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        told = [ask(port, body, path=path) for body in bodies]
        told += [ask(port, bodies[0], path=path, token=t) for t in ("", "x", KEY[:-1])]
        told += [
            ask(port, bodies[0], path="/other"),
            ask(port, "a", path=path, kind="a"),
        ]
        statuses = [status for status, _ in told]
        assert statuses == [200, 400, 400, 400, 400, 401, 401, 401, 404, 415]
        named = [(f"reply {i}", data) for i, (_, data) in enumerate(told)]
        named += arguments_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert not find_key([*named, *files_below(tmp_path)])

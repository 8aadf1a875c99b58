"""Where an API key may be sent, and how a service's refusals are reported."""

import http.server
import json
import time

import pytest

from rsearch.hosts import preemption
from rsearch.runtime.calls import (
    QUOTED_CHARS,
    OutageWatch,
    Reply,
    Service,
    parse_json,
    post,
)
from tests.running_server import running

KEY = "canary+8f3a/%7Yq&=~wren"
FIELD = "config.models.judge.source"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("ANY_KEY", KEY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def service(url, **settings):
    settings = {"path": lambda path: f"{path}/ask", "api_key_env": "ANY_KEY"} | settings
    return Service(url, field=FIELD, **settings)


@pytest.mark.fault(79, "plain http")
@pytest.mark.parametrize("host", ["host", "10.0.0.7:8000", "[fd00::1]:80", "127.org"])
def test_a_key_is_sent_to_another_machine_only_over_https(host):
    with pytest.raises(ValueError, match=r"config\.models\.judge\.key_over_http") as e:
        service(f"http://{host}/v1")
    assert "ANY_KEY" in str(e.value) and KEY not in str(e.value)
    service(f"https://{host}/v1")
    service(f"http://{host}/v1", key_over_http=True)
    service(f"http://{host}/v1", api_key_env="")


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.seen.append(dict(self.headers))
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"7")

    def log_message(self, *_):
        pass


@pytest.mark.fault(79, "proxy to loopback")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_key_for_this_machine_bypasses_proxies(host, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    server.seen = []
    with running(server):
        here = service(f"http://{host}:{server.server_port}")
        with here.client() as client:
            reply = post(
                client, here.target, b"", read=parse_json, max_bytes=9, seconds=9.0
            )
    assert reply.value == 7
    assert server.seen[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.fault(79, "key in a path")
@pytest.mark.parametrize(
    "path",
    [
        KEY,
        "v1/sk-proj-0123456789abcdef/x",
        "hf_0123456789abcdefghij",
        "key=a1b2c3d4e5f6g7",
    ],
)
def test_a_key_in_a_path_is_refused(path):
    with pytest.raises(ValueError, match="host") as error:
        service(f"https://host/{path}")
    assert path.split("/")[1 if "v1" in path else 0] not in str(error.value)


@pytest.mark.fault(79, "key in a path")
def test_a_possible_key_in_a_path_is_masked_in_messages():
    segment = "f3b1a9c07d5e4b628a9d"
    one = service(f"https://host/{segment}/v1")
    assert one.target == f"https://host/{segment}/v1/ask"
    assert one.masked_url == "https://host/***/v1/ask"
    assert service("https://host/openai/v1").masked_url == "https://host/openai/v1/ask"
    with pytest.raises(ValueError) as error:
        service(f"ftp://me:{segment}@host/{segment}?key={segment}")
    assert segment not in str(error.value)


@pytest.mark.fault(77, "first characters", "masked")
def test_a_services_reply_is_quoted_without_key_and_control_characters():
    one = service("https://host/v1")
    head = f"\x1b[31mno\x00 {KEY} \r\n{json.dumps(KEY)} {KEY.upper()} \u202e".encode()
    reply = Reply(None, "HTTP 401", None, head=head + b"\xff" + b"why " * 99)
    said = one.describe(reply)
    assert said.startswith("HTTP 401: [31mno ")
    assert said.isprintable() and "why why" in said
    assert len(said) <= len("HTTP 401: ") + QUOTED_CHARS
    assert "wren" not in said.lower() and "canary" not in said.lower()


@pytest.mark.fault(73, "anything that is raised")
@pytest.mark.parametrize(
    "raised", [OverflowError, MemoryError, RecursionError, UnicodeError, KeyError]
)
def test_any_exception_while_reading_a_reply_is_a_failed_call(raised):
    def read(received):
        raise raised("what was sent")

    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    server.seen = []
    with running(server):
        here = service(f"http://127.0.0.1:{server.server_port}")
        with here.client() as client:
            reply = post(client, here.target, b"", read=read, max_bytes=9, seconds=9.0)
    assert reply.value is None and reply.reason == raised.__name__


def test_a_run_that_is_asked_to_stop_does_not_wait_for_a_service(monkeypatch):
    monkeypatch.setattr(preemption, "is_stop_requested", lambda: True)
    calls = []

    def fail():
        calls.append(time.monotonic())
        return [Reply(None, "refused")]

    watch = OutageWatch("judge", outage_seconds=60.0, probe_seconds=0.0, log=print)
    for _ in range(2):
        watch.repeat_until_back(fail)
    with pytest.raises(preemption.PreemptedError):
        watch.repeat_until_back(fail)
    assert len(calls) == 3

"""Endpoints that answer, fail, stall and lie, and how their replies are read."""

import contextlib
import http.server
import json
import threading
import time
import types

import pytest

from rsearch.hosts.preemption import OutageError
from rsearch.llm import endpoint as remote
from rsearch.llm.endpoint import remote_generator
from rsearch.runtime import calls
from tests.running_server import running

KEY = "sk-very-secret-0123456789"
CHAT = [{"role": "user", "content": "Where? \ud83d {braces} \u00e9"}]


def reply(text, **more):
    """Return (status, body, headers) of an answer in OpenAI's format."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return 200, json.dumps({"choices": [choice]}).encode(), more


class Endpoint:
    """A server whose `behave` turns the request's number and body into an answer."""

    def __init__(self, behave):
        self.requests, self.headers = [], []
        self.lock, self.running, self.most_running = threading.Lock(), 0, 0
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint.lock:
                    number = len(endpoint.requests)
                    endpoint.requests.append((self.path, body))
                    endpoint.headers.append(dict(self.headers))
                    endpoint.running += 1
                    running = endpoint.running
                    endpoint.most_running = max(endpoint.most_running, running)
                answer = behave(number, body)
                with endpoint.lock:  # before the reply: the client may then ask again
                    endpoint.running -= 1
                with contextlib.suppress(OSError):  # the caller may have given up
                    endpoint.answer(self, *answer)

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # connections of a burst that wait; 5 by default

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    @staticmethod
    def answer(handler, status, body, headers):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        for start in range(0, len(body), 1 << 16):
            handler.wfile.write(body[start : start + (1 << 16)])


@contextlib.contextmanager
def serving(behave):
    endpoint = Endpoint(behave)
    with running(endpoint.server):
        yield endpoint


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)


@pytest.fixture
def said():
    return []


@pytest.fixture
def asking(said):
    """Return a function (URL, settings) -> a generator with short waits for retries."""

    def make(url, **changed):
        settings = {
            "api_key_env": "JUDGE_KEY",
            "max_reply_tokens": 8,
            "temperature": 0.1,
            "top_p": 0.9,
            "timeout_seconds": 5.0,
            "max_retries": 2,
            "concurrency": 4,
            "first_wait_seconds": 0.001,
            "log": said.append,
        }
        return remote_generator(url, "llama", **(settings | changed))

    return make


def test_a_chat_is_sent_as_it_is_and_its_reply_returned(asking, said):
    with serving(lambda number, body: reply(" Paris\n")) as endpoint:
        assert asking(endpoint.url)([CHAT]) == [" Paris\n"]
    ((path, body),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "llama",
        "messages": [{"role": "user", "content": "Where? \ufffd {braces} \u00e9"}],
        "max_tokens": 8,
        "temperature": 0.1,
        "top_p": 0.9,
        "stream": False,
    }
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}" and not said


def test_without_a_key_none_is_sent_and_a_complete_path_is_used_as_it_is(asking):
    with serving(lambda number, body: reply("x")) as endpoint:
        url = endpoint.url + "/chat/completions"
        assert asking(url, api_key_env="")([CHAT]) == ["x"]
    assert "Authorization" not in endpoint.headers[0]
    assert endpoint.requests[0][0] == "/v1/chat/completions"


def test_replies_keep_the_order_of_the_chats_and_calls_run_concurrently(asking):
    def behave(number, body):
        text = body["messages"][0]["content"]
        time.sleep(0.05 if int(text) % 2 else 0.1)
        return reply(text)

    chats = [[{"role": "user", "content": str(i)}] for i in range(12)]
    with serving(behave) as endpoint:
        assert asking(endpoint.url)(chats) == [str(i) for i in range(12)]
        assert 2 <= endpoint.most_running <= 4


def test_no_chats_need_no_call(asking):
    assert asking("http://127.0.0.1:9/v1")([]) == []


@pytest.mark.fault(38, "retried")
@pytest.mark.fault(32, "5xx")
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_transient_errors_are_retried(status, asking, said):
    def behave(number, body):
        return (status, b"busy", {}) if number < 2 else reply("Paris")

    with serving(behave) as endpoint:
        assert asking(endpoint.url)([CHAT]) == ["Paris"]
    assert len(endpoint.requests) == 3 and not said


@pytest.mark.fault(38, "unreachable", "retried")
def test_an_endpoint_that_stays_down_gives_none_after_all_retries(asking, said):
    def behave(number, body):
        is_up = body["messages"][0]["content"] == "up"
        return reply("Paris") if is_up else (503, b"", {})

    up = [{"role": "user", "content": "up"}]
    with serving(behave) as endpoint:
        assert asking(endpoint.url)([CHAT, up, CHAT]) == [None, "Paris", None]
    assert len(endpoint.requests) == 3 + 1 + 3
    (line,) = said
    assert line.endswith("2 of 3 chats failed: HTTP 503 (2)")


@pytest.mark.fault(38, "unreachable")
def test_a_port_on_which_nothing_listens_gives_none(asking, said):
    with serving(lambda number, body: reply("x")) as endpoint:
        pass  # the port is free again
    assert asking(endpoint.url)([CHAT]) == [None]
    assert said[0].endswith("1 of 1 chats failed: ConnectError (1)")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 301, 204])
def test_permanent_errors_are_not_retried(status, asking, said):
    body = f"wrong key {KEY}".encode() if status != 204 else b""
    headers = {"Location": "http://127.0.0.1:9/"} if status == 301 else {}
    with serving(lambda number, _: (status, body, headers)) as endpoint:
        assert asking(endpoint.url)([CHAT]) == [None]
    assert len(endpoint.requests) == 1
    assert f"HTTP {status}" in said[0] and KEY not in said[0]


@pytest.mark.fault(38, "prose")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>busy</html>",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"{}",
        b'{"choices": []}',
        b'{"choices": {}}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": null}}]}',
        b'{"choices": [{"message": {"content": ["x"]}}]}',
        b'{"choices": [{"text": "completions, not chat"}]}',
        b"\xff\xfe",
        b"[" * 60_000,
    ],
)
def test_a_reply_of_another_shape_is_none(body, asking, said):
    with serving(lambda number, _: (200, body, {})) as endpoint:
        assert asking(endpoint.url, max_retries=1)([CHAT]) == [None]
    assert len(endpoint.requests) == 2 and "another shape" in said[0]


THOUGHT = "<think>Lyon? No. <b>Nice</b>?</think>"


@pytest.mark.fault(74, "thought left out")
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"{THOUGHT}\n\nParis", "Paris"),
        ("no opening tag: Lyon?</think>Paris", "Paris"),
        (f"{THOUGHT}Nice{THOUGHT} Paris\n", "Paris\n"),
        ("<THINKING>x</Thinking>Paris", "Paris"),
        ("[THINK]x[/THINK]Paris", "Paris"),
        (" Paris, I think\n", " Paris, I think\n"),
    ],
)
def test_the_answer_of_a_reply_is_what_follows_its_last_thought(text, answer, asking):
    with serving(lambda number, body: reply(text)) as endpoint:
        assert asking(endpoint.url)([CHAT]) == [answer]


def ending(content, end, **message):
    message = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": message, "finish_reason": end}
    return 200, json.dumps({"choices": [choice]}).encode(), {}


NO_ANSWERS = {
    "a thought without an end": ending("<think>Lyon?", "stop"),
    "a thought after the answer": ending("Paris <think>Or", "stop"),
    "cut within a thought": ending("<think>Lyon?", "length"),
    "cut after a thought": ending(f"{THOUGHT}\n", "length"),
    "cut elsewhere": ending(None, "length", reasoning_content="Lyon?"),
    "only thoughts": ending(None, "stop", reasoning="Lyon?"),
    "empty": ending("", "stop", reasoning_content="Paris"),
    "blank": ending(" \n", "stop"),
    "refused": ending(None, "stop", refusal="I cannot help with that."),
    "filtered": ending("Par", "content_filter"),
    "broken off": ending("Par", "abort"),
}


@pytest.mark.fault(
    74, "unclosed thought", "nothing left", "empty text", "refusal", "counted"
)
def test_a_reply_without_an_answer_is_a_failed_call_and_is_counted(asking, said):
    def behave(number, body):
        name = body["messages"][0]["content"]
        return NO_ANSWERS.get(name) or reply("Paris")

    chats = [[{"role": "user", "content": name}] for name in [*NO_ANSWERS, "good"]]
    with serving(behave) as endpoint:
        ask = asking(endpoint.url, max_retries=0)
        assert ask(chats) == [None] * len(NO_ANSWERS) + ["Paris"]
    (line,) = said
    assert f"{len(NO_ANSWERS)} of {len(chats)} chats failed" in line
    assert "cut" in line or "thought" in line or "empty" in line


def test_a_truncated_answer_counts_as_an_answer(asking):
    with serving(lambda number, body: ending("Paris is the", "length")) as endpoint:
        assert asking(endpoint.url)([CHAT]) == ["Paris is the"]


def test_half_a_character_in_a_reply_is_replaced(asking):
    with serving(lambda number, body: reply("a\ud83d")) as endpoint:
        (text,) = asking(endpoint.url)([CHAT])
    assert text == "a\N{REPLACEMENT CHARACTER}"


def test_a_reply_that_is_too_long_is_none(asking, said):
    max_bytes = remote.ENVELOPE_BYTES + 8 * remote.BYTES_PER_TOKEN
    with serving(lambda number, body: reply("x" * 5 * max_bytes)) as endpoint:
        assert asking(endpoint.url, max_retries=0)([CHAT]) == [None]
    assert f"more than {max_bytes} bytes" in said[0]


@pytest.mark.fault(31, "gzip bomb")
def test_a_compressed_reply_is_not_decompressed(asking, said):
    packed = (200, b"\x1f\x8b\x08" + bytes(100), {"Content_Encoding": "gzip"})
    with serving(lambda number, body: packed) as endpoint:
        assert asking(endpoint.url, max_retries=0)([CHAT]) == [None]
    assert endpoint.headers[0]["Accept-Encoding"] == "identity"


def test_a_slow_endpoint_is_given_up(asking, said):
    def behave(number, body):
        time.sleep(0.5)
        return reply("late")

    with serving(behave) as endpoint:
        start = time.monotonic()
        ask = asking(endpoint.url, timeout_seconds=0.1, max_retries=1)
        assert ask([CHAT]) == [None]
        assert time.monotonic() - start < 2 and len(endpoint.requests) == 2
    assert "too slow (1)" in said[0]


@pytest.mark.fault(32, "slow bytes")
def test_a_reply_that_trickles_is_given_up(asking, said, monkeypatch):
    def trickle(handler, status, body, headers):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(60):  # each byte arrives within the timeout of a read
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)

    monkeypatch.setattr(Endpoint, "answer", staticmethod(trickle))
    with serving(lambda number, body: reply("x")) as endpoint:
        start = time.monotonic()
        ask = asking(endpoint.url, timeout_seconds=0.3, max_retries=0)
        assert ask([CHAT]) == [None]
        assert time.monotonic() - start < 2
    assert "too slow" in said[0]


def test_waits_grow_are_random_and_follow_the_endpoints_retry_after(
    asking, monkeypatch
):
    waits = []
    clock = types.SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    monkeypatch.setattr(calls, "time", clock)
    headers = iter([{}, {}, {"Retry_After": "7"}, {"Retry_After": "99999"}, {}])

    with serving(lambda number, body: (503, b"", next(headers))) as endpoint:
        ask = asking(endpoint.url, max_retries=4, first_wait_seconds=1.0)
        assert ask([CHAT]) == [None]
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2
    assert waits[2:] == [7.0, calls.MAX_WAIT_SECONDS]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/v1", "'ftp://host/v1' must be an http:// or https:// URL"),
        ("host:80", "must be an http"),
        ("http://", "must be an http"),
        ("https://me:hunter2@host/v1", "host must not contain a password"),
        ("https://host/v1?key=hunter2", "host must not contain a password, query"),
        ("ftp://me:hunter2@host/v1", "'host/v1' must be an http"),
    ],
)
def test_an_endpoint_is_a_plain_url(url, message, asking):
    with pytest.raises(ValueError, match=message) as error:
        asking(url)
    assert "hunter2" not in str(error.value)


def test_a_key_must_be_set_and_be_a_valid_header(asking, monkeypatch):
    with pytest.raises(ValueError, match="'NO_SUCH_KEY' is not set"):
        asking("http://host/v1", api_key_env="NO_SUCH_KEY")
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\r\nX-Other: 1")
    with pytest.raises(ValueError, match="'JUDGE_KEY' holds no key") as error:
        asking("http://host/v1")
    assert KEY not in str(error.value)
    with pytest.raises(ValueError, match="several models"):
        remote_generator(
            "http://host/v1",
            "",
            api_key_env="",
            max_reply_tokens=1,
            temperature=0.0,
            top_p=1.0,
            timeout_seconds=1.0,
            max_retries=0,
            concurrency=1,
        )


@pytest.mark.fault(77, "refused at the start", "first characters", "masked")
@pytest.mark.parametrize("status", [400, 401, 403, 404, 301])
def test_an_endpoint_that_refuses_at_the_start_is_reported_with_its_reply(
    status, asking, said
):
    body = f'{{"error": "no\x1b model for {KEY}: {"x" * 999}"}}'.encode()
    with serving(lambda number, _: (status, body, {})) as endpoint:
        ask = asking(endpoint.url, field="config.models.judge.source")
        with pytest.raises(ValueError, match=r"config\.models\.judge\.source") as error:
            ask.check()
    message = str(error.value)
    assert f"HTTP {status}" in message and "no model for" in message
    assert KEY not in message and message.isprintable() and len(message) < 400
    assert len(endpoint.requests) == 1 and not said


@pytest.mark.fault(77, "refused at the start")
def test_a_server_that_is_not_an_endpoint_is_refused_at_the_start(asking):
    page = (200, b"<html>Welcome</html>", {})
    with (
        serving(lambda number, _: page) as endpoint,
        pytest.raises(ValueError, match="Welcome"),
    ):
        asking(endpoint.url).check()


@pytest.mark.fault(77, "transient at the start")
@pytest.mark.parametrize("answer", [(503, b"loading", {}), (429, b"", {}), None])
def test_an_endpoint_that_is_still_starting_is_reported_and_not_refused(
    answer, asking, said
):
    with serving(lambda number, _: answer or ending("<think>x", "length")) as endpoint:
        asking(endpoint.url).check()
        assert len(endpoint.requests) == 1 and endpoint.url in said[0]
    asking(endpoint.url).check()
    assert "ConnectError" in said[1]


def test_an_endpoint_that_answers_is_called_once_and_nothing_is_reported(asking, said):
    with serving(lambda number, _: reply("Here.")) as endpoint:
        asking(endpoint.url).check()
    assert len(endpoint.requests) == 1 and not said


@pytest.mark.fault(77, "outage")
def test_a_model_that_does_not_answer_is_waited_for_and_then_ends_the_run(
    asking, said, monkeypatch
):
    monkeypatch.setattr(remote, "PROBE_SECONDS", 0.01)
    answers = iter([(503, b"", {})] * 4)
    with serving(lambda number, _: next(answers, None) or reply("Paris")) as endpoint:
        ask = asking(endpoint.url, max_retries=0, outage_seconds=60.0)
        assert [ask([CHAT]) for _ in range(3)] == [[None], [None], ["Paris"]]
        assert len(endpoint.requests) == 5
    ask = asking(endpoint.url, max_retries=0, outage_seconds=0.0)
    with pytest.raises(OutageError):
        for _ in range(4):
            ask([CHAT])


@pytest.mark.fault(76, "no outage")
def test_refused_chats_do_not_count_as_an_outage(asking):
    with serving(lambda number, _: (400, b"too long", {})) as endpoint:
        ask = asking(endpoint.url, max_retries=0, outage_seconds=0.0)
        assert [ask([CHAT]) for _ in range(5)] == [[None]] * 5

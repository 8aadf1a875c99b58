"""OpenAI's API: the service with a scripted policy, and its clients."""

import concurrent.futures
import contextlib
import json
import threading
import time

import httpx
import pytest

from rsearch.hosts.preemption import OutageError
from rsearch.runtime.prometheus import RequestMetrics
from rsearch.runtime.server import JsonServer
from rsearch.serving import chat, service
from tests.rollout import scripted, tiny
from tests.running_server import MODEL, running
from tests.serving.scripted_tool import TURNS, ScriptedTool

CITATIONS = [
    {"id": "c", "title": "city", "text": scripted.find([""])[0][0].text},
]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "who was born"}]}
STREAMED = [
    TURNS[0],
    f"\n{TURNS[1]}",
]  # joined, the text of a reply that is not streamed
NUM_TOKENS = sum(len(tiny.tokenizer().encode(turn)) for turn in TURNS)


@contextlib.contextmanager
def serving(tool=None, **settings):
    """Yield the address of a service around a tool."""
    requests = RequestMetrics()
    routes = service.routes_of(tool or ScriptedTool(), MODEL, requests)
    settings = {"error_body": chat.chat_error_body, **settings}
    server = JsonServer("127.0.0.1", 0, routes, **settings)
    server.on_reply = requests.observe
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def url():
    with serving() as url:
        yield url


def test_a_chat_gets_the_answer_with_its_searches_and_citations(url):
    reply = httpx.post(f"{url}/v1/chat/completions", json=ASKED).json()
    assert (reply["object"], reply["model"]) == ("chat.completion", MODEL)
    (choice,) = reply["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("city", "stop")
    assert message["reasoning_content"] == "\n".join(TURNS)
    (use,) = message["tool_uses"]
    assert (use["tool"], use["arguments"]) == ("search", ["river"])
    assert use["passages"] == [{**CITATIONS[0], "score": 0.0}]
    assert (message["citations"], message["outcome"]) == (CITATIONS, "answered")
    usage = reply["usage"]
    assert usage["completion_tokens"] == NUM_TOKENS
    both = usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["total_tokens"] == both > 2 * usage["completion_tokens"]
    result = httpx.post(f"{url}/search", json={"question": "who was born"}).json()
    assert (result["answer"], result["passages"]) == ("city", CITATIONS)


def events_of(url, **more):
    """Return the data of each event of a stream."""
    body = {**ASKED, "stream": True, **more}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        return [line[6:] for line in reply.iter_lines() if line]


def test_a_stream_has_each_step_and_ends_with_the_answer(url):
    *events, done = events_of(url, stream_options={"include_usage": True})
    assert done == chat.DONE
    *chunks, last = map(json.loads, events)
    assert not last["choices"] and last["usage"]["total_tokens"] > 0
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [sorted(delta) for delta in deltas] == [
        ["content", "role"],
        ["reasoning_content"],
        ["tool_uses"],
        ["reasoning_content"],
        ["citations", "content", "outcome"],
        [],
    ]
    assert [d["reasoning_content"] for d in (deltas[1], deltas[3])] == STREAMED
    assert (deltas[4]["content"], deltas[4]["citations"]) == ("city", CITATIONS)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 5 + ["stop"]


def test_a_long_turn_is_streamed_a_few_tokens_at_a_time():
    """Each character is sent once and complete, although tokens may end inside it."""
    turns = ["é" * 20 + scripted.SEARCHES, scripted.LONG_ANSWER]
    with serving(ScriptedTool(turns)) as url:
        *events, _ = events_of(url)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    (use,) = (i for i, delta in enumerate(deltas) if "tool_uses" in delta)
    texts = [delta.get("reasoning_content", "") for delta in deltas]
    assert "".join(texts[:use]) == turns[0]
    assert "".join(texts[use:]) == f"\n{turns[1]}"
    for pieces in (texts[1:use], texts[use + 1 : -2]):
        assert len(pieces) > 2 and all(pieces)


@pytest.mark.parametrize(
    ("change", "status", "param", "code"),
    [
        ({"model": "gpt"}, 404, "model", "model_not_found"),
        ({"model": 3}, 400, "model", "invalid_value"),
        ({"logprobs": True}, 400, "logprobs", "unsupported_parameter"),
        ({"n": 2}, 400, "n", "unsupported_value"),
        ({"n": True}, 400, "n", "unsupported_value"),
        ({"temperature": 0.7}, 400, "temperature", "unsupported_value"),
        ({"stream": 1}, 400, "stream", "invalid_value"),
        ({"stream_options": {}}, 400, "stream_options", "invalid_value"),
        ({"user": 3}, 400, "user", "invalid_value"),
        ({"messages": "who"}, 400, "messages", "invalid_value"),
        ({"messages": [ASKED["messages"][0]] * 2}, 400, "messages", "invalid_value"),
        ({"messages": [3]}, 400, "messages[0]", "invalid_value"),
        (
            {"messages": [{"role": "system", "content": "a"}]},
            *(400, "messages[0].role", "invalid_value"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            *(400, "messages[0].content", "invalid_value"),
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 201}]},
            *(400, "messages", "invalid_value"),
        ),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused(url, change, status, param, code):
    reply = httpx.post(f"{url}/v1/chat/completions", json=ASKED | change)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error" and error["message"]


def test_parameters_that_are_null_are_not_set(url):
    """Clients send null for parameters that their users leave out, known or not."""
    nulls = dict.fromkeys(("n", "user", "stream", "stream_options", "seed", "tools"))
    reply = httpx.post(f"{url}/v1/chat/completions", json=ASKED | nulls)
    assert reply.json()["choices"][0]["message"]["content"] == "city"


def test_errors_of_the_server_itself_have_openais_format():
    with serving(token="secret") as url:
        reply = httpx.get(f"{url}/v1/models")
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "authentication_error"
        right = {"Authorization": "Bearer secret"}
        listed = httpx.get(f"{url}/v1/models", headers=right).json()
        assert [entry["id"] for entry in listed["data"]] == [MODEL]
        assert isinstance(httpx.get(f"{url}/search").json()["error"], str)


def test_a_failed_search_is_a_server_error():
    with serving(ScriptedTool(search=lambda queries: [None for _ in queries])) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=ASKED)
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "server_error"
        last = json.loads(events_of(url)[-1])
        assert last["error"]["type"] == "server_error"


class Held:
    """A search that waits until `go_on` is set, and counts its calls."""

    def __init__(self):
        self.is_searching, self.go_on = threading.Event(), threading.Event()
        self.num_calls = 0

    def __call__(self, queries):
        self.num_calls += 1
        self.is_searching.set()
        assert self.go_on.wait(30)
        return scripted.find(queries)


def wait_until_free(url):
    """Wait until the only slot is free again."""
    for _ in range(300):
        reply = httpx.post(f"{url}/v1/chat/completions", json=ASKED, timeout=30)
        if reply.status_code == 200:
            return
    raise AssertionError(reply.text)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_disconnects_ends_its_rollout(streams):
    search = Held()
    tool = ScriptedTool(
        [scripted.SEARCHES, scripted.SEARCHES, scripted.ANSWERS], search
    )
    with serving(tool, max_waiting=1) as url:
        try:
            with httpx.Client() as client, contextlib.suppress(httpx.ReadTimeout):
                request = client.build_request(
                    "POST",
                    f"{url}/v1/chat/completions",
                    json={**ASKED, "stream": streams},
                    timeout=0.5,
                )
                reply = client.send(request, stream=True)
                assert search.is_searching.wait(30)
                reply.close()
            assert search.is_searching.wait(30)
            time.sleep(3 * chat.POLL_SECONDS)
        finally:
            search.go_on.set()
        wait_until_free(url)
        assert search.num_calls == 3  # one of the first rollout, two of this one
        assert tool.counts()["questions_running"] == 0


def test_questions_that_arrive_during_a_batch_form_the_next():
    search = Held()
    tool = ScriptedTool(TURNS, search)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(tool, "first")
        assert search.is_searching.wait(30)
        others = [pool.submit(tool, [text, text]) for text in ("second", "third")]
        while tool.counts()["questions_waiting"] < 4:
            time.sleep(0.001)
        assert tool.counts()["questions_running"] == 1 and not first.done()
        search.go_on.set()
        assert first.result(30)["answer"] == "city"
        for text, other in zip(("second", "third"), others):
            assert [r["question"] for r in other.result(30)] == [text] * 2
    assert search.num_calls == 2  # the four are searched for together


def test_a_question_that_is_cancelled_while_it_waits_leaves_the_queue():
    """Callers that come and go do not pile up behind a search that hangs."""
    search, is_cancelled = Held(), threading.Event()
    tool = ScriptedTool(TURNS, search)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(tool, "first")
        try:
            assert search.is_searching.wait(30)
            left = [
                pool.submit(tool.ask, "second", is_cancelled=is_cancelled.is_set)
                for _ in range(3)
            ]
            while tool.counts()["questions_waiting"] < 3:
                time.sleep(0.001)
            is_cancelled.set()
            for call in left:
                error = call.exception(timeout=10)
                assert isinstance(error, concurrent.futures.CancelledError)
            assert tool.counts()["questions_waiting"] == 0 and not first.done()
        finally:
            search.go_on.set()
        assert first.result(30)["answer"] == "city"


def test_an_outage_is_a_server_error():
    def search(queries):
        raise OutageError("http://x: unreachable for 300 s")

    with serving(ScriptedTool(search=search)) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=ASKED)
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "server_error"
        last = json.loads(events_of(url)[-1])
        assert last["error"]["type"] == "server_error"


def test_metrics_count_requests_tokens_and_searches():
    with serving() as url:
        assert httpx.get(f"{url}/ready").json() == {"status": "ok"}
        httpx.post(f"{url}/v1/chat/completions", json=ASKED)
        httpx.get(f"{url}/{'x' * 50}")
        httpx.post(f"{url}/v1/chat/completions", json={})
        reply = httpx.get(f"{url}/metrics")
        # A request is counted once its reply has been sent, so it may take a moment.
        while f'{chat.CHAT}",status="400"' not in reply.text:
            reply = httpx.get(f"{url}/metrics")
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = dict(line.rsplit(" ", 1) for line in reply.text.splitlines())
    path = chat.CHAT
    name = "rsearch_requests_total"
    assert lines[f'{name}{{route="{path}",status="200"}}'] == "1"
    assert lines[f'{name}{{route="{path}",status="400"}}'] == "1"
    assert lines[f'{name}{{route="",status="404"}}'] == "1"
    assert lines[f'rsearch_request_seconds_count{{route="{path}"}}'] == "2"
    bucket = f'rsearch_request_seconds_bucket{{route="{path}",le="+Inf"}}'
    assert lines[bucket] == "2"
    assert lines["rsearch_questions_total"] == lines["rsearch_searches_total"] == "1"
    assert lines["rsearch_tokens_written_total"] == str(NUM_TOKENS)
    assert lines["rsearch_questions_waiting"] == "0"


@pytest.fixture(scope="module")
def client(url):
    """Yield OpenAI's client for this service."""
    pytest.importorskip("openai")
    import openai

    transport = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=transport, max_retries=0
    ) as client:
        yield client


def test_the_official_client_gets_an_answer(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    reply = client.chat.completions.create(**ASKED)
    assert reply.choices[0].message.content == "city"
    assert reply.choices[0].message.citations == CITATIONS
    assert reply.usage.completion_tokens == NUM_TOKENS


def test_the_official_client_reads_a_stream(client):
    chunks = [*client.chat.completions.create(**ASKED, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "city"
    thoughts = [d.reasoning_content for d in deltas if hasattr(d, "reasoning_content")]
    assert thoughts == STREAMED
    assert [d.citations for d in deltas if hasattr(d, "citations")] == [CITATIONS]


def test_the_official_client_sees_an_error(client):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED, temperature=1.0)
    assert (caught.value.param, caught.value.code) == (
        "temperature",
        "unsupported_value",
    )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASKED | {"model": "gpt"})
    broken = ScriptedTool(search=lambda queries: [None for _ in queries])
    with serving(broken) as url:
        other = client.with_options(base_url=f"{url}/v1")
        with pytest.raises(openai.InternalServerError):
            other.chat.completions.create(**ASKED)
        with pytest.raises(openai.APIError):
            [*other.chat.completions.create(**ASKED, stream=True)]


def test_the_official_client_cancels_by_closing_its_stream(client):
    search = Held()
    tool = ScriptedTool([scripted.SEARCHES, *TURNS], search)
    with serving(tool, max_waiting=1) as url:
        other = client.with_options(base_url=f"{url}/v1")
        stream = other.chat.completions.create(**ASKED, stream=True)
        next(iter(stream))
        assert search.is_searching.wait(30)
        stream.close()
        time.sleep(3 * chat.POLL_SECONDS)
        search.go_on.set()
        wait_until_free(url)
        assert search.num_calls == 3

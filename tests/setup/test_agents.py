"""Models next to the policy: the kinds of sources, and the model that each gives."""

import contextlib
import dataclasses
import itertools
import json
import re
import socket
import struct
import threading
import time
import types

import jax
import numpy as np
import pytest

from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.sharding import make_mesh
from rsearch.runtime import calls
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_replies
from rsearch.setup import agents
from rsearch.setup.load import load_setup
from rsearch.setup.rollouts import make_host
from rsearch.setup.stages import load_rewriter
from rsearch.setup.weights import initial_params, trained_params
from rsearch.types import Outcome
from tests.llm.test_endpoint import serving
from tests.small_run import config, finished, quick_compilation

__all__ = ["quick_compilation"]
JUDGED = {"evidence_f1": {}, "answer_em": {}}
CHAT = [{"role": "user", "content": "Who?"}]
ROLES_NOT_ASKED = ("judge", "rewriter", "reader", "subject")
LONG = [{"role": "user", "content": "x y" * 99}]


@pytest.fixture(scope="module")
def setup():
    return load_setup(config(), only_dev=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, setup):
    folder = tmp_path_factory.mktemp("agent") / "model"
    params = initial_params(setup)
    huggingface.export(folder, params, setup.model.spec, setup.tokenizer)
    return folder


def asking(name, source, **changes):
    """Return a configuration with a small section for the model `name`."""
    sizes = {"max_prompt_tokens": 64, "max_reply_tokens": 3, "max_concurrent": 8}
    fields = {"source": str(source), **sizes, **changes}
    return config(**{f"models__{name}__{f}": value for f, value in fields.items()})


def mesh():
    return make_mesh(devices=jax.devices()[:1])


@pytest.mark.parametrize("name", ["judge", "rewriter", "writer", "answerer", "reader"])
def test_a_section_without_a_source_gives_no_model(name):
    assert agents.load_agent(config(), name, mesh()) is None


def test_a_directory_is_a_model_that_replies(folder):
    ask = agents.load_agent(asking("reader", folder), "reader", mesh())
    first, none, second = ask([CHAT, LONG, CHAT])
    assert isinstance(first, str) and first == second and none is None


def test_a_section_sets_how_its_model_samples(folder):
    drawn = [
        agents.load_agent(
            asking("rewriter", folder, temperature=temperature), "rewriter", mesh()
        )([CHAT] * 6)
        for temperature in (0.0, 5.0)
    ]
    assert [len(set(replies)) > 1 for replies in drawn] == [False, True]


def test_other_sources_are_resolved_by_the_function_given(folder):
    asked = []

    def find(source):
        asked.append(source)
        return folder

    ask = agents.load_agent(asking("judge", "world:judge"), "judge", mesh(), find=find)
    assert asked == ["world:judge"] and ask([LONG]) == [None]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_recorded_rewriter_is_not_asked_again(setup, tmp_path, is_over):
    """The last checkpoint of a stage that is over may turn out to be damaged."""
    reply, log = "reworded", AppendLog(tmp_path, "rewriter")
    generate = record_replies(lambda chats: [reply] * len(chats), log)
    assert generate([CHAT]) == [reply]
    address = {"source": "http://127.0.0.1:9", "name": "m"}  # nobody answers there
    c = config(**{f"models__rewriter__{field}": x for field, x in address.items()})
    setup = dataclasses.replace(setup, config=c)
    again = load_rewriter(setup, tmp_path, is_over=is_over)
    assert again([CHAT]) == [reply]


@contextlib.contextmanager
def listening(answer):
    """Yield the port of a server that calls answer(connection, number) per client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for number in itertools.count():
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                with connection, contextlib.suppress(OSError):
                    answer(connection, number)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def at_endpoint(url, max_retries):
    """Return a judge at this address with a timeout of a second."""
    c = config(
        models__judge__source=url,
        models__judge__name="m",
        models__judge__timeout_seconds=1.0,
        models__judge__max_retries=max_retries,
    )
    return agents.load_agent(c, "judge", mesh())


def reset(connection, number):
    """Reset the connection in the middle of a reply."""
    connection.recv(10_000)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{")
    linger = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@pytest.mark.fault(32, "reset", "unknown host", "TLS")
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:{port}/v1", "ReadError|RemoteProtocolError"),
        ("https://127.0.0.1:{port}/v1", "ConnectError|too slow"),  # without TLS
        ("http://no.host.at.all.invalid/v1", "ConnectError|too slow"),
    ],
)
def test_an_endpoint_behind_a_network_fault_gives_none(url, why, capsys):
    with listening(reset) as port:
        ask = at_endpoint(url.format(port=port), max_retries=0)
        assert ask([CHAT, CHAT]) == [None, None]
    message = capsys.readouterr().err
    assert "2 of 2 chats failed" in message and re.search(why, message)


@pytest.mark.fault(32, "Retry-After as a date")
def test_a_distant_retry_after_date_does_not_cause_a_long_wait(monkeypatch):
    def busy_at_first(connection, number):
        connection.recv(10_000)
        if number == 0:
            head = "503 Busy\r\nRetry-After: Fri, 31 Dec 9999 23:59:59 GMT"
            body = ""
        else:
            head = "200 OK"
            body = json.dumps({"choices": [{"message": {"content": "Paris"}}]})
        sent = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{sent}Connection: close\r\n\r\n{body}".encode())

    waits = []
    clock = types.SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    monkeypatch.setattr(calls, "time", clock)
    with listening(busy_at_first) as port:
        ask = at_endpoint(f"http://127.0.0.1:{port}/v1", max_retries=1)
        assert ask([CHAT]) == ["Paris"]
    assert waits == [calls.MAX_WAIT_SECONDS]


def test_a_lazy_model_is_loaded_once_on_its_first_call(folder):
    actual = []

    def find(source):
        actual.append(source)
        return folder

    c = asking("judge", "world:judge")
    ask = agents.load_agent(c, "judge", mesh(), find=find, is_lazy=True)
    assert actual == []
    assert ask([LONG]) == ask([LONG]) == [None] and actual == ["world:judge"]
    assert agents.load_agent(config(), "judge", mesh(), is_lazy=True) is None


def test_a_context_that_is_too_small_is_refused(folder):
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), "max_position_embeddings": 66}))
    with pytest.raises(ValueError, match=r"writer\.max_.* make 67 tokens, .* is 66"):
        agents.load_agent(asking("writer", folder), "writer", mesh())
    path.write_text(before)


def test_a_stage_as_source_gives_the_model_that_it_has_trained(setup):
    model, tokenizer, params = agents.stage_model("rl", mesh(), workdir=finished())
    assert model.spec == setup.model.spec
    assert tokenizer.fingerprint == setup.tokenizer.fingerprint
    stage, _, trained = trained_params(setup, finished())
    assert stage == "rl"
    jax.tree.map(np.testing.assert_array_equal, params, trained)
    _, _, imitating = agents.stage_model("sft", mesh(), workdir=finished())
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, imitating)
    assert not all(jax.tree.leaves(same))
    asked = asking("rewriter", "stage:sft")
    ask = agents.load_agent(asked, "rewriter", mesh(), workdir=finished())
    # A model this small may not reach the end of its thought.
    assert isinstance(ask([CHAT])[0], str | None)


def test_a_missing_stage_is_refused_by_name(tmp_path):
    c = asking("rewriter", "stage:sft_rewriter")
    with pytest.raises(ValueError, match="no run is given"):
        agents.load_agent(c, "rewriter", mesh())
    with pytest.raises(ValueError, match="not a workdir"):
        agents.load_agent(c, "rewriter", mesh(), workdir=tmp_path)
    with pytest.raises(ValueError, match="has the stages sft, rl"):
        agents.load_agent(c, "rewriter", mesh(), workdir=finished())
    whole = json.loads((finished() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="checkpoints holds no checkpoint"):
        agents.stage_model("sft", mesh(), workdir=tmp_path)


def test_a_judge_is_loaded_only_if_a_reward_term_calls_one(folder):
    plain = load_setup(asking("judge", folder))
    assert plain.judge is None and plain.writer is None
    named = {"source": str(folder), "max_prompt_tokens": 64, "max_reply_tokens": 3}
    fields = {f"models__judge__{name}": value for name, value in named.items()}
    assert load_setup(config(reward=JUDGED, **fields)).judge is not None


@pytest.mark.fault(77, "refused at the start")
@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("judge", {"reward": JUDGED}, {}),
        ("writer", {}, {}),
        ("answerer", {}, {"only_dev": True}),
        ("answerer", {}, {"only_policy": True}),
        ("reader", {"eval__methods": ("reader_direct",)}, {"only_dev": True}),
        ("eval_judge", {}, {"only_dev": True}),
        ("subject", {"eval__methods": ("protocol", "rag")}, {"only_dev": True}),
    ],
)
def test_a_run_whose_endpoint_refuses_stops_before_anything_is_loaded(
    name, changes, settings
):
    with serving(lambda number, body: (404, b"no such model", {})) as endpoint:
        at = {f"models__{name}__source": endpoint.url, f"models__{name}__name": "m"}
        said = []
        with pytest.raises(ValueError, match=f"models.{name}.source.*no such model"):
            load_setup(config(**changes, **at), log=said.append, **settings)
    assert len(endpoint.requests) == 1 and not said


@pytest.mark.parametrize(
    ("method", "path", "lacking"),
    [
        ("flare:theta=0.5", "/completions", "log-probabilities of a reply's tokens"),
        ("replug", "/chat/completions", "list of the 20 likeliest next tokens"),
        ("rag_rerank:top_k=1", "/chat/completions", "log-probabilities of a text"),
        ("longllmlingua", "/chat/completions", "log-probabilities of a text"),
        ("selective_context", "/chat/completions", "log-probabilities of a text"),
    ],
)
def test_an_endpoint_that_lacks_what_a_method_needs_is_refused_at_the_start(
    method, path, lacking
):
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "text": "a", "finish_reason": "length"}
    answer = 200, json.dumps({"choices": [choice]}).encode(), {}
    with serving(lambda number, body: answer) as endpoint:
        at = {"models__subject__source": endpoint.url, "models__subject__name": "m"}
        load_setup(config(eval__methods=("direct",), **at), only_dev=True)
        assert len(endpoint.requests) == 1
        words = f"models.subject.source.*{lacking}.* which '{method}' of config"
        with pytest.raises(ValueError, match=words):
            load_setup(config(eval__methods=("direct", method), **at), only_dev=True)
        if lacking.endswith("a text"):  # the policy may score it instead
            at |= {"eval__methods": (method,), "eval__scored_by": "policy"}
            load_setup(config(**at), only_dev=True)
    assert [p.endswith(path) for p, _ in endpoint.requests[1:]][-1]


def test_a_model_that_is_not_used_need_not_answer():
    with serving(lambda number, body: (404, b"", {})) as endpoint:
        at = {"source": endpoint.url, "name": "m"}
        names = [(role, n) for role in ROLES_NOT_ASKED for n in at]
        fields = {f"models__{role}__{n}": at[n] for role, n in names}
        load_setup(config(eval__methods=("protocol",), **fields), only_dev=True)
    assert not endpoint.requests


def test_a_reward_term_that_calls_a_judge_is_refused_without_one():
    with pytest.raises(ValueError, match=r"name one in config\.models\.judge\.source"):
        load_setup(config(reward=JUDGED))


def test_with_a_writer_the_policy_reads_the_writers_text(folder):
    written = load_setup(asking("writer", folder, max_prompt_tokens=200))
    host = make_host(written)
    question = written.dev[0]
    ids = host.tokenizer.encode("<search> Cormad </search>")
    conversation = host.open(host.prompt(written.protocol.messages(question.text)))
    turn = {0: (ids, np.zeros(len(ids), np.float32))}
    host.answer_turns({0: conversation}, turn, final=False)
    assert conversation.outcome is None
    ((passage,),) = conversation.tool_uses[0].result.data
    assert passage.id.startswith("written from ") and passage.title == ""
    tight = load_setup(asking("writer", folder, max_prompt_tokens=5))
    host = make_host(tight)
    conversation = host.open(host.prompt(written.protocol.messages(question.text)))
    host.answer_turns({0: conversation}, turn, final=False)
    assert conversation.outcome == Outcome.TOOL_ERROR

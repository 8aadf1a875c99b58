"""Both services behave as /openapi.json says, for requests generated from it."""

import contextlib

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from rsearch.runtime.server import JsonServer
from rsearch.serving.chat import chat_error_body
from tests.running_server import routes, running

TOKEN = "canary-0123"
AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # no shrinking: failures are small enough
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(autouse=True, scope="module")
def no_proxy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@contextlib.contextmanager
def serving(name, **settings_):
    """Run a service; yield its URL."""
    settings_ |= {"error_body": chat_error_body}
    with running(JsonServer("127.0.0.1", 0, routes(name), **settings_)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(scope="module", params=["tool", "retriever"])
def schema(request):
    """The schema that a service publishes; the service keeps running."""
    with serving(request.param, token=TOKEN, timeout_seconds=2.0) as url:
        told = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=AUTHORISED)
        told.name = request.param
        yield told


def operations(schema):
    return [actual.ok() for actual in schema.get_all_operations()]


@pytest.mark.fault(49, "body", "numbers")
@pytest.mark.parametrize("mode", GenerationMode)
def test_a_service_behaves_as_its_schema_says(schema, mode):
    num_refused = 0

    @SETTINGS
    @given(st.data())
    def asked(data):
        nonlocal num_refused
        operation = data.draw(st.sampled_from(operations(schema)))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        reply = case.call(headers=AUTHORISED, timeout=20)
        # Schemathesis does not count 413 (the body is too long) as a refusal.
        is_long = reply.status_code == 413
        refuses = checks.negative_data_rejection
        case.validate_response(
            reply, checks=[c for c in CHECKS if not (is_long and c is refuses)]
        )
        if schema.name == "retriever" and mode == GenerationMode.POSITIVE:
            assert reply.status_code == 200, reply.text
        if reply.status_code >= 400:
            num_refused += 1
            assert set(reply.json()) == {"error"} and reply.json()["error"]
        elif case.method == "POST":
            assert mode == GenerationMode.POSITIVE

    asked()
    assert num_refused or mode == GenerationMode.POSITIVE


ASKED = {"tool": ("/search", "question"), "retriever": ("/search", "query")}
JSON_TYPE = "application/json"
JSON = {"Content-Type": JSON_TYPE}


@pytest.mark.fault(49, "body", "numbers")
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    ("raw", "headers", "status", "reason"),
    [
        (b'{"%s": NaN}', JSON, 400, "not JSON"),
        (b'{"%s": -Infinity}', JSON, 400, "not JSON"),
        (b'{"%s": "a"', JSON, 400, "not JSON"),
        (b'["%s"]', JSON, 400, "must be a JSON object"),
        (b'{"%s": ' + b"[" * 3000, JSON, 400, "not JSON"),
        (b'{"%s": "\xff"}', JSON, 400, "not JSON"),
        (b'{"%s": "a"}', {"Content-Type": "text/plain"}, 415, "application/json"),
        (b'{"%s": "a"}', {}, 415, "application/json"),
        (b"%s" + b"x" * 10_000_000, JSON, 413, "exceeds 4096 bytes"),
    ],
)
def test_a_malformed_body_is_refused_with_a_reason(name, raw, headers, status, reason):
    path, field = ASKED[name]
    body = raw.replace(b"%s", field.encode())
    with serving(name, max_body_bytes=4096) as url:
        reply = httpx.post(url + path, content=body, headers=headers)
        assert (reply.status_code, reply.headers["Content-Type"]) == (status, JSON_TYPE)
        assert reason in reply.json()["error"]
        good = httpx.post(url + path, json={field: "a"})
        assert good.status_code == 200


@pytest.mark.fault(49, "strangers")
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer x"}])
def test_without_its_token_a_service_reveals_nothing(name, given):
    with serving(name, token=TOKEN) as url:
        for path in ("/openapi.json", "/health", "/search", "/none"):
            for reply in (
                httpx.get(url + path, headers=given),
                httpx.post(url + path, json={}, headers=given),
            ):
                assert reply.status_code == 401 and TOKEN not in reply.text


@pytest.mark.parametrize("name", ASKED)
def test_other_methods_are_refused_with_the_allowed_one(name):
    with serving(name) as url:
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"):
            reply = httpx.request(method, f"{url}/search")
            assert (reply.status_code, reply.headers["Allow"]) == (405, "POST")
            assert not reply.content if method == "HEAD" else reply.json()["error"]


def test_a_result_that_cannot_be_written_as_json_is_an_internal_error(capsys):
    strange = {("GET", "/health"): lambda body: {"score": float("nan")}}
    with running(JsonServer("127.0.0.1", 0, strange)) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/health"
        assert httpx.get(url).json() == {"error": "internal error"}
    assert "GET /health: ValueError" in capsys.readouterr().err

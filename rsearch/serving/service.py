"""The HTTP service of a policy: /search, the OpenAI API, and its description."""

from collections.abc import Callable, Mapping
from typing import Any

from rsearch.runtime import console
from rsearch.runtime.openapi import TEXT, Content, list_of, record, with_description
from rsearch.runtime.prometheus import RequestMetrics, counts_text
from rsearch.runtime.server import PlainText, RefusedError
from rsearch.runtime.service_flags import FLAGS as FLAGS
from rsearch.runtime.service_flags import open_server
from rsearch.serving.chat import ERRORS, chat_error_body, chat_routes
from rsearch.serving.page import page_routes
from rsearch.serving.search_tool import SearchTool
from rsearch.types import Outcome

MAX_QUESTIONS = 64  # in one request
OR_NULL = {"type": ["string", "null"]}
RESULT = record(
    {
        "question": TEXT,
        "evidence": OR_NULL,
        "answer": OR_NULL,
        "queries": list_of(TEXT),
        "passages": list_of(record({"id": TEXT, "title": TEXT, "text": TEXT})),
        "outcome": {"enum": [outcome.value for outcome in Outcome]},
    }
)
STATUS = record({"status": {"const": "ok"}})


def serve_policy(load: Callable[[], SearchTool], values: Mapping[str, Any]) -> None:
    """Load a policy and serve it until Control-C.

    Args:
        values: {flag: value} of FLAGS.

    Raises:
        ValueError: the host or port cannot be listened on, or the token is missing;
            raised before anything is loaded.
    """
    routes = {**page_routes(), ("GET", "/health"): lambda body: {"status": "ok"}}
    server = open_server(values, routes, error_body=chat_error_body)
    requests = RequestMetrics()
    server.on_reply = requests.observe

    def prepare():
        tool = load()
        tool.warm_up()
        server.routes = routes_of(tool, tool.name, requests)
        server.is_busy = lambda: tool.counts()["questions_running"] > 0
        console.note(f"POST {server.url}/search, a page at /, until Control-C")

    server.serve(prepare)
    console.note("ended")


def routes_of(tool: SearchTool, model: str, requests: RequestMetrics) -> dict:
    """Return the routes of the HTTP service.

    Args:
        model: the name by which OpenAI's clients call the policy.
    """

    def search(body):
        names = body.keys() & {"question", "questions"}
        if len(names) != 1 or len(body) != 1:
            raise RefusedError(400, 'the body must be {"question"} or {"questions"}')
        if "question" in body:
            return tool(_check_question(tool, body["question"]))
        questions = body["questions"]
        if not isinstance(questions, list) or len(questions) > MAX_QUESTIONS:
            reason = f'"questions" must be a list of at most {MAX_QUESTIONS}'
            raise RefusedError(400, reason)
        return {"results": tool([_check_question(tool, q) for q in questions])}

    def metrics(body):
        return PlainText(requests.text() + counts_text(tool.counts()))

    question = {**TEXT, "minLength": 1}
    bodies = (
        {"question": question},
        {"questions": list_of(question, maxItems=MAX_QUESTIONS)},
    )
    body = {"oneOf": [record(fields, additionalProperties=False) for fields in bodies]}
    reply = {"anyOf": [RESULT, record({"results": list_of(RESULT)})]}
    routes, descriptions = chat_routes(tool, model)
    routes |= {
        ("POST", "/search"): search,
        ("GET", "/ready"): lambda body: {"status": "ok"},
        ("GET", "/metrics"): metrics,
    }
    descriptions |= {
        ("POST", "/search"): ("The policy's answers and passages.", body, reply),
        ("GET", "/ready"): ("Whether the model is loaded and compiled.", None, STATUS),
        ("GET", "/metrics"): (
            "Counts and latencies in Prometheus's format.",
            None,
            Content({"text/plain": TEXT}),
        ),
    }
    routes = with_description(routes, "rsearch.serve", descriptions, errors=ERRORS)
    return {**page_routes(), **routes}  # no description: programs do not use the page


def _check_question(tool, question):
    try:
        return tool.check(question)
    except ValueError as error:
        raise RefusedError(422, str(error)) from None

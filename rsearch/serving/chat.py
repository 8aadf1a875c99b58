"""The OpenAI API of the service: /v1/models and /v1/chat/completions.

A chat has exactly one message, the question: a policy has learnt to answer questions,
not to hold a dialogue, and its prompt is set by its protocol. The content of the reply
is the `answer` of /search. Data for which the API has no field is in additional fields
of the message or, when streaming, of the deltas:

    reasoning_content   what the policy wrote; when streaming, a few tokens at a time,
                        which joined give the same text
    tool_uses           the searches: [{"tool", "arguments", "passages"}], with the
                        passages as in citations, plus their score
    citations           the passages that it was shown: [{"id", "title", "text"}]
    outcome             how the rollout ended
"""

import concurrent.futures
import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from rsearch.runtime.openapi import TEXT, Content, list_of, record
from rsearch.runtime.server import (
    UNREACHABLE_REASON,
    RefusedError,
    follows_client,
    plain_error_body,
)
from rsearch.serving.search_tool import (
    Progress,
    SearchTool,
    passage_value,
    passage_values,
)
from rsearch.types import SEARCH, Group, Outcome, Rollout, ToolUse

PREFIX = "/v1/"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
POLL_SECONDS = 0.1  # between two checks of whether the client is still connected
CLIENT_GONE = 499  # the client has closed its connection
DONE = "[DONE]"
ERROR_TYPES = ("invalid_request_error", "authentication_error", "server_error")

# Optional parameters with the only values that greedy decoding can honour.
FIXED_VALUES = {"n": 1, "temperature": 0, "top_p": 1}
MESSAGE = record(
    {
        "role": {"const": "user"},
        "content": {
            "anyOf": [
                {**TEXT, "minLength": 1},
                list_of(
                    record(
                        {"type": {"const": "text"}, "text": {**TEXT, "minLength": 1}},
                        additionalProperties=False,
                    ),
                    minItems=1,
                ),
            ]
        },
    },
    {"name": {"type": ["string", "null"]}},
    additionalProperties=False,
)
USAGE = record(
    {
        name: {"type": "integer"}
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
)
REFUSAL = record(
    {
        "error": record(
            {
                "message": TEXT,
                "type": {"enum": list(ERROR_TYPES)},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
        )
    },
    additionalProperties=False,
)
ERRORS = {PREFIX: (REFUSAL, {404: "no such model"})}


class ChatError(RefusedError):
    """A refused chat, with the field at fault and a machine-readable code."""

    def __init__(
        self, reason: str, param: str, code: str = "invalid_value", status: int = 400
    ):
        super().__init__(status, reason)
        self.param, self.code = param, code


def chat_error_body(path: str, refused: RefusedError) -> dict:
    """Return the body of a refusal, in OpenAI's format for the paths of its API."""
    if not path.startswith(PREFIX):
        return plain_error_body(path, refused)
    request_error, key_error, server_error = ERROR_TYPES
    kind = server_error if refused.status >= 500 else request_error
    code = getattr(refused, "code", None)
    if refused.status == 401:
        kind, code = key_error, "invalid_api_key"
    return {
        "error": {
            "message": str(refused),
            "type": kind,
            "param": getattr(refused, "param", None),
            "code": code,
        }
    }


def chat_routes(tool: SearchTool, model: str) -> tuple[dict, dict]:
    """Return the routes of the API and their descriptions.

    Args:
        model: the name by which clients call the policy.
    """
    start_time = int(time.time())

    def models(body):
        entry = {"id": model, "object": "model", "created": start_time}
        return {"object": "list", "data": [{**entry, "owned_by": "rsearch"}]}

    @follows_client
    def chat(body, is_gone):
        question, is_streamed, wants_usage = _read_chat(body, model)
        try:
            question = tool.check(question)
        except ValueError as error:
            raise ChatError(str(error), "messages") from None
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        head["model"] = model
        steps = follow(tool, question, is_gone, wants_steps=is_streamed)
        if is_streamed:
            return _stream(steps, head, wants_usage)
        (group,) = steps
        return _completion(group, head)

    routes = {("GET", MODELS): models, ("POST", CHAT): chat}
    return routes, _describe_routes(model)


def follow(
    tool: SearchTool,
    question: str,
    is_gone: Callable[[], bool],
    *,
    wants_steps: bool,
) -> Iterator[Progress | Group]:
    """Yield the steps of a question as they happen, and finally its group.

    Args:
        is_gone: called while no step arrives; a true result cancels the question, as
            closing the iterator does.
        wants_steps: False yields only the group.

    Raises:
        RefusedError: the client has gone, or the search or the model has failed.
    """
    items, cancel_event = queue.SimpleQueue(), threading.Event()
    on_step = items.put if wants_steps else None

    def run():
        try:
            items.put(
                tool.ask(question, on_step=on_step, is_cancelled=cancel_event.is_set)
            )
        except BaseException as error:
            items.put(error)

    # The thread may still run other callers' questions after this one is answered.
    threading.Thread(target=run).start()
    try:
        while True:
            try:
                item = items.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if is_gone():
                    raise RefusedError(CLIENT_GONE, "the client has gone") from None
                continue
            if isinstance(item, concurrent.futures.CancelledError):
                raise RefusedError(CLIENT_GONE, "the question was cancelled")
            if isinstance(item, Exception):
                raise item
            if isinstance(item, BaseException):  # OutageError
                raise RefusedError(503, UNREACHABLE_REASON)
            if isinstance(item, Group):
                (rollout,) = item.rollouts
                if not rollout.outcome.is_signal:
                    culprit = (
                        "search" if rollout.outcome == Outcome.TOOL_ERROR else "model"
                    )
                    raise RefusedError(503, f"the {culprit} failed; try again later")
                yield item
                return
            yield item
    finally:
        cancel_event.set()


def _read_chat(body, model) -> tuple[str, bool, bool]:
    """Return (question, whether to stream, whether to add usage) from a body."""
    # Clients may send null for every parameter that they do not set.
    body = {name: value for name, value in body.items() if value is not None}
    fields = {"model", "messages", "stream", "stream_options", "user", *FIXED_VALUES}
    for name in body:
        if name not in fields:
            names = ", ".join(sorted(fields))
            reason = f"unsupported parameter {name!r}; supported are {names}"
            raise ChatError(reason, name, "unsupported_parameter")
    name = body.get("model")
    if not isinstance(name, str):
        raise ChatError("model must be a string", "model")
    if name != model:
        reason = f"no model {name[:100]!r}; there is only {model!r}"
        raise ChatError(reason, "model", "model_not_found", status=404)
    for name, value in FIXED_VALUES.items():
        actual = body.get(name, value)
        if type(actual) not in (int, float) or actual != value:
            reason = f"{name} must be {value}: the model is decoded greedily, once"
            raise ChatError(reason, name, "unsupported_value")
    if not isinstance(body.get("user"), str | None):
        raise ChatError("user must be a string", "user")
    is_streamed = body.get("stream")
    if not isinstance(is_streamed, bool | None):
        raise ChatError("stream must be true or false", "stream")
    options = body.get("stream_options")
    if options is not None:
        is_valid = isinstance(options, dict) and options.keys() <= {"include_usage"}
        if not is_valid or not isinstance(options.get("include_usage"), bool | None):
            reason = 'stream_options must be {"include_usage": true or false}'
            raise ChatError(reason, "stream_options")
        if not is_streamed:
            raise ChatError("stream_options need stream = true", "stream_options")
    question = _read_question(body.get("messages"))
    return question, bool(is_streamed), bool((options or {}).get("include_usage"))


def _read_question(messages: Any) -> str:
    """Return the text of the only message, which is the user's."""
    if not isinstance(messages, list) or len(messages) != 1:
        raise ChatError(
            "messages must be a list of one message, the question: the model answers "
            "each question on its own, and its prompt is set by its protocol",
            "messages",
        )
    (message,) = messages
    fields = {"role", "content", "name"}
    if not isinstance(message, dict) or message.keys() - fields:
        raise ChatError('a message must be {"role", "content"}', "messages[0]")
    if message.get("role") != "user":
        raise ChatError('role must be "user"', "messages[0].role")
    if not isinstance(message.get("name"), str | None):
        raise ChatError("name must be a string", "messages[0].name")
    content = message.get("content")
    if isinstance(content, str):
        return content
    items = content if isinstance(content, list) else [content]
    for item in items:
        is_text = isinstance(item, dict) and item.keys() == {"type", "text"}
        if not is_text or item["type"] != "text" or not isinstance(item["text"], str):
            raise ChatError("content must be text", "messages[0].content")
    return "".join(item["text"] for item in items)


def _completion(group: Group, head: dict) -> dict:
    """Return the reply to a chat that is not streamed."""
    (rollout,) = group.rollouts
    message = {
        "role": "assistant",
        "content": rollout.answer,
        "refusal": None,
        "reasoning_content": "\n".join(rollout.policy_texts),
        "tool_uses": [_tool_use(use) for use in rollout.tool_uses],
        **_ending(rollout),
    }
    choice = {"index": 0, "message": message, "logprobs": None}
    choices = [{**choice, "finish_reason": _finish_reason(rollout)}]
    usage = _usage(rollout)
    return {"object": "chat.completion", **head, "choices": choices, "usage": usage}


def _stream(steps: Iterator, head: dict, wants_usage: bool) -> Iterator[str]:
    """Yield the events of a streamed chat as JSON."""
    head = {"object": "chat.completion.chunk", **head}

    def chunk(delta, finish_reason=None):
        choice = {"index": 0, "delta": delta, "logprobs": None}
        choices = [{**choice, "finish_reason": finish_reason}]
        usage = {"usage": None} if wants_usage else {}
        return json.dumps({**head, "choices": choices, **usage})

    yield chunk({"role": "assistant", "content": ""})
    try:
        with contextlib.closing(steps):
            for step in steps:
                if isinstance(step, str):
                    yield chunk({"reasoning_content": step})
                elif isinstance(step, ToolUse):
                    yield chunk({"tool_uses": [_tool_use(step)]})
    except RefusedError as refusal:
        yield json.dumps(chat_error_body(PREFIX, refusal))
        return
    except Exception:
        fault = RefusedError(500, "internal error")
        yield json.dumps(chat_error_body(PREFIX, fault))
        raise
    (rollout,) = step.rollouts  # the last step is the group
    content = {} if rollout.answer is None else {"content": rollout.answer}
    yield chunk({**content, **_ending(rollout)})
    yield chunk({}, _finish_reason(rollout))
    if wants_usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(rollout)})
    yield DONE


def _ending(rollout: Rollout) -> dict:
    return {"citations": passage_values(rollout), "outcome": rollout.outcome.value}


def _tool_use(use: ToolUse) -> dict:
    passages = []
    if use.call.name == SEARCH:
        hits = [p for passages in use.result.data for p in passages]
        passages = [{**passage_value(p), "score": p.score} for p in hits]
    arguments = list(use.call.arguments)
    return {"tool": use.call.name, "arguments": arguments, "passages": passages}


def _finish_reason(rollout: Rollout) -> str:
    return "length" if rollout.outcome == Outcome.TRUNCATED else "stop"


def _usage(rollout: Rollout) -> dict:
    """Return the numbers of tokens that the policy read and wrote, and their sum."""
    num_written = rollout.num_policy_tokens
    return {
        "prompt_tokens": rollout.num_tokens - num_written,
        "completion_tokens": num_written,
        "total_tokens": rollout.num_tokens,
    }


def _describe_routes(model: str) -> dict:
    """Return the descriptions; see `rsearch.runtime.openapi.with_description`."""

    def or_null(schema):
        return {"anyOf": [schema, {"type": "null"}]}

    options = record({}, {"include_usage": or_null({"type": "boolean"})})
    optional = {
        "stream": or_null({"type": "boolean"}),
        "user": or_null(TEXT),
        **{name: {"enum": [value, None]} for name, value in FIXED_VALUES.items()},
    }
    required = {
        "model": {"const": model},
        "messages": list_of(MESSAGE, minItems=1, maxItems=1),
    }
    only_null = {"additionalProperties": {"type": "null"}}
    stream = record(
        {**required, "stream": {"const": True}},
        {**optional, "stream_options": {**options, "additionalProperties": False}},
        **only_null,
    )
    body = {"anyOf": [record(required, optional, **only_null), stream]}
    choice = record({"index": {"type": "integer"}, "message": record({"role": TEXT})})
    completion = record(
        {"id": TEXT, "model": TEXT, "choices": list_of(choice), "usage": USAGE}
    )
    replies = Content({"application/json": completion, "text/event-stream": {}})
    entry = record({"id": TEXT, "object": TEXT, "created": {"type": "integer"}})
    models = record({"object": {"const": "list"}, "data": list_of(entry)})
    return {
        ("GET", MODELS): ("The model, in OpenAI's list format.", None, models),
        ("POST", CHAT): (
            "The answer to a question, for OpenAI's clients; a stream has the "
            "policy's turns and searches as they happen.",
            body,
            replies,
        ),
    }

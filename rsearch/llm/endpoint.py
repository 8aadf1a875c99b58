"""A model at an OpenAI-compatible endpoint as a GenerateFn: chats in, replies out.

A failed call is retried a bounded number of times, after longer and longer waits. A
call that fails for good yields a reply of None, never an empty one, and the rollout
that needed it gives no learning signal. Nothing from the endpoint is trusted: a reply
must have the right shape and a reasonable size, and thoughts are removed from it. An
outage is waited out as for a retrieval service; see `runtime.calls.OutageWatch`.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rsearch.llm.thoughts import answer_after_thoughts, log_failures
from rsearch.protocols.base import replace_surrogates
from rsearch.runtime import console
from rsearch.runtime.calls import (
    OTHER_SHAPE,
    PROBE_SECONDS,
    OutageWatch,
    Reply,
    Service,
    parse_json,
    post,
    with_retries,
)
from rsearch.types import GenerateFn, Messages

PATH = "/chat/completions"
BYTES_PER_TOKEN = 64  # longer replies are refused; JSON escapes included
ENVELOPE_BYTES = 65_536  # size of a reply beyond its text
MAX_COUNTED = 2**31  # tokens of a call; a higher count is no count
CHECK_SECONDS = 10.0  # how long an endpoint may take to answer the first time
CHECK_CHAT = ({"role": "user", "content": "Where?"},)
UNFINISHED = {  # finish_reason of a reply that is not an answer -> why it is not
    "content_filter": "a filtered reply",
    "abort": "an aborted reply",
    "error": "an aborted reply",
}


class Call(NamedTuple):
    """A call of an endpoint.

    Attributes:
        path: path of the call, appended to the endpoint's URL.
        body: request body without the model and its sampling settings.
        read: see `rsearch.runtime.calls.post`.
        bytes_per_token: size limit per token of the reply; longer ones are refused.
    """

    path: str
    body: dict
    read: Callable[[bytes], object]
    bytes_per_token: int = BYTES_PER_TOKEN


class Endpoint:
    """An OpenAI-compatible endpoint with its retries and outages."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str,
        temperature: float,
        top_p: float,
        timeout_seconds: float,
        max_retries: int,
        concurrency: int,
        key_over_http: bool = False,
        first_wait_seconds: float = 0.5,
        outage_seconds: float = math.inf,
        field: str = "the endpoint",
        log: Callable[[str], None] = console.note,
    ):
        """Prepare calls without making any.

        Args:
            url: URL of the endpoint, up to and including its version (".../v1").
            model: the model's name at the endpoint.
            api_key_env: environment variable that holds the key; "" sends none.
            temperature, top_p: sampling settings, sent with each call.
            timeout_seconds: time limits of one call: for connecting, for the reply to
                begin, and for the entire reply once it has begun. A call therefore ends
                after at most three times this long.
            max_retries: additional calls after a transient failure: no connection, too
                slow, status 408, 429 or 5xx, or a reply of the wrong form.
            concurrency: maximum number of concurrent calls.
            key_over_http: see `rsearch.runtime.calls.Service`.
            first_wait_seconds: wait before the second call; see
                `rsearch.runtime.calls.with_retries`.
            outage_seconds: how long the endpoint may be unreachable before the run
                ends.
            field: name of `url` in errors, such as "config.models.judge.source".
            log: called with a line about failed calls and outages.

        Raises:
            ValueError: `url` is not an http(s) URL or contains a secret, `model` is
                empty, the environment variable is not set, or its key would be sent
                unencrypted.
        """
        self._service = Service(
            url,
            field=field,
            path=lambda path: path.rstrip("/").removesuffix(PATH),
            api_key_env=api_key_env,
            key_over_http=key_over_http,
        )
        self.masked_url = self._service.masked_url
        if not model:
            raise ValueError(
                f"the endpoint {self.masked_url} has several models: name one"
            )
        self.field, self.log = field, log
        self._sampling = {
            "model": model,
            "temperature": temperature,
            "top_p": top_p,
            "stream": False,
        }
        self._seconds, self._max_retries = timeout_seconds, max_retries
        self._concurrency, self._first_wait = concurrency, first_wait_seconds
        self._watch = OutageWatch(
            self.masked_url,
            outage_seconds=outage_seconds,
            probe_seconds=PROBE_SECONDS,
            log=log,
        )

    def ask(self, calls: Sequence[Call]) -> list[Reply]:
        """Return the reply to each call; its value is None if the call failed for good.

        Raises:
            OutageError: the endpoint was unreachable for too long.
        """
        return (
            self._watch.repeat_until_back(lambda: self._ask_all(calls)) if calls else []
        )

    def check(self, call: Call) -> object:
        """Ask once: raise an error for a permanent failure, report a transient one.

        Returns:
            The reply as parsed by the call's `read`; None after a transient failure.

        Raises:
            ValueError: the endpoint refuses; quotes the beginning of its reply.
        """
        deadline = time.monotonic() + CHECK_SECONDS
        seconds = min(self._seconds, CHECK_SECONDS)
        with self._service.client() as client:
            reply = self._ask_once(
                client, call, seconds=seconds, deadline=deadline, is_quoted=True
            )
        if reply.value is not None:
            return reply.value
        failure = f"{self.field}: {self.masked_url}: {self._service.describe(reply)}"
        if reply.wait is None or reply.reason == OTHER_SHAPE:
            raise ValueError(failure)
        # The endpoint may still be starting, and the model may have no answer.
        self.log(f"{failure}; continuing")
        return None

    def _ask_once(self, client, call, **overrides) -> Reply:
        num_bytes = call.bytes_per_token * call.body["max_tokens"]
        return post(
            client,
            self._service.target + call.path,
            json.dumps({**self._sampling, **call.body}).encode(),
            read=call.read,
            max_bytes=ENVELOPE_BYTES + num_bytes,
            **{"seconds": self._seconds, **overrides},
        )

    def _ask_all(self, calls) -> list[Reply]:
        """Make all calls concurrently, each with its retries."""
        # While the endpoint is unreachable, one attempt is as informative as several.
        retries = 0 if self._watch.is_unreachable else self._max_retries

        def call_with_retries(call):
            return with_retries(
                lambda: self._ask_once(client, call),
                max_retries=retries,
                first_wait=self._first_wait,
            )

        threads = ThreadPoolExecutor(min(self._concurrency, len(calls)))
        client = self._service.client(max_connections=self._concurrency)
        with client, threads:
            replies = list(threads.map(call_with_retries, calls))
        if not self._watch.is_unreachable:
            reasons = [reply.reason for reply in replies if reply.value is None]
            log_failures(self.masked_url, reasons, len(calls), self.log)
        return replies


def remote_generator(
    url: str, model: str, *, max_reply_tokens: int, **settings: Any
) -> GenerateFn:
    """Make a GenerateFn that calls an endpoint.

    Args:
        url, model: the endpoint and its model; see `Endpoint`.
        max_reply_tokens: maximum length of a reply, sent with each chat.
        **settings: other arguments of `Endpoint`.

    Returns:
        The function. It returns None for a chat that failed. Its attribute `check`
        calls the endpoint once and raises a ValueError if the endpoint refuses.

    Raises:
        ValueError: see `Endpoint`.
    """
    endpoint = Endpoint(url, model, **settings)

    def make_call(chat: Messages) -> Call:
        body = {"messages": sendable(chat), "max_tokens": max_reply_tokens}
        return Call(PATH, body, _content)

    def generate(chats: Sequence[Messages]) -> list[str | None]:
        return [
            reply.value for reply in endpoint.ask([make_call(chat) for chat in chats])
        ]

    generate.check = lambda: endpoint.check(make_call(CHECK_CHAT))
    return generate


def sendable(chat: Messages) -> Messages:
    """Return the messages without lone surrogates, which no server could decode."""
    return [{k: replace_surrogates(v) for k, v in message.items()} for message in chat]


def _content(data) -> Reply | None:
    """Return the answer in a JSON reply; None if the reply has another shape."""
    choice = first_choice(parse_json(data))
    text_and_reason = None if choice is None else message_text(choice)
    if text_and_reason is None:
        return None
    text, reason = text_and_reason
    answer = None
    if not reason:
        is_cut = choice.get("finish_reason") == "length"
        answer, reason = answer_after_thoughts(text, is_cut=is_cut)
    return Reply(answer, reason, is_own_fault=bool(reason))


def first_choice(reply: object) -> dict | None:
    """Return the first choice of a JSON reply; None if the reply has another shape."""
    try:
        choice = reply["choices"][0]
    except (LookupError, TypeError):
        return None
    return choice if isinstance(choice, dict) else None


def counted_tokens(reply: object) -> tuple[int, int] | None:
    """Return (tokens of the prompt, tokens of the reply) that a JSON reply reports.

    None if it reports none, or impossible numbers.
    """
    try:
        usage = reply["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
    except (LookupError, TypeError):
        return None
    is_right = all(type(n) is int and 0 <= n <= MAX_COUNTED for n in counts)
    return counts if is_right else None


def message_text(choice: dict) -> tuple[str, str] | None:
    """Return the text of a chat's choice; None if the choice has another shape.

    Returns:
        (text, in few words why it is not a reply, or "" if it is one).
    """
    message = choice.get("message")
    if not isinstance(message, dict):
        return None
    content, refusal = message.get("content"), message.get("refusal")
    reason = unfinished_reason(choice)
    if isinstance(refusal, str) and refusal.strip():
        reason = "a refusal"
    # A server that parses thoughts puts them elsewhere ("reasoning_content"), and sends
    # no content if the reply was cut within them.
    is_cut = choice.get("finish_reason") == "length"
    thoughts = message.get("reasoning_content"), message.get("reasoning")
    has_thought = any(isinstance(thought, str) for thought in thoughts)
    if content is None and (reason or is_cut or has_thought):
        content = ""
    return (replace_surrogates(content), reason) if isinstance(content, str) else None


def unfinished_reason(choice: dict) -> str:
    """Return why a choice is not a reply, or "" if it is one."""
    end = choice.get("finish_reason")
    return UNFINISHED.get(end, "") if isinstance(end, str) else ""

"""A model at an OpenAI-compatible endpoint as a GenerateFn: chats in, replies out.

A call that fails is retried a bounded number of times, later each time. A call that
fails for good gives a reply of None, never an empty one, and the rollout that needed it
is no learning signal. Nothing from the endpoint is trusted: a reply must have the right
shape and a sensible size, and its thoughts are no part of it. A model that answers
nothing is waited for as a retrieval service is; see `runtime.calls.OutageWatch`.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rsearch.llm.thoughts import answer_after_thoughts, say_failures
from rsearch.protocols.tagged import whole_characters
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
BYTES_PER_TOKEN = 64  # a longer reply is refused; JSON escapes included
ENVELOPE_BYTES = 65_536  # around the reply's text
CHECK_SECONDS = 10.0  # that an endpoint may take for its first answer
CHECK_CHAT = ({"role": "user", "content": "Where?"},)
UNFINISHED = {  # finish_reason of a reply that is no answer: why
    "content_filter": "a reply that is filtered",
    "abort": "a reply that is broken off",
    "error": "a reply that is broken off",
}


class Call(NamedTuple):
    """A call of an endpoint.

    Attributes:
        path: behind the endpoint's URL.
        body: of the request, without the model and its sampling.
        read: see `rsearch.runtime.calls.post`.
        bytes_per_token: of the reply; a longer one is refused.
    """

    path: str
    body: dict
    read: Callable[[bytes], object]
    bytes_per_token: int = BYTES_PER_TOKEN


class Endpoint:
    """An OpenAI-compatible endpoint, its retries and its outages."""

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
        say: Callable[[str], None] = console.note,
    ):
        """Prepare calls; none is made.

        Args:
            url: of the endpoint, up to and with its version (".../v1").
            model: its name there.
            api_key_env: the environment variable that holds the key; "" sends none.
            temperature, top_p: of sampling, sent with each call.
            timeout_seconds: of one call: for the connection, for the reply to begin,
                and for the entire reply once it has begun; so a call ends after three
                times that at most.
            max_retries: further calls after one that failed in a way that may pass: no
                connection, too slow, status 408, 429 or 5xx, or no reply of the right
                form.
            concurrency: calls that may run at once.
            key_over_http: see `rsearch.runtime.calls.Service`.
            first_wait_seconds: before the second call; see
                `rsearch.runtime.calls.with_retries`.
            outage_seconds: that the endpoint may be away before the run ends.
            field: the name of `url` in errors, such as "config.models.judge.source".
            say: called with one line if any calls failed for good.

        Raises:
            ValueError: `url` is no http(s) URL or holds a secret, `model` is empty, the
                environment variable is not set, or its key would be sent openly.
        """
        self._service = Service(
            url,
            field=field,
            path=lambda path: path.rstrip("/").removesuffix(PATH),
            api_key_env=api_key_env,
            key_over_http=key_over_http,
        )
        self.shown = self._service.shown
        if not model:
            raise ValueError(f"the endpoint {self.shown} has several models: name one")
        self.field, self.say = field, say
        self._sampling = {
            "model": model,
            "temperature": temperature,
            "top_p": top_p,
            "stream": False,
        }
        self._seconds, self._max_retries = timeout_seconds, max_retries
        self._concurrency, self._first_wait = concurrency, first_wait_seconds
        self._watch = OutageWatch(
            self.shown,
            outage_seconds=outage_seconds,
            probe_seconds=PROBE_SECONDS,
            say=say,
        )

    def ask(self, calls: Sequence[Call]) -> list[Reply]:
        """Return the reply to each call; one that failed for good has no value.

        Raises:
            OutageError: the endpoint has been away for too long.
        """
        return self._watch.ask(lambda: self._ask_all(calls)) if calls else []

    def check(self, call: Call) -> None:
        """Ask once; refuse what asking again would not mend, say what may pass.

        Raises:
            ValueError: the endpoint refuses; says so with its first words.
        """
        deadline = time.monotonic() + CHECK_SECONDS
        seconds = min(self._seconds, CHECK_SECONDS)
        with self._service.client() as client:
            reply = self._ask_once(
                client, call, seconds=seconds, deadline=deadline, is_quoted=True
            )
        if reply.value is not None:
            return
        failure = f"{self.field}: {self.shown}: {self._service.describe(reply)}"
        if reply.wait is None or reply.why == OTHER_SHAPE:
            raise ValueError(failure)
        # An endpoint may still be starting, and a model need not know an answer.
        self.say(f"{failure}; going on")

    def _ask_once(self, client, call, **more) -> Reply:
        num_bytes = call.bytes_per_token * call.body["max_tokens"]
        return post(
            client,
            self._service.target + call.path,
            json.dumps({**self._sampling, **call.body}).encode(),
            read=call.read,
            max_bytes=ENVELOPE_BYTES + num_bytes,
            **{"seconds": self._seconds, **more},
        )

    def _ask_all(self, calls) -> list[Reply]:
        """Make all calls at once, each with its retries."""
        # While the endpoint is away, one call tells as much as several.
        retries = 0 if self._watch.is_away else self._max_retries

        def ask(call):
            return with_retries(
                lambda: self._ask_once(client, call),
                max_retries=retries,
                first_wait=self._first_wait,
            )

        threads = ThreadPoolExecutor(min(self._concurrency, len(calls)))
        client = self._service.client(max_connections=self._concurrency)
        with client, threads:
            replies = list(threads.map(ask, calls))
        if not self._watch.is_away:
            failed = [reply.why for reply in replies if reply.value is None]
            say_failures(self.shown, failed, len(calls), self.say)
        return replies


def remote_generator(
    url: str, model: str, *, max_reply_tokens: int, **settings: Any
) -> GenerateFn:
    """Make a GenerateFn that asks an endpoint.

    Args:
        url, model: of the endpoint, see `Endpoint`.
        max_reply_tokens: sent with each chat.
        **settings: of the `Endpoint`.

    Returns:
        The function. A chat that fails has None for a reply. Its attribute `check` asks
        the endpoint once, and raises a ValueError where it refuses.

    Raises:
        ValueError: see `Endpoint`.
    """
    endpoint = Endpoint(url, model, **settings)

    def call(chat: Messages) -> Call:
        body = {"messages": sendable(chat), "max_tokens": max_reply_tokens}
        return Call(PATH, body, _content)

    def generate(chats: Sequence[Messages]) -> list[str | None]:
        return [reply.value for reply in endpoint.ask([call(chat) for chat in chats])]

    generate.check = lambda: endpoint.check(call(CHECK_CHAT))
    return generate


def sendable(chat: Messages) -> Messages:
    """Return the messages without lone surrogates, which no server could read."""
    return [{k: whole_characters(v) for k, v in message.items()} for message in chat]


def _content(received) -> Reply | None:
    """Return the answer in a JSON reply, None where it has another shape."""
    choice = first_choice(received)
    read = None if choice is None else message_text(choice)
    if read is None:
        return None
    text, why = read
    answer = None
    if not why:
        is_cut = choice.get("finish_reason") == "length"
        answer, why = answer_after_thoughts(text, is_cut=is_cut)
    return Reply(answer, why, is_own_fault=bool(why))


def first_choice(received: bytes) -> dict | None:
    """Return the first choice of a JSON reply, None where it has another shape."""
    try:
        choice = parse_json(received)["choices"][0]
    except (LookupError, TypeError):
        return None
    return choice if isinstance(choice, dict) else None


def message_text(choice: dict) -> tuple[str, str] | None:
    """Return what a choice of a chat says; None where it has another shape.

    Args:
        choice: of `first_choice`.

    Returns:
        (text, why it is no reply, in few words, or "").
    """
    message = choice.get("message")
    if not isinstance(message, dict):
        return None
    content, refusal = message.get("content"), message.get("refusal")
    why = why_unfinished(choice)
    if isinstance(refusal, str) and refusal.strip():
        why = "a refusal"
    # A server that reads thoughts itself puts them elsewhere ("reasoning_content"), and
    # has no content where the reply was cut within them.
    is_cut = choice.get("finish_reason") == "length"
    if content is None and (why or is_cut or _has_thought(message)):
        content = ""
    return (whole_characters(content), why) if isinstance(content, str) else None


def why_unfinished(choice: dict) -> str:
    """Return why a choice is no reply, "" where it is one.

    Args:
        choice: of `first_choice`.
    """
    end = choice.get("finish_reason")
    return UNFINISHED.get(end, "") if isinstance(end, str) else ""


def _has_thought(message) -> bool:
    names = "reasoning_content", "reasoning"
    return any(isinstance(message.get(name), str) for name in names)

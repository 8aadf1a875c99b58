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


def remote_generator(
    url: str,
    model: str,
    *,
    api_key_env: str,
    max_reply_tokens: int,
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
) -> GenerateFn:
    """Make a GenerateFn that asks an endpoint.

    Args:
        url: of the endpoint, up to and with its version (".../v1").
        model: its name there.
        api_key_env: the environment variable that holds the key; "" sends none.
        max_reply_tokens, temperature, top_p: of sampling, sent with each chat.
        timeout_seconds: of one call: for the connection, for the reply to begin, and
            for the entire reply once it has begun; so a call ends after three times
            that at most.
        max_retries: further calls after one that failed in a way that may pass: no
            connection, too slow, status 408, 429 or 5xx, or no reply of the right form.
        concurrency: calls that may run at once.
        key_over_http: see `rsearch.runtime.calls.Service`.
        first_wait_seconds: before the second call; see
            `rsearch.runtime.calls.with_retries`.
        outage_seconds: that the endpoint may be away before the run ends.
        field: the name of `url` in errors, such as "config.models.judge.source".
        say: called with one line if any chats failed for good.

    Returns:
        The function. A chat that fails has None for a reply. Its attribute `check` asks
        the endpoint once, and raises a ValueError where it refuses.

    Raises:
        ValueError: `url` is no http(s) URL or holds a secret, `model` is empty, the
            environment variable is not set, or its key would be sent openly.
    """
    service = Service(
        url,
        field=field,
        path=lambda path: path.rstrip("/").removesuffix(PATH) + PATH,
        api_key_env=api_key_env,
        key_over_http=key_over_http,
    )
    if not model:
        shown = service.shown.removesuffix(PATH)
        raise ValueError(f"the endpoint {shown} has several models: name one")
    settings = {
        "model": model,
        "max_tokens": max_reply_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stream": False,
    }
    max_bytes = ENVELOPE_BYTES + BYTES_PER_TOKEN * max_reply_tokens
    watch = OutageWatch(
        service.shown,
        outage_seconds=outage_seconds,
        probe_seconds=PROBE_SECONDS,
        say=say,
    )

    def ask_once(client, chat, **more) -> Reply:
        body = json.dumps({**settings, "messages": _sendable(chat)}).encode()
        return post(
            client,
            service.target,
            body,
            read=_content,
            max_bytes=max_bytes,
            **{"seconds": timeout_seconds, **more},
        )

    def ask_all(chats) -> list[Reply]:
        """Ask all chats at once, each with its retries."""
        # While the endpoint is away, one call tells as much as several.
        retries = 0 if watch.is_away else max_retries

        def ask(chat):
            return with_retries(
                lambda: ask_once(client, chat),
                max_retries=retries,
                first_wait=first_wait_seconds,
            )

        threads = ThreadPoolExecutor(min(concurrency, len(chats)))
        with service.client(max_connections=concurrency) as client, threads:
            replies = list(threads.map(ask, chats))
        if not watch.is_away:
            failed = [reply.why for reply in replies if reply.value is None]
            say_failures(service.shown, failed, len(chats), say)
        return replies

    def generate(chats: Sequence[Messages]) -> list[str | None]:
        if not chats:
            return []
        return [reply.value for reply in watch.ask(lambda: ask_all(chats))]

    def check() -> None:
        """Ask once; refuse what asking again would not mend, say what may pass."""
        deadline = time.monotonic() + CHECK_SECONDS
        seconds = min(timeout_seconds, CHECK_SECONDS)
        with service.client() as client:
            reply = ask_once(
                client, CHECK_CHAT, seconds=seconds, deadline=deadline, is_quoted=True
            )
        if reply.value is not None:
            return
        failure = f"{field}: {service.shown}: {service.describe(reply)}"
        if reply.wait is None or reply.why == OTHER_SHAPE:
            raise ValueError(failure)
        # An endpoint may still be starting, and a model need not know an answer.
        say(f"{failure}; going on")

    generate.check = check
    return generate


def _sendable(chat):
    """Return the messages without lone surrogates, which no server could read."""
    return [{k: whole_characters(v) for k, v in message.items()} for message in chat]


def _content(received) -> Reply | None:
    """Return the answer in a JSON reply, None where it has another shape."""
    try:
        choice = parse_json(received)["choices"][0]
        message, end = choice["message"], choice.get("finish_reason")
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError):
        return None
    why = UNFINISHED.get(end, "") if isinstance(end, str) else ""
    if isinstance(refusal, str) and refusal.strip():
        why = "a refusal"
    # A server that reads thoughts itself puts them elsewhere ("reasoning_content"), and
    # has no content where the reply was cut within them.
    if content is None and (why or end == "length" or _has_thought(message)):
        content = ""
    if not isinstance(content, str):
        return None
    answer = None
    if not why:
        text = whole_characters(content)
        answer, why = answer_after_thoughts(text, is_cut=end == "length")
    return Reply(answer, why, is_own_fault=bool(why))


def _has_thought(message) -> bool:
    names = "reasoning_content", "reasoning"
    return any(isinstance(message.get(name), str) for name in names)

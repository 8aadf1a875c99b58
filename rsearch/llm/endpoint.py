"""A model at an OpenAI-compatible endpoint as a GenerateFn: chats in, replies out.

A call that fails is retried a bounded number of times, later each time. A call that
fails for good gives a reply of None, never an empty one, and the rollout that needed it
is no learning signal. Nothing from the endpoint is trusted: a reply must have the right
shape and a sensible size.
"""

import collections
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from rsearch.protocols.tagged import whole_characters
from rsearch.runtime import console
from rsearch.runtime.calls import (
    HEADERS,
    check_url,
    parse_json,
    post,
    read_api_key,
    with_retries,
)
from rsearch.types import GenerateFn, Messages

PATH = "/chat/completions"
BYTES_PER_TOKEN = 64  # a longer reply is refused; JSON escapes included
ENVELOPE_BYTES = 65_536  # around the reply's text


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
    first_wait_seconds: float = 0.5,
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
        first_wait_seconds: before the second call; see
            `rsearch.runtime.calls.with_retries`.
        say: called with one line if any chats failed for good.

    Returns:
        The function. A chat that fails has None for a reply.

    Raises:
        ValueError: `url` is no http(s) URL or holds a password, `model` is empty, or
            the environment variable is not set.
    """
    target = _target(url)
    if not model:
        raise ValueError(f"the endpoint {url} has several models: name one")
    headers = dict(HEADERS)
    if api_key_env:
        headers["Authorization"] = f"Bearer {read_api_key(api_key_env)}"
    settings = {
        "model": model,
        "max_tokens": max_reply_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stream": False,
    }
    certificates = httpx.create_ssl_context()  # takes 30 ms, once
    max_bytes = ENVELOPE_BYTES + BYTES_PER_TOKEN * max_reply_tokens

    def ask(client, chat):
        """Return (reply or None, why it failed)."""
        body = json.dumps({**settings, "messages": _sendable(chat)}).encode()

        def call():
            return post(
                client,
                target,
                body,
                read=_content,
                max_bytes=max_bytes,
                seconds=timeout_seconds,
            )

        reply = with_retries(
            call, max_retries=max_retries, first_wait=first_wait_seconds
        )
        return reply.value, reply.why

    def generate(chats: Sequence[Messages]) -> list[str | None]:
        if not chats:
            return []
        client = httpx.Client(
            headers=headers,
            limits=httpx.Limits(max_connections=concurrency),
            verify=certificates,
        )
        threads = ThreadPoolExecutor(min(concurrency, len(chats)))
        with client, threads:
            results = list(threads.map(lambda chat: ask(client, chat), chats))
        failures = collections.Counter(why for reply, why in results if reply is None)
        if failures:
            reasons = ", ".join(f"{why} ({n})" for why, n in failures.most_common(3))
            num = failures.total()
            say(f"{target}: {num} of {len(chats)} chats failed: {reasons}")
        return [reply for reply, _ in results]

    return generate


def _target(url):
    """Return the URL that chats are posted to, which may not hold a secret."""
    base = str(check_url(url, "the endpoint"))
    return base.rstrip("/").removesuffix(PATH) + PATH


def _sendable(chat):
    """Return the messages without lone surrogates, which no server could read."""
    return [{k: whole_characters(v) for k, v in message.items()} for message in chat]


def _content(received):
    """Return choices[0].message.content of a JSON reply, None without such a text."""
    try:
        content = parse_json(received)["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        return None
    return whole_characters(content) if isinstance(content, str) else None

"""A model at an OpenAI-compatible endpoint as a GenerateFn: chats in, replies out.

A call may fail, and then it is made again, a bounded number of times and later each
time. What fails for good is a reply of None, never an empty one; the rollout that
needed it is then no learning signal. Nothing that comes from the endpoint is trusted:
a reply has to have the right shape and a sensible size.
"""

import collections
import json
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from rsearch import console
from rsearch.protocols.tagged import whole_characters
from rsearch.types import GenerateFn, Messages

PATH = "/chat/completions"
RETRIED = frozenset({408, 429, *range(500, 600)})  # statuses that may pass
MAX_WAIT_SECONDS = 20.0  # before a call is made again
BYTES_PER_TOKEN = 64  # more in a reply is no reply; JSON escapes included
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
    """A GenerateFn that asks an endpoint.

    Args:
        url: of the endpoint, up to and with its version (".../v1").
        model: its name there.
        api_key_env: the environment variable that holds the key; "" sends none.
        max_reply_tokens, temperature, top_p: of sampling, sent with each chat.
        timeout_seconds: of one call: for the connection, for the reply to begin, and
            for the whole once it has begun; so a call that is just in time at each of
            these ends after three times that at most.
        max_retries: further calls after one that failed in a way that may pass: no
            connection, too slow, status 408, 429 or 5xx, a reply that is none.
        concurrency: calls under way at once.
        first_wait_seconds: before the second call; it doubles with each further one, up
            to MAX_WAIT_SECONDS, and half of it is drawn at random, so that many callers
            do not come back at once. An endpoint's Retry-After counts if it is longer.
        say: called with a line on the chats that failed for good, if there are any.

    Returns:
        The function. A chat that fails has None for a reply.

    Raises:
        ValueError: `url` is no http(s) URL or holds a password, `model` is empty, or
            the environment variable is not set.
    """
    target = _target(url)
    if not model:
        raise ValueError(f"the endpoint {url} has several models: name one")
    headers = {"Accept-Encoding": "identity"}  # so that bytes read are bytes sent
    if api_key_env:
        headers["Authorization"] = f"Bearer {_key(api_key_env)}"
    settings = {
        "model": model,
        "max_tokens": max_reply_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stream": False,
    }
    most = ENVELOPE_BYTES + BYTES_PER_TOKEN * max_reply_tokens

    def ask(client, chat):
        """(reply or None, why it failed)."""
        body = json.dumps({**settings, "messages": _sendable(chat)}).encode()
        why = ""
        for attempt in range(max_retries + 1):
            reply, why, wait = _call(client, target, body, most, timeout_seconds)
            if reply is not None or wait is None:
                break
            if attempt < max_retries:
                backoff = min(first_wait_seconds * 2**attempt, MAX_WAIT_SECONDS)
                drawn = backoff * random.uniform(0.5, 1.0)
                time.sleep(max(drawn, min(wait, MAX_WAIT_SECONDS)))
        return reply, why

    def generate(chats: Sequence[Messages]) -> list[str | None]:
        if not chats:
            return []
        limits = httpx.Limits(max_connections=concurrency)
        with (
            httpx.Client(headers=headers, timeout=timeout_seconds, limits=limits) as c,
            ThreadPoolExecutor(min(concurrency, len(chats))) as pool,
        ):
            results = list(pool.map(lambda chat: ask(c, chat), chats))
        failures = collections.Counter(why for reply, why in results if reply is None)
        if failures:
            reasons = ", ".join(f"{why} ({n})" for why, n in failures.most_common(3))
            num = failures.total()
            say(f"{target}: {num} of {len(chats)} chats failed: {reasons}")
        return [reply for reply, _ in results]

    return generate


def _target(url):
    """Where chats are posted to. Neither it nor its parts may hold a secret."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.scheme not in ("http", "https") or not parts.host:
        shown = url.rpartition("@")[2]
        raise ValueError(f"{shown!r} must be an http:// or https:// URL")
    if parts.userinfo or parts.query or parts.fragment:
        raise ValueError(
            f"the URL of {parts.host} must hold no password, query or fragment; a key "
            "is read from the environment variable that api_key_env names"
        )
    return str(parts).rstrip("/").removesuffix(PATH) + PATH


def _key(variable):
    """The key. A line break in it would be a header of its own."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        state = "holds no key" if key else "is not set"
        raise ValueError(f"the environment variable {variable!r} {state}")
    return key


def _sendable(chat):
    """The messages without lone surrogates, which no server could read."""
    return [{k: whole_characters(v) for k, v in message.items()} for message in chat]


def _call(client, target, body, most, timeout_seconds):
    """One call.

    Returns:
        reply: the text, None if it failed; why: in which way, in few words, with
        nothing that was sent; wait: seconds that the endpoint wants before the next
        call, None if another one would fail the same way.
    """
    end = time.monotonic() + timeout_seconds
    kind = {"Content-Type": "application/json"}
    try:
        with client.stream("POST", target, content=body, headers=kind) as response:
            status = response.status_code
            if status != 200:
                wait = _retry_after(response) if status in RETRIED else None
                return None, f"HTTP {status}", wait
            received = bytearray()
            for part in response.iter_raw():
                received += part
                if len(received) > most:
                    return None, f"a reply of more than {most} bytes", 0.0
                # httpx's own limit is on each read: a slow trickle never meets it.
                if time.monotonic() > end:
                    return None, "too slow", 0.0
    except httpx.TimeoutException:
        return None, "too slow", 0.0
    except httpx.HTTPError as error:  # its text could quote what was sent
        return None, type(error).__name__, 0.0
    reply = _content(received)
    return reply, "" if reply is not None else "a reply of another shape", 0.0


def _retry_after(response):
    """Seconds of a Retry-After header; 0 without one, or where it is a date."""
    value = response.headers.get("Retry-After", "")
    return float(value) if re.fullmatch(r"\d{1,6}", value) else 0.0


def _content(received):
    """choices[0].message.content of a JSON reply, None where there is no such text."""
    try:
        content = json.loads(received)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return whole_characters(content) if isinstance(content, str) else None

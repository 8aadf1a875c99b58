"""Calls to other people's services: JSON out, JSON in, in bounded time and size.

A call has a deadline. One that fails in a way that may pass is made again, later each
time, a bounded number of times. Nothing that comes back is trusted: its size is
limited while it is read, and what it means is for the caller to check.
"""

import datetime
import email.utils
import json
import math
import os
import random
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx

SEARCHES = 3  # of a query whose search fails, where nothing else can be done
RETRIED = frozenset({408, 429, *range(500, 600)})  # statuses that may pass
MAX_WAIT_SECONDS = 20.0  # before a call is made again
HEADERS = {"Accept-Encoding": "identity"}  # so that bytes read are bytes sent


class Reply(NamedTuple):
    """What has come of a call.

    Attributes:
        value: what the caller has read of the reply; None where the call failed.
        why: in which way, in few words, with nothing that was sent.
        wait: seconds that the service wants before the next call; None where another
            one would fail the same way.
    """

    value: object
    why: str = ""
    wait: float | None = 0.0


def checked_url(url: str, what: str) -> httpx.URL:
    """The URL, which must hold no secret.

    Args:
        url: as somebody has written it.
        what: names it in errors, such as "config.judge.source".

    Raises:
        ValueError: it is no http(s) URL, or holds a password, a query or a fragment.
    """
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.scheme not in ("http", "https") or not parts.host:
        shown = url.rpartition("@")[2]
        raise ValueError(f"{what} {shown!r} must be an http:// or https:// URL")
    if parts.userinfo or parts.query or parts.fragment:
        raise ValueError(
            f"the URL of {parts.host} must hold no password, query or fragment; a key "
            "is read from the environment variable that api_key_env names"
        )
    return parts


def key_of(variable: str) -> str:
    """The key in an environment variable. A line break in it would be a header.

    Raises:
        ValueError: it is not set, or holds no key.
    """
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        state = "holds no key" if key else "is not set"
        raise ValueError(f"the environment variable {variable!r} {state}")
    return key


class _Limits:
    """How long each part of a call may take, told as httpx comes to it.

    Args:
        seconds: that a part may take.
        deadline: by time.monotonic(), of all parts.
    """

    def __init__(self, seconds, deadline):
        self._seconds, self.deadline = seconds, deadline

    def get(self, part, default=None):
        """Seconds of a connection, of a write, or of each read of head or body."""
        left = self.deadline - time.monotonic()
        return max(0.001, min(self._seconds, left))  # 0 would not wait at all


def post(
    client,
    url,
    body: bytes,
    *,
    read,
    max_bytes: int,
    seconds: float,
    deadline: float = math.inf,
) -> Reply:
    """One call.

    Args:
        client: an httpx.Client.
        url: that it goes to.
        body: JSON.
        read: (received bytes) -> what they mean, None where they are no reply.
        max_bytes: a longer reply is none.
        seconds: for the connection, for the reply to begin, and for the whole once it
            has begun; so a call ends after three times that at most.
        deadline: by time.monotonic(): the call ends before it in any case. Half of what
            is left when the reply begins is for the rest of it.
    """
    end = time.monotonic() + seconds
    limits = _Limits(seconds, deadline)
    own = dict(
        headers={"Content-Type": "application/json"}, extensions={"timeout": limits}
    )
    try:
        with client.stream("POST", url, content=body, **own) as response:
            status = response.status_code
            if status != 200:
                wait = _retry_after(response) if status in RETRIED else None
                return Reply(None, f"HTTP {status}", wait)
            # The last read may begin just in time, and take as long again.
            now = time.monotonic()
            limits.deadline = now + (deadline - now) / 2
            end = min(end, limits.deadline)
            received = bytearray()
            for part in response.iter_raw():
                received += part
                if len(received) > max_bytes:
                    return Reply(None, f"a reply of more than {max_bytes} bytes")
                # httpx's own limit is on each read: a slow trickle never meets it.
                if time.monotonic() > end:
                    return Reply(None, "too slow")
    except httpx.TimeoutException:
        return Reply(None, "too slow")
    except httpx.HTTPError as error:  # its text could quote what was sent
        return Reply(None, type(error).__name__)
    value = read(bytes(received))
    return Reply(value, "" if value is not None else "a reply of another shape")


def repeated(
    call: Callable[[], Reply],
    *,
    max_retries: int,
    first_wait: float,
    deadline: float = math.inf,
) -> Reply:
    """The reply of the first call that succeeds, or of the last that fails.

    Args:
        call: makes one.
        max_retries: further calls after one that failed in a way that may pass.
        first_wait: seconds before the second call; they double with each further one,
            up to MAX_WAIT_SECONDS, and half of it is drawn at random, so that many
            callers do not come back at once. The service's own wish counts if longer.
        deadline: by time.monotonic(): no call begins after it.
    """
    reply = call()
    for attempt in range(max_retries):
        if reply.value is not None or reply.wait is None:
            break
        backoff = min(first_wait * 2**attempt, MAX_WAIT_SECONDS)
        drawn = backoff * random.uniform(0.5, 1.0)
        wait = max(drawn, min(reply.wait, MAX_WAIT_SECONDS))
        if time.monotonic() + wait > deadline:
            break
        time.sleep(wait)
        reply = call()
    return reply


def asked_again(search):
    """A SearchFn that asks again for the queries whose search has failed.

    A rollout that finds nothing leaves the loss; who needs what a demonstration or a
    prompt shows cannot go on without it, and waits as a service's client does.
    """

    def ask(queries):
        found = list(search(queries))
        for _ in range(SEARCHES - 1):
            failed = [i for i, passages in enumerate(found) if passages is None]
            if not failed:
                break
            again = search([queries[i] for i in failed])
            for i, passages in zip(failed, again, strict=True):
                found[i] = passages
        return found

    return ask


def json_of(received: bytes):
    """The JSON value, None where there is none."""
    try:
        return json.loads(received)
    except (ValueError, RecursionError):
        return None


def _retry_after(response) -> float:
    """Seconds of a Retry-After header, also where it is a date; 0 without one."""
    value = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())

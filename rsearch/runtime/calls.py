"""Call services over HTTP: JSON out, JSON in, in bounded time and size.

A call has a deadline. A call with a transient failure is retried, later each time, a
bounded number of times. Nothing that comes back is trusted: its size is limited while
it is read, and the caller checks its contents.
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

MAX_SEARCHES = 3  # of a query whose search fails, where nothing else can be done
RETRIED = frozenset({408, 429, *range(500, 600)})  # statuses of transient failures
MAX_WAIT_SECONDS = 20.0  # before a retry
HEADERS = {"Accept-Encoding": "identity"}  # so that bytes read are bytes sent


class Reply(NamedTuple):
    """The result of a call.

    Attributes:
        value: the reply as the caller's `read` parsed it; None where the call failed.
        why: the failure in few words, without anything that was sent.
        wait: seconds that the service asks for before the next call; None where a retry
            would fail the same way.
    """

    value: object
    why: str = ""
    wait: float | None = 0.0


def check_url(url: str, what: str) -> httpx.URL:
    """Return the parsed URL; refuse one that holds a secret.

    Args:
        url: as a user has written it.
        what: its name in errors, such as "config.models.judge.source".

    Raises:
        ValueError: it is no http(s) URL, or holds a password, a query or a fragment.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        shown = url.rpartition("@")[2]
        raise ValueError(f"{what} {shown!r} must be an http:// or https:// URL")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(
            f"the URL of {parsed.host} must hold no password, query or fragment; a key "
            "is read from the environment variable that api_key_env names"
        )
    return parsed


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable.

    A key with a line break is refused: it would add a header to the request.

    Raises:
        ValueError: it is not set, or holds no key.
    """
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        state = "holds no key" if key else "is not set"
        raise ValueError(f"the environment variable {variable!r} {state}")
    return key


class _Limits:
    """The timeouts of a call, each computed when httpx asks for it.

    Args:
        seconds: for each phase of the call.
        deadline: by time.monotonic(), for all phases.
    """

    def __init__(self, seconds, deadline):
        self._seconds = seconds
        self.deadline = deadline

    def get(self, phase, default=None):
        """Return the seconds of a connection, a write, or each read of head or body."""
        remaining = self.deadline - time.monotonic()
        return max(0.001, min(self._seconds, remaining))  # 0 would not wait at all


def post(
    client: httpx.Client,
    url: str,
    body: bytes,
    *,
    read: Callable[[bytes], object],
    max_bytes: int,
    seconds: float,
    deadline: float = math.inf,
) -> Reply:
    """Make one call, without retries.

    Args:
        client: keeps connections open between calls.
        url: of the service.
        body: JSON.
        read: (received bytes) -> the parsed reply, None where it is malformed.
        max_bytes: a longer reply counts as failed.
        seconds: for the connection, for the reply to begin, and for the complete reply
            once it has begun; so a call ends after three times that at most.
        deadline: by time.monotonic(): the call ends before it in any case. Half of the
            time that remains when the reply begins is for the rest of it.
    """
    end = time.monotonic() + seconds
    limits = _Limits(seconds, deadline)
    headers = {"Content-Type": "application/json"}
    extensions = {"timeout": limits}
    try:
        with client.stream(
            "POST", url, content=body, headers=headers, extensions=extensions
        ) as response:
            status = response.status_code
            if status != 200:
                wait = _retry_after(response) if status in RETRIED else None
                return Reply(None, f"HTTP {status}", wait)
            # The last read may begin just in time, and take as long again.
            now = time.monotonic()
            limits.deadline = now + (deadline - now) / 2
            end = min(end, limits.deadline)
            received = bytearray()
            for chunk in response.iter_raw():
                received += chunk
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


def with_retries(
    call: Callable[[], Reply],
    *,
    max_retries: int,
    first_wait: float,
    deadline: float = math.inf,
) -> Reply:
    """Return the reply of the first call that succeeds, or of the last that fails.

    Args:
        call: makes one call.
        max_retries: further calls after a transient failure.
        first_wait: seconds before the second call; they double with each further one,
            up to MAX_WAIT_SECONDS, and half of it is random, so that many callers do
            not come back at once. The service's Retry-After counts if longer.
        deadline: by time.monotonic(): no call begins after it.
    """
    reply = call()
    for attempt in range(max_retries):
        if reply.value is not None or reply.wait is None:
            break
        backoff = min(first_wait * 2**attempt, MAX_WAIT_SECONDS)
        jittered = backoff * random.uniform(0.5, 1.0)
        wait = max(jittered, min(reply.wait, MAX_WAIT_SECONDS))
        if time.monotonic() + wait > deadline:
            break
        time.sleep(wait)
        reply = call()
    return reply


def retry_failed_searches(search: Callable) -> Callable:
    """Return a SearchFn that repeats the queries whose search has failed.

    A rollout whose search fails leaves the loss, but a demonstration or a prompt needs
    its passages: the caller cannot go on without them.
    """

    def search_with_retries(queries):
        results = list(search(queries))
        for _ in range(MAX_SEARCHES - 1):
            failed = [i for i, passages in enumerate(results) if passages is None]
            if not failed:
                break
            again = search([queries[i] for i in failed])
            for i, passages in zip(failed, again, strict=True):
                results[i] = passages
        return results

    return search_with_retries


def parse_json(received: bytes) -> object:
    """Return the JSON value of a reply, or None where it is none."""
    try:
        return json.loads(received)
    except (ValueError, RecursionError):
        return None


def _retry_after(response) -> float:
    """Return the seconds of a Retry-After header, also of a date; 0 without one."""
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

"""Call services over HTTP: JSON out, JSON in, in bounded time and size.

A call has a deadline. After a transient failure it is retried a bounded number of
times, with growing waits. Nothing in a reply is trusted: its size is limited while it
is read, the caller checks its contents, and any exception counts as a failed call.
`Service` decides where an API key may be sent, and `OutageWatch` when a service counts
as unreachable.
"""

import base64
import datetime
import email.utils
import json
import math
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx

from rsearch.hosts import processes
from rsearch.hosts.preemption import OutageError
from rsearch.runtime.boundary import REQUESTS
from rsearch.runtime.connections import is_local_host

# Statuses of transient failures, and statuses that blame this request.
RETRY_STATUSES = frozenset({408, 429, *range(500, 600)})
REFUSAL_STATUSES = frozenset({400, 413, 414, 422, 431})
MAX_WAIT_SECONDS = 20.0  # before a retry
HEADERS = {"Accept-Encoding": "identity"}  # no compression: bytes read = bytes sent
MAX_DIGITS = 1000  # of an integer in a reply
FAILURES_IN_A_ROW = 3  # failed calls until a service counts as unreachable
PROBE_SECONDS = 2.0  # between two calls while a service is unreachable
OTHER_SHAPE = "a reply of another shape"
QUOTED_BYTES = 4096  # of a reply that are read for quoting
QUOTED_CHARS = 200
# This many consecutive characters of a key are masked in quoted text.
FRAGMENT_CHARS = 8

KEY_LIKE = re.compile(  # the formats of well-known API keys
    r"((sk|pk|rk|gsk|xai|glpat)-|(hf|ghp|gho|github_pat|sk|pk|rk|gsk)_"
    r"|(api[-_]?key|key|token|secret|bearer)[=: ])(?=.*[0-9]).{12,}|AIza.{16,}",
    re.IGNORECASE | re.DOTALL,
)
MAYBE_KEY = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z]).{20,}", re.DOTALL)


class Reply(NamedTuple):
    """The result of a call, or of one element of a batched call.

    Attributes:
        value: the reply as parsed by the caller's `read`; None if the call failed.
        reason: why the call failed; quotes nothing that was sent.
        wait: seconds that the service asks to wait before the next call; None if a
            retry would fail the same way.
        is_own_fault: whether this request itself caused the failure, so that another
            request may succeed.
        head: first bytes of the reply to a failed call, if the caller asked for them;
            untrusted, and may repeat what was sent.
    """

    value: object
    reason: str = ""
    wait: float | None = 0.0
    is_own_fault: bool = False
    head: bytes = b""


def check_url(url: str, field: str) -> httpx.URL:
    """Return the parsed URL; refuse one that contains a secret.

    Args:
        field: its name in error messages, such as "config.models.judge.source".

    Raises:
        ValueError: it is not an http(s) URL, or contains a password, a query, a
            fragment or a key in its path.
    """
    try:
        parsed_url = httpx.URL(url)
    except httpx.InvalidURL:
        parsed_url = httpx.URL("")
    if parsed_url.scheme not in ("http", "https") or not parsed_url.host:
        # Show neither a password before the host nor a key in or after the path.
        masked_url = _mask_path(re.split(r"[?#]", url.rpartition("@")[2])[0])
        raise ValueError(f"{field} {masked_url!r} must be an http:// or https:// URL")
    has_key = any(map(KEY_LIKE.fullmatch, parsed_url.path.split("/")))
    if parsed_url.userinfo or parsed_url.query or parsed_url.fragment or has_key:
        raise ValueError(
            f"{field}: the URL of {parsed_url.host} must not contain a password, "
            "query, fragment or key; a key is read from the environment variable that "
            "api_key_env names"
        )
    return parsed_url


def _mask_path(url: str) -> str:
    """Return a URL for messages; path segments that could be keys become '***'."""
    return "/".join(
        "***"
        if KEY_LIKE.fullmatch(segment) or MAYBE_KEY.fullmatch(segment)
        else segment
        for segment in urllib.parse.unquote(url).split("/")
    )


class Service:
    """The address of a service, and HTTP clients that send its API key.

    A client that calls this machine uses no proxy. A key is sent to another machine
    over https only, where a proxy cannot read it.

    Args:
        field: its name in error messages, such as "config.retrieval.url".
        path: (path of `url`) -> path of the calls.
        api_key_env: name of the environment variable with the key; "" sends no key.
        key_header: name of the header that carries the key.
        key_over_http: whether to send the key to another machine even over plain http.

    Attributes:
        target: URL of the calls.
        masked_url: the same URL for messages; path segments that could be keys are
            masked.

    Raises:
        ValueError: see `check_url` and `read_api_key`; or the URL contains the key, or
            the key would be sent unencrypted.
    """

    def __init__(
        self,
        url: str,
        *,
        field: str,
        path: Callable[[str], str],
        api_key_env: str = "",
        key_header: str = "Authorization",
        key_over_http: bool = False,
    ):
        parsed = check_url(url, field)
        raw_path = path(parsed.raw_path.decode()).encode()
        self.target = str(parsed.copy_with(raw_path=raw_path))
        origin = str(parsed.copy_with(raw_path=b"/"))[:-1]
        self.masked_url = origin + _mask_path(raw_path.decode())
        # All clients share one TLS context, since making one takes 30 ms. Without TLS
        # none is made: files that SSL_CERT_FILE and the like name may be missing.
        self._is_local = is_local_host(parsed.host)
        needs_no_tls = parsed.scheme == "http" and self._is_local
        self._certificates = False if needs_no_tls else httpx.create_ssl_context()
        self._headers, self._key = dict(HEADERS), ""
        if not api_key_env:
            return
        self._key = read_api_key(api_key_env)
        if self._key in urllib.parse.unquote(url) or self._key in url:
            raise ValueError(
                f"{field}: the URL of {parsed.host} contains the key of {api_key_env!r}"
            )
        if parsed.scheme == "http" and not (self._is_local or key_over_http):
            raise ValueError(
                f"{field}: the key of {api_key_env!r} would be sent to {parsed.host} "
                "without encryption: use https://, or allow it by "
                f"{field.rpartition('.')[0]}.key_over_http = True"
            )
        is_bearer = key_header == "Authorization"
        self._headers[key_header] = f"Bearer {self._key}" if is_bearer else self._key

    def client(self, *, max_connections: int | None = None) -> httpx.Client:
        """Return a client that keeps its connections open; it is a context manager."""
        return httpx.Client(
            headers=self._headers,
            limits=httpx.Limits(max_connections=max_connections),
            verify=self._certificates,
            trust_env=not self._is_local,
        )

    def describe(self, reply: Reply) -> str:
        """Return why a call failed, with the first characters of the reply.

        Control characters are left out, and anything that repeats the key is masked,
        however it is encoded.
        """
        text = reply.head.decode("utf-8", "replace")
        text = " ".join(text.split())
        text = "".join(filter(str.isprintable, text))
        text = _mask_key(text, self._key)[:QUOTED_CHARS]
        return f"{reply.reason}: {text}" if text else reply.reason


def _mask_key(text: str, key: str) -> str:
    """Return the text with each repetition of the key, or of a part of it, masked."""
    if not key:
        return text
    data = key.encode()
    spellings = {
        key,
        key[::-1],
        json.dumps(key)[1:-1],
        data.hex(),
        urllib.parse.quote(key, safe=""),
        urllib.parse.quote(key),
    }
    for offset in range(3):  # base64 depends on the key's position modulo 3
        buffer = bytes(offset) + data
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            # The first characters also depend on the bytes before the key.
            spellings.add(encode(buffer).decode().rstrip("=")[4 * bool(offset) : -1])
    size = min(FRAGMENT_CHARS, len(key))
    lower_text = text.lower()
    if len(lower_text) != len(text):  # some letters become several in lower case
        lower_text = text
    fragments = {
        spelling[i : i + size]
        for spelling in (*spellings, *map(str.lower, spellings))
        for i in range(len(spelling) - size + 1)
    }
    is_masked = bytearray(len(text))
    for i in range(len(text) - size + 1):
        if text[i : i + size] in fragments or lower_text[i : i + size] in fragments:
            is_masked[i : i + size] = b"\1" * size
    return "".join("*" if is_key else c for c, is_key in zip(text, is_masked))


class OutageWatch:
    """Detect and wait out the outages of a service; safe to use from several threads.

    After FAILURES_IN_A_ROW failed calls in a row, the next call is repeated until the
    service is back. After `outage_seconds` the run is saved and ends.

    Args:
        name: name of the service, for messages.
        outage_seconds: how long it may be unreachable.
        probe_seconds: time between two calls while it is unreachable.
        log: called with one line when it becomes unreachable, and when it is back.
    """

    def __init__(
        self,
        name: str,
        *,
        outage_seconds: float,
        probe_seconds: float,
        log: Callable[[str], None],
    ):
        self._name, self._outage, self._log = name, outage_seconds, log
        self._probe = probe_seconds
        self._lock = threading.Lock()
        self._failures = 0
        self._unreachable_since = None

    @property
    def is_unreachable(self) -> bool:
        """Whether the service is unreachable, so that the next call waits for it."""
        return self._failures >= FAILURES_IN_A_ROW

    def repeat_until_back(self, call: Callable[[], list[Reply]]) -> list[Reply]:
        """Return the replies of a call; repeat it while the service is unreachable.

        Args:
            call: makes the call, and returns a reply for each of its elements.

        Raises:
            OutageError: the service has been unreachable for too long.
            PreemptedError: the run has received a request to stop.
        """
        while True:
            start_time = time.monotonic()
            replies = call()
            with self._lock:
                if self._is_final(replies, start_time):
                    return replies
            processes.check_preempted()
            time.sleep(self._probe)

    def _is_final(self, replies, start_time) -> bool:
        """Return whether to keep these replies; False while it is unreachable."""
        if any(reply.value is not None for reply in replies):
            if self.is_unreachable:
                self._log(f"{self._name}: is back")
            self._failures = 0
            self._unreachable_since = None
            return True
        # A single request may itself be at fault. A service that refuses every one of
        # several requests is no more use than one that is unreachable.
        if len(replies) == 1 and replies[0].is_own_fault:
            return True
        self._failures += 1
        if self._unreachable_since is None:
            self._unreachable_since = start_time
        if not self.is_unreachable:
            return True
        seconds = time.monotonic() - self._unreachable_since
        if seconds > self._outage:
            raise OutageError(f"{self._name}: unreachable for {seconds:.0f} s")
        if self._failures == FAILURES_IN_A_ROW:
            self._log(f"{self._name}: unreachable; waiting for it to come back")
        return False


def read_api_key(variable: str) -> str:
    """Return the API key in an environment variable.

    A key with a line break is refused: it would add a header to the request.

    Raises:
        ValueError: the variable is not set, or contains no valid key.
    """
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        state = "holds no key" if key else "is not set"
        raise ValueError(f"the environment variable {variable!r} {state}")
    return key


class TimeLimits:
    """The timeouts of a call, each computed when httpcore asks for it.

    Args:
        seconds: limit of each phase of the call.
        deadline: end of all phases, as a time of time.monotonic().
    """

    def __init__(self, seconds, deadline):
        self.seconds = seconds
        self.deadline = deadline

    @property
    def extensions(self) -> dict[str, Any]:
        """The extensions of a request that make httpx or httpcore keep the limits."""
        return {"timeout": self, "trace": _limit_reads}

    def get(self, phase, default=None):
        """Return the timeout of a phase: connecting, a write, the head or the body."""
        return _Timeout(min(time.monotonic() + self.seconds, self.deadline))


class _Timeout(float):
    """The seconds until a phase of a call ends, for all of its reads together.

    Args:
        end: end of the phase, as a time of time.monotonic().
    """

    def __new__(cls, end):
        timeout = super().__new__(cls, _seconds_until(end))
        timeout.end = end
        return timeout


def _seconds_until(end):
    return max(0.001, end - time.monotonic())  # 0 would not wait at all


def _limit_reads(event, info):
    """Let all reads of a phase share its timeout, on a connection that is now open.

    httpcore limits each read by itself, and the head of a reply is any number of reads:
    a trickle of bytes or of interim replies (1xx) would never reach that limit.

    Args:
        event, info: see httpcore's extension "trace".
    """
    if event.endswith(("connect_tcp.complete", "start_tls.complete")):
        stream = info["return_value"]
        read = stream.read

        def read_in_time(max_bytes, timeout=None):
            if isinstance(timeout, _Timeout):
                timeout = _seconds_until(timeout.end)
            return read(max_bytes, timeout)

        stream.read = read_in_time


def post(
    client: httpx.Client,
    url: str,
    body: bytes,
    *,
    read: Callable[[bytes], object],
    max_bytes: int,
    seconds: float,
    deadline: float = math.inf,
    is_quoted: bool = False,
) -> Reply:
    """Make one call, without retries.

    Any exception counts as a failed call: the service controls every byte of the reply,
    in its head and in its body.

    Args:
        client: HTTP client, which keeps connections open between calls.
        body: JSON to send.
        read: (received bytes) -> the parsed reply, or None if it is malformed; or a
            Reply, if it can say more.
        max_bytes: a longer reply counts as failed.
        seconds: limit for the connection, for the reply to begin, and for the rest of
            the reply once it has begun; a call thus takes at most three times as long.
        deadline: time of time.monotonic() before which the call ends in any case.
        is_quoted: whether the Reply of a failed call has its `head`.
    """
    try:
        return _post(
            client, url, body, read, max_bytes, TimeLimits(seconds, deadline), is_quoted
        )
    except httpx.TimeoutException:
        return Reply(None, "too slow")
    except REQUESTS:
        raise
    except BaseException as error:  # its message could quote what was sent
        return Reply(None, type(error).__name__)


def _post(client, url, body, read, max_bytes, limits, is_quoted) -> Reply:
    """Make one call, as `post` does, but let exceptions through."""
    end = time.monotonic() + limits.seconds
    headers = {"Content-Type": "application/json"}
    with client.stream(
        "POST", url, content=body, headers=headers, extensions=limits.extensions
    ) as response:
        status = response.status_code
        if status != 200:
            wait = _retry_after(response.headers) if status in RETRY_STATUSES else None
            head = _read_head(response, end) if is_quoted else b""
            return Reply(None, f"HTTP {status}", wait, status in REFUSAL_STATUSES, head)
        end = min(end, limits.deadline)
        reply_bytes = bytearray()
        for chunk in response.iter_raw():
            reply_bytes += chunk
            if len(reply_bytes) > max_bytes:
                reason = f"a reply of more than {max_bytes} bytes"
                return Reply(None, reason, None, is_own_fault=True)
            # The read's own limit counts from when the reply began.
            if time.monotonic() > end:
                return Reply(None, "too slow")
    reply = read(bytes(reply_bytes))
    if not isinstance(reply, Reply):
        reply = Reply(reply, "" if reply is not None else OTHER_SHAPE)
    needs_head = is_quoted and reply.value is None
    head = bytes(reply_bytes[:QUOTED_BYTES]) if needs_head else b""
    return reply._replace(head=head)


def _read_head(response, end) -> bytes:
    """Return the first bytes of a body, as far as they arrive in time."""
    head = bytearray()
    try:
        for chunk in response.iter_raw():
            head += chunk
            if len(head) >= QUOTED_BYTES or time.monotonic() > end:
                break
    except Exception:  # the status, already read, is more informative
        pass
    return bytes(head[:QUOTED_BYTES])


def with_retries(
    call: Callable[[], Reply],
    *,
    max_retries: int,
    first_wait: float,
    max_wait: float = MAX_WAIT_SECONDS,
    deadline: float = math.inf,
) -> Reply:
    """Return the reply of the first call that succeeds, or else of the last call.

    Args:
        max_retries: number of retries after transient failures.
        first_wait: seconds before the first retry. The wait doubles with each retry,
            and half of it is random, so that many callers do not retry together. If
            the service's Retry-After is longer, it is used instead.
        deadline: time of time.monotonic() after which no call is started.
    """
    reply = call()
    for attempt in range(max_retries):
        if reply.value is not None or reply.wait is None:
            break
        backoff = min(first_wait * 2.0 ** min(attempt, 64), max_wait)
        jittered_wait = backoff * random.uniform(0.5, 1.0)
        wait = max(jittered_wait, min(reply.wait, max_wait))
        if time.monotonic() + wait > deadline:
            break
        time.sleep(wait)
        reply = call()
    return reply


def parse_json(received: bytes) -> object:
    """Return the JSON value of a reply, or None if it is not JSON.

    Bytes that are not valid text are replaced, and an integer of more than MAX_DIGITS
    digits is returned as a string. They spoil only the value that contains them, not
    the whole reply.
    """

    def parse_int(digits):
        return int(digits) if len(digits) <= MAX_DIGITS else digits

    try:
        text = received.decode(json.detect_encoding(received), "replace")
        return json.loads(text, parse_int=parse_int)
    except (ValueError, RecursionError, MemoryError):
        return None


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header, or until its date; 0 without one."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        wait = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
    except Exception:  # a date may have any number as its year, hour or offset
        return 0.0
    return max(0.0, wait)

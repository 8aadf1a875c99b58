"""Call services over HTTP: JSON out, JSON in, in bounded time and size.

A call has a deadline. A call with a transient failure is retried, later each time, a
bounded number of times. Nothing that comes back is trusted: its size is limited while
it is read, the caller checks its contents, and whatever is raised on the way is a
failed call. `Service` says where a key may go, `OutageWatch` when a service is away.
"""

import base64
import datetime
import email.utils
import ipaddress
import json
import math
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple

import httpx

from rsearch.hosts import processes
from rsearch.hosts.preemption import OutageError
from rsearch.runtime.boundary import REQUESTS

RETRIED = frozenset({408, 429, *range(500, 600)})  # statuses of transient failures
REFUSED = frozenset({400, 413, 414, 422, 431})  # of a request, not of all of them
MAX_WAIT_SECONDS = 20.0  # before a retry
HEADERS = {"Accept-Encoding": "identity"}  # so that bytes read are bytes sent
MAX_DIGITS = 1000  # of a whole number in a reply
FAILURES_IN_A_ROW = 3  # calls, until a service counts as away
PROBE_SECONDS = 2.0  # between two calls while a service is away
OTHER_SHAPE = "a reply of another shape"
QUOTED_BYTES = 4096  # of a reply that are read to be quoted
QUOTED_CHARS = 200
FRAGMENT = 8  # characters of a key in a row that are masked in what is quoted

KEY_LIKE = re.compile(  # as those who hand out keys write them
    r"((sk|pk|rk|gsk|xai|glpat)-|(hf|ghp|gho|github_pat|sk|pk|rk|gsk)_"
    r"|(api[-_]?key|key|token|secret|bearer)[=: ])(?=.*[0-9]).{12,}|AIza.{16,}",
    re.IGNORECASE | re.DOTALL,
)
MAYBE_KEY = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z]).{20,}", re.DOTALL)


class Reply(NamedTuple):
    """The result of a call, or of an element of it.

    Attributes:
        value: the reply as the caller's `read` parsed it; None where the call failed.
        why: the failure in few words, without anything that was sent.
        wait: seconds that the service asks for before the next call; None where a retry
            would fail the same way.
        is_own_fault: the failure is of this request; another one may be answered.
        head: first bytes of the reply to a call that failed, where they are asked for;
            hostile, and may repeat what was sent.
    """

    value: object
    why: str = ""
    wait: float | None = 0.0
    is_own_fault: bool = False
    head: bytes = b""


def check_url(url: str, what: str) -> httpx.URL:
    """Return the parsed URL; refuse one that holds a secret.

    Args:
        url: as a user has written it.
        what: its name in errors, such as "config.models.judge.source".

    Raises:
        ValueError: it is no http(s) URL, or holds a password, a query, a fragment or a
            key in its path.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        # Neither a password before the host nor a key behind the path is shown.
        shown = _mask_path(re.split(r"[?#]", url.rpartition("@")[2])[0])
        raise ValueError(f"{what} {shown!r} must be an http:// or https:// URL")
    has_key = any(map(KEY_LIKE.fullmatch, parsed.path.split("/")))
    if parsed.userinfo or parsed.query or parsed.fragment or has_key:
        raise ValueError(
            f"{what}: the URL of {parsed.host} must hold no password, query, fragment "
            "or key; a key is read from the environment variable that api_key_env names"
        )
    return parsed


def _mask_path(url: str) -> str:
    """Return a URL for messages, without path segments that could be keys."""
    return "/".join(
        "***"
        if KEY_LIKE.fullmatch(segment) or MAYBE_KEY.fullmatch(segment)
        else segment
        for segment in urllib.parse.unquote(url).split("/")
    )


def leads_here(host: str) -> bool:
    """Return whether a URL's host is this machine, as far as its spelling shows."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


class Service:
    """The address of a service, and the clients that carry a key there.

    A client that calls this machine uses no proxy. A key is sent to another machine
    over https alone, where a proxy cannot read it.

    Args:
        url: as a user has written it.
        field: its name in errors, such as "config.retrieval.url".
        path: path of the calls, from that of the URL.
        api_key_env: the environment variable with the key; "" sends none.
        key_header: header that carries the key.
        key_over_http: send the key over plain http to another machine, too.

    Attributes:
        target: URL of the calls.
        shown: that URL for messages: what could be a key in its path is masked.

    Raises:
        ValueError: see `check_url` and `read_api_key`; the key would be sent openly.
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
        self.shown = origin + _mask_path(raw_path.decode())
        # One TLS context for all clients takes 30 ms. Without TLS none is made: the
        # files that SSL_CERT_FILE and the like name may be missing.
        self._is_local = leads_here(parsed.host)
        needs_no_tls = parsed.scheme == "http" and self._is_local
        self._certificates = False if needs_no_tls else httpx.create_ssl_context()
        self._headers, self._key = dict(HEADERS), ""
        if not api_key_env:
            return
        self._key = read_api_key(api_key_env)
        if self._key in urllib.parse.unquote(url) or self._key in url:
            raise ValueError(
                f"{field}: the URL of {parsed.host} holds the key of {api_key_env!r}"
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
        """Return a client that keeps its connections open; a context manager."""
        return httpx.Client(
            headers=self._headers,
            limits=httpx.Limits(max_connections=max_connections),
            verify=self._certificates,
            trust_env=not self._is_local,
        )

    def describe(self, reply: Reply) -> str:
        """Return why a call failed, with the first characters of what came back.

        Control characters are left out, and what repeats the key is masked, however it
        is spelt.
        """
        text = reply.head.decode("utf-8", "replace")
        text = " ".join(text.split())
        text = "".join(filter(str.isprintable, text))
        text = _mask_key(text, self._key)[:QUOTED_CHARS]
        return f"{reply.why}: {text}" if text else reply.why


def _mask_key(text: str, key: str) -> str:
    """Return the text with all that repeats the key, or a part of it, as asterisks."""
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
    for offset in range(3):  # of the key in what is encoded
        padded = bytes(offset) + data
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            # The first characters depend on what stands before the key.
            spellings.add(encode(padded).decode().rstrip("=")[4 * bool(offset) : -1])
    size = min(FRAGMENT, len(key))
    lowered = text.lower()
    if len(lowered) != len(text):  # some letters have more than one in lower case
        lowered = text
    fragments = {
        spelling[i : i + size]
        for spelling in (*spellings, *map(str.lower, spellings))
        for i in range(len(spelling) - size + 1)
    }
    masked = bytearray(len(text))
    for i in range(len(text) - size + 1):
        if text[i : i + size] in fragments or lowered[i : i + size] in fragments:
            masked[i : i + size] = b"\1" * size
    return "".join("*" if is_key else c for c, is_key in zip(text, masked))


class OutageWatch:
    """The answers of a service in a row, and what follows; safe in several threads.

    After FAILURES_IN_A_ROW calls without an answer the next one is made until the
    service is back; after `outage_seconds` the run is saved and ends.

    Args:
        name: of the service, for messages.
        outage_seconds: that it may be away.
        probe_seconds: between two calls while it is away.
        say: called with a line when it is away, and when it is back.
    """

    def __init__(
        self,
        name: str,
        *,
        outage_seconds: float,
        probe_seconds: float,
        say: Callable[[str], None],
    ):
        self._name, self._outage, self._say = name, outage_seconds, say
        self._probe = probe_seconds
        self._lock = threading.Lock()
        self._failures = 0
        self._away_since = None

    @property
    def is_away(self) -> bool:
        """Whether the next call is one that waits for the service."""
        return self._failures >= FAILURES_IN_A_ROW

    def ask(self, call: Callable[[], list[Reply]]) -> list[Reply]:
        """Return the replies of a call; repeat it while the service is away.

        Args:
            call: returns a reply to each element that is asked.

        Raises:
            OutageError: the service has been away for too long.
            PreemptedError: the run was asked to stop meanwhile.
        """
        while True:
            began = time.monotonic()
            replies = call()
            with self._lock:
                if self._is_final(replies, began):
                    return replies
            processes.check_preempted()
            time.sleep(self._probe)

    def _is_final(self, replies, began) -> bool:
        """Return whether these are the replies; False while the service is away."""
        if any(reply.value is not None for reply in replies):
            if self.is_away:
                self._say(f"{self._name}: is back")
            self._failures = 0
            self._away_since = None
            return True
        # A single request may be at fault itself. A service that refuses all of
        # several is of no more use than one that is away.
        if len(replies) == 1 and replies[0].is_own_fault:
            return True
        self._failures += 1
        if self._away_since is None:
            self._away_since = began
        if not self.is_away:
            return True
        away = time.monotonic() - self._away_since
        if away > self._outage:
            raise OutageError(f"{self._name}: away for {away:.0f} s")
        if self._failures == FAILURES_IN_A_ROW:
            self._say(f"{self._name}: away; waiting for it to come back")
        return False


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
        self.seconds = seconds
        self.deadline = deadline

    def get(self, phase, default=None):
        """Return the seconds of a connection, a write, or each read of head or body."""
        remaining = self.deadline - time.monotonic()
        return max(0.001, min(self.seconds, remaining))  # 0 would not wait at all


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

    Whatever goes wrong is a failed call: the service chooses every byte that comes
    back, in the head of the reply and in its body.

    Args:
        client: keeps connections open between calls.
        url: of the service.
        body: JSON.
        read: (received bytes) -> the parsed reply, None where it is malformed; or a
            Reply, where it can tell more.
        max_bytes: a longer reply counts as failed.
        seconds: for the connection, for the reply to begin, and for the complete reply
            once it has begun; so a call ends after three times that at most.
        deadline: by time.monotonic(): the call ends before it in any case. Half of the
            time that remains when the reply begins is for the rest of it.
        is_quoted: a failed reply has its `head`.
    """
    try:
        return _post(
            client, url, body, read, max_bytes, _Limits(seconds, deadline), is_quoted
        )
    except httpx.TimeoutException:
        return Reply(None, "too slow")
    except REQUESTS:
        raise
    except BaseException as error:  # its text could quote what was sent
        return Reply(None, type(error).__name__)


def _post(client, url, body, read, max_bytes, limits, is_quoted) -> Reply:
    """Make one call, as `post` does; raise anything."""
    end = time.monotonic() + limits.seconds
    headers = {"Content-Type": "application/json"}
    extensions = {"timeout": limits}
    with client.stream(
        "POST", url, content=body, headers=headers, extensions=extensions
    ) as response:
        status = response.status_code
        if status != 200:
            wait = _retry_after(response.headers) if status in RETRIED else None
            head = _read_head(response, end) if is_quoted else b""
            return Reply(None, f"HTTP {status}", wait, status in REFUSED, head)
        # The last read may begin just in time, and take as long again.
        now = time.monotonic()
        limits.deadline = now + (limits.deadline - now) / 2
        end = min(end, limits.deadline)
        received = bytearray()
        for chunk in response.iter_raw():
            received += chunk
            if len(received) > max_bytes:
                why = f"a reply of more than {max_bytes} bytes"
                return Reply(None, why, None, is_own_fault=True)
            # httpx's own limit is on each read: a slow trickle never meets it.
            if time.monotonic() > end:
                return Reply(None, "too slow")
    reply = read(bytes(received))
    if not isinstance(reply, Reply):
        reply = Reply(reply, "" if reply is not None else OTHER_SHAPE)
    is_head_wanted = is_quoted and reply.value is None
    head = bytes(received[:QUOTED_BYTES]) if is_head_wanted else b""
    return reply._replace(head=head)


def _read_head(response, end) -> bytes:
    """Return the first bytes of a body, as far as they can be had in time."""
    received = bytearray()
    try:
        for chunk in response.iter_raw():
            received += chunk
            if len(received) >= QUOTED_BYTES or time.monotonic() > end:
                break
    except Exception:  # the status has been read: it tells more
        pass
    return bytes(received[:QUOTED_BYTES])


def with_retries(
    call: Callable[[], Reply],
    *,
    max_retries: int,
    first_wait: float,
    max_wait: float = MAX_WAIT_SECONDS,
    deadline: float = math.inf,
) -> Reply:
    """Return the reply of the first call that succeeds, or of the last that fails.

    Args:
        call: makes one call.
        max_retries: further calls after a transient failure.
        first_wait: seconds before the second call; they double with each further one,
            and half of it is random, so that many callers do not come back at once. The
            service's Retry-After counts if longer.
        max_wait: seconds of a wait, at most.
        deadline: by time.monotonic(): no call begins after it.
    """
    reply = call()
    for attempt in range(max_retries):
        if reply.value is not None or reply.wait is None:
            break
        backoff = min(first_wait * 2.0 ** min(attempt, 64), max_wait)
        jittered = backoff * random.uniform(0.5, 1.0)
        wait = max(jittered, min(reply.wait, max_wait))
        if time.monotonic() + wait > deadline:
            break
        time.sleep(wait)
        reply = call()
    return reply


def parse_json(received: bytes) -> object:
    """Return the JSON value of a reply, or None where it is none.

    Bytes that are no text are replaced, and a number of more digits than Python reads
    is a text: they concern the value that they stand in, not the reply.
    """

    def parse_int(digits):
        return int(digits) if len(digits) <= MAX_DIGITS else digits

    try:
        text = received.decode(json.detect_encoding(received), "replace")
        return json.loads(text, parse_int=parse_int)
    except (ValueError, RecursionError, MemoryError):
        return None


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header, also of a date; 0 without one."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,6}", value):
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        wait = (when - datetime.datetime.now(datetime.UTC)).total_seconds()
    except Exception:  # a date may have any number for a year, an hour or an offset
        return 0.0
    return max(0.0, wait)

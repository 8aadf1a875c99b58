"""Add the text of web pages to the hits of a web search, safely.

Three parts: `PagedSearch` wraps a SearchFn; `fetch` gets a page; `html_to_text` reads
it. All text that comes back is hostile.

Fetching must not reach anything but the open web, though whoever writes a page chooses
where its links and redirects lead. So an address counts after its name is resolved, for
each connection anew, and the connection goes to the very address that was judged: a
name that resolves to something else the next time changes nothing. All that is not
global is refused by a table of this module: private, loopback, link-local and metadata
addresses, also inside of IPv6 forms that carry an IPv4 one.

Reading must take a time that grows with a page's length alone: html.parser of the
standard library takes hours for a megabyte of tags that are never closed, and raises an
AssertionError of its own for some.
"""

import html
import ipaddress
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpcore

from rsearch.types import Passage, SearchFn

MAX_FETCHES = 16  # pages at once
WORD = re.compile(r"\w+")

PORTS = {"http": 80, "https": 443}
TYPES = ("text/html", "text/plain", "application/xhtml+xml")
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
MAX_URL_CHARS = 2000
MAX_BYTES = 1 << 20  # of a page; what is longer is cut
HEADERS = {
    "Accept": ", ".join(TYPES),
    "Accept-Encoding": "identity",
    "User-Agent": "rsearch",
    "Connection": "close",
}
# All that is no address of a host on the open internet: IANA's registries of special
# addresses (RFC 6890 and its updates), and what clouds answer their machines at. Python
# has a table as well, which differs from one patch level to the next.
CLOSED_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's WireServer
            "169.254.0.0/16",  # link-local; metadata of most clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments; Oracle's metadata
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")  # the only global unicast addresses
CLOSED_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
            "2001:db8::/32",  # documentation
            "3ffe::/16",  # the former 6bone
            "3fff::/20",  # documentation
        ),
    )
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
ISATAP = b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe"  # before an IPv4 address

HIDDEN = ("noscript", "template", "head", "svg", "iframe")
RAW = {  # elements whose content is no markup, and where it ends
    name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")
}
NAME = re.compile(r"</?([a-zA-Z][^\s/>]*)")
IN_TAG = re.compile(r"=\s*([\"'])|>")  # a value in quotes, or the tag's end
LONG_NUMBER = re.compile(r"&#[0-9]{8,};?")  # of no character; int() refuses the longest


class PageRefusedError(ValueError):
    """A page that is not fetched, for its address, its type or its size."""


class Page(NamedTuple):
    """A page that was fetched.

    Attributes:
        url: its address, after redirects.
        text: its readable text, without HTML's markup; hostile.
    """

    url: str
    text: str


def is_open(address: str) -> bool:
    """Return whether an IP address is one of a host on the open internet.

    An IPv6 address that carries an IPv4 address leads there, and is judged by it.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 4:
        return not any(ip in network for network in CLOSED_V4)
    if ip.scope_id is not None:  # of a link
        return False
    if ip.ipv4_mapped is not None:
        return is_open(str(ip.ipv4_mapped))
    if ip in NAT64:
        return is_open(_ipv4(ip.packed[12:]))
    if ip not in GLOBAL_V6 or any(ip in network for network in CLOSED_V6):
        return False
    if ip in SIX_TO_FOUR and not is_open(_ipv4(ip.packed[2:6])):
        return False
    return ip.packed[8:12] not in ISATAP or is_open(_ipv4(ip.packed[12:]))


def _ipv4(packed) -> str:
    return str(ipaddress.IPv4Address(packed))


def normalize_url(url: str) -> str:
    """Return the URL as it is requested.

    Raises:
        PageRefusedError: it is no plain http(s) URL of a usual port.
    """
    if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
        raise PageRefusedError("a URL that is too long, or holds what none does")
    try:
        fields = urllib.parse.urlsplit(url)
        port = fields.port
    except ValueError:
        raise PageRefusedError("no URL") from None
    if fields.scheme not in PORTS or not fields.hostname:
        raise PageRefusedError("no http:// or https:// URL")
    if fields.username is not None or fields.password is not None:
        raise PageRefusedError("a URL with a user name")
    if port not in (None, PORTS[fields.scheme]):
        raise PageRefusedError(f"port {port}")
    try:
        host = fields.hostname.encode("idna").decode()
    except UnicodeError:
        raise PageRefusedError("a host name that is none") from None
    if ":" in host:
        host = f"[{host}]"
    path = urllib.parse.quote(fields.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(fields.query, safe="/%:@!$&'()*+,;=~-._?")
    return urllib.parse.urlunsplit((fields.scheme, host, path, query, ""))


class OpenBackend(httpcore.NetworkBackend):
    """A network backend that connects to addresses of the open internet alone.

    Args:
        inner: backend that makes the connections.
        resolve: (host, port) -> its addresses, as socket.getaddrinfo finds them.
    """

    def __init__(
        self,
        inner: httpcore.NetworkBackend | None = None,
        resolve: Callable[[str, int], list[str]] | None = None,
    ):
        self._inner = inner or httpcore.SyncBackend()
        self._resolve = resolve or _resolve

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, **settings
    ):
        """Connect to the first of the host's addresses.

        Raises:
            PageRefusedError: any of them is not global; a mixed name is a trick.
        """
        addresses = self._resolve(host, port)
        closed = [address for address in addresses if not is_open(address)]
        if closed or not addresses:
            raise PageRefusedError(f"{host} is {closed[0] if closed else 'not known'}")
        return self._inner.connect_tcp(addresses[0], port, timeout, **settings)


def _resolve(host, port):
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: a name that is none
        return []
    return list(dict.fromkeys(sockaddr[0] for *_, sockaddr in infos))


def fetch(
    url: str,
    *,
    seconds: float,
    backend: httpcore.NetworkBackend | None = None,
    max_bytes: int = MAX_BYTES,
) -> Page:
    """Fetch the page at a URL.

    Args:
        url: hostile.
        seconds: for all requests, redirects included. A read that has begun is not
            ended: it may take as long again.
        backend: an OpenBackend; by default of this machine's network.
        max_bytes: a longer page is cut.

    Raises:
        PageRefusedError: it cannot be fetched; says why in few words.
    """
    end = time.monotonic() + seconds
    try:
        return _follow(url, backend or OpenBackend(), end, max_bytes)
    except PageRefusedError:
        raise
    # A server chooses each byte of head and page: nothing that it sends ends a run.
    except Exception as error:
        raise PageRefusedError(type(error).__name__) from None


def _follow(url, backend, end, max_bytes) -> Page:
    """Return the page that a URL leads to."""
    for _ in range(MAX_REDIRECTS + 1):
        url = normalize_url(url)
        target = _request(url, backend, end, max_bytes)
        if isinstance(target, Page):
            return target
        try:
            url = urllib.parse.urljoin(url, target)
        except ValueError:
            raise PageRefusedError("a redirect to no URL") from None
    raise PageRefusedError(f"more than {MAX_REDIRECTS} redirects")


def _request(url, backend, end, max_bytes) -> Page | str:
    """Return the page, or the URL that it redirects to."""
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise PageRefusedError("too slow")
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), remaining)
    with (
        httpcore.ConnectionPool(network_backend=backend) as pool,
        pool.stream(
            "GET", url, headers=HEADERS, extensions={"timeout": timeouts}
        ) as reply,
    ):
        headers = {name.lower(): value for name, value in reply.headers}
        if reply.status in REDIRECTS:
            return headers.get(b"location", b"").decode("latin-1")
        if reply.status != 200:
            raise PageRefusedError(f"HTTP {reply.status}")
        kind = headers.get(b"content-type", b"").decode("latin-1").lower()
        if kind.partition(";")[0].strip() not in TYPES:
            raise PageRefusedError(f"a page of type {kind[:40]!r}")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise PageRefusedError("a packed page")
        received = bytearray()
        for chunk in reply.iter_stream():
            received += chunk
            if len(received) > max_bytes:
                break
            if time.monotonic() > end:
                raise PageRefusedError("too slow")
    text = _decode(bytes(received[:max_bytes]), kind)
    return Page(url, text if kind.startswith("text/plain") else html_to_text(text))


def _decode(data, kind):
    """Return text, whichever character set the page claims."""
    charset = kind.partition("charset=")[2].partition(";")[0].strip(" \"'")
    if charset not in ("iso-8859-1", "latin-1", "windows-1252"):
        charset = "utf-8"
    return data.decode(charset, "replace")


def html_to_text(markup: str) -> str:
    """Return the text that a page of HTML shows, a line for each run of text.

    Args:
        markup: hostile. Nothing is read after a tag, comment or script without an end.
    """
    lines = []
    hidden = 0  # open elements that show nothing
    for text, name, opens, closes in _tags(markup):
        if not hidden and (text := " ".join(_unescape(text).split())):
            lines.append(text)
        if name in HIDDEN:
            hidden = max(0, hidden + opens - closes)
    return "\n".join(lines)


def _tags(markup) -> Iterator[tuple[str, str, bool, bool]]:
    """Yield (text, name of the tag after it or "", whether it opens, or closes)."""
    text_start = at = 0
    while (start := markup.find("<", at)) >= 0:
        tag = NAME.match(markup, start)
        if tag is None and markup[start + 1 : start + 2] not in ("!", "?", "/"):
            at = start + 1  # a letter of the text
            continue
        text = markup[text_start:start]
        name, opens, closes = "", False, False
        if tag is not None:
            name = tag[1].lower()
            end = _end_of_tag(markup, tag.end())
            opens = markup[start + 1] != "/"
            closes = not opens or markup[max(end - 2, 0) : end] == "/>"
        else:
            close = "-->" if markup.startswith("<!--", start) else ">"
            end = _end_of(markup, close, start + 2)
        yield text, name, opens, closes
        if opens and not closes and name in RAW:
            raw_end = RAW[name].search(markup, end) if end else None
            end = raw_end.start() if raw_end else 0
        if not end:
            return
        text_start = at = end
    yield markup[text_start:], "", False, False


def _end_of_tag(markup, at) -> int:
    """Return the end of the tag whose name ends at `at`, or 0 where there is none."""
    while (match := IN_TAG.search(markup, at)) is not None:
        if not match[1]:
            return match.end()
        at = _end_of(markup, match[1], match.end())
        if not at:
            return 0
    return 0


def _end_of(markup, text, at) -> int:
    """Return the end of the next occurrence of a text, or 0 where there is none."""
    start = markup.find(text, at)
    return start + len(text) if start >= 0 else 0


def _unescape(text):
    """Return text with its character references resolved."""
    return html.unescape(LONG_NUMBER.sub("\ufffd", text))


class PagedSearch:
    """A SearchFn whose passages hold the text of web pages.

    The id of each hit is the URL of its page. A page that cannot be fetched leaves the
    hit as it was. A long page is cut to the lines that share most words with the query
    and the hit.

    Args:
        search: of the hits, such as a RemoteSearch of a web search.
        page_chars: characters of a page that a passage keeps.
        seconds: to fetch a page in.
        get: fetches a page.

    Attributes:
        fingerprint: equal ones find the same way.
        searches_at_once: as of `search`, see `SearchFn`.
    """

    def __init__(
        self,
        search: SearchFn,
        *,
        page_chars: int,
        seconds: float,
        get: Callable[..., Page] = fetch,
    ):
        self._search = search
        self.searches_at_once = getattr(search, "searches_at_once", 1)
        self._chars = page_chars
        self._seconds = seconds
        self._get = get
        self.fingerprint = f"{search.fingerprint} pages {page_chars}"

    def __str__(self) -> str:
        """Return a short description of what is searched."""
        return f"{self._search}, with pages"

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """Return the passages of each query, as the search orders them.

        Args:
            queries: texts.

        Returns:
            [queries] tuples of passages; None where the search failed.
        """
        results = self._search(queries)
        pairs = dict.fromkeys(
            (query, hit)
            for query, hits in zip(queries, results, strict=True)
            for hit in hits or ()
        )
        with ThreadPoolExecutor(MAX_FETCHES) as pool:
            pages = dict(zip(pairs, pool.map(self._add_page, pairs), strict=True))
        return [
            None if hits is None else tuple(pages[query, hit] for hit in hits)
            for query, hits in zip(queries, results, strict=True)
        ]

    def read(self, ids: Sequence[str]) -> list[Passage | None]:
        """Return the complete page at each URL; None where it cannot be fetched."""
        with ThreadPoolExecutor(MAX_FETCHES) as pool:
            return list(pool.map(self._read_page, ids))

    def _read_page(self, url) -> Passage | None:
        try:
            page = self._get(url, seconds=self._seconds)
        except PageRefusedError:
            return None
        return Passage(page.url, f"{page.url}\n{page.text}")

    def _add_page(self, pair) -> Passage:
        query, hit = pair
        try:
            page = self._get(hit.id, seconds=self._seconds)
        except PageRefusedError:
            return hit
        text = excerpt(page.text, f"{query} {hit.text}", self._chars)
        if not text:
            return hit
        return Passage(hit.id, f"{hit.title}\n{hit.text}\n{text}", hit.score)


def excerpt(text: str, query: str, max_chars: int) -> str:
    """Return consecutive lines of a text, around the line that shares most words.

    Args:
        text: hostile.
        query: words that are looked for.
        max_chars: of the excerpt.
    """
    lines = [line[:max_chars] for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    words = set(WORD.findall(query.lower()))
    shared = [len(words & set(WORD.findall(line.lower()))) for line in lines]
    first = last = max(range(len(lines)), key=shared.__getitem__)
    size = len(lines[first])
    while True:  # grow to the better side, as long as there is room
        before = shared[first - 1] if first else -1
        after = shared[last + 1] if last + 1 < len(lines) else -1
        added = first - 1 if before > after else last + 1
        if max(before, after) < 0 or size + 1 + len(lines[added]) > max_chars:
            return "\n".join(lines[first : last + 1])
        size += 1 + len(lines[added])
        first = min(first, added)
        last = max(last, added)

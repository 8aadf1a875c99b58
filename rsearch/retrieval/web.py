"""Add the text of web pages to the hits of a web search, safely.

There are three parts: `PagedSearch` wraps a SearchFn, `fetch` gets a page, and
`html_to_text` extracts its text. All text that comes back is hostile.

Fetching must reach nothing but the open web, although the authors of pages choose where
links and redirects lead. An address is therefore checked after its name is resolved,
again for each connection, and the connection is made to exactly the checked address. A
name that resolves differently the next time changes nothing. A table in this module
refuses every address that is not global: private, loopback, link-local and metadata
addresses, also inside IPv6 forms that embed an IPv4 address.

The time to extract text must grow only with a page's length. The standard library's
html.parser takes hours for a megabyte of tags that are never closed, and raises an
AssertionError for some input.
"""

import html
import ipaddress
import math
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpcore

from rsearch.runtime.calls import TimeLimits
from rsearch.types import Passage, SearchFn

MAX_FETCHES = 16  # concurrent fetches
WORD = re.compile(r"\w+")

PORTS = {"http": 80, "https": 443}
PAGE_TYPES = ("text/html", "text/plain", "application/xhtml+xml")
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
MAX_URL_CHARS = 2000
MAX_BYTES = 1 << 20  # longer pages are truncated
HEADERS = {
    "Accept": ", ".join(PAGE_TYPES),
    "Accept-Encoding": "identity",
    "User-Agent": "rsearch",
    "Connection": "close",
}
# All addresses that belong to no host on the open internet: those in IANA's registries
# of special addresses (RFC 6890 and its updates), and the metadata addresses of clouds.
# Python also has such a table, but it differs between patch levels.
NON_PUBLIC_V4 = tuple(
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
NON_PUBLIC_V6 = tuple(
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
ISATAP = b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe"  # precede an embedded IPv4 address

HIDDEN = ("noscript", "template", "head", "svg", "iframe")
RAW_TAGS = {  # elements whose content is not markup, and where that content ends
    name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")
}
TAG_NAME = re.compile(r"</?([a-zA-Z][^\s/>]*)")
IN_TAG = re.compile(r"=\s*([\"'])|>")  # the start of a quoted value, or the tag's end
LONG_NUMBER = re.compile(r"&#[0-9]{8,};?")  # too large; int() even refuses the longest


class PageRefusedError(ValueError):
    """A page was not fetched; the message says why in few words."""


class Page(NamedTuple):
    """A page that was fetched.

    Attributes:
        url: its address after redirects.
        text: its readable text without HTML markup; hostile.
    """

    url: str
    text: str


def is_public_address(address: str | bytes) -> bool:
    """Return whether an IP address belongs to a host on the open internet.

    An IPv6 address that embeds an IPv4 address leads there, so the latter is checked.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.version == 4:
        return not any(ip in network for network in NON_PUBLIC_V4)
    if ip.scope_id is not None:  # valid only on one link
        return False
    if ip.ipv4_mapped is not None:
        return is_public_address(ip.ipv4_mapped.packed)
    if ip in NAT64:
        return is_public_address(ip.packed[12:])
    if ip not in GLOBAL_V6 or any(ip in network for network in NON_PUBLIC_V6):
        return False
    if ip in SIX_TO_FOUR and not is_public_address(ip.packed[2:6]):
        return False
    return ip.packed[8:12] not in ISATAP or is_public_address(ip.packed[12:])


def normalize_url(url: str) -> str:
    """Return the URL in the form in which it is requested.

    Raises:
        PageRefusedError: it is not a plain http(s) URL with the standard port.
    """
    if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
        raise PageRefusedError("a URL that is too long or has forbidden characters")
    try:
        fields = urllib.parse.urlsplit(url)
        port = fields.port
    except ValueError:
        raise PageRefusedError("not a URL") from None
    if fields.scheme not in PORTS or not fields.hostname:
        raise PageRefusedError("not an http:// or https:// URL")
    if fields.username is not None or fields.password is not None:
        raise PageRefusedError("a URL with a user name")
    if port not in (None, PORTS[fields.scheme]):
        raise PageRefusedError(f"port {port}")
    try:
        host = fields.hostname.encode("idna").decode()
    except UnicodeError:
        raise PageRefusedError("an invalid host name") from None
    if ":" in host:
        host = f"[{host}]"
    path = urllib.parse.quote(fields.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(fields.query, safe="/%:@!$&'()*+,;=~-._?")
    return urllib.parse.urlunsplit((fields.scheme, host, path, query, ""))


class OpenBackend(httpcore.NetworkBackend):
    """A network backend that connects only to addresses on the open internet.

    Args:
        resolve: (host, port) -> its addresses, as from socket.getaddrinfo.
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
            PageRefusedError: an address is not global; names with both kinds are a
                trick.
        """
        addresses = self._resolve(host, port)
        closed = [address for address in addresses if not is_public_address(address)]
        if closed or not addresses:
            raise PageRefusedError(f"{host} is {closed[0] if closed else 'not known'}")
        return self._inner.connect_tcp(addresses[0], port, timeout, **settings)


def _resolve(host, port):
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: an invalid name
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
        url: the URL; hostile.
        seconds: time for all requests, redirects included. Only the resolver of names
            has limits of its own.
        backend: an OpenBackend; by default one over this machine's network.
        max_bytes: longer pages are truncated.

    Raises:
        PageRefusedError: the page cannot be fetched; says why in few words.
    """
    deadline = time.monotonic() + seconds
    try:
        return _follow(url, backend or OpenBackend(), deadline, max_bytes)
    except PageRefusedError:
        raise
    # A server controls every byte of header and page; nothing it sends may end a run.
    except Exception as error:
        raise PageRefusedError(type(error).__name__) from None


def _follow(url, backend, deadline, max_bytes) -> Page:
    """Return the page that a URL leads to."""
    for _ in range(MAX_REDIRECTS + 1):
        url = normalize_url(url)
        target = _request(url, backend, deadline, max_bytes)
        if isinstance(target, Page):
            return target
        try:
            url = urllib.parse.urljoin(url, target)
        except ValueError:
            raise PageRefusedError("a redirect to no URL") from None
    raise PageRefusedError(f"more than {MAX_REDIRECTS} redirects")


def _request(url, backend, deadline, max_bytes) -> Page | str:
    """Return the page, or the URL that it redirects to."""
    if time.monotonic() >= deadline:
        raise PageRefusedError("too slow")
    limits = TimeLimits(math.inf, deadline)
    with (
        httpcore.ConnectionPool(network_backend=backend) as pool,
        pool.stream("GET", url, headers=HEADERS, extensions=limits.extensions) as reply,
    ):
        headers = {name.lower(): value for name, value in reply.headers}
        if reply.status in REDIRECTS:
            return headers.get(b"location", b"").decode("latin-1")
        if reply.status != 200:
            raise PageRefusedError(f"HTTP {reply.status}")
        mime = headers.get(b"content-type", b"").decode("latin-1").lower()
        if mime.partition(";")[0].strip() not in PAGE_TYPES:
            raise PageRefusedError(f"a page of type {mime[:40]!r}")
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise PageRefusedError("a compressed page")
        page_bytes = bytearray()
        for chunk in reply.iter_stream():
            page_bytes += chunk
            if len(page_bytes) > max_bytes:
                break
            if time.monotonic() > deadline:
                raise PageRefusedError("too slow")
    text = _decode(bytes(page_bytes[:max_bytes]), mime)
    return Page(url, text if mime.startswith("text/plain") else html_to_text(text))


def _decode(data, mime):
    """Decode a page; only Latin-1 and Windows-1252 are read as anything but UTF-8."""
    charset = mime.partition("charset=")[2].partition(";")[0].strip(" \"'")
    if charset not in ("iso-8859-1", "latin-1", "windows-1252"):
        charset = "utf-8"
    return data.decode(charset, "replace")


def html_to_text(markup: str) -> str:
    """Return the text that an HTML page shows, one line for each run of text.

    Args:
        markup: hostile. Nothing is read after an unclosed tag, comment or script.
    """
    lines = []
    num_hidden = 0  # number of open elements that show nothing
    for text, name, opens, closes in _tags(markup):
        text = html.unescape(LONG_NUMBER.sub("\ufffd", text))
        if not num_hidden and (text := " ".join(text.split())):
            lines.append(text)
        if name in HIDDEN:
            num_hidden = max(0, num_hidden + opens - closes)
        elif name == "body" and opens:
            num_hidden = 0  # HTML does not require </head>
    return "\n".join(lines)


def _tags(markup) -> Iterator[tuple[str, str, bool, bool]]:
    """Yield (text, name of the tag after it or "", if it opens, if it closes)."""
    text_start = position = 0
    while (start := markup.find("<", position)) >= 0:
        tag = TAG_NAME.match(markup, start)
        if tag is None and markup[start + 1 : start + 2] not in ("!", "?", "/"):
            position = start + 1  # it belongs to the text
            continue
        text = markup[text_start:start]
        name, opens, closes = "", False, False
        if tag is not None:
            name = tag[1].lower()
            end = _end_of_tag(markup, tag.end())
            opens = markup[start + 1] != "/"
            closes = not opens or markup[max(end - 2, 0) : end] == "/>"
        else:
            closing = "-->" if markup.startswith("<!--", start) else ">"
            end = _end_of(markup, closing, start + 2)
        yield text, name, opens, closes
        if opens and not closes and name in RAW_TAGS:
            raw_end = RAW_TAGS[name].search(markup, end) if end else None
            end = raw_end.start() if raw_end else 0
        if not end:
            return
        text_start = position = end
    yield markup[text_start:], "", False, False


def _end_of_tag(markup, position) -> int:
    """Return the end of the tag whose name ends at `position`, or 0 if it has none."""
    while (match := IN_TAG.search(markup, position)) is not None:
        if not match[1]:
            return match.end()
        position = _end_of(markup, match[1], match.end())
        if not position:
            return 0
    return 0


def _end_of(markup, text, position) -> int:
    """Return the end of the next occurrence of a text, or 0 if there is none."""
    start = markup.find(text, position)
    return start + len(text) if start >= 0 else 0


class PagedSearch:
    """A SearchFn whose passages contain the text of web pages.

    The id of each hit is the URL of its page. A hit whose page cannot be fetched stays
    unchanged. A long page is cut to consecutive lines around the one that shares most
    words with the query and the hit.

    Args:
        search: a search that returns hits, such as a RemoteSearch of the web.
        page_chars: maximum number of characters of a page in its passage.

    Attributes:
        fingerprint: searches with equal fingerprints search in the same way.
        searches_at_once: that of `search`; see `SearchFn`.
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
        return f"{self._search}, with pages"

    def __call__(self, queries: Sequence[str]) -> list[tuple[Passage, ...] | None]:
        """Return the search's passages of each query, in order; None if it failed."""
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
        """Return the page at each URL, cut at MAX_BYTES; None if fetching failed."""
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
    """Return consecutive lines of a text around the line that shares most words.

    Args:
        text: the text; hostile.
    """
    lines = [line[:max_chars] for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    words = set(WORD.findall(query.lower()))
    num_shared = [len(words & set(WORD.findall(line.lower()))) for line in lines]
    first = last = max(range(len(lines)), key=num_shared.__getitem__)
    size = len(lines[first])
    while True:  # extend to the better side while there is room
        num_before = num_shared[first - 1] if first else -1
        num_after = num_shared[last + 1] if last + 1 < len(lines) else -1
        index = first - 1 if num_before > num_after else last + 1
        if max(num_before, num_after) < 0 or size + 1 + len(lines[index]) > max_chars:
            return "\n".join(lines[first : last + 1])
        size += 1 + len(lines[index])
        first = min(first, index)
        last = max(last, index)

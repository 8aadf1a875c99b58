"""Pages of the open web, fetched so that nobody can be reached but the open web.

Whoever writes a page chooses where its links and redirects lead. So an address counts
after its name is resolved, for each connection anew, and the connection goes to the
very address that was judged: a name that resolves to something else the next time
changes nothing. Refused is all that is not global: private, loopback, link-local and
metadata addresses, also inside of IPv6 forms that carry an IPv4 one.
"""

import ipaddress
import socket
import time
import urllib.parse
from typing import NamedTuple

import httpcore

from rsearch.retrieval.markup import readable

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
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RefusedError(ValueError):
    """A page that is not fetched: its address, its type or its size."""


class Page(NamedTuple):
    """What was fetched.

    Attributes:
        url: that it came from, after redirects.
        text: readable, with HTML's markup left out; hostile.
    """

    url: str
    text: str


def is_open(address: str) -> bool:
    """Whether an IP address is one of the open internet, for everyone."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if ip.version == 6:
        if ip in NAT64:
            return is_open(str(ipaddress.IPv4Address(ip.packed[-4:])))
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_open(str(inner))
        if ip.teredo is not None or not any(ip.packed[:12]):
            return False
    wrong = ip.is_multicast or ip.is_reserved or ip.is_unspecified
    return ip.is_global and not wrong


def checked_url(url: str) -> str:
    """The URL as it is asked for.

    Raises:
        RefusedError: it is no plain http(s) URL of a usual port.
    """
    if len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
        raise RefusedError("a URL that is too long, or holds what none does")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        raise RefusedError("no URL") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise RefusedError("no http:// or https:// URL")
    if parts.username is not None or parts.password is not None:
        raise RefusedError("a URL with a user name")
    if port not in (None, PORTS[parts.scheme]):
        raise RefusedError(f"port {port}")
    try:
        host = parts.hostname.encode("idna").decode()
    except UnicodeError:
        raise RefusedError("a host name that is none") from None
    if ":" in host:
        host = f"[{host}]"
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return urllib.parse.urlunsplit((parts.scheme, host, path, query, ""))


class OpenBackend(httpcore.NetworkBackend):
    """Connects to addresses of the open internet alone.

    Args:
        inner: that connects to an address.
        resolve: (host, port) -> its addresses, as socket.getaddrinfo finds them.
    """

    def __init__(self, inner=None, resolve=None):
        self._inner = inner or httpcore.SyncBackend()
        self._resolve = resolve or _resolve

    def connect_tcp(self, host, port, timeout=None, **settings):
        """A connection to the first of the host's addresses.

        Raises:
            RefusedError: any of them is not open: a name of both kinds is a trick.
        """
        addresses = self._resolve(host, port)
        closed = [address for address in addresses if not is_open(address)]
        if closed or not addresses:
            raise RefusedError(f"{host} is {closed[0] if closed else 'not known'}")
        return self._inner.connect_tcp(addresses[0], port, timeout, **settings)

    def connect_unix_socket(self, path, timeout=None, socket_options=None):
        """Refused."""
        raise RefusedError("a socket of this machine")

    def sleep(self, seconds):
        """As the inner one does."""
        self._inner.sleep(seconds)


def _resolve(host, port):
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(place[0] for *_, place in found))


def fetch(url: str, *, seconds: float, backend=None, max_bytes=MAX_BYTES) -> Page:
    """The page at a URL.

    Args:
        url: anybody's.
        seconds: for all of it, redirects included, as far as a part that has begun can
            be ended: one read may take as long again.
        backend: an OpenBackend; one of this machine's network where not given.
        max_bytes: a longer page is cut.

    Raises:
        RefusedError: it is not to be had, and why in few words.
    """
    end = time.monotonic() + seconds
    backend = backend or OpenBackend()
    for _ in range(MAX_REDIRECTS + 1):
        url = checked_url(url)
        target = _fetched(url, backend, end, max_bytes)
        if isinstance(target, Page):
            return target
        try:
            url = urllib.parse.urljoin(url, target)
        except ValueError:
            raise RefusedError("a redirect to no URL") from None
    raise RefusedError(f"more than {MAX_REDIRECTS} redirects")


def _fetched(url, backend, end, max_bytes) -> Page | str:
    """The page, or where it is said to be."""
    left = end - time.monotonic()
    if left <= 0:
        raise RefusedError("too slow")
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), left)
    try:
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
                raise RefusedError(f"HTTP {reply.status}")
            kind = headers.get(b"content-type", b"").decode("latin-1").lower()
            if kind.partition(";")[0].strip() not in TYPES:
                raise RefusedError(f"a page of type {kind[:40]!r}")
            if headers.get(b"content-encoding", b"identity") != b"identity":
                raise RefusedError("a packed page")
            received = bytearray()
            for part in reply.iter_stream():
                received += part
                if len(received) > max_bytes:
                    break
                if time.monotonic() > end:
                    raise RefusedError("too slow")
    except (httpcore.NetworkError, httpcore.TimeoutException) as error:
        raise RefusedError(type(error).__name__) from None
    except (httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
        raise RefusedError(type(error).__name__) from None
    text = _decoded(bytes(received[:max_bytes]), kind)
    return Page(url, text if kind.startswith("text/plain") else readable(text))


def _decoded(data, kind):
    """Text, whatever the page says that it is in."""
    charset = kind.partition("charset=")[2].partition(";")[0].strip(" \"'")
    if charset not in ("iso-8859-1", "latin-1", "windows-1252"):
        charset = "utf-8"
    return data.decode(charset, "replace")

"""Pages are fetched from the open web, and no connection is made to anything else."""

import time

import httpcore
import pytest

from rsearch.retrieval import web as web_module
from rsearch.retrieval.web import (
    OpenBackend,
    PageRefusedError,
    fetch,
    is_public_address,
)

OPEN = "93.184.216.34"
CLOSED = [
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "10.255.255.255"),
    *("172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255"),
    *("169.254.169.254", "169.254.170.2", "169.254.0.1", "100.64.0.1"),
    *("100.100.100.200", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1"),
    *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001::1"),
    *("fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1"),
    *("2001:db8::1", "no address", ""),
]
REFUSED = [
    *("ftp://site.org/", "file:///etc/passwd", "gopher://site.org/1", "site.org"),
    *("http://", "http:///x", "javascript:alert(1)", "data:text/html,x", "//site.org"),
    *("http://site.org:22/", "http://site.org:8080/", "https://site.org:80/"),
    *("http://site.org:99999/", "http://me@site.org/", "http://me:x@site.org/"),
    *("http://site.org\r\nHost: other/", "http://site.org/ x", "http://[::1/"),
    *(f"http://site.org/{'x' * 3000}", "unix:///var/run/docker.sock"),
]


class Web:
    """A network that answers from memory and records which addresses are connected."""

    def __init__(self, pages, names=None):
        self.pages, self.connected = pages, []
        self.names = {"site.org": [OPEN]} | (names or {})
        self.backend = OpenBackend(self, self.resolve)

    def resolve(self, host, port):
        actual = self.names.get(host, [])
        return actual.pop(0) if actual and isinstance(actual[0], list) else actual

    def connect_tcp(self, host, port, timeout, **settings):
        self.connected.append((host, port))
        page = self.pages[min(len(self.connected), len(self.pages)) - 1]
        parts = page if isinstance(page, list) else [page]
        return httpcore.MockStream(list(parts))

    def sleep(self, seconds):
        time.sleep(seconds)

    def fetch(self, url="http://site.org/", **settings):
        return fetch(url, backend=self.backend, **({"seconds": 5.0} | settings))


def page(body, kind="text/html", status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


EMBEDDED = [
    f"{prefix}{inner}"
    for inner in ("7f00:1", "a9fe:a9fe", "a83f:8110", "6440:1", "a00:1", "c0a8:101")
    for prefix in ("::ffff:", "64:ff9b::", "64:ff9b:1::", "::", "::ffff:0:")
] + [
    *("2002:a83f:8110::1", "2002:a9fe:a9fe::", "2002:c000:c0::", "2002:e000:1::"),
    *("2001:0:5db8:d822::a9fe:a9fe", "2606:4700::5efe:10.0.0.1"),
    *("2606:4700::200:5efe:169.254.169.254", "::ffff:168.63.129.16"),
]
SPECIAL = [
    *("168.63.129.16", "0.1.2.3", "100.127.255.255", "192.0.0.192", "192.88.99.1"),
    *("198.19.255.255", "192.0.0.9", "192.0.0.170", "224.0.0.251", "233.252.0.1"),
    *("fd00:ec2::254", "fec0::1", "100::1", "2001:2::1", "2001:10::1", "2001:20::1"),
    *("2001:db8:ffff::1", "3fff::1", "5f00::1", "3ffe::1", "4000::1", "fe80::a%1"),
]
OPEN_ADDRESSES = [
    *("1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "168.63.129.17"),
    *("172.32.0.1", "169.253.0.1", "223.255.255.255", "2606:4700:4700::1111"),
    *("2001:4860:4860::8888", "2a00:1450:4001::5", "::ffff:8.8.8.8"),
    *("64:ff9b::808:808", "2002:808:808::1"),
]


@pytest.mark.fault(80, "table of networks")
@pytest.mark.parametrize("address", OPEN_ADDRESSES)
def test_public_addresses_are_open(address):
    assert is_public_address(address)


@pytest.mark.fault(80, "table of networks", "embedded addresses")
@pytest.mark.parametrize("address", [*CLOSED, *SPECIAL, *EMBEDDED])
def test_no_address_outside_the_open_web_is_connected_to(address):
    web = Web([page(b"secret")], {"inside.org": [address]})
    with pytest.raises(PageRefusedError):
        web.fetch("http://inside.org/latest/meta-data/")
    assert not web.connected and not is_public_address(address)


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_that_is_not_plain_is_not_fetched(url):
    web = Web([page(b"secret")])
    with pytest.raises(PageRefusedError):
        web.fetch(url)
    assert not web.connected


@pytest.mark.parametrize(
    "url",
    [
        *("http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/"),
        *("http://127.1/", "http://localhost/", "http://[::1]/", "http://0/"),
        *("http://[::ffff:7f00:1]/", "http://127.0.0.1:80/", "http://LOCALHOST/"),
    ],
)
def test_no_spelling_of_this_machines_address_is_connected_to(url):
    """This uses the machine's own resolver, which understands all of them."""
    web = Web([page(b"secret")])
    with pytest.raises(PageRefusedError):
        fetch(url, seconds=5.0, backend=OpenBackend(web))
    assert not web.connected


def test_a_redirect_to_a_private_address_is_not_followed():
    moved = page(b"", status="302 Found", Location="http://inside.org/secret")
    web = Web([moved, page(b"secret")], {"inside.org": ["10.0.0.1"]})
    with pytest.raises(PageRefusedError, match=r"inside\.org is 10\.0\.0\.1"):
        web.fetch()
    assert web.connected == [(OPEN, 80)]


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "http://site.org:22/", "http://a@site.org/"]
)
def test_a_redirect_is_checked_like_any_other_url(target):
    web = Web([page(b"", status="301 Moved", Location=target), page(b"secret")])
    with pytest.raises(PageRefusedError):
        web.fetch()
    assert len(web.connected) == 1


def test_redirects_are_limited():
    web = Web([page(b"", status="302 Found", Location="/again")])
    with pytest.raises(PageRefusedError, match="more than 5 redirects"):
        web.fetch()
    assert len(web.connected) == 6


def test_a_name_that_resolves_differently_is_checked_each_time():
    """The address that is connected to is the one that was checked."""
    moved = page(b"", status="302 Found", Location="http://rebind.org/2")
    names = {"rebind.org": [["93.184.216.35"], ["127.0.0.1"]]}
    web = Web([moved, page(b"secret")], names)
    with pytest.raises(PageRefusedError, match=r"127\.0\.0\.1"):
        web.fetch("http://rebind.org/1")
    assert web.connected == [("93.184.216.35", 80)]


def test_a_name_with_an_open_and_a_closed_address_is_refused():
    web = Web([page(b"x")], {"both.org": [OPEN, "10.0.0.1"]})
    with pytest.raises(PageRefusedError):
        web.fetch("http://both.org/")
    assert not web.connected


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (page(b"x", kind="application/pdf"), "type 'application/pdf'"),
        (page(b"x", kind="image/png"), "type 'image/png'"),
        (page(b"x", status="404 Not Found"), "HTTP 404"),
        (page(b"x", status="500 Oh"), "HTTP 500"),
        (page(b"x", Content_Encoding="gzip"), "compressed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "ProtocolError"),
        (page(b"", status="302 Found"), "more than 5 redirects"),
        (page(b"", status="302 Found", Location="http://[::1"), "to no URL"),
    ],
)
def test_a_reply_that_is_not_a_page_is_refused(reply, why):
    with pytest.raises(PageRefusedError, match=why):
        Web([reply]).fetch()


def test_a_long_page_is_cut():
    actual = Web([page(b"y" * 5000, kind="text/plain")]).fetch(max_bytes=1000)
    assert actual.text == "y" * 1000


def test_the_visible_text_of_a_page_is_returned():
    body = (
        b"<html><head><title>T</title><style>p {}</style></head><body><p>Caf\xc3\xa9 "
        b"&amp; bar</p><script>alert('x')</script><p>  two\n words </p></body></html>"
    )
    actual = Web([page(body)]).fetch("http://site.org/a?b=c#d")
    assert actual == ("http://site.org/a?b=c", "Caf\u00e9 & bar\ntwo words")


def test_the_deadline_covers_all_redirects_together(monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(web_module.time, "monotonic", lambda: next(clock), raising=True)
    web = Web([page(b"", status="302 Found", Location="/again")])
    with pytest.raises(PageRefusedError, match="too slow"):
        web.fetch()


class Trickle(httpcore.MockStream):
    """A connection on which the same bytes arrive every twentieth of a second."""

    def __init__(self, text):
        super().__init__([])
        self.texts = iter([text] * 40)

    def read(self, max_bytes, timeout=None):
        time.sleep(min(timeout, 0.05))
        if timeout < 0.05:
            raise httpcore.ReadTimeout
        return next(self.texts, b"")


@pytest.mark.fault(32, "slow bytes")
@pytest.mark.parametrize("text", [b"x", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
def test_a_page_whose_head_never_ends_is_given_up_in_time(text):
    web = Web([])
    web.connect_tcp = lambda *_, **settings: Trickle(text)
    began = time.monotonic()
    with pytest.raises(PageRefusedError, match="ReadTimeout"):
        web.fetch(seconds=0.3)
    assert time.monotonic() - began < 1

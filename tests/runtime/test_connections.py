"""Proxy and certificate variables are checked before a connection needs them."""

import os
import ssl
import sys
import urllib.request

import certifi
import pytest

from rsearch.runtime import connections

SERVICE = "https://search.example/retrieve"


@pytest.fixture
def variables(monkeypatch):
    """A function that sets variables; all others of their kind are removed."""
    for name in os.environ:
        if name.lower().endswith("_proxy") or name in connections.CERTIFICATES:
            monkeypatch.delenv(name)

    def set_variables(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_variables


WRONG = [
    ("ALL_PROXY", "socks5://proxy:1080"),
    ("all_proxy", "socks5h://proxy:1080"),
    ("HTTPS_PROXY", "socks4://proxy:1080"),
    ("HTTP_PROXY", "http://"),
    ("HTTP_PROXY", "http://proxy:port"),
    ("http_proxy", "http://proxy:99999"),
    ("HTTPS_PROXY", "http://:3128"),
    ("HTTPS_PROXY", " http://proxy:3128"),
    ("HTTPS_PROXY", "http//proxy:3128"),
    ("HTTPS_PROXY", "direct://"),
    ("NO_PROXY", "fe80::/10"),
    ("no_proxy", "localhost,[::1]"),
    ("SSL_CERT_FILE", "/gone.pem"),
    ("SSL_CERT_FILE", __file__),
    ("SSL_CERT_DIR", "/gone"),
]


@pytest.mark.fault(78, "proxy", "certificate")
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_unusable_variable_is_named_with_its_value(
    variables, monkeypatch, name, value
):
    monkeypatch.setitem(sys.modules, "socksio", None)
    variables(**{name: value})
    with pytest.raises(ValueError) as caught:
        connections.check_connection(SERVICE, "config.retrieval.url")
    message = str(caught.value)
    assert "config.retrieval.url" in message and f"{name}={value!r}" in message
    for host in ("127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]"):
        connections.check_connection(f"http://{host}:8000", "x")
    if name not in connections.CERTIFICATES:  # which https needs on any machine
        connections.check_connection("https://[::1]:8000", "x")


@pytest.mark.fault(78, "proxy", "certificate")
@pytest.mark.parametrize(
    "values",
    [
        {"HTTPS_PROXY": "proxy:3128", "NO_PROXY": "localhost,10.0.0.0/8,.example.com"},
        {"HTTPS_PROXY": "http://user:word@proxy.example:3128/"},
        {"HTTPS_PROXY": "socks4://proxy:1", "https_proxy": "http://proxy:1"},
        {"ALL_PROXY": "socks4://proxy:1", "NO_PROXY": "a, *"},
        {"HTTP_PROXY": ""},
        {"SSL_CERT_FILE": certifi.where(), "SSL_CERT_DIR": "/gone"},
    ],
)
def test_usable_variables_are_accepted(variables, values):
    variables(**values)
    connections.check_connection(SERVICE, "x")


def test_variables_that_the_client_does_not_use_are_ignored(variables, monkeypatch):
    """NO_PROXY by itself names no proxy, and plain http needs no certificates."""
    variables(NO_PROXY="localhost")
    assert urllib.request.getproxies() == {"no": "localhost"}
    connections.check_connection(SERVICE, "x")
    variables(SSL_CERT_DIR="/gone")
    connections.check_connection("http://search.example", "no certificate is needed")


@pytest.mark.fault(78, "certificate")
def test_certificates_of_an_https_service_on_this_machine_are_checked(variables):
    variables(SSL_CERT_FILE="/gone.pem")
    with pytest.raises(ValueError, match=r"x: SSL_CERT_FILE='/gone\.pem'"):
        connections.check_connection("https://127.0.0.1:8443", "x")


def test_credentials_of_a_proxy_are_masked(variables):
    variables(HTTPS_PROXY="socks4://user:pass/w@rd@proxy:1?key=k")
    with pytest.raises(ValueError) as caught:
        connections.check_connection(SERVICE, "x")
    assert "'socks4://***@proxy:1'" in str(caught.value)


@pytest.mark.fault(78, "hub id")
def test_a_hub_id_is_refused_with_the_unusable_variable(variables, monkeypatch):
    variables(SSL_CERT_FILE="/gone.pem")
    for source in ("owner/name", "gpt2", "owner/name:config@dev"):
        with pytest.raises(ValueError, match=f"{source}.*SSL_CERT_FILE='/gone.pem'"):
            connections.check_source(source, "config.model.source")
    files = ("a/b.jsonl", "a/b.csv", "a/b.tsv", "tests")
    for source in ("hashed", "world", "world:base", "stage:rl", *files):
        connections.check_source(source, "a path, or a name of ours")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    connections.check_source("owner/name", "not fetched")


@pytest.mark.fault(78, "hub id")
def test_a_failed_download_names_the_proxy(variables, monkeypatch):
    variables(HTTPS_PROXY="http://user:word@proxy:1", SSL_CERT_FILE=certifi.where())
    shown = connections.describe_hub("connection refused")
    assert shown == "; HTTPS_PROXY='http://***@proxy:1'"
    assert "SSL_CERT_FILE" in connections.describe_hub("no certificate")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:1")
    assert connections.describe_hub("connection refused") == ""


def test_certificate_variables_that_are_not_read_are_reported(variables):
    variables(REQUESTS_CA_BUNDLE="/bundle.pem")
    for url in (SERVICE, "https://127.0.0.1:8443"):
        line = connections.unread_certificates(url)
        assert "REQUESTS_CA_BUNDLE='/bundle.pem'" in line and "SSL_CERT_FILE" in line
    assert connections.unread_certificates("http://search.example") == ""
    variables(SSL_CERT_FILE=ssl.get_default_verify_paths().cafile or "x")
    assert connections.unread_certificates(SERVICE) == ""

"""Check the environment's proxy and certificate variables before they are used.

httpx reads these variables whenever a client is made, both for services and for the
Hugging Face hub, and some of its errors name neither the variable nor its value.
Loopback needs none of them.
"""

import importlib.util
import ipaddress
import os
import pathlib
import re
import ssl
import urllib.request

import httpx

PROXIES = ("http", "https", "all")  # HTTP_PROXY, HTTPS_PROXY, ALL_PROXY
SOCKS = ("socks5", "socks5h")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
UNREAD = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # read by other clients only
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?(@[^@]+)?")
NO_IDS = ("hashed", "world")  # special sources of a configuration, without a prefix
NO_PREFIXES = ("world:", "stage:")  # special sources with a prefix


def check_source(source: str, what: str) -> None:
    """Check the variables that a source needs: a URL or hub id; a path needs none.

    Args:
        source: the source as a configuration or a flag names it.
        what: its name in error messages, such as "config.models.judge.source".

    Raises:
        ValueError: names the bad variable and its value.
    """
    if source.startswith(("http://", "https://")):
        check_connection(source, f"{what} = {masked(source)!r}")
    elif is_hub_id(source):
        check_hub(f"{what} = {source!r}")


def is_hub_id(source: str) -> bool:
    """Return whether a source looks like a hub id, not a path or a special name."""
    is_special = source in NO_IDS or source.startswith(NO_PREFIXES)
    if is_special or not HUB_ID.fullmatch(source):
        return False
    suffixes = (".jsonl", ".json", ".gz", ".parquet")
    return not source.endswith(suffixes) and not pathlib.Path(source).exists()


def check_hub(what: str) -> None:
    """Check the variables that a download from the hub needs.

    If the hub is at a loopback address (HF_ENDPOINT), later calls use no proxy.

    Args:
        what: name of the download, for error messages.

    Raises:
        ValueError: names `what`, the bad variable and its value.
    """
    if not _variables():
        return
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    if _is_local(constants.ENDPOINT):
        huggingface_hub.set_client_factory(
            lambda: httpx.Client(trust_env=False, follow_redirects=True, timeout=None)
        )
    check_connection(constants.ENDPOINT, what)


def check_connection(url: str, what: str) -> None:
    """Refuse proxy and certificate variables that prevent making a client of `url`.

    Args:
        url: URL of a service; one that cannot be parsed is not checked here.
        what: the service, for error messages.

    Raises:
        ValueError: names `what`, the bad variable and its value, credentials masked.
    """
    if _is_local(url) or not _variables():
        return
    proxies = _proxies()
    for name, value in proxies.values():
        if fault := _proxy_fault(value):
            raise ValueError(f"{what}: {name}={masked(value)!r}: {fault}")
    try:
        # An empty TLS context: loading certificates is slow, and checked below.
        httpx.Client(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)).close()
    except Exception as error:
        # Each proxy is valid, so that NO_PROXY must be at fault.
        raise ValueError(
            f"{what}: {_shown('no')}: an entry cannot be read ({error}); write names, "
            "addresses or *, separated by commas, IPv6 without brackets or prefixes"
        ) from None
    through_tls = any(value.startswith("https:") for _, value in proxies.values())
    _check_certificates(what, uses_tls=through_tls or url.startswith("https:"))


def unread_certificates(url: str) -> str:
    """Return a line about certificates that a client of `url` would not read, or ""."""
    names = [name for name in UNREAD if os.environ.get(name)]
    is_replaced = any(map(os.environ.get, CERTIFICATES))
    if not names or is_replaced or not url.startswith("https:") or _is_local(url):
        return ""
    shown = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
    return f"{shown} is not read here; SSL_CERT_FILE=FILE is"


def describe_hub(reason: str) -> str:
    """Return the variables that a failed download depended on, as "; NAME='value'".

    Args:
        reason: message of the failure; if it mentions certificates, their variables
            are included.
    """
    from huggingface_hub import constants

    if _is_local(constants.ENDPOINT):
        return ""
    shown = [_shown(scheme) for scheme in (*PROXIES, "no") if _variable(scheme)]
    if "certificate" in reason:
        shown += [f"{n}={os.environ[n]!r}" for n in CERTIFICATES if os.environ.get(n)]
    return f"; {', '.join(shown)}" if shown else ""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def masked(value: str) -> str:
    """Return a URL with its credentials masked, and without query and fragment."""
    value = re.split(r"[?#]", value, maxsplit=1)[0]
    before, at, after = value.rpartition("@")
    scheme, colon, _ = before.rpartition("://")
    return f"{scheme}{colon}***@{after}" if at else value


def _is_local(url):
    try:
        return is_loopback(httpx.URL(url).host)
    except httpx.InvalidURL:
        return True


def _variables():
    """Return whether any proxy or certificate variable is set."""
    return bool(urllib.request.getproxies() or any(map(os.environ.get, CERTIFICATES)))


def _variable(scheme):
    """Return (name, value) of a proxy variable as urllib chooses it, or None."""
    value = urllib.request.getproxies().get(scheme)
    names = [n for n in os.environ if n.lower() == f"{scheme}_proxy"]
    names = [n for n in names if os.environ[n] == value]
    return (min(names, key=str.isupper), value) if names else None


def _shown(scheme):
    name, value = _variable(scheme) or (f"{scheme}_proxy".upper(), "")
    return f"{name}={masked(value)!r}"


def _proxies():
    """Return {scheme: (name, value)} of the proxies; {} if NO_PROXY excludes all."""
    _, excepted = _variable("no") or ("", "")
    if "*" in [host.strip() for host in excepted.split(",")]:
        return {}
    return {s: variable for s in PROXIES if (variable := _variable(s))}


def _proxy_fault(value):
    """Return why a proxy cannot be used, or ""."""
    wanted = "must be http://HOST:PORT"
    try:
        url = httpx.URL(value if "://" in value else f"http://{value}")
    except httpx.InvalidURL:  # its message could quote a password
        return wanted
    if url.scheme in SOCKS and importlib.util.find_spec("socksio") is None:
        return "a SOCKS proxy needs the package socksio: pip install 'httpx[socks]'"
    port = 80 if url.port is None else url.port
    is_path = "://" not in value and url.path.strip("/")
    is_right = (
        url.scheme in ("http", "https", *SOCKS)
        and re.fullmatch(r"[\w.:-]+", url.host)
        and 0 < port < 1 << 16
        and not is_path
    )
    return "" if is_right else wanted


def _check_certificates(what, *, uses_tls):
    """Refuse a file or directory of certificates that httpx could not use.

    httpx loads the file whenever a client is made, and reads the directory later.
    """
    if file := os.environ.get("SSL_CERT_FILE"):
        try:
            ssl.create_default_context(cafile=file)
        except OSError as error:  # ssl.SSLError is one
            is_text = isinstance(error, ssl.SSLError)
            reason = "no certificate is in it" if is_text else error.strerror
            raise ValueError(
                f"{what}: SSL_CERT_FILE={file!r}: {reason}; it must name a file of "
                "certificates in PEM"
            ) from None
    elif uses_tls and (folders := os.environ.get("SSL_CERT_DIR")):
        paths = [pathlib.Path(folder) for folder in folders.split(os.pathsep)]
        hashed = "[0-9a-f]" * 8 + ".[0-9]*"
        if not any(next(path.glob(hashed), None) for path in paths):
            raise ValueError(
                f"{what}: SSL_CERT_DIR={folders!r}: it has no certificate under a name "
                "that OpenSSL looks for; run openssl rehash, or set SSL_CERT_FILE"
            )

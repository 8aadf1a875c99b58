"""Check the environment's proxy and certificate variables before they are used.

httpx reads these variables whenever a client is made, both for services and for the
Hugging Face hub, and some of its errors name neither the variable nor its value. Calls
of this machine itself use no proxy, and certificates only with https.
"""

import importlib.util
import ipaddress
import os
import pathlib
import re
import ssl
import urllib.request

import httpx

PROXY_SCHEMES = ("http", "https", "all")  # HTTP_PROXY, HTTPS_PROXY, ALL_PROXY
SOCKS_SCHEMES = ("socks5", "socks5h")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# Read by other clients only.
UNREAD_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?(@[^@]+)?")
# Special sources of a configuration, without and with a prefix.
SPECIAL_SOURCES = ("hashed", "world")
SPECIAL_PREFIXES = ("world:", "stage:")


def check_source(source: str, label: str) -> None:
    """Check the variables that a source needs: a URL or hub id; a path needs none.

    Args:
        label: its name in error messages, such as "config.models.judge.source".

    Raises:
        ValueError: names the bad variable and its value.
    """
    if source.startswith(("http://", "https://")):
        check_connection(source, f"{label} = {mask_url(source)!r}")
    elif is_hub_id(source):
        check_hub(f"{label} = {source!r}")


def is_hub_id(source: str) -> bool:
    """Return whether a source looks like a hub id, not a path or a special name."""
    is_special = source in SPECIAL_SOURCES or source.startswith(SPECIAL_PREFIXES)
    if is_special or not HUB_ID.fullmatch(source):
        return False
    suffixes = (".jsonl", ".json", ".csv", ".tsv", ".gz", ".parquet")
    return not source.endswith(suffixes) and not pathlib.Path(source).exists()


def check_hub(label: str) -> None:
    """Check the variables that a download from the hub needs.

    If the hub is at a local address (HF_ENDPOINT), later calls ignore the environment.

    Raises:
        ValueError: names `label`, the bad variable and its value.
    """
    if not _has_variables():
        return
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    if _is_local(constants.ENDPOINT):
        huggingface_hub.set_client_factory(
            lambda: httpx.Client(trust_env=False, follow_redirects=True, timeout=None)
        )
        return
    check_connection(constants.ENDPOINT, label)


def check_connection(url: str, label: str) -> None:
    """Refuse proxy and certificate variables that prevent making a client of `url`.

    Args:
        url: URL of a service; one that cannot be parsed is not checked here.

    Raises:
        ValueError: names `label`, the bad variable and its value, credentials masked.
    """
    uses_tls = url.startswith("https:")
    is_local = _is_local(url)
    if not _has_variables() or (is_local and not uses_tls):
        return
    if not is_local:
        uses_tls |= _check_proxies(label)
    _check_certificates(label, uses_tls=uses_tls)


def _check_proxies(label):
    """Refuse proxy variables that cannot be used; return whether a proxy uses TLS."""
    proxies = _find_proxies()
    for name, value in proxies.values():
        if fault := _proxy_fault(value):
            raise ValueError(f"{label}: {name}={mask_url(value)!r}: {fault}")
    try:
        # An empty TLS context: loading certificates is slow, and checked below.
        httpx.Client(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)).close()
    except Exception as error:
        # Each proxy is valid, so that NO_PROXY must be at fault.
        raise ValueError(
            f"{label}: {_describe_variable('no')}: an entry cannot be read ({error}); "
            "write names, addresses or *, separated by commas, IPv6 without brackets "
            "or prefixes"
        ) from None
    return any(value.startswith("https:") for _, value in proxies.values())


def unread_certificates(url: str) -> str:
    """Return a line about certificates that a client of `url` would not read, or ""."""
    names = [name for name in UNREAD_VARIABLES if os.environ.get(name)]
    is_replaced = any(map(os.environ.get, CERTIFICATES))
    if not names or is_replaced or not url.startswith("https:"):
        return ""
    settings = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
    return f"{settings} is not read here; SSL_CERT_FILE=FILE is"


def describe_hub(reason: str) -> str:
    """Return the variables that a failed download depended on, as "; NAME='value'".

    Args:
        reason: message of the failure; if it mentions certificates, their variables
            are included.
    """
    from huggingface_hub import constants

    if _is_local(constants.ENDPOINT):
        return ""
    settings = [
        _describe_variable(scheme)
        for scheme in (*PROXY_SCHEMES, "no")
        if _find_variable(scheme)
    ]
    if "certificate" in reason:
        settings += [
            f"{n}={os.environ[n]!r}" for n in CERTIFICATES if os.environ.get(n)
        ]
    return f"; {', '.join(settings)}" if settings else ""


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_host(host: str) -> bool:
    """Return whether a URL's host is visibly this machine, without resolving names."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def mask_url(value: str) -> str:
    """Return a URL with its credentials masked, and without query and fragment."""
    value = re.split(r"[?#]", value, maxsplit=1)[0]
    user_part, at, host_part = value.rpartition("@")
    scheme, colon, _ = user_part.rpartition("://")
    return f"{scheme}{colon}***@{host_part}" if at else value


def _is_local(url):
    try:
        return is_local_host(httpx.URL(url).host)
    except httpx.InvalidURL:
        return True


def _has_variables():
    """Return whether any proxy or certificate variable is set."""
    return bool(urllib.request.getproxies() or any(map(os.environ.get, CERTIFICATES)))


def _find_variable(scheme):
    """Return (name, value) of a proxy variable as urllib chooses it, or None."""
    value = urllib.request.getproxies().get(scheme)
    names = [n for n in os.environ if n.lower() == f"{scheme}_proxy"]
    names = [n for n in names if os.environ[n] == value]
    return (min(names, key=str.isupper), value) if names else None


def _describe_variable(scheme):
    name, value = _find_variable(scheme) or (f"{scheme}_proxy".upper(), "")
    return f"{name}={mask_url(value)!r}"


def _find_proxies():
    """Return {scheme: (name, value)} of the proxies; {} if NO_PROXY excludes all."""
    _, no_proxy = _find_variable("no") or ("", "")
    if "*" in [host.strip() for host in no_proxy.split(",")]:
        return {}
    return {s: variable for s in PROXY_SCHEMES if (variable := _find_variable(s))}


def _proxy_fault(value):
    """Return why a proxy cannot be used, or ""."""
    form_fault = "must be http://HOST:PORT"
    try:
        url = httpx.URL(value if "://" in value else f"http://{value}")
    except httpx.InvalidURL:  # its message could quote a password
        return form_fault
    if url.scheme in SOCKS_SCHEMES and importlib.util.find_spec("socksio") is None:
        return "a SOCKS proxy needs the package socksio: pip install 'httpx[socks]'"
    port = 80 if url.port is None else url.port
    is_path = "://" not in value and url.path.strip("/")
    is_valid = (
        url.scheme in ("http", "https", *SOCKS_SCHEMES)
        and re.fullmatch(r"[\w.:-]+", url.host)
        and 0 < port < 1 << 16
        and not is_path
    )
    return "" if is_valid else form_fault


def _check_certificates(label, *, uses_tls):
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
                f"{label}: SSL_CERT_FILE={file!r}: {reason}; it must name a file of "
                "certificates in PEM"
            ) from None
    elif uses_tls and (folders := os.environ.get("SSL_CERT_DIR")):
        paths = [pathlib.Path(folder) for folder in folders.split(os.pathsep)]
        hash_pattern = "[0-9a-f]" * 8 + ".[0-9]*"
        if not any(next(path.glob(hash_pattern), None) for path in paths):
            raise ValueError(
                f"{label}: SSL_CERT_DIR={folders!r}: it has no certificate under a "
                "name that OpenSSL looks for; run openssl rehash, or set SSL_CERT_FILE"
            )

"""The flags of commands that serve, and the server that they describe."""

from collections.abc import Mapping
from typing import Any

from rsearch.runtime.calls import read_api_key
from rsearch.runtime.server import JsonServer

FLAGS = {
    "host": ("127.0.0.1", "host to listen on; one that others can reach needs a token"),
    "port": (8000, "port to listen on; 0 = a free one", 0),
    "token_env": ("", "environment variable with the token that requests must carry"),
    "max_waiting": (256, "most requests in progress; additional ones get a 503", 1),
    "max_body_bytes": (1 << 18, "longer requests are refused", 1),
    "max_reply_bytes": (1 << 26, "longer replies are refused", 1),
}


def open_server(values: Mapping[str, Any], routes: Mapping, **settings) -> JsonServer:
    """Return the server that a command's flags describe.

    Args:
        values: {flag: value} of FLAGS.
        routes, settings: see `JsonServer`.

    Raises:
        ValueError: see `JsonServer` and `read_api_key`.
    """
    limits = "max_waiting", "max_body_bytes", "max_reply_bytes"
    return JsonServer(
        values["host"],
        values["port"],
        routes,
        token=read_api_key(values["token_env"]) if values["token_env"] else "",
        **{name: values[name] for name in limits},
        **settings,
    )

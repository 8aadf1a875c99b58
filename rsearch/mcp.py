"""Offer a trained policy to other models over MCP: python -m rsearch.mcp --model=DIR

    rsearch mcp --model=DIR --index=DIR                stdin and stdout, for a program
    rsearch mcp --model=DIR --index=DIR --http         http://127.0.0.1:8000/mcp

The server has two tools: `search` finds passages, and `research` lets the policy search
and answer, as rsearch.tool does. It needs an extra: pip install -e '.[mcp]'. The flags
for the model, its index and its recipe are those of rsearch.tool.
"""

import asyncio
import concurrent.futures
import importlib.metadata
import importlib.util
import os
import pathlib
import signal
import socket
import sys
import threading
import tomllib
from collections.abc import Sequence
from typing import Any

from rsearch.config.recipes import INTERRUPTED, print_config, run_command
from rsearch.runtime import console
from rsearch.serving.search_tool import SearchTool, result_of
from rsearch.tool import POLICY_FLAGS, read_policy

PROJECT = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
HOST = "127.0.0.1"  # MCP authenticates with OAuth, which is not supported here
STOP_SECONDS = 8  # for calls in progress when a signal arrives
MAX_CALLS = 256  # calls in progress; further ones wait
FLAGS = {
    **POLICY_FLAGS,
    "http": (False, "serve this machine over streamable HTTP instead of stdin"),
    "port": (8000, "port to listen on with --http"),
}


def make_server(tool: SearchTool) -> Any:
    """Return an MCPServer for a policy."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("rsearch", version=package_version(), log_level="WARNING")
    # asyncio's own threads are too few for the questions of a batch.
    threads = concurrent.futures.ThreadPoolExecutor(MAX_CALLS)

    async def run_in_thread(function, *arguments, **settings):
        """Run a function in a thread; raise ToolError if the call fails."""

        def run():
            try:
                return function(*arguments, **settings)
            except (ValueError, concurrent.futures.CancelledError) as error:
                raise ToolError(str(error) or "cancelled") from None
            except Exception:
                raise
            except BaseException as error:  # OutageError, which would end the server
                raise ToolError(f"{error}; try again later") from None

        return await asyncio.get_running_loop().run_in_executor(threads, run)

    @server.tool()
    async def search(query: str) -> dict[str, Any]:
        """Find the passages of the corpus that fit a query best."""
        return {"passages": await run_in_thread(tool.search, query)}

    @server.tool()
    async def research(question: str) -> dict[str, Any]:
        """Answer a question by searching the corpus, with the passages that say so."""
        is_given_up = threading.Event()
        try:
            group = await run_in_thread(
                tool.ask, question, is_cancelled=is_given_up.is_set
            )
        finally:
            is_given_up.set()  # also if the client cancels this call
        result = result_of(group)
        (rollout,) = group.rollouts
        if not rollout.outcome.is_signal:
            raise ToolError(f"ended as {rollout.outcome}; try again later")
        return result

    return server


def package_version() -> str:
    """Return the version of this package, or "" if neither pip nor a file has it."""
    try:
        return importlib.metadata.version("rsearch")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        if not PROJECT.is_file():
            return ""
        return tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    config, load, values = read_policy(argv, FLAGS)
    if values["print_config"]:
        print_config(config)
        return 0
    if importlib.util.find_spec("mcp") is None:
        raise ValueError("the package mcp is missing: pip install -e '.[mcp]'")
    port = values["port"]
    if values["http"]:
        _check_port(port)
    elif port != FLAGS["port"][0]:
        raise ValueError(f"--port={port} has no effect without --http")
    tool = load()
    tool.warm_up()
    server = make_server(tool)
    # Nothing is unsaved, and Python's own exit would wait for stdin and for searches.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    if values["http"]:
        console.note(f"MCP at http://{HOST}:{port}/mcp, until Control-C")
        _serve_http(server, port)
    else:
        console.note("MCP on stdin and stdout, until stdin ends")
        server.run("stdio")
    return 0


def _serve_http(server, port):
    """Serve until a signal, then for at most STOP_SECONDS.

    `server.run` would wait for the calls in progress however long they take.
    """
    import uvicorn

    config = uvicorn.Config(
        server.streamable_http_app(host=HOST),
        host=HOST,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    uvicorn.Server(config).run()


def _check_port(port):
    """Refuse a port that cannot be listened on, before anything is loaded."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"--port={port}: must be 1 to 65535")
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        reason = f"cannot listen at {HOST}:{port}: {error.strerror}"
        raise ValueError(reason) from None


if __name__ == "__main__":
    sys.exit(run_command(main))

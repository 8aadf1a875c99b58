"""The tools that a policy offers over MCP, tested with the official client."""

import asyncio
import contextlib
import importlib.util
import socket
import subprocess
import sys
import threading
import time
import tomllib

import pytest

from rsearch import mcp as command
from rsearch.config.recipes import run_command
from rsearch.hosts.preemption import OutageError
from tests.rollout import scripted
from tests.serving.scripted_tool import TURNS, ScriptedTool
from tests.small_run import ROOT, child_environment

SERVES = """
import sys
from rsearch.mcp import make_server
from tests.serving.scripted_tool import ScriptedTool
server = make_server(ScriptedTool())
if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run("stdio")
"""


@contextlib.asynccontextmanager
async def connected(target):
    """Yield a client of an MCPServer, an address or a transport."""
    pytest.importorskip("mcp")
    from mcp.client.client import Client

    async with Client(target) as client:
        yield client


async def check_tools(client):
    listed = await client.list_tools()
    assert {tool.name for tool in listed.tools} == {"search", "research"}
    answered = await client.call_tool("research", {"question": "who was born"})
    result = answered.structured_content
    assert not answered.is_error
    assert (result["answer"], result["queries"]) == ("city", ["river"])
    assert [p["id"] for p in result["passages"]] == ["c"]
    hits = await client.call_tool("search", {"query": "river"})
    assert [p["id"] for p in hits.structured_content["passages"]] == ["c"]
    for name, arguments in (
        ("research", {"question": " "}),
        ("research", {"question": "x" * 201}),
        ("research", {}),
        ("search", {"query": "x" * 201}),
        ("search", {"query": "bad"}),
    ):
        refused = await client.call_tool(name, arguments)
        assert refused.is_error and refused.content[0].text, arguments


def server_of(tool):
    pytest.importorskip("mcp")
    return command.make_server(tool)


def test_the_official_client_lists_and_calls_tools_and_sees_errors():
    async def run():
        async with connected(server_of(ScriptedTool())) as client:
            await check_tools(client)

    asyncio.run(run())


def test_the_server_names_the_version_of_the_package():
    async def run():
        async with connected(server_of(ScriptedTool())) as client:
            return client.server_info

    info = asyncio.run(run())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (info.name, info.version) == (project["name"], project["version"])


def test_a_failed_search_is_a_tool_error():
    async def run():
        tool = ScriptedTool(search=lambda queries: [None for _ in queries])
        async with connected(server_of(tool)) as client:
            reply = await client.call_tool("research", {"question": "who"})
            assert reply.is_error and "tool_error" in reply.content[0].text

    asyncio.run(run())


def test_an_outage_is_a_tool_error_and_the_server_keeps_working():
    def search(queries):
        raise OutageError("unreachable for 300 s")

    async def run():
        async with connected(server_of(ScriptedTool(search=search))) as client:
            for name, field in (("research", "question"), ("search", "query")) * 2:
                reply = await client.call_tool(name, {field: "who"})
                assert reply.is_error and "unreachable" in reply.content[0].text

    asyncio.run(run())


def test_all_calls_that_wait_for_a_batch_join_the_next():
    """As many as --max_concurrent allows, not as many as asyncio has threads."""
    is_searching, go_on = threading.Event(), threading.Event()

    def search(queries):
        is_searching.set()
        assert go_on.wait(30)
        return scripted.find(queries)

    tool = ScriptedTool(search=search)

    async def run():
        async with connected(server_of(tool)) as client:

            def ask():
                return client.call_tool("research", {"question": "who"})

            calls = [asyncio.ensure_future(ask())]
            assert await asyncio.to_thread(is_searching.wait, 30)
            calls += [asyncio.ensure_future(ask()) for _ in range(40)]
            end = time.monotonic() + 20
            while tool.counts()["questions_waiting"] < 40 and time.monotonic() < end:
                await asyncio.sleep(0.01)
            num_waiting = tool.counts()["questions_waiting"]
            go_on.set()
            assert not any(reply.is_error for reply in await asyncio.gather(*calls))
            return num_waiting

    assert asyncio.run(run()) == 40


def test_a_call_that_is_cancelled_ends_its_rollout():
    is_searching, go_on, calls = threading.Event(), threading.Event(), []

    def search(queries):
        calls.append(queries)
        is_searching.set()
        assert go_on.wait(30)
        return scripted.find(queries)

    tool = ScriptedTool([scripted.SEARCHES, *TURNS], search)

    async def run():
        async with connected(server_of(tool)) as client:
            call = asyncio.ensure_future(
                client.call_tool("research", {"question": "who"})
            )
            assert await asyncio.to_thread(is_searching.wait, 30)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.2)
            go_on.set()
            while tool.counts()["questions_running"]:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_official_client_is_answered_by_a_process(transport):
    pytest.importorskip("mcp")
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def ask_on_stdio():
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-c", SERVES],
            cwd=str(ROOT),
            env=child_environment(),
        )
        async with connected(stdio_client(parameters)) as client:
            await check_tools(client)

    async def ask_over_http():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [sys.executable, "-c", SERVES, str(port)]
        with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE) as process:
            try:
                end = time.monotonic() + 100
                while time.monotonic() < end:
                    with contextlib.suppress(OSError):
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    await asyncio.sleep(0.1)
                async with connected(f"http://127.0.0.1:{port}/mcp") as client:
                    await check_tools(client)
            finally:
                process.kill()

    asyncio.run(ask_on_stdio() if transport == "stdio" else ask_over_http())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--http", "--port=0"], "--port=0"),
        (["--http", "--port=70000"], "--port=70000"),
        (["--model=m", "--accept=x"], "--accept=x"),
        (["--model=m", "--port=9000"], "--port=9000 has no effect without --http"),
    ],
)
def test_a_wrong_command_ends_with_one_line(words, message, capsys):
    if "--accept=x" not in words:
        pytest.importorskip("mcp")
    assert run_command(command.main, ["--model=m", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.skipif(
    importlib.util.find_spec("mcp") is not None, reason="mcp is installed"
)
def test_without_the_mcp_extra_the_error_names_it(capsys):
    assert run_command(command.main, ["--model=m"]) == 2
    assert ".[mcp]" in capsys.readouterr().err

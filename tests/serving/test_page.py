"""The service's web page: what a browser may do with it, and that it works."""

import base64
import hashlib
import html.parser
import queue
import re
import shutil
import subprocess
import tomllib

import httpx
import pytest

from rsearch.runtime.prometheus import RequestMetrics
from rsearch.runtime.server import JsonServer
from rsearch.serving import service
from rsearch.serving.page import FILE, Html, page_routes
from rsearch.types import Passage
from tests.rollout import scripted
from tests.running_server import MODEL, running
from tests.serving.scripted_tool import ScriptedTool
from tests.serving.test_chat import no_proxy, serving  # noqa: F401
from tests.small_run import ROOT

TEXT = FILE.read_text(encoding="utf-8")
(SCRIPT,) = re.findall("<script>(.*)</script>", TEXT, flags=re.DOTALL)
AS_MARKUP = "innerHTML outerHTML insertAdjacent document.write DOMParser srcdoc eval("


def test_the_browser_may_run_only_the_pages_script_and_call_only_this_service():
    with serving() as url:
        reply = httpx.get(f"{url}/?question=x")
        head = httpx.head(f"{url}/")
        other = httpx.put(f"{url}/")
    assert (reply.status_code, reply.text) == (200, TEXT)
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    words = reply.headers["Content-Security-Policy"].split("; ")
    policy = dict(word.split(" ", 1) for word in words)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert re.fullmatch("'sha256-[^ ]+'", policy.pop("style-src"))
    assert policy["connect-src"] == "'self'"
    rest = policy.keys() - {"script-src", "connect-src"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == rest
    assert {policy[name] for name in rest} == {"'none'"}
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == reply.headers["Content-Length"]
    assert (other.status_code, other.headers["Allow"]) == (405, "GET, HEAD")


class Attributes(html.parser.HTMLParser):
    """The names of all attributes of a page's tags."""

    def __init__(self, text):
        super().__init__()
        self.names = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names |= {name for name, _ in attrs}


def test_the_page_inserts_only_text_loads_nothing_and_calls_existing_paths():
    assert not [word for word in AS_MARKUP.split() if word in TEXT]
    assert "//" not in re.sub("^ *// .*$", "", TEXT, flags=re.MULTILINE)
    names = Attributes(TEXT).names
    assert not names & {"src", "href", "style", "action"}
    assert not [name for name in names if name.startswith("on")]
    known = {path for _, path in service.routes_of(ScriptedTool(), MODEL, None)}
    paths = set(re.findall('"(/[^"]*)"', SCRIPT))
    assert paths and paths <= known


def test_the_page_is_part_of_the_package():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = table["tool"]["setuptools"]["package-data"]["rsearch.serving"]
    assert FILE in FILE.parent.glob(pattern)


def test_the_page_is_served_before_the_model_and_without_the_token():
    with running(JsonServer("127.0.0.1", 0, page_routes(), token="secret")) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        assert httpx.get(url).text == TEXT
        assert "secret" not in TEXT
        assert [httpx.post(url).status_code, httpx.get(f"{url}x").status_code] == [
            401,
            401,
        ]
    with serving() as url:
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403


HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


def find(queries):
    """Return a passage that would run a script if it became markup."""
    return [(Passage("c", f"city\n{HOSTILE}", 0.5),) for _ in queries]


ASKS = """
  const look = setInterval(() => {
    if (at("ask").disabled) return;
    if (at("asked").hidden) {
      at("question").value = "who was born";
      at("form").requestSubmit();
    } else {
      clearInterval(look);
      call("/seen", { html: document.documentElement.outerHTML });
    }
  }, 50);
"""


@pytest.mark.slow
def test_a_browser_shows_the_searches_and_the_answer_as_text(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    seen = queue.SimpleQueue()
    tool = ScriptedTool([scripted.SEARCHES, f"<answer> {HOSTILE} </answer>"], find)
    asking = Html(TEXT.replace("</script>", f"{ASKS}</script>"))
    routes = {
        **service.routes_of(tool, MODEL, RequestMetrics()),
        ("GET", "/asking"): lambda body: asking,
        ("POST", "/seen"): lambda body: seen.put(body["html"]) or {},
    }
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
    ]
    with running(JsonServer("127.0.0.1", 0, routes)) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/asking"
        process = subprocess.Popen([browser, *flags, url], stderr=subprocess.DEVNULL)
        try:
            shown = seen.get(timeout=120)
        finally:
            process.terminate()
            process.wait(30)
    hostile = HOSTILE.replace("<", "&lt;").replace(">", "&gt;")
    assert f'<p id="content" class="">{hostile}</p>' in shown
    assert f'<p class="">{hostile}</p>' in shown and "<img" not in shown
    assert '<span class="query">river</span>' in shown
    assert "score 0.5" in shown and "with 1 search." in shown
    assert "<title>rsearch</title>" in shown and MODEL in shown

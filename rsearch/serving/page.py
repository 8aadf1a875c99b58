"""The service's web page at /, where users ask questions and watch the searches.

The whole page is page.html, whose script calls /v1/chat/completions like any other
client. Model output and passages are untrusted. The page's Content-Security-Policy
therefore lets the browser run only this script, apply only this style and connect only
to this service.
"""

import base64
import hashlib
import pathlib
import re

from rsearch.runtime.server import PlainText, open_to_all

PAGE = "/"
FILE = pathlib.Path(__file__).parent / "page.html"


class Html(PlainText):
    """A page that may run and apply only its own inline script and style."""

    kind = "text/html; charset=utf-8"

    def __init__(self, text: str):
        script, style = (_hash_of(tag, text) for tag in ("script", "style"))
        policy = {
            "default-src": "'none'",
            "script-src": script,
            "style-src": style,
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        self.headers = {
            "Content-Security-Policy": "; ".join(map(" ".join, policy.items())),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }


def page_routes() -> dict:
    """Return the routes of the page, which needs neither a token nor a loaded model."""
    page = Html(FILE.read_text(encoding="utf-8"))

    @open_to_all
    def answer(body):
        return page

    return {(method, PAGE): answer for method in ("GET", "HEAD")}


def _hash_of(tag, text):
    """Return the CSP source that allows the content of the only such tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

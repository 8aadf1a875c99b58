"""The page at / of the service, on which people ask and see the searches unfold.

page.html is all of it: its script asks /v1/chat/completions as any other client does.
Model output and passages are hostile, so that the page's policy lets the browser run
nothing but this script, apply nothing but this style, and ask nobody but this service.
"""

import base64
import hashlib
import pathlib
import re

from rsearch.runtime.server import PlainText, open_to_all

PAGE = "/"
FILE = pathlib.Path(__file__).parent / "page.html"


class Html(PlainText):
    """A page whose only script and style are those within it."""

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
    """Return the routes of the page; it needs no token, and no model that is loaded."""
    page = Html(FILE.read_text(encoding="utf-8"))

    @open_to_all
    def answer(body):
        return page

    return {(method, PAGE): answer for method in ("GET", "HEAD")}


def _hash_of(tag, text):
    """Return the source expression that allows the content of the only such tag."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

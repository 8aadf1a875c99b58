"""What a page of HTML shows, in a time that grows with its length alone.

A page is hostile: html.parser of the standard library takes hours for a megabyte of
tags that are never closed, and raises an AssertionError of its own for some.
"""

import html
import re

HIDDEN = ("noscript", "template", "head", "svg", "iframe")
RAW = {  # elements whose content is no markup, and where it ends
    name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")
}
NAME = re.compile(r"</?([a-zA-Z][^\s/>]*)")
IN_TAG = re.compile(r"=\s*([\"'])|>")  # a value in quotes, or the tag's end
LONG_NUMBER = re.compile(r"&#[0-9]{8,};?")  # of no character; int() refuses the longest


def readable(markup: str) -> str:
    """What a page of HTML shows, a line for each piece of text.

    Args:
        markup: hostile. Behind a tag, comment or script that does not end nothing is
            read.
    """
    parts, hidden = [], 0
    for text, name, opens, closes in _pieces(markup):
        if not hidden and (text := " ".join(_plain(text).split())):
            parts.append(text)
        if name in HIDDEN:
            hidden = max(0, hidden + opens - closes)
    return "\n".join(parts)


def _pieces(markup):
    """(text, name of the tag behind it or "", whether it opens, whether it closes)."""
    begun = at = 0
    while (start := markup.find("<", at)) >= 0:
        tag = NAME.match(markup, start)
        if tag is None and markup[start + 1 : start + 2] not in ("!", "?", "/"):
            at = start + 1  # a letter of the text
            continue
        text, name, opens, closes = markup[begun:start], "", False, False
        if tag is not None:
            name, end = tag[1].lower(), _end_of_tag(markup, tag.end())
            opens = markup[start + 1] != "/"
            closes = not opens or markup[max(end - 2, 0) : end] == "/>"
        else:
            close = "-->" if markup.startswith("<!--", start) else ">"
            end = _behind(markup, close, start + 2)
        yield text, name, opens, closes
        if opens and not closes and name in RAW:
            found = RAW[name].search(markup, end) if end else None
            end = found.start() if found else 0
        if not end:
            return
        begun = at = end
    yield markup[begun:], "", False, False


def _end_of_tag(markup, at) -> int:
    """Where the tag ends whose name ends here; 0 where it does not."""
    while (found := IN_TAG.search(markup, at)) is not None:
        if not found[1]:
            return found.end()
        at = _behind(markup, found[1], found.end())
        if not at:
            return 0
    return 0


def _behind(markup, words, at) -> int:
    """Where the next of these words end; 0 where there are none."""
    found = markup.find(words, at)
    return found + len(words) if found >= 0 else 0


def _plain(text):
    """Text with its character references resolved."""
    return html.unescape(LONG_NUMBER.sub("\ufffd", text))

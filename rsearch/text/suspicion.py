"""Detect signs that a retrieved passage is meant to be more than data.

The signs are only reported to people, and no passage makes the scan slow. The contents
of a passage cannot have an effect here; but a corpus whose passages contain tags, or
orders to a model, was written by someone with that intention.
"""

import re

from rsearch.types import Passage

_SIGNS = (
    # Tags, and look-alikes of tags.
    r"[<＜‹]\s{0,3}/?\s{0,3}\|?[^\W\d]"
    r"[\w\- |\u200b-\u200d\ufeff]{0,40}\|?\s{0,3}[>＞›]",
    r"&lt;\s{0,3}/?\s{0,3}\w{1,40}\s{0,3}&gt;|\\u003c",
    r"\[/?INST\]|\\boxed\s{0,3}\{",
    r"[\"']function[\"']\s{0,3}:",  # ReaRAG's calls
    r"^(?:Observation|Action|Thought) \d+:|^(?:Assistant|User|System|Human):",
    r"\b(?:ignore|disregard|forget)\b.{0,20}\b(?:previous|prior|above|earlier)\b.{0,20}"
    r"\b(?:instruction|prompt|order)s?\b",
    r"!\[[^\]]{0,200}\]\(\s{0,3}https?:",  # an image, whose server learns of a reader
    # Control characters, marks that change the writing direction, lone surrogates.
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)
_SIGN = re.compile("|".join(_SIGNS), re.IGNORECASE | re.MULTILINE)


def is_suspicious(passage: Passage) -> bool:
    """Return whether a passage contains tags, control tokens, calls or orders."""
    return _SIGN.search(passage.contents) is not None

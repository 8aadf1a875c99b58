"""Split a text into sentences by rules; no model and no list of a language but English.

A sentence ends at white space after ".", "!" or "?", perhaps with closing quotes or
brackets, or at a blank line. A full stop after an abbreviation or an initial usually
ends none; after some of them it does if the next word opens a sentence, as He does.
"""

import re

PARAGRAPH_END = re.compile(r"\n\s*\n")
OPENING_SIGNS, CLOSING_SIGNS = "\"'([{“‘«", "\"')]}”’»"
END_MARKS = ".!?…"
DOTTED_ABBREVIATION = re.compile(r"[^\W\d_]{1,3}(\.[^\W\d_]{1,3})+")  # U.S, a.m, Ph.D
INITIAL = re.compile(r"[A-Z]|[A-Z]\.?-[A-Z]")
# These are followed by a name, a number or the rest of the sentence.
_NEVER_LAST = """
mr mrs ms messrs dr prof rev hon fr st ste mt ft gen col maj capt cmdr lt sgt cpl pvt
adm gov sen rep pres supt det insp e.g i.e cf vs v viz ca c al approx est esp incl
jan feb mar apr jun jul aug sep sept oct nov dec dept
"""
_BEFORE_NUMBER = "no nos vol vols fig figs p pp art ch sec op"
# These, like initials, may end a sentence if the next word is one of the openers.
_MAY_BE_LAST = "jr sr inc ltd co corp bros etc esq ave blvd rd"
_OPENERS = """
a an the this that these those it its he his she her they their we our you your i there
here then thus so hence therefore however but and or nor yet as at after although
because before by during for from if in into like of on since to under until when where
which while who with also both each most not what why how
"""
NEVER_LAST = frozenset(_NEVER_LAST.split())
BEFORE_NUMBER = frozenset(_BEFORE_NUMBER.split())
MAY_BE_LAST = frozenset(_MAY_BE_LAST.split())
OPENERS = frozenset(_OPENERS.split())


def sentences(text: str) -> list[str]:
    """Return the sentences of a text.

    Joined with single spaces, they equal the text up to white space.

    Args:
        text: any text; a blank one has no sentences.
    """
    result = []
    for paragraph in PARAGRAPH_END.split(text):
        words, start = paragraph.split(), 0
        for i in range(len(words)):
            is_last = i + 1 == len(words)
            if is_last or _is_boundary(words[i], words[i + 1], is_first=i == start):
                result.append(" ".join(words[start : i + 1]))
                start = i + 1
    return result


def has_first_sentence(text: str) -> bool:
    """Return whether a text contains its whole first sentence, whatever follows.

    This requires the next word as well, which decides whether a full stop ends the
    sentence.

    Args:
        text: the beginning of a longer text; its last word may be cut off.
    """
    return len(sentences(text.rpartition(" ")[0])) > 1


def _is_boundary(word: str, next_word: str, *, is_first: bool) -> bool:
    """Return whether a sentence ends between a word and the following word."""
    body = word.rstrip(CLOSING_SIGNS)
    stem = body.rstrip(END_MARKS)
    mark = body[len(stem) :]
    if not mark:
        return False
    next_body = next_word.lstrip(OPENING_SIGNS)
    if next_body[:1].islower() and (body != word or len(mark) > 1 or mark == "…"):
        return False  # "Really?" he said
    if mark != ".":
        return True
    stem = stem.lstrip(OPENING_SIGNS)
    lower_stem = stem.lower()
    if lower_stem in NEVER_LAST:
        return False
    if lower_stem in BEFORE_NUMBER or (stem.isdigit() and is_first):
        return not (next_body[:1].isdigit() or stem.isdigit())
    if (
        lower_stem in MAY_BE_LAST
        or DOTTED_ABBREVIATION.fullmatch(stem)
        or INITIAL.fullmatch(stem)
    ):
        next_stem = re.match(r"\w*\.?", next_body)[0]  # "A." is one more initial
        return next_body[:1].isupper() and next_stem.lower() in OPENERS
    return True

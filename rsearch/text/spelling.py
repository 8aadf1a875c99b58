"""Suggest what a misspelt name may have meant."""

import difflib
from collections.abc import Callable, Iterable, Sequence


def did_you_mean(
    name: str,
    known: Iterable[str],
    *,
    prefix: str = "",
    near: Sequence[str] = (),
    show: Callable[[str], str] = str,
) -> str:
    """Return '; did you mean X?' for `near`, else for the nearest of `known`, or ''.

    Args:
        name: a name that is not among the known ones.
        prefix: prefix of each name in the message, such as "--".
        near: names to suggest instead of the nearest known one.
        show: formats a name, for example with quotes.
    """
    near = near or difflib.get_close_matches(name, list(known), 1, 0.6)
    names = " or ".join(f"{prefix}{show(k)}" for k in near)
    return f"; did you mean {names}?" if names else ""

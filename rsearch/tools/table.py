"""The tools by name; "package.module:name" names one of the user's own."""

from collections.abc import Sequence

from rsearch.text.extension import check_callable, is_reference, lookup
from rsearch.tools.base import Resources, checked
from rsearch.tools.open import make_open
from rsearch.tools.search import make_search
from rsearch.types import SEARCH, Tool

TOOLS = {  # name -> (resources) -> the tool
    "search": make_search,
    "open": make_open,
}
FIELD = "config.protocol.tools"


def tool_name(reference: str) -> str:
    """Return the name by which the policy calls a tool of config.protocol.tools."""
    return reference.partition(":")[2] if is_reference(reference) else reference


def make_tools(references: Sequence[str], resources: Resources) -> dict[str, Tool]:
    """Return {name: tool} of these tools, and of search.

    Args:
        references: keys of TOOLS, or "package.module:name" of functions like theirs.
        resources: what tools are made from.

    Raises:
        ValueError: there is no such function, or two have one name.
    """
    tools = {SEARCH: make_search(resources)}
    for reference in references:
        make, name = lookup(FIELD, reference, TOOLS), tool_name(reference)
        check_callable(FIELD, reference, make, "(resources) -> (calls) -> results")
        if name in tools:
            raise ValueError(
                f"{FIELD} = {reference!r}: there is a tool {name!r} already"
            )
        tool = make(resources)
        check_callable(FIELD, reference, tool, "(calls) -> results")
        tools[name] = checked(reference, tool)
    return tools

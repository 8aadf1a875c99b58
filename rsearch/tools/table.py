"""The table of tools by name; "package.module:name" names a user's own tool."""

from collections.abc import Callable, Sequence

from rsearch.text.extension import check_callable, is_reference, lookup
from rsearch.tools.base import Resources, checked_tool
from rsearch.tools.open import make_open
from rsearch.types import SEARCH, Tool

TOOLS = {"open": make_open}  # name -> (resources) -> the tool; search is not in it
FIELD = "config.protocol.tools"


def tool_name(reference: str) -> str:
    """Return the name by which a policy calls a tool; a reference's part after ":"."""
    return reference.partition(":")[2] if is_reference(reference) else reference


def check_tools(references: Sequence[str]) -> dict[str, Callable[[Resources], Tool]]:
    """Return {name: function that makes the tool} for config.protocol.tools.

    Args:
        references: keys of TOOLS, or "package.module:name" of such functions.

    Raises:
        ValueError: there is no such function, or two tools have the same name.
    """
    makers = {}
    for reference in references:
        name = tool_name(reference)
        if name == SEARCH or name in makers:
            raise ValueError(f"{FIELD}: {reference!r} is a second tool named {name!r}")
        make = lookup(FIELD, reference, TOOLS)
        check_callable(FIELD, reference, make, "(resources) -> (calls) -> results")
        makers[name] = make
    return makers


def make_tools(references: Sequence[str], resources: Resources) -> dict[str, Tool]:
    """Return {name: tool} of the tools that a policy has in addition to search.

    Args:
        references: see `check_tools`.

    Raises:
        ValueError: there is no such tool, or it cannot be made from these resources.
    """
    tools = {}
    makers = check_tools(references)
    for reference, (name, make) in zip(references, makers.items(), strict=True):
        tool = make(resources)
        check_callable(FIELD, f"{reference}(resources)", tool, "(calls) -> results")
        tools[name] = checked_tool(name, tool)
    return tools

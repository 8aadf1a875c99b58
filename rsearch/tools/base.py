"""The resources that tools are made from, and the check of their results."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rsearch.types import ReadFn, SearchFn, Tool, ToolCall, ToolResult


class Resources(NamedTuple):
    """The parts of a run that a tool may use.

    Attributes:
        search: retrieves passages.
        read: passages or pages in full, by their ids; None where the search has none.
    """

    search: SearchFn
    read: ReadFn | None = None


def check_results(what: str, results: Any, count: int, things: str) -> None:
    """Refuse what a user's function returned unless it is a list of `count` results.

    Args:
        what: names the function, and begins the message.
        results: that it returned.
        count: of the things that it was asked about.
        things: such as "queries".

    Raises:
        ValueError: something else than a list, or one of another length.
    """
    if not isinstance(results, list | tuple):
        kind = type(results).__name__
        raise ValueError(f"{what} returned a {kind}: must be a list of results")
    if len(results) != count:
        raise ValueError(
            f"{what} returned {len(results)} results for {count} {things}: must be one "
            "for each"
        )


def checked_tool(name: str, tool: Tool) -> Tool:
    """Return the tool, which must return a ToolResult for each call.

    Args:
        name: of the tool, for messages.
        tool: any; a user's own may return anything.
    """

    def run(calls: Sequence[ToolCall]) -> list[ToolResult]:
        results = tool(calls)
        check_results(f"tool {name!r}", results, len(calls), "calls")
        for result in results:
            if not isinstance(result, ToolResult):
                kind = type(result).__name__
                raise ValueError(
                    f"tool {name!r} returned {result!r}, a {kind}: must be a "
                    f"{ToolResult.__module__}.ToolResult"
                )
            if not isinstance(result.text, str):
                raise ValueError(
                    f"tool {name!r} returned the text {result.text!r}: must be a str"
                )
            # Rollouts are stored and sent to other hosts with what tools returned.
            try:
                json.dumps(result.data, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(
                    f"tool {name!r} returned the data {result.data!r}: must be a value "
                    "of JSON, or None"
                ) from None
        return list(results)

    return run

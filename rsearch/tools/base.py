"""The resources from which tools are made, and the check of their results."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rsearch.types import ReadFn, SearchFn, Tool, ToolCall, ToolResult


class Resources(NamedTuple):
    """The parts of a run that a tool may use.

    Attributes:
        search: retrieves passages.
        read: reads whole passages or pages by their ids; None if the search cannot.
    """

    search: SearchFn
    read: ReadFn | None = None


def check_results(function: str, results: Any, count: int, inputs: str) -> None:
    """Refuse a user function's result unless it is a list of `count` results.

    Args:
        function: name of the function, with which the message begins.
        count: number of its inputs.
        inputs: plural noun for its inputs, such as "queries".

    Raises:
        ValueError: the value is not a list or tuple, or has another length.
    """
    if not isinstance(results, list | tuple):
        kind = type(results).__name__
        raise ValueError(f"{function} returned a {kind}: must be a list of results")
    if len(results) != count:
        raise ValueError(
            f"{function} returned {len(results)} results for {count} {inputs}: must be "
            "one for each"
        )


def checked_tool(name: str, tool: Tool) -> Tool:
    """Wrap a tool with a check that it returns a valid ToolResult for each call.

    The data of a result become what JSON returns for them (a tuple becomes a list, a
    number as a key a text), so that they are the same before and after they are stored.

    Args:
        name: name of the tool, for messages.
        tool: any tool; a user's own may return anything.
    """

    def run(calls: Sequence[ToolCall]) -> list[ToolResult]:
        results = tool(calls)
        check_results(f"tool {name!r}", results, len(calls), "calls")
        checked_results = []
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
            # Results are stored with rollouts, and sent to other hosts.
            try:
                data = json.loads(json.dumps(result.data, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                kind = type(result.data).__name__
                raise ValueError(
                    f"tool {name!r} returned a {kind} as data: must be a JSON value, "
                    f"or None ({error})"
                ) from None
            checked_results.append(dataclasses.replace(result, data=data))
        return checked_results

    return run

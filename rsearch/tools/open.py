"""The tool that shows a passage or a page in full, by its id."""

from collections.abc import Sequence

from rsearch.tools.base import Resources
from rsearch.types import Tool, ToolCall, ToolResult


def make_open(resources: Resources) -> Tool:
    """Return the tool that reads the passages whose ids are called.

    A call has one id. An unknown one is the policy's mistake and is answered in words.

    Raises:
        ValueError: the run's search cannot be read by ids.
    """
    if resources.read is None:
        raise ValueError(
            "the tool 'open' reads passages by their ids, which the search of "
            "config.retrieval cannot: it is a service, or a function without `read`"
        )

    def run(calls: Sequence[ToolCall]) -> list[ToolResult]:
        ids = [call.arguments[0].strip() for call in calls]
        passages = resources.read(ids)
        return [
            ToolResult(text=f"There is nothing with the id {id!r}.")
            if passage is None
            else ToolResult(text=passage.contents)
            for id, passage in zip(ids, passages, strict=True)
        ]

    return run

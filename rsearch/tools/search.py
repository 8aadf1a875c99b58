"""The tool that retrieves passages."""

from collections.abc import Sequence

from rsearch.types import (
    SEARCH,
    Passage,
    SearchFn,
    Tool,
    ToolCall,
    ToolResult,
    ToolUse,
    search_for,
)


def search_tool(search: SearchFn) -> Tool:
    """Return the search tool; a result's data are the passages of each query.

    All queries of all calls are searched in one batch. The tool may also be given the
    ids of the questions for which the calls are made, see `search_for`.
    """

    def run(
        calls: Sequence[ToolCall], question_ids: Sequence[str] = ()
    ) -> list[ToolResult]:
        queries = [query for call in calls for query in call.arguments]
        askers = [
            name for call, name in zip(calls, question_ids) for _ in call.arguments
        ]
        passages = search_for(search, queries, askers) if queries else []
        assert len(passages) == len(queries), f"{len(passages)} results of {queries}"
        results, start = [], 0
        for call in calls:
            hits = tuple(passages[start : start + len(call.arguments)])
            start += len(call.arguments)
            is_failed = any(query_hits is None for query_hits in hits)
            error = "the search failed" if is_failed else None
            results.append(ToolResult(data=() if is_failed else hits, error=error))
        return results

    return run


def search_call(*queries: str) -> ToolCall:
    """Return the call that searches for these queries."""
    return ToolCall(SEARCH, queries)


def non_search_calls(tool_uses: Sequence[ToolUse]) -> dict[str, list]:
    """Return {"calls": rows} of the calls that are not searches, as JSON values.

    A row begins with its position among all calls. If there are none, {} is returned,
    so that records of conversations that only search are the same as before other tools
    existed.
    """
    rows = [
        [i, use.call.name, list(use.call.arguments), use.result.text, use.result.data]
        for i, use in enumerate(tool_uses)
        if use.call.name != SEARCH
    ]
    return {"calls": rows} if rows else {}


def with_other_calls(searches: Sequence[ToolUse], record: dict) -> tuple[ToolUse, ...]:
    """Return a record's calls: its searches and the rows of `non_search_calls`."""
    tool_uses = list(searches)
    for position, name, arguments, text, data in record.get("calls", ()):
        call = ToolCall(name, tuple(arguments))
        tool_uses.insert(position, ToolUse(call, ToolResult(text, data)))
    return tuple(tool_uses)


def search_use(
    queries: tuple[str, ...], passages: tuple[tuple[Passage, ...], ...]
) -> ToolUse:
    """Return an executed search: its queries, and the passages of each query."""
    return ToolUse(search_call(*queries), ToolResult(data=passages))

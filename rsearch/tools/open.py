"""The tool that shows a whole passage or page, given its id."""

from collections.abc import Sequence

from rsearch.tools.base import Resources, check_results
from rsearch.types import Passage, Tool, ToolCall, ToolResult

READ = "the `read` of the search"


def make_open(resources: Resources) -> Tool:
    """Return the tool that reads passages by their ids.

    A call has one id. An unknown id, or none, is the policy's mistake: the result is a
    sentence that says so, not an error.

    Raises:
        ValueError: the run's search cannot read passages by their ids.
    """
    if resources.read is None:
        raise ValueError(
            "the tool 'open' reads passages by their ids, but the search of "
            "config.retrieval cannot: it is a service, or a function without `read`"
        )

    def run(calls: Sequence[ToolCall]) -> list[ToolResult]:
        ids = ["".join(call.arguments[:1]).strip() for call in calls]
        passages = resources.read(ids)
        check_results(READ, passages, len(ids), "ids")
        results = []
        for id, passage in zip(ids, passages, strict=True):
            if passage is None:
                text = f"There is nothing with the id {id!r}."
            elif isinstance(passage, Passage):
                text = passage.contents
            else:
                raise ValueError(
                    f"{READ} returned {passage!r}: must be a "
                    f"{Passage.__module__}.Passage, or None"
                )
            results.append(ToolResult(text=text))
        return results

    return run

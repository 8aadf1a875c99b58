"""Draw rollouts in a terminal: the text of each source, the searches, the advantages.

Text by the policy is plain, with its advantage and a bar in the margin; queries are
bold. Text that the policy was shown, and is not trained on, is dim: the prompt is
indented, and retrieved passages are in boxes. The layout is the same without colours.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group as Stack
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rsearch.runtime import console
from rsearch.runtime.console import clean, clean_line

MARGIN_COLUMNS = 8  # columns for a turn's advantage and the bar
LABEL_COLUMNS = 10  # columns of the labels in the head
PAIR_COLUMNS = 140  # columns that two rollouts need side by side
LEARNT_BAR, UNLEARNT_BAR = "|", ":"  # the bar


@dataclasses.dataclass(frozen=True)
class RolloutView:
    """The parts of a rollout that are drawn.

    Attributes:
        title: title that distinguishes it from other rollouts.
        answer: the policy's answer; None if it gave none.
        verdict: "right" or "wrong".
        reward: its total reward; None if it has none.
        terms: {name: value} of the reward terms, before weighting.
        in_loss: whether it was learnt from; None in an evaluation.
        advantage: one advantage for all of the policy's tokens, or one for each; None
            if there is none.
        segments: (source, text, number of tokens) of each segment, in order.
        queries: queries of all searches, in order.
        passages: for each search, the (id, title, score) of its passages.
    """

    title: str
    question: str
    answers: Sequence[str]
    answer: str | None
    verdict: str
    outcome: str
    reward: float | None
    terms: dict[str, float]
    in_loss: bool | None
    advantage: float | Sequence[float] | None
    segments: Sequence[tuple[str, str, int]]
    queries: Sequence[str]
    passages: Sequence[Sequence[tuple[str, str, float | None]]]


def draw_rollouts(*views: RolloutView) -> None:
    """Print one rollout, or several of a question, side by side if there is room."""
    width = console.columns()
    if len(views) == 1 or width < PAIR_COLUMNS:
        for view in views:
            console.stdout_console().print(_stack(view, width), width=width)
        return
    view_width = (width - 2 * (len(views) - 1)) // len(views)
    grid = Table.grid(padding=(0, 2))
    for _ in views:
        grid.add_column(width=view_width)
    grid.add_row(*(_stack(view, view_width) for view in views))
    console.stdout_console().print(grid, width=width)


def _stack(view, width) -> Stack:
    title = Text(clean_line(view.title), "bold")
    return Stack(
        Rule(title, align="left", characters="-", style="bold"),
        _head(view),
        Text(""),
        *_turns(view, width),
        Text(""),
    )


def _head(view) -> Table:
    """Return the lines above the conversation, each with a label and a text."""
    answer = "none" if view.answer is None else clean_line(view.answer)
    style = "green" if view.verdict == "right" else "red"
    num_searches = len(view.passages)
    searches = "1 search" if num_searches == 1 else f"{num_searches} searches"
    lines = [
        ("question", clean(view.question)),
        ("expected", " | ".join(map(clean_line, view.answers))),
        (view.verdict, Text(answer, style)),
        ("outcome", f"{clean_line(view.outcome)}, {searches}"),
    ]
    if view.reward is not None:
        terms = ", ".join(f"{clean_line(n)} {x:.4g}" for n, x in view.terms.items())
        lines.append(("reward", f"{view.reward:.4g}: {terms}"))
    if view.in_loss is False:
        lines.append(("advantage", "out of the loss"))
    elif isinstance(view.advantage, Sequence):
        low, high = min(view.advantage), max(view.advantage)
        lines.append(("advantage", f"{low:+.3f} to {high:+.3f}, by token"))
    elif view.advantage is not None:
        lines.append(("advantage", f"{view.advantage:+.3f}"))
    grid = Table.grid()
    grid.add_column(width=LABEL_COLUMNS)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(label, "dim"), text if isinstance(text, Text) else Text(text))
    return grid


def _turns(view, width) -> Iterator:
    """Yield the conversation, turn by turn."""
    queries, passages = list(map(clean, view.queries)), list(view.passages)
    num_tokens, turn_queries = 0, []
    for source, text, count in view.segments:
        text = clean(text).strip("\n")
        if source == "policy":
            turn_queries = _queries_in(text, queries, len(passages))
            del queries[: len(turn_queries)]
            advantage = _advantage_of(view, num_tokens, count)
            num_tokens += count
            yield from _policy_lines(text, turn_queries, advantage, view.in_loss, width)
        elif source == "search":
            hits = passages.pop(0) if turn_queries and passages else ()
            yield _box(text, turn_queries, hits)
            turn_queries = []
        else:
            lines = _wrap(Text(text, "dim"), width - MARGIN_COLUMNS)
            yield from (Text(" " * MARGIN_COLUMNS) + line for line in lines)
    for hits in passages:  # searches by programs, whose queries are in no turn
        yield _box("", queries[:1], hits)
        del queries[:1]


def _queries_in(text, queries, num_searches) -> list[str]:
    """Return the leading queries that a turn of the policy contains.

    Args:
        queries: queries that were in no earlier turn.
        num_searches: number of searches left; if each has one query, a turn has at most
            one.
    """
    has_one_each = len(queries) == num_searches
    limit = min(1, len(queries)) if has_one_each else len(queries)
    count = end = 0
    while count < limit and (start := text.find(queries[count].strip(), end)) >= 0:
        end = start + len(queries[count].strip())
        count += 1
    return queries[:count]


def _advantage_of(view, start, count) -> str:
    """Return the mean advantage of a turn's tokens as text; "" if it has none."""
    values = view.advantage
    if isinstance(values, Sequence):
        values = math.fsum(values[start : start + count]) / max(count, 1)
    is_learnt = view.in_loss and values is not None
    return f"{values:+.2f}" if is_learnt else ""


def _policy_lines(text, queries, advantage, in_loss, width) -> Iterator[Text]:
    """Yield the lines of a turn of the policy, each after its margin."""
    styled_text = Text(text)
    for query in queries:
        start = text.rfind(query.strip())
        styled_text.stylize("bold", start, start + len(query.strip()))
    bar = UNLEARNT_BAR if in_loss is False else LEARNT_BAR
    for number, line in enumerate(_wrap(styled_text, width - MARGIN_COLUMNS)):
        margin = f"{advantage if number == 0 else '':>{MARGIN_COLUMNS - 3}} {bar} "
        yield Text.assemble((margin, "dim"), line)


def _box(text, queries, hits) -> Panel:
    """Return a box with an observation's text, passages and queries."""
    lines = [Text(text, "dim")] if text else []
    for name, title, score in hits:
        number = "" if score is None else f"  {score:.3f}"
        line = f"[{clean_line(name)}] {clean_line(title)}{number}"
        lines.append(Text(line, "dim italic", no_wrap=True, overflow="ellipsis"))
    title = " | ".join(clean_line(query).strip() for query in queries)
    return Panel(
        Stack(*lines),
        title=Text(title, "bold") if title else None,
        title_align="left",
        box=box.SQUARE,
        style="dim",
    )


def _wrap(text, width) -> list[Text]:
    """Return a text's lines wrapped to this width; long words are broken."""
    return list(text.wrap(console.stdout_console(), max(width, 1), overflow="fold"))

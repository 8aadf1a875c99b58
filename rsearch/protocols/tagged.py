"""Conversations in tagged text: <search>, <answer>, and a tag around what was found.

The policy writes free text and ends a turn with `</search>` or `</answer>`; what the
engine found comes back between tags of its own. Search-R1 and R-Search talk like this.

How a turn is read. The first closing tag in it ends it: what follows was never asked
for and is ignored; in a rollout that is at most the rest of one token. The action is
the text between this tag and the nearest opening tag of the same name before it. So the
first complete action counts, a tag merely mentioned on the way does not, and documents
that a policy writes itself are no more than its own words. Tags are these exact
strings: `<Search>`, or one with a space inside, is text. An empty query is no action;
an empty answer is one, and wrong.

The public code has no stop strings, takes the text from the first opening tag instead
of the nearest, and sends empty queries to the engine. All else it reads the same way.
"""

import re
from collections.abc import Callable, Sequence

from rsearch.protocols.base import Protocol, Step
from rsearch.types import Action, Answer, Malformed, Observation, Passage, Search

CLOSING = re.compile(r"</(search|answer)>")
STOP_STRINGS = ("</search>", "</answer>")

INVALID_MESSAGE = (
    "\nMy previous action is invalid. If I want to search, I should put the query "
    "between <search> and </search>. If I want to give the final answer, I should put "
    "the answer between <answer> and </answer>. Let me try again.\n"
)


def tagged(
    name: str,
    *,
    system: str | None,
    user: str,
    add_question_mark: bool,
    observation_tag: str,
    format_passage: Callable[[int, Passage], str],
    invalid_message: str | None = INVALID_MESSAGE,
) -> Protocol:
    """A protocol of tagged text.

    Args:
        name: its key in PROTOCOLS.
        system: system message, or None to send none.
        user: user message with one `{question}` field.
        add_question_mark: strip the question and end it with '?'.
        observation_tag: the name of the tag around retrieved text.
        format_passage: (number from 1, passage) -> its text.
        invalid_message: shown after a malformed turn; None ends the rollout instead.
    """

    def observe(queries: Sequence[str], passages: Sequence[Sequence[Passage]]):
        # Passages are numbered through, so that no two of a turn share a number.
        found = [passage for hits in passages for passage in hits]
        lines = [format_passage(i, passage) for i, passage in enumerate(found, start=1)]
        content = whole_characters("\n".join(lines).strip())
        return Observation(
            f"\n\n<{observation_tag}>", content, f"</{observation_tag}>\n\n"
        )

    return Protocol(
        name=name,
        system=system,
        user=user,
        add_question_mark=add_question_mark,
        stop_strings=STOP_STRINGS,
        parse=parse,
        observe=observe,
        render=render,
        write=_write,
        invalid_message=invalid_message,
    )


def parse(turn: str) -> Action:
    """The action of one turn; the module's first lines say how it is read.

    Args:
        turn: what the policy wrote in this turn, and nothing else. Any text will do.
    """
    closing = CLOSING.search(turn)
    if closing is None:
        return Malformed("no </search> or </answer>")
    kind = closing[1]
    _, opening, content = turn[: closing.start()].rpartition(f"<{kind}>")
    if not opening:
        return Malformed(f"</{kind}> without <{kind}> before it")
    content = content.strip()
    if kind == "answer":
        return Answer(content)
    return Search((content,)) if content else Malformed("empty query")


def render(action: Search | Answer) -> str:
    """The end of a turn that takes this action: `parse` of it gives the action back.

    Raises:
        ValueError: more than one query, or a text that would be read differently:
            with one of the tags in it, with space around it, or an empty query.
    """
    if isinstance(action, Search) and len(action.queries) != 1:
        raise ValueError(f"a turn holds one query, not {len(action.queries)}")
    if isinstance(action, Search):
        text = f"<search> {action.queries[0]} </search>"
    else:
        text = f"<answer> {action.text} </answer>"
    if parse(text) != action:
        raise ValueError(f"{action} cannot be written: {text!r} is read as another")
    return text


def _write(step: Step) -> str:
    return f"<think> {step.thought}</think>{render(step.action)}"


def boxes(text: str, tag: str) -> list[str]:
    """The stripped texts between each `</tag>` and the nearest `<tag>` before it."""
    found = []
    *pieces, _ = text.split(f"</{tag}>")
    for piece in pieces:
        _, opening, content = piece.rpartition(f"<{tag}>")
        if opening:
            found.append(content.strip())
    return found


def mentions_tag(text: str, tag: str) -> bool:
    """Whether the opening or the closing tag occurs."""
    return f"<{tag}>" in text or f"</{tag}>" in text


def whole_characters(text: str) -> str:
    """The text with a replacement character for each lone surrogate.

    JSON can hold half of a UTF-16 pair, which no encoding of text can.
    """
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


SEARCH_R1 = tagged(
    "search_r1",
    system=None,
    user=(
        "Answer the given question. You must conduct reasoning inside <think> and "
        "</think> first every time you get new information. After reasoning, if you "
        "find you lack some knowledge, you can call a search engine by <search> query "
        "</search> and it will return the top searched results between <information> "
        "and </information>. You can search as many times as your want. If you find no "
        "further external knowledge needed, you can directly provide the answer inside "
        "<answer> and </answer>, without detailed illustrations. For example, <answer> "
        "Beijing </answer>. Question: {question}\n"
    ),
    add_question_mark=True,
    observation_tag="information",
    format_passage=lambda number, p: f"Doc {number}(Title: {p.title}) {p.text}",
)
"""Search-R1 (Jin et al. 2025): the words of its prompt, slips included."""

R_SEARCH = tagged(
    "r_search",
    system=(
        "You are a helpful assistant that can solve the given question step by step. "
        "For each step, start by explaining your thought process. If additional "
        "information is needed, provide a specific query enclosed in <search> and "
        "</search>. The system will return the top search results within <observation> "
        "and </observation>. You can perform multiple searches as needed.\n"
        "When you know the final answer, use <original_evidence> and "
        "</original_evidence> to provide all potentially relevant original information "
        "from the observations. Ensure the information is complete and preserves the "
        "original wording without modification. If no searches were conducted or "
        "observations were made, omit the evidence section. Finally, provide the final "
        "answer within <answer> and </answer> tags."
    ),
    user="{question}",
    add_question_mark=False,
    observation_tag="observation",
    format_passage=lambda number, p: f"(Title: {p.title}) {p.text}",
)
"""R-Search (2025), the system template of its Table 1, as used in training."""

"""Protocols in tagged text: tags around queries, around the answer and around passages.

The policy writes free text and ends a turn with a closing tag. Passages come back
between other tags. Search-R1, R-Search, RAG-R1 and R1-Searcher all work like this and
differ in the tags.

Rules for reading a turn:

- The first closing tag ends the turn. The text after it is ignored; in a rollout that
  is at most the rest of one token.
- The action is the text between this closing tag and the last opening tag of the same
  name before it. So the first complete action counts, a tag that is only mentioned does
  not, and documents that the policy makes up are ordinary text.
- Tags are exact strings: `<Search>`, or a tag with a space inside, is text.
- An empty query is malformed. An empty answer counts as an answer, and is wrong.

The public code of the `<search>` family differs: it has no stop strings, takes the text
from the first opening tag, and sends empty queries to the engine.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rsearch.protocols.base import (
    Protocol,
    Step,
    checked_text,
    join_thoughts,
    replace_surrogates,
)
from rsearch.tools.search import search_call
from rsearch.types import Action, Answer, Malformed, Observation, Passage, ToolCall

Tags = tuple[str, str]  # the opening and the closing tag
SEARCH_TAGS: Tags = ("<search>", "</search>")
ANSWER_TAGS: Tags = ("<answer>", "</answer>")
EVIDENCE_TAG = "original_evidence"  # R-Search's

INVALID_MESSAGE = (
    "\nMy previous action is invalid. If I want to search, I should put the query "
    "between <search> and </search>. If I want to give the final answer, I should put "
    "the answer between <answer> and </answer>. Let me try again.\n"
)


def one_query(text: str) -> tuple[str, ...]:
    """Return the stripped text as the only query; () if it is empty."""
    return (text.strip(),) if text.strip() else ()


def plain_join(queries: Sequence[str]) -> str:
    """Join queries with commas."""
    return ", ".join(queries)


def plain_answer(text: str) -> Answer:
    """Return the stripped text as the answer."""
    return Answer(text.strip())


def tagged(
    name: str,
    *,
    system: str | None,
    user: str,
    add_question_mark: bool,
    show_passages: Callable[[Sequence[str], Sequence[Sequence[Passage]]], Observation],
    search_tags: Tags = SEARCH_TAGS,
    answer_tags: Tags = ANSWER_TAGS,
    split: Callable[[str], tuple[str, ...]] = one_query,
    join: Callable[[Sequence[str]], str] = plain_join,
    read_answer: Callable[[str], Answer | Malformed] = plain_answer,
    write_answer: Callable[[str], str] = str,
    write_turn: Callable[[Step, str], str] | None = None,
    max_queries: int = 1,
    invalid_message: str | None = INVALID_MESSAGE,
    **fields: Any,
) -> Protocol:
    """Return a protocol of tagged text.

    Args:
        name: key in PROTOCOLS.
        system: system message, or None to send none.
        user: user message with one `{question}` field.
        add_question_mark: whether to strip the question and end it with '?'.
        show_passages: returns what the policy is shown after a search; `listed` makes
            such a function.
        search_tags, answer_tags: tags around queries and around the answer.
        split: text between the search tags -> its queries; no query is malformed.
        join: queries -> the text between the search tags; `split` undoes it.
        read_answer: text between the answer tags -> the answer in it, or Malformed.
        write_answer: answer -> the text between the answer tags; `read_answer` undoes
            it.
        write_turn: (step, its rendered action) -> the complete turn; the default puts
            thoughts between think tags.
        max_queries: how many queries of one turn are searched.
        invalid_message: shown after a malformed turn; None ends the rollout instead.
        fields: more fields of the Protocol, such as is_chat and evidence_tag.
    """
    write_turn = write_turn or _write_think_turn

    def parse(turn: str) -> Action:
        return read_turn(
            turn,
            search=search_tags,
            answer=answer_tags,
            split=split,
            read_answer=read_answer,
        )

    def render(action: ToolCall | Answer) -> str:
        if isinstance(action, Answer):
            text = f" {write_answer(action.text)} ".join(answer_tags)
            return checked_text(text, action, parse)
        num_queries = len(action.arguments)
        if not 1 <= num_queries <= max_queries:
            limit = "one query" if max_queries == 1 else f"1 to {max_queries} queries"
            raise ValueError(f"a turn holds {limit}, not {num_queries}")
        text = f" {join(action.arguments)} ".join(search_tags)
        return checked_text(text, action, parse)

    def write(step: Step) -> str:
        return checked_text(write_turn(step, render(step.action)), step.action, parse)

    return Protocol(
        name=name,
        system=system,
        user=user,
        add_question_mark=add_question_mark,
        stop_strings=(search_tags[1], answer_tags[1]),
        parse=parse,
        show_passages=show_passages,
        render=render,
        write=write,
        invalid_message=invalid_message,
        max_queries=max_queries,
        **fields,
    )


def read_turn(
    turn: str,
    *,
    search: Tags,
    answer: Tags,
    split: Callable[[str], tuple[str, ...]],
    read_answer: Callable[[str], Answer | Malformed],
) -> Action:
    """Read the action of one turn by the rules at the top of this module.

    Args:
        turn: the text that the policy wrote in this turn, and nothing else. Any text is
            accepted.
        search, answer: the tags around queries and around the answer.
        split: text between the search tags -> its queries.
        read_answer: text between the answer tags -> the answer in it, or Malformed.
    """
    ends = [(turn.find(tags[1]), tags) for tags in (search, answer) if tags[1] in turn]
    if not ends:
        return Malformed(f"no {search[1]} or {answer[1]}")
    end, tags = min(ends)
    _, opening, content = turn[:end].rpartition(tags[0])
    if not opening:
        return Malformed(f"{tags[1]} without {tags[0]} before it")
    if tags == answer:
        return read_answer(content)
    queries = split(content)
    return search_call(*queries) if queries else Malformed("empty query")


def _write_think_turn(step: Step, action: str) -> str:
    return f"<think> {join_thoughts(step)}</think>{action}"


def listed(
    before: str,
    after: str,
    format_passage: Callable[[int, Passage], str],
    *,
    empty_text: str = "",
) -> Callable[[Sequence[str], Sequence[Sequence[Passage]]], Observation]:
    """Return a `show_passages` that lists the passages, one per line.

    Args:
        before, after: the tags around the list.
        format_passage: (number from 1, passage) -> its text.
        empty_text: text shown if nothing was found.
    """

    def show_passages(queries: Sequence[str], passages: Sequence[Sequence[Passage]]):
        # Passages are numbered across queries, so no two of a turn share a number.
        all_passages = [passage for hits in passages for passage in hits]
        lines = [
            format_passage(i, passage)
            for i, passage in enumerate(all_passages, start=1)
        ]
        content = replace_surrogates("\n".join(lines).strip()) or empty_text
        return Observation(before, content, after)

    return show_passages


def tagged_texts(text: str, tag: str) -> list[str]:
    """Return the stripped text between each `</tag>` and the last `<tag>` before it."""
    *heads, _ = text.split(f"</{tag}>")
    parts = [head.rpartition(f"<{tag}>") for head in heads]
    return [content.strip() for _, opening, content in parts if opening]


def spans(text: str, opening: str, closing: str) -> list[tuple[int, int]]:
    """Return [(start, end)] of the texts from an opening to the next closing tag.

    It finds what a regular expression would, in time linear in the text: a hostile text
    opens thousands of tags and closes none.
    """
    ranges, end = [], 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            break
        ranges.append((start, stop))
        end = stop + len(closing)
    return ranges


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
    show_passages=listed(
        "\n\n<information>",
        "</information>\n\n",
        lambda number, p: f"Doc {number}(Title: {p.title}) {p.text}",
    ),
)
"""Search-R1 (Jin et al. 2025), with the wording of its prompt, slips included."""


def _write_r_search_turn(step: Step, action: str) -> str:
    """Write a turn of R-Search: reasoning has no tags, evidence precedes the answer.

    Raises:
        ValueError: the evidence would be read back differently.
    """
    thought = join_thoughts(step)
    if step.evidence is None or isinstance(step.action, ToolCall):
        return f"{thought} {action}" if thought else action
    box = f"<{EVIDENCE_TAG}> {step.evidence} </{EVIDENCE_TAG}>"
    text = f"{thought} {box} {action}" if thought else f"{box} {action}"
    if tagged_texts(text, EVIDENCE_TAG) != [step.evidence]:
        raise ValueError(
            f"evidence {step.evidence!r} cannot be written: {text!r} is read as "
            f"{tagged_texts(text, EVIDENCE_TAG)}"
        )
    return text


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
    show_passages=listed(
        "\n\n<observation>",
        "</observation>\n\n",
        lambda number, p: f"(Title: {p.title}) {p.text}",
    ),
    write_turn=_write_r_search_turn,
    evidence_tag=EVIDENCE_TAG,
)
"""R-Search (2025), the system template of its Table 1, as used in training."""

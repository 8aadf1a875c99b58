r"""ReSearch: a search in `<search>`, its passages in `<result>`, an answer in \boxed{}.

How a turn is read: as in `tagged`, and the answer is the last closed `\boxed{` between
`<answer>` and `</answer>`. An answer without a box is malformed, since the paper takes
only the box for the answer. There is no message after a malformed turn: it ends the
rollout. The wording is that of Table 1 of arXiv 2503.19470; the space and line breaks
around passages are those of the public code.
"""

import dataclasses

from rsearch.protocols.base import Step, checked_text, join_thoughts
from rsearch.protocols.r1_searcher_pp import boxed
from rsearch.protocols.tagged import ANSWER_TAGS, listed, tagged
from rsearch.types import Action, Answer, Malformed, ToolCall

RULES = (
    "invoke the wikipedia search tool to search for fact information about specific "
    "topics if needed. The reasoning process and answer are enclosed within <think> "
    "</think> and <answer> </answer> tags respectively, and the search query and "
    "result are enclosed within <search> </search> and <result> </result> tags "
    "respectively. For example, <think> This is the reasoning process. </think> "
    "<search> search query here </search> <result> search result here </result> "
    "<think> This is the reasoning process. </think> <answer> The final answer is "
    "\\boxed{answer here} </answer>. In the last part of the answer, the final exact "
    "answer is enclosed within \\boxed{} with latex format."
)
BASE = (
    "A conversation between User and Assistant. The user asks a question, and the "
    "assistant solves it. The assistant first thinks about the reasoning process in "
    "the mind and then provides the user with the answer. During thinking, the "
    f"assistant can {RULES} User: {{question}}. Assistant:"
)
CHAT = (
    "You are a helpful assistant that can solve the given question step by step with "
    "the help of the wikipedia search tool. Given a question, you need to first think "
    "about the reasoning process in the mind and then provide the answer. During "
    f"thinking, you can {RULES}"
)
TAGGED = tagged(
    "research",
    system=CHAT,
    user="{question}",
    add_question_mark=False,
    show_passages=listed(
        " <result>\n", "\n</result>", lambda number, p: f"{p.contents}\n"
    ),
    invalid_message=None,
)


def parse(turn: str) -> Action:
    """Read the action of one turn by the rules at the top of this module."""
    action = TAGGED.parse(turn)
    if not isinstance(action, Answer):
        return action
    answer = boxed(action.text)
    return Malformed(r"no \boxed{} in the answer") if answer is None else Answer(answer)


def render(action: ToolCall | Answer) -> str:
    """Return the end of a turn with this action, which `parse` reads back.

    Raises:
        ValueError: more than one query, braces that do not match, or a tag.
    """
    if not isinstance(action, Answer):
        return TAGGED.render(action)
    text = rf" The final answer is \boxed{{{action.text}}} ".join(ANSWER_TAGS)
    return checked_text(text, action, parse)


def _write(step: Step) -> str:
    text = f"<think> {join_thoughts(step)} </think> {render(step.action)}"
    return checked_text(text, step.action, parse)


RESEARCH = dataclasses.replace(TAGGED, parse=parse, render=render, write=_write)
"""ReSearch (arXiv 2503.19470) for chat models, its rules as a system message."""

RESEARCH_BASE = dataclasses.replace(
    RESEARCH, name="research_base", system=None, user=BASE, is_chat=False
)
"""ReSearch for base models: the same rules and the question as raw text."""

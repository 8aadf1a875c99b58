r"""ReSearch: a search in `<search>`, its passages in `<result>`, an answer in \boxed{}.

How a turn is read: as in `tagged`, and the answer is the last closed `\boxed{` between
`<answer>` and `</answer>`. An answer without a box is malformed, since the paper takes
only the box for the answer. There is no message after a malformed turn: it ends the
rollout. The wording is that of Table 1 of arXiv 2503.19470; the space and line breaks
around passages are those of the public code.
"""

import dataclasses

from rsearch.protocols.base import Step, join_thoughts
from rsearch.protocols.r1_searcher_pp import boxed
from rsearch.protocols.tagged import listed, tagged
from rsearch.types import Answer, Malformed

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


def read_answer(text: str) -> Answer | Malformed:
    r"""Return the last closed `\boxed{` of the text between the answer tags."""
    answer = boxed(text)
    return Malformed(r"no \boxed{} in the answer") if answer is None else Answer(answer)


def _write_turn(step: Step, action: str) -> str:
    return f"<think> {join_thoughts(step)} </think> {action}"


RESEARCH = tagged(
    "research",
    system=CHAT,
    user="{question}",
    add_question_mark=False,
    show_passages=listed(
        " <result>\n", "\n</result>", lambda number, p: f"{p.contents}\n"
    ),
    read_answer=read_answer,
    write_answer=lambda answer: rf"The final answer is \boxed{{{answer}}}",
    write_turn=_write_turn,
    invalid_message=None,
)
"""ReSearch (arXiv 2503.19470) for chat models, its rules as a system message."""

RESEARCH_BASE = dataclasses.replace(
    RESEARCH, name="research_base", system=None, user=BASE, is_chat=False
)
"""ReSearch for base models: the same rules and the question as raw text."""

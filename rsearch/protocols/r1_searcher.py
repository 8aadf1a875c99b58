"""R1-Searcher: `<|end_of_query|>` pauses for documents, `</answer>` ends the rollout.

The base model gets raw text, the chat model a system message; both start after an
opening `<think>` that is part of the prompt. The tags are plain text, not tokens of the
vocabulary. The wording is that of the paper's prompts; bold marks and line breaks,
which the paper's text has lost, are those of the public code. There is no message after
a malformed turn, such as an empty query: it ends the rollout.
"""

import dataclasses

from rsearch.protocols.base import Step, join_thoughts
from rsearch.protocols.tagged import listed, tagged

QUERY_TAGS = ("<|begin_of_query|>", "<|end_of_query|>")
OPENING = "<think>"

BASE = (
    "The User asks a question, and the Assistant solves it. The Assistant first thinks "
    "about the reasoning process in the mind and then provides the User with the final "
    "answer. The output format of reasoning process and final answer are enclosed "
    "within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    '"<think> reasoning process here </think>\n\n<answer> final answer here </answer>".'
    " During the thinking process, **the Assistant can perform searching** for "
    'uncertain knowledge if necessary with the format of "<|begin_of_query|> search '
    'query (only list keywords, such as **"keyword_1 keyword_2 ..."**) '
    '<|end_of_query|>". **A query must involve only a single triple**. Then, the '
    "search system will provide the Assistant with the retrieval information with the "
    'format of "<|begin_of_documents|> ...search results... <|end_of_documents|>".'
    "\n\nUser:{question}\nAssistant: "
)
CHAT = (
    "You are a helpful assistant.\nGiven a question, you should answer it by first "
    "thinking about the reasoning process in the mind and then providing the final "
    "answer. The output format of reasoning process and final answer are enclosed "
    "within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    '"<think> reasoning process here </think>\n\n<answer> final answer here </answer>".'
    " During the thinking process, **you can perform searching for uncertain "
    'knowledge** if necessary with the format of "<|begin_of_query|> search query '
    '(only list keywords, such as **"keyword_1 keyword_2 ..."**) <|end_of_query|>". '
    "**A query must involve only a single triple**. Then, the search system will "
    "provide you with the retrieval information with the format of "
    '"<|begin_of_documents|> ...search results... <|end_of_documents|>".'
)


def clean_query(text: str) -> tuple[str, ...]:
    """Return the query without double quotes, with single spaces; () if it is empty."""
    query = " ".join(text.replace('"', "").split())
    return (query,) if query else ()


def _format_document(number, passage):
    # A passage is one line, as in the corpora of the public code.
    contents = " ".join(passage.contents.split("\n"))
    return f"({number}){contents}"


def _write_turn(step: Step, action: str) -> str:
    """Write a turn after the opening <think>, which is closed before the answer."""
    thought = join_thoughts(step)
    if action.startswith(QUERY_TAGS[0]):
        return f" {thought}\n\n{action}"
    return f" {thought} </think>\n\n{action}"


R1_SEARCHER = tagged(
    "r1_searcher",
    system=None,
    user=BASE,
    add_question_mark=False,
    show_passages=listed(
        "\n\n<|begin_of_documents|>\n",
        "\n<|end_of_documents|>\n\n",
        _format_document,
        empty_text="None",
    ),
    search_tags=QUERY_TAGS,
    split=clean_query,
    write_turn=_write_turn,
    invalid_message=None,
    is_chat=False,
    opening=OPENING,
)
"""R1-Searcher (2025) for base models, its "System Prompt for Base Model"."""

R1_SEARCHER_CHAT = dataclasses.replace(
    R1_SEARCHER, name="r1_searcher_chat", system=CHAT, user="{question}", is_chat=True
)
"""R1-Searcher (2025) for chat models: the same rules as a system message."""

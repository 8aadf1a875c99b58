r"""R1-Searcher++: known facts go between internal tags, unknown ones are searched for.

`<|begin_internal_answer|>...<|end_internal_answer|>` is part of the policy's own turn
and does not pause it; `<|end_external_search|>` pauses for results. The answer is in
`\boxed{}`, which no stop string ends: the end of text does.

How a turn is read: the first `<|end_external_search|>` ends it, and the query begins at
the nearest opening tag before it and is cleaned as in R1-Searcher. In a turn without
such a tag, the answer is the last `\boxed{` whose braces close; braces inside it are
matched. A turn with neither is malformed, which ends the rollout.
"""

import re

from rsearch.protocols.base import Protocol, Step, checked_text
from rsearch.protocols.r1_searcher import clean_query
from rsearch.protocols.tagged import listed
from rsearch.tools.search import search_call
from rsearch.types import Action, Answer, Malformed, ToolCall

SEARCH_TAGS = ("<|begin_external_search|>", "<|end_external_search|>")
INTERNAL_TAGS = ("<|begin_internal_answer|>", "<|end_internal_answer|>")
BRACES = re.compile(r"\\boxed\{|[{}]")

SYSTEM = (
    "You are a reasoning assistant. When tackling a question, you should first thinks "
    "about the reasoning process in the mind and then provides the final answer. You "
    "should break down the original complex question into straightforward "
    "sub-questions and address them step by step. For each sub-question, You MUST "
    "choose one of the following two tools to solve it:\n"
    "1. **Internal Reasoning Elaboration:** If you determine your existing knowledge "
    "is sufficient to answer the sub-question, you **should choose** this tool to "
    "answer the sub-question directly: `<|begin_internal_answer|>your structured "
    "thought and answer here <|end_internal_answer|>`. **Use it whenever you rely "
    "solely on internal information** for a significant reasoning step.\n"
    "2. **External Search:** If you determine that your internal knowledge is "
    "insufficient, potentially outdated, or requires verification with external, "
    "up-to-date information to answer the sub-question, you MUST initiate a web search "
    "using the following format: `<|begin_external_search|>your search query here "
    "<|end_external_search|>`. The system will then search and provide results in the "
    "format: `<|begin_search_result|>...search results... <|end_search_result|>`. The "
    "results will assist you in answering the sub-question.\n"
    "Remember:\n"
    "- Whenever you encounter the sub-question you need to elaborate on, verify, or "
    "research further, you should **assess** if your internal knowledge is adequate. "
    "**Prioritize leveraging your internal knowledge.**\n"
    "- Use `<|begin_internal_answer|>... <|end_internal_answer|>` **to demonstrate "
    "your reasoning steps** when relying on internal knowledge.\n"
    "- Use `<|begin_external_search|>... <|end_external_search|>` **only** when "
    "external information is genuinely necessary.\n"
    "- Wait for the system to provide `<|begin_search_result|>... "
    "<|end_search_result|>`. **Do not** generate these result tags yourself.\n"
    "- After performing the web search or demonstrating internal reasoning, continue "
    "towards the final answer.\n"
    "Please answer the following question. You must adhere to all instructions above "
    "regarding tool usage. Provide your final answer in the format "
    "\\boxed{YOUR_ANSWER}."
)


def boxed(text: str) -> str | None:
    r"""Return the stripped inside of the last closed `\boxed{`; None without one."""
    open_braces, last_span = [], None
    for brace in BRACES.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            is_box = opening[0] != "{"
            if is_box and (last_span is None or opening.end() > last_span[0]):
                last_span = opening.end(), brace.start()
    return None if last_span is None else text[slice(*last_span)].strip()


def parse(turn: str) -> Action:
    """Read the action of one turn by the rules at the top of this module."""
    begin_tag, end_tag = SEARCH_TAGS
    head, closing, _ = turn.partition(end_tag)
    if closing:
        _, opening, content = head.rpartition(begin_tag)
        if not opening:
            return Malformed(f"{end_tag} without {begin_tag} before it")
        query = clean_query(content)
        return search_call(*query) if query else Malformed("empty query")
    answer = boxed(turn)
    return (
        Malformed(rf"no {end_tag} or \boxed{{}}") if answer is None else Answer(answer)
    )


def render(action: ToolCall | Answer) -> str:
    """Return the end of a turn with this action, which `parse` reads back.

    Raises:
        ValueError: more than one query, a query that cleaning would change, braces that
            do not match, or a tag.
    """
    if isinstance(action, ToolCall) and len(action.arguments) != 1:
        raise ValueError(f"a turn holds one query, not {len(action.arguments)}")
    if isinstance(action, ToolCall):
        text = f" {action.arguments[0]} ".join(SEARCH_TAGS)
    else:
        text = rf"\boxed{{{action.text}}}"
    return checked_text(text, action, parse)


def _write(step: Step) -> str:
    internal = f" {step.internal} ".join(INTERNAL_TAGS) if step.internal else ""
    texts = (internal, step.thought, render(step.action))
    text = " ".join(filter(None, texts))
    if step.internal and any(text.count(tag) != 1 for tag in INTERNAL_TAGS):
        raise ValueError(f"{step} cannot be written: its text holds internal tags")
    return checked_text(text, step.action, parse)


R1_SEARCHER_PP = Protocol(
    name="r1_searcher_pp",
    system=SYSTEM,
    user="Question: {question}",
    add_question_mark=False,
    stop_strings=(SEARCH_TAGS[1],),
    parse=parse,
    show_passages=listed(
        "\n\n<|begin_search_result|>\n",
        "\n<|end_search_result|>\n\n",
        lambda number, p: f"({number})" + " ".join(p.contents.split("\n")),
        empty_text="None",
    ),
    render=render,
    write=_write,
    invalid_message=None,
)
"""R1-Searcher++ (arXiv 2505.17005), Appendix B: "... with Internal and External"."""

"""Search within a thought: Search-o1 (Li et al., arXiv 2501.05366)."""

import re

from rsearch.llm.requests import STOPPED, Completion, Generate, Search
from rsearch.methods.base import AT_LIMIT, Kit, check_settings, text_of
from rsearch.protocols.plain import write_passages
from rsearch.protocols.r1_searcher_pp import boxed
from rsearch.types import Messages, Question

BEGIN_QUERY, END_QUERY = "<|begin_search_query|>", "<|end_search_query|>"
BEGIN_RESULT, END_RESULT = "<|begin_search_result|>", "<|end_search_result|>"
# The authors' words; the example is ours.
TOOLS = (
    "You are a reasoning assistant with the ability to perform web searches to help "
    "you answer the user's question accurately. You have special tools:\n\n- To "
    f"perform a search: write {BEGIN_QUERY} your query here {END_QUERY}.\nThen, the "
    "system will search and analyze relevant web pages, then provide you with helpful "
    f"information in the format {BEGIN_RESULT} ...search results... {END_RESULT}.\n\n"
    "You can repeat the search process multiple times if necessary. The maximum number "
    "of search attempts is limited to {max_searches}.\n\nOnce you have all the "
    'information you need, continue your reasoning.\n\nExample:\nQuestion: "In which '
    'city was the author of the book Killing Pablo born?"\nAssistant thinking steps:\n'
    "- I need to find out who wrote the book Killing Pablo.\n- Then, I need to "
    f"determine where that author was born.\n\nAssistant:\n{BEGIN_QUERY}author of the "
    f"book Killing Pablo{END_QUERY}\n\n(System returns processed information from "
    "relevant web pages)\n\nAssistant thinks: The search results indicate that Mark "
    "Bowden wrote Killing Pablo. Now, I need to find out where he was born.\n\n"
    f"Assistant:\n{BEGIN_QUERY}Mark Bowden place of birth{END_QUERY}\n\n(System "
    "returns processed information from relevant web pages)\n\nAssistant continues "
    f"reasoning with the new information...\n\nRemember:\n- Use {BEGIN_QUERY} to "
    f"request a web search and end with {END_QUERY}.\n- When done searching, continue "
    "your reasoning.\n\nPlease answer the following question. {think}Provide your "
    "final answer in the format \\boxed{{YOUR_ANSWER}}.\n\nQuestion:\n{question}\n\n"
)
THINK = "You should think step by step to solve it.\n\n"
NO_INFORMATION = "No helpful information found."
MARK = "\n**Final Information**"
READ = (
    "**Task Instruction:**\n\nYou are tasked with reading and analyzing web pages "
    "based on the following inputs: **Previous Reasoning Steps**, **Current Search "
    "Query**, and **Searched Web Pages**. Your objective is to extract relevant and "
    "helpful information for **Current Search Query** from the **Searched Web Pages** "
    "and seamlessly integrate this information into the **Previous Reasoning Steps** "
    "to continue reasoning for the original question.\n\n**Guidelines:**\n\n1. "
    "**Analyze the Searched Web Pages:**\n- Carefully review the content of each "
    "searched web page.\n- Identify factual information that is relevant to the "
    "**Current Search Query** and can aid in the reasoning process for the original "
    "question.\n\n2. "
    "**Extract Relevant Information:**\n- Select the information from the Searched Web "
    "Pages that directly contributes to advancing the **Previous Reasoning Steps**.\n- "
    "Ensure that the extracted information is accurate and relevant.\n\n3. **Output "
    "Format:**\n- **If the web pages provide helpful information for current search "
    "query:** Present the information beginning with `**Final Information**` as shown "
    f"below.{MARK}\n\n[Helpful information]\n\n- **If the web pages do not provide any "
    "helpful information for current search query:** Output the following text.\n"
    f"{MARK}\n\n{NO_INFORMATION}\n\n**Inputs:**\n- **Previous Reasoning Steps:**\n"
    "{steps}"
    "\n\n- **Current Search Query:**\n{query}\n\n- **Searched Web Pages:**\n"
    "{passages}\n\nNow you should analyze each web page and find helpful information "
    'based on the current search query "{query}" and previous reasoning steps.'
)
REPEATED = "You have searched this query. Please refer to previous results."
TOO_MANY = "The maximum search limit is exceeded. You are not allowed to search."
TEXT = re.compile(r"\\text\{([^{}]*)\}")


def search_o1(
    question: Question,
    kit: Kit,
    *,
    max_searches: int = 10,
    max_turns: int = 15,
    asks_to_think: bool = True,
    top_k: int = 0,
):
    """Let a model search while it reasons, and extract what helps from the passages.

    Reason-in-Documents is one more call for each search, with the passages in place of
    the authors' web pages. A query in a thought is searched, too. The answer is in the
    last box that the model itself has written after its thoughts, whereas the authors'
    pattern takes everything between the first and the last box of a line. Sampling
    follows the evaluation's settings, not the authors'.

    Args:
        max_searches: number of searches for a question; the authors allow 5 on
            single-hop datasets.
        max_turns: number of replies of the model; all but the last have a query.
        asks_to_think: whether the prompt asks for steps, as the authors' does for all
            models but QwQ.
        top_k: number of passages to read from each search; 0 reads all.

    Raises:
        ValueError: there are no turns, and so no answers.
    """
    check_settings("search_o1", ("max_turns", max_turns, max_turns >= 1, "at least 1"))
    think = THINK if asks_to_think else ""
    slots = {"max_searches": max_searches, "think": think, "question": question.text}
    messages = _chat(TOOLS.format(**slots))
    transcript, replies, first = "", "", None
    queries: set[str] = set()
    for _ in range(max_turns):
        completion = yield Generate(
            messages, kit.thought_tokens, (END_QUERY,), continued=transcript
        )
        first, replies = first or completion, replies + completion.text
        query = _last_query(completion)
        if not query:
            break
        transcript += completion.text + END_QUERY
        if len(queries) >= max_searches or query in queries:
            notice = TOO_MANY if len(queries) >= max_searches else REPEATED
            transcript += f"\n{BEGIN_RESULT}\n{notice}\n{END_RESULT}\n"
            continue
        queries.add(query)
        (passages,) = yield Search((query,), top_k or None)
        passages_text = kit.shorten(write_passages(passages))
        steps = last_steps(transcript)
        chat = _chat(READ.format(steps=steps, query=query, passages=passages_text))
        result = final_information(text_of((yield Generate(chat, kit.thought_tokens))))
        transcript += f"\n\n{BEGIN_RESULT}{result}{END_RESULT}\n\n"
    else:
        yield AT_LIMIT
    answer = boxed(text_of(first, replies))
    return None if answer is None else TEXT.sub(r"\1", answer)


def final_information(reply: str) -> str:
    """Return what a reply has found in the passages; line feeds are deleted.

    Args:
        reply: reply of Reason-in-Documents. Its mark begins a line, which need not be
            the first.
    """
    _, mark, information = reply.rpartition(MARK)
    return information.replace("\n", "").strip("`").strip() if mark else NO_INFORMATION


def last_steps(transcript: str) -> str:
    """Return the numbered lines of a transcript that Reason-in-Documents is shown.

    If there are more than four, only the first, the last three, and those with a query
    or a result are shown.
    """
    lines = transcript.replace("\n\n", "\n").split("\n")
    step_lines: list[str] = []
    for i, line in enumerate(lines):
        is_search = BEGIN_QUERY in line or BEGIN_RESULT in line
        if len(lines) <= 4 or i == 0 or i >= len(lines) - 3 or is_search:
            step_lines.append(f"Step {i + 1}: {line}")
        elif step_lines[-1] != "...":
            step_lines.append("...")
    return "\n\n".join(step_lines)


def _last_query(completion: Completion) -> str | None:
    """Return the query that ends a reply; None if there is none, or it is not closed.

    A reply whose `stop` is "" ended by itself, and makes no search.
    """
    _, tag, query = completion.text.rpartition(BEGIN_QUERY)
    is_closed = completion.end == STOPPED and completion.stop != ""
    return query.strip() if tag and is_closed else None


def _chat(text: str) -> Messages:
    return [{"role": "user", "content": text}]

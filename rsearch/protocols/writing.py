"""Let a model write observations from retrieved passages, for the policy to read.

ReaRAG's RAG engine answers the query from all passages (arXiv 2503.21729, section 3.3
and the prompt of its appendix B). R1-Searcher's online search reads pages one by one
until a summary is not empty (evaluation/eval_search_online.py of its public code).
"""

import re
from collections.abc import Sequence

from rsearch.protocols.base import fill_fields
from rsearch.types import (
    GenerateFn,
    Messages,
    Passage,
    SearchFn,
    copy_search_attributes,
)

PAGE_SUMMARY = "page_summary"
PROMPTS = {
    "context_only": (
        "#Context\n{passages}\n\n#Instruction\nAnswer the query based on the given "
        "Context. **Do not provide answer from your own knowledge!!**.\n"
        "Query: {query}\nResponse:"
    ),
    "unless_comparison": (
        "#Context\n{passages}\n\n#Instruction\nIf the Question is comparison type, do "
        "not refer the given Context, else, answer the Question based on the given "
        "Context.\nQuestion: {query}\nResponse:"
    ),
    PAGE_SUMMARY: (
        "## Task Description:\nGiven the search query and the content of the searched "
        "webpage.\nYour task is to extract information from the webpage content that "
        "is relevant to the search query and return a summary paragraph.\n\n"
        "## **Guidelines**:\n(1) The extracted content should be relevant to the "
        "query.\n(2) The form of the extracted content **must be a summary paragraph** "
        "rather than a direct answer to the query.\n(3) You **must extract content "
        "according to this webpage**. If the webpage content is unrelated to the "
        "query, no extraction is required.\n\n## Output Format:\n[Exacted Content]: If "
        "the webpage content contains information related to the query, output the "
        "relevant summary paragraph (not a direct answer to the query); if not, output "
        '"None".\n\n## Inputs:\n[Search Query]\n{query}\n\n[Webpage Content]\n'
        "{passages}\n\n## Output:\n"
    ),
}
"""The writer's prompts: of ReaRAG's code, of its paper's time, and of R1-Searcher.

The last asks about one passage at a time, with a mark that its authors misspelt.
"""

SUMMARY_MARK = re.compile(r"\[Ex(?:tr)?acted Content\]:?")
NO_SUMMARY = "none"  # the summary of a page that says nothing about the query


def writing_messages(
    query: str, passages: Sequence[Passage], *, prompt: str
) -> Messages:
    """Return the chat that asks for an observation.

    Args:
        query: query that was searched.
        passages: passages that were found, best first; blank lines separate them.
        prompt: a key of PROMPTS.
    """
    text = "\n\n".join(p.contents.strip() for p in passages)
    content = fill_fields(PROMPTS[prompt], query=query, passages=text)
    return [{"role": "user", "content": content}]


def with_written_observations(
    search: SearchFn, write: GenerateFn, *, prompt: str = "context_only"
) -> SearchFn:
    """Return a SearchFn that gives one passage per query, written from those found.

    The passage has no title: its contents begin with an empty line, and its id names
    the passages that it was written from. All queries of a call are searched and
    written in one batch, equal queries only once; summaries of pages are written in one
    batch per rank, as long as some query has no summary. If the search or the writer
    fails, the result is None, which ends a rollout as a tool error. If nothing is
    found, the writer is not called and nothing is shown; nothing is shown either if no
    page says anything about the query.

    Args:
        search: finds passages.
        write: the model that writes, told to answer only from the passages.
        prompt: a key of PROMPTS.
    """

    def observe(*columns):  # queries, and their questions if search takes these
        # Two questions may send the same query to two corpora.
        rows = list(zip(*columns, strict=True))
        unique = list(dict.fromkeys(rows))
        passages = search(*([row[i] for row in unique] for i in range(len(columns))))
        hits = dict(zip(unique, passages, strict=True))
        results = {row: hits[row] for row in unique if not hits[row]}
        is_by_page = prompt == PAGE_SUMMARY
        # {row: the passages that the writer is shown in one chat, then in the next}
        queues = {
            row: [(page,) for page in pages] if is_by_page else [pages]
            for row, pages in hits.items()
            if pages
        }
        while pending := [row for row in queues if row not in results]:
            batches = [queues[row].pop(0) for row in pending]
            pairs = zip(pending, batches, strict=True)
            chats = [writing_messages(r[0], batch, prompt=prompt) for r, batch in pairs]
            for row, batch, reply in zip(pending, batches, write(chats), strict=True):
                text = summary_of(reply) if reply and is_by_page else reply
                if text is None:
                    results[row] = None
                elif text or not is_by_page:
                    results[row] = _written_passage(text, batch)
                elif not queues[row]:
                    results[row] = ()
        return [results[row] for row in rows]

    return copy_search_attributes(search, observe)


def summary_of(reply: str) -> str:
    """Return the summary in a reply to the prompt for pages; "" if there is none."""
    summary = SUMMARY_MARK.split(reply)[-1].strip()
    return "" if summary.strip(" .\"'*").lower() == NO_SUMMARY else summary


def _written_passage(text, passages):
    """Return the text as the only passage, with the score of the best one."""
    name = "written from " + ", ".join(p.id for p in passages)
    return (Passage(name, f"\n{text.strip()}", passages[0].score),)

"""ReaRAG's RAG engine: passages are retrieved, and a model writes what they say.

The observation that the policy reads is then an answer in sentences instead of the
passages themselves (arXiv 2503.21729, section 3.3 and the prompt of its appendix B).
"""

import re
from collections.abc import Sequence

from rsearch.types import GenerateFn, Messages, Passage, SearchFn

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
}
"""The writer's prompts: that of ReaRAG's code, and that of its paper's time."""

FIELDS = re.compile(r"\{(passages|query)\}")


def writing_messages(
    query: str, passages: Sequence[Passage], *, prompt: str
) -> Messages:
    """Return the chat that asks for an observation.

    Args:
        query: that was searched.
        passages: that were found, best first; a blank line stands between two.
        prompt: a key of PROMPTS.
    """
    values = {
        "query": query,
        "passages": "\n\n".join(p.contents.strip() for p in passages),
    }
    # In one go: a passage that holds "{query}" stays as it is.
    content = FIELDS.sub(lambda field: values[field[1]], PROMPTS[prompt])
    return [{"role": "user", "content": content}]


def write_observations(
    search: SearchFn, write: GenerateFn, *, prompt: str = "context_only"
) -> SearchFn:
    """Return a SearchFn with one passage a query, written from those retrieved.

    The passage has no title: its contents begin with an empty line, and its id names
    the passages that it was written from. All queries of a call are searched and
    written in one batch, equal ones once. Where the search or the writer failed, the
    result is None, which ends a rollout as a tool error; where nothing is found, the
    writer is not asked and nothing is shown.

    Args:
        search: finds passages.
        write: the model, told to answer from them alone.
        prompt: a key of PROMPTS.
    """
    if prompt not in PROMPTS:
        raise ValueError(f"{prompt=}: must be one of {', '.join(PROMPTS)}")

    def observe(*columns):  # queries, and the questions that ask where search wants it
        # Two questions may ask one query of two corpora.
        rows = list(zip(*columns, strict=True))
        unique = list(dict.fromkeys(rows))
        passages = search(*([row[i] for row in unique] for i in range(len(columns))))
        hits = dict(zip(unique, passages, strict=True))
        answerable = [row for row in unique if hits[row]]
        chats = [writing_messages(r[0], hits[r], prompt=prompt) for r in answerable]
        replies = write(chats) if chats else []
        results = {row: hits[row] for row in unique if not hits[row]}
        for row, reply in zip(answerable, replies, strict=True):
            results[row] = None if reply is None else _observed(reply, hits[row])
        return [results[row] for row in rows]

    observe.wants_question_ids = getattr(search, "wants_question_ids", False)
    return observe


def _observed(reply, passages):
    """Return the reply as the only passage, with the score of the best one."""
    name = "written from " + ", ".join(p.id for p in passages)
    return (Passage(name, f"\n{reply.strip()}", passages[0].score),)

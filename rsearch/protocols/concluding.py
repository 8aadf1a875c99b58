"""ReaRAG's prompt to conclude a rollout with a short answer."""

from rsearch.protocols.base import fill_fields
from rsearch.types import Messages

SHORT_ANSWER = (
    "The Reference Answer is the final answer to the question. It's the final "
    "deterministic answer, your task is to give concise version of it. Only give me "
    "the short answer and do not output any other words.\n[Question]\n{question}\n"
    "[Reference answer]\n{reference}\nOnly give me the short answer and do not output "
    "any other words. For yes, or no answer, only answer it short. Give the shortest "
    "answer possible."
)
"""ReaRAG's P_ans, from its appendix B."""


def finish_messages(question: str, reference: str) -> Messages:
    """Return the chat that asks for the short version of finish(reference)."""
    content = fill_fields(SHORT_ANSWER, question=question, reference=reference)
    return [{"role": "user", "content": content}]

"""An evaluation method: search, answer, and search again with the first answer.

A method is a generator. It yields requests (Search, Generate, or a list of them),
receives their results, and returns the answer. All questions' generators run together,
so that their requests are batched. The question it receives has no golden answers.
"""

from rsearch.llm.requests import Search
from rsearch.methods.base import ask_chat
from rsearch.methods.reading import rag_messages


def search_twice(question, kit, *, rounds=2):
    """Answer a question in `rounds` rounds of one search each."""
    answer = ""
    for _ in range(rounds):
        (passages,) = yield Search((f"{answer} {question.text}".strip(),))
        chat = rag_messages(kit, question.text, passages)
        answer = (yield from ask_chat(chat, kit.answer_tokens)) or ""
    return answer or None

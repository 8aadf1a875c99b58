"""Methods that search again with what the model has written."""

from rsearch.llm.requests import Search
from rsearch.methods.base import Kit, ask_chat
from rsearch.methods.reading import rag_messages
from rsearch.types import Question

ANSWER_FIRST, QUESTION_FIRST = "answer_first", "question_first"


def iter_retgen(
    question: Question,
    kit: Kit,
    *,
    rounds: int = 3,
    query_order: str = ANSWER_FIRST,
    top_k: int = 0,
):
    """Search with the last answer and the question, and answer again.

    Iter-RetGen (Shao et al., arXiv 2305.15294): y_t follows from the question and
    retrieve(y_{t-1} and question), whose passages replace those before. One round is
    `rag`.

    Args:
        question: that is answered.
        kit: of the evaluation.
        rounds: T, searches and answers.
        query_order: "answer_first" as in the paper; "question_first" as in FlashRAG.
        top_k: passages of each search that are shown; 0 is all that it returns.
    """
    answer = ""
    for _ in range(rounds):
        words = [answer or "", question.text]
        if query_order == QUESTION_FIRST:
            words.reverse()
        query = " ".join(filter(None, words))
        (passages,) = yield Search((query,), top_k or None)
        messages = rag_messages(kit, question.text, passages)
        answer = yield from ask_chat(messages, kit.answer_tokens)
    return answer

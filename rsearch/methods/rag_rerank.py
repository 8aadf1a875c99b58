"""Show the passages that the model itself finds relevant.

RankRAG (Yu et al., arXiv 2407.02485) tunes one model to rank passages by P("True") and
then to answer; here the model is not tuned, and says Yes or No.
"""

import numpy as np

from rsearch.llm.requests import Score, Search
from rsearch.methods.base import Kit, ask_chat, check_settings
from rsearch.methods.reading import rag_messages, shown_passages
from rsearch.protocols import plain
from rsearch.types import Question

JUDGE = plain.reword(
    plain.DIRECT,
    user="{passages}\n\nQuestion: {question}\nDoes the document help to answer the "
    "question? Only say Yes or No.",
)


def rag_rerank(question: Question, kit: Kit, *, candidates: int = 0, top_k: int = 0):
    """Rank passages by the log-odds of Yes against No, and show the first ones.

    Args:
        candidates: number of passages to rank; 0 ranks all that the search returns.
        top_k: number of these passages to show; 0 shows all.

    Raises:
        ValueError: a setting is negative, or `top_k` is more than the number of
            passages to rank.
    """
    num_ranked = candidates or kit.top_k
    check_settings(
        "rag_rerank",
        ("candidates", candidates, candidates >= 0, "0 or above"),
        ("top_k", top_k, 0 <= top_k <= num_ranked, f"0 to {num_ranked} candidates"),
    )
    (passages,) = yield Search((question.text,), candidates or None)
    texts = [shown_passages(kit, (passage,)) for passage in passages]
    chats = [plain.messages_with_passages(JUDGE, question.text, x) for x in texts]
    words = "Yes", "No"
    scores = yield [Score(chat, word) for chat in chats for word in words]
    logp = np.array([s.logp.sum() for s in scores]).reshape(len(chats), len(words))
    best = np.argsort(logp[:, 1] - logp[:, 0], kind="stable")[: top_k or None]
    messages = rag_messages(kit, question.text, [passages[i] for i in best])
    return (yield from ask_chat(messages, kit.answer_tokens))

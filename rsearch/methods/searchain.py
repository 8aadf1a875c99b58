"""Verify a chain of queries: SearChain (Xu et al., arXiv 2304.14732)."""

import re

from rsearch.llm.requests import Search
from rsearch.methods.base import AT_LIMIT, Kit, ask_chat, check_settings, few_shot
from rsearch.methods.reading import rag_messages, shown_passages
from rsearch.text.normalize import normalize_squad
from rsearch.types import Messages, Question

# The authors' words; the examples are ours.
CONSTRUCT = (
    'Construct a global reasoning chain for this complex [Question]: "{question}" You '
    "should generate a query to the search engine based on what you already know at "
    "each step of the reasoning chain, starting with [Query]. If you know the answer "
    "for [Query], generate it starting with [Answer]. You can try to generate the "
    "final answer for the [Question] by referring to the [Query]-[Answer] pairs, "
    "starting "
    "with [Final Content]. If you don't know the answer, generate a query to search "
    "engine based on what you already know and do not know, starting with [Unsolved "
    "Query].\nFor example:\n{examples}\n\n[Question]: {question}"
)
FEEDBACK = (
    'According to this Reference, the answer for "{query}" should be "{answer}", you '
    "can {verb} your answer based on the Reference and continue constructing the "
    "reasoning chain to give the final answer for [Question]: {question}\nReference: "
    "{reference}"
)
QUERY = re.compile(r"\[(unsolved )?query[^\]\n]*\]:?(.*)", re.IGNORECASE)
ANSWER = re.compile(r"\[answer[^\]\n]*\]:?(.*)", re.IGNORECASE)
FINAL, CONCLUSION = "[Final Content]", "answer is"


def searchain(question: Question, kit: Kit, *, rounds: int = 5, min_score: float = 0.0):
    """Let a model write a chain of queries, and correct or complete it from passages.

    Each query that is new or unsolved is searched, and a reader answers it from the
    best passage. An unsolved query is completed with that answer. An answer that does
    not contain the reader's is corrected if the passage is relevant. Then the model
    writes its chain anew. The prompt has two worked examples. `rag`'s reader replaces
    the authors' trained one, and a passage's score their reader's score. A query is new
    unless it was searched in the same words; the authors use a classifier of
    duplicates.

    Args:
        rounds: number of chains that are written, at most.
        min_score: a passage whose score is above this may correct an answer. The
            authors' 1.5 is on their reader's scale: choose a value for your retriever
            on training questions. 0 admits all passages of positive score.

    Raises:
        ValueError: there are no rounds, and so no answers.
    """
    check_settings("searchain", ("rounds", rounds, rounds >= 1, "at least 1"))
    examples, searched_queries = few_shot("searchain"), set()
    text = CONSTRUCT.format(question=question.text, examples=examples)
    messages: Messages = [{"role": "user", "content": text}]
    answer = None
    for turn in range(1, rounds + 1):
        chain = (yield from ask_chat(messages, kit.thought_tokens)) or ""
        answer, feedback = final_answer(chain), None
        queries = read_chain(chain)
        if queries and turn == rounds:
            yield AT_LIMIT
            break
        for query, is_unsolved, claim in queries:
            if normalize_squad(query) in searched_queries and not is_unsolved:
                continue
            searched_queries.add(normalize_squad(query))
            (passages,) = yield Search((query,), 1)
            if not (passages and (is_unsolved or (passages[0].score or 0) > min_score)):
                continue
            chat = rag_messages(kit, query, passages)
            reader_answer = yield from ask_chat(chat, kit.answer_tokens)
            if reader_answer and (
                is_unsolved
                or normalize_squad(reader_answer) not in normalize_squad(claim)
            ):
                feedback = FEEDBACK.format(
                    query=query,
                    answer=reader_answer,
                    verb="give" if is_unsolved else "change",
                    question=question.text,
                    reference=shown_passages(kit, passages),
                )
                break
        if feedback is None:
            break
        messages = [
            *messages,
            {"role": "assistant", "content": chain},
            {"role": "user", "content": feedback},
        ]
    return answer


def read_chain(chain: str) -> list[tuple[str, bool, str]]:
    """Return the queries of a chain: (query, whether it is unsolved, its answer).

    The answer is the next one in the chain, or "".
    """
    lines = chain.splitlines()
    queries = []
    for i, line in enumerate(lines):
        match = QUERY.search(line)
        if match is not None and match[2].strip():
            answers = filter(None, map(ANSWER.search, lines[i + 1 :]))
            first_answer = next(answers, None)
            claim = first_answer[1].strip() if first_answer else ""
            queries.append((match[2].strip(), match[1] is not None, claim))
    return queries


def final_answer(chain: str) -> str | None:
    """Return what follows the last "answer is" in a chain's final content."""
    _, mark, content = chain.rpartition(FINAL)
    _, phrase, answer = content.rpartition(CONCLUSION)
    if not (mark and phrase):
        return None
    line = answer.removeprefix(":").strip().partition("\n")[0]
    return line.strip().removesuffix(".") or None

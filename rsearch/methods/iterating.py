"""Methods that search again with what the model has written."""

import difflib
import re
from collections.abc import Sequence
from typing import Literal

from rsearch.llm.requests import Generate, Search
from rsearch.methods.base import (
    AT_LIMIT,
    Kit,
    Note,
    ask_chat,
    check_settings,
    few_shot,
    text_of,
)
from rsearch.methods.reading import rag_messages, shown_passages, text_messages
from rsearch.text.sentences import has_first_sentence, sentences
from rsearch.types import Passage, Question

# IRCoT's rules, as in its authors' code.
CONCLUSION = re.compile(r".* answer is:? (.*)", re.IGNORECASE)
REASONING = re.compile(r"thus[ ,]|so[ ,]|that is,|therefore|hence", re.IGNORECASE)
SUM = re.compile(r"\d [+-] \d([\d,.]*\d)? = \d")
_QUESTION_WORDS = "who what when where why which how does is"
QUESTION_WORDS = frozenset(_QUESTION_WORDS.split())
MIN_SIMILARITY = 0.9  # least similarity of titles and texts of the same passage
MAX_WORDS, MAX_SHOWN_WORDS = 600, 350  # of a collected passage, and of its shown part
MAX_TITLE_CHARS = 200  # characters that are compared


def iter_retgen(
    question: Question,
    kit: Kit,
    *,
    rounds: int = 3,
    query_order: Literal["answer_first", "question_first"] = "answer_first",
    top_k: int = 0,
):
    """Search with the last answer and the question, and answer again.

    Iter-RetGen (Shao et al., arXiv 2305.15294): y_t is the answer to the question given
    retrieve(y_{t-1} and question), whose passages replace the previous ones. One round
    is `rag`.

    Args:
        rounds: T, the number of searches and answers.
        query_order: "answer_first" as in the paper; "question_first" as in FlashRAG.
        top_k: number of passages to show from each search; 0 shows all.

    Raises:
        ValueError: there are no rounds, and so no answers.
    """
    check_settings("iter_retgen", ("rounds", rounds, rounds >= 1, "at least 1"))
    answer = ""
    for _ in range(rounds):
        words = [answer or "", question.text]
        if query_order == "question_first":
            words.reverse()
        query = " ".join(filter(None, words))
        (passages,) = yield Search((query,), top_k or None)
        messages = rag_messages(kit, question.text, passages)
        answer = yield from ask_chat(messages, kit.answer_tokens)
    return answer


def ircot(
    question: Question,
    kit: Kit,
    *,
    rounds: int = 10,
    answers: Literal["reader", "chain"] = "reader",
    max_passages: int = 15,
    drops_question_words: bool = True,
    top_k: int = 0,
):
    """Search with each sentence of a chain of thought, and read what was collected.

    IRCoT (Trivedi et al., arXiv 2212.10509), with its authors' rules and 4 examples of
    ours in place of their 20. A chain ends with "... answer is", with an empty
    sentence, or after its rounds. `rag`'s reader then reads the passages of all
    searches, those of each search cut to the budget of passages. With 0 rounds, these
    are the passages of one search for the question.
    It notes, unless the rounds ended the chain, whether it ended with a conclusion.
    FlashRAG's port cuts thoughts at every full stop, searches once more at the end, and
    has no reader.

    Args:
        rounds: number of sentences of the chain, at most.
        answers: "reader" asks the reader; "chain" takes the answer that the chain's
            last sentence states, if any.
        max_passages: number of passages to collect, at most.
        drops_question_words: whether words such as who and is are left out of queries.
        top_k: number of passages to collect from each search; 0 collects all.
    """
    collection: list[Passage] = []
    shown_texts: list[str] = []  # of each search's new passages, for the reader
    context, chain, end = [few_shot("ircot") + "\n"], [], ""
    query = question.text
    for num_searches in range(max(rounds, 1)):
        words = [w for w in query.split() if w.lower() not in QUESTION_WORDS]
        short_query = " ".join(words) if drops_question_words else ""
        (passages,) = yield Search((short_query or query,), top_k or None)
        num_before = len(collection)
        for passage in passages:
            if len(collection) < max_passages and _is_new(passage, collection):
                collection.append(passage)
        new_passages = collection[num_before:]
        if answers == "reader":
            shown_texts.append(shown_passages(kit, new_passages, first=num_before + 1))
        if num_searches == rounds:
            break
        context += filter(None, [kit.shorten(_write_paragraphs(new_passages))])
        thoughts = " ".join(["A:", *chain])
        prompt = "\n\n".join([*context, f"Q: {question.text}\n{thoughts}"])
        completion = yield Generate(
            prompt, kit.thought_tokens, stop=("\n",), is_enough=has_first_sentence
        )
        sentence = next(iter(sentences(completion.text)), "")
        chain.append(sentence)
        # A sentence within a thought concludes nothing.
        end = min(sentence, text_of(completion, " ".join(chain)), key=len)
        if not sentence or CONCLUSION.match(end):
            yield Note("chain_concluded", bool(sentence))
            break
        factual_sentences = [x for x in chain if not is_reasoning(x)]
        query = factual_sentences[-1] if factual_sentences else question.text
    else:
        yield AT_LIMIT
    if answers == "chain":
        return stated_answer(end)
    messages = text_messages(kit, question.text, "\n".join(filter(None, shown_texts)))
    return (yield from ask_chat(messages, kit.answer_tokens))


def stated_answer(sentence: str) -> str | None:
    """Return the answer that a sentence of a chain states, without its full stop."""
    match = CONCLUSION.match(sentence)
    return match[1].removesuffix(".") if match else None


def is_reasoning(sentence: str) -> bool:
    """Return whether a sentence of a chain is a conclusion, and so makes no query."""
    return bool(REASONING.match(sentence) or SUM.search(sentence))


def _is_new(passage: Passage, collection: Sequence[Passage]) -> bool:
    """Return whether a passage is short enough, and similar to no collected one.

    Titles are compared by characters and texts by words, which bounds the time.
    """
    words = passage.text.split()
    if len(words) > MAX_WORDS:
        return False

    def are_similar(sequence, other):
        if sequence == other:
            return True
        matcher = difflib.SequenceMatcher(None, sequence, other, autojunk=False)
        bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
        return all(bound() >= MIN_SIMILARITY for bound in bounds)

    return not any(
        are_similar(passage.title[:MAX_TITLE_CHARS], other.title[:MAX_TITLE_CHARS])
        and are_similar(words, other.text.split())
        for other in collection
    )


def _write_paragraphs(passages: Sequence[Passage]) -> str:
    """Return passages in the format of IRCoT's examples."""
    return "\n\n".join(
        f"Wikipedia Title: {p.title}\n{' '.join(p.text.split()[:MAX_SHOWN_WORDS])}"
        for p in passages
    )

"""Choose between candidates by their summaries: SuRe (Kim et al., arXiv 2404.13081)."""

import re
from collections.abc import Sequence

from rsearch.llm.requests import Search
from rsearch.methods.base import Kit, ask_chat, ask_chats
from rsearch.types import Messages, Passage, Question

# The authors' words.
CANDIDATES = (
    "Below are {count} passages related to the question at the end. After reading the "
    "passages, provide two correct candidates for the answer to the question at the "
    "end. Each answer should be in the form: (a) xx, (b) yy, and should not exceed 3 "
    "words for each candidate.\n\n{passages}\n\nQuestion:\n{question}\n\nAnswer:"
)
DONE_MARK = "[DONE]"
SUMMARY = (
    "{passages}\n\nYour job is to act as a professional writer. You will write a "
    "good-quality passage that can support the given prediction about the question "
    "only based on the information in the provided supporting passages.\n\nNow, let's "
    f"start. After you write, please write {DONE_MARK} to indicate you are done. Do "
    'not write a prefix (e.g., "Response:") while writing a passage.\n\nQuestion: '
    "{question}\nChoices: {choices}\nPrediction: {prediction}\nPassage:"
)
VALID = (
    "Question:\n{question}\n\nPrediction:\n{prediction}\n\nPassage:\n{summary}\n\nDoes "
    "the passage correctly support the prediction? Choices: [True, False]. Answer:"
)
RANK = (
    "Question: Given the following passages, determine which one provides a more "
    "informative answer to the subsequent question.\n\nPassage 1:\n{first}\n\nPassage "
    "2:\n{second}\n\nTarget Question:\n{question}\n\nYour Task:\nIdentify which "
    "passage (Passage 1 or Passage 2) is more relevant and informative to answer the "
    "question at hand. Choices: [Passage 1, Passage 2].\n\nAnswer:"
)
VERDICT = re.compile(r"\b(not true|untrue|true|false)\b", re.IGNORECASE)
CHOICE = re.compile(r"\bpassage ([12])\b", re.IGNORECASE)


def sure(question: Question, kit: Kit, *, top_k: int = 0):
    """Summarise the passages for each of two candidates, and compare the summaries.

    The score of a candidate is v + r. v is 1 if its summary supports it. r is 1 if the
    model prefers its summary to the other in both orders, and one half for each if the
    orders disagree. The first candidate wins a tie; a candidate without a rival wins.
    "Passage 1." with its full stop is a choice, as in the authors' code for open
    models.

    Args:
        top_k: number of passages to read (10 in the paper); 0 reads all that the search
            returns.
    """
    (passages,) = yield Search((question.text,), top_k or None)
    slots = {
        "question": question.text,
        "passages": kit.shorten(_write_passages(passages)),
    }
    chat = _chat(CANDIDATES, slots, count=len(passages))
    candidates = read_candidates((yield from ask_chat(chat, kit.thought_tokens)))[:2]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    choices = [f"({letter}) {x}" for letter, x in zip("ab", candidates, strict=True)]
    slots["choices"] = " ".join(choices)
    chats = [_chat(SUMMARY, slots, prediction=choice) for choice in choices]
    summaries = yield from ask_chats(chats, kit.thought_tokens, (DONE_MARK,))
    a, b = (summary or "" for summary in summaries)
    chats = [
        _chat(VALID, slots, prediction=candidate, summary=summary)
        for candidate, summary in zip(candidates, (a, b), strict=True)
    ]
    chats += [_chat(RANK, slots, first=a, second=b)]
    chats += [_chat(RANK, slots, first=b, second=a)]
    replies = yield from ask_chats(chats, kit.answer_tokens)
    return candidates[preferred_candidate(*(reply or "" for reply in replies))]


def read_candidates(reply: str | None) -> list[str]:
    """Return the candidates after (a), (b), ..., each once.

    Without an (a), the whole reply is one candidate, as in the authors' code, and its
    commas stay.
    """
    pieces = [reply or ""]
    for letter in "abcd":
        head, mark, tail = pieces[-1].partition(f"({letter})")
        if not mark:
            break
        pieces[-1:] = [tail] if letter == "a" else [head, tail]
    return list(dict.fromkeys(filter(None, (text.strip(" \n,.") for text in pieces))))


def preferred_candidate(
    valid_a: str, valid_b: str, order_ab: str, order_ba: str
) -> int:
    """Return 0 or 1, the candidate with the higher score; 0 in a tie.

    Args:
        valid_a, valid_b: replies on whether a candidate's summary supports it.
        order_ab, order_ba: replies on which summary is better; in the second, the
            summaries have changed places. A reply that names none or both is ignored.
    """
    lead = _is_true(valid_a) - _is_true(valid_b)
    votes = set()
    for reply, signs in ((order_ab, (1, -1)), (order_ba, (-1, 1))):
        choices = set(CHOICE.findall(reply))
        if len(choices) == 1:
            votes.add(signs[int(choices.pop()) - 1])
    if len(votes) == 1:
        lead += votes.pop()
    return 1 if lead < 0 else 0


def _is_true(reply: str) -> bool:
    verdict = VERDICT.search(reply)
    return verdict is not None and verdict[1].lower() == "true"


def _write_passages(passages: Sequence[Passage]) -> str:
    return "\n\n".join(
        f"Passage #{i} Title: {p.title}\nPassage #{i} Text: {p.text}"
        for i, p in enumerate(passages, 1)
    )


def _chat(template: str, slots: dict, **extra_slots: object) -> Messages:
    return [{"role": "user", "content": template.format(**slots, **extra_slots)}]

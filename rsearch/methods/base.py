"""Methods are programs: generators that yield requests and return an answer.

    def twice(question, kit, *, rounds=2):
        '''Search again with the first answer.'''
        answer = ""
        for _ in range(rounds):
            (passages,) = yield Search((f"{answer} {question.text}".strip(),))
            chat = rag_messages(kit, question.text, passages)
            answer = yield from ask_chat(chat, kit.answer_tokens)
        return answer

One runner drives the programs of all questions at once (`runner.py`). A program may
yield one request, or a list of them that do not wait for each other; it is sent the
result of each. It returns its answer, None where what the model wrote holds none.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Generator, Sequence, Set
from typing import Any

import numpy as np

from rsearch.llm.requests import CUT, Completion, Generate, Request
from rsearch.llm.thoughts import answer_after_thoughts
from rsearch.types import Messages, ParagraphsOf, Question

Program = Callable[..., Generator[Request | Sequence[Request], Any, str | None]]
"""(question, kit, **settings) -> the generator that answers one question.

The question has no golden answers: a program cannot look at them.
"""


@dataclasses.dataclass(frozen=True)
class Kit:
    """The budgets, words and functions that all programs of an evaluation share.

    Attributes:
        answer_tokens: of a reply that is an answer alone.
        thought_tokens: of a reply that reasons, or of a step of reasoning.
        top_k: passages that a search returns, at most.
        shorten: (text of passages) -> as much of its beginning as a model is shown.
        fits: whether a chat is no longer than a prompt may be.
        embed: (questions) -> [n, D] vectors of length 1.
        embed_passages: (title, line feed, text of each) -> [n, D] vectors of length 1.
        paragraphs_of: (question) -> (contents, whether it is gold) of each of its
            paragraphs; ValueError where it has none.
        paragraphs: () -> those of all questions of the evaluation, each once.
        normalize: answers before they are compared with golden ones, a key of
            `rsearch.text.normalize.NORMALIZERS`.
        direct: replaces the words that ask without passages, where it is not ""; holds
            {question}.
        rag: replaces those that ask with passages; holds {question} and {passages}.
    """

    answer_tokens: int
    thought_tokens: int
    top_k: int
    shorten: Callable[[str], str]
    fits: Callable[[Messages], bool]
    embed: Callable[[Sequence[str]], np.ndarray]
    embed_passages: Callable[[Sequence[str]], np.ndarray]
    paragraphs_of: ParagraphsOf
    paragraphs: Callable[[], Sequence[str]]
    normalize: str
    direct: str | None = None
    rag: str | None = None


@functools.cache
def few_shot(method: str) -> str:
    """Return the worked examples that lead a method's raw-text prompt.

    They are ours, after questions of the training splits of HotpotQA and
    2WikiMultiHopQA, and no question that is evaluated is among them.

    Args:
        method: that the file in `examples` is named after.
    """
    folder = pathlib.Path(__file__).parent / "examples"
    return (folder / f"{method}.txt").read_text("utf-8").rstrip("\n")


def check_settings(method: str, *settings: tuple[str, Any, bool, str]) -> None:
    """Refuse a setting of a method that is out of its range.

    Args:
        method: its name.
        settings: (name, value, whether it is in its range, the range in words) each.

    Raises:
        ValueError: names the first that is not.
    """
    for name, value, is_right, words in settings:
        if not is_right:
            raise ValueError(
                f"config.eval.methods: {method}: {name} = {value}: must be {words}"
            )


def vector_of(question: Question, labelled: Set[str], kit: Kit) -> np.ndarray:
    """Return the [D] vector of a question.

    Args:
        question: that is answered.
        labelled: texts of the training questions.
        kit: of the evaluation.

    Raises:
        ValueError: it is one of the training questions: its label is known.
    """
    if question.text in labelled:
        raise ValueError(
            f"config.eval.methods: question {question.id} is among those that are "
            "labelled: expected labels of training questions"
        )
    return kit.embed((question.text,))[0]


def ask_chat(
    messages: Messages, max_tokens: int
) -> Generator[Generate, Completion, str | None]:
    """Ask a chat, and return the answer in the reply; see `answer_of`.

    Args:
        messages: the chat.
        max_tokens: of the reply.
    """
    return answer_of((yield Generate(messages, max_tokens)))


def ask_chats(
    chats: Sequence[Messages], max_tokens: int, stop: tuple[str, ...] = ()
) -> Generator[list[Generate], list[Completion], list[str | None]]:
    """Ask several chats at once; see `ask_chat`.

    Args:
        chats: any number.
        max_tokens: of each reply.
        stop: strings that end a reply.
    """
    completions = yield [Generate(messages, max_tokens, stop) for messages in chats]
    return [answer_of(completion) for completion in completions]


def answer_of(completion: Completion) -> str | None:
    """Return the answer in a reply; None where there is none.

    What a model thinks before it answers is no part of it; see `llm.thoughts`.
    """
    answer, _ = answer_after_thoughts(completion.text, is_cut=completion.end == CUT)
    return None if answer is None else answer.strip()

"""Methods are programs: generators that yield requests and return an answer.

    def twice(question, kit, *, rounds=2):
        '''Search again with the first answer.'''
        answer = None
        for _ in range(rounds):
            (passages,) = yield Search((f"{answer or ''} {question.text}".strip(),))
            chat = rag_messages(kit, question.text, passages)
            answer = yield from ask_chat(chat, kit.answer_tokens)
        return answer

One runner drives the programs of all questions together (`runner.py`). A program yields
one request, or a list of requests that do not depend on each other, and is sent the
result of each. It returns its answer, None if the model's text holds none, or
Outcome.TRUNCATED if a budget other than the model's tokens ended it before an answer.
It also yields AT_LIMIT if its limit of rounds or searches stops a model that would go
on, and may yield a Note about a step, which the results summarise.

Before anything is answered, each program is run up to its first requests, for one
question; see `table.check_methods`.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Generator, Sequence, Set
from typing import Any

import numpy as np

from rsearch.llm.requests import (
    Completion,
    Generate,
    Request,
    Search,
    check_request,
)
from rsearch.llm.thoughts import text_after_thoughts
from rsearch.types import Messages, ParagraphsOf, Question


@dataclasses.dataclass(frozen=True)
class Note:
    """A number that describes a step of a method.

    Attributes:
        name: what the number is. The results have the distribution of each name's
            numbers.
        value: a finite number.

    Raises:
        ValueError: the name is empty or no text, or the number is not finite.
    """

    name: str
    value: float

    def __post_init__(self):
        """Refuse notes that cannot be summarised."""
        try:
            is_finite = math.isfinite(self.value)
        except (TypeError, OverflowError):
            is_finite = False
        if not isinstance(self.name, str) or not self.name or not is_finite:
            raise ValueError(f"{self!r}: expected a name and a finite number")


Program = Callable[..., Generator[Request | Note | Sequence[Request], Any, str | None]]
"""(question, kit, **settings) -> the generator that answers one question.

The question comes without its golden answers, so that a program cannot see them.
"""
AT_LIMIT: list[Request] = []
"""No requests: this very list tells the runner that a limit has ended the program."""


@dataclasses.dataclass(frozen=True)
class Kit:
    """The budgets, wording and functions that all programs of an evaluation share.

    Attributes:
        answer_tokens: token budget of a reply that is only an answer.
        thought_tokens: token budget of a reply that reasons, or of a step of reasoning.
        top_k: number of passages that a search returns, at most.
        shorten: (text of passages) -> the beginning of it that a model is shown.
        fits: (chat) -> whether it is short enough for a prompt.
        embed: (questions) -> [n, D] vectors of length 1.
        embed_passages: (texts, each a title, a line feed and a text) -> [n, D] vectors
            of length 1.
        paragraphs_of: (question) -> (contents, whether it is gold) of each of its
            paragraphs; ValueError if it has none.
        paragraphs: () -> the paragraphs of all questions of the evaluation, each once.
        normalize: how answers are normalised before they are compared with golden ones;
            a key of `rsearch.text.normalize.NORMALIZERS`.
        direct: replaces the messages that ask without passages; holds {question}. None
            keeps them.
        rag: replaces the messages that ask with passages; holds {question} and
            {passages}. None keeps them.
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
    """Return the worked examples that begin a method's raw-text prompt.

    We wrote them after questions of the training splits of HotpotQA and
    2WikiMultiHopQA. No evaluated question is among them.

    Args:
        method: name of the method, and of its file in `examples`.
    """
    folder = pathlib.Path(__file__).parent / "examples"
    return (folder / f"{method}.txt").read_text("utf-8").rstrip("\n")


def check_settings(method: str, *settings: tuple[str, Any, bool, str]) -> None:
    """Refuse a setting of a method that is out of its range.

    Args:
        settings: (name, value, whether it is in range, the range in words) of each.

    Raises:
        ValueError: a setting is out of range; names the first.
    """
    for name, value, is_in_range, words in settings:
        if not is_in_range:
            raise ValueError(
                f"config.eval.methods: {method}: {name} = {value}: must be {words}"
            )


class NotLoadedError(Exception):
    """Raised by functions of a Kit that need what only an evaluation loads."""


def check_requests(requests: Sequence[Any], kit: Kit) -> None:
    """Refuse what is no request, and searches for more passages than there are.

    Raises:
        ValueError: names what is yielded, or its field, and what would be right.
    """
    for request in requests:
        check_request(request)
        if isinstance(request, Search):
            check_top_k(request.top_k, kit)


def check_top_k(top_k: int | None, kit: Kit) -> None:
    """Refuse a number of passages per query that a search does not return.

    Raises:
        ValueError: names the number.
    """
    # A negative number would silently leave out the last passages.
    if top_k is not None and not 0 < top_k <= kit.top_k:
        raise ValueError(
            f"a method asks for {top_k} passages per query: expected 1 to "
            f"config.retrieval.top_k = {kit.top_k}"
        )


def check_unlabelled(questions: Sequence[Question], labelled: Set[str]) -> None:
    """Refuse questions whose label is known.

    Args:
        labelled: texts of the labelled training questions.

    Raises:
        ValueError: a question is one of them.
    """
    for question in questions:
        if question.text in labelled:
            raise ValueError(
                f"config.eval.methods: question {question.id} is among those that are "
                "labelled: expected labels of training questions"
            )


def vector_of(question: Question, labelled: Set[str], kit: Kit) -> np.ndarray:
    """Return the [D] vector of a question.

    Args:
        labelled: texts of the labelled training questions.

    Raises:
        ValueError: the question is a labelled one, whose label is known.
    """
    check_unlabelled((question,), labelled)
    return kit.embed((question.text,))[0]


def ask_chat(
    messages: Messages, max_tokens: int
) -> Generator[Generate, Completion, str | None]:
    """Send a chat, and return the answer in the reply; see `answer_of`."""
    return answer_of((yield Generate(messages, max_tokens)))


def ask_chats(
    chats: Sequence[Messages], max_tokens: int, stop: tuple[str, ...] = ()
) -> Generator[list[Generate], list[Completion], list[str | None]]:
    """Send several chats in one batch; see `ask_chat`."""
    completions = yield [Generate(messages, max_tokens, stop) for messages in chats]
    return [answer_of(completion) for completion in completions]


def answer_of(completion: Completion) -> str | None:
    """Return the answer in a reply, without its thoughts; None if there is none."""
    return text_of(completion).strip() or None


def text_of(completion: Completion, text: str | None = None) -> str:
    """Return the end of a reply after its thoughts; "" if it ends within one.

    A method that reads an answer in a model's text must read it here; see
    `llm.thoughts`.

    Args:
        completion: the reply, or one of several to raw texts that continue each other.
        text: the text of all of these; None takes that of the one reply.
    """
    # Without ids, the prompt's text lacks what the template adds.
    prompt = completion.prompt_text if len(completion.prompt_ids) else ""
    text = completion.text if text is None else text
    return text_after_thoughts(text, prompt=prompt) or ""

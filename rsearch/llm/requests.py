"""The requests of a method to a language model, and their results.

A backend answers many requests in one call but each by itself: no answer depends on the
other requests. See `local.LocalModel` and `remote_model.RemoteModel`.
"""

import codecs
import dataclasses
import itertools
import numbers
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rsearch.types import Messages, Params

STOPPED, CUT = "stopped", "cut"
PROMPT_RULE = 'a text, or a chat: a list of {"role": text, "content": text}'


@dataclasses.dataclass(frozen=True)
class TextWithMarkers:
    """A raw text with marks set by the program, which may be control tokens.

    Attributes:
        texts: text, mark, text, ... alternating, each encoded by itself. A text never
            becomes a control token; a mark that the tokenizer lacks is plain text.
    """

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt.

    Attributes:
        prompt: a chat, which the model's template formats, or a raw text.
        max_tokens: maximum length of the completion; a backend may have a lower limit.
        stop: strings that end the completion; it ends before the string.
        continued: what the assistant of a chat has written so far; not part of the
            completion.
        wants_logp: whether the tokens' log-probabilities are needed.
        is_enough: (text of the completion so far) -> whether the rest is not needed,
            whatever it is. A backend may then cut the completion there.
        left_out: share of its documents that the prompt has no room for; recorded, but
            not used by any backend.
        draw: numbers that identify the sample if completions are sampled: equal prompts
            with different numbers get samples of their own. () identifies none.
    """

    prompt: Messages | str | TextWithMarkers
    max_tokens: int
    stop: tuple[str, ...] = ()
    continued: str = ""
    wants_logp: bool = False
    is_enough: Callable[[str], bool] | None = None
    left_out: float = 0.0
    draw: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mix:
    """Continue several prompts with the same tokens, drawn from their mixture.

    The next token is the most likely one under sum_k weights[k] p(token | prompts[k],
    tokens so far), as in REPLUG (arXiv 2301.12652, equation 2), or a sample from that.

    Attributes:
        prompts: [K] chats or raw texts.
        weights: [K] positive numbers that sum to 1.
        draw: see `Generate`.
    """

    prompts: tuple[Messages | str, ...]
    weights: tuple[float, ...]
    max_tokens: int
    draw: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text written by a model.

    Attributes:
        text: the text, up to the stop string if one ended it.
        end: STOPPED if it ended at a stop string or the model ended it; CUT at its
            budget, or where `is_enough` held.
        tokens: the text in pieces, one per token, which concatenate to the text. Empty
            if the backend does not report them.
        logp: [tokens] float32 log-probability of each token at temperature 1, in nats;
            empty unless requested.
        prompt_ids, ids: [n] int32 tokens that were read and written; for a mixture,
            those of all its prompts were read. Empty if the backend does not report
            them.
        prompt_text: the prompt as it was read.
        stop: the string that ended it; "" if none did, None if the backend does not
            say.
        endpoint_tokens: (tokens of the prompt, tokens of the reply) that an endpoint
            reports, since it sends no ids; None if it reports none.
    """

    text: str
    end: str
    tokens: tuple[str, ...]
    logp: np.ndarray
    prompt_ids: np.ndarray
    ids: np.ndarray
    prompt_text: str
    stop: str | None = None
    endpoint_tokens: tuple[int, int] | None = (0, 0)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The result of a request that a backend could not answer.

    It says nothing about the model. A prompt that is too long gets None instead.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Score:
    """Ask for the log-probability of a text that follows another one.

    Attributes:
        prefix: a chat or a raw text; "" scores the text at the beginning.
        text: the text to score, at least one token.
        is_mark: whether the text may be control tokens; see `TextWithMarkers`.
    """

    prefix: Messages | str | TextWithMarkers
    text: str
    is_mark: bool = False


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The log-probabilities of a text.

    Attributes:
        tokens: [n] pieces of the text, one per token, which concatenate to the text.
        logp: [n] float32 log-probabilities, in nats.
        num_read: number of tokens that were read, including the prefix.
    """

    tokens: tuple[str, ...]
    logp: np.ndarray
    num_read: int


class Scorer(Protocol):
    """A model that scores texts, such as `local.LocalModel`."""

    def load(self, params: Params) -> None:
        """Use new parameters, if the model has any."""

    def score(self, requests: Sequence[Score]) -> list[TextScore | None]:
        """Score each text; None if it is too long."""


@dataclasses.dataclass(frozen=True)
class Search:
    """Ask for passages.

    Attributes:
        top_k: number of passages wanted per query; None takes what the search returns.
        question_id: id of the question that the search is for, set by the runner.
    """

    queries: tuple[str, ...]
    top_k: int | None = None
    question_id: str = ""


Request = Generate | Mix | Score | Search


def check_request(request: Any) -> None:
    """Refuse what a user's method must not yield: the wrong type, or a wrong field.

    Raises:
        ValueError: names what is yielded, or its field, and what would be right.
    """
    rules: tuple[tuple[str, bool, str], ...]
    max_tokens = getattr(request, "max_tokens", 0)
    is_count = isinstance(max_tokens, numbers.Integral) and max_tokens >= 0
    max_tokens_rule = ("max_tokens", is_count, "an integer >= 0")
    match request:
        case Search():
            is_number = isinstance(request.top_k, numbers.Integral | None)
            # Each character of a single text would be a query.
            rules = (
                ("queries", _is_texts(request.queries), "a tuple of texts"),
                ("top_k", is_number, "an integer, or None"),
            )
        case Generate():
            # Each character of a single text would end the completion.
            is_stop = _is_texts(request.stop) and all(request.stop)
            rules = (
                ("prompt", _is_prompt(request.prompt), PROMPT_RULE),
                max_tokens_rule,
                ("stop", is_stop, "a tuple of texts that are not empty"),
            )
        case Mix(prompts, weights):
            is_list = isinstance(prompts, list | tuple) and len(prompts) > 0
            is_prompts = is_list and all(map(_is_prompt, prompts))
            has_weights = is_prompts and np.shape(weights) == (len(prompts),)
            rules = (
                ("prompts", is_prompts, f"a tuple, each {PROMPT_RULE}"),
                ("weights", has_weights, "a number for each prompt"),
                max_tokens_rule,
            )
        case Score():
            rules = (
                ("prefix", _is_prompt(request.prefix), PROMPT_RULE),
                ("text", isinstance(request.text, str), "a text"),
            )
        case _:
            raise ValueError(
                f"the method yields {reprlib.repr(request)}: expected a request, "
                "such as Search or Generate, or a list of them"
            )
    for field, is_right, rule in rules:
        if not is_right:
            value = reprlib.repr(getattr(request, field))
            raise ValueError(
                f"the method yields a {type(request).__name__} with {field} = {value}: "
                f"must be {rule}"
            )


def _is_texts(value):
    return isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)


def _is_prompt(value):
    """Return whether a model can read this: a text, with marks or not, or a chat."""
    if isinstance(value, str | TextWithMarkers):
        return True
    return isinstance(value, list | tuple) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )


# Lists of (index of a request, its result), in the order of their completion: None if
# its prompt is too long, a Failure if the model could not be asked. Requests that are
# appended between two of these lists are answered, too.
Completions = Iterator[list[tuple[int, Completion | Failure | None]]]


def in_order(completions: Completions) -> list[Completion | Failure | None]:
    """Return all completions in the order of their requests."""
    pairs = itertools.chain.from_iterable(completions)
    return [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]


def answer_in_turns(requests: Sequence, answer_all: Callable) -> Completions:
    """Answer all requests together, then all that were appended meanwhile, and so on.

    Args:
        requests: the list, which may grow.
        answer_all: returns the results of several requests.
    """
    num = 0
    while new_requests := requests[num:]:
        yield list(enumerate(answer_all(new_requests), num))
        num += len(new_requests)


def token_pieces(token_bytes: Sequence[bytes]) -> tuple[str, ...]:
    """Return [n] pieces, one per token, that concatenate to the decoded text.

    A character made of several tokens belongs to the last of them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(raw) for raw in token_bytes]
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return tuple(pieces)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text before its first stop string, and that string, or "" if none."""
    matches = [(start, string) for string in stop if (start := text.find(string)) >= 0]
    start, string = min(matches, default=(len(text), ""))
    return text[:start], string


def cut_pieces(pieces: Sequence[str], size: int) -> tuple[str, ...]:
    """Return the pieces that make up the first `size` characters.

    Args:
        pieces: pieces of a text.
        size: number of characters; may exceed the length of the text.
    """
    first_pieces, num_chars = [], 0
    for text in pieces:
        if num_chars >= size:
            break
        first_pieces.append(text[: size - num_chars])
        num_chars += len(text)
    return tuple(first_pieces)

"""The requests of a method to a language model, and their results.

A backend answers many requests in one call, each on its own: what else is in the call
changes no answer. See `local.LocalModel` and `remote_model.RemoteModel`.
"""

import codecs
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rsearch.types import Messages, Params

STOPPED, CUT = "stopped", "cut"


@dataclasses.dataclass(frozen=True)
class Marked:
    """A raw text with marks of the program, which may be control tokens.

    Attributes:
        texts: a text, a mark, a text, ... in turn, each encoded on its own. No text
            becomes a control token; a mark that the tokenizer lacks is text.
    """

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt.

    Attributes:
        prompt: a chat, which the model's template writes, or a raw text.
        max_tokens: of the completion; a backend may have a lower limit.
        stop: strings that end the completion, which then ends before the string.
        continued: what the assistant of a chat has written so far; it is no part of the
            completion.
        wants_logp: whether the tokens' log-probabilities are needed.
        is_enough: (text of the completion so far) -> whether the rest is not needed,
            whatever follows. A backend may then cut the completion there.
        left_out: the share of its documents that the prompt has no room for; recorded,
            no backend reads it.
        draw: numbers that name the sample where completions are sampled: with other
            ones an equal prompt has a completion of its own. () is no name.
    """

    prompt: Messages | str | Marked
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

    The next token is the likeliest under sum_k weights[k] p(token | prompts[k], tokens
    so far), as REPLUG (arXiv 2301.12652, equation 2) has it, or a sample of that.

    Attributes:
        prompts: [K] chats or raw texts.
        weights: [K] positive numbers that add up to 1.
        max_tokens: of the completion.
        draw: see `Generate`.
    """

    prompts: tuple[Messages | str, ...]
    weights: tuple[float, ...]
    max_tokens: int
    draw: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """The text that a model has written.

    Attributes:
        text: before the stop string, if one ended it.
        end: STOPPED at a stop string or by the model itself; CUT at its budget,
            or where it was enough.
        tokens: the text in pieces, one of each token; they add up to it.
        logp: [tokens] float32 log-probability of each at temperature 1, in nats; empty
            unless it was asked for.
        prompt_ids, ids: [n] int32 tokens that were read and written; a mixture has read
            those of all its prompts. Empty where the backend does not say.
        prompt_text: as it was read.
        stop: the string that ended it; "" where none did, None where the backend does
            not say.
    """

    text: str
    end: str
    tokens: tuple[str, ...]
    logp: np.ndarray
    prompt_ids: np.ndarray
    ids: np.ndarray
    prompt_text: str
    stop: str | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The result of a request that a backend could not answer.

    It says nothing about the model. A prompt that is too long has None.

    Attributes:
        why: in few words.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class Score:
    """Ask for the log-probability of a text behind another one.

    Attributes:
        prefix: a chat, or a raw text; "" is the beginning of a text.
        text: one token of it at least.
        is_mark: whether it may be control tokens; see `Marked`.
    """

    prefix: Messages | str | Marked
    text: str
    is_mark: bool = False


@dataclasses.dataclass(frozen=True)
class Scored:
    """The log-probabilities of a text.

    Attributes:
        tokens: [n] pieces of the text, one of each token; they add up to it.
        logp: [n] float32 in nats.
        num_read: tokens that were read, the prefix among them.
    """

    tokens: tuple[str, ...]
    logp: np.ndarray
    num_read: int


class Scorer(Protocol):
    """A model that scores texts, such as `local.LocalModel`."""

    def load(self, params: Params) -> None:
        """Take new parameters, where it has any."""

    def score(self, requests: Sequence[Score]) -> list[Scored | None]:
        """Score each text; None where it is too long."""


@dataclasses.dataclass(frozen=True)
class Search:
    """Ask for passages.

    Attributes:
        queries: texts.
        top_k: passages of each that are wanted; None is as many as the search returns.
        question_id: of the question that asks, which the runner knows.
    """

    queries: tuple[str, ...]
    top_k: int | None = None
    question_id: str = ""


Request = Generate | Mix | Score | Search


def token_pieces(token_bytes: Sequence[bytes]) -> tuple[str, ...]:
    """Return the text in pieces, one of each token, that add up to the decoded whole.

    A character of several tokens belongs to the last of them.

    Args:
        token_bytes: [n] of the tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(raw) for raw in token_bytes]
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return tuple(pieces)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop string in it, and that string or "".

    Args:
        text: that a model has written.
        stop: strings that end it.
    """
    ends = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    at, string = min(ends, default=(len(text), ""))
    return text[:at], string


def cut_pieces(pieces: Sequence[str], size: int) -> tuple[str, ...]:
    """Return the pieces of the first `size` characters.

    Args:
        pieces: of a text.
        size: any number of characters.
    """
    cut, total = [], 0
    for text in pieces:
        if total >= size:
            break
        cut.append(text[: size - total])
        total += len(text)
    return tuple(cut)

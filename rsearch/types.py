"""The nouns: questions, passages, actions, segments, rollouts, groups.

Everything here is a frozen value. Token ids are the truth of a rollout; text is a view
decoded from them and never the other way round.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

LINE_END = re.compile(r"\r\n?|\n")

Params = Any
"""A tree of arrays: the parameters of a network, as Flax nests them."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    metadata: Mapping = dataclasses.field(default_factory=dict)


ParagraphsOf = Callable[[Question], Sequence[tuple[str, bool]]]
"""(question) -> (contents, whether it is gold) of each of its paragraphs, in order."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """A retrieved, hostile text: its title is the first line of `contents`.

    Attributes:
        id: of the corpus or the service.
        contents: the title, a line feed and the text.
        score: of the search; None where a service gives none.
    """

    id: str
    contents: str
    score: float | None = 0.0

    @property
    def title(self) -> str:
        """Return the first line, as the corpus writes it (the quotes stay)."""
        return LINE_END.split(self.contents, maxsplit=1)[0]

    @property
    def text(self) -> str:
        """Return everything after the first line."""
        return "".join(LINE_END.split(self.contents, maxsplit=1)[1:])


SEARCH = "search"
"""The tool that retrieves passages: its arguments are queries, its data passages."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the policy has written.

    Attributes:
        name: of the tool.
        arguments: texts; of a search its queries.
    """

    name: str
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """The result of one call.

    Attributes:
        text: shown to the policy where its protocol has no form for the data.
        data: for protocols and programs; of a search the passages of each query,
            [queries] tuples of Passages, of any other tool a value of JSON.
        error: why the tool failed; the rollout then ends as a tool error, which says
            nothing about the policy. A wrong argument is no failure: it is answered
            with a text.
    """

    text: str = ""
    data: Any = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """A call that was executed, and its result."""

    call: ToolCall
    result: ToolResult


@dataclasses.dataclass(frozen=True)
class Answer:
    """The policy gave its answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Malformed:
    """The policy's turn holds no action that the protocol knows."""

    reason: str


Action = ToolCall | Answer | Malformed


def _anywhere(text: str) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Cut:
    """A piece of an observation that a budget may shorten.

    Attributes:
        text: in full.
        is_echo: the policy's own words, shown again: all of these together have the
            budget of the turn that wrote them. Any other piece has the observation's
            budget to itself.
        may_end: whether the shortened text can end here; JSON cannot within an escape.
    """

    text: str
    is_echo: bool = False
    may_end: Callable[[str], bool] = _anywhere


@dataclasses.dataclass(frozen=True)
class Observation:
    """The text that the policy is shown after an action, in three parts.

    Only `content` is cut to the observation budget, so that the closing tag in `after`
    always survives. All three are encoded as plain text: none can hold a control token.

    Attributes:
        before: the opening tag; "{turn}" in it stands for the turn's number, from 1.
        content: the result.
        after: the closing tag.
        pieces: the content in pieces, where more than its end is cut: a text stays
            whole, a Cut is cut on its own. Empty: the content is one piece.
    """

    before: str
    content: str
    after: str
    pieces: tuple[str | Cut, ...] = ()


class Source(enum.IntEnum):
    """The writer of a token. The loss mask is `source == POLICY` and nothing else."""

    PADDING = 0
    PROMPT = 1
    POLICY = 2
    SEARCH = 3


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive tokens from one source.

    Attributes:
        source: who wrote them.
        token_ids: [n] int32, exactly as sampled or spliced.
        logp: [n] float32, log-probability under the distribution sampled from; zeros
            where the policy did not write the token.
        text: the ids decoded, for people, parsers and rewards.
    """

    source: Source
    token_ids: np.ndarray
    logp: np.ndarray
    text: str


def unsampled_segment(source: Source, token_ids: np.ndarray, text: str) -> Segment:
    """Return a segment of tokens that no policy has sampled to learn from.

    Args:
        source, token_ids, text: as of Segment, whose log-probabilities are zeros.
    """
    return Segment(source, token_ids, np.zeros(len(token_ids), np.float32), text)


class Outcome(enum.StrEnum):
    """The end of a rollout. The two errors are no learning signal.

    Truncated means that a budget ended it: a search in the last turn, or a last turn
    that ran out of tokens. What had been said by then still counts as its answer where
    a protocol takes the whole reply for one.
    """

    ANSWERED = "answered"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    TOOL_ERROR = "tool_error"
    JUDGE_ERROR = "judge_error"

    @property
    def is_signal(self) -> bool:
        """False where the tools failed, which says nothing about the policy."""
        return self not in (Outcome.TOOL_ERROR, Outcome.JUDGE_ERROR)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled conversation, from its prompt to its end.

    Attributes:
        segments: append-only, in order; the first is the prompt.
        answer: the text of the Answer action, None where there was none.
        tool_uses: the calls that were executed, in order.
        outcome: how it ended.
        num_malformed: turns that held no valid action.
        num_scored: tokens that a model read to score texts, beside the segments.
        num_cut_observations: of its calls, how many results were cut to their budget.
        left_out: share of the documents of a prompt that it has no room for.
    """

    segments: tuple[Segment, ...]
    answer: str | None
    tool_uses: tuple[ToolUse, ...]
    outcome: Outcome
    _: dataclasses.KW_ONLY
    num_malformed: int = 0
    num_scored: int = 0
    num_cut_observations: int = 0
    left_out: float = 0.0

    @property
    def policy_texts(self) -> tuple[str, ...]:
        """Return [turns] texts that the policy wrote, turn by turn."""
        return tuple(s.text for s in self.segments if s.source == Source.POLICY)

    @property
    def searches(self) -> tuple[ToolUse, ...]:
        """Return the calls of the tool that retrieves passages, in order."""
        return tuple(use for use in self.tool_uses if use.call.name == SEARCH)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Return the passages of all searches, in order."""
        return tuple(p for s in self.searches for hits in s.result.data for p in hits)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all segments."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_policy_tokens(self) -> int:
        """Return the number of tokens that the policy wrote."""
        return sum(len(s.token_ids) for s in self.segments if s.source == Source.POLICY)


@dataclasses.dataclass(frozen=True)
class Group:
    """The rollouts of one question."""

    question: Question
    rollouts: tuple[Rollout, ...]


Messages = Sequence[Mapping[str, str]]
"""A chat: dicts with `role` and `content`."""

SearchFn = Callable[[Sequence[str]], list[tuple[Passage, ...] | None]]
"""(queries) -> passages for each, best first; None where that search failed.

Any such function is one; nothing can tell where it runs. Calls overlap where it has an
attribute `searches_at_once` above 1, and no others do. Where it has a true attribute
`wants_question_ids`, it takes (queries, ids of the questions that ask). An attribute
`read`, a ReadFn, serves the tool `open`.
"""


def copy_search_attributes(search: SearchFn, layer: SearchFn) -> SearchFn:
    """Copy the attributes that SearchFn names to a layer around a search; return it."""
    layer.searches_at_once = getattr(search, "searches_at_once", 1)
    layer.wants_question_ids = getattr(search, "wants_question_ids", False)
    layer.read = getattr(search, "read", None)
    return layer


Tool = Callable[[Sequence[ToolCall]], list[ToolResult]]
"""(calls) -> a result for each. A batch holds the calls of all paused rollouts."""

ReadFn = Callable[[Sequence[str]], list[Passage | None]]
"""(ids) -> the passage or page of each, in full; None where there is none."""

GenerateFn = Callable[[Sequence[Messages]], list[str | None]]
"""(chats) -> a reply to each; None where that call failed after its retries."""

RewardTerm = Callable[..., list[float]]
"""(question, rollouts, **settings) -> [G] floats; NaN where no judge could be asked."""

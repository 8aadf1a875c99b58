"""Basic types of the package: questions, passages, actions, segments, rollouts, groups.

All of them are immutable. Token ids are the ground truth of a rollout: text is only a
view decoded from them, never the other way round.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

LINE_END = re.compile(r"\r\n?|\n")

Params = Any
"""A pytree of arrays: the parameters of a network, nested as in Flax."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with all the answers that count as correct."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    metadata: Mapping = dataclasses.field(default_factory=dict)


ParagraphsOf = Callable[[Question], Sequence[tuple[str, bool]]]
"""(question) -> (contents, whether it is gold) for each of its paragraphs, in order."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """A retrieved text, not to be trusted; the first line of `contents` is its title.

    Attributes:
        id: its id in the corpus or at the retrieval service.
        contents: the title, a line feed and the text.
        score: its retrieval score; None where a service returns none.
    """

    id: str
    contents: str
    score: float | None = 0.0

    @property
    def title(self) -> str:
        """Return the first line as the corpus has it, including any quotes."""
        return LINE_END.split(self.contents, maxsplit=1)[0]

    @property
    def text(self) -> str:
        """Return everything after the first line."""
        return "".join(LINE_END.split(self.contents, maxsplit=1)[1:])


SEARCH = "search"
"""The tool that retrieves passages: queries are its arguments, passages its data."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call written by the policy.

    Attributes:
        arguments: texts; for a search, its queries.
    """

    name: str
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """The result of one call.

    Attributes:
        text: shown to the policy if its protocol has no format for the data.
        data: structured result, for protocols and programs. For a search, the passages
            of each query, as [queries] tuples of Passages; otherwise a JSON value.
        error: why the tool failed. The rollout then ends as a tool error, which says
            nothing about the policy. A wrong argument is not a failure: the tool
            answers it with a text.
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
    """The policy's turn contains no action that the protocol recognises."""

    reason: str


Action = ToolCall | Answer | Malformed


def _anywhere(text: str) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Cut:
    """A piece of an observation that may be cut to a token budget.

    Attributes:
        is_echo: whether it repeats the policy's own words. All echoes together have the
            budget of the turn that wrote them; any other piece has the observation
            budget to itself.
        may_end: (text) -> whether the cut text may end there; JSON must not end within
            an escape sequence.
    """

    text: str
    is_echo: bool = False
    may_end: Callable[[str], bool] = _anywhere


@dataclasses.dataclass(frozen=True)
class Observation:
    """The text shown to the policy after an action, in three parts.

    Only `content` is cut to the observation budget, so that the closing tag in `after`
    survives (unless `Limits.cuts_tags` is set). All three are encoded as plain text, so
    that none can contain a control token.

    Attributes:
        before: the opening tag, in which "{turn}" stands for the turn number, from 1.
        after: the closing tag.
        pieces: the content split into pieces, if not only its end may be cut: each Cut
            is cut separately, each str is kept. If empty, the content is one piece.
    """

    before: str
    content: str
    after: str
    pieces: tuple[str | Cut, ...] = ()


class Source(enum.IntEnum):
    """The origin of a token. The loss mask is `source == POLICY` and nothing else."""

    PADDING = 0
    PROMPT = 1
    POLICY = 2
    SEARCH = 3


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive tokens from one source.

    Attributes:
        token_ids: [n] int32, exactly as sampled or inserted.
        logp: [n] float32 log-probabilities under the distribution that was sampled
            from; zeros where the policy did not write the tokens.
        text: the decoded ids, for people, parsers and rewards.
    """

    source: Source
    token_ids: np.ndarray
    logp: np.ndarray
    text: str


def unsampled_segment(source: Source, token_ids: np.ndarray, text: str) -> Segment:
    """Return a segment without sampled log-probabilities: they are all zero."""
    return Segment(source, token_ids, np.zeros(len(token_ids), np.float32), text)


class Outcome(enum.StrEnum):
    """How a rollout ended. The two errors give no learning signal.

    TRUNCATED means that a budget ended it, for example a search in the last turn, or a
    last turn that ran out of tokens. If the protocol treats the whole reply as the
    answer, the text written so far still counts.
    """

    ANSWERED = "answered"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    TOOL_ERROR = "tool_error"
    JUDGE_ERROR = "judge_error"

    @property
    def is_signal(self) -> bool:
        """Return whether one can learn from it: neither a tool nor the judge failed."""
        return self not in (Outcome.TOOL_ERROR, Outcome.JUDGE_ERROR)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled conversation, from its prompt to its end.

    Attributes:
        segments: append-only and in order; the first is the prompt.
        answer: the text of the Answer action; None if there was none.
        tool_uses: the executed calls, in order.
        num_malformed: number of turns without a valid action.
        num_scored: tokens that a model read to score texts, in addition to `segments`.
        num_cut_observations: number of calls whose result was cut to its budget.
        left_out: share of the documents that did not fit into the prompt.
        is_cut: whether the last reply used up its budget of tokens. Its answer may be
            incomplete even if the outcome is ANSWERED.
        is_at_limit: whether it would have gone on, but had no rounds or searches left.
        notes: (name, number) of each note that a method made about a step; see
            `rsearch.methods.base.Note`.
        endpoint_tokens: (tokens of prompts, tokens of replies) that an endpoint
            reports, since `segments` have no ids of these. None if any report is
            missing.
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
    is_cut: bool = False
    is_at_limit: bool = False
    notes: tuple[tuple[str, float], ...] = ()
    endpoint_tokens: tuple[int, int] | None = (0, 0)

    @property
    def policy_texts(self) -> tuple[str, ...]:
        """Return [turns] texts that the policy wrote, one per turn."""
        return tuple(s.text for s in self.segments if s.source == Source.POLICY)

    @property
    def searches(self) -> tuple[ToolUse, ...]:
        """Return the executed searches, in order."""
        return tuple(use for use in self.tool_uses if use.call.name == SEARCH)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Return the passages found by all searches, in order."""
        return tuple(p for s in self.searches for hits in s.result.data for p in hits)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all segments."""
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
"""(queries) -> passages for each query, best first; None where that search failed.

Any function of this form will do; callers cannot tell where it runs. Calls may overlap
only if it has an attribute `searches_at_once` above 1. If its attribute
`wants_question_ids` is true, it is called with (queries, ids of the questions they are
for). An attribute `read`, a ReadFn, serves the tool `open`.
"""


def copy_search_attributes(search: SearchFn, layer: SearchFn) -> SearchFn:
    """Copy a search's SearchFn attributes to a layer around it; return the layer."""
    layer.searches_at_once = getattr(search, "searches_at_once", 1)
    layer.wants_question_ids = getattr(search, "wants_question_ids", False)
    layer.read = getattr(search, "read", None)
    return layer


def search_for(
    search: SearchFn, queries: Sequence[str], question_ids: Sequence[str]
) -> list[tuple[Passage, ...] | None]:
    """Search; pass question ids to a search that has a corpus for each question.

    Args:
        search: takes the ids if its attribute `wants_question_ids` is true.
        question_ids: for each query, the id of the question for which it is made.
    """
    if getattr(search, "wants_question_ids", False):
        return search(queries, question_ids)
    return search(queries)


Tool = Callable[[Sequence[ToolCall]], list[ToolResult]]
"""(calls) -> a result for each. One batch holds the calls of all waiting rollouts."""

ReadFn = Callable[[Sequence[str]], list[Passage | None]]
"""(ids) -> the full passage or page of each id; None where there is none."""

GenerateFn = Callable[[Sequence[Messages]], list[str | None]]
"""(chats) -> a reply to each; None where that call failed after its retries."""

RewardTerm = Callable[..., list[float]]
"""(question, rollouts, **settings) -> [G] floats; NaN where the judge failed."""

"""The host's half of a rollout: parse what was written, search, show what was found.

A conversation is an append-only list of segments of token ids. Nothing here turns text
of the policy back into ids; text is decoded for the parser, and only observations,
which are new text, are encoded, each on its own.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols.base import Protocol
from rsearch.types import (
    Answer,
    Lookup,
    Malformed,
    Messages,
    Observation,
    Outcome,
    Rollout,
    Search,
    SearchFn,
    Segment,
    Source,
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of one rollout, in turns and tokens.

    Attributes:
        max_searches: turns after which the engine answers; one more turn follows, in
            which it does not.
        max_prompt_tokens: a longer prompt is an error, never cut.
        max_turn_tokens: tokens the policy may write a turn.
        max_observation_tokens: retrieved content is cut to this; the tags around it
            stay.
    """

    max_searches: int
    max_prompt_tokens: int
    max_turn_tokens: int
    max_observation_tokens: int


def markup_tokens(tokenizer: Tokenizer, protocol: Protocol) -> tuple[int, int]:
    """Tokens of an observation's tags, and of the invalid-action message."""
    frame = protocol.observe([""], [()])
    tags = sum(len(tokenizer.encode(t)) for t in (frame.before, frame.after))
    return tags, len(tokenizer.encode(protocol.invalid_message or ""))


def shown_tokens(limits: Limits, markup: tuple[int, int]) -> int:
    """Tokens that a conversation reads at most between two turns."""
    tags, message = markup
    return max(limits.max_observation_tokens + tags, message)


def conversation_tokens(limits: Limits, markup: tuple[int, int]) -> int:
    """Tokens of the longest conversation these limits allow."""
    turns = (limits.max_searches + 1) * limits.max_turn_tokens
    shown = limits.max_searches * shown_tokens(limits, markup)
    return limits.max_prompt_tokens + turns + shown


class Conversation:
    """One rollout in the making."""

    def __init__(self, prompt: np.ndarray, text: str):
        self.segments = [_given(Source.PROMPT, prompt, text)]
        self.searches: list[Lookup] = []
        self.answer: str | None = None
        self.outcome: Outcome | None = None
        self.num_malformed = 0

    def rollout(self) -> Rollout:
        """What has become of it; it must have ended."""
        assert self.outcome is not None
        return Rollout(
            tuple(self.segments),
            self.answer,
            tuple(self.searches),
            self.outcome,
            self.num_malformed,
        )


class Host:
    """Opens conversations and answers the policy's turns."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        protocol: Protocol,
        search: SearchFn,
        limits: Limits,
    ):
        self.tokenizer, self.protocol = tokenizer, protocol
        self.search, self.limits = search, limits
        message = protocol.invalid_message
        self._invalid = None if message is None else tokenizer.encode(message)
        self.shown_tokens = shown_tokens(limits, markup_tokens(tokenizer, protocol))

    def prompt(self, messages: Messages) -> np.ndarray:
        """[n] int32 ids of the chat that opens a rollout."""
        return self.tokenizer.encode_prompt(messages)

    def open(self, prompt: np.ndarray) -> Conversation:
        """A conversation that has its prompt."""
        return Conversation(prompt, self.tokenizer.decode(prompt))

    def answer_turns(
        self,
        wave: Mapping[int, Conversation],
        written: Mapping[int, tuple[np.ndarray, np.ndarray]],
        *,
        final: bool,
    ) -> dict[int, np.ndarray]:
        """Parses what each conversation's policy wrote; all searches go in one batch.

        Args:
            wave: row -> conversation.
            written: row -> ([n] int32 ids, [n] float32 log-probabilities) of its turn.
            final: whether this was the last turn: nobody searches any more.

        Returns:
            Row -> [n] ids that it reads next; the other rows of `written` have ended.
        """
        asked: dict[int, Search] = {}
        shown: dict[int, np.ndarray] = {}
        for i, (ids, logp) in written.items():
            conversation = wave[i]
            text = self.tokenizer.decode(self._without_eos(ids))
            conversation.segments.append(Segment(Source.POLICY, ids, logp, text))
            is_cut = self._is_cut(ids, text)
            match self.protocol.parse(text):
                case Answer(answer):
                    conversation.answer = answer
                    conversation.outcome = (
                        Outcome.TRUNCATED if is_cut else Outcome.ANSWERED
                    )
                case Search() as action if not final:
                    asked[i] = action
                case Search():
                    conversation.outcome = Outcome.TRUNCATED
                case Malformed():
                    conversation.num_malformed += 1
                    if final or self._invalid is None:
                        conversation.outcome = (
                            Outcome.TRUNCATED if is_cut else Outcome.MALFORMED
                        )
                    else:
                        shown[i] = self._invalid
                        message = self.protocol.invalid_message
                        conversation.segments.append(
                            _given(Source.SEARCH, self._invalid, message)
                        )
        shown.update(self._look_up(wave, asked))
        return shown

    def _without_eos(self, ids: np.ndarray) -> np.ndarray:
        """The end of text ends a turn and is no part of what it says."""
        return ids[:-1] if len(ids) and ids[-1] in self.tokenizer.eos_ids else ids

    def _is_cut(self, ids: np.ndarray, text: str) -> bool:
        """Whether the turn's budget ended it, and not the policy."""
        is_full = len(ids) >= self.limits.max_turn_tokens
        stopped = any(stop in text for stop in self.protocol.stop_strings)
        return is_full and not stopped and ids[-1] not in self.tokenizer.eos_ids

    def _look_up(self, wave, asked: dict[int, Search]) -> dict[int, np.ndarray]:
        """Searches for all that asked, in one batch; writes down what was found."""
        if not asked:
            return {}
        queries = [q for action in asked.values() for q in action.queries]
        found = self.search(queries)
        assert len(found) == len(queries), f"{len(found)} results of {queries}"
        shown, start = {}, 0
        for i, action in asked.items():
            passages = found[start : start + len(action.queries)]
            start += len(action.queries)
            if any(p is None for p in passages):
                wave[i].outcome = Outcome.TOOL_ERROR
                continue
            wave[i].searches.append(Lookup(action.queries, tuple(passages)))
            observation = self.protocol.observe(action.queries, passages)
            shown[i] = self._encode(observation)
            text = self.tokenizer.decode(shown[i])
            wave[i].segments.append(_given(Source.SEARCH, shown[i], text))
        return shown

    def _encode(self, observation: Observation) -> np.ndarray:
        """[n] ids of an observation whose content is cut to its budget."""
        limit = self.limits.max_observation_tokens
        before, content, after = (
            self.tokenizer.encode(text)
            for text in (observation.before, observation.content, observation.after)
        )
        return np.concatenate([before, content[:limit], after])


def _given(source: Source, ids: np.ndarray, text: str) -> Segment:
    """A segment that the policy did not write."""
    return Segment(source, ids, np.zeros(len(ids), np.float32), text)

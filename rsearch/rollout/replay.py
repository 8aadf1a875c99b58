"""Replay known turns as the rollout of a policy, without the device.

A demonstration is turned into token ids by the same host as a policy's turns, so that
demonstrations and rollouts have the same form.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rsearch.rollout.conversation import Host
from rsearch.types import (
    Answer,
    Malformed,
    Messages,
    Outcome,
    Question,
    Rollout,
    Source,
    ToolCall,
)


class FailedSearchError(ValueError):
    """A search failed, which says nothing about the demonstration that made it."""


def replay(
    host: Host,
    question: Question,
    turns: Sequence[str],
    *,
    messages: Messages | None = None,
    context_turns: int = 0,
    observations: Sequence[str] | None = None,
    may_end_in_search: bool = False,
) -> Rollout:
    """Return the rollout of a policy that writes these turns: a demonstration.

    Args:
        host: answers the searches.
        question: opens the conversation.
        turns: text of each turn, up to its action. A turn begins and, if no stop string
            ends it, ends as in a chat: see `Host.start_of` and `Host.end_of`.
        messages: the chat that opens the conversation; None means the protocol's.
        context_turns: number of first turns that are not learnt from: their segments
            become part of the prompt.
        observations: [turns - 1] contents to show after each turn but the last, in
            place of the host's results.
        may_end_in_search: whether the last turn may search. Its results are then not
            part of the rollout, whose outcome is TRUNCATED.

    Raises:
        FailedSearchError: a search fails.
        ValueError: the prompt or a turn is too long, a turn is malformed or continues
            beyond its action, there are too many or too few turns, no turn remains to
            learn from, or there is not exactly one observation for each turn but the
            last.
    """

    def refuse(reason: str, kind: type[ValueError] = ValueError) -> ValueError:
        return kind(f"demonstration of question {question.id}: {reason}")

    limits = host.limits
    prompt = host.prompt(messages or host.protocol.messages(question.text))
    if len(prompt) > limits.max_prompt_tokens:
        raise refuse(
            f"prompt of {len(prompt)} tokens, more than rollout.max_prompt_tokens = "
            f"{limits.max_prompt_tokens}"
        )
    if context_turns and not 0 < context_turns < len(turns):
        raise refuse(
            f"{context_turns} turns of context leave none of {len(turns)} to learn from"
        )
    if observations is not None and len(observations) != len(turns) - 1:
        raise refuse(f"{len(observations)} observations for {len(turns)} turns")
    conversations = {0: host.open(prompt, question.id)}
    for number, text in enumerate(turns):
        if conversations[0].outcome is not None:
            raise refuse(f"ended with turn {number} of {len(turns)}")
        action = host.protocol.parse(text)
        if isinstance(action, Malformed):
            raise refuse(f"turn {number + 1} has no action: {text!r}")
        try:
            # The turns of a rollout already begin as the template does.
            start = host.start_of(number)
            ids = _turn_ids(host, start + text.removeprefix(start), action)
        except ValueError as error:
            raise refuse(f"turn {number + 1} {error}") from None
        turn = {0: (ids, np.zeros(len(ids), np.float32))}
        is_recorded = observations is not None and number < len(observations)
        host.answer_turns(
            conversations,
            turn,
            final=number == limits.num_turns - 1,
            recorded={0: observations[number]} if is_recorded else None,
        )
        if conversations[0].outcome == Outcome.TOOL_ERROR:
            raise refuse(f"the search of turn {number + 1} failed", FailedSearchError)
    if conversations[0].outcome is None and turns and may_end_in_search:
        conversations[0].outcome = Outcome.TRUNCATED
        del conversations[0].segments[-1]
    if conversations[0].outcome is None:
        raise refuse(f"{len(turns)} turns do not end the conversation")
    return _with_context(conversations[0].rollout(), context_turns)


def _turn_ids(host: Host, text: str, action: ToolCall | Answer) -> np.ndarray:
    """Return [n] int32 ids of a demonstration's turn that takes this action.

    Raises:
        ValueError: the turn continues after its stop string, or is too long.
    """
    stops = [s for s in host.protocol.stop_strings if s in text]
    end = min((text.index(s) + len(s) for s in stops), default=len(text))
    if end < len(text):
        raise ValueError(f"continues beyond its action: {text[end:]!r}")
    ids = host.tokenizer.encode(text)
    if not stops:
        ids = np.append(ids, np.int32(host.end_of(action)))
    if len(ids) > host.limits.max_turn_tokens:
        raise ValueError(
            f"is too long: {len(ids)} tokens, more than rollout.max_turn_tokens = "
            f"{host.limits.max_turn_tokens}"
        )
    return ids


def _with_context(rollout: Rollout, context_turns: int) -> Rollout:
    """Return the rollout with its first turns as prompt, so that none is learnt."""
    segments, num_remaining = [], context_turns
    for segment in rollout.segments:
        if segment.source == Source.POLICY and num_remaining:
            segment = dataclasses.replace(segment, source=Source.PROMPT)
            num_remaining -= 1
        segments.append(segment)
    return dataclasses.replace(rollout, segments=tuple(segments))

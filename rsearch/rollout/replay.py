"""Replay known turns as the rollout of a policy, without the device.

A demonstration is turned into token ids by the same host as a policy's turns, so that
demonstrations and rollouts have the same form.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rsearch.rollout.conversation import Conversation, Host
from rsearch.types import (
    Malformed,
    Messages,
    Outcome,
    Question,
    Rollout,
    Source,
)


class FailedSearchError(ValueError):
    """A search failed, which says nothing about the demonstration that made it."""


class Script(NamedTuple):
    """A conversation whose turns are known.

    Attributes:
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
    """

    question: Question
    turns: Sequence[str]
    messages: Messages | None = None
    context_turns: int = 0
    observations: Sequence[str] | None = None
    may_end_in_search: bool = False


def replay(
    host: Host, question: Question, turns: Sequence[str], **settings: Any
) -> Rollout:
    """Return the rollout of a policy that writes these turns: a demonstration.

    Args:
        host: answers the searches.
        question, turns, settings: fields of a Script.

    Raises:
        FailedSearchError: a search fails.
        ValueError: the prompt or a turn is too long, a turn is malformed or continues
            beyond its action, there are too many or too few turns, no turn remains to
            learn from, or there is not exactly one observation for each turn but the
            last.
    """
    (result,) = replay_together(host, [Script(question, turns, **settings)])
    if isinstance(result, ValueError):
        raise result
    return result


def replay_together(
    host: Host, scripts: Sequence[Script]
) -> list[Rollout | ValueError]:
    """Return each script's rollout, or the error that `replay` raises for it.

    What all of them search for in one turn is searched in one batch.
    """
    conversations: dict[int, Conversation] = {}
    errors: dict[int, ValueError] = {}

    def refuse(i, reason, kind=ValueError):
        errors[i] = kind(
            f"demonstration of question {scripts[i].question.id}: {reason}"
        )

    for i, script in enumerate(scripts):
        try:
            conversations[i] = _open(host, script)
        except ValueError as error:
            refuse(i, error)
    for number in range(max((len(script.turns) for script in scripts), default=0)):
        turns, recorded = {}, {}
        for i, script in enumerate(scripts):
            if i in errors or number >= len(script.turns):
                continue
            try:
                ids = _turn_ids(host, script, conversations[i], number)
            except ValueError as error:
                refuse(i, error)
                continue
            turns[i] = ids, np.zeros(len(ids), np.float32)
            if script.observations is not None and number < len(script.observations):
                recorded[i] = script.observations[number]
        is_final = number == host.limits.num_turns - 1
        host.answer_turns(conversations, turns, final=is_final, recorded=recorded)
        for i in turns:
            if conversations[i].outcome == Outcome.TOOL_ERROR:
                reason = f"the search of turn {number + 1} failed"
                refuse(i, reason, FailedSearchError)
    rollouts = {}
    for i in conversations.keys() - errors.keys():
        try:
            rollouts[i] = _rollout(scripts[i], conversations[i])
        except ValueError as error:
            refuse(i, error)
    return [errors.get(i) or rollouts[i] for i in range(len(scripts))]


def _open(host: Host, script: Script) -> Conversation:
    """Return a script's conversation before its first turn.

    Raises:
        ValueError: the prompt is too long, or turns and context do not fit together.
    """
    num_turns, limit = len(script.turns), host.limits.max_prompt_tokens
    question = script.question
    prompt = host.prompt(script.messages or host.protocol.messages(question.text))
    if len(prompt) > limit:
        raise ValueError(
            f"prompt of {len(prompt)} tokens, more than rollout.max_prompt_tokens = "
            f"{limit}"
        )
    if script.context_turns and not 0 < script.context_turns < num_turns:
        raise ValueError(
            f"{script.context_turns} turns of context leave none of {num_turns} to "
            "learn from"
        )
    observations = script.observations
    if observations is not None and len(observations) != num_turns - 1:
        raise ValueError(f"{len(observations)} observations for {num_turns} turns")
    return host.open(prompt, question.id)


def _turn_ids(
    host: Host, script: Script, conversation: Conversation, number: int
) -> np.ndarray:
    """Return [n] int32 ids of a script's turn with this number, from 0.

    Raises:
        ValueError: the conversation has ended, or the turn has no action, continues
            after its stop string, or is too long.
    """
    text = script.turns[number]
    if conversation.outcome is not None:
        raise ValueError(f"ended with turn {number} of {len(script.turns)}")
    action = host.protocol.parse(text)
    if isinstance(action, Malformed):
        raise ValueError(f"turn {number + 1} has no action: {text!r}")
    # The turns of a rollout already begin as the template does.
    start = host.start_of(number)
    text = start + text.removeprefix(start)
    stops = [s for s in host.protocol.stop_strings if s in text]
    end = min((text.index(s) + len(s) for s in stops), default=len(text))
    if end < len(text):
        raise ValueError(
            f"turn {number + 1} continues beyond its action: {text[end:]!r}"
        )
    ids = host.tokenizer.encode(text)
    if not stops:
        ids = np.append(ids, np.int32(host.end_of(action)))
    if len(ids) > host.limits.max_turn_tokens:
        raise ValueError(
            f"turn {number + 1} is too long: {len(ids)} tokens, more than "
            f"rollout.max_turn_tokens = {host.limits.max_turn_tokens}"
        )
    return ids


def _rollout(script: Script, conversation: Conversation) -> Rollout:
    """Return the rollout of a conversation after the script's last turn.

    Raises:
        ValueError: the turns do not end the conversation.
    """
    if conversation.outcome is None and script.turns and script.may_end_in_search:
        conversation.outcome = Outcome.TRUNCATED
        del conversation.segments[-1]
    if conversation.outcome is None:
        raise ValueError(f"{len(script.turns)} turns do not end the conversation")
    return _with_context(conversation.rollout(), script.context_turns)


def _with_context(rollout: Rollout, context_turns: int) -> Rollout:
    """Return the rollout with its first turns as prompt, so that none is learnt."""
    segments, num_remaining = [], context_turns
    for segment in rollout.segments:
        if segment.source == Source.POLICY and num_remaining:
            segment = dataclasses.replace(segment, source=Source.PROMPT)
            num_remaining -= 1
        segments.append(segment)
    return dataclasses.replace(rollout, segments=tuple(segments))

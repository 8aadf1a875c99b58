"""Converse in a trained protocol, such as Search-R1's, as a program."""

from typing import Literal

from rsearch.llm.requests import CUT, Completion, Generate, Search
from rsearch.methods.base import Kit
from rsearch.protocols.base import Protocol
from rsearch.protocols.table import PROTOCOLS
from rsearch.types import (
    SEARCH,
    Answer,
    Cut,
    Malformed,
    Observation,
    Question,
    ToolCall,
    ToolResult,
)


def converse(
    question: Question,
    kit: Kit,
    *,
    protocol: Literal[*PROTOCOLS] = "search_r1",
    max_searches: int = 4,
):
    """Follow a protocol, so that a model at an endpoint can use it.

    Turns, stop strings and observations are as in `rollout.conversation`, with four
    differences. Observations are plain text in the model's turn, even if the template
    has a role for them. config.protocol has no effect. Search is the only tool. A
    conversation whose last turn ends without an answer counts as malformed.

    Args:
        question: question to answer.
        kit: kit of the evaluation.
        protocol: name of the protocol.
        max_searches: number of turns whose queries are searched; one more turn follows.
    """
    plays = PROTOCOLS[protocol]
    messages, transcript = plays.messages(question.text), plays.opening
    for number in range(1, max(0, max_searches) + 2):
        completion = yield _next_turn(plays, messages, transcript, kit.thought_tokens)
        turn = _with_stop(plays, completion)
        transcript += turn
        action = plays.parse(turn)
        if isinstance(action, Answer):
            return action.text
        if number > max_searches:
            return None
        if isinstance(action, ToolCall) and action.name == SEARCH:
            call = ToolCall(SEARCH, action.arguments[: plays.max_queries])
            passages = yield Search(call.arguments)
            observation = plays.observe(call, ToolResult(data=tuple(passages)))
            transcript += _shown(observation, number, kit)
        elif plays.invalid_message is None:
            return None
        else:
            transcript += plays.invalid_message
    return None


def _next_turn(plays: Protocol, messages, transcript, max_tokens) -> Generate:
    if plays.is_chat:
        return Generate(messages, max_tokens, plays.stop_strings, continued=transcript)
    text = "\n".join(message["content"] for message in messages)
    return Generate(text + transcript, max_tokens, plays.stop_strings)


def _with_stop(plays: Protocol, completion: Completion) -> str:
    """Return a turn with the stop string that ended it.

    If the backend does not name it, it is the one that makes the turn a valid action.
    """
    text, stop = completion.text, completion.stop
    if stop is None and completion.end != CUT:
        actions = ((stop, plays.parse(text + stop)) for stop in plays.stop_strings)
        stop = next((s for s, a in actions if not isinstance(a, Malformed)), "")
    return text + (stop or "")


def _shown(observation: Observation, number: int, kit: Kit) -> str:
    """Return the text of an observation, with its content cut to the budget."""
    pieces = observation.pieces or (Cut(observation.content),)
    texts = [_cut(text, kit) if isinstance(text, Cut) else text for text in pieces]
    before = observation.before.replace("{turn}", str(number))
    return before + "".join(texts) + observation.after


def _cut(cut: Cut, kit: Kit) -> str:
    """Return the shown part of a text; the model's own text is shown in full."""
    shown = cut.text if cut.is_echo else kit.shorten(cut.text)
    if len(shown) < len(cut.text):
        while shown and not cut.may_end(shown):
            shown = shown[:-1]
    return shown

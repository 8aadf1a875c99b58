"""Converse in a trained protocol, such as Search-R1's, as a program."""

from typing import Literal

from rsearch.llm.requests import CUT, Completion, Generate, Search
from rsearch.methods.base import AT_LIMIT, Kit
from rsearch.protocols.base import Protocol
from rsearch.protocols.table import PROTOCOLS
from rsearch.types import (
    SEARCH,
    Answer,
    Cut,
    Malformed,
    Observation,
    Outcome,
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

    Turns, stop strings and observations are as in `rollout.conversation`, with three
    differences. Observations are plain text in the model's turn, even if the template
    has a role for them. config.protocol has no effect. Search is the only tool.

    Args:
        max_searches: number of turns whose queries are searched; one more turn follows.
    """
    rules = PROTOCOLS[protocol]
    messages, transcript = rules.messages(question.text), rules.opening
    for number in range(1, max(0, max_searches) + 2):
        completion = yield _next_turn(rules, messages, transcript, kit.thought_tokens)
        turn = _with_stop(rules, completion)
        transcript += turn
        action = rules.parse(turn)
        if isinstance(action, Answer):
            return action.text
        is_search = isinstance(action, ToolCall) and action.name == SEARCH
        if is_search and number > max_searches:
            yield AT_LIMIT
            return Outcome.TRUNCATED
        if number > max_searches:
            return None
        if is_search:
            call = ToolCall(SEARCH, action.arguments[: rules.max_queries])
            passages = yield Search(call.arguments)
            observation = rules.observe(call, ToolResult(data=tuple(passages)))
            transcript += _observation_text(observation, number, kit)
        elif rules.invalid_message is None:
            return None
        else:
            transcript += rules.invalid_message
    return None


def _next_turn(rules: Protocol, messages, transcript, max_tokens) -> Generate:
    if rules.is_chat:
        return Generate(messages, max_tokens, rules.stop_strings, continued=transcript)
    text = "\n".join(message["content"] for message in messages)
    return Generate(text + transcript, max_tokens, rules.stop_strings)


def _with_stop(rules: Protocol, completion: Completion) -> str:
    """Return a turn with the stop string that ended it.

    If the backend does not name it, it is the one that makes the turn a valid action.
    """
    text, stop = completion.text, completion.stop
    if stop is None and completion.end != CUT:
        actions = ((stop, rules.parse(text + stop)) for stop in rules.stop_strings)
        stop = next((s for s, a in actions if not isinstance(a, Malformed)), "")
    return text + (stop or "")


def _observation_text(observation: Observation, number: int, kit: Kit) -> str:
    """Return the text of an observation, with its content cut to the budget."""
    pieces = observation.pieces or (Cut(observation.content),)
    texts = [_cut_text(text, kit) if isinstance(text, Cut) else text for text in pieces]
    prefix = observation.before.replace("{turn}", str(number))
    return prefix + "".join(texts) + observation.after


def _cut_text(cut: Cut, kit: Kit) -> str:
    """Return the shown part of a text; the model's own text is shown in full."""
    text = cut.text if cut.is_echo else kit.shorten(cut.text)
    if len(text) < len(cut.text):
        while text and not cut.may_end(text):
            text = text[:-1]
    return text

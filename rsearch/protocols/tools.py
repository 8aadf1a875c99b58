"""Calls of additional tools in any protocol: `<name> argument </name>`."""

import dataclasses
from collections.abc import Sequence

from rsearch.protocols.base import Protocol, Step, checked_text, join_thoughts
from rsearch.types import Action, Answer, Malformed, ToolCall


def add_tools(protocol: Protocol, names: Sequence[str]) -> Protocol:
    """Return the protocol extended so that the policy can also call these tools.

    A call is the text between `<name>` and `</name>`, which ends the turn. As with the
    protocol's own actions, the first complete one counts.

    Args:
        protocol: any protocol.
        names: names of the tools, each a word that is not a tag of the protocol.

    Raises:
        ValueError: a tool has the name of a tag around the protocol's own actions,
            observations, evidence or thoughts.
    """
    if not names:
        return protocol
    tags = {name: (f"<{name}>", f"</{name}>") for name in names}
    observation_tags = protocol.observation_tags()
    turn_text = _turn_with_thought(protocol)
    for name, (_, closing) in tags.items():
        is_observation = any(tag.fullmatch(closing) for tag in observation_tags)
        is_action = closing in protocol.stop_strings or closing in turn_text
        if is_action or is_observation or name == protocol.evidence_tag:
            raise ValueError(
                f"config.protocol.tools: {name!r} is a tag of the protocol itself"
            )

    def parse(turn: str) -> Action:
        ends = [(turn.find(c), name) for name, (_, c) in tags.items() if c in turn]
        if not ends:
            return protocol.parse(turn)
        end, name = min(ends)
        # An action of the protocol that ends before the call comes first.
        if any(stop in turn[:end] for stop in protocol.stop_strings):
            return protocol.parse(turn)
        _, opening, content = turn[:end].rpartition(tags[name][0])
        if not opening:
            return Malformed(f"</{name}> without <{name}> before it")
        argument = content.strip()
        return ToolCall(name, (argument,)) if argument else Malformed("empty call")

    def render(action: ToolCall | Answer) -> str:
        if not isinstance(action, ToolCall) or action.name not in tags:
            return protocol.render(action)
        if len(action.arguments) != 1:
            raise ValueError(f"a call holds one text, not {len(action.arguments)}")
        return checked_text(
            f" {action.arguments[0]} ".join(tags[action.name]), action, parse
        )

    def write(step: Step) -> str:
        if not isinstance(step.action, ToolCall) or step.action.name not in tags:
            return protocol.write(step)
        thought = join_thoughts(step)
        text = f"{thought} {render(step.action)}" if thought else render(step.action)
        return checked_text(text, step.action, parse)

    return dataclasses.replace(
        protocol,
        stop_strings=(
            *protocol.stop_strings,
            *(closing for _, closing in tags.values()),
        ),
        parse=parse,
        render=render,
        write=write,
    )


def _turn_with_thought(protocol: Protocol) -> str:
    """Return a turn with a thought and an answer; "" if this one cannot be written."""
    try:
        return protocol.write(Step(1, "t", Answer("a"), internal="i"))
    except ValueError:
        return ""

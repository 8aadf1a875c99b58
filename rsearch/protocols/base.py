"""The protocol: a frozen value that defines how policy and search engine converse."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from rsearch.types import (
    SEARCH,
    Action,
    Answer,
    Messages,
    Observation,
    Passage,
    ToolCall,
    ToolResult,
)

FIELD = re.compile(r"\{(\w+)\}")


def fill_fields(text: str, **values: str) -> str:
    """Return a text with the given `{fields}` filled in; others stay as they are.

    All are filled in one pass, and not by str.format: a value may hold braces, or
    another field.
    """
    return FIELD.sub(lambda field: values.get(field[1], field[0]), text)


def replace_surrogates(text: str) -> str:
    """Return the text with a replacement character for each lone surrogate.

    JSON can hold half of a UTF-16 pair, which text encodings cannot represent.
    """
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


@dataclasses.dataclass(frozen=True)
class Step:
    """A policy's turn before `Protocol.write` puts it into words.

    Attributes:
        number: number of the turn, from 1.
        thought: the reasoning before the action; "" if there is none.
        action: the action that ends the turn.
        internal: knowledge recalled without a search, "" if there is none; protocols
            without a place for it make it part of the thought.
        evidence: original words of passages that the answer rests on; None if the
            protocol has no place for it or nothing was searched.
    """

    number: int
    thought: str
    action: ToolCall | Answer
    internal: str = ""
    evidence: str | None = None


def join_thoughts(step: Step) -> str:
    """Join recalled and thought text, for protocols with no tags for the former."""
    return " ".join(filter(None, (step.internal, step.thought)))


def checked_text(text: str, action: Action, parse: Callable[[str], Action]) -> str:
    """Return the text, which `parse` must read as the action.

    Raises:
        ValueError: `parse` reads it differently, because of a tag in it or space around
            a query, for example.
    """
    if parse(text) != action:
        raise ValueError(f"{action} cannot be written: {text!r} is read as another")
    return text


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The written form of a conversation between policy and search engine.

    Attributes:
        name: key in PROTOCOLS.
        system: system message, or None to send none.
        user: user message with one `{question}` field.
        add_question_mark: whether to strip the question and end it with '?'
            (Search-R1).
        stop_strings: the policy pauses when it has written one of these.
        parse: the policy's turn -> its action. Total: any text has a result.
        show_passages: (queries, passages for each query) -> the observation shown to
            the policy.
        render: a ToolCall or Answer -> the end of a turn with that action, which
            `parse` must read back; raises ValueError if that is impossible.
        write: a Step -> the complete turn of a policy that follows the protocol.
        invalid_message: shown after a malformed turn; None ends the rollout instead.
        is_chat: False if the user message is the raw text of the prompt, without the
            model's chat template (base models).
        opening: text that starts the policy's first turn, as part of the prompt.
        observation_role: chat role of observations, for models whose template frames
            that role by control tokens, which then replace `before` and `after` of an
            Observation. None, or a template without the role, leaves plain text.
        max_queries: how many queries of one turn are searched; any others are not.
        evidence_tag: the tag around the original words that an answer rests on; None
            if the protocol has no place for them.
        with_settings: (**settings of config.protocol) -> the protocol with these; None
            if it has no settings. See `make_protocol`.
    """

    name: str
    system: str | None
    user: str
    add_question_mark: bool
    stop_strings: tuple[str, ...]
    parse: Callable[[str], Action]
    show_passages: Callable[[Sequence[str], Sequence[Sequence[Passage]]], Observation]
    render: Callable[[ToolCall | Answer], str]
    write: Callable[[Step], str]
    invalid_message: str | None = None
    is_chat: bool = True
    opening: str = ""
    observation_role: str | None = None
    max_queries: int = 1
    evidence_tag: str | None = None
    with_settings: "Callable[..., Protocol] | None" = None

    def messages(self, question: str) -> Messages:
        """Return the chat that opens a rollout of this question."""
        if self.add_question_mark:
            question = question.strip()
            question += "" if question.endswith("?") else "?"
        # Not str.format: a question may hold braces.
        user = {"role": "user", "content": self.user.replace("{question}", question)}
        if self.system is None:
            return [user]
        return [{"role": "system", "content": self.system}, user]

    def observe(self, call: ToolCall, result: ToolResult) -> Observation:
        """Return what the policy is shown of a call: passages, or the result's text.

        The text of a tool other than search is put between the tags of passages.
        """
        if call.name == SEARCH:
            return self.show_passages(call.arguments, result.data)
        frame = self.show_passages([""], [()])
        text = replace_surrogates(result.text).strip()
        return dataclasses.replace(frame, content=text, pieces=())

    def observation_tags(self) -> tuple[re.Pattern, ...]:
        """Return patterns of the tags around observations, which only tools write.

        A turn's number in a tag matches any number.
        """
        frame = self.show_passages([""], [()])
        tags = [tag.strip() for tag in (frame.before, frame.after)]
        number = re.escape("{turn}")
        patterns = [re.escape(tag).replace(number, r"\d+") for tag in tags if tag]
        return tuple(map(re.compile, patterns))

"""Rollouts played by hand, from given turns and passages, one token per character."""

import dataclasses

import numpy as np

from rsearch.rewards.group import reward_groups
from rsearch.tools.search import search_use
from rsearch.types import (
    Answer,
    Malformed,
    Outcome,
    Question,
    Rollout,
    Segment,
    Source,
    ToolCall,
)

PARIS = Question("q1", "What is the capital?", ("Paris",))


def segment(source, text):
    """Return `text` as a segment of code points."""
    ids = np.array([ord(c) for c in text], np.int32)
    return Segment(source, ids, np.zeros(len(ids), np.float32), text)


def prompt_of(protocol, question):
    """Return the messages in Qwen's chat template, or the raw text of a base model."""
    messages = protocol.messages(question.text)
    if not protocol.is_chat:
        return messages[-1]["content"] + protocol.opening
    lines = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(lines) + "<|im_start|>assistant\n" + protocol.opening


def play(protocol, turns, passages=(), question=PARIS, max_searches=99):
    """Return the rollout of these turns when every search finds these passages.

    As in a real rollout, text that no later turn reads is not shown: the last turn is
    followed by an observation only if it makes a search that is allowed.
    """
    segments = [segment(Source.PROMPT, prompt_of(protocol, question))]
    searches, answer, outcome, num_malformed = [], None, Outcome.TRUNCATED, 0
    for number, turn in enumerate(turns, start=1):
        segments.append(segment(Source.POLICY, turn))
        action = protocol.parse(turn)
        if isinstance(action, Answer):
            answer, outcome = action.text, Outcome.ANSWERED
            break
        if isinstance(action, Malformed):
            num_malformed += 1
            if number == len(turns) or protocol.invalid_message is None:
                outcome = Outcome.MALFORMED
                break
            segments.append(segment(Source.SEARCH, protocol.invalid_message))
            continue
        assert isinstance(action, ToolCall)
        if len(searches) == max_searches:
            break
        queries = action.arguments[: protocol.max_queries]
        hits = (tuple(passages),) * len(queries)
        searches.append(search_use(queries, hits))
        shown = protocol.show_passages(queries, hits)
        before = shown.before.replace("{turn}", str(number))
        segments.append(segment(Source.SEARCH, before + shown.content + shown.after))
    return Rollout(
        tuple(segments), answer, tuple(searches), outcome, num_malformed=num_malformed
    )


def with_observations(rollout, change):
    """Return the rollout with the text of each observation changed."""
    segments = [
        segment(s.source, change(s.text)) if s.source == Source.SEARCH else s
        for s in rollout.segments
    ]
    return dataclasses.replace(rollout, segments=tuple(segments))


class Judge:
    """A judge that gives these replies in turn and records its calls."""

    def __init__(self, *replies):
        self.replies, self.calls = replies, []

    @property
    def chats(self):
        return [chat for call in self.calls for chat in call]

    def __call__(self, chats):
        start = len(self.chats)
        self.calls.append(list(chats))
        n = len(self.replies)
        return [self.replies[(start + i) % n] for i in range(len(chats))]


def earned(terms, question, rollout, judge=None):
    """Return the sum of what these (term, settings) pairs pay."""
    total = 0.0
    for term, settings in terms:
        judges = {} if judge is None or "judge" not in settings else {"judge": judge}
        total += term(question, (rollout,), **(settings | judges))[0]
    return total


def reward_group(group, terms, **supplied):
    """Reward a single group; return (totals, parts, the group afterwards)."""
    totals, parts, groups = reward_groups([group], terms, **supplied)
    return totals[0], {name: values[0] for name, values in parts.items()}, groups[0]

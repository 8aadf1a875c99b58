"""A rollout played by hand: given turns, given passages, one token a character."""

import numpy as np

from rsearch.types import (
    Answer,
    Lookup,
    Malformed,
    Outcome,
    Question,
    Rollout,
    Search,
    Segment,
    Source,
)

PARIS = Question("q1", "What is the capital?", ("Paris",))


def segment(source, text):
    """`text` as a segment of code points."""
    ids = np.array([ord(c) for c in text], np.int32)
    return Segment(source, ids, np.zeros(len(ids), np.float32), text)


def play(protocol, turns, passages=(), question=PARIS):
    """What becomes of these turns when every search finds these passages."""
    prompt = "\n".join(m["content"] for m in protocol.messages(question.text))
    segments, searches = [segment(Source.PROMPT, prompt)], []
    answer, outcome, num_malformed = None, Outcome.TRUNCATED, 0
    for turn in turns:
        segments.append(segment(Source.POLICY, turn))
        action = protocol.parse(turn)
        if isinstance(action, Answer):
            answer, outcome = action.text, Outcome.ANSWERED
            break
        if isinstance(action, Malformed):
            num_malformed += 1
            segments.append(segment(Source.SEARCH, protocol.invalid_message))
            continue
        assert isinstance(action, Search)
        found = (tuple(passages),) * len(action.queries)
        searches.append(Lookup(action.queries, found))
        shown = protocol.observe(action.queries, found)
        text = shown.before + shown.content + shown.after
        segments.append(segment(Source.SEARCH, text))
    return Rollout(tuple(segments), answer, tuple(searches), outcome, num_malformed)

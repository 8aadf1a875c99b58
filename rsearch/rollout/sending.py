"""Groups of rollouts as bytes, for other hosts: JSON, then ids and log-probabilities.

Nothing in them is ever evaluated or unpickled, and the questions stay at home: everyone
has those.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rsearch.hosts import processes as hosts
from rsearch.types import (
    Group,
    Lookup,
    Outcome,
    Passage,
    Question,
    Rollout,
    Segment,
    Source,
)

HEAD_BYTES = 8  # the JSON's length, little-endian


class Rewarded(NamedTuple):
    """A group, its [G] rewards, and {term: [G]} what they are made of."""

    group: Group
    rewards: np.ndarray
    parts: dict[str, np.ndarray]


def encode_groups(groups: Sequence[Group]) -> bytes:
    """The rollouts of some groups, token ids and log-probabilities to the last bit."""
    told, ids, logps = [], [], []
    for group in groups:
        told.append([_told(rollout) for rollout in group.rollouts])
        for rollout in group.rollouts:
            for segment in rollout.segments:
                ids.append(np.asarray(segment.token_ids, "<i4"))
                logps.append(np.asarray(segment.logp, "<f4"))
    return _joined(told, *(array.tobytes() for array in (*ids, *logps)))


def decode_groups(
    data: bytes | memoryview, questions: Sequence[Question]
) -> list[Group]:
    """What `encode_groups` was given; the questions are those that it was about."""
    told, rest = _parted(data)
    half = len(rest) // 2
    ids = np.frombuffer(rest[:half], "<i4").astype(np.int32)
    logp = np.frombuffer(rest[half:], "<f4").astype(np.float32)
    start, groups = 0, []
    for question, rollouts in zip(questions, told, strict=True):
        found = []
        for one in rollouts:
            segments = []
            for source, count, text in one["segments"]:
                end = start + count
                own = ids[start:end], logp[start:end]
                segments.append(Segment(Source(source), *own, text))
                start = end
            found.append(_rollout(one, segments))
        groups.append(Group(question, tuple(found)))
    return groups


def share_groups(
    work: Callable[[Sequence[Question]], Sequence[Group]],
    questions: Sequence[Question],
) -> list[Group]:
    """The groups of all questions, each host rolling out its own: `hosts.share`."""
    return hosts.share(work, questions, encode=encode_groups, decode=decode_groups)


def share_rewarded(
    work: Callable[[Sequence[Question]], Sequence[Rewarded]],
    questions: Sequence[Question],
) -> list[Rewarded]:
    """The same with what the groups have earned."""
    own = {"encode": _encode_rewarded, "decode": _decode_rewarded}
    return hosts.share(work, questions, **own)


def _encode_rewarded(found):
    earned = [
        [one.rewards.tolist(), {n: part.tolist() for n, part in one.parts.items()}]
        for one in found
    ]
    return _joined(earned, encode_groups([one.group for one in found]))


def _decode_rewarded(data, questions):
    earned, rest = _parted(data)
    groups = decode_groups(rest, questions)
    return [
        Rewarded(
            group,
            np.array(rewards, np.float32),
            {name: np.array(part, np.float32) for name, part in parts.items()},
        )
        for group, (rewards, parts) in zip(groups, earned, strict=True)
    ]


def _joined(told, *rest):
    """A JSON value, NaN as such, and bytes behind it."""
    head = json.dumps(told).encode()
    return b"".join([len(head).to_bytes(HEAD_BYTES, "little"), head, *rest])


def _parted(data):
    """The JSON value, and a view of the bytes behind it."""
    end = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "little")
    return json.loads(bytes(data[HEAD_BYTES:end])), memoryview(data)[end:]


def _told(rollout):
    """A rollout's JSON value, without the contents of its arrays."""
    return {
        "segments": [
            [int(s.source), len(s.token_ids), s.text] for s in rollout.segments
        ],
        "answer": rollout.answer,
        "searches": [
            [
                list(search.queries),
                [
                    [[p.id, p.contents, float(p.score)] for p in found]
                    for found in search.passages
                ],
            ]
            for search in rollout.searches
        ],
        "outcome": rollout.outcome.value,
        "num_malformed": rollout.num_malformed,
    }


def _rollout(told, segments):
    searches = tuple(
        Lookup(
            tuple(queries),
            tuple(tuple(Passage(*told) for told in found) for found in passages),
        )
        for queries, passages in told["searches"]
    )
    return Rollout(
        segments=tuple(segments),
        answer=told["answer"],
        searches=searches,
        outcome=Outcome(told["outcome"]),
        num_malformed=told["num_malformed"],
    )

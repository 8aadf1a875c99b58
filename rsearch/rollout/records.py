"""Groups of rollouts as bytes, for other hosts: JSON, then ids and log-probabilities.

Nothing in them is ever evaluated or unpickled, and the questions stay at home: everyone
has those.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.hosts import processes as hosts
from rsearch.runtime.journal import Journal
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


class RolloutCache:
    """The rollouts of one step of a stage: a journal's, and those that end now.

    A rollout is the same only if its policy is, and its draws: what that hangs on is
    `made_from`.

    Args:
        journal: of the stage's rollouts.
        made_from: step, policy, and all else that a rollout follows from beside its
            question and its number.

    Attributes:
        num_reused: rollouts that were there already, and asked for.
    """

    def __init__(self, journal: Journal, made_from: list):
        self._journal, self._made_from = journal, made_from
        self.num_reused = 0

    def get(self, question: Question, sample: int) -> Rollout | None:
        """The rollout, to the last bit, if it has ended before."""
        body = self._journal.get([*self._made_from, question.id, sample])
        if body is None:
            return None
        try:
            (group,) = decode_groups(body, [question])
        except (LookupError, TypeError, ValueError):  # of another version's making
            return None
        self.num_reused += 1
        return group.rollouts[0]

    def put(self, question: Question, sample: int, rollout: Rollout) -> None:
        """One more has ended."""
        body = encode_groups([Group(question, (rollout,))])
        self._journal.add([*self._made_from, question.id, sample], body)


def fingerprint(params) -> str:
    """Of a policy as it decodes: other parameters have another, whatever holds them.

    The bits of every number are multiplied with an odd one of its place, and summed
    modulo 2^32: a sum whose order does not matter, so that it does not hang on how
    parameters are sharded; one changed number always changes it.
    """
    return f"{int(_checksum(params)):08x}"


@jax.jit
def _checksum(params):
    """[] uint32."""
    parts = map(_sum_of, range(10**9), jax.tree.leaves(params))
    return functools.reduce(jnp.add, parts, jnp.uint32(0))


def _sum_of(number, leaf):
    """[] uint32 of the leaf of this number."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)
    place = jnp.full(leaf.shape, number * 0x9E3779B1 & 0xFFFFFFFF, jnp.uint32)
    for axis in range(leaf.ndim):  # not flattened: that would gather what is sharded
        stride = math.prod(leaf.shape[axis + 1 :]) & 0xFFFFFFFF
        own = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        place = place + own * jnp.uint32(stride)
    odd = place * jnp.uint32(0x85EBCA6B) * 2 | 1
    return jnp.sum(bits * odd, dtype=jnp.uint32)

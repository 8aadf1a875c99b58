"""Encode rollouts as bytes, to send to other hosts and to reuse in a resumed run.

The bytes are JSON, followed by token ids and log-probabilities. Nothing in them is
evaluated or unpickled. Questions are left out, since every host has them.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.hosts import processes
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.metrics import number_to_json
from rsearch.tools.search import non_search_calls, search_use, with_other_calls
from rsearch.types import Group, Outcome, Passage, Question, Rollout, Segment, Source

HEAD_BYTES = 8  # the JSON's length, little-endian


class Rewarded(NamedTuple):
    """A group, its [G] rewards, and the {term: [G]} that they are a weighted sum of."""

    group: Group
    rewards: np.ndarray
    terms: dict[str, np.ndarray]


def encode_groups(groups: Sequence[Group]) -> bytes:
    """Encode the rollouts of groups; ids and log-probabilities are kept exactly."""
    records, ids, logps = [], [], []
    for group in groups:
        records.append([_record_of(rollout) for rollout in group.rollouts])
        for rollout in group.rollouts:
            for segment in rollout.segments:
                ids.append(np.asarray(segment.token_ids, "<i4"))
                logps.append(np.asarray(segment.logp, "<f4"))
    return _join(records, *(array.tobytes() for array in (*ids, *logps)))


def decode_groups(
    data: bytes | memoryview, questions: Sequence[Question]
) -> list[Group]:
    """Decode the result of `encode_groups`, given the questions of its groups.

    Raises:
        ValueError: the data are cut short, hold another number of questions, or were
            written by another version.
    """
    try:
        return _decode_groups(data, questions)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError("not rollouts in this version's format") from None


def _decode_groups(data, questions):
    records, arrays = _split(data)
    # All ids come first, then the same number of log-probabilities, equally wide.
    middle = len(arrays) // 2
    ids = np.frombuffer(arrays[:middle], "<i4").astype(np.int32)
    logp = np.frombuffer(arrays[middle:], "<f4").astype(np.float32)
    start, groups = 0, []
    for question, group_records in zip(questions, records, strict=True):
        rollouts = []
        for record in group_records:
            segments = []
            for source, count, text in record["segments"]:
                end = start + count
                segments.append(
                    Segment(Source(source), ids[start:end], logp[start:end], text)
                )
                start = end
            rollouts.append(rollout_of(record, segments))
        groups.append(Group(question, tuple(rollouts)))
    if not start == len(ids) == len(logp):
        raise ValueError(f"{len(ids)} tokens and {len(logp)} log-probs for {start}")
    return groups


def share_groups(
    roll_out: Callable[[Sequence[Question]], Sequence[Group]],
    questions: Sequence[Question],
) -> list[Group]:
    """Return the groups of all questions, each host rolling out a share of them."""
    return processes.map_hosts(
        roll_out, questions, encode=encode_groups, decode=decode_groups
    )


def encode_rewarded(rewarded: Sequence[Rewarded]) -> bytes:
    """Encode groups with their rewards; all numbers are kept exactly."""
    rewards = [
        [r.rewards.tolist(), {name: x.tolist() for name, x in r.terms.items()}]
        for r in rewarded
    ]
    return _join(rewards, encode_groups([r.group for r in rewarded]))


def decode_rewarded(
    data: bytes | memoryview, questions: Sequence[Question]
) -> list[Rewarded]:
    """Decode the result of `encode_rewarded`."""
    encoded_rewards, encoded_groups = _split(data)
    groups = decode_groups(encoded_groups, questions)
    return [
        Rewarded(
            group,
            np.array(rewards, np.float32),
            {name: np.array(x, np.float32) for name, x in terms.items()},
        )
        for group, (rewards, terms) in zip(groups, encoded_rewards, strict=True)
    ]


class RolloutCache:
    """The finished rollouts of one step, from this start of the run or an earlier one.

    Args:
        journal: the journal of the stage's rollouts.
        key_prefix: step, policy and everything else that determines a rollout, apart
            from its question and sample index.

    Attributes:
        num_reused: number of rollouts that `get` has returned.
    """

    def __init__(self, journal: AppendLog, key_prefix: list):
        self._journal, self._key_prefix = journal, key_prefix
        self.num_reused = 0

    def get(self, question: Question, sample: int) -> Rollout | None:
        """Return the exact rollout if it has already finished, else None."""
        body = self._journal.get([*self._key_prefix, question.id, sample])
        if body is None:
            return None
        try:
            (group,) = decode_groups(body, [question])
        except ValueError:  # another version wrote it
            return None
        self.num_reused += 1
        return group.rollouts[0]

    def put(self, question: Question, sample: int, rollout: Rollout) -> None:
        """Store a finished rollout."""
        body = encode_groups([Group(question, (rollout,))])
        self._journal.add([*self._key_prefix, question.id, sample], body)


def params_fingerprint(params: Any) -> str:
    """Return a fingerprint of a policy's parameters in the form used for decoding.

    The bits of each number are multiplied by an odd factor derived from its position,
    and summed modulo 2^32. The order of the sum does not matter, so the result does not
    depend on how parameters are sharded. Changing one number always changes it.
    """
    return f"{int(_checksum(params)):08x}"


@jax.jit
def _checksum(params):
    """Return the checksum, [] uint32."""
    sums = map(_leaf_sum, range(10**9), jax.tree.leaves(params))
    return functools.reduce(jnp.add, sums, jnp.uint32(0))


def _leaf_sum(number, leaf):
    """Return [] uint32, the checksum of the leaf with this number."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)
    position = jnp.full(leaf.shape, number * 0x9E3779B1 & 0xFFFFFFFF, jnp.uint32)
    for axis in range(leaf.ndim):  # flattening would gather a sharded array
        stride = math.prod(leaf.shape[axis + 1 :]) & 0xFFFFFFFF
        index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        position = position + index * jnp.uint32(stride)
    factor = position * jnp.uint32(0x85EBCA6B) * 2 | 1
    return jnp.sum(bits * factor, dtype=jnp.uint32)


def _join(value, *chunks: bytes) -> bytes:
    """Join a JSON value, which may contain NaN, and bytes."""
    head = json.dumps(value).encode()
    return b"".join([len(head).to_bytes(HEAD_BYTES, "little"), head, *chunks])


def _split(data) -> tuple[Any, memoryview]:
    """Return the JSON value, and a view of the bytes after it."""
    end = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "little")
    return json.loads(bytes(data[HEAD_BYTES:end])), memoryview(data)[end:]


def _record_of(rollout: Rollout) -> dict:
    """Return a rollout as a JSON value, without the contents of its arrays."""
    return {
        "segments": [
            [int(s.source), len(s.token_ids), s.text] for s in rollout.segments
        ],
        "answer": rollout.answer,
        "outcome": rollout.outcome.value,
        **tools_record(rollout),
    }


def tools_record(rollout: Rollout) -> dict:
    """Return a rollout's calls, their full results and its counts as a JSON value."""
    return {
        "searches": [
            [
                list(search.call.arguments),
                [
                    [[p.id, p.contents, _score_to_json(p.score)] for p in hits]
                    for hits in search.result.data
                ],
            ]
            for search in rollout.searches
        ],
        "num_malformed": rollout.num_malformed,
        "num_scored": rollout.num_scored,
        "num_cut": rollout.num_cut_observations,
        "left_out": rollout.left_out,
        "is_cut": rollout.is_cut,
        "is_at_limit": rollout.is_at_limit,
        "notes": rollout.notes,
        "endpoint_tokens": rollout.endpoint_tokens,
        **non_search_calls(rollout.tool_uses),
    }


def _score_to_json(score) -> float | str | None:
    """Return a score as a JSON value; one that is not finite is a text."""
    return None if score is None else number_to_json(float(score))


def _passage_of(passage_id, contents, score) -> Passage:
    return Passage(passage_id, contents, None if score is None else float(score))


def rollout_of(record: Mapping, segments: Sequence[Segment]) -> Rollout:
    """Rebuild a rollout from a JSON value.

    Args:
        record: the answer, the outcome and the values of `tools_record`.
        segments: the rollout's tokens.

    Raises:
        ValueError, LookupError, TypeError: no version writes such a record.
    """
    searches = [
        search_use(
            tuple(queries),
            tuple(tuple(_passage_of(*fields) for fields in hits) for hits in passages),
        )
        for queries, passages in record["searches"]
    ]
    texts = [s.text for s in segments]
    if record["answer"] is not None:
        texts.append(record["answer"])
    is_text = all(isinstance(text, str) for text in texts)
    counts = {
        "num_malformed": record["num_malformed"],
        # Earlier versions did not store these.
        "num_scored": record.get("num_scored", 0),
        "num_cut_observations": record.get("num_cut", 0),
    }
    left_out = record.get("left_out", 0.0)
    flags = {name: record.get(name, False) for name in ("is_cut", "is_at_limit")}
    notes = tuple((name, float(value)) for name, value in record.get("notes", []))
    if not is_text or {type(count) for count in counts.values()} != {int}:
        raise TypeError("not a rollout's texts and counts")
    if not isinstance(left_out, int | float):
        raise TypeError("not a rollout's share of documents")
    if {type(flag) for flag in flags.values()} != {bool}:
        raise TypeError("not what ended a rollout")
    if not all(isinstance(name, str) for name, _ in notes):
        raise TypeError("not a rollout's notes")
    endpoint_tokens = record.get("endpoint_tokens", (0, 0))
    if endpoint_tokens is not None:
        endpoint_tokens = tuple(endpoint_tokens)
        if [type(count) for count in endpoint_tokens] != [int, int]:
            raise TypeError("not the numbers of tokens that a model read and wrote")
    return Rollout(
        segments=tuple(segments),
        answer=record["answer"],
        tool_uses=with_other_calls(searches, record),
        outcome=Outcome(record["outcome"]),
        **counts,
        **flags,
        left_out=left_out,
        notes=notes,
        endpoint_tokens=endpoint_tokens,
    )

"""From rollouts to arrays. The loss mask is made here and only here."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rsearch.types import Group, Segment, Source


class Batch(NamedTuple):
    """Rows of tokens with all that a loss needs; arrays of any leading shape [..., T].

    Attributes:
        tokens: [B, T] int32 ids, padded on the right.
        from_policy: [B, T] bool, True on the tokens the policy wrote and learns from.
        behavior_logp: [B, T] float32 under the distribution the token was sampled from.
        reference_logp: [B, T] float32 under the reference; zeros until it has scored.
        reward: [B] float32.
        is_signal: [B] bool, False where tools failed: out of loss and statistics.
        advantage: [B, T] float32; zeros until the rewards are compared.
    """

    tokens: jax.Array
    from_policy: jax.Array
    behavior_logp: jax.Array
    reference_logp: jax.Array
    reward: jax.Array
    is_signal: jax.Array
    advantage: jax.Array


def pack_segments(rows: Sequence[Sequence[Segment]], num_tokens: int) -> Batch:
    """Rows of segments as a Batch, one conversation a row, reward 0.

    Args:
        rows: B conversations.
        num_tokens: T; a longer conversation is a bug of the caller.
    """
    shape = (len(rows), num_tokens)
    tokens = np.zeros(shape, np.int32)
    source = np.full(shape, Source.PADDING, np.int8)
    logp = np.zeros(shape, np.float32)
    for i, segments in enumerate(rows):
        start = 0
        for segment in segments:
            end = start + len(segment.token_ids)
            assert end <= num_tokens, f"{end} tokens in a row of {num_tokens}"
            tokens[i, start:end] = segment.token_ids
            source[i, start:end] = segment.source
            logp[i, start:end] = segment.logp
            start = end
    return Batch(
        tokens=tokens,
        from_policy=source == Source.POLICY,
        behavior_logp=logp,
        reference_logp=np.zeros(shape, np.float32),
        reward=np.zeros(len(rows), np.float32),
        is_signal=np.ones(len(rows), bool),
        advantage=np.zeros(shape, np.float32),
    )


def pack(groups: Sequence[Group], rewards: np.ndarray, num_tokens: int) -> Batch:
    """The rollouts of Q groups of G as a Batch of Q x G rows, groups together.

    Args:
        groups: Q groups of the same size.
        rewards: [Q, G] float.
        num_tokens: T.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    assert rewards.shape == (len(groups), len(groups[0].rollouts))
    batch = pack_segments([r.segments for r in rollouts], num_tokens)
    is_signal = np.array([r.outcome.is_signal for r in rollouts])
    return batch._replace(
        from_policy=batch.from_policy & is_signal[:, None],
        reward=rewards.reshape(-1).astype(np.float32),
        is_signal=is_signal,
    )


def split(batch: Batch, num_updates: int, micro_batch: int) -> list[Batch]:
    """The batch cut into `num_updates` of shape [micro-batches, micro_batch, ...]."""
    num_rows = len(batch.tokens) // num_updates
    assert num_rows * num_updates == len(batch.tokens)
    assert num_rows % micro_batch == 0
    return [
        jax.tree.map(
            lambda x, u=u: x[u * num_rows : (u + 1) * num_rows].reshape(
                -1, micro_batch, *x.shape[1:]
            ),
            batch,
        )
        for u in range(num_updates)
    ]

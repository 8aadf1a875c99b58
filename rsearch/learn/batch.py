"""From rollouts to arrays. The loss mask is made here and only here."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rsearch.learn.packing import PackedLayout
from rsearch.types import Group, Segment, Source


class Batch(NamedTuple):
    """Rows of tokens with all that a loss needs; arrays of any leading shape [..., T].

    Attributes:
        tokens: [B, T] int32 ids, padded on the right.
        from_policy: [B, T] bool, True on the tokens the policy wrote and learns from.
        in_response: [B, T] bool, these and, of the same rows, the retrieved tokens.
        behavior_logp: [B, T] float32 under the policy before the update: as sampled, or
            as the trainer scores it.
        reference_logp: [B, T] float32 under the reference; zeros until it has scored.
        reward: [B] float32.
        is_signal: [B] bool, False where tools failed: out of loss and statistics.
        advantage: [B, T] float32; zeros until the rewards are compared.
        sampled_logp: [B, T] float32 under the distribution the token was sampled from,
            where that is asked for beside the trainer's.
        values: [B, T] float32, what a critic expected in the state that the token was
            chosen in; where there is one.
        returns: [B, T] float32, what it should have expected.
        length: [B] int32, tokens of each row without the padding.
        layout: in which the rows go through the network; None as they are.
    """

    tokens: jax.Array
    from_policy: jax.Array
    in_response: jax.Array
    behavior_logp: jax.Array
    reference_logp: jax.Array
    reward: jax.Array
    is_signal: jax.Array
    advantage: jax.Array
    sampled_logp: jax.Array | None = None
    values: jax.Array | None = None
    returns: jax.Array | None = None
    length: jax.Array | None = None
    layout: PackedLayout | None = None


def pack_segments(rows: Sequence[Sequence[Segment]], num_tokens: int) -> Batch:
    """Return rows of segments as a Batch, one conversation a row, reward 0.

    Args:
        rows: B conversations.
        num_tokens: T; a longer conversation is a bug of the caller.
    """
    shape = (len(rows), num_tokens)
    tokens = np.zeros(shape, np.int32)
    source = np.full(shape, Source.PADDING, np.int8)
    logp = np.zeros(shape, np.float32)
    length = np.zeros(len(rows), np.int32)
    for i, segments in enumerate(rows):
        start = 0
        for segment in segments:
            end = start + len(segment.token_ids)
            assert end <= num_tokens, f"{end} tokens in a row of {num_tokens}"
            tokens[i, start:end] = segment.token_ids
            source[i, start:end] = segment.source
            logp[i, start:end] = segment.logp
            start = end
        length[i] = start
    return Batch(
        tokens=tokens,
        from_policy=source == Source.POLICY,
        in_response=(source == Source.POLICY) | (source == Source.SEARCH),
        behavior_logp=logp,
        reference_logp=np.zeros(shape, np.float32),
        reward=np.zeros(len(rows), np.float32),
        is_signal=np.ones(len(rows), bool),
        advantage=np.zeros(shape, np.float32),
        length=length,
    )


def pack(
    groups: Sequence[Group],
    rewards: np.ndarray,
    num_tokens: int,
    *,
    learns: np.ndarray | None = None,
    masks_retrieved: bool = True,
) -> Batch:
    """Return the rollouts of Q groups of G as a Batch of Q x G rows, group by group.

    Args:
        groups: Q groups of the same size.
        rewards: [Q, G] float.
        num_tokens: T.
        learns: [Q, G] bool, False where a rollout takes part in its group's statistics
            but not in the loss; all that are a signal do where it is not given.
        masks_retrieved: False lets retrieved tokens into the loss as if the policy had
            written them: the ablation of Search-R1 (arXiv 2503.09516 section 5.4).
    """
    rollouts = [r for group in groups for r in group.rollouts]
    assert rewards.shape == (len(groups), len(groups[0].rollouts))
    batch = pack_segments([r.segments for r in rollouts], num_tokens)
    is_signal = np.array([r.outcome.is_signal for r in rollouts])
    if not masks_retrieved:
        batch = batch._replace(from_policy=batch.in_response)
    in_loss = is_signal if learns is None else is_signal & learns.reshape(-1)
    return batch._replace(
        from_policy=batch.from_policy & in_loss[:, None],
        in_response=batch.in_response & in_loss[:, None],
        reward=rewards.reshape(-1).astype(np.float32),
        is_signal=is_signal,
    )


def cut(batch: Batch, micro_batch: int) -> Batch:
    """Return the batch as [micro-batches, micro_batch, ...]."""
    assert len(batch.tokens) % micro_batch == 0
    return jax.tree.map(lambda x: x.reshape(-1, micro_batch, *x.shape[1:]), batch)


def parts(batch: Batch, count: int) -> list[Batch]:
    """Return the batch as `count` batches with equal shares of its first axis."""
    size = len(batch.tokens) // count
    assert size * count == len(batch.tokens)
    return [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
        for i in range(count)
    ]

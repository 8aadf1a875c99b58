"""Turn rollouts into arrays, with the loss mask.

The mask is made here and nowhere else. `stages.groups.rollouts_in_loss` says which
rollouts are in it; `learn.packing` only selects the rows of one piece.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rsearch.learn.packing import PackedLayout
from rsearch.types import Group, Segment, Source


class Batch(NamedTuple):
    """Rows of tokens with everything a loss needs; any leading axes may replace B.

    Attributes:
        tokens: [B, T] int32 ids, padded on the right.
        from_policy: [B, T] bool, True on tokens that the policy wrote and learns from.
        in_response: [B, T] bool, also True on the retrieved tokens of the same rows.
        behavior_logp: [B, T] float32 log-probability under the policy before the
            update, as sampled or as scored by the trainer.
        reference_logp: [B, T] float32 log-probability under the reference policy; zeros
            until it has been scored.
        reward: [B] float32.
        is_signal: [B] bool, False where tools or the judge failed; such rows are left
            out of the loss and the statistics.
        advantage: [B, T] float32; zeros until advantages are computed.
        sampled_logp: [B, T] float32 log-probability under the distribution the token
            was sampled from, if it is needed as well as the trainer's.
        values: [B, T] float32, the return that a critic expected in the state in which
            the token was chosen, if there is a critic.
        returns: [B, T] float32, the return that it should have expected.
        length: [B] int32, tokens in each row, without the padding.
        layout: how rows are packed for the network; None means that they are not.
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
    """Return rows of segments as a Batch, one conversation per row, with reward 0.

    Args:
        rows: B conversations.
        num_tokens: T; a longer conversation is a bug in the caller.
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
        learns: [Q, G] bool, False for a rollout that takes part in its group's
            statistics but not in the loss. By default, all rollouts with a learning
            signal take part in the loss.
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


def to_micro_batches(batch: Batch, micro_batch: int) -> Batch:
    """Return the batch as [micro-batches, micro_batch, ...]."""
    assert len(batch.tokens) % micro_batch == 0
    return jax.tree.map(lambda x: x.reshape(-1, micro_batch, *x.shape[1:]), batch)


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """Split the batch into `count` batches with equal shares of its first axis."""
    size = len(batch.tokens) // count
    assert size * count == len(batch.tokens)
    return [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
        for i in range(count)
    ]

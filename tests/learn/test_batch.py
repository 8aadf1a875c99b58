import jax
import numpy as np
import pytest

from rsearch.learn.batch import pack, pack_segments, split_batch, to_micro_batches
from rsearch.types import Group, Outcome, Question, Rollout, Segment, Source

WHO = Question("q", "who", ("x",))


def segment(source, ids, logp=None):
    logp = np.zeros(len(ids)) if logp is None else logp
    return Segment(source, np.array(ids, np.int32), np.array(logp, np.float32), "")


def rollout(number, outcome=Outcome.ANSWERED):
    """Return a rollout of 7 tokens, 3 of which the policy wrote in two turns."""
    n = 10 * number
    segments = (
        segment(Source.PROMPT, [n, n + 1]),
        segment(Source.POLICY, [n + 2], [-0.5]),
        segment(Source.SEARCH, [n + 3, n + 4]),
        segment(Source.POLICY, [n + 5, n + 6], [-1.5, -number]),
    )
    return Rollout(segments, None, (), outcome)


def test_segments_are_concatenated_and_followed_by_padding():
    rows = [rollout(1).segments, rollout(2).segments[:2]]
    batch = pack_segments(rows, 9)
    expected = [[10, 11, 12, 13, 14, 15, 16, 0, 0], [20, 21, 22, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(batch.tokens, expected)
    expected = [[0, 0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(batch.from_policy, expected)
    expected = [[0, 0, -0.5, 0, 0, -1.5, -1, 0, 0], [0, 0, -0.5, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(batch.behavior_logp, expected)
    assert batch.is_signal.all() and not batch.reward.any()
    assert not batch.advantage.any() and not batch.reference_logp.any()


@pytest.mark.fault(28, "mask by token")
def test_the_mask_marks_tokens_that_the_policy_wrote():
    for source in Source:
        batch = pack_segments([[segment(source, [1, 2])]], 3)
        wrote = source == Source.POLICY
        np.testing.assert_array_equal(batch.from_policy, [[wrote, wrote, False]])


def test_rows_may_be_full_and_empty_but_not_too_long():
    batch = pack_segments([rollout(1).segments, []], 7)
    assert batch.from_policy.sum() == 3
    with pytest.raises(AssertionError, match="7 tokens in a row of 6"):
        pack_segments([rollout(1).segments], 6)


def test_groups_are_packed_together_with_their_rewards():
    groups = [
        Group(WHO, (rollout(1), rollout(2, Outcome.TOOL_ERROR))),
        Group(WHO, (rollout(3, Outcome.JUDGE_ERROR), rollout(4, Outcome.MALFORMED))),
    ]
    batch = pack(groups, np.array([[0.1, np.nan], [np.nan, 0.4]]), 8)
    np.testing.assert_array_equal(batch.tokens[:, 0], [10, 20, 30, 40])
    np.testing.assert_array_equal(batch.is_signal, [True, False, False, True])
    # A tool's failure says nothing about the policy.
    np.testing.assert_array_equal(batch.from_policy.sum(1), [3, 0, 0, 3])
    np.testing.assert_allclose(batch.reward, [0.1, np.nan, np.nan, 0.4], rtol=1e-6)
    assert batch.reward.dtype == np.float32


def test_rewards_of_the_wrong_shape_fail_an_assertion():
    with pytest.raises(AssertionError):
        pack([Group(WHO, (rollout(1), rollout(2)))], np.zeros((2, 1)), 8)


def test_splitting_keeps_the_order_of_rows():
    batch = pack_segments([rollout(i).segments for i in range(12)], 7)
    pieces = split_batch(to_micro_batches(batch, 3), 2)
    assert [p.tokens.shape for p in pieces] == [(2, 3, 7)] * 2
    joined = jax.tree.map(
        lambda *x: np.concatenate(x).reshape(12, *x[0].shape[2:]), *pieces
    )
    jax.tree.map(np.testing.assert_array_equal, joined, batch)
    with pytest.raises(AssertionError):
        split_batch(to_micro_batches(batch, 1), 5)
    with pytest.raises(AssertionError):
        to_micro_batches(batch, 5)


def test_retrieved_tokens_are_in_the_loss_only_without_masking():
    groups = [Group(WHO, (rollout(1), rollout(2)))]
    rewards = np.zeros((1, 2))
    masked = pack(groups, rewards, 8)
    unmasked = pack(groups, rewards, 8, masks_retrieved=False)
    np.testing.assert_array_equal(unmasked.from_policy, unmasked.in_response)
    assert (unmasked.from_policy & ~masked.from_policy).any()
    assert not (masked.from_policy & ~unmasked.from_policy).any()

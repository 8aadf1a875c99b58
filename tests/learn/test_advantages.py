import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.learn.advantages import (
    group_advantages,
    leave_one_out,
    returns_to_go,
    reward_on_last_token,
    whiten,
    with_advantages,
)
from rsearch.learn.batch import Batch, to_micro_batches
from rsearch.learn.update import put
from rsearch.models.sharding import make_mesh
from tests.learn.rows import batch_of, rows_of

NAN, INF = jnp.nan, jnp.inf


def advantages(reward, is_signal=None, **settings):
    reward = jnp.array(reward, jnp.float32)
    signal = jnp.ones(reward.shape, bool) if is_signal is None else is_signal
    settings = dict(normalize_std=True, eps=0.0) | settings
    return group_advantages(reward, jnp.array(signal, bool), **settings)


def test_advantages_by_hand():
    # Mean 2, centred -1, 0, 1; sample deviation 1, population deviation sqrt(2/3).
    np.testing.assert_allclose(advantages([[1, 2, 3]]), [[-1, 0, 1]], atol=1e-6)
    expected = np.array([[-1, 0, 1]]) * np.sqrt(1.5)
    np.testing.assert_allclose(advantages([[1, 2, 3]], ddof=0), expected, atol=1e-6)
    # 0, 0, 0, 1: mean 1/4, sample variance (3/16 + 9/16) / 3 = 1/4.
    expected = [[-0.5, -0.5, -0.5, 1.5]]
    np.testing.assert_allclose(advantages([[0, 0, 0, 1]]), expected, atol=1e-6)


def test_eps_is_added_to_the_deviation_and_not_to_the_variance():
    np.testing.assert_allclose(
        advantages([[1, 2, 3]], eps=1.0), [[-0.5, 0, 0.5]], atol=1e-6
    )


def test_without_normalisation_advantages_are_centred_rewards():
    result = advantages([[0, 0, 0, 8]], normalize_std=False)
    np.testing.assert_array_equal(result, [[-2, -2, -2, 6]])


@pytest.mark.fault(13, "zero gradient")
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e8])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_group_with_equal_rewards_has_zero_advantages(reward, size, normalize_std):
    result = advantages([[reward] * size], normalize_std=normalize_std)
    assert not np.asarray(result).any()


def test_rollouts_without_signal_are_left_out_of_their_groups_statistics():
    signal = [[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    reward = [[1, 99, 2, 3], [5, 7, 8, 9], [1, 2, 3, 4], [2, 2, 9, 9]]
    expected = [[-1, 0, 0, 1], [0] * 4, [0] * 4, [0] * 4]
    np.testing.assert_allclose(advantages(reward, signal), expected, atol=1e-6)


@pytest.mark.parametrize("unknown", [NAN, INF, -INF])
def test_the_reward_of_a_failed_rollout_may_be_nan_or_infinite(unknown):
    result = advantages([[1, unknown, 2, 3]], [[1, 0, 1, 1]])
    np.testing.assert_allclose(result, [[-1, 0, 0, 1]], atol=1e-6)


@given(rows_of(st.integers(-4, 4), 3, 4), rows_of(st.booleans(), 3, 4))
@settings(deadline=None)
def test_advantages_equal_those_computed_by_numpy(halves, signal):
    reward = halves / 2
    expected = np.zeros(reward.shape)
    for i, (r, s) in enumerate(zip(reward, signal)):
        if s.sum() >= 2 and r[s].std() > 0:
            expected[i, s] = (r[s] - r[s].mean()) / (r[s].std(ddof=1) + 1e-4)
    np.testing.assert_allclose(
        advantages(reward, signal, eps=1e-4), expected, atol=1e-5
    )


def test_a_group_of_five_by_hand():
    actual = advantages([[1, 0, 0, 1, 0]], eps=1e-6)
    expected = [[1.0954, -0.7303, -0.7303, 1.0954, -0.7303]]
    np.testing.assert_allclose(actual, expected, atol=5e-5)


R1_REWARDS = [1, 0.5, 0, -2]


def test_r1_searchers_two_forms_of_advantages_by_hand():
    actual = advantages([R1_REWARDS], normalize_std=False)
    np.testing.assert_allclose(actual, [[1.125, 0.625, 0.125, -1.875]], atol=1e-6)
    actual = advantages([R1_REWARDS], eps=1e-9)
    expected = [[0.8555, 0.4753, 0.0951, -1.4259]]
    np.testing.assert_allclose(actual, expected, atol=5e-5)


# The rows have 3, 2, 4 and 1 policy tokens, with gaps where passages were read.
R1_MASK = [
    [0, 1, 0, 1, 1, 0],
    [0, 1, 1, 0, 0, 0],
    [0, 1, 0, 1, 1, 1],
    [0, 0, 1, 0, 0, 0],
]
Z_SCORES = [0.9494, 0.3560, -0.2374, -2.6109]


def test_reinforce_pp_with_baseline_by_hand():
    batch = batch_of(R1_MASK, R1_REWARDS)
    actual = with_advantages(batch, algorithm="reinforce_pp_baseline", group_size=4)
    expected = np.array(R1_MASK) * np.array(Z_SCORES)[:, None]
    np.testing.assert_allclose(actual.advantage, expected, atol=5e-5)


def test_reinforce_pp_by_hand():
    """No group mean is subtracted; the z-score over the step ignores a common shift."""
    batch = batch_of(R1_MASK, R1_REWARDS)
    actual = with_advantages(batch, algorithm="reinforce_pp", group_size=1)
    expected = np.array(R1_MASK) * np.array(Z_SCORES)[:, None]
    np.testing.assert_allclose(actual.advantage, expected, atol=5e-5)


def test_each_group_has_its_own_baseline():
    """Rewards 1, 0 and 6, 5: with the baseline only differences in a group matter."""
    batch = batch_of([[1]] * 4, [1, 0, 6, 5])
    actual = with_advantages(batch, algorithm="reinforce_pp_baseline", group_size=2)
    np.testing.assert_allclose(actual.advantage[:, 0], [1, -1, 1, -1], atol=1e-6)
    actual = with_advantages(batch, algorithm="reinforce_pp", group_size=2)
    # Mean 3, variance (4 + 9 + 9 + 4) / 4 = 6.5.
    expected = np.array([-2, -3, 3, 2]) / np.sqrt(6.5)
    np.testing.assert_allclose(actual.advantage[:, 0], expected, atol=1e-6)


def test_kl_in_the_reward_counts_for_its_token_and_earlier_ones():
    """k1 is 1 per token, weight 0.5; final rewards 3 and 1: returns 2, 2.5; 0, 0.5."""
    batch = batch_of([[0, 1, 0, 1], [0, 1, 1, 0]], [3, 1], reference=-1.0)
    actual = with_advantages(batch, algorithm="reinforce_pp", group_size=1, kl_coef=0.5)
    returns = np.array([2.0, 2.5, 0.0, 0.5])
    z = (returns - returns.mean()) / returns.std()
    expected = [[0, z[0], 0, z[1]], [0, z[2], z[3], 0]]
    np.testing.assert_allclose(actual.advantage, expected, atol=1e-6)


@pytest.mark.fault(92, "cap of k3")
def test_the_cap_applies_to_the_kl_in_the_reward():
    """One rollout has two tokens with a capped KL of 10, the other one."""
    batch = batch_of([[0, 1, 0, 1], [0, 1, 0, 0]], [0, 0], reference=5.0)
    settings = {"algorithm": "rloo", "group_size": 2, "kl_coef": 1.0, "kl_kind": "k3"}
    capped = with_advantages(batch, kl_cap=10.0, **settings)
    np.testing.assert_allclose(capped.advantage[:, 1], [-10, 10])


def test_leave_one_out_by_hand():
    """1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2."""
    signal = jnp.array([[True, True, True, False]])
    actual = leave_one_out(jnp.array([[1.0, 0.0, 5.0, NAN]]), signal)
    np.testing.assert_allclose(actual, [[-1.5, -3, 4.5, 0]], atol=1e-6)
    alone = leave_one_out(jnp.array([[4.0, 9.0]]), jnp.array([[True, False]]))
    np.testing.assert_array_equal(alone, [[0, 0]])


def test_leave_one_out_treats_the_kl_as_part_of_the_reward():
    """KL sums 2 and 1, weight 0.5: rewards 1 - 1 and 3 - 0.5, each minus the other."""
    batch = batch_of([[1, 1], [1, 0]], [1, 3], reference=-1.0)
    actual = with_advantages(batch, algorithm="rloo", group_size=2, kl_coef=0.5)
    np.testing.assert_allclose(actual.advantage, [[-2.5, -2.5], [2.5, 0]], atol=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_truncated_rollout_is_left_out_of_its_groups_mean_kl(algorithm):
    """All rollouts have the same reward, and those in the loss have the same KL."""
    batch = batch_of([[1, 1], [1, 1], [0, 0]], [1, 1, 1], reference=-1.0)
    actual = with_advantages(batch, algorithm=algorithm, group_size=3, kl_coef=0.5)
    np.testing.assert_allclose(actual.advantage, np.zeros((3, 2)), atol=1e-6)


@pytest.mark.fault(14, "no reward on padding", "all-masked row")
def test_the_reward_is_on_the_last_token_and_returns_sum_back_from_it():
    mask = jnp.array([[1, 0, 1, 0], [0, 0, 0, 0]], bool)
    rewards = reward_on_last_token(jnp.array([2.0, 5.0]), mask)
    np.testing.assert_array_equal(rewards, [[0, 0, 2, 0], [0, 0, 0, 0]])
    bad = jnp.where(mask, rewards + 1, NAN)
    np.testing.assert_array_equal(returns_to_go(bad, mask), [[4, 0, 3, 0], [0] * 4])


def test_whitening_by_hand():
    values = jnp.array([[1.0, NAN, 2.0], [3.0, INF, NAN]])
    mask = jnp.array([[1, 0, 1], [1, 0, 0]], bool)
    actual = whiten(values, mask, ddof=1)
    np.testing.assert_allclose(actual, [[-1, 0, 0], [1, 0, 0]], atol=1e-6)
    actual = whiten(values, mask, ddof=0, eps=1 / 3)
    np.testing.assert_allclose(actual, [[-1, 0, 0], [1, 0, 0]], atol=1e-6)
    actual = whiten(values, mask, ddof=0, floor=4.0)
    np.testing.assert_allclose(actual, [[-0.5, 0, 0], [0.5, 0, 0]], atol=1e-6)
    for flat in (jnp.full((2, 3), 7.0), NAN * values):
        lone = whiten(flat, mask & (flat == 7), ddof=1)
        assert not np.asarray(lone).any()


ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo")


def full_batch(seed=0, num_rows=8):
    """Return random rows with the fields that any of the algorithms needs."""
    rng = np.random.default_rng(seed)
    mask = rng.random((num_rows, 10)) < 0.5
    numbers = rng.normal(size=(3, *mask.shape)).astype(np.float32)
    batch = batch_of(mask, rng.normal(size=num_rows))
    behavior, reference, values = numbers
    return batch._replace(
        behavior_logp=behavior, reference_logp=reference, values=values
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_advantages_do_not_depend_on_the_split_into_micro_batches(algorithm):
    batch = full_batch()
    settings = dict(algorithm=algorithm, group_size=4, kl_coef=0.1)
    entire = with_advantages(batch, **settings)
    pieces = with_advantages(to_micro_batches(batch, 2), **settings)
    for name in ("advantage", "returns"):
        ours, theirs = getattr(entire, name), getattr(pieces, name)
        if ours is not None:
            np.testing.assert_allclose(theirs.reshape(ours.shape), ours, atol=1e-6)
    assert np.abs(entire.advantage).max() > 0.1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_advantages_on_eight_devices_equal_those_on_one(algorithm):
    batch = full_batch(num_rows=16)
    settings = dict(algorithm=algorithm, group_size=4, kl_coef=0.1)
    expected = with_advantages(batch, **settings).advantage
    placed = put(to_micro_batches(batch, 8), make_mesh(data=2, fsdp=4))
    actual = with_advantages(placed, **settings).advantage
    np.testing.assert_allclose(actual.reshape(16, -1), expected, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("outside", [np.nan, np.inf])
def test_tokens_that_the_policy_did_not_write_have_no_influence(algorithm, outside):
    batch = full_batch()
    bad = {
        name: np.where(batch.from_policy, getattr(batch, name), outside)
        for name in ("behavior_logp", "reference_logp", "values")
    }
    settings = dict(algorithm=algorithm, group_size=4, kl_coef=0.1)
    expected = with_advantages(batch, **settings).advantage
    actual = with_advantages(batch._replace(**bad), **settings).advantage
    np.testing.assert_array_equal(actual, expected)
    assert not np.asarray(actual)[~batch.from_policy].any()


@pytest.mark.fault(14, "all-masked row")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rollouts_without_signal_do_not_change_the_others(algorithm):
    """Groups of 4 with one failed rollout count as groups of 3."""
    batch = full_batch()
    signal = np.ones(8, bool)
    signal[[1, 6]] = False
    failed = batch._replace(
        is_signal=signal,
        from_policy=batch.from_policy & signal[:, None],
        reward=np.where(signal, batch.reward, np.nan).astype(np.float32),
    )
    actual = with_advantages(failed, algorithm=algorithm, group_size=4, kl_coef=0.1)
    in_mask = jax.tree.map(lambda x: x[signal], batch)
    alone = with_advantages(in_mask, algorithm=algorithm, group_size=3, kl_coef=0.1)
    np.testing.assert_allclose(actual.advantage[signal], alone.advantage, atol=1e-5)
    assert not np.asarray(actual.advantage)[~signal].any()


def test_kl_in_the_reward_by_hand():
    """Group of 2; rewards 1 and 3, KL sums 2 and 1, coefficient 0.5: 0 versus 2.5."""
    zeros = np.zeros((2, 3), np.float32)
    batch = Batch(
        tokens=zeros.astype(np.int32),
        from_policy=np.array([[False, True, True], [False, True, False]]),
        in_response=np.array([[False, True, True], [False, True, False]]),
        behavior_logp=np.array([[9, -1, -1], [9, -2, 9]], np.float32),
        reference_logp=np.array([[0, -1.5, -2.5], [np.nan, -3, np.inf]], np.float32),
        reward=np.array([1, 3], np.float32),
        is_signal=np.ones(2, bool),
        advantage=zeros,
    )
    result = with_advantages(
        batch, group_size=2, normalize_std=False, eps=0.0, kl_coef=0.5, kl_kind="k1"
    )
    expected = [[0, -1.25, -1.25], [0, 1.25, 0]]
    np.testing.assert_allclose(result.advantage, expected, atol=1e-6)
    np.testing.assert_array_equal(result.reward, [1, 3])
    settings = dict(group_size=2, normalize_std=False, eps=0.0, kl_coef=0.5)
    expected = [[0, -1 - 0.5 * 2, -1 - 0.5 * 1.5], [0, 1 - 0.5, 0]]
    for algorithm, scale in (("grpo", 1), ("rloo", 2)):
        result = with_advantages(
            batch, algorithm=algorithm, kl_credit="token", **settings
        )
        rewards = (scale - 1) * np.array([[0, -1, -1], [0, 1, 0]])
        np.testing.assert_allclose(result.advantage, expected + rewards, atol=1e-6)
    result = with_advantages(batch, group_size=2, normalize_std=False, eps=0.0)
    np.testing.assert_array_equal(result.advantage, [[0, -1, -1], [0, 1, 0]])


@pytest.mark.fault(13, "KL rule")
def test_kl_in_the_reward_stays_small_if_all_answers_are_right():
    """If the KL were divided by its own spread, its noise would be the whole signal."""
    logp = jnp.log(jnp.array([[0.5, 0.50], [0.5, 0.51], [0.5, 0.49], [0.5, 0.52]]))
    rows = jnp.ones((4, 2), bool)
    batch = Batch(
        tokens=jnp.zeros((4, 2), jnp.int32),
        from_policy=rows,
        in_response=rows,
        behavior_logp=logp,
        reference_logp=jnp.log(jnp.full((4, 2), 0.5)),
        reward=jnp.ones(4),
        is_signal=jnp.ones(4, bool),
        advantage=jnp.zeros((4, 2)),
    )
    actual = with_advantages(
        batch, group_size=4, normalize_std=True, eps=1e-6, kl_coef=0.1, kl_kind="k1"
    )
    kl = np.log(np.array([0.50, 0.51, 0.49, 0.52]) / 0.5)  # k1, summed over the row
    expected = -0.1 * (kl - kl.mean())
    np.testing.assert_allclose(actual.advantage[:, 0], expected, atol=1e-6)

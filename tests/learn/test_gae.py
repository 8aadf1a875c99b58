import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.learn.advantages import gae, with_advantages
from tests.learn.rows import batch_of, rows_of

VALUES, REWARDS = [0.2, 0.3, 0.4, 0.5, 0.6], [0, 0, 0, 0, 1]


def estimate(rewards, values, mask=None, **lam):
    rewards, values = (jnp.array([x], jnp.float32) for x in (rewards, values))
    mask = jnp.ones(rewards.shape, bool) if mask is None else jnp.array([mask], bool)
    actual = gae(rewards, values, mask, **dict(gamma=1.0, lam=1.0) | lam)
    return [np.asarray(x)[0] for x in actual]


def test_gae_by_hand():
    actual, returns = estimate(REWARDS, VALUES)
    np.testing.assert_allclose(actual, [0.8, 0.7, 0.6, 0.5, 0.4], atol=1e-6)
    np.testing.assert_allclose(returns, [1] * 5, atol=1e-6)
    # A value of 0.9 after the last token, which the public code does not zero out, is
    # harmless with lambda 1 and leaks with a smaller one.
    leaky = [*REWARDS, 0], [*VALUES, 0.9]
    actual, _ = estimate(*leaky)
    np.testing.assert_allclose(actual[:5], [0.8, 0.7, 0.6, 0.5, 0.4], atol=1e-6)
    actual, _ = estimate(*leaky, lam=0.95)
    expected = [0.7334, 0.6668, 0.5966, 0.5227, 0.445]
    np.testing.assert_allclose(actual[:5], expected, atol=5e-5)
    actual, _ = estimate(*leaky, mask=[1] * 5 + [0], lam=0.95)
    assert actual[4] == pytest.approx(0.4, abs=1e-6) and actual[5] == 0


def loop(rewards, values, gamma, lam):
    """Return GAE of one sequence in float64."""
    actual, advantage, following = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        advantage = delta + gamma * lam * advantage
        actual[t], following = advantage, values[t]
    return actual


@given(
    rows_of(st.integers(-8, 8), 2, 9),
    rows_of(st.integers(-8, 8), 2, 9),
    rows_of(st.booleans(), 2, 9),
    st.sampled_from([(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)]),
)
@settings(deadline=None, max_examples=50)
def test_masked_gae_equals_gae_of_the_sequence_without_masked_tokens(
    rewards, values, mask, rates
):
    gamma, lam = rates
    outside = np.where(mask, 0.0, np.nan)
    rewards, values = rewards / 4, values / 8
    both = gae(rewards + outside, values + outside, mask, gamma=gamma, lam=lam)
    actual, returns = map(np.asarray, both)
    for i, m in enumerate(mask):
        expected = loop(rewards[i][m], values[i][m], gamma, lam)
        np.testing.assert_allclose(actual[i][m], expected, atol=1e-5)
        np.testing.assert_allclose(returns[i][m], expected + values[i][m], atol=1e-5)
    assert not actual[~mask].any() and not returns[~mask].any()


# A search between two turns: policy, two retrieved tokens, policy.
PPO_MASK = [[0, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0]]
PPO_RESPONSE = [[0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]
PPO_VALUES = [[9, 0.5, 0.2, 0.1, 0.25, 9], [9, 0.0, 0.5, 9, 9, 9]]


def ppo(over_response, outside=0.0, **rates):
    mask = PPO_RESPONSE if over_response else PPO_MASK
    values = np.where(np.array(mask, bool), PPO_VALUES, outside)
    batch = batch_of(PPO_MASK, [1, 0], response=PPO_RESPONSE, values=values)
    return with_advantages(
        batch,
        algorithm="ppo",
        group_size=1,
        over_response=over_response,
        **dict(gamma=0.5, lam=0.5) | rates,
    )


def standard(values):
    values = np.array(values)
    return (values - values.mean()) / values.std(ddof=1)


@pytest.mark.parametrize("outside", [0.0, np.nan, np.inf])
def test_retrieved_tokens_affect_neither_returns_nor_whitening(outside):
    actual = ppo(False, outside)
    # Row 1: 1 - 0.25 = 0.75; 0.5 x 0.25 - 0.5 + 0.25 x 0.75 = -0.1875.
    # Row 2: 0 - 0.5 = -0.5; 0.5 x 0.5 - 0 + 0.25 x -0.5 = 0.125.
    raw = [-0.1875, 0.75, 0.125, -0.5]
    returns = [[0, 0.3125, 0, 0, 1, 0], [0, 0.125, 0, 0, 0, 0]]
    np.testing.assert_allclose(actual.returns, returns, atol=1e-6)
    z = standard(raw)
    expected = [[0, z[0], 0, 0, z[1], 0], [0, z[2], z[3], 0, 0, 0]]
    np.testing.assert_allclose(actual.advantage, expected, atol=1e-5)


def test_as_in_the_public_code_returns_and_whitening_may_cover_the_response():
    actual = ppo(True)
    # 0.75; 0.125 - 0.1 + 0.1875 = 0.2125; 0.05 - 0.2 + 0.053125 = -0.096875;
    # 0.1 - 0.5 - 0.02421875 = -0.42421875.
    raw = [-0.42421875, -0.096875, 0.2125, 0.75, 0.125, -0.5]
    z = standard(raw)
    expected = [[0, z[0], 0, 0, z[3], 0], [0, z[4], z[5], 0, 0, 0]]
    np.testing.assert_allclose(actual.advantage, expected, atol=1e-5)
    assert actual.returns[0, 2] == pytest.approx(0.2 - 0.096875, abs=1e-6)


def test_with_gamma_and_lambda_1_a_return_is_the_reward():
    actual = ppo(False, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(actual.returns[0], [0, 1, 0, 0, 1, 0], atol=1e-6)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.learn.losses import (
    adapted_coefficient,
    clipped_surrogate,
    clipped_value_loss,
    kl_estimate,
    masked_sum,
    row_weights,
    truncated_weight,
)
from tests.learn.rows import rows_of

NAN, INF = jnp.nan, jnp.inf


@pytest.mark.parametrize("outside", [NAN, INF, -INF, 1e30])
def test_a_masked_sum_ignores_values_outside_the_mask(outside):
    values = jnp.array([[1.0, outside, 4.0], [outside, outside, outside]])
    mask = jnp.array([[True, False, True], [False, False, False]])
    assert masked_sum(values, mask) == 5.0
    np.testing.assert_array_equal(masked_sum(values, mask, 1), [5.0, 0.0])
    grad = jax.grad(lambda x: masked_sum(x, mask))(values)
    np.testing.assert_array_equal(grad, [[1, 0, 1], [0, 0, 0]])


def test_token_weights_are_equal_for_all_policy_tokens():
    mask = jnp.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(row_weights(mask, "token"), mask / 4)


def test_sequence_weights_are_equal_for_all_rows_with_policy_tokens():
    mask = jnp.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    expected = np.array([[1, 0, 1, 1], [0, 0, 3, 0], [0, 0, 0, 0]]) / 6
    np.testing.assert_allclose(row_weights(mask, "sequence"), expected, rtol=1e-6)


@pytest.mark.fault(14, "no trained token")
@pytest.mark.parametrize("kind", ["token", "sequence", "micro_token"])
@given(mask=rows_of(st.booleans(), 3, 5))
@settings(deadline=None)
def test_weights_sum_to_1_unless_no_row_has_policy_tokens(kind, mask):
    weights = np.asarray(row_weights(mask, kind))
    assert abs(weights.sum() - mask.any()) < 1e-6
    assert not weights[~mask].any()


def test_kl_estimates_by_hand():
    logp, reference = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
    values = {
        k: float(kl_estimate(logp, reference, k)[0, 0]) for k in ("k1", "k2", "k3")
    }
    ln2 = np.log(2)
    assert values == pytest.approx(
        {"k1": ln2, "k2": ln2**2 / 2, "k3": 0.5 + ln2 - 1}, abs=1e-6
    )


@pytest.mark.parametrize("kind, slope", [("k1", 1.0), ("k2", np.log(2)), ("k3", 0.5)])
def test_kl_slopes_by_hand(kind, slope):
    # d = -ln 2: k1' = 1, k2' = -d, k3' = 1 - exp(d), derivatives by the policy's logp.
    grad = jax.grad(lambda x: kl_estimate(x, jnp.log(0.25), kind))(jnp.log(0.5))
    assert grad == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    estimate = kl_estimate(jnp.log(p), jnp.log(q), kind)
    assert (p * estimate).sum() == pytest.approx((p * np.log(p / q)).sum(), abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_stay_finite(kind):
    logp, reference = jnp.array([-300.0, 0.0]), jnp.array([0.0, -300.0])
    assert np.isfinite(kl_estimate(logp, reference, kind)).all()


@pytest.mark.fault(92, "cap of k3")
def test_a_cap_bounds_the_kl_of_a_token_and_zeroes_its_gradient():
    """k3 is e^2 - 3 for d = 2 and around 10^8 for d = 20; slopes are 1 - e^d."""
    logp = jnp.array([-3.0, -21.0])

    def total(x, cap):
        values = kl_estimate(x, jnp.full(2, -1.0), "k3", cap=cap)
        return values.sum(), values

    slopes, values = jax.grad(total, has_aux=True)(logp, 10.0)
    np.testing.assert_allclose(values, [np.e**2 - 3, 10], rtol=1e-6)
    np.testing.assert_allclose(slopes, [1 - np.e**2, 0], rtol=1e-6)
    slopes, values = jax.grad(total, has_aux=True)(logp, 0.0)
    np.testing.assert_allclose(values, [np.e**2 - 3, np.e**20 - 21], rtol=1e-5)
    for kind in ("k1", "k2"):
        uncapped = kl_estimate(logp, jnp.full(2, -1.0), kind)
        capped = kl_estimate(logp, jnp.full(2, -1.0), kind, cap=10.0)
        np.testing.assert_array_equal(capped, uncapped)


# Columns: ratio, advantage, loss, slope of the loss by logp, whether it is clipped.
SURROGATE = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.5, 2.0, -2.4, 0.0, True),  # good, above 1 + high: pushed no further
    (1.5, -2.0, 3.0, 3.0, False),  # bad, above: still pushed down
    (0.5, 2.0, -1.0, -1.0, False),  # good, below 1 - low: still pushed up
    (0.5, -2.0, 1.8, 0.0, True),  # bad, below: pushed no further
    (1.1, -2.0, 2.2, 2.2, False),
    (1.5, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize("ratio, advantage, loss, slope, clips", SURROGATE)
def test_the_surrogate_by_hand(ratio, advantage, loss, slope, clips):
    def value(logp):
        return clipped_surrogate(
            logp,
            jnp.full((1, 1), -1.0),
            jnp.full((1, 1), advantage),
            jnp.ones((1, 1), bool),
            low=0.1,
            high=0.2,
        )

    logp = jnp.full((1, 1), np.log(ratio) - 1.0, jnp.float32)
    result, is_clipped = value(logp)
    assert float(result[0, 0]) == pytest.approx(loss, abs=1e-5)
    assert bool(is_clipped[0, 0]) == clips
    grad = jax.grad(lambda x: value(x)[0].sum())(logp)
    assert float(grad[0, 0]) == pytest.approx(slope, abs=1e-5)


def surrogate(logp, behavior, advantage, mask):
    return clipped_surrogate(logp, behavior, advantage, mask, low=0.2, high=0.2)


@pytest.mark.parametrize("outside", [NAN, INF, -INF, 500.0])
def test_retrieved_tokens_get_no_gradient(outside):
    mask = jnp.array([[True, False, True]])
    ones = jnp.ones((1, 3))
    bad = jnp.array([[-1.0, outside, -1.0]])
    for args in ((bad, -ones, ones), (-ones, bad, ones), (-ones, -ones, bad)):
        loss, clipped = surrogate(*args, mask)
        assert loss[0, 1] == 0 and not clipped[0, 1]
        grad = jax.grad(lambda x, args=args: surrogate(x, *args[1:], mask)[0].sum())
        np.testing.assert_array_equal(grad(args[0]) != 0, mask)
        assert np.isfinite(grad(args[0])).all()


@pytest.mark.parametrize("gap", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_loss_stays_finite_for_a_token_with_an_extreme_ratio(gap, advantage):
    single = jnp.ones((1, 1))

    def loss(logp):
        return surrogate(logp, -single, advantage * single, single > 0)[0].sum()

    value, grad = jax.value_and_grad(loss)(-single + gap)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_constant_weights_divide_by_the_rows_times_a_fixed_length():
    mask = jnp.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    weights = row_weights(mask, "constant", num_tokens=5)
    np.testing.assert_allclose(weights, mask / 10, rtol=1e-6)  # two rows have tokens


def test_micro_token_weights_average_within_and_then_over_micro_batches():
    mask = jnp.array([[[1, 1], [0, 1]], [[0, 0], [1, 0]], [[0, 0], [0, 0]]], bool)
    expected = np.asarray(mask) * np.array([1 / 6, 1 / 2, 0])[:, None, None]
    np.testing.assert_allclose(row_weights(mask, "micro_token"), expected, rtol=1e-6)


# Columns as above; dual clip 3, low and high 0.2.
DUAL = [
    (5.0, -1.0, 3.0, 0.0, True),  # would be 5; is bounded and pushed no further
    (2.0, -1.0, 2.0, 2.0, False),
    (5.0, 1.0, -1.2, 0.0, True),  # a good token is clipped as usual
    (0.5, -1.0, 0.8, 0.0, True),
]


@pytest.mark.parametrize("ratio, advantage, loss, slope, clips", DUAL)
def test_the_dual_clip_by_hand(ratio, advantage, loss, slope, clips):
    single = jnp.ones((1, 1))

    def value(logp):
        return clipped_surrogate(
            logp, -single, advantage * single, single > 0, low=0.2, high=0.2, dual=3.0
        )

    logp = jnp.full((1, 1), np.log(ratio) - 1.0, jnp.float32)
    result, is_clipped = value(logp)
    assert float(result[0, 0]) == pytest.approx(loss, abs=1e-5)
    assert bool(is_clipped[0, 0]) == clips
    grad = jax.grad(lambda x: value(x)[0].sum())(logp)
    assert float(grad[0, 0]) == pytest.approx(slope, abs=1e-5)


def by_sequence(logp, advantage, mask, low=0.2, high=0.2):
    return clipped_surrogate(
        logp,
        jnp.zeros_like(logp),
        advantage,
        mask,
        low=low,
        high=high,
        by_sequence=True,
    )


def test_gspos_ratio_is_the_geometric_mean_over_the_row():
    """Gaps 0.1 and 0.3, and NaN on a retrieved token: ratio exp(0.2) on both tokens."""
    mask = jnp.array([[True, False, True], [False, True, False]])
    logp = jnp.array([[0.1, NAN, 0.3], [INF, -0.1, NAN]])
    advantage = jnp.array([[2.0, NAN, 2.0], [0.0, -1.0, 0.0]])
    loss, clipped = by_sequence(logp, advantage, mask, high=0.5)
    expected = [[-2 * np.exp(0.2), 0, -2 * np.exp(0.2)], [0, np.exp(-0.1), 0]]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert not clipped.any()
    loss, clipped = by_sequence(logp, advantage, mask)  # exp(0.2) > 1.2
    np.testing.assert_allclose(loss[0], [-2.4, 0, -2.4], rtol=1e-5)
    np.testing.assert_array_equal(clipped, [[True, False, True], [False] * 3])


def test_gspos_gradient_is_spread_evenly_over_the_row():
    """For s A with s = exp(mean gap), every token of the row gets s A / length."""
    mask = jnp.array([[True, False, True]])
    logp = jnp.array([[0.02, NAN, 0.1]])
    weights = row_weights(mask, "sequence")

    def total(x):
        loss, _ = by_sequence(x, jnp.full((1, 3), 2.0), mask)
        return (loss * weights).sum()

    slope = -2 * np.exp(0.06) / 2
    np.testing.assert_allclose(jax.grad(total)(logp), [[slope, 0, slope]], rtol=1e-5)


def test_truncated_weights_by_hand():
    """Trainer's probabilities 0.5 and 0.25, sampler's 0.25 and 0.5; cap 1.5."""
    mask = jnp.array([[True, True, False]])
    ours = jnp.log(jnp.array([[0.5, 0.25, NAN]]))
    theirs = jnp.log(jnp.array([[0.25, 0.5, 0.1]]))
    actual = truncated_weight(ours, theirs, mask, cap=1.5)
    np.testing.assert_allclose(actual, [[1.5, 0.5, 1.0]], rtol=1e-6)
    grad = jax.grad(lambda x: truncated_weight(x, theirs, mask, cap=1.5).sum())(ours)
    assert not np.asarray(grad).any()


# Columns: value, old value, target, loss, slope; with a clip of 0.5.
VALUE = [
    (1.0, 1.0, 3.0, 2.0, -2.0),
    (1.4, 1.0, 3.0, 1.28, -1.6),  # within the clip
    (2.0, 1.0, 3.0, 1.125, 0.0),  # moved by 1: counts as 1.5 and is pushed no further
    (0.0, 1.0, 3.0, 4.5, -3.0),  # moved the wrong way: the larger error counts
    (4.0, 1.0, 3.0, 1.125, 0.0),
]


@pytest.mark.parametrize("value, old, target, loss, slope", VALUE)
def test_the_value_loss_by_hand(value, old, target, loss, slope):
    single = jnp.ones((1, 1))

    def total(x):
        return clipped_value_loss(
            x, old * single, target * single, single > 0, clip=0.5
        ).sum()

    actual, grad = jax.value_and_grad(total)(value * single)
    assert float(actual) == pytest.approx(loss, abs=1e-5)
    assert float(grad[0, 0]) == pytest.approx(slope, abs=1e-5)


def test_without_a_clip_the_value_loss_is_half_the_squared_error():
    single = jnp.ones((1, 1))
    loss = clipped_value_loss(4 * single, 0 * single, single, single > 0, clip=0.0)
    assert float(loss[0, 0]) == 4.5


@pytest.mark.parametrize("outside", [NAN, INF])
def test_values_outside_the_mask_get_no_gradient(outside):
    mask = jnp.array([[True, False, True]])
    bad, ones = jnp.array([[-1.0, outside, -1.0]]), jnp.ones((1, 3))

    def total(*args):
        return clipped_value_loss(*args, mask, clip=0.5).sum()

    for args in ((bad, -ones, ones), (-ones, bad, ones), (-ones, -ones, bad * 2)):
        value, grad = jax.value_and_grad(total)(*args)
        assert np.isfinite(value)
        np.testing.assert_array_equal(grad != 0, mask)
        assert np.isfinite(grad).all()


def test_the_adaptive_coefficient_by_hand():
    """Target 6; errors are clipped to a fifth, as in the paper."""
    for kl, factor in ((6, 1.0), (6.6, 1.01), (600, 1.02), (5.4, 0.99), (-3, 0.98)):
        actual = adapted_coefficient(0.1, kl, target=6.0, gain=0.1)
        assert float(actual) == pytest.approx(0.1 * factor, rel=1e-5)

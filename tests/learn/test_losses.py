import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.learn.losses import (
    clipped_surrogate,
    kl_estimate,
    masked_sum,
    row_weights,
)

NAN, INF = jnp.nan, jnp.inf


@pytest.mark.parametrize("outside", [NAN, INF, -INF, 1e30])
def test_a_masked_sum_ignores_what_lies_outside(outside):
    values = jnp.array([[1.0, outside, 4.0], [outside, outside, outside]])
    mask = jnp.array([[True, False, True], [False, False, False]])
    assert masked_sum(values, mask) == 5.0
    np.testing.assert_array_equal(masked_sum(values, mask, 1), [5.0, 0.0])
    grad = jax.grad(lambda x: masked_sum(x, mask))(values)
    np.testing.assert_array_equal(grad, [[1, 0, 1], [0, 0, 0]])


def test_token_weights_count_every_policy_token_alike():
    mask = jnp.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(row_weights(mask, "token"), mask / 4)


def test_sequence_weights_count_every_row_that_wrote_alike():
    mask = jnp.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    expected = np.array([[1, 0, 1, 1], [0, 0, 3, 0], [0, 0, 0, 0]]) / 6
    np.testing.assert_allclose(row_weights(mask, "sequence"), expected, rtol=1e-6)


def rows_of(item, num_rows, num_columns):
    """A list of rows; the shape is fixed, so that nothing compiles anew."""
    row = st.lists(item, min_size=num_columns, max_size=num_columns)
    return st.lists(row, min_size=num_rows, max_size=num_rows).map(np.array)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@given(mask=rows_of(st.booleans(), 3, 5))
@settings(deadline=None)
def test_weights_sum_to_1_unless_nobody_wrote(kind, mask):
    weights = np.asarray(row_weights(mask, kind))
    assert abs(weights.sum() - mask.any()) < 1e-6
    assert not weights[~mask].any()


def test_divergence_estimates_by_hand():
    logp, reference = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
    values = {
        k: float(kl_estimate(logp, reference, k)[0, 0]) for k in ("k1", "k2", "k3")
    }
    ln2 = np.log(2)
    assert values == pytest.approx(
        {"k1": ln2, "k2": ln2**2 / 2, "k3": 0.5 + ln2 - 1}, abs=1e-6
    )


@pytest.mark.parametrize("kind, slope", [("k1", 1.0), ("k2", np.log(2)), ("k3", 0.5)])
def test_divergence_slopes_by_hand(kind, slope):
    # d = -ln 2: k1' = 1, k2' = -d, k3' = 1 - exp(d), all by the policy's logp.
    grad = jax.grad(lambda x: kl_estimate(x, jnp.log(0.25), kind))(jnp.log(0.5))
    assert grad == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    estimate = kl_estimate(jnp.log(p), jnp.log(q), kind)
    assert (p * estimate).sum() == pytest.approx((p * np.log(p / q)).sum(), abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_divergence_stays_finite(kind):
    logp, reference = jnp.array([-300.0, 0.0]), jnp.array([0.0, -300.0])
    assert np.isfinite(kl_estimate(logp, reference, kind)).all()


# (ratio, advantage): loss, slope of the loss by logp, whether the clip holds.
SURROGATE = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.5, 2.0, -2.4, 0.0, True),  # above 1 + high, good: no more push
    (1.5, -2.0, 3.0, 3.0, False),  # above, bad: still pushed down
    (0.5, 2.0, -1.0, -1.0, False),  # below 1 - low, good: still pushed up
    (0.5, -2.0, 1.8, 0.0, True),  # below, bad: no more push
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
def test_a_token_the_policy_has_moved_far_from_keeps_the_loss_finite(gap, advantage):
    one = jnp.ones((1, 1))

    def loss(logp):
        return surrogate(logp, -one, advantage * one, one > 0)[0].sum()

    value, grad = jax.value_and_grad(loss)(-one + gap)
    assert np.isfinite(value) and np.isfinite(grad).all()

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rsearch.config.checks import MOST_BFLOAT16_DECAY
from rsearch.learn.optimizer import make_optimizer
from tests.rollout import tiny

SETTINGS = dict(
    lr=0.1,
    warmup_steps=3,
    decay_steps=0,
    b1=0.9,
    b2=0.95,
    eps=1e-3,
    weight_decay=0.5,
    max_grad_norm=2.0,
)


def apply(params, grads, **changes):
    """Return the parameters after each of these gradients."""
    optimizer = make_optimizer(**SETTINGS | changes)
    state, path = optimizer.init(params), []

    @jax.jit
    def update(params, state, grad):
        change, state = optimizer.update(grad, state, params)
        return jax.tree.map(jnp.add, params, change), state

    for grad in grads:
        params, state = update(params, state, grad)
        path.append(params)
    return path


def rates(count, **changes):
    """Return each update's learning rate; eps 0 and a constant gradient reveal it."""
    params = {"gate": jnp.zeros((1, 1))}
    grads = [{"gate": jnp.ones((1, 1))}] * count
    path = apply(params, grads, weight_decay=0.0, eps=0.0, **changes)
    places = [0.0, *(-float(p["gate"][0, 0]) for p in path)]
    return np.diff(places)


def test_warm_up_is_linear_and_starts_above_0():
    third = 0.1 / 3
    np.testing.assert_allclose(rates(5), [third, 2 * third, 0.1, 0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(rates(3, warmup_steps=0), [0.1] * 3, rtol=1e-5)
    np.testing.assert_allclose(rates(2, warmup_steps=1), [0.1] * 2, rtol=1e-5)


def test_decay_is_linear_to_a_tenth_and_stays_there():
    falling = rates(8, warmup_steps=2, decay_steps=6)
    expected = [0.05, 0.1, 0.1, 0.07, 0.04, 0.01, 0.01, 0.01]
    np.testing.assert_allclose(falling, expected, rtol=1e-5)


def test_as_in_the_public_code_the_first_step_may_have_a_rate_of_0():
    """Two updates per step and two warm-up steps: 0, 0, half, half, full rate."""
    actual = rates(6, updates_per_rate=2, warmup_steps=2)
    np.testing.assert_allclose(actual, [0, 0, 0.05, 0.05, 0.1, 0.1], rtol=1e-5)
    actual = rates(2, updates_per_rate=2, warmup_steps=0)
    np.testing.assert_allclose(actual, [0.1, 0.1], rtol=1e-5)


def test_updates_equal_adamw_by_hand():
    """Three steps of arXiv 1711.05101 in numpy, after clipping to a norm of 2."""
    rng = np.random.default_rng(0)
    params = {"gate": rng.normal(size=(2, 3)), "scale": rng.normal(size=3)}
    grads = [
        {k: 2 * rng.normal(size=v.shape) for k, v in params.items()} for _ in "abc"
    ]
    grads[2] = {k: g / 100 for k, g in grads[2].items()}  # below the norm: not clipped
    m = {k: 0.0 for k in params}
    v, p, expected = dict(m), dict(params), []
    for step, grad in enumerate(grads, start=1):
        norm = np.sqrt(sum((g**2).sum() for g in grad.values()))
        assert (norm > 2) == (step < 3)
        rate = 0.1 * min(1, step / 3)
        for k, g in grad.items():
            g = g * min(1, 2 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g**2
            move = m[k] / (1 - 0.9**step)
            move = move / (np.sqrt(v[k] / (1 - 0.95**step)) + 1e-3)
            decay = 0.5 * p[k] if k == "gate" else 0
            p[k] = p[k] - rate * (move + decay)
        expected.append(dict(p))
    as_float32 = jax.tree.map(jnp.float32, (params, grads))
    for ours, theirs in zip(apply(*as_float32), expected):
        for k in params:
            np.testing.assert_allclose(ours[k], theirs[k], atol=1e-5)


@pytest.mark.parametrize("tie", [True, False])
def test_only_matrices_decay(tie):
    params = tiny.params(tie_embeddings=tie)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (after,) = apply(params, [zeros], warmup_steps=0)
    vectors = {"scale", "q_bias", "k_bias", "v_bias"}
    seen = set()
    for (path, before), now in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(after)
    ):
        name = path[-1].key
        seen.add(name)
        factor = 1.0 if name in vectors else 0.95
        np.testing.assert_allclose(now, factor * before, rtol=1e-5, atol=1e-7)
    assert vectors < seen and "embedding" in seen


def moments(state):
    """Return (first, second) moment of the only matrix."""
    (adam,) = [s for s in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(s)]
    return adam.mu["gate"], adam.nu["gate"]


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_moments_in_bfloat16_equal_those_in_float32_up_to_rounding():
    """Updates compute in float32 and then round the moments; numpy does it by hand."""
    rng = np.random.default_rng(1)
    params = {"gate": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)}
    float32_state = dict(warmup_steps=0, max_grad_norm=1e9, weight_decay=0.0, eps=1e-8)
    optimizer = make_optimizer(**SETTINGS | float32_state, moments_dtype="bfloat16")
    exact = make_optimizer(**SETTINGS | float32_state)
    state, other = optimizer.init(params), exact.init(params)
    for step in range(1, 41):
        grad = rng.normal(size=(8, 16)).astype(np.float32)
        m, v = map(np.float32, moments(state))
        change, state = optimizer.update({"gate": grad}, state, params)
        expected, other = exact.update({"gate": grad}, other, params)
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        move = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        np.testing.assert_allclose(change["gate"], -0.1 * move, rtol=1e-4, atol=1e-7)
        for ours, theirs in zip(moments(state), (m, v)):
            assert ours.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.float32(ours), theirs, rtol=2**-8)
    for ours, theirs, decay in zip(moments(state), moments(other), (0.9, 0.95)):
        # Each rounding error is at most 2^-8 of the moment, and decays with it.
        largest = 2**-8 / (1 - decay)
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(
            np.float32(ours), theirs, atol=largest * scale, rtol=0
        )
    # The resulting step is off by less than a tenth of the learning rate.
    np.testing.assert_allclose(change["gate"], expected["gate"], atol=0.1 * 0.1)


@pytest.mark.parametrize(("decay", "stays"), [(MOST_BFLOAT16_DECAY, 0), (0.999, 1)])
def test_a_moment_in_bfloat16_decays_unless_its_rate_is_too_close_to_1(decay, stays):
    """Start from every bfloat16 in [1, 2), and take steps with zero gradients."""
    starts = jnp.arange(1, 2, 2**-7, dtype=jnp.float32)[None]
    optimizer = make_optimizer(
        **SETTINGS | dict(b1=decay, b2=decay), moments_dtype="bfloat16"
    )
    params = {"gate": starts}
    first = optimizer.init(params)
    full = starts.astype(jnp.bfloat16)
    state = jax.tree.map(lambda x: full if x.shape == full.shape else x, first)
    for _ in range(3):
        _, state = optimizer.update({"gate": 0 * starts}, state, params)
    for moment in moments(state):
        stuck = np.asarray(moment == full)
        assert stuck.any() == stays and (stays or (moment < full).all())

"""Compare the TPU kernel, interpreted here, with attention that forms all scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.models.attention.cached import attend
from rsearch.models.attention.splash import splash_after, splash_within
from tests.models.attention.test_blocked import (
    check_kernel,
    operands,
    texts,
)

after = jax.jit(functools.partial(splash_after, interpret=True))


@pytest.mark.parametrize("tokens", [129, 700])  # one block and several
def test_the_kernel_equals_plain_attention(tokens):
    q, k, v = operands(tokens, rows=2, width=16)
    check_kernel(splash_within, q, k, v, texts(2, tokens))


@pytest.mark.parametrize("tokens", [1, 20, 140])
def test_new_tokens_attend_to_earlier_tokens_and_to_themselves(tokens):
    slots, length = 600, np.array([0, 77, 450])
    q, new_k, new_v = operands(tokens, width=16)
    _, old_k, old_v = operands(slots, width=16)
    actual = after(
        *(q, old_k, old_v, new_k.swapaxes(1, 2), new_v.swapaxes(1, 2)),
        jnp.asarray(length),
    )
    k, v = np.array(old_k), np.array(old_v)
    for row, first in enumerate(length):
        k[row, :, first : first + tokens] = new_k[row]
        v[row, :, first : first + tokens] = new_v[row]
    position = length[:, None] + np.arange(tokens)
    visible = np.arange(slots) <= position[:, :, None]
    np.testing.assert_allclose(actual, attend(q, k, v, visible), atol=2e-6)


def test_cache_slots_beyond_a_rows_length_have_no_influence():
    q, new_k, new_v = operands(8, width=16)
    _, k, v = operands(600, width=16)
    own = new_k.swapaxes(1, 2), new_v.swapaxes(1, 2)
    length = jnp.array([0, 5, 300])
    actual = after(q, k, v, *own, length)
    k, v = k.at[:, :, 300:].set(9.0), v.at[:, :, 300:].set(9.0)
    again = after(q, k, v, *own, length)
    np.testing.assert_array_equal(actual, again)

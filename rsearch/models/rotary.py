"""Rotary position embedding and the scaling of its frequencies.

Dimensions: B rows, T tokens, N heads, C head width, R = rotated channels / 2.
"""

import math

import jax
import jax.numpy as jnp

from rsearch.models.spec import DecoderSpec, LinearScaling

ROTARY_PAIRS = ("halves", "neighbours")


def rotary_frequencies(spec: DecoderSpec) -> jax.Array:
    """Return the [R] rotary frequencies of a decoder, in radians per position.

    Scaling is included. Sources: RoPE (arXiv 2104.09864); linear scaling (arXiv
    2306.15595); Llama 3's scaling follows Llama 3.1's reference code.
    """
    width = spec.rotary_dim or spec.head_dim
    exponent = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    freq = 1.0 / (spec.rope_theta**exponent)
    scaling = spec.rope_scaling
    if scaling is None:
        return freq
    if isinstance(scaling, LinearScaling):
        return freq / scaling.factor
    wavelength = 2 * math.pi / freq
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_freq = (1 - smooth) * freq / scaling.factor + smooth * freq
    return jnp.where(
        wavelength > low,
        freq / scaling.factor,
        jnp.where(wavelength < high, freq, blended_freq),
    )


def rotation(spec: DecoderSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cosine and sine of the rotary angles, [B, T, 1, R] float32 each.

    They are computed once for all layers and heads: without the barrier, XLA's CPU
    backend recomputes them for each.

    Args:
        spec: the decoder's shape.
        positions: [B, T] int.
    """
    angle = positions.astype(jnp.float32)[..., None, None]
    angle = angle * rotary_frequencies(spec)[None, None, None]
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(
    x: jax.Array, turns: tuple[jax.Array, jax.Array], *, pairs: str = "halves"
) -> jax.Array:
    """Rotate the first 2R channels of each head; leave the others as they are.

    Args:
        x: [B, T, N, C] queries or keys.
        turns: cosine and sine from `rotation`.
        pairs: "halves" rotates channel i with i + R, as most Hugging Face checkpoints
            require; "neighbours" rotates 2i with 2i + 1, as in the RoPE paper.

    Returns:
        [B, T, N, C] in the dtype of x.
    """
    assert pairs in ROTARY_PAIRS, pairs
    cos, sin = turns
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        rotated_channels = rotate(x[..., :width], turns, pairs=pairs)
        return jnp.concatenate([rotated_channels, x[..., width:]], axis=-1)
    wide = x.astype(jnp.float32)
    if pairs == "halves":
        first, second = jnp.split(wide, 2, axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    rotated_channels = first * cos - second * sin, second * cos + first * sin
    if pairs == "halves":
        rotated_channels = jnp.concatenate(rotated_channels, axis=-1)
    else:
        rotated_channels = jnp.stack(rotated_channels, axis=-1).reshape(x.shape)
    return rotated_channels.astype(x.dtype)

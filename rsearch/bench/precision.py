"""Products of float32 numbers, alike in all subjects."""

import jax


def multiply_in_full(dtype: str = "float32") -> None:
    """Has JAX multiply float32 numbers in float32, as torch does by itself.

    By itself JAX takes TF32 on a GPU and bfloat16 on a TPU. On a CPU it is float32
    anyway, and nothing changes.

    Args:
        dtype: that the subject computes in; bfloat16 needs nothing.
    """
    if dtype == "float32" and jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")

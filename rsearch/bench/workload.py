"""The workload that this package and its peers share: ids, lengths and rewards.

It imports only NumPy at the top, since peers run without JAX.
"""

import numpy as np

REWARD_DIVISOR = 7
MAX_GRAD_NORM = 1.0


def prompt_tokens(batch: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return [B, P] int32 ids of the prompts that every subject reads."""
    rng = np.random.default_rng(0)
    return rng.integers(3, min(vocab_size, 256), (batch, num_tokens)).astype(np.int32)


def turn_lengths(
    num_rollouts: int, num_turns: int, num_new: int, spread: float = 0.0
) -> np.ndarray:
    """Return [R, turns] int32 numbers of tokens that a rollout writes in each turn.

    Args:
        num_rollouts, num_turns: R, and the number of turns of each rollout.
        num_new: mean tokens of a turn.
        spread: share of the mean by which a turn may be longer or shorter, uniformly
            distributed; below 1.
    """
    assert 0 <= spread < 1, spread
    rng = np.random.default_rng(2)
    share = rng.uniform(1 - spread, 1 + spread, (num_rollouts, num_turns))
    return np.maximum(1, np.round(num_new * share)).astype(np.int32)


def prompt_rows(
    num_questions: int, num_prompt: int, vocab_size: int, step: int
) -> np.ndarray:
    """Return [Q, P] int32 ids of the prompts of a GRPO step."""
    rng = np.random.default_rng(step)
    return rng.integers(3, vocab_size, (num_questions, num_prompt)).astype(np.int32)


def token_rows(num_rows: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return [B, T] int32 ids that every subject trains on."""
    rng = np.random.default_rng(1)
    return rng.integers(0, vocab_size, (num_rows, num_tokens)).astype(np.int32)


def multiply_in_full(dtype: str = "float32") -> None:
    """Make JAX multiply float32 numbers in float32, as torch does by default.

    JAX's default is TF32 on a GPU and bfloat16 on a TPU. On a CPU it is float32
    already, and nothing changes.

    Args:
        dtype: dtype that the subject computes in; bfloat16 needs no setting.
    """
    import jax

    if dtype == "float32" and jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")

"""What every subject of the rollout benchmarks reads, and how much it writes."""

import numpy as np


def prompt_tokens(batch: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """[B, P] int32 ids that every subject reads."""
    rng = np.random.default_rng(0)
    return rng.integers(3, min(vocab_size, 256), (batch, num_tokens)).astype(np.int32)


def turn_lengths(
    num_rollouts: int, num_turns: int, num_new: int, spread: float = 0.0
) -> np.ndarray:
    """[R, turns] int32 tokens that each rollout writes in each of its turns.

    Args:
        num_rollouts, num_turns: R and how many turns of each.
        num_new: tokens of a turn, in the middle.
        spread: share of them that a turn may be longer or shorter, each length as
            likely as the others; below 1.
    """
    assert 0 <= spread < 1, spread
    rng = np.random.default_rng(2)
    share = rng.uniform(1 - spread, 1 + spread, (num_rollouts, num_turns))
    return np.maximum(1, np.round(num_new * share)).astype(np.int32)

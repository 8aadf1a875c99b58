"""What both sides of a benchmark of whole GRPO steps have in common."""

import numpy as np

REWARD_DIVISOR = 7


def prompt_rows(num_questions, num_prompt, vocab_size, step) -> np.ndarray:
    """[Q, P] int32 ids of the prompts of a step."""
    rng = np.random.default_rng(step)
    return rng.integers(3, vocab_size, (num_questions, num_prompt)).astype(np.int32)

"""Rows of a few tokens, written by hand or drawn."""

import numpy as np
from hypothesis import strategies as st

from rsearch.learn.batch import Batch


def rows_of(item, num_rows, num_columns):
    """Return a strategy of arrays with a fixed shape, so that nothing is recompiled."""
    row = st.lists(item, min_size=num_columns, max_size=num_columns)
    return st.lists(row, min_size=num_rows, max_size=num_rows).map(np.array)


def batch_of(mask, reward, *, response=None, behavior=0.0, reference=0.0, values=None):
    """Return rows with this mask; a single number applies to every token."""
    mask = np.array(mask, bool)
    whole = np.ones(mask.shape, np.float32)
    return Batch(
        tokens=np.zeros(mask.shape, np.int32),
        from_policy=mask,
        in_response=mask if response is None else np.array(response, bool),
        behavior_logp=whole * behavior,
        reference_logp=whole * reference,
        reward=np.array(reward, np.float32),
        is_signal=np.ones(len(mask), bool),
        advantage=0 * whole,
        values=None if values is None else np.array(values, np.float32),
    )

"""Share the prefill of prefixes that several prompts have in common.

All prompts of a method begin with the same worked examples or system prompt, which are
read only once. A prefix is a whole number of the chunks that a prompt is read in. The
rest is then read exactly as it would be without sharing, so that no answer depends on
what is shared.
"""

import collections
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rsearch.rollout.interface import Context

MAX_PREFIXES = 4  # kept in memory; a method has few kinds of prompts


class SharedPrefixes:
    """The contexts of recently used prefixes."""

    def __init__(self, chunk: int, read: Callable[[np.ndarray], Context]):
        """Start without any prefix.

        Args:
            chunk: number of tokens read at a time.
            read: (ids) -> the context of one row that has read them.
        """
        self._chunk, self._read = chunk, read
        # {bytes of a prefix's first chunk: (its ids, its context)}
        self._prefixes: dict[bytes, tuple[np.ndarray, Context]] = {}

    def clear(self) -> None:
        """Drop all prefixes, because the parameters they were computed with change."""
        self._prefixes.clear()

    def groups(
        self, prompts: Sequence[np.ndarray]
    ) -> list[tuple[list[int], Context | None, int]]:
        """Group prompts by their shared prefix.

        A prefix leaves at least one token of each prompt to read, which its logits come
        from.

        Args:
            prompts: [n] int32 ids of each prompt.

        Returns:
            (indices of the prompts, context of their prefix, its number of tokens) for
            each group; prompts that share nothing form a group with (None, 0).
        """
        members = collections.defaultdict(list)
        for i, prompt in enumerate(prompts):
            is_long = len(prompt) > self._chunk
            members[prompt[: self._chunk].tobytes() if is_long else b""].append(i)
        unshared_indices = members.pop(b"", [])
        groups: list[tuple[list[int], Context | None, int]] = []
        for first_chunk, indices in members.items():
            if first_chunk in self._prefixes or len(indices) > 1:
                context, size = self._shared(first_chunk, [prompts[i] for i in indices])
                groups.append((indices, context, size))
            else:
                unshared_indices += indices
        if unshared_indices:
            groups.append((unshared_indices, None, 0))
        return groups

    def _shared(self, first_chunk: bytes, prompts) -> tuple[Context, int]:
        """Return the longest prefix of prompts with this first chunk, and its size.

        A prefix that is already held is shortened to what these prompts share.
        """
        ids, context = self._prefixes.pop(first_chunk, (prompts[0], None))
        size = min(_num_equal(ids, prompt[:-1]) for prompt in prompts)
        size -= size % self._chunk
        if context is None:
            context = self._read(ids[:size])
        if size < context.cache.k.shape[3]:
            cache = jax.tree.map(lambda x: x[:, :, :, :size], context.cache)
            context = Context(cache, np.array([size], np.int32), context.logits)
        self._prefixes[first_chunk] = ids[:size], context
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.pop(next(iter(self._prefixes)))  # the least recently used
        return context, size


def _num_equal(ids: np.ndarray, other_ids: np.ndarray) -> int:
    """Return the number of tokens with which both sequences begin."""
    size = min(len(ids), len(other_ids))
    differs = np.flatnonzero(ids[:size] != other_ids[:size])
    return int(differs[0]) if len(differs) else size

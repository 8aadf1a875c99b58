"""The beginnings that prompts share, as the device has read them.

Worked examples or a system prompt lead all prompts of a method, and are read once. A
prefix is a number of chunks that a prompt is read in: the rest is then read as it would
be without the sharing, so that no answer depends on what is shared.
"""

import collections
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rsearch.rollout.interface import Context

MAX_PREFIXES = 4  # that are held: a method has few kinds of prompts


class SharedPrefixes:
    """The contexts of the prefixes that were used last."""

    def __init__(self, chunk: int, read: Callable[[np.ndarray], Context]):
        """Begin without a prefix.

        Args:
            chunk: tokens that are read at a time.
            read: (ids) -> the context of one row that has read them.
        """
        self._chunk, self._read = chunk, read
        # Of each first chunk, its bytes: the prefix that it begins.
        self._held: dict[bytes, tuple[np.ndarray, Context]] = {}

    def clear(self) -> None:
        """Drop all prefixes, since the parameters change that have read them."""
        self._held.clear()

    def groups(
        self, prompts: Sequence[np.ndarray]
    ) -> list[tuple[list[int], Context | None, int]]:
        """Return (numbers of prompts, their prefix, its tokens) of groups of prompts.

        Those that share nothing are a group without a prefix. A prefix leaves each
        prompt a token at least, which its logits follow from.

        Args:
            prompts: [n] int32 ids of each.
        """
        members = collections.defaultdict(list)
        for i, prompt in enumerate(prompts):
            is_long = len(prompt) > self._chunk
            members[prompt[: self._chunk].tobytes() if is_long else b""].append(i)
        alone = members.pop(b"", [])
        groups: list[tuple[list[int], Context | None, int]] = []
        for first, numbers in members.items():
            if first in self._held or len(numbers) > 1:
                context, size = self._shared(first, [prompts[i] for i in numbers])
                groups.append((numbers, context, size))
            else:
                alone += numbers
        if alone:
            groups.append((alone, None, 0))
        return groups

    def _shared(self, first: bytes, prompts) -> tuple[Context, int]:
        """Return the longest prefix of prompts with the same first chunk, and its size.

        What is held of an earlier one becomes as short as these share it.
        """
        ids, context = self._held.pop(first, (prompts[0], None))
        size = min(_num_equal(ids, prompt[:-1]) for prompt in prompts)
        size -= size % self._chunk
        if context is None:
            context = self._read(ids[:size])
        if size < context.cache.k.shape[3]:
            cache = jax.tree.map(lambda x: x[:, :, :, :size], context.cache)
            context = Context(cache, np.array([size], np.int32), context.logits)
        self._held[first] = ids[:size], context
        if len(self._held) > MAX_PREFIXES:
            self._held.pop(next(iter(self._held)))  # the one that was used first
        return context, size


def _num_equal(ids: np.ndarray, others: np.ndarray) -> int:
    """Return the number of tokens that two texts both begin with."""
    size = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:size] != others[:size])
    return int(differs[0]) if len(differs) else size

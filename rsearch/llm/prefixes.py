"""Share the prefill of prefixes that several prompts have in common.

All prompts of a method begin with the same worked examples or system prompt, and the
next prompt of a question often begins like its last one. Both are read only once. A
prefix is a whole number of the chunks that a prompt is read in. The rest is then read
exactly as it would be without sharing, so that no answer depends on what is shared.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
import xxhash

from rsearch.llm.requests import Generate
from rsearch.rollout.interface import Context

MAX_PREFIXES = 4  # kept in memory; a method has few kinds of prompts


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A request and its encoded prompt.

    Attributes:
        index: number of the request in its call.
        ids: [n] int32.
        name: names its random keys.
        prefixes: its `prefix_digests`.
    """

    index: int
    request: Generate
    ids: np.ndarray
    name: tuple[int, int]
    prefixes: Sequence[bytes] = ()


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


def choose_rows(
    waiting: Sequence[EncodedPrompt],
    free_rows: Sequence[int],
    last_prompts: Sequence[EncodedPrompt | None],
    chunk: int,
) -> list[tuple[int, EncodedPrompt, int]]:
    """Return (row, prompt, number of its ids in the row's cache) of new prompts.

    A prompt takes a free row that shares most with it, in whole chunks, so that the
    rest is read exactly as without sharing. Prompts that share nothing take the
    rows that are left, the longest first: prompts that are read together cost as
    much as the longest of them.

    Args:
        waiting: prompts to choose from.
        free_rows: rows to choose from.
        last_prompts: prompt that each row has read last.
        chunk: number of tokens that are read at a time.
    """
    rows_by_prefix: dict[bytes, list[int]] = collections.defaultdict(list)
    for row in free_rows:
        if last_prompts[row] is not None:
            for prefix in last_prompts[row].prefixes:
                rows_by_prefix[prefix].append(row)

    # Chunks that each prompt shares with a row: all up to the longest shared prefix.
    num_shared = {p: sum(x in rows_by_prefix for x in p.prefixes) for p in waiting}
    unused_rows, admissions, other_prompts = dict.fromkeys(free_rows), [], []
    for prompt in sorted(waiting, key=lambda p: (-num_shared[p], -len(p.ids))):
        for num in range(num_shared[prompt], 0, -1):
            rows = rows_by_prefix[prompt.prefixes[num - 1]]
            while rows and rows[-1] not in unused_rows:
                rows.pop()
            if rows:
                admissions.append((rows[-1], prompt, num * chunk))
                del unused_rows[rows[-1]]
                break
        else:
            other_prompts.append(prompt)
    return admissions + [(row, p, 0) for row, p in zip(unused_rows, other_prompts)]


def prefix_digests(ids: np.ndarray, chunk: int) -> list[bytes]:
    """Return digests of the prefixes of 1, 2, ... chunks.

    At least one token is left to read, which the logits come from.

    Args:
        ids: [n] int32 ids of a prompt.
        chunk: number of tokens that are read at a time.
    """
    hasher, digests = xxhash.xxh3_128(), []
    for start in range(0, len(ids) - chunk, chunk):
        hasher.update(ids[start : start + chunk].tobytes())
        digests.append(hasher.digest())
    return digests


def _num_equal(ids: np.ndarray, other_ids: np.ndarray) -> int:
    """Return the number of tokens with which both sequences begin."""
    size = min(len(ids), len(other_ids))
    differs = np.flatnonzero(ids[:size] != other_ids[:size])
    return int(differs[0]) if len(differs) else size

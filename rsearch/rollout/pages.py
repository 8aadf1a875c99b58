"""Track on the host which pages of the KV cache each row holds."""

from collections.abc import Sequence

import numpy as np

from rsearch.rollout.interface import SamplerLike


def num_pages(sampler: SamplerLike, num_rows: int, cache_tokens: int) -> int:
    """Return the number of pages that hold this many tokens; 0 if rows share none.

    Args:
        sampler: gives the page size and the number of shards of the rows.
        num_rows: B; the rows of a shard share its pages.
        cache_tokens: capacity for all rows together; 0 gives each row as much as it can
            ever need, without sharing.

    Raises:
        ValueError: `cache_tokens` is too small for one conversation per shard, or the
            rows cannot be split into as many shards as the devices have.
    """
    if not cache_tokens:
        return 0
    if num_rows % sampler.num_shards:
        raise ValueError(
            f"config.rollout.max_concurrent = {num_rows}: must be a multiple "
            f"of {sampler.num_shards}, the number of shards of a host's rows, if "
            "config.rollout.cache_tokens is set: each shard has its own pages and "
            "devices"
        )
    num_shards = sampler.row_shards(num_rows)
    shard_pages = cache_tokens // num_shards // sampler.page_tokens
    if shard_pages < sampler.row_pages:
        min_tokens = num_shards * sampler.row_pages * sampler.page_tokens
        raise ValueError(
            f"config.rollout.cache_tokens = {cache_tokens}: must be at least "
            f"{min_tokens}, one conversation of maximum length in each of {num_shards} "
            "shards of the rows; 0 gives room for all"
        )
    max_pages = num_rows // num_shards * sampler.row_pages  # more are never needed
    return num_shards * min(shard_pages, max_pages)


class PagePool:
    """The pages of B rows, split into shards like the rows.

    Attributes:
        table: [B, n] int32 pages of each row in order, padded with `num_pages`, which
            is no page. None if every row has its own slots.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        num_pages: int = 0,
        page_tokens: int = 1,
        row_pages: int = 1,
        num_shards: int = 1,
    ):
        """Start with all pages free.

        Args:
            num_rows: B.
            num_pages: P, pages of all rows, a multiple of `num_shards`. 0 means that
                each row has all the slots it can ever need and this pool is unused.
            page_tokens: tokens per page.
            row_pages: n, pages of the longest row; each shard has at least this many.
            num_shards: number of shards the rows are split into, each with its own
                pages.
        """
        self.table = None
        if not num_pages:
            return
        shard_pages = num_pages // num_shards
        assert num_pages % num_shards == 0 and shard_pages >= row_pages
        self.table = np.full((num_rows, row_pages), num_pages, np.int32)
        self._no_page = num_pages
        self._page_tokens = page_tokens
        self._shard_rows = num_rows // num_shards
        # Pages are popped from the end of a list: the lowest of each shard come first.
        self._free = [
            list(range((shard + 1) * shard_pages - 1, shard * shard_pages - 1, -1))
            for shard in range(num_shards)
        ]

    def has_room(self, slot: int, num_tokens: int) -> bool:
        """Return whether enough pages are free for the row to hold this many tokens."""
        if self.table is None:
            return True
        return self._num_missing(slot, num_tokens) <= len(self._free_pages(slot))

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Give the row pages for this many tokens; return whether enough were free."""
        if not self.has_room(slot, num_tokens):
            return False
        if self.table is not None:
            row, free_pages = self.table[slot], self._free_pages(slot)
            first_column = self._num_held(slot)
            for column in range(
                first_column, first_column + self._num_missing(slot, num_tokens)
            ):
                row[column] = free_pages.pop()
        return True

    def release(self, slot: int) -> None:
        """Release all pages of the row."""
        if self.table is None:
            return
        row = self.table[slot]
        # Reversed, so that the row's first page is the next to be handed out.
        self._free_pages(slot).extend(row[: self._num_held(slot)][::-1].tolist())
        row[:] = self._no_page

    def rows(self, slots: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """Return the [E, n] pages of these rows; a slot beyond the last has none."""
        if self.table is None:
            return None
        padding = np.full((1, self.table.shape[1]), self._no_page, np.int32)
        return np.concatenate([self.table, padding])[slots]

    def _free_pages(self, slot: int) -> list[int]:
        return self._free[slot // self._shard_rows]

    def _num_held(self, slot: int) -> int:
        return int(np.sum(self.table[slot] != self._no_page))

    def _num_missing(self, slot: int, num_tokens: int) -> int:
        """Return how many more pages the row needs to hold this many tokens."""
        num_needed = -(-num_tokens // self._page_tokens)
        return max(0, num_needed - self._num_held(slot))

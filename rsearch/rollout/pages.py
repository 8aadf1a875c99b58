"""Which pages of the cache each row holds, as the host keeps account of it."""

import numpy as np

from rsearch.rollout.decode import Sampler


def num_pages(sampler: Sampler, num_rows: int, cache_tokens: int) -> int:
    """Pages that hold so many tokens; 0 where every row has slots of its own.

    Args:
        sampler: that says how large they are.
        num_rows: B rows that share them, those of a part the same ones.
        cache_tokens: of all rows together; 0 is what they can ever hold.

    Raises:
        ValueError: too few for one conversation in each part, or rows that cannot be
            cut into as many parts as the devices make.
    """
    if not cache_tokens:
        return 0
    if num_rows % sampler.num_shards:
        raise ValueError(
            f"config.rollout.slots = {num_rows}: with config.rollout.cache_tokens must "
            f"be a multiple of {sampler.num_shards}, the parts of a host's rows, each "
            "with pages and devices of its own"
        )
    parts, most = sampler.num_parts(num_rows), sampler.row_pages
    each = cache_tokens // parts // sampler.page_tokens
    if each < most:
        raise ValueError(
            f"config.rollout.cache_tokens = {cache_tokens}: must be at least "
            f"{parts * most * sampler.page_tokens}, one conversation of the longest in "
            f"each of {parts} parts of the rows; 0 is room for all"
        )
    return parts * min(each, num_rows // parts * most)


class Pool:
    """The pages of B rows, cut into parts as the rows are.

    Attributes:
        table: [B, n] int32 pages of each row in order; behind them `num_pages`, which
            is nobody's. None where every row has slots of its own.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        num_pages: int = 0,
        page_tokens: int = 1,
        row_pages: int = 1,
        parts: int = 1,
    ):
        """All of it free.

        Args:
            num_rows: B.
            num_pages: P, of all rows together, a multiple of `parts`; 0: a row has all
                that it can ever hold.
            page_tokens: tokens of a page.
            row_pages: n, pages of the longest row; each part has so many.
            parts: that the rows are cut into, each with pages of its own.
        """
        self.table = None
        if not num_pages:
            return
        assert num_pages % parts == 0 and num_pages // parts >= row_pages
        self.table = np.full((num_rows, row_pages), num_pages, np.int32)
        self._nobody, self._page_tokens = num_pages, page_tokens
        self._part_rows = num_rows // parts
        each = num_pages // parts
        # The lowest first: the last to be taken is at the end of the list.
        self._free = [
            list(range((part + 1) * each - 1, part * each - 1, -1))
            for part in range(parts)
        ]

    def has(self, slot: int, num_tokens: int) -> bool:
        """Whether the row could hold so many tokens."""
        return self.table is None or self._missing(slot, num_tokens) <= len(
            self._free[slot // self._part_rows]
        )

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Whether the row can hold so many tokens: its pages are then its own."""
        if not self.has(slot, num_tokens):
            return False
        if self.table is not None:
            row, free = self.table[slot], self._free[slot // self._part_rows]
            held = self._held(slot)
            for place in range(held, held + self._missing(slot, num_tokens)):
                row[place] = free.pop()
        return True

    def _held(self, slot) -> int:
        """Pages of the row."""
        return int(np.sum(self.table[slot] != self._nobody))

    def _missing(self, slot, num_tokens) -> int:
        """Pages that the row needs beside those it has, to hold so many tokens."""
        return max(0, -(-num_tokens // self._page_tokens) - self._held(slot))

    def release(self, slot: int) -> None:
        """The row holds nothing any more."""
        if self.table is None:
            return
        row = self.table[slot]
        self._free[slot // self._part_rows] += row[: self._held(slot)][::-1].tolist()
        row[:] = self._nobody

    def rows(self, slots) -> np.ndarray | None:
        """[E, n] tables of these slots; that of a slot beyond the last names nobody."""
        if self.table is None:
            return None
        nobody = np.full((1, self.table.shape[1]), self._nobody, np.int32)
        return np.concatenate([self.table, nobody])[slots]

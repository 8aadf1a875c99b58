"""Accounting of pages: each belongs to one row or is free; rows get only free pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.rollout.pages import PagePool, num_pages
from tests.rollout.scripted import Script

ROWS, PAGES, SIZE, LONGEST = 4, 14, 16, 6


def make_pool(parts=2):
    return PagePool(
        ROWS, num_pages=PAGES, page_tokens=SIZE, row_pages=LONGEST, num_shards=parts
    )


def held(pool, slot):
    return [page for page in pool.table[slot].tolist() if page < PAGES]


calls = st.tuples(st.integers(0, ROWS - 1), st.integers(0, LONGEST * SIZE))


@given(st.lists(calls), st.sampled_from([1, 2]))
def test_every_page_belongs_to_one_row_or_is_free(requests, parts):
    """Each request reserves pages for a row's tokens; 0 releases all of its pages."""
    pool = make_pool(parts)
    tokens = [0] * ROWS
    for slot, number in requests:
        before = [held(pool, other) for other in range(ROWS)]
        if number == 0:
            pool.release(slot)
            tokens[slot] = 0
            assert not held(pool, slot)
            continue
        shard_rows = range(slot * parts // ROWS * ROWS // parts, ROWS)[: ROWS // parts]
        free = PAGES // parts - sum(len(before[other]) for other in shard_rows)
        fits = -(-number // SIZE) - len(before[slot]) <= free
        assert pool.has_room(slot, number) == fits == pool.reserve(slot, number)
        after = [held(pool, other) for other in range(ROWS)]
        if not fits:
            assert after == before
            continue
        tokens[slot] = max(tokens[slot], number)
        assert after[slot][: len(before[slot])] == before[slot]  # it keeps its pages
        for other in range(ROWS):
            assert len(after[other]) == -(-tokens[other] // SIZE)
            first = other * parts // ROWS * PAGES // parts
            assert all(first <= p < first + PAGES // parts for p in after[other])
        everyones = [page for row_pages_held in after for page in row_pages_held]
        assert len(everyones) == len(set(everyones))


def test_the_table_of_a_padding_row_names_no_page():
    pool = make_pool()
    pool.reserve(1, 20)
    rows = pool.rows(np.array([1, ROWS]))
    assert rows.tolist() == [held(pool, 1) + [PAGES] * 4, [PAGES] * LONGEST]


def test_without_pages_every_row_has_room():
    pool = PagePool(ROWS)
    assert pool.table is None and pool.rows(np.array([0])) is None
    assert pool.has_room(0, 10**9) and pool.reserve(0, 10**9)
    pool.release(0)


def test_num_pages_is_limited_by_cache_tokens_and_by_what_rows_can_use():
    script = Script([])
    script.num_shards, script.page_tokens, script.row_pages = 2, 16, 5
    assert num_pages(script, 8, 0) == 0
    assert num_pages(script, 8, 2 * 5 * 16) == 10
    assert num_pages(script, 8, 2 * 7 * 16 + 31) == 14  # the remainder makes no page
    assert num_pages(script, 8, 10**6) == 8 * 5
    with pytest.raises(ValueError, match="cache_tokens = 159: must be at least 160"):
        num_pages(script, 8, 159)


def test_rows_that_the_shards_do_not_divide_have_no_pages():
    """Otherwise the pages could be sharded over devices although the rows are not."""
    script = Script([])
    script.num_shards, script.page_tokens = 2, 16
    assert num_pages(script, 15, 0) == 0
    with pytest.raises(
        ValueError, match=r"max_concurrent = 15: .* be a multiple of 2,"
    ):
        num_pages(script, 15, 10**6)

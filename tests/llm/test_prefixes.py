"""Prefixes that prompts share are prefilled once, in whole chunks; a few are held."""

import numpy as np
import pytest

from rsearch.llm.prefixes import (
    MAX_PREFIXES,
    EncodedPrompt,
    SharedPrefixes,
    choose_rows,
    prefix_digests,
)
from rsearch.llm.requests import Generate
from rsearch.models.attention.cached import Cache
from rsearch.rollout.interface import Context

CHUNK = 4


@pytest.fixture
def reads():
    return []


@pytest.fixture
def prefixes(reads):
    def read(ids):
        reads.append("".join(map(chr, ids)))
        cached = np.pad(ids, (0, 5))[
            None, None, None, :, None
        ]  # padded, as prompts are
        return Context(Cache(cached, cached), np.array([len(ids)]), np.zeros((1, 2)))

    return SharedPrefixes(CHUNK, read)


def groups(prefixes, *texts):
    """Return [(texts, their shared prefix)], the prefix as the contexts hold it."""
    prompts = [np.array([ord(c) for c in text], np.int32) for text in texts]
    result = []
    for numbers, context, size in prefixes.groups(prompts):
        prefix = ""
        if context is not None:
            prefix = "".join(map(chr, context.cache.k[0, 0, 0, :, 0]))
            assert context.length.tolist() == [len(prefix)]
        assert len(prefix) == size
        result.append(([texts[i] for i in numbers], prefix))
    return result


def test_prompts_share_whole_chunks_and_keep_at_least_one_token_of_their_own(
    prefixes, reads
):
    texts = ["abcdefghij", "abcdefghix", "bcde", "abcd", "abcdefgh"]
    assert groups(prefixes, *texts) == [
        (["abcdefghij", "abcdefghix", "abcdefgh"], "abcd"),
        (["bcde", "abcd"], ""),
    ]
    assert reads == ["abcd"]


def test_a_prefix_is_read_once_and_becomes_shorter_if_less_is_shared(prefixes, reads):
    assert groups(prefixes, "abcdefghi", "abcdefghj")[0][1] == "abcdefgh"
    assert groups(prefixes, "abcdefghk") == [(["abcdefghk"], "abcdefgh")]
    assert groups(prefixes, "abcdeFghk") == [(["abcdeFghk"], "abcd")]
    assert groups(prefixes, "abcdefghk") == [(["abcdefghk"], "abcd")]
    assert reads == ["abcdefgh"]
    prefixes.clear()
    assert groups(prefixes, "abcdefghk") == [(["abcdefghk"], "")]


def test_only_the_last_used_prefixes_are_held(prefixes, reads):
    pairs = [(f"{i}abcx", f"{i}abcy") for i in range(MAX_PREFIXES + 1)]
    for pair in pairs:
        groups(prefixes, *pair)
        groups(prefixes, *pairs[1])  # keeps it in use
    assert groups(prefixes, pairs[0][0])[0][1] == ""
    assert groups(prefixes, pairs[1][0])[0][1] == "1abc"
    assert len(reads) == len(pairs)


def prompt(text):
    ids = np.array([ord(c) for c in text], np.int32)
    return EncodedPrompt(0, Generate(text, 1), ids, (0, 0), prefix_digests(ids, CHUNK))


@pytest.mark.parametrize(
    ("read", "waiting", "expected"),
    [
        # The row that shares most.
        (["abcdefghi", "abcdefghijklm", None], ["abcdefghijklmn"], {1: 12}),
        # The prompt that shares most comes first, and the other takes a shorter prefix.
        (["abcdefghi", "abcd1"], ["abcdxyz", "abcdefghi"], {1: 4, 0: 8}),
        # A token is left to read, and only whole chunks are shared.
        (["abcdefgh"], ["abcdefgh"], {0: 4}),
        (["abcdefg"], ["abcdefghij"], {0: 4}),
        # The rest take what is left, the longest first.
        ([None, "abcd1"], ["12", "abcd2", "123"], {1: 4, 0: 0}),
        (["1234567", None], ["12", "abc"], {0: 0, 1: 0}),
    ],
)
def test_a_prompt_takes_the_row_that_shares_most_with_it(read, waiting, expected):
    rows = [None if text is None else prompt(text) for text in read]
    prompts = [prompt(text) for text in waiting]
    chosen = choose_rows(prompts, range(len(rows)), rows, CHUNK)
    assert {row: num for row, _, num in chosen} == expected
    assert len({p for _, p, _ in chosen}) == len(chosen)
    for row, p, num in chosen:
        if num:
            np.testing.assert_array_equal(p.ids[:num], rows[row].ids[:num])
    unlike = [len(p.ids) for _, p, num in chosen if not num]
    assert unlike == sorted(unlike, reverse=True)

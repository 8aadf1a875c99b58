import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rsearch.rollout.stop_strings import byte_automaton, token_automaton
from tests.rollout import tiny

LETTERS = st.text("ab<é€𝄞", min_size=1, max_size=5)
STOPS = st.lists(LETTERS, min_size=1, max_size=4)


@st.composite
def bytes_near(draw, stops):
    """Draw bytes in which whole and partial stop strings are likely."""
    parts = draw(
        st.lists(
            st.one_of(
                st.sampled_from(stops).map(str.encode),
                st.binary(max_size=3),
                st.sampled_from(stops).map(lambda s: s.encode()[:-1]),
                st.sampled_from(stops).map(lambda s: s.encode()[1:]),
            ),
            max_size=8,
        )
    )
    return b"".join(parts)


def run(table, symbols):
    """Return the states after each symbol."""
    state, states = 0, []
    for symbol in symbols:
        state = int(table[state, symbol])
        states.append(state)
    return states


def naive(stops, pieces):
    """Return, for each piece, whether the bytes up to its end hold a stop string."""
    return [
        any(stop.encode() in b"".join(pieces[: i + 1]) for stop in stops)
        for i in range(len(pieces))
    ]


def matches(table, symbols):
    return [state == len(table) - 1 for state in run(table, symbols)]


@given(data=st.data(), stops=STOPS)
def test_bytes_match_as_soon_as_they_contain_a_stop_string(data, stops):
    text = data.draw(bytes_near(stops))
    pieces = [bytes([b]) for b in text]
    assert matches(byte_automaton(stops), text) == naive(stops, pieces)


@pytest.mark.fault(25, "split over tokens")
@given(data=st.data(), stops=STOPS)
def test_tokens_match_wherever_their_boundaries_are(data, stops):
    vocabulary = data.draw(st.lists(bytes_near(stops), min_size=1, max_size=12))
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12))
    table = token_automaton(stops, vocabulary)
    assert matches(table, ids) == naive(stops, [vocabulary[i] for i in ids])


@pytest.mark.fault(25, "split over tokens")
@given(data=st.data(), stops=STOPS)
def test_a_text_matches_regardless_of_its_split_into_tokens(data, stops):
    text = data.draw(bytes_near(stops))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    table = token_automaton(stops, pieces)
    assert matches(table, range(len(pieces))) == naive(stops, pieces)


@given(data=st.data(), stops=STOPS)
def test_bytes_match_exactly_if_the_decoded_text_holds_a_stop_string(data, stops):
    text = data.draw(bytes_near(stops))
    matched = any(matches(byte_automaton(stops), text))
    assert matched == any(s in text.decode("utf-8", "replace") for s in stops)


@given(st.lists(st.integers(0, 339), max_size=30))
@example([])
def test_the_tiny_tokenizers_ids_match_once_their_text_holds_a_tag(ids):
    stops = ("</search>", "</answer>", "é")
    table = token_automaton(stops, tiny.tokenizer().token_bytes)
    texts = [tiny.tokenizer().decode(ids[: i + 1]) for i in range(len(ids))]
    assert matches(table, ids) == [any(s in t for s in stops) for t in texts]


@pytest.mark.parametrize(
    "stops, text, first",
    [
        (("abab",), b"abaabab", 6),  # falls back to "ab", then "a"
        (("abcd", "bc"), b"abcd", 2),  # one stop ends inside another
        (("ab", "abc"), b"abc", 1),  # one is a prefix of another
        (("aab",), b"aaab", 3),
        (("</search>", "</answer>"), b"</</search>", 10),
        (("é",), b"\xc3\xc3\xa9", 2),
        (("xab", "b"), b"xab", 2),
    ],
)
def test_overlapping_stops_match_at_the_first_end(stops, text, first):
    assert matches(byte_automaton(stops), text).index(True) == first


def test_the_match_state_is_never_left():
    table = byte_automaton(["ab", "b"])
    assert set(table[-1]) == {len(table) - 1}


def test_without_stop_strings_nothing_matches():
    table = token_automaton((), [b"a", b"", b"bc"])
    assert run(table, [0, 1, 2, 2]) == [0, 0, 0, 0]


def test_a_token_without_bytes_keeps_the_state():
    table = token_automaton(["ab"], [b"a", b"", b"b"])
    assert matches(table, [0, 1, 1, 2]) == [False, False, False, True]


def test_255_bytes_of_stops_fit_and_256_are_refused():
    assert byte_automaton(["x" * 255]).shape == (256, 256)
    assert byte_automaton(["x" * 255]).dtype == np.uint8
    assert matches(byte_automaton(["x" * 255]), b"x" * 255).index(True) == 254
    with pytest.raises(ValueError, match="256 states"):
        byte_automaton(["x" * 256])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="non-empty"):
        byte_automaton(["a", ""])

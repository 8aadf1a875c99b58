"""The rule-based splitter of sentences."""

import time

import pytest

from rsearch.text.sentences import has_first_sentence, sentences


@pytest.mark.parametrize(
    "expected",
    [
        [],
        ["ok"],
        [
            "Paris is big.",
            "It is old.",
            "Yes.",
            "J. Smith was born in 1990.",
            "He left!",
        ],
        # A public port ends a sentence after U.S., St. and every initial.
        ["He lives in the U.S. now.", "Mr. X died.", "Then?", "ok"],
        ["The answer is: St. Louis.", "It is in the U.S.", "The U.S. Army was there."],
        ["J. R. R. Tolkien and J.R.R. Tolkien met J.-P. Serre.", "So what?"],
        ["It cost 3.5 million, i.e. No. 5 of Vol. 2.", "No.", "It did not."],
        ["1. Paris is big.", "2. It is old."],
        ['"Is it?" he said.', 'She said "No."', "He left (in 1990.)", "So?!", "Ok..."],
        ["Well... perhaps.", "He met Sammy Davis Jr.", "He liked Acme Inc. of Texas."],
        ["At 5 p.m. they left.", "At 6 p.m.", "They came back."],
        ["It was plan B.", "He and J. A. Smith made it."],
        ["then he left.", "she did not."],
        ["Born in 1990.", "5 people came.", "“Yes.”", "He went."],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(expected):
    text = " ".join(expected)
    assert sentences(text) == expected
    assert sentences(f"\n {text.replace(' ', '  ')}\t") == expected


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("He left. She did not.", "He left. She "),
        ("He is Mr. X of Y. She is not.", "He is Mr. X of Y. She "),
        ("He lives in the U.S. He is old.", "He lives in the U.S. He "),
        ("He lives in the U.S. Hermann is old.", None),
        ("He left.", None),
        ("", None),
    ],
)
def test_the_first_sentence_is_complete_once_no_more_text_can_change_it(text, shortest):
    prefixes = [text[:size] for size in range(len(text) + 1)]
    held = [prefix for prefix in prefixes if has_first_sentence(prefix)]
    assert held[:1] == ([] if shortest is None else [shortest])
    assert held == prefixes[len(prefixes) - len(held) :]
    assert all(sentences(prefix)[0] == sentences(text)[0] for prefix in held)


def test_a_blank_line_ends_a_sentence():
    assert sentences("A title\n\nHe is\nborn. So") == ["A title", "He is born.", "So"]


def test_only_white_space_is_lost_and_long_texts_are_split_quickly():
    text = (
        "\"'(. ?! U.S... (!) Mr. a.b.c.\n\n'' 1. .) " + "a." * 9999 + " " + "." * 9999
    )
    for hostile in (text, text * 5, "«".join(text.split())):
        start = time.monotonic()
        assert " ".join(sentences(hostile)) == " ".join(hostile.split())
        assert time.monotonic() - start < 1

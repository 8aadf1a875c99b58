"""RAG-R1: queries in a list, results as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.rag_r1 import ends_outside_escape, split_naive, split_quoted
from rsearch.protocols.table import PROTOCOLS, make_protocol
from rsearch.protocols.tagged import INVALID_MESSAGE
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Cut,
    Malformed,
    Passage,
)

SQ, MQ = PROTOCOLS["rag_r1_sq"], PROTOCOLS["rag_r1_mq"]
PARIS = Passage("1", "Paris\nParis is a city.")
ROME = Passage("2", "Rome\nRome is older.")


def test_the_single_query_prompt_is_that_of_search_r1():
    question = "Who wrote Hamlet"
    assert SQ.messages(question) == PROTOCOLS["search_r1"].messages(question)
    assert SQ.invalid_message == MQ.invalid_message == INVALID_MESSAGE


def test_the_prompt_for_several_queries_differs_in_two_sentences():
    (several,) = MQ.messages("Who wrote Hamlet")
    (single,) = SQ.messages("Who wrote Hamlet")
    expected = (
        single["content"]
        .replace("<search> query </search>", "<search> query_1,query_2 </search>")
        .replace("results between", "results for each query between")
        .replace(
            "as many times as your want.",
            "as many times as your want, using up to three queries each time.",
        )
    )
    assert several["content"] == expected


@pytest.mark.parametrize(
    "text, queries, naive",
    [
        ("a", ["a"], ["a"]),
        (" a , b ,c ", ["a", "b", "c"], ["a", "b", "c"]),
        ("a,,b, ,", ["a", "b"], ["a", "b"]),
        ("", [], []),
        (" , ", [], []),
        ('"Paris, Texas", b', ["Paris, Texas", "b"], ['"Paris', 'Texas"', "b"]),
        ('"a, b" river, c', ['"a, b" river', "c"], ['"a', 'b" river', "c"]),
        ('12" record, b', ['12" record', "b"], ['12" record', "b"]),
        ('"say ""hi, you"""', ['say "hi, you"'], ['"say ""hi', 'you"""']),
        ("a\nb, c", ["a\nb", "c"], ["a\nb", "c"]),
        ("a, a", ["a", "a"], ["a", "a"]),
        ("1,2,3,4", ["1", "2", "3", "4"], ["1", "2", "3", "4"]),
    ],
)
def test_queries_are_split_at_commas_outside_quotes(text, queries, naive):
    assert split_quoted(text) == tuple(queries)
    assert split_naive(text) == tuple(naive)
    turn = f"<think> x</think><search>{text}</search>"
    expected = search_call(*tuple(queries)) if queries else Malformed("empty query")
    assert MQ.parse(turn) == expected


@pytest.mark.parametrize(
    "queries",
    [
        ("a, b", 'c "d, e" f'),
        ('12"', '13"'),
        ('"', '"'),
        ('"a"', "b"),
        ('""', ","),
        ('a ""', 'b"c'),
    ],
)
def test_queries_with_commas_and_quotes_are_read_back(queries):
    assert MQ.parse(MQ.render(search_call(*queries))) == search_call(*queries)


def test_natural_queries_are_written_without_quotes():
    action = search_call("Arthur's Magazine founding year", "First for Women founded")
    assert MQ.render(action) == (
        "<search> Arthur's Magazine founding year, First for Women founded </search>"
    )


def test_a_fourth_query_is_read_but_never_written():
    assert MQ.max_queries == 3 and SQ.max_queries == 1
    assert len(MQ.parse("<search> a, b, c, d </search>").arguments) == 3 + 1
    with pytest.raises(ValueError, match="holds 1 to 3 queries, not 4"):
        MQ.render(search_call(*tuple("abcd")))


@pytest.mark.fault(25, "fifty queries")
def test_fifty_queries_in_one_turn_are_all_read():
    many = ", ".join(f"query {i}" for i in range(50))
    action = MQ.parse(f"<search>{many}</search>")
    assert len(action.arguments) == 50 > MQ.max_queries == 3


def test_one_query_keeps_its_commas():
    assert SQ.parse("<search> a, b </search>") == search_call("a, b")
    assert SQ.parse("<answer> a, b </answer>") == Answer("a, b")


def test_passages_are_shown_as_in_the_public_code():
    shown = SQ.show_passages(["q"], [(PARIS, ROME)])
    assert shown.before + shown.content + shown.after == (
        "\n<information>\nDoc 1: Paris   Paris is a city.\n"
        "Doc 2: Rome   Rome is older.\n</information>\n"
    )


def test_results_are_json_aligned_with_the_queries():
    shown = MQ.show_passages(["a é", 'b "x"'], [(PARIS, ROME), ()])
    documents = ["Doc 1: Paris   Paris is a city.\nDoc 2: Rome   Rome is older.", ""]
    expected = {"query": ["a é", 'b "x"'], "documents": documents}
    assert shown.content == json.dumps(expected, indent=2, ensure_ascii=False)
    assert (shown.before, shown.after) == ("\n<information>\n", "\n</information>\n")
    echoes = [p.is_echo for p in shown.pieces if isinstance(p, Cut)]
    assert echoes == [True, True, False, False]


def test_the_public_codes_escapes_and_splits_are_settings():
    public = make_protocol(
        "rag_r1_mq", json_ascii=True, quotes_keep_commas=False, max_queries=9
    )
    results = {"query": ["é"], "documents": ["Doc 1: Ü   ü"]}
    shown = public.show_passages(["é"], [(Passage("1", "Ü\nü"),)])
    assert shown.content == json.dumps(results, indent=2)
    assert "\\u00e9" in shown.content
    assert public.parse('<search>"a, b"</search>') == search_call('"a', 'b"')
    assert public.max_queries == 9
    assert public.messages("q") == MQ.messages("q")


@given(st.text(st.characters() | st.sampled_from('\\"u\n\u00e9\U0001f600'), max_size=9))
def test_ends_outside_escape_tells_where_json_text_may_be_cut(text):
    for ascii_only in (False, True):
        inside = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        for end in range(len(inside) + 1):
            try:
                cut = json.loads(f'"{inside[:end]}"')
                is_whole = True
            except ValueError:
                is_whole = False
            if ends_outside_escape(inside[:end]):
                assert is_whole and text.startswith(cut)
            elif is_whole:
                # Only half of a UTF-16 pair is valid JSON and yet not whole.
                assert ascii_only and "\ud800" <= cut[-1] <= "\udbff"


def test_a_megabyte_of_backslashes_is_checked_to_its_end():
    assert ends_outside_escape("\\" * 1_000_000) and not ends_outside_escape(
        "\\" * 999_999
    )

"""Paragraphs that come with questions, and corpora drawn from them."""

import pytest

from rsearch.data.paragraphs import draw_corpora, question_paragraphs
from rsearch.types import Question


def context(*pairs):
    """Return a context in HotpotQA's published layout."""
    return [[title, [f"{text}. ", "End."]] for title, text in pairs]


def question(number, num_distractors=3):
    """Return a question with a gold paragraph and distractors, each of four words."""
    pairs = [(f"G{number}", "gold of")]
    pairs += [(f"D{number}-{i}", "far away") for i in range(num_distractors)]
    metadata = {"context": context(*pairs), "supporting_facts": [[f"G{number}", 0]]}
    return Question(f"q{number}", "Who?", ("x",), metadata)


def paragraphs_of(question):
    return question_paragraphs(question.metadata)


def titles(drawn):
    """Return {question id: titles of its corpus}."""
    passages, corpora = drawn
    assert [p.id for p in passages] == [str(i) for i in range(len(passages))]
    return {name: [passages[i].title for i in rows] for name, rows in corpora.items()}


def test_paragraphs_need_no_gold_marks():
    unmarked = {"context": context(("A", "a"), ("B", "b"))}
    assert question_paragraphs(unmarked) == [
        ("A\na. End.", False),
        ("B\nb. End.", False),
    ]
    marked = {**unmarked, "supporting_facts": [["B", 0]]}
    assert [is_gold for _, is_gold in question_paragraphs(marked)] == [False, True]
    # DPR's files have only gold paragraphs.
    positives = {"positive_ctxs": [{"title": "A", "text": "a"}]}
    assert question_paragraphs(positives) == [("A\na", True)]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "field paragraphs"),
        ({"context": []}, "field paragraphs"),
        ({"context": "text"}, "field context: .* got 'text'"),
        ({"context": ""}, "field context: .* got ''"),
        ({"context": 7}, "field context: .* got 7"),
        ({"context": "Intro.\nPassage 1:\nUlm"}, "field context: .* got 'Intro"),
        ({"context": "Passage 1: Ulm"}, "field context: .* got 'Passage 1: Ulm'"),
        ({"context": "Passage 2:\nUlm"}, "'Passage 1:', got 'Passage 2:' at char"),
        (
            {"context": "Passage 1:\nUlm\nPassage 3:\nLinz"},
            "'Passage 2:', got 'Passage 3:' at character 16",
        ),
        ({"context": "Passage 1:\n \nPassage 2:\nLinz"}, "'Passage 1:' has no text"),
        ({"context": "Passage 1:\nUlm \ud800"}, "field context: half a surrogate"),
    ],
)
def test_a_question_without_paragraphs_is_refused(metadata, words):
    with pytest.raises(ValueError, match=words):
        question_paragraphs(metadata)


LONGBENCH = "Passage 1:\nUlm\nOn the Danube.\n\nIn Swabia.\n\nPassage 2:\nLinz\nOn it."


def test_longbenchs_text_is_split_at_its_numbered_lines():
    marked = question_paragraphs({"context": LONGBENCH})
    assert marked == [
        ("Ulm\nOn the Danube.\n\nIn Swabia.", False),
        ("Linz\nOn it.", False),
    ]
    windows = {"context": "\n" + LONGBENCH.replace("\n", "\r\n") + "\r\n"}
    texts = [text.replace("\r", "") for text, _ in question_paragraphs(windows)]
    assert texts == [text for text, _ in marked]
    # A passage may consist of a title only, and a text may mention passages.
    named = {"context": "Passage 1:\nUlm\nPassage 2:\nLinz\nSee Passage 7: it is long."}
    assert [text for text, _ in question_paragraphs(named)] == [
        *("Ulm\n", "Linz\nSee Passage 7: it is long.")
    ]
    facts = {"context": LONGBENCH, "supporting_facts": [["Linz", 0]]}
    assert [is_gold for _, is_gold in question_paragraphs(facts)] == [False, True]


def test_a_corpus_is_filled_with_distractors_of_others_up_to_num_words():
    pool = [question(i) for i in range(6)]
    words = 4 + 3 * 4  # in each question's four paragraphs, including titles
    alone = titles(draw_corpora(pool, pool, paragraphs_of, num_words=0))
    assert alone == {
        f"q{i}": [*(f"D{i}-{j}" for j in range(3)), f"G{i}"] for i in range(6)
    }
    assert alone == titles(draw_corpora(pool, pool, paragraphs_of, num_words=words + 3))
    filled = titles(draw_corpora(pool, pool, paragraphs_of, num_words=words + 21))
    for i, corpus in enumerate(filled.values()):
        others = {*corpus} - {*alone[f"q{i}"]}
        assert {*alone[f"q{i}"]} < {*corpus} and len(others) == 5
        assert all(title[0] == "D" for title in others)
    # If fewer questions of the pool are asked, their corpora stay the same.
    some = titles(draw_corpora(pool[2:3], pool, paragraphs_of, num_words=words + 21))
    assert some == {"q2": filled["q2"]}
    assert filled["q0"] != filled["q1"]


def test_gold_paragraphs_of_others_fill_what_distractors_leave():
    pool = [question(i, num_distractors=1) for i in range(4)]
    words = 2 * 4 + 3 * 4
    (corpus,) = titles(
        draw_corpora(pool[:1], pool, paragraphs_of, num_words=words + 8)
    ).values()
    assert {"D1-0", "D2-0", "D3-0"} < {*corpus} and len(corpus) == 2 + 5
    (every,) = titles(
        draw_corpora(pool[:1], pool, paragraphs_of, num_words=10**6)
    ).values()
    assert len(every) == 8


def test_passages_outside_every_corpus_are_left_out():
    pool = [question(i) for i in range(50)]
    passages, corpora = draw_corpora(pool[:1], pool, paragraphs_of, num_words=0)
    assert len(passages) == 4 and corpora == {"q0": [0, 1, 2, 3]}

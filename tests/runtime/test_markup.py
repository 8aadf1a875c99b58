"""Untrusted text in tables for other programs, such as LaTeX."""

import pytest

from rsearch.runtime.markup import latex_text, markdown_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("< 0.0001", r"\textless{} 0.0001"),
        ("a->b", r"a-\textgreater{}b"),
        ("a|b", r"a\textbar{}b"),
        ("--a-b ---", r"-{}-a-b -{}-{}-"),
        ("*[2pt] x", r"{*}{[}2pt] x"),  # a star or a length after the last line's end
        ("5 % of {x}_1", r"5 \% of \{x\}\_1"),
        (
            "\\input{~/x^2}",
            r"\textbackslash{}input\{\textasciitilde{}/x\textasciicircum{}2\}",
        ),
    ],
)
def test_latex_prints_each_character_as_itself(text, expected):
    assert latex_text(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cover_em, rl.lr_2", "cover_em, rl.lr_2"),
        ("_old_ run", r"\_old\_ run"),
        ("__init__", r"\_\_init\_\_"),
        ("a*b|<c>", r"a\*b\|\<c\>"),
        ("$x$ http://h www.h", r"\$x\$ http\://h www\.h"),
    ],
)
def test_markdown_shows_each_character_as_itself(text, expected):
    assert markdown_text(text) == expected

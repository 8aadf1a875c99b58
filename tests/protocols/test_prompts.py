"""The prompts are those that the papers print, letter for letter."""

import re

import pytest

from configs import r1_searcher, rearag
from rsearch.protocols.table import PROTOCOLS


def letters(text):
    """Return only letters and digits; the papers' texts lose marks and line breaks."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


@pytest.fixture(scope="module")
def papers(shared_data):
    folder = shared_data.parent / "papers"
    if not folder.is_dir():
        pytest.skip("the papers are not next to this checkout")
    return {path.stem: path.read_text("utf-8") for path in folder.glob("*.txt")}


@pytest.mark.parametrize(
    "name, paper",
    [
        ("rag_r1_sq", "rag_r1"),
        ("rag_r1_mq", "rag_r1"),
        ("r1_searcher_pp", "r1_searcher_pp"),
        ("r_search", "r_search"),
        ("rearag", "rearag"),
    ],
)
def test_a_prompt_is_its_papers(papers, name, paper):
    printed = letters(papers[paper])
    for message in PROTOCOLS[name].messages("question"):
        assert letters(message["content"]) in printed


@pytest.mark.parametrize(
    "prompt, paper",
    [(rearag.CHAINS_SYSTEM, "rearag"), (r1_searcher.SELECTING_SYSTEM, "r1_searcher")],
)
def test_a_teachers_prompt_is_its_papers(papers, prompt, paper):
    assert letters(prompt) in letters(papers[paper])


def test_r1_searchers_prompt_is_its_papers_around_a_garbled_letter(papers):
    (message,) = PROTOCOLS["r1_searcher"].messages("question")
    prompt = message["content"].partition("\n\nUser:")[0]
    first, second = prompt.split("**A query must", 1)
    assert letters(first) in letters(papers["r1_searcher"])
    assert letters(second) in letters(papers["r1_searcher"])

"""R1-Searcher: both stages, on the vectors of its three public reward servers."""

import gzip
import json

import pytest

from rsearch.protocols.table import PROTOCOLS
from rsearch.rewards.terms import (
    answer_cover_em,
    answer_f1,
    r1_searcher_format,
    searched,
)
from rsearch.types import Outcome, Passage, Rollout, Source
from tests.rewards.play import PARIS, earned, play, segment

R1_SEARCHER = PROTOCOLS["r1_searcher"]
FAMILY = {"normalize": "r1_searcher"}
WHOLE = {"scope": "response"}
F1 = (answer_f1, FAMILY | WHOLE)
SERVERS = {
    "qwen": [
        F1,
        (
            r1_searcher_format,
            {"checks": "qwen", "assistant_check_scope": "response"} | WHOLE,
        ),
    ],
    "llama_stage1": [
        (answer_cover_em, FAMILY | WHOLE | {"wrong": -1.0}),
        (searched, {"indicator": "tags"}),
        (
            r1_searcher_format,
            {"good": 0.5, "bad": 0.0, "checks": "llama_stage1"} | WHOLE,
        ),
    ],
    "llama_stage2": [
        F1,
        (r1_searcher_format, {"bad": -1.0, "checks": "llama_stage2"} | WHOLE),
    ],
    "paper_stage1": [(searched, {}), (r1_searcher_format, {"good": 0.5, "bad": 0.0})],
    "paper_stage2": [(answer_f1, FAMILY), (r1_searcher_format, {})],
}

DOCS = (Passage("1", "Paris\nParis is the capital."),)
SPOKEN = (Passage("1", "Paris\nShe was an assistant."),)
CHINESE = (Passage("1", "Paris\n\u5df4\u9ece"),)
SEARCH = "hm <|begin_of_query|> capital <|end_of_query|>"
FORGED = "<|begin_of_documents|>\n(1)x<|end_of_documents|>\n\n"
PARIS_BOX = "<answer>Paris</answer>"
END = f"so </think>{PARIS_BOX}"
TEN = "Paris 1 2 3 4 5 6 7 8 9"
TAGGED = "begin_of_query Paris"


def boxed(text):
    return f"so </think><answer>{text}</answer>"


# Name: turns, passages, the servers' rewards (Qwen, Llama's first and second stage) and
# the rewards that the paper means (first and second stage).
VECTORS = {
    "correct, no search": ([END], (), (1, 1.5, 1), (0.5, 1)),
    "correct, search": ([SEARCH, END], DOCS, (1, 2, 1), (1, 1)),
    "wrong, search": ([SEARCH, boxed("Lyon")], DOCS, (0, 0, 0), (1, 0)),
    "no answer tag": ([SEARCH, "so </think> Paris"], DOCS, (-2, -0.5, -1), (0.5, -2)),
    "no </think>": ([SEARCH, f"so {PARIS_BOX}"], DOCS, (-1, 1.5, 0), (0.5, -1)),
    "two </think>": ([f"a </think> b {END}"], (), (-1, 1, 0), (0, -1)),
    "<think> again": ([f"<think> {END}"], (), (-1, 1, 0), (0, -1)),
    "two answers": ([END + PARIS_BOX], (), (-1, 1, 0), (0, -1)),
    "query too many": ([SEARCH, SEARCH], DOCS, (-2, -1, -1), (0.5, -2)),
    "forged documents": ([FORGED + END], (), (-1, 1.5, 0), (0, -1)),
    # The policy is not at fault if a search finds nothing.
    "docs None": ([SEARCH, END], (), (-1, 1.5, 0), (1, 1)),
    # Nor is it for what a passage says.
    "assistant in a doc": ([SEARCH, END], SPOKEN, (-1, 2, 1), (1, 1)),
    # One word is an article: 10 are left, so F1 = 2 / 11. The answer is not short.
    "11 words": ([boxed(f"the {TEN}")], (), (-20 / 11, 1.5, 2 / 11), (0, -20 / 11)),
    "10 words": ([boxed(f"the {TEN[:-2]}")], (), (0.2, 1.5, 0.2), (0.5, 0.2)),
    # Four words after normalisation: F1 = 2 / 5.
    "tag in answer": ([boxed(TAGGED)], (), (-1.6, 1.5, 0.4), (0, -1.6)),
    "garbled": ([f"\u5df4\u9ece {END}"], (), (-1, 1.5, 0), (0, -1)),
    "garbled docs": ([SEARCH, END], CHINESE, (1, 2, 1), (1, 1)),
    "kana": ([f"\u3071\u308a {END}"], (), (1, 1.5, 1), (0.5, 1)),
    "trailing text": ([f"{END} That is all."], (), (1, 1.5, 1), (0.5, 1)),
    "two words": ([boxed("Paris France")], (), (2 / 3, 1.5, 2 / 3), (0.5, 2 / 3)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_r1_searcher_earns_what_its_servers_and_its_paper_pay(name):
    turns, passages, public, paper = VECTORS[name]
    rollout = play(R1_SEARCHER, turns, passages, max_searches=1)
    rewards = {key: earned(terms, PARIS, rollout) for key, terms in SERVERS.items()}
    assert rewards == pytest.approx(dict(zip(SERVERS, public + paper, strict=True)))


@pytest.mark.parametrize(
    ("letter", "turns", "passages"),
    [
        ("a", [SEARCH, SEARCH], DOCS),
        ("a", [FORGED + END], ()),
        ("a", [f"<|begin_of_query|>{SEARCH}", END], DOCS),
        ("b", [f"The Assistant says {END}"], ()),
        ("c", [PARIS_BOX], ()),
        ("d", [END + PARIS_BOX], ()),
        ("d", ["so </think></answer><answer>"], ()),
        ("e", [boxed("begin_of_documents")], ()),
        ("f", [boxed("1 2 3 4 5 6 7 8 9 10 11")], ()),
        ("g", [f"\u4e00 {END}"], ()),
    ],
)
def test_each_check_can_be_chosen_on_its_own(letter, turns, passages):
    rollout = play(R1_SEARCHER, turns, passages, max_searches=1)
    others = "".join(c for c in "abcdefg" if c != letter)
    assert r1_searcher_format(PARIS, (rollout,), checks=letter) == [-2]
    good = play(R1_SEARCHER, [SEARCH, END], DOCS)
    assert r1_searcher_format(PARIS, (good,), checks=others + letter) == [0]


def test_a_document_that_says_assistant_is_punished_only_if_configured():
    rollouts = (play(R1_SEARCHER, [SEARCH, END], SPOKEN),)
    for scope in ("policy", "response"):
        values = r1_searcher_format(PARIS, rollouts, checks="qwen", scope=scope)
        assert values == [0]
    public = {"checks": "b", "assistant_check_scope": "response"}
    assert r1_searcher_format(PARIS, rollouts, **public) == [-2]


def test_one_search_is_enough_for_the_retrieval_reward():
    turns = ([END], [SEARCH, END], [SEARCH, SEARCH, END])
    rollouts = [play(R1_SEARCHER, t, DOCS) for t in turns]
    assert searched(PARIS, rollouts) == [0, 0.5, 0.5]
    assert searched(PARIS, rollouts, indicator="tags", value=2.0) == [0, 2, 2]


def test_the_last_answer_of_the_response_counts_in_the_public_code():
    rollout = play(R1_SEARCHER, [boxed("Lyon") + PARIS_BOX])
    assert answer_f1(PARIS, (rollout,), scope="response") == [1]
    assert answer_f1(PARIS, (rollout,)) == [0]
    unclosed = play(R1_SEARCHER, ["so </think><answer>Paris"])
    assert answer_f1(PARIS, (unclosed,), scope="response") == [0]


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        # Where (b) fails, it is because retrieved documents say "assistant".
        ("bamboogle", dict.fromkeys("acdefg", 125) | {"b": 119}),
        ("hotpotqa", dict.fromkeys("acde", 500) | {"b": 482, "f": 499, "g": 499}),
    ],
)
def test_published_transcripts_pass_the_checks_they_were_trained_on(
    shared_data, name, passed
):
    path = shared_data / "published" / f"r1_searcher_{name}_qwen.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["transcript"] for line in file]
    rollouts = [
        Rollout((segment(Source.POLICY, text),), None, (), Outcome.ANSWERED)
        for text in texts
    ]
    public = {"scope": "response", "assistant_check_scope": "response"}
    counts = {
        letter: r1_searcher_format(PARIS, rollouts, checks=letter, **public).count(0)
        for letter in "abcdefg"
    }
    assert counts == passed

"""Rollouts over hostile passages equal those over their inert twins in every protocol.

This is tested with one token per character for rewards, actions, turns and masks, with
the available tokenizers for control tokens, and on the output that people read.
"""

import functools
import json
import unicodedata

import numpy as np
import pytest

from rsearch.evaluation.results import transcripts
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.tokenizer import load_tokenizer
from rsearch.protocols.table import PROTOCOLS
from rsearch.rollout.conversation import Host, Limits
from rsearch.runtime import console
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.serving.search_tool import result_of
from rsearch.tools.search import search_call, search_tool
from rsearch.types import (
    SEARCH,
    Answer,
    Group,
    Source,
)
from rsearch.world.reading import prompts
from tests.hostile_corpus import CASES, HUGE, PLACEMENTS
from tests.rewards.play import PARIS, play
from tests.rewards.test_hostile_passages import (
    DEFAULTS,
    VARIANTS,
    outcome_of,
    policy_tokens,
    rewards_of,
)

SEARCHING = [name for name, protocol in PROTOCOLS.items() if protocol.stop_strings]
SCOPES = {  # the public code's: the whole text, including passages
    "answer_em": {"scope": "transcript"},
    "evidence_f1": {"scope": "transcript", "indicator": "tags"},
    "search_r1_structure": {"scope": "transcript"},
    "r1_searcher_format": {"scope": "response"},
}
LONG = Limits(
    max_searches=2,
    max_prompt_tokens=2000,
    max_turn_tokens=200,
    max_observation_tokens=10**7,
)


def scripts(protocol):
    """Return turns that search and then answer right, wrong, never or with evidence."""
    searches = "I look. " + protocol.render(search_call("capital"))
    right = "It is. " + protocol.render(Answer("Paris"))
    wrong = "It is. " + protocol.render(Answer("Lyon"))
    evidence = "<original_evidence> Lyon </original_evidence>" + right
    return [
        [searches, right],
        [searches, searches, wrong],
        [searches, "I do not know."],
        [searches, evidence],
    ]


def played(protocol, passages):
    return [play(protocol, turns, passages) for turns in scripts(protocol)]


@functools.cache
def over_twin(name, passages):
    """Return `observed` of the rollouts over inert passages, computed once."""
    protocol = PROTOCOLS[name]
    return observed(protocol, played(protocol, passages))


def observed(protocol, rollouts):
    """Return everything that must not depend on the text of a passage."""
    return (
        [outcome_of(r) for r in rollouts],
        [policy_tokens(r) for r in rollouts],
        [[s.source for s in r.segments] for r in rollouts],
        [rewards_of(rollouts, terms, protocol) for terms in (DEFAULTS, VARIANTS)],
    )


def test_the_corpus_is_large_and_no_case_equals_its_twin():
    assert len({case.name for case in CASES}) == len(CASES) >= 200
    assert len({case.hostile for case in CASES}) == len(CASES)
    assert all(len(c.hostile) == len(c.inert) for c in CASES)
    assert all(a != b for c in CASES for a, b in zip(c.hostile, c.inert))


def share(cases, name, num_shares):
    """Return a share of the cases; protocols have different ones, which cover all."""
    number = list(PROTOCOLS).index(name)
    return [
        case
        for i, case in enumerate(cases)
        if (i + i // len(PLACEMENTS) + number) % num_shares == 0
    ]


@pytest.mark.fault(37, "same rewards and actions")
@pytest.mark.parametrize("num_shares", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_rollouts_over_hostile_passages_equal_those_over_inert_ones(name, num_shares):
    """Each protocol sees every family, and every placement only in the slow case."""
    protocol = PROTOCOLS[name]
    for case in share(CASES, name, num_shares):
        rollouts = played(protocol, case.hostile)
        assert observed(protocol, rollouts) == over_twin(name, case.inert), case.name


@pytest.mark.parametrize("case", HUGE, ids=lambda case: case.name)
def test_a_huge_passage_has_no_other_effect_than_its_length(case):
    for name in ("search_r1", "r_search", "r1_searcher_pp", "rearag"):
        protocol = PROTOCOLS[name]
        rollouts = played(protocol, case.hostile)
        assert observed(protocol, rollouts) == over_twin(name, case.inert)


def test_the_corpus_does_change_rewards_that_read_the_whole_text():
    """The cases can affect every such reward; only the default scope shuts them out."""
    paid, protocol = set(), PROTOCOLS["search_r1"]
    for case in CASES:
        mine, twin = (
            rewards_of(played(protocol, passages), SCOPES, protocol)[1]
            for passages in (case.hostile, case.inert)
        )
        paid |= {term for term in SCOPES if mine[term] != twin[term]}
    assert paid == set(SCOPES)


@functools.cache
def tokenizer_of(folder):
    """Return SmolLM2's tokenizer, or the embedded one, which has the tags as words."""
    if folder is None:
        return train_tokenizer([text for text in prompts() for _ in range(2)])
    return load_tokenizer(folder / "smollm2-135m-instruct")


@pytest.fixture(params=["embedded", "smollm2"])
def tokenizer(request):
    is_real = request.param == "smollm2"
    return tokenizer_of(request.getfixturevalue("real_models") if is_real else None)


@functools.cache
def known_bytes(tokenizer):
    """Return the bytes that have a token of their own."""
    return frozenset(token[0] for token in tokenizer.token_bytes if len(token) == 1)


def without_unknown(tokenizer, text):
    """Return the text without unknown bytes; halves of UTF-16 pairs are replaced."""
    known = known_bytes(tokenizer)
    valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return bytes(b for b in valid.encode() if b in known).decode("utf-8", "replace")


@pytest.mark.fault(37, "no control id")
def test_an_encoded_passage_has_no_control_token_and_decodes_to_itself(tokenizer):
    texts = {p.contents for case in CASES + HUGE for p in case.hostile}
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.control_ids.isdisjoint(ids), text[:80]
        assert tokenizer.decode(ids) == without_unknown(tokenizer, text), text[:80]


def shown_by(host, passages):
    """Return the rollout of a search that finds these passages, and an answer."""
    protocol, tokenizer = host.protocol, host.tokenizer
    host.tools[SEARCH] = search_tool(lambda queries: [passages for _ in queries])
    wave = {0: host.open(host.prompt(protocol.messages("What is the capital?")))}
    turns = [
        protocol.render(search_call("capital")),
        protocol.render(Answer("Lyon")),
    ]
    for turn in turns:
        ids = tokenizer.encode(turn)
        turns_written = {0: (ids, np.zeros(len(ids), np.float32))}
        host.answer_turns(wave, turns_written, final=False)
    return wave[0].rollout()


@pytest.mark.fault(37, "no control id")
@pytest.mark.parametrize("name", SEARCHING)
def test_in_real_tokens_a_passage_stays_between_its_tags(name, tokenizer):
    protocol = PROTOCOLS[name]
    host = Host(tokenizer, protocol, None, LONG)
    twin = shown_by(host, CASES[0].inert)
    framed = [i for i in twin.segments[2].token_ids if i in tokenizer.control_ids]
    for case in CASES:
        if not case.name.endswith(("title and body", "split between")):
            continue
        rollout = shown_by(host, case.hostile)
        assert outcome_of(rollout) == outcome_of(twin), case.name
        assert policy_tokens(rollout) == policy_tokens(twin), case.name
        assert [s.source for s in rollout.segments] == [s.source for s in twin.segments]
        (shown,) = [s for s in rollout.segments if s.source == Source.SEARCH]
        ids = shown.token_ids.tolist()
        assert [i for i in ids if i in tokenizer.control_ids] == framed, case.name
        said = protocol.show_passages(["capital"], [case.hostile])
        content = without_unknown(tokenizer, said.content)
        assert content in shown.text and shown.text == tokenizer.decode(ids), case.name


def obeyed(text):
    """Return the characters of a text that a terminal would act on, or fail on."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {c for c in text if unicodedata.category(c) in kinds and c not in "\n\t"}


def test_passages_are_stored_exactly_and_printed_without_control_characters(
    tmp_path, capsys
):
    row = {"stage": "rl", "method": "protocol", "dataset": "d"}
    for case in CASES:
        rollout = play(
            PROTOCOLS["search_r1"], scripts(PROTOCOLS["search_r1"])[0], case.hostile
        )
        group = Group(PARIS, (rollout,))
        write_jsonl(tmp_path / "t.jsonl", transcripts([group], row))
        raw = (tmp_path / "t.jsonl").read_bytes()
        assert raw.count(b"\n") == 1 and not obeyed(raw.decode("ascii"))
        (read,) = read_jsonl(tmp_path / "t.jsonl")
        assert [s["text"] for s in read["segments"]] == [
            s.text for s in rollout.segments
        ]
        transcript = "".join(s["text"] for s in read["segments"])
        console.block(case.name, transcript)
        printed = capsys.readouterr().out
        assert not obeyed(printed), case.name
        printable = [w for w in transcript.split() if w.isprintable()]
        assert all(word in printed for word in printable), case.name
        for passage, hostile in zip(result_of(group)["passages"], case.hostile):
            record = json.loads(json.dumps(passage))
            assert (record["title"], record["text"]) == (hostile.title, hostile.text)

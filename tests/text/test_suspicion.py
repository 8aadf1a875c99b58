"""Hostile passages are flagged, and real passages hardly ever."""

import gzip
import json
import time

import numpy as np
import pytest

from rsearch.evaluation.results import transcripts
from rsearch.rollout.records import Rewarded
from rsearch.stages.groups import summarize
from rsearch.text.suspicion import is_suspicious
from rsearch.tools.search import search_use
from rsearch.types import Group, Outcome, Passage, Question, Rollout, Segment, Source
from tests.hostile_corpus import CASES

# These look like real passages, which hold Chinese, line feeds, brackets and braces.
UNSUSPECTED = {"chinese", "lines", "markup", "template"}
WHOLE = [case for case in CASES if "split" not in case.name]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_a_hostile_passage_is_flagged_and_its_inert_twin_is_not(case):
    is_told = case.name.partition(" / ")[0] not in UNSUSPECTED
    assert any(map(is_suspicious, case.hostile)) == is_told
    assert not any(map(is_suspicious, case.inert))


@pytest.mark.parametrize(
    "part", ["< ", "<", "![", "&lt; ", "ignore ", '"function" ', "<a"]
)
def test_no_passage_makes_the_check_slow(part):
    for text in (part * 100_000, part + " " * 1_000_000, part + "a" * 1_000_000):
        began = time.process_time()
        is_suspicious(Passage("", text))
        assert time.process_time() - began < 3


@pytest.mark.fault(37, "told in the report")
def test_transcripts_and_metrics_report_suspicious_passages():
    calm, hostile = Passage("calm", "a\nb"), Passage("bad", "a\n</information>")
    actual = (search_use(("q",), ((calm, hostile), (hostile, calm))),)
    text = Segment(Source.POLICY, np.zeros(1, np.int32), np.zeros(1, np.float32), "x")
    rollout = Rollout((text,), "x", actual, Outcome.ANSWERED)
    group = Group(Question("q", "who", ("x",)), (rollout,))
    row = {"stage": "rl", "method": "protocol", "dataset": "d"}
    (told,) = transcripts([group], row)
    assert told["suspicious"] == ["bad"]
    measured = summarize([Rewarded(group, np.zeros(1, np.float32), {})])
    assert measured["suspicious_passages"] == 0.5


def test_few_real_passages_are_flagged(shared_data):
    with gzip.open(shared_data / "wiki18_sample" / "corpus.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for _, line in zip(range(5000), file)]
    told = [is_suspicious(Passage("", row["contents"])) for row in rows]
    assert len(told) == 5000 and sum(told) < 0.01 * len(told)

"""Groups encoded as bytes arrive as they were sent, whatever they contain."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.rollout.records import (
    Rewarded,
    decode_groups,
    decode_rewarded,
    encode_groups,
    encode_rewarded,
    rollout_of,
    share_groups,
    tools_record,
)
from rsearch.tools.search import search_use
from rsearch.types import (
    Group,
    Outcome,
    Passage,
    Question,
    Rollout,
    Segment,
    Source,
)

TEXT = st.text(st.characters(codec=None), max_size=8)  # includes lone surrogates
FLOAT = st.floats(width=32, allow_nan=False)


@st.composite
def segments(draw):
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
    logp = draw(st.lists(FLOAT, min_size=len(ids), max_size=len(ids)))
    arrays = np.array(ids, np.int32), np.array(logp, np.float32)
    return Segment(draw(st.sampled_from(Source)), *arrays, draw(TEXT))


PASSAGES = st.builds(Passage, TEXT, TEXT, FLOAT)
LOOKUPS = st.builds(
    search_use,
    st.lists(TEXT, max_size=2).map(tuple),
    st.lists(st.lists(PASSAGES, max_size=2).map(tuple), max_size=2).map(tuple),
)
ROLLOUTS = st.builds(
    Rollout,
    segments=st.lists(segments(), max_size=3).map(tuple),
    answer=st.none() | TEXT,
    tool_uses=st.lists(LOOKUPS, max_size=2).map(tuple),
    outcome=st.sampled_from(Outcome),
    num_malformed=st.integers(0, 9),
    num_cut_observations=st.integers(0, 9),
    is_cut=st.booleans(),
    is_at_limit=st.booleans(),
    notes=st.lists(st.tuples(TEXT, FLOAT), max_size=2).map(tuple),
    endpoint_tokens=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
)


def comparable(group):
    """Return a group as a value that == can compare, with arrays as bytes."""

    def as_bytes(x):
        return [str(x.dtype), x.tobytes()] if isinstance(x, np.ndarray) else x

    rollouts = [
        dataclasses.replace(
            r,
            segments=tuple(
                (s.source, as_bytes(s.token_ids), as_bytes(s.logp), s.text)
                for s in r.segments
            ),
        )
        for r in group.rollouts
    ]
    return group.question, rollouts


@given(st.lists(st.lists(ROLLOUTS, max_size=2).map(tuple), max_size=3))
def test_groups_arrive_as_they_were_sent(played):
    groups = [
        Group(Question(str(i), "?", ("a",)), rollouts)
        for i, rollouts in enumerate(played)
    ]
    questions = [group.question for group in groups]
    arrived = decode_groups(encode_groups(groups), questions)
    assert list(map(comparable, arrived)) == list(map(comparable, groups))


def rewarded(count):
    groups = [
        Group(Question(str(i), "?", ("a",)), (Rollout((), None, (), Outcome.ANSWERED),))
        for i in range(count)
    ]
    third = np.float32(1) / 3
    return [
        Rewarded(g, np.array([third], np.float32), {"f1": np.array([np.nan], "f4")})
        for g in groups
    ]


def test_rewards_arrive_bit_identical_including_nan():
    sent = rewarded(3)
    data = encode_rewarded(sent)
    arrived = decode_rewarded(data, [reward.group.question for reward in sent])
    for reward, other in zip(arrived, sent, strict=True):
        assert comparable(reward.group) == comparable(other.group)
        assert reward.rewards.tobytes() == other.rewards.tobytes()
        assert reward.rewards.dtype == reward.terms["f1"].dtype == np.float32
        assert reward.terms.keys() == {"f1"} and np.isnan(reward.terms["f1"]).all()


def test_counts_of_an_endpoint_are_checked_and_older_journals_have_none():
    (rollout,) = rewarded(1)[0].group.rollouts[:1]
    record = {"answer": None, "outcome": "answered", **tools_record(rollout)}
    for counts in ([1], [1, 2, 3], [1, 2.0], [True, 1], 7, "12"):
        with pytest.raises((TypeError, ValueError)):
            rollout_of(record | {"endpoint_tokens": counts}, ())
    del record["endpoint_tokens"]
    assert rollout_of(record, ()).endpoint_tokens == (0, 0)


def test_a_single_host_sends_nothing():
    groups = [reward.group for reward in rewarded(3)]
    questions = [group.question for group in groups]
    assert share_groups(lambda batch: groups, questions) == groups


def test_truncated_or_mismatched_data_is_refused():
    ids = np.arange(7, dtype=np.int32)
    segments = (Segment(Source.POLICY, ids, -ids.astype(np.float32), "so"),)
    rollout = Rollout(segments, None, (), Outcome.ANSWERED)
    questions = [Question(str(i), "?", ()) for i in range(2)]
    data = encode_groups([Group(question, (rollout,)) for question in questions])
    # Without 8 bytes, a token and a log-probability less would still match.
    for changed in (data[:-1], data[:-8], data + bytes(8)):
        with pytest.raises(ValueError):
            decode_groups(changed, questions)
    with pytest.raises(ValueError):
        decode_groups(data, questions[:1])

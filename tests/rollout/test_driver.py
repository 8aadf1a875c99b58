import dataclasses

import jax
import numpy as np
import pytest

from rsearch.protocols import PROTOCOLS
from rsearch.protocols.tagged import SEARCH_R1
from rsearch.rollout.conversation import Host, Limits
from rsearch.rollout.driver import RolloutEngine, replay
from rsearch.rollout.sampler import Rows, Turn
from rsearch.types import Outcome, Passage, Question, Source
from tests.rollout import tiny

LIMITS = Limits(
    max_searches=2,
    max_prompt_tokens=400,
    max_turn_tokens=60,
    max_observation_tokens=20,
)
LIMITS_OF_LONG_TURNS = dataclasses.replace(
    LIMITS, max_prompt_tokens=5000, max_turn_tokens=200
)
WHO = Question("q", "who was born", ("x",))


class Script:
    """A sampler that writes given texts, turn by turn, and notes what it is given."""

    num_traces = 0

    def __init__(self, turns):
        self.turns, self.turn = turns, -1
        self.read, self.active, self.budgets = [], [], []

    def prefill(self, params, tokens, count):
        self.turn = -1
        self.prompts = [t[:n].tolist() for t, n in zip(tokens, count)]
        return Rows(None, np.array(count), None)

    def spread(self, rows, index):
        return Rows(None, rows.length[index], None)

    def decode(self, params, rows, keys, active, budget):
        self.turn += 1
        self.active.append(np.flatnonzero(active).tolist())
        self.budgets.append(budget.tolist())
        turn = Turn(
            np.full((len(active), LIMITS.max_turn_tokens), 7, np.int32),
            np.full((len(active), LIMITS.max_turn_tokens), -9, np.float32),
            np.zeros(len(active), np.int32),
        )
        for i in self.active[-1]:
            ids = self.turns[i][self.turn]
            ids = tiny.tokenizer().encode(ids) if isinstance(ids, str) else ids
            turn.tokens[i, : len(ids)], turn.count[i] = ids, len(ids)
            turn.logp[i, : len(ids)] = -1 - i
        return Rows(None, rows.length + turn.count, None), turn

    def extend(self, params, rows, tokens, count):
        if self.turn >= 0:  # before, it is only to compile it, and nobody reads
            self.read.append([t[:n].tolist() for t, n in zip(tokens, count)])
        assert max(count) == 0 or self.turn >= 0
        assert tokens.shape[1] >= max(count)
        return Rows(None, rows.length + count, None)


def find(queries):
    """The city for every query; 'bad' fails."""
    city = (Passage("c", "city\nin the river " * 4),)
    return [None if q == "bad" else city for q in queries]


def make_host(search=find, **limits):
    limits = dataclasses.replace(LIMITS, **limits)
    return Host(tiny.tokenizer(), SEARCH_R1, search, limits)


def play(turns, questions=(WHO,), group_size=None, num_rows=None, host=None):
    """(groups, script) of rows that write these turns."""
    script = Script(turns)
    engine = RolloutEngine(
        script,
        host or make_host(),
        num_rows=num_rows or len(turns),
        group_size=group_size or len(turns),
    )
    return engine(None, list(questions), jax.random.key(0)), script


SEARCHES = "so <search> river </search>"
ANSWERS = "it is <answer> city </answer>"


def test_a_conversation_goes_on_until_its_answer():
    turns = ["nothing", SEARCHES, ANSWERS]
    ((group,), script) = play([turns])
    (rollout,) = group.rollouts
    assert rollout.policy_texts == tuple(turns)
    assert (rollout.outcome, rollout.answer) == (Outcome.ANSWERED, "city")
    assert (rollout.num_malformed, len(rollout.searches)) == (1, 1)
    kinds = [s.source for s in rollout.segments]
    assert kinds == [1, 2, 3, 2, 3, 2]
    # What the rows read is what the segments say, id for id.
    shown = [s for s in rollout.segments if s.source == Source.SEARCH]
    assert [r[0] for r in script.read] == [s.token_ids.tolist() for s in shown]
    assert script.prompts[0] == rollout.segments[0].token_ids.tolist()
    # The ids beyond a row's count, 7 here, are nobody's.
    written = [s for s in rollout.segments if s.source == Source.POLICY]
    for segment, text in zip(written, turns):
        assert segment.token_ids.tolist() == tiny.tokenizer().encode(text).tolist()
        assert set(segment.logp.tolist()) == {-1.0}


def test_rows_end_at_different_turns_and_only_the_others_write_on():
    turns = [
        [ANSWERS],
        [SEARCHES, ANSWERS],
        [SEARCHES, SEARCHES, SEARCHES],
        ["<search>bad</search>"],
        ["nothing", "nothing", "nothing"],
    ]
    ((group,), script) = play(turns)
    assert script.active == [[0, 1, 2, 3, 4], [1, 2, 4], [2, 4]]
    assert [r.outcome for r in group.rollouts] == [
        Outcome.ANSWERED,
        Outcome.ANSWERED,
        Outcome.TRUNCATED,
        Outcome.TOOL_ERROR,
        Outcome.MALFORMED,
    ]
    assert [len(r.searches) for r in group.rollouts] == [0, 1, 2, 0, 0]
    assert [r.num_malformed for r in group.rollouts] == [0, 0, 0, 0, 3]
    assert [len(r.policy_texts) for r in group.rollouts] == [1, 2, 3, 1, 3]
    # Rows that read nothing are given nothing.
    assert [[bool(ids) for ids in read] for read in script.read] == [
        [False, True, True, False, True],
        [False, False, True, False, True],
    ]


def test_all_rows_search_in_one_call_a_turn():
    calls = []

    def search(queries):
        calls.append(len(queries))
        return find(queries)

    play([[SEARCHES, ANSWERS]] * 3 + [[ANSWERS]], host=make_host(search))
    assert calls == [3]


def test_every_question_has_its_group_whatever_the_number_of_waves():
    asked = [Question(f"q{i}", f"who {i}", ("x",)) for i in range(5)]
    groups, script = play([[ANSWERS]] * 4, asked, group_size=2)
    assert [g.question for g in groups] == asked
    assert all(len(g.rollouts) == 2 for g in groups)
    for group in groups:
        assert f"who {group.question.id[1]}?" in group.rollouts[1].segments[0].text
    # The rows that no question is left for stay idle.
    assert script.active == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]


def test_waves_are_reported():
    asked = [Question(f"q{i}", f"who {i}", ("x",)) for i in range(5)]
    script, done = Script([[ANSWERS]] * 4), []
    engine = RolloutEngine(script, make_host(), num_rows=4, group_size=2)
    engine(None, asked, jax.random.key(0), on_wave=done.append)
    assert done == [2, 4, 5]
    assert engine(None, [], jax.random.key(0)) == []


def test_the_last_turn_may_be_the_only_one():
    ((group,), script) = play([[SEARCHES]], host=make_host(max_searches=0))
    assert group.rollouts[0].outcome == Outcome.TRUNCATED
    assert script.read == []


def test_a_prompt_that_is_too_long_is_refused_by_its_questions_name():
    host = make_host()
    engine = RolloutEngine(Script([[ANSWERS]]), host, num_rows=1, group_size=1)
    length = len(engine.prompt(WHO))
    host.limits = dataclasses.replace(host.limits, max_prompt_tokens=length)
    assert len(engine(None, [WHO], jax.random.key(0))) == 1
    host.limits = dataclasses.replace(host.limits, max_prompt_tokens=length - 1)
    with pytest.raises(ValueError, match=f"question q: .*{length} tokens"):
        engine(None, [WHO], jax.random.key(0))


def test_a_group_that_does_not_divide_the_rows_is_refused():
    with pytest.raises(ValueError, match=r"num_rows=8.*group_size=3"):
        RolloutEngine(Script([]), make_host(), num_rows=8, group_size=3)


def test_other_messages_open_a_conversation_where_they_are_given():
    engine = RolloutEngine(
        Script([[ANSWERS]]),
        make_host(),
        num_rows=1,
        group_size=1,
        messages=lambda q: [{"role": "user", "content": f"say {q.id}"}],
    )
    ((rollout,),) = (g.rollouts for g in engine(None, [WHO], jax.random.key(0)))
    assert rollout.segments[0].text == "<|user|>say q<|assistant|>"


def same(first, second):
    """Whether two rollouts are alike, log-probabilities apart."""
    assert len(first.segments) == len(second.segments)
    for a, b in zip(first.segments, second.segments):
        assert (a.source, a.text) == (b.source, b.text)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    assert first.searches == second.searches
    assert (first.answer, first.outcome) == (second.answer, second.outcome)


@pytest.mark.parametrize(
    "turns",
    [
        [ANSWERS],
        [SEARCHES, ANSWERS],
        [SEARCHES, "<search>city</search>", ANSWERS],
        [SEARCHES, SEARCHES, SEARCHES],
    ],
)
def test_a_replayed_demonstration_is_the_rollout_that_writes_it(turns):
    ((group,), _) = play([turns])
    same(replay(make_host(), WHO, turns), group.rollouts[0])


@pytest.mark.parametrize(
    "turns, message",
    [
        ([], "0 turns do not end it"),
        ([SEARCHES], "1 turns do not end it"),
        ([ANSWERS, ANSWERS], "ended with turn 1 of 2"),
        ([SEARCHES] * 3 + [ANSWERS], "ended with turn 3 of 4"),
        (["nothing"], "turn 1 has no action: 'nothing'"),
        (["who " * 61 + ANSWERS], "tokens in a turn > 60"),
        (["<search>bad</search>"], "the search of turn 1 failed"),
        ([ANSWERS + " and"], "beyond its action"),
        (["<search>a</search><answer>b</answer>"], "beyond its action"),
    ],
)
def test_a_demonstration_that_no_rollout_could_be_is_refused(turns, message):
    with pytest.raises(ValueError, match=f"question q: .*{message}"):
        replay(make_host(), WHO, turns)


def test_a_demonstration_with_too_long_a_prompt_is_refused():
    with pytest.raises(ValueError, match=r"question q: prompt of .* tokens > 5"):
        replay(make_host(max_prompt_tokens=5), WHO, [ANSWERS])


def test_turns_of_context_are_given_and_not_learnt():
    turns = [SEARCHES, SEARCHES, ANSWERS]
    whole = replay(make_host(), WHO, turns)
    for count in range(3):
        rollout = replay(make_host(), WHO, turns, context_turns=count)
        assert [s.token_ids.tolist() for s in rollout.segments] == [
            s.token_ids.tolist() for s in whole.segments
        ]
        assert rollout.policy_texts == tuple(turns[count:])
        assert (rollout.answer, rollout.searches) == (whole.answer, whole.searches)
        sources = [s.source for s in rollout.segments]
        expected = [1, 2, 3, 2, 3, 2]
        for i in range(count):
            expected[1 + 2 * i] = 1
        assert sources == expected


def test_recorded_observations_are_shown_and_nobody_is_asked():
    calls = []
    host = make_host(search=calls.append)
    rollout = replay(host, WHO, [SEARCHES, ANSWERS], observations=["in the city"])
    shown = [s.text for s in rollout.segments if s.source == Source.SEARCH]
    assert shown == ["\n\n<information>in the city</information>\n\n"]
    assert calls == [] and len(rollout.searches) == 1
    replay(host, WHO, [ANSWERS], observations=[])


def test_context_and_observations_must_fit_the_turns():
    for count in (-1, 2, 3):
        with pytest.raises(ValueError, match=f"{count} turns of context leave none"):
            replay(make_host(), WHO, [SEARCHES, ANSWERS], context_turns=count)
    for observations in ([], ["a", "b"]):
        with pytest.raises(ValueError, match="observations of 2 turns"):
            replay(make_host(), WHO, [SEARCHES, ANSWERS], observations=observations)


def test_a_turn_that_no_stop_string_ends_is_ended_by_the_end_of_text():
    host = Host(
        tiny.tokenizer(), PROTOCOLS["r1_searcher_pp"], find, LIMITS_OF_LONG_TURNS
    )
    search = "<|begin_external_search|> a <|end_external_search|>"
    rollout = replay(host, WHO, [search, r"so \boxed{city}"])
    eos = tiny.tokenizer().eos_ids[0]
    ends = [s.token_ids[-1] == eos for s in rollout.segments if s.source == 2]
    assert ends == [False, True]
    assert (rollout.answer, rollout.outcome) == ("city", Outcome.ANSWERED)


def test_without_a_forced_turn_a_rollout_has_as_many_turns_as_searches():
    turns = [[SEARCHES, SEARCHES, ANSWERS], [SEARCHES, ANSWERS, ANSWERS]]
    ((group,), script) = play(turns, host=make_host(forced_final_turn=False))
    first, second = group.rollouts
    assert (first.outcome, len(first.searches)) == (Outcome.TRUNCATED, 2)
    assert (second.outcome, len(second.searches)) == (Outcome.ANSWERED, 1)
    assert len(script.active) == 2 and len(script.read) == 1
    same(replay(make_host(forced_final_turn=False), WHO, turns[0][:2]), first)


def test_segments_are_what_the_device_has_read():
    """Through the real sampler, for rows that end in different ways."""

    def search(queries):
        return [None if len(q) % 3 == 0 else p for q, p in zip(queries, found(queries))]

    found = tiny.search
    setup = tiny.make_engine(search=search)
    outcomes = set()
    for seed in range(3):
        groups = setup.roll_out(tiny.questions(2), seed=seed)
        rollouts = [r for g in groups for r in g.rollouts]
        lengths = [r.num_tokens for r in rollouts]
        np.testing.assert_array_equal(setup.sampler.rows.length, lengths)
        assert max(lengths) <= setup.sampler.rows.cache.k.shape[3]
        outcomes |= {r.outcome for r in rollouts}
    assert outcomes >= {Outcome.ANSWERED, Outcome.TRUNCATED, Outcome.TOOL_ERROR}

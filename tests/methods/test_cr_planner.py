"""CR-Planner: sub-goals and their outcomes, chosen by critics learnt from labels."""

import functools
import itertools
import json
import math

import numpy as np
import pytest

from rsearch.methods.cr_planner import (
    DOCUMENT,
    QUERY,
    QUERY_PROMPT,
    RATIONALE,
    RATIONALE_PROMPT,
    SUB_GOAL,
    SUB_GOALS,
    Node,
    PlanStep,
    allowed_kinds,
    cr_planner,
    critic_inputs,
    label_actions,
    ucb1,
)
from rsearch.methods.reading import direct, rag
from rsearch.methods.table import demanded_inputs, needs_samples
from tests.methods.scripted import ScriptedModel, Searched, answer_one, kit, shown

# The first words of observations of each kind.
WORDS = {RATIONALE: "Thought:", QUERY: "Query:", DOCUMENT: "Doc"}
KINDS = tuple(SUB_GOALS)
AXES = {name: i for i, name in enumerate(itertools.product(("", *KINDS), KINDS))}
AXES |= {str(digit): len(AXES) + digit for digit in range(10)}


def embed(texts):
    """Return unit vectors along (last kind, sub-goal), or the last digit, or 0."""

    def axis(text):
        first, _, rest = text.partition("\n")
        for kind in KINDS:
            if first == SUB_GOALS[kind]:
                last = [k for k in KINDS if rest.startswith(WORDS[k])]
                return AXES[(last or [""])[0], kind]
        return AXES[([c for c in first if c.isdigit()] or ["0"])[-1]]

    return np.eye(len(AXES))[[axis(text) for text in texts]]


KIT = kit(embed=embed, embed_passages=embed)


def write_labels(path, goals, rates):
    """Write labels of sub-goals after a kind, and of observations with a digit.

    Args:
        path: path of the file, which is returned as text.
        goals: {(previous kind or "", kind): success}.
        rates: {digit: success}.
    """
    labels = [
        (SUB_GOAL, [*([f"{WORDS[last]} x"] if last else []), SUB_GOALS[kind]], rate)
        for (last, kind), rate in goals.items()
    ]
    labels += [
        (kind, [f"{WORDS[kind]} {digit}"], rate)
        for kind in KINDS
        for digit, rate in rates.items()
    ]
    critics, chains, success = zip(*labels, strict=True)
    row = dict(question="When?", critics=critics, chains=chains, success=success)
    path.write_text(json.dumps(row) + "\n")
    return str(path)


# First a query, then its document, then a rationale, and so on.
GOALS = {
    ("", QUERY): 0.9,
    (QUERY, DOCUMENT): 0.9,
    (DOCUMENT, RATIONALE): 0.9,
    (RATIONALE, QUERY): 0.9,
    ("", RATIONALE): 0.1,
}
RATES = {digit: digit / 10 for digit in range(1, 10)}


def planning(thoughts=(), queries=(), answer="Al"):
    """Return a model with these rationales and queries, and otherwise this answer."""
    waiting = {RATIONALE_PROMPT: list(thoughts), QUERY_PROMPT: list(queries)}

    def reply(request):
        for words, replies in waiting.items():
            if shown(request).endswith(words):
                return replies.pop(0)
        return answer

    return ScriptedModel(reply)


def test_critics_choose_sub_goals_and_their_outcomes(tmp_path):
    model = planning(
        (
            "at 1",
            "at 3",
            "at 2",
            "4",
            "So the answer is: Bo.",
            "6\nSo the answer is: C",
        ),
        ("a 2", "a 5\nas b", "a 1", "b 7", "b 8", "b 3"),
    )
    search = Searched()
    rollout = answer_one(
        cr_planner,
        model,
        search=search,
        used=KIT,
        labels=write_labels(tmp_path / "t", GOALS, RATES),
    )
    assert search.queries == ["a 5", "b 8"]
    assert rollout.answer == "C"
    assert model.batches == [3, 3, 3, 3]  # queries and rationales in turn
    # The last passage of each search has the highest digit.
    steps = (
        "Query: a 5\nDoc 1(Title: a 5 3) text 3\nThought: at 3\n"
        "Query: b 8\nDoc 2(Title: b 8 3) text 3\n"
    )
    assert f"Who is X?\n\nSteps so far:\n{steps}\n" in shown(model.requests[-1])
    assert "Steps so far:\nnone\n" in shown(model.requests[0])


def test_the_last_step_is_followed_by_an_answer(tmp_path):
    model = planning(["at 1"], ["a 2"], answer="Al")
    labels = write_labels(tmp_path / "t", GOALS, RATES)
    settings = dict(used=KIT, labels=labels, candidates=1, steps=3, top_k=1)
    rollout = answer_one(cr_planner, model, **settings)
    assert rollout.answer == "Al" and len(model.requests) == 3
    assert rollout.is_at_limit
    steps = "Query: a 2\nDoc 1(Title: a 2 1) text 1\nThought: at 1"
    assert steps in shown(model.requests[-1])


@pytest.mark.parametrize(
    ("goals", "settings", "program", "other"),
    [
        (GOALS, {"steps": 0}, direct, {}),
        ({("", DOCUMENT): 0.9}, {"steps": 1, "top_k": 1}, rag, {"top_k": 1}),
    ],
)
def test_cr_planner_without_steps_is_direct_and_with_one_document_rag(
    tmp_path, goals, settings, program, other
):
    models, searches = [planning(), planning()], [Searched(), Searched()]
    labels = write_labels(tmp_path / "t", goals | {(QUERY, QUERY): 0.0}, RATES)
    answer_one(
        cr_planner,
        models[0],
        search=searches[0],
        used=KIT,
        labels=labels,
        **settings,
    )
    answer_one(program, models[1], search=searches[1], used=KIT, **other)
    assert models[0].requests == models[1].requests
    assert searches[0].queries == searches[1].queries


@pytest.mark.parametrize("candidates", [1, 3])
def test_constant_critics_take_the_first_of_all_actions(tmp_path, candidates):
    """The result is a chain of thoughts, one at a time."""
    constant = kit(
        embed=lambda texts: np.ones((len(texts), 1)),
        embed_passages=lambda texts: np.ones((len(texts), 1)),
    )
    thoughts = ["1", "2", "3\nSo the answer is: Bo"]
    model = planning([t for x in thoughts for t in [x, "9", "8"][:candidates]])
    rollout = answer_one(
        cr_planner,
        model,
        used=constant,
        labels=write_labels(tmp_path / "t", GOALS, RATES),
        candidates=candidates,
    )
    assert rollout.answer == "Bo"
    prompts = [shown(request) for request in model.requests[::candidates]]
    assert ["Thought: 1\n\n" in p for p in prompts] == [False, True, False]
    assert "Thought: 1\nThought: 2\n\n" in prompts[2]


SEEN = (
    PlanStep(RATIONALE, "Thought: 1"),
    PlanStep(QUERY, "Query: 2"),
    PlanStep(DOCUMENT, "Doc 3"),
    PlanStep(RATIONALE, "Thought: 4"),
    PlanStep(QUERY, "Query: 5"),
)


@pytest.mark.parametrize(
    ("critic", "expected"),
    [
        (SUB_GOAL, tuple(x.text for x in SEEN)),
        (RATIONALE, ("Thought: 1", "Thought: 4")),
        (QUERY, ("Thought: 4",)),
        (DOCUMENT, ("Thought: 4", "Query: 5")),
    ],
)
def test_each_critic_reads_the_steps_that_its_authors_show_it(critic, expected):
    assert critic_inputs(critic, SEEN) == expected
    assert critic_inputs(critic, ()) == ()


@pytest.mark.parametrize(
    ("size", "has_document"),
    [(0, True), (1, True), (2, True), (3, False), (4, False), (5, True)],
)
def test_a_query_is_searched_once(size, has_document):
    assert allowed_kinds(SEEN[:size]) == list(KINDS if has_document else KINDS[:2])


@pytest.mark.parametrize("query", ["", "<think>cut"])
def test_an_unusable_query_is_replaced_by_the_question(tmp_path, query):
    search = Searched(num=0)
    rollout = answer_one(
        cr_planner,
        planning(queries=[query]),
        search=search,
        used=KIT,
        labels=write_labels(tmp_path / "t", GOALS, RATES),
        candidates=1,
        steps=2,
    )
    assert search.queries == ["Who is X?"] and rollout.answer == "Al"


def test_a_rationale_that_ends_at_the_mark_ends_no_plan(tmp_path):
    goals = {("", RATIONALE): 0.9, (RATIONALE, RATIONALE): 0.9, ("", QUERY): 0.1}
    labels = write_labels(tmp_path / "t", goals, RATES)
    model = planning(["So 1. So the answer is:", "2"])
    settings = {"labels": labels, "candidates": 1, "steps": 2}
    assert answer_one(cr_planner, model, used=KIT, **settings).answer == "Al"
    assert "So the answer is:\nThought: 2\n" in shown(model.requests[-1])


def node(visits, successes):
    return Node(QUERY, (), (), visits=visits, successes=successes)


def test_the_bound_of_a_node_is_its_success_rate_plus_its_uncertainty():
    assert ucb1(8, node(4, 1)) == pytest.approx(0.25 + math.sqrt(math.log(8) / 4))
    assert ucb1(8, node(4, 1)) == pytest.approx(0.9710, abs=1e-4)
    assert ucb1(1, node(1, 1)) == 1.0
    assert ucb1(8, node(0, 0)) == math.inf


def test_labels_are_shares_of_simulations_that_end_in_an_exact_match():
    def reply(request):
        text = shown(request)
        if text.endswith(RATIONALE_PROMPT):
            return "So the answer is: the gold." if "Query: z" in text else "t"
        if text.endswith(QUERY_PROMPT):
            return "z"
        return "gold" if "Doc 1(Title: z 2)" in text else "x"

    model = ScriptedModel(reply)
    program = functools.partial(label_actions, golden={"q": ("X2", "Gold")})
    row = json.loads(answer_one(program, model, used=KIT).answer)
    assert row["question"] == "Who is X?"
    chains, success = row["chains"], row["success"]
    pairs = list(zip(row["critics"], map(tuple, chains), success, strict=True))
    # No passage of the question leads to the answer, but one of the query's does.
    doc = "Doc 1(Title: {0}) text {1}"
    labels = {pair[:2]: pair[2] for pair in pairs}
    right = labels[DOCUMENT, ("Query: z", doc.format("z 2", 2))]
    assert right > labels[DOCUMENT, ("Query: z", doc.format("z 1", 1))]
    assert (DOCUMENT, (doc.format("Who is X? 1", 1),)) in labels
    ends = [rate for critic, chain, rate in pairs if "gold" in chain[-1]]
    assert ends and set(ends) == {1.0}
    # A sub-goal's share is taken over all simulations that follow it.
    first = [pair for pair in pairs if pair[0] == SUB_GOAL and len(pair[1]) == 1]
    assert [chain for _, chain, _ in first] == [(SUB_GOALS[k],) for k in KINDS]
    rates = [rate for *_, rate in first]
    assert rates[1] == max(rates) and 0 < rates[1] < 1


LABELS = {
    "question": "Who",
    "critics": [c for c in (SUB_GOAL, *KINDS) for _ in range(2)],
    "chains": [[str(i)] for i in range(8)],
    "success": [0, 1] * 4,
}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (None, "labels = ''"),
        ("", "sub_goal: no steps"),
        ({**LABELS, "success": [0, 1] * 3 + [0.5] * 2}, "document: success = 0.5"),
        ({**LABELS, "critics": [SUB_GOAL] * 8}, "rationale: no steps"),
        ({**LABELS, "critics": [SUB_GOAL] * 7}, "labels:1.*critics"),
        ({**LABELS, "critics": ["goal"] * 8}, "labels:1.*critics"),
        ({**LABELS, "chains": [[]] * 8}, "labels:1.*chains"),
        ({**LABELS, "success": [2] * 8}, "labels:1.*success"),
        ({**LABELS, "id": "1"}, "labels:1.*question, critics, chains, success"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path, row, words):
    path = tmp_path / "labels"
    if row is not None:
        path.write_text(row if row == "" else json.dumps(row))
    spelling = "cr_planner" + ("" if row is None else f":labels={path}")
    with pytest.raises(ValueError, match=words):
        demanded_inputs([spelling])


@pytest.mark.parametrize(
    "setting", [{"candidates": 0}, {"steps": -1}, {"penalty": 0.0}]
)
def test_settings_out_of_range_are_refused(tmp_path, setting):
    ((name, value),) = setting.items()
    labels = write_labels(tmp_path / "t", GOALS, RATES)
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        answer_one(cr_planner, planning(), used=KIT, labels=labels, **setting)


def test_inputs_are_the_labels_and_a_labelled_question_is_refused(tmp_path):
    labels = write_labels(tmp_path / "t", GOALS, RATES)
    before = demanded_inputs([f"cr_planner:labels={labels}"])
    assert list(before) == ["eval.cr_planner"]
    with pytest.raises(ValueError, match="question q is among"):
        answer_one(cr_planner, planning(), text="When?", used=KIT, labels=labels)
    write_labels(tmp_path / "t", GOALS, {1: 0.0, 2: 1.0})
    assert demanded_inputs([f"cr_planner:labels={labels}"]) != before


def test_several_candidates_need_samples():
    assert needs_samples("cr_planner:labels=x")
    assert not needs_samples("cr_planner:candidates=1:labels=x")

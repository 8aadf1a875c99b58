"""Which rollouts are kept and why, on conversations written by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.data.curation import (
    attempt_of,
    both_knowledge_fault,
    copies,
    demonstration_record,
    first_step,
    from_record,
    is_right,
    question_record,
    rejection_reason,
    rewording,
    segments,
    text_before_action,
    to_record,
)
from rsearch.data.demonstrations import Demonstration, load_demonstrations
from rsearch.data.questions import load_questions
from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS
from rsearch.protocols.tagged import SEARCH_R1
from rsearch.tools.search import search_call
from rsearch.types import Answer, Outcome, Passage, Question
from tests.rewards.play import PARIS, play

EM = {"measure": "em", "normalize": "squad"}
CHAT = {"messages": [{"role": "user", "content": "c"}]}
PASSAGE = Passage("p", "France\nIts capital is Paris.")
PP = PROTOCOLS["r1_searcher_pp"]


def tried(*turns, protocol=SEARCH_R1, passages=(PASSAGE,)):
    return attempt_of(protocol, play(protocol, turns, passages))


def search(thought, query):
    return f"<think> {thought}</think><search> {query} </search>"


def answer(thought, text):
    return f"<think> {thought}</think><answer> {text} </answer>"


TWO_SEARCHES = (search("France?", "France"), search("Capital?", "capital"))
RIGHT = tried(*TWO_SEARCHES, answer("Found.", "Paris"))


def test_a_turn_is_cut_after_its_action():
    cut = first_step(SEARCH_R1, "a <search> q </search>\n\n")
    assert cut == "a <search> q </search>"


def test_steps_after_a_made_up_observation_are_cut():
    rearag = PROTOCOLS["rearag"]
    first = (
        "Thought 1: a\nAction 1: {'function': 'search', 'parameters': {'query': 'q'}}"
    )
    later = "\nObservation 1: x\nThought 2: b\nAction 2: `{}`"
    assert first_step(rearag, first + later) == first
    assert first_step(rearag, first) == first


@given(st.text())
def test_a_cut_turn_takes_the_same_action(text):
    for protocol in PROTOCOLS.values():
        cut = first_step(protocol, text)
        assert protocol.parse(cut) == protocol.parse(text)
        assert text.startswith(cut)


def test_an_attempt_is_restored_from_its_record():
    record = to_record(RIGHT)
    assert from_record(json.loads(json.dumps(record))) == RIGHT
    assert RIGHT.outcome == Outcome.ANSWERED
    assert len(RIGHT.turns) == len(RIGHT.observations) == 3
    assert RIGHT.observations[2] == ""
    assert RIGHT.passages() == [PASSAGE]  # found by both searches


@pytest.mark.parametrize(
    ("text", "em", "cover_em", "f1"),
    [
        ("Paris", True, True, True),
        ("Paris France", False, True, True),
        ("London", False, False, False),
    ],
)
def test_the_measure_decides_which_answer_is_right(text, em, cover_em, f1):
    attempt = tried(answer("", text))
    wanted = {"em": em, "cover_em": cover_em, "f1": f1}
    for measure, right in wanted.items():
        got = is_right(PARIS, attempt, measure=measure, normalize="squad")
        assert got == right, measure


def test_an_answer_longer_than_the_word_limit_is_wrong():
    ten = "Paris is its capital and no other city would be"
    assert len(ten.split()) == 10
    for text, limit, right in (
        (ten, 10, True),
        (f"{ten} so", 10, False),
        (ten, 0, True),
    ):
        how = {"measure": "cover_em", "normalize": "squad", "max_words": limit}
        assert is_right(PARIS, tried(answer("", text)), **how) == right, text
        wrong = rejection_reason(SEARCH_R1, PARIS, tried(answer("", text)), **how)
        assert wrong == ("" if right else "wrong")


@pytest.mark.parametrize(
    ("text", "any_order", "contiguous", "substring"),
    [
        ("York, the new one", True, False, False),
        ("in New York", True, True, True),
        ("Anew Yorker", False, False, True),
    ],
)
def test_cover_em_honours_the_configured_word_order(
    text, any_order, contiguous, substring
):
    question = Question("q", "?", ("New York",))
    attempt = tried(answer("", text))
    wanted = {"any": any_order, "contiguous": contiguous, "substring": substring}
    for order, right in wanted.items():
        how = {"measure": "cover_em", "normalize": "squad", "order": order}
        assert is_right(question, attempt, **how) == right, order


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ((*TWO_SEARCHES, answer("", "Paris")), ""),
        ((answer("", "Paris"),), ""),
        ((answer("", "London"),), "wrong"),
        (TWO_SEARCHES, "truncated"),
        (("no action", answer("", "Paris")), "malformed"),
        ((answer("<information> Paris </information>", "Paris"),), "forged"),
        ((TWO_SEARCHES[0], answer(PASSAGE.contents, "Paris")), "copied"),
        ((TWO_SEARCHES[0], answer("FRANCE  Its capital is Paris", "Paris")), "copied"),
        # The same words before the passage was found are the policy's own.
        ((answer(PASSAGE.contents, "Paris"),), ""),
    ],
)
def test_a_fault_names_why_an_attempt_is_rejected(turns, why):
    assert rejection_reason(SEARCH_R1, PARIS, tried(*turns), **EM) == why


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_copied_passage_is_recognised_in_every_protocols_format(name):
    passages = tuple(
        Passage(str(i), f'"{title}"\n{text}')
        for i, (title, text) in enumerate([("Oslo", "A port."), ("France", "In\nEU.")])
    )
    text = PROTOCOLS[name].show_passages(["France?"], [passages]).content
    for passage in passages:
        assert copies(f"It says: {text} So it is.", passage), text
        assert not copies("Oslo is a port. France lies in EU.", passage)


def test_a_copied_text_is_recognised_without_its_title_only_if_it_is_long():
    long = " ".join(f"word{i}" for i in range(20))
    assert copies(f"I read that {long.upper()}!", Passage("p", f"Title\n{long}."))
    assert not copies(long, Passage("p", f"Title\n{long} more"))
    assert not copies("Its capital is Paris.", PASSAGE)
    assert not copies("anything", Passage("p", "\n"))
    # A writer's observation has an empty title, a tool's result may be one line.
    for contents in ("\nParis.", "Paris", "Paris\n"):
        assert not copies("So it is Paris.", Passage("p", contents))
    for contents in (f"\n{long}", long):
        assert copies(f"I read: {long}", Passage("p", contents))


def test_three_turns_make_three_segments_of_three_kinds():
    made = segments(SEARCH_R1, PARIS, RIGHT)
    assert [kind for kind, _ in made] == [
        "search_from_question",
        "search_from_retrieved",
        "answer_from_retrieved",
    ]
    for number, (_, demonstration) in enumerate(made):
        assert demonstration.context_turns == number
        assert demonstration.turns == RIGHT.turns[: number + 1]
        assert demonstration.observations is None  # the search is run again
    ((kind, alone),) = segments(SEARCH_R1, PARIS, tried(answer("", "Paris")))
    assert kind == "answer_from_question" and alone.context_turns == 0


def test_the_learnt_turn_of_a_segment_never_contains_a_passage():
    for _, demonstration in segments(SEARCH_R1, PARIS, RIGHT):
        learnt = demonstration.turns[demonstration.context_turns]
        assert PASSAGE.contents not in learnt and "<information>" not in learnt
    copied = tried(TWO_SEARCHES[0], answer(PASSAGE.contents, "Paris"))
    with pytest.raises(AssertionError):
        segments(SEARCH_R1, PARIS, copied)


def turns_of(*steps):
    """Return R1-Searcher++ turns for steps given as (thought, action, internal)."""
    return [PP.write(Step(i, t, a, k)) for i, (t, a, k) in enumerate(steps, 1)]


BOTH = turns_of(
    (
        "Which country?",
        search_call("capital of France"),
        "The question is on France.",
    ),
    ("Its capital is Paris, I read.", Answer("Paris"), ""),
)


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (BOTH, ""),
        (turns_of(("", Answer("Paris"), "I know.")), "nothing searched"),
        (
            turns_of(("", search_call("q"), ""), ("Read.", Answer("Paris"), "")),
            "nothing recalled",
        ),
        (
            [BOTH[0], BOTH[1].replace("Its", "<|begin_internal_answer|>")],
            "unclosed internal tag",
        ),
        (
            [f"<|end_internal_answer|> a <|begin_internal_answer|> {BOTH[0]}", BOTH[1]],
            "unclosed internal tag",
        ),
        (
            [BOTH[0].replace("The question is on France.", ""), BOTH[1]],
            "nothing recalled",
        ),
    ],
)
def test_both_kinds_of_knowledge_are_required(turns, why):
    attempt = tried(*turns, protocol=PP)
    assert rejection_reason(PP, PARIS, attempt, **EM) == ""
    assert both_knowledge_fault(attempt) == why


def test_prose_is_the_text_before_the_action():
    assert (
        text_before_action(PP, BOTH[0]) == "The question is on France. Which country?"
    )
    assert text_before_action(PP, BOTH[1]) == "Its capital is Paris, I read."
    assert text_before_action(SEARCH_R1, TWO_SEARCHES[0]) == "France?"
    assert text_before_action(SEARCH_R1, "nothing") is None


def test_a_rewording_recalls_what_was_found_and_mentions_no_search():
    made = rewording(PP, PARIS, tried(*BOTH, protocol=PP), **EM)
    (turn,) = made.turns
    assert "_external_search|>" not in turn and "capital of France" not in turn
    begin, _, rest = turn.partition("<|begin_internal_answer|>")
    recalled, _, end = rest.partition("<|end_internal_answer|>")
    assert begin == "" and "Its capital is Paris, I read." in recalled
    assert PP.parse(end) == Answer("Paris")
    shown = "".join(message["content"] for message in made.messages)
    assert PASSAGE.contents in shown and PARIS.text in shown


def test_an_attempt_without_a_search_is_not_reworded():
    recalled = tried(*turns_of(("", Answer("Paris"), "I know.")), protocol=PP)
    assert rewording(PP, PARIS, recalled, **EM) is None


def test_written_demonstrations_are_read_back(tmp_path):
    question = Question("q7", "Where?", ())
    chat = ({"role": "user", "content": "c"},)
    wanted = [
        Demonstration(question, ("a", "b"), context_turns=1, is_segment=True),
        Demonstration(question, ("a", "b"), observations=("",)),
        Demonstration(question, ("a",), messages=chat),
        Demonstration(question, ("a",), method="raw", messages=chat),
        Demonstration(question, ("a",), method="rag"),
    ]
    path = tmp_path / "demonstrations.jsonl"
    lines = [json.dumps(demonstration_record(d)) for d in wanted]
    path.write_text("\n".join(lines) + "\n")
    assert load_demonstrations(path) == wanted


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"context_turns": 2}, "context_turns"),
        ({"context_turns": "1"}, "context_turns"),
        ({"context_turns": True}, "context_turns"),
        ({"observations": []}, "observations"),
        ({"observations": [3]}, "observations"),
        ({"messages": []}, "messages"),
        ({"is_segment": 1}, "is_segment"),
        ({"is_raw": 1}, "is_raw"),
        ({"is_raw": True, "turns": ["a"]}, "is_raw"),
        ({**CHAT, "is_raw": True}, "is_raw"),
        ({"is_rag": "yes", "turns": ["a"]}, "is_rag"),
        ({"is_rag": True}, "is_rag"),
        ({**CHAT, "is_rag": True, "turns": ["a"]}, "is_rag"),
        ({"is_rag": True, "is_segment": True}, "is_rag"),
        ({**CHAT, "is_rag": True, "is_raw": True, "turns": ["a"]}, "is_rag"),
        ({"messages": [{"role": "user"}]}, "messages"),
    ],
)
def test_a_wrong_field_of_a_demonstration_is_named(tmp_path, fields, error):
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps({"question": "q", "turns": ["a", "b"], **fields}) + "\n")
    with pytest.raises(ValueError, match=f"demonstrations.jsonl:1: field {error}"):
        load_demonstrations(path)


def test_written_questions_are_read_back(tmp_path):
    question = Question("q7", "Where?", ("here", "there"), {"kind": "single"})
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(question_record(question, difficulty="hard")) + "\n")
    ((read,), problems) = load_questions(path)
    assert not problems
    assert read == Question(
        "q7", "Where?", ("here", "there"), {"kind": "single", "difficulty": "hard"}
    )

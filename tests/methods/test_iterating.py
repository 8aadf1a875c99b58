"""Methods that search several times."""

import pathlib
import re
import time
import tomllib

import pytest

from rsearch.methods import iterating, reading
from rsearch.types import Outcome, Passage
from tests.methods.scripted import (
    ScriptedModel,
    Searched,
    answer_one,
    completion,
    kit,
    shown,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_one_round_of_iter_retgen_is_rag():
    asked = []
    for program, settings in (
        (reading.rag, {}),
        (iterating.iter_retgen, {"rounds": 1}),
    ):
        model, search = ScriptedModel(lambda r: "Paris"), Searched()
        rollout = answer_one(program, model, search=search, **settings)
        asked.append((model.requests, search.queries, rollout.answer))
    assert asked[0] == asked[1]


def test_iter_retgen_without_rounds_is_refused():
    with pytest.raises(ValueError, match="rounds = 0"):
        answer_one(iterating.iter_retgen, ScriptedModel(lambda r: "Paris"), rounds=0)


def test_the_answer_is_part_of_the_next_query():
    for order, query in (
        ("answer_first", "Paris Who is X?"),
        ("question_first", "Who is X? Paris"),
    ):
        model, search = ScriptedModel(lambda r: "Paris"), Searched()
        rollout = answer_one(
            iterating.iter_retgen, model, search=search, query_order=order
        )
        assert search.queries == ["Who is X?", query, query]
        assert len(rollout.searches) == 3 and len(model.requests) == 3
        assert "Who is X? 1" not in model.requests[1].prompt[0]["content"].replace(
            query, ""
        )


def test_an_empty_answer_repeats_the_query():
    """So at temperature 0 the answer stays the same too."""
    model, search = ScriptedModel(lambda r: ""), Searched()
    answer_one(iterating.iter_retgen, model, search=search)
    assert search.queries == ["Who is X?"] * 3
    first, *others = model.requests
    assert others == [first] * 2


def chained(*thoughts, answer="Paris"):
    """Return a model that continues raw texts with these thoughts and answers chats."""
    waiting = list(thoughts)
    return ScriptedModel(
        lambda r: waiting.pop(0) if isinstance(r.prompt, str) else answer
    )


def test_ircot_without_rounds_is_rag():
    asked = []
    for program, settings in (
        (reading.rag, {}),
        (iterating.ircot, {"rounds": 0, "drops_question_words": False}),
    ):
        model, search = ScriptedModel(lambda r: "Paris"), Searched()
        rollout = answer_one(program, model, search=search, **settings)
        asked.append((model.requests, search.queries, rollout.answer))
    assert asked[0] == asked[1]


def test_ircot_searches_with_its_last_factual_sentence_until_it_concludes():
    model = chained(
        " Al was born. Bo wrote it.",
        " Thus, Bo it is.",
        " x",
        " SO THE ANSWER IS: St. Louis. Q: y",
    )
    search = Searched()
    rollout = answer_one(
        iterating.ircot, model, text="Who is X of Y?", search=search, top_k=2
    )
    assert search.queries == ["X of Y?", "Al was born.", "Al was born.", "x"]
    *steps, last = model.requests
    assert [r.stop for r in steps] == [("\n",)] * 4
    assert {r.max_tokens for r in steps} == {16}
    assert last.max_tokens == 8 and rollout.answer == "Paris"
    end = "\n\nQ: Who is X of Y?\nA: Al was born. Thus, Bo it is. x"
    assert shown(steps[3]).endswith(f"Wikipedia Title: x 2\ntext 2{end}")
    for title in (
        "X of Y? 1",
        "X of Y? 2",
        "Al was born. 1",
        "Al was born. 2",
        "x 1",
        "x 2",
    ):
        assert shown(steps[3]).count(f"Title: {title}\n") == 1
        assert shown(last).count(f"Title: {title})") == 1
    assert len(rollout.searches) == 4


def test_ircot_can_take_its_answer_from_the_chain():
    for thoughts, answer, outcome in (
        (["So the answer is: no. Yes."], "no", Outcome.ANSWERED),
        (["It is.", ""], None, Outcome.MALFORMED),
        (["It is."] * 3, None, Outcome.MALFORMED),
        ([completion("It is", is_cut=True)] * 3, None, Outcome.TRUNCATED),
    ):
        model = chained(*thoughts)
        rollout = answer_one(iterating.ircot, model, answers="chain", rounds=3)
        assert (rollout.answer, rollout.outcome) == (answer, outcome)
        assert len(model.requests) == len(rollout.searches) == len(thoughts)


@pytest.mark.parametrize(
    ("sentence", "is_reasoning", "answer"),
    [
        ("Thus, they differ.", True, None),
        ("So the answer is: no.", True, "no"),
        ("1990 + 5 = 1995", True, None),
        ("Hence it is.", True, None),
        ("Sonny was born.", False, None),
        ("The answer is: St. Louis.", False, "St. Louis"),
        ("Answer: Paris", False, None),
        ("answer is: Paris.", False, None),
    ],
)
def test_sentences_of_a_chain_are_read_as_the_authors_read_them(
    sentence, is_reasoning, answer
):
    assert iterating.is_reasoning(sentence) == is_reasoning
    assert iterating.stated_answer(sentence) == answer


def test_question_words_are_no_part_of_a_query():
    for text, query in (
        (
            "Who is the mother of the director of Jaws?",
            "the mother of the director of Jaws?",
        ),
        ("Who is", "Who is"),
    ):
        search = Searched()
        answer_one(iterating.ircot, chained(), text=text, search=search, rounds=0)
        assert search.queries == [query]


def test_ircot_collects_max_passages_without_repeats_and_long_ones():
    words = " ".join(f"w{i}" for i in range(400))
    contents = [f"A title\n{words}", f"A title.\n{words} x", "A\n" + "w " * 601]
    contents += [f"{c * 9}\ntext" for c in "abc"] + [f"Other\n{words}"]
    found = tuple(Passage(str(i), text) for i, text in enumerate(contents))
    model = chained("It is.", "So the answer is: no.")
    answer_one(
        iterating.ircot, model, search=lambda q: [found] * len(q), max_passages=4
    )
    _, second, reader = map(shown, model.requests)
    titles = ["A title", "a" * 9, "b" * 9, "c" * 9]
    lines = second.split("Kazakhstan. Thus")[1].splitlines()
    assert [x[17:] for x in lines if x.startswith("Wikipedia")] == titles
    assert "w349" in second and "w350" not in second and "w399" in reader
    start = time.monotonic()
    hostile = Passage("x", "a" * 9**5 + "\n" + "a " * 600)
    near = Passage("y", "a" * 9**5 + "\n" + "a " * 560 + "b c " * 20)
    many = (hostile, near) * 3
    answer_one(iterating.ircot, chained(), search=lambda q: [many], rounds=0)
    assert time.monotonic() - start < 2


def test_ircot_shows_passages_in_the_order_of_its_searches():
    """A port sorts them by score, the best last: b, c, a."""

    def search(queries):
        rounds.append(queries)
        scores = {"a": 0.9, "b": 0.8} if len(rounds) == 1 else {"a": 0.95, "c": 0.85}
        return [tuple(Passage(t, f"{t * 5}\n{t}", x) for t, x in scores.items())]

    rounds, model = [], chained("It is.", "So the answer is: no.")
    answer_one(iterating.ircot, model, search=search)
    titles = re.findall(r"Title: (\w)\1{4}\)", shown(model.requests[-1]))
    assert titles == ["a", "b", "c"]


def test_passages_of_each_search_are_cut_to_a_budget():
    model = chained("It is.", "So the answer is: no.")
    short = kit(shorten=lambda text: text[:24])
    rollout = answer_one(iterating.ircot, model, used=short)
    end = "Wikipedia Title: X? 1\nte\n\nWikipedia Title: It is. "
    assert f"{end}\n\nQ: Who is X?" in shown(model.requests[1])
    reader = shown(model.requests[2])
    assert "Doc 1(Title: X? 1) text \nDoc 4(Title: It is. 1) t" in reader
    assert rollout.num_cut_observations == len(rollout.searches) == 2
    cuts_readers = kit(shorten=lambda text: text[: 24 if text[:3] == "Doc" else None])
    for answers, num_cut in (("reader", 2), ("chain", 0)):
        model = chained("It is.", "So the answer is: no.")
        rollout = answer_one(iterating.ircot, model, used=cuts_readers, answers=answers)
        assert rollout.num_cut_observations == num_cut


def test_cut_passages_count_once_for_each_search():
    def search(queries):
        return [(Passage("1", "X\n" + "text " * 9),) for _ in queries]

    short = kit(shorten=lambda text: text[:24])
    model = ScriptedModel(lambda r: "Paris")
    rollout = answer_one(iterating.iter_retgen, model, search=search, used=short)
    assert rollout.num_cut_observations == len(rollout.searches) == 3
    model = chained("It is.", "He is.", "So the answer is: no.")
    rollout = answer_one(iterating.ircot, model, search=search, used=short)
    assert rollout.num_cut_observations == 1  # later ones bring nothing new
    assert len(rollout.searches) == 3


def test_a_conclusion_within_a_thought_does_not_end_a_chain():
    thoughts = [
        "<think>It is.",
        "So the answer is: Bob.",
        "</think>So the answer is: Al.",
    ]
    for num_thoughts, answer, notes in ((3, "Al", [1.0]), (2, None, [])):
        rollout = answer_one(
            iterating.ircot,
            chained(*thoughts[:num_thoughts]),
            rounds=num_thoughts,
            answers="chain",
        )
        assert rollout.answer == answer
        assert rollout.notes == tuple(("chain_concluded", x) for x in notes)


def test_a_chain_that_ends_before_its_last_round_notes_whether_it_concluded():
    for thoughts, notes, is_at_limit in (
        (["It is.", "So the answer is: no."], [1.0], False),
        (["It is.", ""], [0.0], False),
        (["It is."] * 3, [], True),
    ):
        rollout = answer_one(iterating.ircot, chained(*thoughts), rounds=3)
        assert rollout.notes == tuple(("chain_concluded", x) for x in notes)
        assert rollout.is_at_limit == is_at_limit


def test_all_example_files_are_in_the_package():
    """IRCoT has four of them, and the chain of each ends with an answer."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = table["tool"]["setuptools"]["package-data"]["rsearch.methods"]
    folder = ROOT / "rsearch" / "methods"
    files = {p.name for p in folder.glob(pattern)}
    assert files == {p.name for p in (folder / "examples").iterdir()}
    examples = iterating.few_shot("ircot").split("\n\n\n")
    assert len(examples) == 4
    for example in examples:
        chain = example.rpartition("\nA: ")[2]
        assert iterating.stated_answer(iterating.sentences(chain)[-1])

"""SearChain: a chain of queries that passages correct and complete."""

import pytest

from rsearch.methods.searchain import final_answer, read_chain, searchain
from rsearch.types import Outcome, Passage
from tests.methods.scripted import ScriptedModel, answer_one, kit, shown

FIRST = "[Query 1]: Where was he born?\n"
END = "[Final Content]: He was [1]. So the final answer is Toronto."


def run(*chains, reader="Toronto", score=2.0, **settings):
    """Answer one question; return (rollout, queries, model)."""
    waiting, queries = list(chains), []

    def reply(request):
        is_chain = "Construct a global" in request.prompt[0]["content"]
        return waiting.pop(0) if is_chain else reader

    def search(texts):
        queries.extend(texts)
        return [(Passage("x", f"T\nof {text}", score),) for text in texts]

    model = ScriptedModel(reply)
    rollout = answer_one(
        searchain, model, search=search, **({"min_score": 1.5} | settings)
    )
    return rollout, queries, model


@pytest.mark.parametrize(
    ("chain", "reader", "score", "verb"),
    [
        (f"{FIRST}[Answer 1]: Toronto, Canada\n{END}", "Toronto", 2.0, None),
        (f"{FIRST}[Answer 1]: Toronto, Canada\n{END}", "Ottawa", 2.0, "change"),
        (f"{FIRST}[Answer 1]: Toronto, Canada\n{END}", "Ottawa", 1.2, None),
        (f"{FIRST}[Answer 1]: Toronto, Canada\n{END}", "Ottawa", None, None),
        ("[Unsolved Query]: Where was he born?", "Toronto", 0.3, "give"),
        (f"{FIRST}[Answer 1]: Toronto\n{END}", "", 2.0, None),
    ],
)
def test_passages_correct_and_complete_a_chain(chain, reader, score, verb):
    rollout, queries, model = run(chain, END, reader=reader, score=score)
    assert rollout.answer == "Toronto" and queries == ["Where was he born?"]
    chains = [r for r in model.requests if "Construct" in shown(r)]
    assert len(chains) == (1 if verb is None else 2)
    if verb is not None:
        *_, said, feedback = chains[1].prompt
        assert said == {"role": "assistant", "content": chain}
        text = f'"Where was he born?" should be "{reader}", you can {verb} your answer'
        assert text in feedback["content"]
        assert "Reference: Doc 1(Title: T) of Where was he born?" in feedback["content"]


def test_a_query_is_searched_once_unless_it_is_unsolved():
    unsolved = "[Unsolved Query]: Where was he born?\n"
    chain = f"{FIRST}[Answer 1]: Toronto.\n{FIRST}{unsolved}"
    _, queries, _ = run(chain, f"{FIRST}[Answer 1]: Ottawa.\n{END}")
    assert queries == ["Where was he born?"] * 2


def test_at_most_rounds_chains_are_written():
    rollout, queries, _ = run(*["[Unsolved Query]: A?"] * 5)
    assert rollout.outcome == Outcome.MALFORMED and len(queries) == 4
    rollout, queries, _ = run(f"{FIRST}{END}", rounds=1)
    assert rollout.answer == "Toronto" and queries == []


def test_chains_are_read_line_by_line():
    chain = "[Query 1]: A?\n[Unsolved Query]: B\n[Answer 1]: x\n[query 2] C\n[Query]:"
    assert read_chain(chain) == [("A?", False, "x"), ("B", True, "x"), ("C", False, "")]
    for text, answer in (
        (END, "Toronto"),
        ("So the answer is A.", None),
        ("[Final Content]: A.", None),
        (
            "[Final Content]: The answer is A. So the final answer is: St. Louis",
            "St. Louis",
        ),
        ("[Final Content]: the answer is", None),
    ):
        assert final_answer(text) == answer


def test_references_are_cut_to_the_budget_of_a_search():
    model = ScriptedModel(lambda r: "[Unsolved Query]: {question} B")
    answer_one(searchain, model, rounds=2, used=kit(shorten=lambda text: text[:9]))
    assert model.requests[-1].prompt[-1]["content"].endswith("Reference: Doc 1(Tit")

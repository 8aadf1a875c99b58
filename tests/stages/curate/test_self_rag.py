"""Self-RAG's data from a run's answers: the questions used, and those left out."""

import json
import types

import pytest

from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.stages.curate.self_rag import gold_reflections
from rsearch.types import Passage, Question

GOLD = {"supporting_titles": ["Rome"]}
ASKED = [
    Question("a", "A?", ("Rome",), GOLD),
    Question("b", "B?", ("Rome",), {}),  # has no gold titles
    Question("c", "C?", ("Rome",), GOLD),  # has no answer among the labels
    Question("d", "D?", ("Rome",), GOLD),  # the search fails
    Question("world", "E?", ("Rome",), {}),
]
FOUND = (Passage("1", '"Rome"\nIt is Rome.'), Passage("2", "Paris\nIt lies in France."))


def stage(path, *, dataset="world:train", questions=ASKED, tokens=64):
    """Return a data stage over these questions, whose labels it writes to `path`."""
    answers = {"direct": "Oslo", "rag": "Rome"}
    rows = [
        {"stage": "s", "method": method, "dataset": dataset, "id": q.id}
        | {"question": q.text, "golden_answers": ["Rome"], "prediction": answer}
        for method, answer in answers.items()
        for q in questions
        if q.id != "c"
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curate = types.SimpleNamespace(labels=str(path), normalize="squad")
    data = types.SimpleNamespace(train="world:train")
    hop = types.SimpleNamespace(subject="Paris")
    budgets = {
        "eval": types.SimpleNamespace(passage_tokens=0),
        "rollout": types.SimpleNamespace(max_observation_tokens=tokens),
    }
    return types.SimpleNamespace(
        config=types.SimpleNamespace(curate=curate, data=data, **budgets),
        questions=questions,
        passages_of=lambda queries, ids: [None if i == "d" else FOUND for i in ids],
        world=types.SimpleNamespace(hops={"world": [hop]}),
        tokenizer=train_tokenizer(["It is Rome. "] * 3, vocab_size=300),
    )


def test_questions_with_answers_and_gold_passages_are_reflected_on(tmp_path):
    chosen = gold_reflections(stage(tmp_path / "t"))
    names = [decision.name for decision in chosen.decisions]
    assert names[0] == names[4] == "[Retrieval]"
    assert names[1:4] == ["no gold passages", "not labelled", "search failed"]
    assert [d.is_kept for d in chosen.decisions] == [True, False, False, False, True]
    kinds = [
        (kind, d.messages[0]["content"].partition("<paragraph>")[2])
        for kind, d in chosen.demonstrations
        if kind in ("[Relevant]", "[Irrelevant]") and d.question.id in ("a", "world")
    ]
    rome, paris = (f"{p.contents}</paragraph>" for p in FOUND)
    assert kinds == [
        ("[Relevant]", rome),
        ("[Irrelevant]", paris),
        # The world knows the gold passages of its own questions.
        ("[Irrelevant]", rome),
        ("[Relevant]", paris),
    ]


def test_passages_are_cut_as_an_evaluation_cuts_them(tmp_path):
    chosen = gold_reflections(stage(tmp_path / "t", questions=ASKED[:1], tokens=3))
    kind, made = chosen.demonstrations[2]
    cut = made.messages[0]["content"].partition("<paragraph>")[2]
    assert kind == "[Relevant]" and made.turns[0].startswith("[Relevant]Rome")
    assert cut.endswith("</paragraph>") and len(cut) < 20


def test_labels_of_other_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.curate\.labels = .*'world:train'"):
        gold_reflections(stage(tmp_path / "t", dataset="world:dev"))

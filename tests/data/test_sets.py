"""Published sets, read in full by name, from the hub or from a copy."""

import json

import pytest

from rsearch.data.questions import load_questions
from rsearch.data.sets import SETS

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"


@pytest.fixture
def hub(monkeypatch):
    """{(name, configuration, split): records} of a hub that has nothing else."""
    data = {}
    monkeypatch.setattr(
        "datasets.load_dataset", lambda name, config, split: data[name, config, split]
    )
    return data


def rows(num):
    return [
        {"id": f"q{i}", "question": "Who?", "golden_answers": ["Ann", "A."]}
        for i in range(num)
    ]


def test_a_set_is_read_from_the_hub_with_its_aliases(hub):
    hub[FLASHRAG, "bamboogle", "test"] = rows(125)
    questions, problems = load_questions("set:bamboogle")
    assert (len(questions), problems) == (125, [])
    assert questions[3].golden_answers == ("Ann", "A.")
    hub["google/frames-benchmark", None, "test"] = [
        {"Unnamed: 0": i, "Prompt": "Who?", "Answer": "Ann"} for i in range(824)
    ]
    questions, _ = load_questions("set:frames")
    assert len(questions) == 824 and questions[0].golden_answers == ("Ann",)


@pytest.mark.parametrize("num", [124, 126])
def test_a_set_of_another_size_is_refused(hub, tmp_path, num):
    hub[FLASHRAG, "bamboogle", "test"] = rows(num)
    path = tmp_path / "copy.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(num)))
    for source in ("set:bamboogle", f"set:bamboogle={path}"):
        with pytest.raises(ValueError) as caught:
            load_questions(source)
        for text in (source, str(num), "125"):
            assert text in str(caught.value)
        assert len(load_questions(source, limit=9)[0]) == 9


def test_sets_on_no_hub_are_read_from_a_file(tmp_path):
    path = tmp_path / "test_subsampled.jsonl"
    answer = {"number": "", "date": {}, "spans": ["Ann"]}
    row = {"question_text": "Who?", "answers_objects": [answer]}
    lines = [json.dumps({**row, "question_id": f"q{i}"}) + "\n" for i in range(500)]
    path.write_text("".join(lines))
    questions, _ = load_questions(f"set:ircot_musique={path}")
    assert len(questions) == 500 and questions[7].golden_answers == ("Ann",)
    # IIRC's size is not known, so it is not checked.
    path = tmp_path / "dev.json"
    answer = {"type": "span", "answer_spans": [{"text": "Ann"}]}
    entries = [
        {"question": "Who?", "answer": answer},
        {"question": "Why?", "answer": {}},
    ]
    path.write_text(json.dumps([{"title": "Ann", "questions": entries}]))
    (question,), problems = load_questions(f"set:iirc={path}", on_bad="skip")
    assert question.golden_answers == ("Ann",) and len(problems) == 1
    # Tables count their rows.
    path = tmp_path / "Bamboogle.csv"
    for num in (125, 124):
        path.write_text("Question,Answer\n" + "Who?,Ann\n" * num)
        if num == 125:
            assert len(load_questions(f"set:bamboogle={path}")[0]) == num
            continue
        with pytest.raises(ValueError, match="has 124 questions, expected 125"):
            load_questions(f"set:bamboogle={path}")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("set:hotpot_qa", "hotpotqa"),
        ("set:x", ", ".join(SETS)),
        ("set:", "no set ''"),
        ("set:nq=", "no file"),
        ("set:r1_searcher_hotpotqa", "hotpotqa_500.jsonl"),
        ("set:ircot_iirc", "iirc/test_subsampled.jsonl"),
        ("set:nq=missing.jsonl", "missing.jsonl"),
    ],
)
def test_a_source_that_names_no_set_is_refused(source, named):
    with pytest.raises(ValueError) as caught:
        load_questions(source)
    assert named in str(caught.value)


def test_the_sizes_are_those_of_the_published_splits():
    sizes = {"nq": 3610, "triviaqa": 11313, "popqa": 14267, "hotpotqa": 7405}
    sizes |= {"2wikimultihopqa": 12576, "musique": 2417, "bamboogle": 125}
    sizes |= {"frames": 824}
    sizes |= {name: 500 for name in SETS if name.startswith("r1_searcher_")}
    sizes |= {name: 500 for name in SETS if name.startswith("ircot_")}
    assert {name: entry.size for name, entry in SETS.items()} == sizes | {"iirc": None}


def test_every_set_names_its_source():
    for name, published in SETS.items():
        assert published.answers and (published.size or name == "iirc")
        assert ("@" in published.source) != bool(published.publisher)

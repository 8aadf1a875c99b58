"""Files of public question sets in their authors' own form.

test_question_layouts covers records, also those of copies on the hub and elsewhere.
"""

import csv
import json

import pytest

from rsearch.data.questions import load_questions
from tests.data.test_question_layouts import DANUBE, LAYOUTS, POPQA, Q


def test_popqas_table_is_read_with_its_aliases(tmp_path):
    path = tmp_path / "popQA.tsv"
    rows = [POPQA, POPQA | {"id": 5, "possible_answers": '["Danube", "Istros"]'}]
    write_table(path, rows, "\t")
    questions, _ = load_questions(path)
    assert [(q.id, q.text) for q in questions] == [("4", Q), ("5", Q)]
    answers = [q.golden_answers for q in questions]
    assert answers == [DANUBE, ("Danube", "Istros", "Donau")]
    write_table(path, [rows[0], rows[1] | {"possible_answers": '["Danube", '}], "\t")
    with pytest.raises(ValueError, match=r"popQA\.tsv:3: field possible_answers: "):
        load_questions(path)
    write_table(path, [{n: v for n, v in POPQA.items() if n != "question"}], "\t")
    with pytest.raises(ValueError, match=r"popQA\.tsv:2: no known format: .*'subj'"):
        load_questions(path)


def test_frames_table_is_read(tmp_path):
    values = LAYOUTS["FRAMES"][0]
    record = {n.replace("Unnamed: 0", ""): v for n, v in values.items()}
    path = tmp_path / "test.tsv"
    write_table(path, [record | {"Prompt": f"{Q}\nIn\t1900?"}, record], "\t")
    questions, _ = load_questions(path)
    assert [q.text for q in questions] == [f"{Q}\nIn\t1900?", Q]
    assert questions[0].golden_answers == DANUBE[:1]


def test_bamboogles_table_is_read(tmp_path):
    path = tmp_path / "Bamboogle Prerelease - Sheet1.csv"
    path.write_text(f'Question,Answer\n{Q},Danube\n"Who, then?","Ulm, Linz"\n')
    questions, _ = load_questions(path)
    assert [(q.text, q.golden_answers) for q in questions] == [
        (Q, DANUBE[:1]),
        ("Who, then?", ("Ulm, Linz",)),
    ]


def write_table(path, records, separator):
    """Write records as pandas does: a line of names, and quotes where needed."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, records[0], delimiter=separator)
        writer.writeheader()
        writer.writerows(records)


def test_iircs_questions_are_read_from_its_passages(tmp_path):
    names = ("IIRC", "IIRC with a unit", "IIRC with yes or no")
    span, unit, verdict = (LAYOUTS[name][0] for name in names)
    passages = iirc_passages([span, unit]) + iirc_passages([verdict])
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(passages))
    questions, _ = load_questions(path)
    assert [q.id for q in questions] == ["q_1", "q_2", "q_3"]
    answers = [q.golden_answers for q in questions]
    assert answers == [DANUBE[:1], ("23 years",), ("yes",)]
    without_ids = {n: v for n, v in span.items() if n != "qid"}
    unanswerable = unit | {"answer": {"type": "none"}}
    passages = iirc_passages([without_ids, unanswerable, "x"])
    passages += iirc_passages([]) + iirc_passages([without_ids])
    passages += [{"title": "Ulm", "questions": "x"}, {"questions": ["x"]}]
    path.write_text(json.dumps(passages))
    with pytest.raises(ValueError, match=r"dev\.json: record 1 question 2: .*answer"):
        load_questions(path)
    questions, problems = load_questions(path, on_bad="skip")
    assert [q.id for q in questions] == ["row_0", "row_3"]
    origins = "1 question 2", "1 question 3", "4", "5 question 1"
    for origin, problem in zip(origins, problems, strict=True):
        assert problem.startswith(f"{path}: record {origin}: ")


def iirc_passages(questions):
    """Return IIRC's file of one passage with these questions."""
    links = [{"indices": [0, 3], "target": "Ulm"}]
    text = "Ulm lies on the Danube."
    return [{"title": "Ulm", "text": text, "links": links, "questions": questions}]

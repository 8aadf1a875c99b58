"""Files of public question sets in their authors' own form.

test_question_layouts covers records, also those of copies on the hub and elsewhere.
"""

import csv
import json

import pytest

from rsearch.data.questions import load_questions
from tests.data.test_question_layouts import DANUBE, LAYOUTS, POPQA, Q
from tests.data.test_questions import jsonl


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
    path.write_text(f'Question,Answer,,\n{Q},Danube,,\n"Who, then?","Ulm, Linz",,x\n')
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
    assert load_questions(jsonl(tmp_path, passages))[0] == questions
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
    origins = "1 question 2", "1 question 3", "4", "5"
    for origin, problem in zip(origins, problems, strict=True):
        assert problem.startswith(f"{path}: record {origin}: ")


def test_a_list_of_texts_called_questions_is_not_iircs(tmp_path):
    record = {"id": "1", "query": Q, "questions": ["Which?"], "answers": ["Danube"]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([record]))
    ((question,), _) = load_questions(path, fields={"question": "query"})
    assert (question.text, question.golden_answers) == (Q, DANUBE[:1])
    path.write_text(json.dumps([record | {"questions": [{"question": "Which?"}]}]))
    ((other,), _) = load_questions(path, fields={"question": "query"})
    assert other == question


def test_ambignqs_annotations_hold_texts(tmp_path):
    fields = {"question": "question", "answers": "annotations"}
    annotation = {"type": "singleAnswer", "answer": ["Danube", "Donau"]}
    path = jsonl(tmp_path, [{"id": 1, "question": Q, "annotations": [annotation]}])
    ((question,), _) = load_questions(path, fields=fields)
    assert question.golden_answers == DANUBE


def iirc_passages(questions):
    """Return IIRC's file of one passage with these questions."""
    links = [{"indices": [0, 3], "target": "Ulm"}]
    text = "Ulm lies on the Danube."
    return [{"title": "Ulm", "text": text, "links": links, "questions": questions}]


PAGE = [("It", False), ("<P>", True), ("Danube", False), ("</P>", True), ("<3", False)]
PAGE += [("or", False), ("Donau", False), ("<Td_colspan=2>", True)]
"""Tokens of a page of NQ, and whether each is a tag of HTML."""


def nq_annotation(*spans, verdict="NONE"):
    """Return an annotation of NQ with these spans of tokens as its short answers."""
    return {
        "annotation_id": 593165450220027640,
        "long_answer": {"candidate_index": -1, "end_token": -1, "start_token": -1},
        "short_answers": [{"start_token": a, "end_token": b} for a, b in spans],
        "yes_no_answer": verdict,
    }


NQ = {  # form of the page: record, id, golden answers
    "text": (
        {
            "annotations": [
                nq_annotation((1, 4)),
                nq_annotation((6, 7), (2, 3)),
                nq_annotation(verdict="NO"),
            ],
            "document_text": " ".join(token for token, _ in PAGE),
            "document_url": "http://a.example/Ulm",
            "example_id": 5655493461695504401,
            "long_answer_candidates": [],
            "question_text": Q,
        },
        "5655493461695504401",
        (*DANUBE, "no"),
    ),
    "tokens": (
        {
            "annotations": [nq_annotation((1, 4)), nq_annotation((5, 8))],
            "document_html": "<P> Danube </P>",
            "document_title": "Ulm",
            "document_tokens": [
                {"token": token, "html_token": is_html, "start_byte": 0, "end_byte": 1}
                for token, is_html in PAGE
            ],
            "example_id": 7,
            "question_text": Q,
            "question_tokens": Q.split(),
        },
        "7",
        ("Danube", "or Donau"),
    ),
}


@pytest.mark.parametrize("name", NQ)
def test_nqs_answers_are_the_words_of_its_spans(tmp_path, name):
    record, expected_id, answers = NQ[name]
    ((question,), problems) = load_questions(jsonl(tmp_path, [record]))
    assert (question.id, question.text) == (expected_id, Q)
    assert (question.golden_answers, problems) == (answers, [])


NQ_FAULTS = {  # a change of a record of NQ: what its error names
    "no short answer": ({"annotations": [nq_annotation()]}, "annotations: .* no"),
    "no annotation": ({"annotations": []}, "annotations: "),
    "no list": ({"annotations": {"short_answers": []}}, "annotations: "),
    "no object": ({"annotations": [3]}, r"annotations\[0\]: "),
    "no page": ({"document_text": None}, "document_text or document_tokens: "),
    "empty span": ({"annotations": [nq_annotation((2, 2))]}, r"\[0\]: .* 8 tokens"),
    "span from -1": ({"annotations": [nq_annotation((-1, -1))]}, r"\[0\]: "),
    "span beyond": ({"annotations": [nq_annotation((7, 9))]}, r"\[0\]: .* 8 tokens"),
    "span of text": ({"annotations": [nq_annotation(("1", 2))]}, r"\[0\]: "),
    "span of tags": ({"annotations": [nq_annotation((1, 2))]}, r"short_answers\[0\]: "),
    "no verdict": ({"annotations": [nq_annotation(verdict=-1)]}, "yes_no_answer: .*-1"),
    "no token": (
        {"document_text": None, "document_tokens": [{"token": "x"}] * 8},
        r"document_tokens\[1\]: ",
    ),
}


@pytest.mark.parametrize("name", NQ_FAULTS)
def test_a_fault_in_nqs_annotations_is_named(tmp_path, name):
    changes, named = NQ_FAULTS[name]
    good = NQ["text"][0]
    path = jsonl(tmp_path, [good, good | {"example_id": 2} | changes])
    with pytest.raises(ValueError, match=rf"q\.jsonl:2: field .*{named}"):
        load_questions(path)
    questions, problems = load_questions(path, on_bad="skip")
    assert (len(questions), len(problems)) == (1, 1)

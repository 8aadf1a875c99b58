"""Records in the layouts of public question sets, and the questions read from them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rsearch.data.questions import load_questions
from rsearch.evaluation.predictions import read_predictions
from tests.data.test_questions import GOOD, jsonl, parquet, verl

Q = "Which river runs through Ulm?"
DANUBE = ("Danube", "Donau")
CONTEXT = [["Ulm", ["Ulm lies on the Danube."]]]
SUPPORT = {"supporting_facts": [["Ulm", 0]], "context": CONTEXT}
HUB_CONTEXT = {"title": ["Ulm"], "sentences": [["Ulm lies on the Danube."]]}
PARAGRAPH = {
    "idx": 0,
    "title": "Ulm",
    "paragraph_text": "On it.",
    "is_supporting": True,
}
HOP = {"id": 3, "question": "Ulm >> river", "answer": "Danube"}
CHAT = [{"role": "system", "content": "Answer."}, {"role": "user", "content": Q}]
TRIVIA = {
    "value": "Danube",
    "aliases": ["Donau", "Danube"],
    "matched_wiki_entity_name": "",
    "normalized_aliases": ["donau", "danube"],
    "normalized_matched_wiki_entity_name": "",
    "normalized_value": "danube",
    "type": "WikipediaEntity",
}
POPQA = {
    "id": 4,
    "subj": "Ulm",
    "prop": "river",
    "obj": "Danube",
    "subj_id": 1,
    "prop_id": 2,
    "obj_id": 3,
    "s_aliases": '["Ulm an der Donau"]',
    "o_aliases": '["Donau"]',
    "s_uri": "http://a.example/1",
    "o_uri": "http://a.example/3",
    "s_wiki_title": "Ulm",
    "o_wiki_title": "Danube",
    "s_pop": 9,
    "o_pop": 99,
    "question": Q,
    "possible_answers": '["Danube", "Donau"]',
}
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [PARAGRAPH],
    "question": Q,
    "question_decomposition": [HOP],
    "answer": "Danube",
    "answer_aliases": ["Donau", "Danube"],
    "answerable": True,
}
DROP = {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": ["Danube"]}

LAYOUTS = {  # name: record, id, golden answers
    "FlashRAG": (
        {"id": "test_0", "question": Q, "golden_answers": ["Danube", "Donau"]},
        "test_0",
        DANUBE,
    ),
    "FlashRAG's MuSiQue": (
        {
            "id": "2hop__1_2",
            "question": Q,
            "golden_answers": ["Danube"],
            "metadata": {"answer_aliases": ["Donau"], "answerable": True},
        },
        "2hop__1_2",
        DANUBE,
    ),
    "RAG-R1": ({"question": Q, "golden_answers": "Danube"}, "row_0", DANUBE[:1]),
    "R1-Searcher": (
        {"idx": 7, "question": Q, "answer": "Danube", "gen_text_store": ""},
        "7",
        DANUBE[:1],
    ),
    "R1-Searcher stage 1": (
        {"idx": 7, "question": Q, "answer": "Danube", "pred_anses": ["Rhine"]},
        "7",
        DANUBE[:1],
    ),
    "MuSiQue": (MUSIQUE, "2hop__1_2", DANUBE),
    "HotpotQA": (
        {
            "_id": "5a8b",
            "answer": "Danube",
            "question": Q,
            **SUPPORT,
            "type": "bridge",
            "level": "hard",
        },
        "5a8b",
        DANUBE[:1],
    ),
    "HotpotQA of the hub": (
        {
            "id": "5a8b",
            "question": Q,
            "answer": "Danube",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": {"title": ["Ulm"], "sent_id": [0]},
            "context": HUB_CONTEXT,
        },
        "5a8b",
        DANUBE[:1],
    ),
    "2WikiMultiHopQA": (
        {
            "_id": "88",
            "type": "compositional",
            "question": Q,
            **SUPPORT,
            "entity_ids": "Q1_Q2",
            "evidences": [["Ulm", "river", "Danube"]],
            "answer": "Danube",
            "evidences_id": [["Q1", "river", "Q2"]],
            "answer_id": "Q2",
        },
        "88",
        DANUBE[:1],
    ),
    "NQ-open": ({"question": Q, "answer": ["Danube", "Donau"]}, "row_0", DANUBE),
    "DPR": (
        {
            "dataset": "nq",
            "question": Q,
            "answers": ["Danube", "Donau"],
            "positive_ctxs": [{"title": "Ulm", "text": "On it.", "score": 1}],
            "negative_ctxs": [],
            "hard_negative_ctxs": [],
        },
        "row_0",
        DANUBE,
    ),
    "WebQuestions": (
        {"url": "http://a.example", "question": Q, "answers": ["Danube", "Donau"]},
        "row_0",
        DANUBE,
    ),
    "TriviaQA": (
        {
            "question": Q,
            "question_id": "tc_33",
            "question_source": "",
            "answer": TRIVIA,
        },
        "tc_33",
        DANUBE,
    ),
    "TriviaQA as JSON text": (
        {"question": Q, "question_id": "tc_33", "answer": json.dumps(TRIVIA)},
        "tc_33",
        DANUBE,
    ),
    "TriviaQA as published": (
        {
            "Answer": {
                "Aliases": ["Donau", "Danube"],
                "HumanAnswers": ["Donau River"],
                "MatchedWikiEntityName": "Danube",
                "NormalizedAliases": ["donau", "danube"],
                "NormalizedMatchedWikiEntityName": "danube",
                "NormalizedValue": "danube",
                "Type": "WikipediaEntity",
                "Value": "Danube",
            },
            "EntityPages": [{"DocSource": "TagMe", "Filename": "Ulm.txt"}],
            "Question": Q,
            "QuestionId": "tc_33",
            "QuestionSource": "http://a.example",
            "SearchResults": [],
        },
        "tc_33",
        (*DANUBE, "Donau River"),
    ),
    "PopQA": (POPQA, "4", DANUBE),
    "PopQA without aliases": (
        POPQA | {"o_aliases": "[]", "possible_answers": '["Danube"]'},
        "4",
        DANUBE[:1],
    ),
    "PopQA with only its object": (
        {"id": 4, "obj": "Danube", "question": Q, "possible_answers": '["Danube"]'},
        "4",
        DANUBE[:1],
    ),
    "Bamboogle": ({"Question": Q, "Answer": "Danube"}, "row_0", DANUBE[:1]),
    "FRAMES": (
        {
            "Unnamed: 0": 0,
            "Prompt": Q,
            "Answer": "Danube",
            "wikipedia_link_1": "https://a.example/Ulm",
            "wikipedia_link_2": None,
            "reasoning_types": "Multiple constraints",
            "wiki_links": "['https://a.example/Ulm']",
        },
        "row_0",
        DANUBE[:1],
    ),
    "SimpleQA": (
        {"metadata": "{'topic': 'Rivers'}", "problem": Q, "answer": "Danube"},
        "row_0",
        DANUBE[:1],
    ),
    "SQuAD": (
        {
            "id": "56be",
            "title": "Ulm",
            "context": "Ulm lies on the Danube.",
            "question": Q,
            "answers": {
                "text": ["Danube", "Danube", "Donau"],
                "answer_start": [16, 16, 0],
            },
            "is_impossible": False,
        },
        "56be",
        DANUBE,
    ),
    "SQuAD as published": (
        {
            "qid": "56be",
            "question": Q,
            "answers": [
                {"text": "Danube", "answer_start": 16},
                {"text": "Donau", "answer_start": 0},
            ],
        },
        "56be",
        DANUBE,
    ),
    "MRQA": (
        {
            "qid": "9f",
            "question": Q,
            "answers": ["Danube", "Donau"],
            "detected_answers": [{"text": "Danube", "char_spans": [[16, 21]]}],
        },
        "9f",
        DANUBE,
    ),
    "IIRC": (
        {
            "qid": "q_1",
            "question": Q,
            "context": [],
            "answer": {
                "type": "span",
                "answer_spans": [{"text": "Danube", "passage": "main", "start": 1}],
            },
        },
        "q_1",
        DANUBE[:1],
    ),
    "IIRC with a unit": (
        {
            "qid": "q_2",
            "question": Q,
            "answer": {"type": "value", "answer_value": "23", "answer_unit": "years"},
        },
        "q_2",
        ("23 years",),
    ),
    "IIRC with yes or no": (
        {
            "qid": "q_3",
            "question": Q,
            "answer": {"type": "binary", "answer_value": "yes"},
        },
        "q_3",
        ("yes",),
    ),
    "IRCoT": (
        {
            "dataset": "hotpotqa",
            "question_id": "5a8b",
            "question_text": Q,
            "level": "hard",
            "answers_objects": [DROP],
            "contexts": [{"idx": 0, "title": "Ulm", "paragraph_text": "On it."}],
        },
        "5a8b",
        DANUBE[:1],
    ),
    "KILT": (
        {
            "id": "k1",
            "input": Q,
            "output": [
                {"answer": "Danube", "meta": {"score": 1}},
                {"answer": "Donau", "provenance": [{"title": "Ulm"}]},
                {"provenance": [{"title": "Danube"}]},
            ],
            "meta": {},
        },
        "k1",
        DANUBE,
    ),
    "LongBench": (
        {"_id": "b", "input": Q, "context": "", "answers": ["Danube"], "length": 9},
        "b",
        DANUBE[:1],
    ),
    "tevatron": (
        {
            "query_id": "12",
            "query": Q,
            "answers": ["Danube", "Donau"],
            "positive_passages": [{"docid": "1", "title": "Ulm", "text": "On it."}],
            "negative_passages": [],
        },
        "12",
        DANUBE,
    ),
    "CRAG": (
        {
            "interaction_id": "c7",
            "query": Q,
            "query_time": "03/01/2024",
            "question_type": "simple",
            "answer": "Danube",
            "alt_ans": ["Donau"],
        },
        "c7",
        DANUBE,
    ),
    "FreshQA": (
        {
            "id": 3,
            "question": Q,
            "answer_0": "Danube",
            "answer_1": "Donau",
            "answer_2": None,
        },
        "3",
        DANUBE,
    ),
    "GAIA": (
        {"task_id": "g-1", "Question": Q, "Level": 1, "Final answer": "Danube"},
        "g-1",
        DANUBE[:1],
    ),
    "WebWalkerQA": (
        {
            "question": Q,
            "answer": "Danube",
            "root_url": "https://a.example",
            "info": {},
        },
        "row_0",
        DANUBE[:1],
    ),
    "RAGAS": ({"question": Q, "ground_truth": "Danube"}, "row_0", DANUBE[:1]),
    "Search-R1": (verl(5, target=list(DANUBE), question=Q), "nq_train_5", DANUBE),
    "RAG-R1 in verl": (verl(5, target="Danube", question=Q), "nq_train_5", DANUBE[:1]),
    "verl's tool agent": (
        {
            "data_source": "searchR1_nq",
            "agent_name": "tool_agent",
            "prompt": CHAT,
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": list(DANUBE)}, "style": "rule"},
            "extra_info": {"index": 5, "split": "train", "need_tools_kwargs": True},
        },
        "searchR1_nq_train_5",
        DANUBE,
    ),
    "SkyRL": (
        {
            "data_source": "nq",
            "prompt": CHAT,
            "env_class": "search",
            "reward_spec": {"method": "rule", "ground_truth": {"target": list(DANUBE)}},
            "extra_info": {"index": 5, "split": "train"},
        },
        "nq_train_5",
        DANUBE,
    ),
    "verl as columns of JSON text": (
        {
            "data_source": "nq",
            "prompt": json.dumps(CHAT),
            "reward_model": json.dumps(
                {"ground_truth": {"target": json.dumps(DANUBE)}}
            ),
            "extra_info": json.dumps({"index": 5, "split": "train"}),
        },
        "nq_train_5",
        DANUBE,
    ),
    "slime": (
        {"prompt": Q, "reward_model": {"ground_truth": "Danube", "style": "rule"}},
        "row_0",
        DANUBE[:1],
    ),
}


@pytest.mark.fault(60, "aliases in thirty layouts", "id under another name")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_public_layout_is_read_with_its_aliases(tmp_path, name):
    record, expected_id, answers = LAYOUTS[name]
    ((question,), problems) = load_questions(jsonl(tmp_path, [record]))
    assert (question.id, question.text) == (expected_id, Q)
    assert (question.golden_answers, problems) == (answers, [])
    # A column of lists may also hold them as text.
    column = next((n for n in ("golden_answers", "answers") if n in record), None)
    if column is not None and not isinstance(record[column], str):
        path = jsonl(tmp_path, [{**record, column: json.dumps(record[column])}])
        assert load_questions(path)[0] == [question]


@pytest.mark.fault(60, "predictions")
@pytest.mark.parametrize(
    "field",
    [
        *("answer_aliases", "answer_alias", "aliases", "alias", "answerAliases"),
        *("Answer Aliases", "gold_aliases", "alt_answers", "alternative_answers"),
        *("acceptable_answers", "other_answers", "possible_answers", "answers"),
        *("metadata.answer_aliases", "extra_info.answer_aliases"),
    ],
)
@pytest.mark.parametrize("value", [["US", "Ada", "US"], '["US"]', "['US']", "US"])
def test_aliases_join_the_golden_answers_once(tmp_path, field, value):
    outer, _, inner = field.rpartition(".")
    aliases = {outer: {inner: value}} if outer else {field: value}
    record = {"question": "Who?", "answer": "Ada", **aliases}
    path = jsonl(tmp_path, [record])
    assert load_questions(path)[0][0].golden_answers == ("Ada", "US")
    empty = {**record, field: []} if not outer else {**record, outer: {inner: None}}
    path = jsonl(tmp_path, [empty])
    assert load_questions(path)[0][0].golden_answers == ("Ada",)
    if field != "answers":  # next to a prediction, perhaps the model's own
        path = jsonl(tmp_path, [{**record, "prediction": "US"}])
        ((row,),) = read_predictions(path).values()
        assert row["golden_answers"] == ["Ada", "US"]


@pytest.mark.fault(60, "aliases not known")
def test_other_aliases_are_no_answers_and_unknown_alias_fields_are_refused(tmp_path):
    others = {
        "s_aliases": ["x"],
        "subject_aliases": ["x"],
        "normalized_aliases": ["x"],
        "metadata": {"aliases": ["x"]},
        "num_aliases": 3,
        "spouse_aliases": [],
    }
    path = jsonl(tmp_path, [GOOD | others])
    assert load_questions(path)[0][0].golden_answers == ("Ada", "A. L.")
    for field in ("spouse_aliases", "aliases_en"):
        for value in (["x"], "x", {"a": "x"}):
            path = jsonl(tmp_path, [GOOD, {**GOOD, "id": "q2", field: value}])
            with pytest.raises(ValueError, match=rf"q\.jsonl:2: field {field}: "):
                load_questions(path)
            questions, problems = load_questions(path, on_bad="skip")
            assert (len(questions), len(problems)) == (1, 1)
    for value in ([3], 3, [["x"]], " "):
        path = jsonl(tmp_path, [{**GOOD, "answer_aliases": value}])
        with pytest.raises(ValueError, match=r"q\.jsonl:1: field answer_aliases"):
            load_questions(path)


UNANSWERABLE = [
    {"answerable": False},
    {"answerable": "False"},
    {"answerable": 0},
    {"is_answerable": "no"},
    {"is_impossible": True},
    {"isImpossible": 1},
    {"unanswerable": "true"},
    {"no_answer": True},
    {"answerable": "perhaps"},
    {"metadata": {"answerable": False}},
    {"metadata": '{"answerable": false}'},
    {"extra_info": {"is_impossible": True}},
    {"answer": {"type": "none"}},
    {"answer": {"value": "<unk>", "aliases": []}},
    {"answer": {"text": [], "answer_start": []}},
    {"answer": {"value": "Ada", "unanswerable": True}},
]


@pytest.mark.fault(60, "questions without an answer")
@pytest.mark.parametrize("mark", UNANSWERABLE, ids=str)
def test_a_question_without_an_answer_is_refused_or_counted(tmp_path, mark):
    good = {"question": "Who?", "answer": "Ada", "answerable": True, "no_answer": None}
    path = jsonl(tmp_path, [good, good | mark])
    field = next(iter(mark))
    with pytest.raises(ValueError, match=rf"q\.jsonl:2: field {field}"):
        load_questions(path)
    questions, problems = load_questions(path, on_bad="skip")
    assert len(questions) == len(problems) == 1
    row = {"prediction": "Ada"}
    path = jsonl(tmp_path, [good | row, good | mark | row])
    with pytest.raises(ValueError, match=rf"q\.jsonl:2: field {field}"):
        read_predictions(path)


LISTS = {
    '["a", "b"]': ("a", "b"),
    ' [ "a" ,\n"b" ] ': ("a", "b"),
    "['a', 'b']": ("a", "b"),
    "['a', \"b\",]": ("a", "b"),
    "('a', 'b')": ("a", "b"),
    "('a',)": ("a",),
    "{'a', 'b'}": ("a", "b"),
    "['a' 'b']": ("a", "b"),  # str of a NumPy array; Python would join the two
    "['a'\n 'b']": ("a", "b"),
    "array(['a', 'b'], dtype=object)": ("a", "b"),
    r"['L\'Aquila', 'caf\xe9', '\u2019']": ("L'Aquila", "café", "’"),
    r'["caf\u00e9"]': ("café",),
    "['[x], (y)', 'it\"s']": ("[x], (y)", 'it"s'),
    '{"value": "a", "aliases": "[\'b\']"}': ("a", "b"),
    # These are single answers.
    "[REC]": ("[REC]",),
    "[The] Beatles": ("[The] Beatles",),
    "[[Paris]]": ("[[Paris]]",),
    "(255, 255, 255)": ("(255, 255, 255)",),
    '("Heroes")': ('("Heroes")',),
    "{1, 2}": ("{1, 2}",),
    "a, b": ("a, b",),
    "'a', 'b'": ("'a', 'b'",),
}
NO_LISTS = [
    *("[]", "[ ]", "[1998]", "[1998 1999]", "[true]", "[None, None]", "[[1], [2]]"),
    *('["a", "b', '["a", 1]', "['a', None]", "['a', ['b']]", '[["a"]]', "[' ']"),
    *("array(['a'", "[b'a']", r"['\U00110000']", '{"a": 1}', "{'value': 'a'}"),
    '["a", "\ud800"]',
]


@pytest.mark.fault(61, "JSON", "Python", "array", "text in brackets")
@pytest.mark.parametrize("text", LISTS)
def test_a_list_written_as_text_is_read_as_a_list(tmp_path, text):
    expected = LISTS[text]
    records = [
        {"id": "a", "question": "Who?", "golden_answers": text},
        {"id": "b", "question": "Who?", "answer": text},
    ]
    for record in records:
        assert (
            load_questions(jsonl(tmp_path, [record]))[0][0].golden_answers == expected
        )
    rows = [{**r, "prediction": "x"} for r in records]
    (predictions,) = read_predictions(jsonl(tmp_path, rows)).values()
    assert predictions[1]["golden_answers"] == list(expected)
    path = parquet(tmp_path, [verl(0, target=text)])
    assert load_questions(path)[0][0].golden_answers == expected
    if expected != (text,) and not text.startswith('{"'):
        path = jsonl(tmp_path, [{**GOOD, "golden_answers": ["z", text]}])
        assert load_questions(path)[0][0].golden_answers == ("z", *expected)


@pytest.mark.fault(61, "no list of texts")
@pytest.mark.parametrize("text", NO_LISTS)
def test_text_that_begins_like_a_list_but_is_none_is_refused(tmp_path, text):
    path = jsonl(tmp_path, [GOOD, {**GOOD, "id": "q2", "golden_answers": text}])
    with pytest.raises(ValueError, match=r"q\.jsonl:2: field golden_answers"):
        load_questions(path)
    questions, problems = load_questions(path, on_bad="skip")
    assert (len(questions), len(problems)) == (1, 1)


@pytest.mark.parametrize(
    "start", ["[" * 50_000, "['a'" + ", 'a'" * 50_000, "{" * 9_999]
)
def test_long_texts_that_begin_like_lists_are_read_quickly(tmp_path, start):
    path = jsonl(tmp_path, [GOOD | {"golden_answers": [start, "x"], "answers": start}])
    assert load_questions(path)[0][0].golden_answers == (start, "x")


@pytest.mark.fault(61, "Parquet columns")
def test_a_parquet_column_of_texts_is_read_like_one_of_lists(tmp_path):
    answers = pa.array(['["Ada", "A"]', "['B']", "C"])
    aliases = pa.array([["A", "L"], [], None])
    table = pa.table({"question": ["1?", "2?", "3?"], "golden_answers": answers})
    pq.write_table(
        table.append_column("answer_aliases", aliases), tmp_path / "q.parquet"
    )
    questions, _ = load_questions(tmp_path / "q.parquet")
    actual = [q.golden_answers for q in questions]
    assert actual == [("Ada", "A", "L"), ("B",), ("C",)]


FEW_SHOT = "Answer.\nQuestion: Is it?\nAnswer: no\n\nQuestion: Who?"


@pytest.mark.fault(64, "few-shot prompt")
@pytest.mark.parametrize(
    "prompt",
    [
        FEW_SHOT,
        FEW_SHOT + "\nAnswer:\n",
        "Question: Is it? Answer: no Question: Who?",
        [{"role": "user", "content": FEW_SHOT}],
        [
            {"role": "user", "content": "Question: Is it?"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": "Question: Who?"},
        ],
        json.dumps([{"role": "user", "content": FEW_SHOT}]),
        "Who?",
    ],
)
def test_the_last_question_of_a_verl_prompt_is_the_question(tmp_path, prompt):
    path = jsonl(tmp_path, [verl(0, prompt=prompt)])
    assert load_questions(path)[0][0].text == "Who?"

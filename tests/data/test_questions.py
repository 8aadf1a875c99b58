import gzip
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.data.questions import load_questions, questions_fingerprint
from rsearch.types import Question

GOOD = {"id": "q1", "question": "Who?", "golden_answers": ["Ada", "A. L."]}


def jsonl(folder, records, name="q.jsonl", pack=bytes):
    """Write one line for each record, bytes unchanged, and return the file's path."""
    raw = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path = folder / name
    path.write_bytes(pack(b"\n".join(raw) + b"\n"))
    return path


def verl(index, *, source="nq", target=("Ada",), **more):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "Answer it. Question: Who?\n"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        "extra_info": {"split": "train", "index": index},
        **more,
    }


def parquet(folder, records, name="q.parquet"):
    pq.write_table(pa.Table.from_pylist(records), folder / name)
    return folder / name


def test_flashrag_lines_are_read(tmp_path):
    record = {**GOOD, "metadata": {"supporting_titles": ["Ada"], "pop": 3}}
    questions, problems = load_questions(jsonl(tmp_path, [record]))
    assert questions == [Question("q1", "Who?", ("Ada", "A. L."), record["metadata"])]
    assert problems == []


def test_search_r1_rows_take_the_question_after_the_instruction(tmp_path):
    path = parquet(tmp_path, [verl(0), verl(1, target=["B", "C"])])
    first, second = load_questions(path)[0]
    assert (first.text, first.golden_answers) == ("Who?", ("Ada",))
    assert (first.id, second.id) == ("nq_train_0", "nq_train_1")
    assert second.golden_answers == ("B", "C")
    assert first.metadata == {"split": "train", "index": 0, "data_source": "nq"}


def test_joined_verl_sets_share_no_id(tmp_path):
    # Both sets count from 0 and name their rows alike.
    rows = [verl(0, source=s, id="train_0", question="Why?") for s in ("nq", "hotpot")]
    questions, _ = load_questions(parquet(tmp_path, rows))
    assert [q.id for q in questions] == ["nq_train_0", "hotpot_train_0"]
    assert questions[0].text == "Why?"


def test_r_search_rows_have_the_whole_user_message_as_question(tmp_path):
    prompt = [
        {"role": "system", "content": "Question: not this"},
        {"role": "user", "content": "Who came first?"},
    ]
    row = verl(0, prompt=prompt, target="Ada")
    question = load_questions(parquet(tmp_path, [row]))[0][0]
    assert (question.text, question.golden_answers) == ("Who came first?", ("Ada",))


def test_named_fields_take_precedence_over_the_formats_own(tmp_path):
    record = {**GOOD, "ask": "Why?", "gold": {"all": ["B"]}, "n": 5}
    path = jsonl(tmp_path, [record])
    fields = {"question": "ask", "answers": "gold.all", "id": "n"}
    assert load_questions(path, fields=fields)[0] == [Question("5", "Why?", ("B",))]
    fields = {"question": "ask", "answers": "", "id": None}
    question = load_questions(path, fields=fields)[0][0]
    assert (question.text, question.golden_answers) == ("Why?", ("Ada", "A. L."))


def test_named_fields_read_records_of_an_unknown_format(tmp_path):
    path = jsonl(tmp_path, [{"q": "Why?", "a": "B"}])
    questions, _ = load_questions(path, fields={"question": "q", "answers": "a"})
    assert questions == [Question("row_0", "Why?", ("B",))]
    with pytest.raises(
        ValueError, match=r"q\.jsonl:1: no known format: .*\['q', 'a'\]"
    ):
        load_questions(path, fields={"question": "q"})


def test_a_named_field_must_exist(tmp_path):
    path = jsonl(tmp_path, [GOOD])
    for role in ("question", "answers", "id"):
        with pytest.raises(ValueError, match=r"q\.jsonl:1: field nope: missing"):
            load_questions(path, fields={role: "nope"})
    with pytest.raises(ValueError, match=r"'anwsers' is none of question, answers, id"):
        load_questions(path, fields={"anwsers": "x"})


def test_rows_without_an_id_are_numbered_including_skipped_ones(tmp_path):
    bare = {"question": "Who?", "golden_answers": "Ada"}
    path = jsonl(tmp_path, [bare, b"{", {**bare, "id": None}, {**bare, "id": 9}])
    questions, problems = load_questions(path, on_bad="skip")
    assert [q.id for q in questions] == ["row_0", "row_2", "9"]
    assert len(problems) == 1 and problems[0].startswith(f"{path}:2: invalid JSON")


@pytest.mark.parametrize(
    "value",
    [
        np.array(["Ada", "B"]),
        np.array(["Ada", "B"], dtype=object),
        ("Ada", "B"),
    ],
)
def test_arrays_and_tuples_of_answers_are_answers(value, monkeypatch):
    rows = [("rows: row 1", {"question": "Who?", "golden_answers": value})]
    monkeypatch.setattr("rsearch.data.questions.read_records", lambda _: rows)
    assert load_questions("rows")[0][0].golden_answers == ("Ada", "B")


BAD = [
    (b"", "blank line"),
    (b'{"id": "x", "question": "Wh', "invalid JSON at column"),
    (b'{"question": "\xff", "golden_answers": "a"}', "invalid UTF-8 at byte 15"),
    (b'{"question": "Who?", "golden_answers": NaN}', "NaN is not JSON"),
    (b'{"id": 1, "id": 2}', "field id: given twice"),
    (b"[" * 100_000, "nested too deeply"),
    (b'"text"', "expected a JSON object, got str 'text'"),
    ({**GOOD, "question": ""}, "field question: expected text, got ''"),
    ({**GOOD, "question": " \n"}, "field question: expected text, got ' \\n'"),
    ({**GOOD, "question": None}, "field question: missing"),
    ({**GOOD, "question": ["Who?"]}, "field question: expected text, got list"),
    ({**GOOD, "question": "\ud800?"}, "field question: half a surrogate pair"),
    ({"id": "x", "question": "Who?"}, "field golden_answers: missing"),
    ({**GOOD, "golden_answers": []}, "field golden_answers: holds no answer"),
    ({**GOOD, "golden_answers": ""}, "field golden_answers: expected text, got ''"),
    (
        {**GOOD, "golden_answers": 1.5},
        "field golden_answers: expected a text or a list",
    ),
    ({**GOOD, "golden_answers": {"a": 1}}, "got dict {'a': 1}"),
    (
        {**GOOD, "golden_answers": ["a", 7]},
        "field golden_answers[1]: expected text, got",
    ),
    ({**GOOD, "golden_answers": ["a", " "]}, "field golden_answers[1]: expected text"),
    ({**GOOD, "id": 1.5}, "field id: expected text, got float 1.5"),
    ({**GOOD, "id": True}, "field id: expected text, got bool True"),
    ({**GOOD, "id": "first"}, "field id: 'first' was used at "),
    (
        b'{"question": "Who?", "golden_answers": "a", "metadata": {"a": %b}}'
        % (b"[" * 300 + b"]" * 300),
        "field metadata: nested more than 50 deep",
    ),
    (
        b'{"question": "Who?", "golden_answers": %b"a"%b}'
        % (b'{"value": ' * 900, b"}" * 900),
        "field golden_answers: nested too deeply",
    ),
]


@pytest.mark.fault(
    9,
    "truncated",
    "invalid UTF-8",
    "NaN literal",
    "duplicate keys",
    "nested deep",
    "wrong type",
    "on_bad=skip",
)
@pytest.mark.fault(10, "no golden answer")
@pytest.mark.fault(12, "duplicate ids")
@pytest.mark.parametrize("bad, message", BAD, ids=range(len(BAD)))
def test_a_bad_record_is_named_or_skipped(tmp_path, bad, message):
    first, last = {**GOOD, "id": "first"}, {**GOOD, "id": "last"}
    path = jsonl(tmp_path, [first, bad, last])
    with pytest.raises(ValueError) as error:
        load_questions(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)
    questions, problems = load_questions(path, on_bad="skip")
    assert [q.id for q in questions] == ["first", "last"]
    assert problems == [str(error.value)]


def test_a_bad_first_line_does_not_hide_the_format(tmp_path):
    path = jsonl(tmp_path, [b"{", {"x": 1}, GOOD])
    questions, problems = load_questions(path, on_bad="skip")
    assert [q.id for q in questions] == ["q1"]
    assert ":1: invalid JSON" in problems[0] and ":2: no known format" in problems[1]


def test_a_bad_parquet_row_is_named(tmp_path):
    path = parquet(tmp_path, [verl(0), verl(1, prompt=[]), verl(2, target=[])])
    _, problems = load_questions(path, on_bad="skip")
    assert problems == [
        f"{path}: row 2: field prompt: holds no user message: []",
        f"{path}: row 3: field reward_model.ground_truth.target: holds no answer",
    ]


def test_a_file_with_only_bad_records_is_refused(tmp_path):
    path = jsonl(tmp_path, [b"{", b"["])
    with pytest.raises(ValueError, match=r"all 2 records are bad; first .*jsonl:1:"):
        load_questions(path, on_bad="skip")


def test_numbers_that_are_not_finite_become_text(tmp_path):
    """Selected questions are written as JSON, which has no such numbers."""
    path = parquet(tmp_path, [{**GOOD, "metadata": {"a": math.nan, "b": 1.5}}])
    assert load_questions(path)[0][0].metadata == {"a": "nan", "b": 1.5}


def test_a_number_that_is_too_large_is_refused(tmp_path):
    line = b'{"question": "Who?", "answer": "a", "metadata": {"a": 1e999}}'
    with pytest.raises(ValueError, match=r"q\.jsonl:1: 1e999 is too large a number"):
        load_questions(jsonl(tmp_path, [line]))


def test_limit_counts_good_questions_and_stops_reading_there(tmp_path):
    records = [{**GOOD, "id": f"q{i}"} for i in range(4)]
    path = jsonl(tmp_path, [records[0], b"{", *records[1:], b"never read"])
    questions, problems = load_questions(path, limit=3, on_bad="skip")
    assert [q.id for q in questions] == ["q0", "q1", "q2"]
    assert len(problems) == 1


def test_bad_arguments_are_refused(tmp_path):
    path = jsonl(tmp_path, [GOOD])
    with pytest.raises(ValueError, match="limit=-1"):
        load_questions(path, limit=-1)
    with pytest.raises(ValueError, match="expected 'raise' or 'skip'"):
        load_questions(path, on_bad="ignore")
    with pytest.raises(ValueError, match="there is no such file"):
        load_questions(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match="neither a file nor a data set on the hub"):
        load_questions("hotpotqa")


plain_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: not text.isspace()
)
questions_lists = st.lists(
    st.builds(
        Question,
        plain_text,
        plain_text,
        st.lists(plain_text, min_size=1, max_size=3).map(tuple),
        # No names with a meaning: test_question_layouts covers these.
        st.dictionaries(
            plain_text.map("key {}".format), st.integers() | plain_text, max_size=2
        ),
    ),
    max_size=4,
    unique_by=lambda question: question.id,
)


@given(questions_lists.filter(bool))
def test_written_questions_are_read_back(tmp_path_factory, questions):
    records = [
        {
            "id": q.id,
            "question": q.text,
            "golden_answers": q.golden_answers,
            "metadata": q.metadata,
        }
        for q in questions
    ]
    path = jsonl(tmp_path_factory.mktemp("q"), records)
    actual, _ = load_questions(path)
    assert actual == questions
    assert questions_fingerprint(actual) == questions_fingerprint(questions)


@given(questions_lists, questions_lists)
def test_fingerprints_are_equal_exactly_if_the_questions_are(left, right):
    assert (questions_fingerprint(left) == questions_fingerprint(right)) == (
        left == right
    )


def test_metadata_of_another_type_is_kept_under_its_name(tmp_path):
    path = jsonl(tmp_path, [{**GOOD, "metadata": "from a quiz"}])
    assert load_questions(path)[0][0].metadata == {"metadata": "from a quiz"}


@pytest.mark.fault(15, "changed", "reordered", "shortened")
def test_every_part_of_a_question_changes_its_fingerprint():
    first = Question("1", "a", ("b", "c"), {"k": 1})
    others = [
        Question("2", "a", ("b", "c"), {"k": 1}),
        Question("1", "a ", ("b", "c"), {"k": 1}),
        Question("1", "a", ("bc",), {"k": 1}),
        Question("1", "a", ("c", "b"), {"k": 1}),
        Question("1", "a", ("b", "c"), {"k": 2}),
    ]
    prints = {questions_fingerprint([q]) for q in [first, *others]}
    prints |= {
        questions_fingerprint([first, others[0]]),
        questions_fingerprint([others[0], first]),
    }
    assert len(prints) == 8
    assert questions_fingerprint([first]) == "1182e9714624b05bb08e65b8e863c668"


def test_real_question_files_have_no_bad_record(shared_data):
    sizes = {
        "hotpotqa/train": 633,
        "hotpotqa/dev": 212,
        "2wikimultihopqa/dev": 215,
        "bamboogle/dev": 62,
        "nq/dev": 500,
        "popqa/dev": 500,
        "triviaqa/dev": 500,
        "extra/r1searcher_stage1": 349,
        "extra/r1searcher_stage2": 8144,
    }
    for name, size in sizes.items():
        path = shared_data / f"{name}.jsonl.gz"
        with gzip.open(path) as file:
            rows = [json.loads(line) for line in file]
        questions, problems = load_questions(path)
        assert (len(questions), problems) == (size, [])
        assert [list(q.golden_answers) for q in questions] == [
            row["golden_answers"] for row in rows
        ]
        assert [q.text for q in questions] == [row["question"] for row in rows]

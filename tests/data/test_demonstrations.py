"""Demonstrations: their configured shares, and the strict reading of their files."""

import json

import pytest

from rsearch.data.demonstrations import DIRECT, PROTOCOL, RAG, load_demonstrations
from rsearch.protocols.table import PROTOCOLS
from rsearch.types import Answer, ToolCall
from rsearch.world.demonstrations import world_demonstrations as demonstrations_of
from rsearch.world.facts import RELATIONS
from rsearch.world.questions import KINDS
from rsearch.world.texts import world_words
from rsearch.world.world import make_world

SEARCH_R1 = PROTOCOLS["search_r1"]
SHARES = dict(repeats=2, flawed_share=0.65, guess_share=0.2, baseline_share=0.1)


def world_demonstrations(world, **settings):
    return demonstrations_of(world, SEARCH_R1, **settings)


@pytest.fixture(scope="module")
def world():
    return make_world(
        seed=1,
        people=500,
        films=400,
        companies=100,
        cities=100,
        train_questions=1400,
        dev_questions=10,
    )


def kind(world, demonstration):
    """Return 'flawless', 'one_hop' or 'guess', judged by the turns' actions."""
    first, second = world.hops[demonstration.question.id]
    actions = [SEARCH_R1.parse(turn) for turn in demonstration.turns]
    queries = [a.arguments for a in actions[:-1]]
    assert all(isinstance(a, ToolCall) for a in actions[:-1])
    assert isinstance(actions[-1], Answer)
    if len(actions) == 3:
        assert queries == [(first.subject,), (second.subject,)]
        assert actions[-1].text == second.object
        return "flawless"
    if len(actions) == 2:
        assert queries == [(first.subject,)]
        assert actions[-1].text == first.object
        return "one_hop"
    (answer,) = actions
    # A guess has the right type: a city if the question asks for one.
    assert answer.text in world.entities[RELATIONS[second.relation].object]
    return "guess"


def test_demonstrations_have_the_configured_shares(world):
    made = world_demonstrations(world, seed=0, **SHARES)
    in_protocol = [d for d in made if d.method == PROTOCOL]
    assert len(in_protocol) == 2800
    kinds = [kind(world, d) for d in in_protocol]
    share = {name: kinds.count(name) / len(kinds) for name in set(kinds)}
    # 0.65 x 0.2 guess and 0.65 x 0.8 stop early; the standard deviation is < 0.01.
    assert share["flawless"] == pytest.approx(0.35, abs=0.03)
    assert share["one_hop"] == pytest.approx(0.52, abs=0.03)
    assert share["guess"] == pytest.approx(0.13, abs=0.03)
    direct, rag = (sum(d.method == m for d in made) for m in (DIRECT, RAG))
    assert (direct + rag) / len(in_protocol) == pytest.approx(0.1, abs=0.02)
    assert direct / (direct + rag) == pytest.approx(0.5, abs=0.1)


def test_a_baseline_answers_with_a_space_and_nothing_else(world):
    shares = {**SHARES, "baseline_share": 1.0, "repeats": 1}
    made = world_demonstrations(world, seed=0, **shares)
    baselines = [d for d in made if d.method != PROTOCOL]
    assert len(baselines) == 1400
    for d in baselines:
        assert d.turns == (f" {d.question.golden_answers[0]}",)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (dict(flawed_share=0.0, guess_share=1.0), {"flawless"}),
        (dict(flawed_share=1.0, guess_share=1.0), {"guess"}),
        (dict(flawed_share=1.0, guess_share=0.0), {"one_hop"}),
    ],
)
def test_shares_of_zero_and_one_are_exact(world, shares, expected):
    made = world_demonstrations(world, seed=0, repeats=1, baseline_share=0.0, **shares)
    assert {kind(world, d) for d in made} == expected
    assert {d.method for d in made} == {PROTOCOL}
    assert [d.question for d in made] == list(world.train)


def test_demonstrations_are_determined_by_their_seed(world):
    first, again, other = (
        world_demonstrations(world, seed=s, **SHARES) for s in (0, 0, 1)
    )
    assert first == again != other


def test_each_repeat_has_its_own_flaw(world):
    made = [
        d for d in world_demonstrations(world, seed=0, **SHARES) if d.method == PROTOCOL
    ]
    pairs = list(zip(made[::2], made[1::2], strict=True))
    assert all(a.question == b.question for a, b in pairs)
    assert any(a.turns != b.turns for a, b in pairs)


def test_guesses_are_seldom_right(world):
    shares = dict(flawed_share=1.0, guess_share=1.0, baseline_share=0.0, repeats=1)
    made = world_demonstrations(world, seed=0, **shares)
    right = [d.question.golden_answers[0] in d.turns[0] for d in made]
    assert sum(right) / len(right) < 0.05


def test_demonstrations_use_only_training_questions(world):
    made = world_demonstrations(world, seed=0, **SHARES)
    assert {d.question.id for d in made} == {q.id for q in world.train}


def test_a_tokenizer_sees_every_word_of_the_demonstrations(world):
    known = set(" ".join(world_words(world) + world.texts()).split())
    made = world_demonstrations(world, seed=0, **SHARES)
    said = {word for d in made for turn in d.turns for word in turn.split()}
    # "Altdorf</answer>" and "guess.</think><answer>" are split at the tags.
    assert {w for w in said if "<" not in w} <= known | {
        f"{name}." for names in world.entities.values() for name in names
    }


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


GOOD = {"question": "Who?", "turns": ["<answer> I </answer>"]}


def test_a_file_is_read_in_order(tmp_path):
    second = {"question": "{x}?", "turns": ["a", "b"], "more": 1}
    loaded = load_demonstrations(write(tmp_path / "d.jsonl", GOOD, second))
    assert [d.question.text for d in loaded] == ["Who?", "{x}?"]
    assert [d.turns for d in loaded] == [("<answer> I </answer>",), ("a", "b")]
    assert len({d.question.id for d in loaded}) == 2
    assert {d.method for d in loaded} == {PROTOCOL}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": ["a"]}, "field question: expected text, got NoneType None"),
        ({"question": "", "turns": ["a"]}, "field question: expected text"),
        ({"question": "q"}, "field turns: expected a list of texts, got None"),
        ({"question": "q", "turns": []}, r"field turns: expected a list of texts"),
        ({"question": "q", "turns": "a"}, "field turns: expected a list of texts"),
        ({"question": "q", "turns": ["a", 3]}, r"field turns\[1\]: .* int 3"),
        ({"question": "q", "turns": ["a", " "]}, r"field turns\[1\]: .* ' '"),
        ({"question": "q", "turns": ["\ud800"]}, r"field turns\[0\]: half a surrogate"),
        ("{", "invalid JSON"),
        ("[]", r"expected a JSON object, got list \[\]"),
        ('"text"', "expected a JSON object, got str"),
        ('{"question": "q", "question": "r", "turns": ["a"]}', "field question: given"),
    ],
)
def test_an_error_names_file_line_and_field(tmp_path, row, message):
    path = write(tmp_path / "d.jsonl", GOOD, row)
    with pytest.raises(ValueError, match=rf"d\.jsonl:2: {message}"):
        load_demonstrations(path)


def test_a_blank_line_between_records_is_refused(tmp_path):
    path = write(tmp_path / "d.jsonl", GOOD, "", GOOD)
    with pytest.raises(ValueError, match=r"d\.jsonl:2: blank line"):
        load_demonstrations(path)


def test_a_long_wrong_value_is_cut_in_the_message(tmp_path):
    path = write(tmp_path / "d.jsonl", {"question": "q", "turns": "x" * 1000})
    with pytest.raises(ValueError, match="field turns") as caught:
        load_demonstrations(path)
    assert len(str(caught.value)) < 300


def test_a_json_list_of_other_values_is_refused(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('["text", 3]')
    with pytest.raises(ValueError, match="record 1: expected a JSON object, got str"):
        load_demonstrations(path)


def test_a_file_without_records_is_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"d\.jsonl: the file is empty"):
        load_demonstrations(tmp_path / "d.jsonl")
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no demonstration"):
        load_demonstrations(tmp_path / "d.json")
    with pytest.raises(ValueError, match="there is no such file"):
        load_demonstrations(tmp_path / "e.jsonl")


@pytest.fixture(scope="module")
def whole():
    """A world with questions of all kinds."""
    return make_world(
        seed=2,
        people=300,
        films=200,
        companies=40,
        cities=40,
        train_questions=700,
        dev_questions=10,
        kinds=KINDS,
        known_share=0.3,
        missing_share=0.15,
    )


FLAWLESS = dict(repeats=1, flawed_share=0.0, guess_share=0.0, baseline_share=0.0)


def actions(protocol, demonstration):
    return [protocol.parse(turn) for turn in demonstration.turns]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_flawless_demonstrations_search_each_fact_once_in_every_protocol(whole, name):
    protocol = PROTOCOLS[name]
    for d in demonstrations_of(whole, protocol, seed=0, **FLAWLESS):
        *searches, last = actions(protocol, d)
        hops = whole.hops[d.question.id]
        queries = [q for action in searches for q in action.arguments]
        assert queries == [hop.subject for hop in hops]
        assert last == Answer(d.question.golden_answers[0])
        is_one_search = d.question.metadata["kind"] == "comparison"
        is_one_search &= protocol.max_queries > 1
        assert len(searches) == (1 if is_one_search else len(hops))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_facts_about_famous_subjects_are_recalled_without_a_search(whole, name):
    protocol = PROTOCOLS[name]
    recalled = mixed = 0
    for d in demonstrations_of(whole, protocol, seed=0, recall_share=1.0, **FLAWLESS):
        *searches, last = actions(protocol, d)
        hops = whole.hops[d.question.id]
        queries = [q for action in searches for q in action.arguments]
        assert queries == [h.subject for h in hops if h.subject not in whole.famous]
        assert last == Answer(d.question.golden_answers[0])
        for hop in hops:
            if hop.subject in whole.famous:
                assert any(hop.sentence in turn for turn in d.turns)
        recalled += not queries
        mixed += 0 < len(queries) < len(hops)
    assert recalled > 50 < mixed


def test_evidence_quotes_the_passages(whole):
    protocol = PROTOCOLS["r_search"]
    shown = {p.title: f"(Title: {p.title}) {p.text}" for p in whole.passages}
    for d in demonstrations_of(whole, protocol, seed=0, **FLAWLESS):
        evidence = d.turns[-1].partition("<original_evidence>")[2]
        evidence = evidence.partition("</original_evidence>")[0]
        for hop in whole.hops[d.question.id]:
            assert f"(Title: {hop.subject})" in evidence
            if hop.object != "unknown":
                assert hop.fact in evidence
                assert hop.fact in shown[hop.subject]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_early_stops_search_less_and_are_seldom_right(whole, name):
    protocol = PROTOCOLS[name]
    shares = {**FLAWLESS, "flawed_share": 1.0}
    right = []
    for d in demonstrations_of(whole, protocol, seed=0, **shares):
        *searches, last = actions(protocol, d)
        hops = whole.hops[d.question.id]
        assert len(searches) < len(hops)
        assert [s.arguments for s in searches] == [
            (hop.subject,) for hop in hops[: len(searches)]
        ]
        if d.question.metadata["kind"] != "comparison":
            right.append(last.text == d.question.golden_answers[0])
    assert sum(right) / len(right) < 0.05


@pytest.mark.fault(63, "demonstrations")
def test_null_counts_as_missing_and_blank_last_lines_are_ignored(tmp_path):
    nulls = dict.fromkeys(
        (
            "id",
            "context_turns",
            "observations",
            "messages",
            "is_segment",
            "is_raw",
            "is_rag",
        )
    )
    path = write(tmp_path / "d.jsonl", GOOD, {**GOOD, **nulls}, "", "  ")
    first, second = load_demonstrations(path)
    assert first.turns == second.turns
    assert (second.context_turns, second.is_segment) == (0, False)


@pytest.mark.fault(63, "demonstrations")
def test_bad_demonstrations_are_left_out_counted_and_listed(tmp_path, capsys):
    bad = [{"question": "q"}, "", "{", {"turns": ["a"]}, "[]", {}, GOOD]
    path = write(tmp_path / "d.jsonl", GOOD, *bad)
    assert len(load_demonstrations(path, on_bad="skip")) == 2
    told = capsys.readouterr().err
    assert f"{path}:2: " in told and "6 bad records" in told
    with pytest.raises(ValueError, match=r"all 1 records are bad; first .*:1: "):
        load_demonstrations(write(path, "{}"), on_bad="skip")
    with pytest.raises(ValueError, match="on_bad='ignore'"):
        load_demonstrations(path, on_bad="ignore")

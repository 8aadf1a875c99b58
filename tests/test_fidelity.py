"""The page of differences is current, complete and true of the recipes."""

import pytest

from rsearch import fidelity
from rsearch.config.recipes import run_command
from rsearch.config.spec import ROOT

NUM_DIFFERENCES, NUM_SWITCHES = 17, 25
RULES = [
    pytest.param(system, rule, id=f"{system}: {rule.rule}")
    for system, _ in fidelity.SYSTEMS
    for rule in fidelity.read_rules(system)
]


@pytest.fixture(scope="module")
def page():
    return fidelity.page()


def test_the_page_is_current(page):
    assert fidelity.PAGE.read_text() == page, "python -m rsearch.fidelity"


@pytest.mark.parametrize("system, rule", RULES)
def test_parity_differs_exactly_where_the_row_says_so(system, rule):
    differs = [
        field
        for field in rule.fields
        if fidelity.value_of(system, rule, field, parity=False)
        != fidelity.value_of(system, rule, field, parity=True)
    ]
    assert bool(differs) != rule.same


@pytest.mark.parametrize("system, rule", RULES)
def test_a_row_without_a_field_gives_the_reason(system, rule):
    assert rule.fields or rule.why


def test_every_system_states_how_it_is_evaluated_and_what_checks_that():
    """test_documents reads the page and runs the commands."""
    topics = {"test sets", "judge", "baselines", "corpora", "online search", "prompts"}
    titles = dict(fidelity.SYSTEMS)
    rows = {}
    for rule in fidelity.read_rules("evaluation"):
        title, _, topic = rule.rule.partition(": ")
        assert title == titles[rule.recipe] and rule.fields, rule.rule
        rows.setdefault(title, set()).add(topic)
        assert rule.held, rule.rule
        for text in rule.held:
            path, _, name = text.partition("::")
            is_test = name and f"def {name}(" in (ROOT / path).read_text()
            assert is_test or text.startswith("python -m rsearch."), text
    assert len(rows) == 6 and all(topics <= said for said in rows.values())


def test_every_known_difference_and_switch_has_a_row():
    named = {entry for p in RULES for entry in p.values[1].lists}
    expected = {f"D {n + 1}" for n in range(NUM_DIFFERENCES)}
    expected |= {f"S {n + 1}" for n in range(NUM_SWITCHES)}
    assert named == expected == set(fidelity.read_lists())


def test_every_row_of_the_page_has_six_cells(page):
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    tables = rows[: next(i for i, r in enumerate(rows) if r.startswith("| entry"))]
    assert len(tables) == len(RULES) + len(fidelity.SYSTEMS)
    for row in tables:
        assert row.replace("\\|", "").count("|") == 7, row


def test_a_field_that_does_not_exist_is_refused():
    rule = fidelity.Rule("what", "a", "b")
    for field, text in {
        "rl.algoritm": "unknown field config.rl.algoritm",
        "reward.answer_em.scop": "no setting 'scop'",
        "method:rag.topk": "no setting 'topk'",
    }.items():
        with pytest.raises(ValueError, match=text):
            fidelity.value_of("search_r1", rule, field, parity=False)


def test_a_stage_that_parity_leaves_out_has_no_value():
    rule = fidelity.Rule("what", "a", "b", stage="rl_retrieve")
    values = [
        fidelity.value_of("r1_searcher", rule, "rl.steps", parity=parity)
        for parity in (False, True)
    ]
    assert values == [5, fidelity.ABSENT]


def test_a_rule_with_an_unknown_key_is_refused(tmp_path, monkeypatch):
    (tmp_path / "fidelity").mkdir()
    file = tmp_path / "fidelity" / "x.toml"
    file.write_text('[[rule]]\nrule="a"\npaper="b"\ncode="c"\nfeilds=["rl.lr"]\n')
    monkeypatch.setattr(fidelity, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"rule 1 has the keys .*feilds"):
        fidelity.read_rules("x")


def test_the_command_writes_the_page_and_checks_it(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fidelity, "page", lambda: page)
    monkeypatch.setattr(fidelity, "PAGE", tmp_path / "FIDELITY.md")
    assert run_command(fidelity.main, ["--check"]) == 2
    assert "FIDELITY.md is not current" in capsys.readouterr().err
    assert run_command(fidelity.main, []) == 0
    assert run_command(fidelity.main, ["--check"]) == 0
    assert (tmp_path / "FIDELITY.md").read_text() == page

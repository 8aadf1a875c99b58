"""A likely step: its shares of the longest step, by hand, and a published time."""

import json

import pytest

from rsearch.config import recipes
from rsearch.plan import command as plan
from rsearch.plan import likely
from rsearch.plan.likely import Lengths
from rsearch.plan.machines import find_machine

WRITTEN = "searches=2,policy_tokens=300,tokens=1700"


def r_search(topology="a100x8", **overrides):
    """Return ([(stage, c)], machine) of R-Search on its authors' or another machine."""
    config = recipes.load("configs/r_search.py:grpo")
    machine = find_machine(topology)
    config = recipes.apply_overrides(config, overrides)
    return plan.checked_stages(config, machine), machine


def test_lengths_are_written_out_or_the_means_of_a_run(tmp_path):
    expected = Lengths(searches=2, policy_tokens=300, tokens=1700)
    assert likely.read_lengths(WRITTEN) == expected
    rows = [
        {"step": 0, "searches": 1, "policy_tokens": 200, "tokens": 1500},
        {"step": 1, "searches": 3, "policy_tokens": 400, "tokens": 1900},
        {"step": 2, "loss": 0.1},  # a step without a valid rollout
        {"step": 3, "searches": "NaN", "policy_tokens": None, "tokens": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert likely.read_lengths(str(file)) == expected
    file.write_text(json.dumps(rows[2]) + "\n")
    with pytest.raises(ValueError, match="no row has searches, policy_tokens, tokens"):
        likely.read_lengths(str(file))
    file.write_text(json.dumps(rows[0] | {"searches": -2}) + "\n")
    with pytest.raises(ValueError, match="searches = -2 must be 0 or more"):
        likely.read_lengths(str(file))


@pytest.mark.parametrize(
    "text, message",
    (
        ("searches=2", "expected all of searches=NUMBER, policy_tokens=NUMBER"),
        (WRITTEN + ",queries=3", "expected all of searches=NUMBER"),
        (WRITTEN + ",tokens=3", "expected all of searches=NUMBER"),
        (WRITTEN.replace("300", "many"), "policy_tokens must be a number"),
        (WRITTEN.replace("=2", "=-2"), "searches must be a number of 0 or more"),
        (WRITTEN.replace("300", "nan"), "policy_tokens must be a number"),
        (WRITTEN.replace("300", "1700"), "below tokens = 1700"),
        (WRITTEN.replace("300", "0"), "above 0"),
    ),
)
def test_malformed_lengths_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        likely.read_lengths(text)


def test_shares_are_those_worked_out_by_hand():
    """Budgets: a prompt of 1,024, 5 turns of 500 and 4 observations of 1,800 tokens.

    The prompt's 4 chunks of 256 are all counted. An observation is read in 8 chunks of
    232 tokens: the 2 searches of 700 tokens take 4 chunks each, and the longest step
    has 4 searches with 8 chunks each. Six conversations share a row: 11 rows hold the
    64 of a micro-batch, in 6 of its 32 pieces of 2 rows.
    """
    shares = plan.shares_of_stages(*r_search(), likely.read_lengths(WRITTEN))["rl"]
    assert shares["prefill"] == 1
    assert shares["decode"] == pytest.approx(300 / (5 * 500))
    assert shares["extend"] == pytest.approx(2 * 4 / (4 * 8))
    assert shares["score"] == shares["update"] == 6 / 32
    assert "admit" not in shares


def test_a_last_search_whose_results_are_not_read_is_allowed():
    """Four searches without a forced last turn: three observations are read."""
    stages, machine = r_search(**{"rollout.forced_final_turn": False})
    lengths = Lengths(searches=4, policy_tokens=300, tokens=2400)
    shares = plan.shares_of_stages(stages, machine, lengths)["rl"]
    assert shares["extend"] == pytest.approx(3 * 4 / (3 * 8))  # 700 tokens each
    with pytest.raises(ValueError, match=r"searches = 4\.5, but .* allow 4"):
        plan.shares_of_stages(stages, machine, lengths._replace(searches=4.5))


def test_with_pages_more_short_rollouts_than_long_ones_decode_together():
    """163,840 tokens hold 15 rollouts of 10,724, and 96 of 1,700."""
    stages, machine = r_search(**{"rollout.cache_tokens": 163_840})
    shares = plan.shares_of_stages(stages, machine, likely.read_lengths(WRITTEN))["rl"]
    assert shares["decode"] == pytest.approx(300 / (5 * 500) * 15 / 96)


def test_with_pages_a_host_decodes_no_more_rollouts_than_its_step_has():
    """Each of four hosts has 320 of 1,280 rollouts, and pages for 122 long ones."""
    pytest.importorskip("libtpu")
    pages = {"rollout.max_concurrent": 640, "rollout.cache_tokens": 1_310_720}
    mesh = {"mesh.fsdp": 4, "mesh.tensor": 4}
    stages, machine = r_search("v5p:2x2x4", **pages, **mesh)
    shares = plan.shares_of_stages(stages, machine, likely.read_lengths(WRITTEN))["rl"]
    assert shares["decode"] == pytest.approx(300 / (5 * 500) * 122 / 320)


def test_a_step_takes_about_the_time_that_its_authors_report(capsys):
    """5 to 9 minutes on 8 A100 (github.com/QingFei1/R-Search, issue 2); factor 1.5."""
    stages, machine = r_search()
    lengths = likely.read_lengths(WRITTEN)
    estimates = plan.estimates_of_stages(stages, machine)
    shares = plan.shares_of_stages(stages, machine, lengths)
    seconds = plan.show_likely(stages, machine, estimates, shares, lengths)["rl"]
    assert 300 / 1.5 < seconds < 540 * 1.5
    said = capsys.readouterr()
    assert (
        "rollouts of 1,700 tokens, 300 of them by the policy, and 2 searches"
        in said.out
    )
    assert f"{195 * seconds / 3600 * 8:,.0f} device hours" in said.out + said.err


def test_lengths_that_no_step_can_have_are_refused_before_anything_is_traced(
    monkeypatch,
):
    monkeypatch.setattr(plan, "estimates_of_stages", None)
    for recipe, text, message in (
        ("r_search.py:grpo", WRITTEN.replace("=2", "=9"), "searches = 9, but .* 4"),
        ("r_search.py:grpo", WRITTEN.replace("1700", "99999"), "tokens = 99999, but"),
        ("rearag.py", WRITTEN, "--lengths: curate has no step that changes weights"),
    ):
        argv = [f"--config=configs/{recipe}", "--topology=a100x8"]
        argv += ["--stage=curate"] if recipe == "rearag.py" else []
        with pytest.raises(ValueError, match=message):
            plan.command([*argv, f"--lengths={text}"])

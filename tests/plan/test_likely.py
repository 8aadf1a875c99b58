"""A likely step: shares of the longest one, by hand and beside a published time."""

import json

import pytest

from rsearch.config import recipes
from rsearch.plan import command as plan
from rsearch.plan import likely
from rsearch.plan.likely import Lengths
from rsearch.plan.machines import find_machine

WRITTEN = "searches=2,policy_tokens=300,tokens=1700"


@pytest.fixture(scope="module")
def r_search():
    """R-Search's stage on its authors' machine: (configuration, machine)."""
    config = recipes.load("configs/r_search.py:grpo")
    return config, find_machine("a100x8")


def test_lengths_are_written_out_or_the_means_of_a_run(tmp_path):
    expected = Lengths(searches=2, policy_tokens=300, tokens=1700)
    assert likely.read_lengths(WRITTEN) == expected
    rows = [
        {"step": 0, "searches": 1, "policy_tokens": 200, "tokens": 1500},
        {"step": 1, "searches": 3, "policy_tokens": 400, "tokens": 1900},
        {"step": 2, "loss": 0.1},  # of a step without a valid rollout
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert likely.read_lengths(str(file)) == expected
    file.write_text(json.dumps(rows[2]) + "\n")
    with pytest.raises(ValueError, match="no row has searches, policy_tokens, tokens"):
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
def test_lengths_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        likely.read_lengths(text)


def test_shares_are_those_worked_out_by_hand(r_search):
    """Budgets: a prompt of 1,024, 5 turns of 500 and 4 observations of 1,800 tokens.

    The prompt's 4 chunks of 256 are all counted; 2 searches of 700 tokens take 3 chunks
    each, where 4 would take 8 each. Six conversations share a row: 11 rows hold the 64
    of a micro-batch, in 6 of its 32 pieces of 2 rows.
    """
    config, machine = r_search
    lengths = likely.read_lengths(WRITTEN)
    shares = plan.shares_of_stages(config, machine, lengths)["rl"]
    assert shares["prefill"] == 1
    assert shares["decode"] == pytest.approx(300 / (5 * 500))
    assert shares["extend"] == pytest.approx(2 * 3 / (4 * 8))
    assert shares["score"] == shares["update"] == 6 / 32
    assert "admit" not in shares


def test_with_pages_more_short_rollouts_than_long_ones_decode_at_once(r_search):
    """163,840 tokens hold 15 rollouts of 10,724, and 96 of 1,700."""
    config, machine = r_search
    config = recipes.apply_overrides(config, {"rollout.cache_tokens": 163_840})
    lengths = likely.read_lengths(WRITTEN)
    shares = plan.shares_of_stages(config, machine, lengths)["rl"]
    assert shares["decode"] == pytest.approx(300 / (5 * 500) * 15 / 96)


def test_a_step_takes_what_its_authors_say(r_search, capsys):
    """5 to 9 minutes on 8 A100 (github.com/QingFei1/R-Search, issue 2), within 1.5."""
    config, machine = r_search
    lengths = likely.read_lengths(WRITTEN)
    estimates = plan.main(config, machine, only="rl")
    shares = plan.shares_of_stages(config, machine, lengths)
    seconds = plan.show_likely(config, machine, estimates, shares, lengths)["rl"]
    assert 300 / 1.5 < seconds < 540 * 1.5
    said = capsys.readouterr()
    assert (
        "rollouts of 1,700 tokens, 300 of them by the policy, and 2 searches"
        in said.out
    )
    assert f"{195 * seconds / 3600 * 8:,.0f} device hours" in said.out + said.err


def test_lengths_above_the_budgets_are_refused_before_anything_is_traced(
    r_search, monkeypatch
):
    monkeypatch.setattr(plan, "main", None)
    argv = ["--config=configs/r_search.py:grpo", "--topology=a100x8"]
    for text, message in (
        (WRITTEN.replace("=2", "=9"), "searches = 9, but .* allow 4"),
        (WRITTEN.replace("1700", "99999"), "tokens = 99999, but"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.command([*argv, f"--lengths={text}"])

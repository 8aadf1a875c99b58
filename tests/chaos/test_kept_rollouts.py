"""Rollouts that had ended when a run was killed are not generated again."""

import signal

import pytest

from tests.test_train import assert_same_as_uninterrupted, run_until


@pytest.mark.fault(20, "in a journal's append")
@pytest.mark.slow
@pytest.mark.parametrize(
    "moment, num_known",
    [("appended rl/rollouts-0.journal", 1), ("append rl/metrics.jsonl", 8)],
)
def test_rollouts_that_had_ended_are_not_generated_again(tmp_path, moment, num_known):
    """This includes rollouts of steps that no checkpoint contains."""
    seldom = {"checkpoint__rl_steps": 3}
    done = run_until(moment, tmp_path / "run", **seldom)
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run_until("never", tmp_path / "run", **seldom)
    assert done.returncode == 0, done.stderr
    assert f"step 1: {num_known} rollouts had already finished" in done.stderr
    assert_same_as_uninterrupted(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.journal"))

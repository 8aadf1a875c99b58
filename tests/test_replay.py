"""A replayed RL step equals the original bit for bit, or the difference is named."""

import importlib
import re
import sys

import pytest

from rsearch import replay, train
from rsearch.rollout.rollout_log import read_rollouts
from rsearch.runtime.jsonl import write_jsonl
from rsearch.stages.recomputation import RecomputedStep
from tests.small_run import PPO, config, quick_compilation  # noqa: F401

# A reward term of the user's own, so that rollouts of untrained policies differ.
TERM = """
def shortness(question, rollouts):
    return [{scale} * r.num_policy_tokens for r in rollouts]
"""
KL = dict(rl__kl_coef=0.05, rl__kl_place="reward", rl__kl_kind="k1")
ALGORITHMS = {
    "grpo": dict(rl__kl_coef=0.05, rl__kl_place="loss", rl__kl_kind="k3"),
    "ppo": PPO,
    "reinforce_pp": dict(rl__algorithm="reinforce_pp", **KL),
    # The rollouts of step 1 come from the policy before step 0.
    "grpo, one step ahead": dict(
        rl__max_staleness=1, rl__tis_cap=2.0, rollout__devices=4
    ),
}


@pytest.mark.parametrize(
    "stored, checkpoints, step, expected",
    (
        ((0, 1, 2, 3), (2,), "2", ("rl", 2)),
        ((0, 1, 2, 3), (2, 4), "last", ("rl", 2)),
        ((0, 1), (), "last", ("rl", 0)),
        ((0, 1, 2, 3), (2,), "3", "0, 2"),
        ((1,), (), "1", "none"),
        ((), (), "1", "config.log.rollouts"),
    ),
)
def test_a_step_without_a_checkpoint_is_refused_and_those_with_one_are_listed(
    tmp_path, stored, checkpoints, step, expected
):
    for number in stored:
        file = tmp_path / "rl" / "rollouts" / f"step_{number:06}.jsonl.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for number in checkpoints:
        folder = tmp_path / "rl" / "checkpoints" / str(number)
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    arguments = tmp_path, ("sft", "rl"), "last", step
    if isinstance(expected, tuple):
        assert replay.choose_step(*arguments) == expected
        return
    with pytest.raises(ValueError, match=expected):
        replay.choose_step(*arguments)


def test_a_step_without_a_rollout_in_the_loss_is_not_blamed_on_the_sampler():
    turn = {"source": "policy", "text": "x", "sampler_log_probs": [-1.0]}
    row = {"step": 1, "policy_version": 1, "in_loss": True, "segments": [turn]}
    step = RecomputedStep([], {}, num_exact=1, has_advantages=True)
    (line,) = replay.uncompared_in(step, [row], config())
    assert "rl.old_logprobs" in line
    assert not replay.uncompared_in(step, [row | {"in_loss": False}], config())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_replay_bit_for_bit_and_a_changed_reward_is_named(
    algorithm, tmp_path, monkeypatch, capsys
):
    name = re.sub(r"\W+", "_", algorithm)
    module, run = tmp_path / f"shortness_of_{name}.py", tmp_path / "run"
    module.write_text(TERM.format(scale=0.01))
    monkeypatch.syspath_prepend(tmp_path)
    small = config(
        stages=("rl",),
        rl__steps=2,
        rl__old_logprobs="recompute",
        log__rollouts=4,  # all groups of a step
        reward={"short": {"term": f"{module.stem}:shortness"}},
        eval__methods=("protocol",),
        eval__at_start=False,
        checkpoint__keep=2,
        **{k: v for k, v in ALGORITHMS[algorithm].items() if k != "rl__old_logprobs"},
    )
    train.main(small, run)

    def replayed(step):
        capsys.readouterr()
        code = replay.main([str(run), f"--step={step}"])
        lines = capsys.readouterr().out
        assert max(map(len, lines.splitlines())) <= 80
        return code, lines

    for step in (0, 1):
        code, lines = replayed(step)
        assert code == 0 and "log_probs" in lines and "loss" in lines, lines
        is_stale = step == 1 and "ahead" in algorithm
        assert ("max_staleness" in lines) == is_stale
        assert ("params" in lines) != is_stale

    # Only the first group, which does not fill a micro-batch.
    rows = read_rollouts(run / "rl", 1)
    write_jsonl(run / "rl" / "rollouts" / "step_000001.jsonl.gz", rows[:2])
    code, lines = replayed(1)
    assert code == 0 and "1 of 4 groups" in lines, lines
    assert ("advantage (" in lines) == algorithm.startswith("grpo")

    module.write_text(TERM.format(scale=0.02))
    importlib.reload(sys.modules[module.stem])
    code, lines = replayed(0)
    assert code == 1
    table = lines.partition("different")[2]
    assert "reward_short" in table and "log_probs" not in table
    assert "has changed" in lines and module.stem in lines

"""Recompute an RL step from its stored rollouts: python -m rsearch.replay RUN

Rewards, log-probabilities and advantages are recomputed by the functions that the run
trains with, from the checkpoint that the step began with, and compared with what the
run recorded. If all groups of the step are stored (config.log.rollouts), the loss and
its metrics are too. Nothing in the run is changed.

    python -m rsearch.replay runs/quickstart --step=14

Step 12 begins with checkpoint 12; step 0 needs no checkpoint. The exit code is 0 if all
numbers agree, 1 if some differ, and 2 if the step cannot be recomputed. Numbers must be
bitwise equal, except for those that the output says may differ by a given tolerance.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from rsearch.config.recipes import REQUIRED, from_json, parse_flags, run_command
from rsearch.evaluation.difference_table import print_sentence, report_differences
from rsearch.rollout.rollout_differences import (
    BY_SAMPLER,
    compare_metrics,
    compare_rollouts,
)
from rsearch.rollout.rollout_log import read_rollouts, stored_steps
from rsearch.runtime import checkpoint
from rsearch.runtime.identity import changes_since
from rsearch.runtime.metrics import METRICS, read_metrics
from rsearch.runtime.workdir import check_workdir, read_config
from rsearch.stages.recomputation import RecomputedStep, recompute_step
from rsearch.train import load_step

LAST = "last"
FLAGS = {
    "step": (REQUIRED, "RL step, as counted in metrics.jsonl, or 'last'"),
    "stage": (LAST, "an RL stage, or 'last'"),
}
# By model.dtype, for log-probabilities of rows that are packed differently than before.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
SAMPLER_QUANTITIES = ("params", BY_SAMPLER)  # quantities of the policy that sampled


def main(argv: Sequence[str]) -> int:
    """Read the arguments and the run, recompute the step, and compare."""
    flags = parse_flags(argv, flags=FLAGS, positional=("RUN",))
    run = pathlib.Path(flags["RUN"])
    config = from_json(read_config(run))
    check_workdir(run, config, is_reader=True)  # its checkpoints must not change now
    name, step = choose_step(run, config.stages, flags["stage"], flags["step"])
    stored_rows = read_rollouts(run / name, step)
    metrics = _metrics_row(run / name, step)
    stage, state, first_params = load_step(config, run.absolute(), name, step)
    recomputed = recompute_step(stage, state, first_params, stored_rows, step=step)
    c = stage.config
    num_groups = len({row["group"] for row in stored_rows})
    print_sentence(
        f"{name} step {step}: {num_groups} of {c.rl.questions_per_step} groups, "
        f"{len(stored_rows)} rollouts"
    )
    # No index was opened, so its fingerprint is unknown.
    inputs = {n: x for n, x in stage.inputs.items() if n != "retrieval"}
    for line in changes_since(run, "train", config, inputs=inputs, stage=name):
        print_sentence(line)
    excluded_names = () if recomputed.has_advantages else ("advantage",)
    if is_stale(stored_rows):
        excluded_names += SAMPLER_QUANTITIES
    comparisons = compare_rollouts(
        stored_rows,
        recomputed.rows,
        num_exact=recomputed.num_exact,
        tolerance=TOLERANCE[c.model.dtype],
        excluded=excluded_names,
    )
    if recomputed.metrics is not None:
        comparisons += compare_metrics(metrics, recomputed.metrics)
    for line in uncompared_in(recomputed, stored_rows, c):
        print_sentence(line)
    return report_differences(comparisons, stored_rows)


def choose_step(
    run: pathlib.Path, stages: Sequence[str], stage: str, step: str
) -> tuple[str, int]:
    """Return the stage and the step that the flags name.

    Raises:
        ValueError: the step cannot be recomputed; the message names those that can.
    """
    steps_by_stage = {name: stored_steps(run / name) for name in stages}
    steps_by_stage = {name: steps for name, steps in steps_by_stage.items() if steps}
    if not steps_by_stage:
        raise ValueError(f"{run}: has no stored rollouts; was config.log.rollouts 0?")
    name = list(steps_by_stage)[-1] if stage == LAST else stage
    if name not in steps_by_stage:
        raise ValueError(
            f"--stage={stage}: {run} has steps of {', '.join(steps_by_stage)}"
        )
    # Step 0 begins with the stage's initial weights.
    start_steps = {0, *checkpoint.steps(run / name / checkpoint.FOLDER)}
    possible = [number for number in steps_by_stage[name] if number in start_steps]
    step_numbers = {str(number): number for number in possible}
    if possible:
        step_numbers[LAST] = possible[-1]
    if step not in step_numbers:
        raise ValueError(
            f"--step={step}: {run}/{name} has both stored rollouts and the checkpoint "
            f"before them for steps {', '.join(map(str, possible)) or 'none'}; "
            "checkpoint.rl_steps=1 and a large checkpoint.keep keep one for every step"
        )
    return name, step_numbers[step]


def is_stale(stored: Sequence[Mapping]) -> bool:
    """Return whether the policy that sampled the rollouts is older than the step's."""
    return stored[0]["policy_version"] < stored[0]["step"]


def uncompared_in(
    recomputed: RecomputedStep, stored: Sequence[Mapping], config: ConfigDict
) -> list[str]:
    """Return sentences that say what was not compared, or only within a tolerance.

    Args:
        stored: lines of the step's file.
    """
    lines = []
    if recomputed.metrics is None:
        lines.append("loss and metrics: not compared, since they need all groups")
    if not recomputed.has_advantages:
        lines.append(
            "advantages: not compared, since config.rl.algorithm = "
            f"{config.rl.algorithm!r} computes them over all groups"
        )
    tolerance = TOLERANCE[config.model.dtype]
    # Of rollouts outside the loss, no step stores the trainer's.
    rows_in_loss = [row for row in stored if row["in_loss"]]
    turns = [segment for row in rows_in_loss for segment in row["segments"]]
    if is_stale(stored):
        lines.append(
            "the sampler's policy and log-probabilities: not compared, since with "
            "config.rl.max_staleness = 1 they are those of the policy before the "
            "previous step"
        )
    elif turns and not any("log_probs" in turn for turn in turns):
        lines.append(
            "log-probabilities: with config.rl.old_logprobs = "
            f"{config.rl.old_logprobs!r} the step stores only the sampler's, which may "
            f"differ by {tolerance:g}"
        )
    elif recomputed.num_exact < len(stored):
        num_inexact = len(stored) - recomputed.num_exact
        lines.append(
            f"log-probabilities: the last {num_inexact} rollouts shared a micro-batch "
            f"with rollouts that are not stored, and may differ by {tolerance:g}"
        )
    return lines


def _metrics_row(folder, step) -> dict:
    """Return the step's row of metrics.jsonl."""
    path = folder / METRICS
    rows = [row for row in read_metrics(path) if row["step"] == step]
    if not rows:
        raise ValueError(f"{path}: has no row for step {step}")
    return rows[-1]


if __name__ == "__main__":
    sys.exit(run_command(main))

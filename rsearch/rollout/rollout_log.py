"""Store some rollouts of each step of a stage, with what was learnt from them.

    <stage>/rollouts/step_000012.jsonl.gz    one rollout per line

`step` counts from 0, as in metrics.jsonl: step 12 starts from checkpoint 12. The files
are for people, who view them with `rsearch.show`, and for `rsearch.replay`, which
recomputes their contents. Training runs do not read them.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.runtime.metrics import number_to_json
from rsearch.types import Group, Question, Rollout, Source

if TYPE_CHECKING:  # commands that only read these files do not need jax
    import jax

FOLDER = "rollouts"  # in the stage's folder
FILE_NAME = re.compile(r"step_(\d{6,})\.jsonl\.gz")


class RolloutLog:
    """The rollout files of one stage, written by host 0.

    Args:
        stage_folder: folder of the stage.
        num_groups: number of groups stored per step, the first ones; 0 stores none.
    """

    def __init__(self, stage_folder: pathlib.Path, num_groups: int):
        self._folder = stage_folder / FOLDER
        self._num_groups = num_groups
        self._newest = None  # the step last written; no later step has a file
        if num_groups:
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        step: int,
        scored: Sequence[tuple[Group, np.ndarray, dict]],
        batch: Any,
        logp: "jax.Array | None",
        *,
        params: str,
        version: int | None = None,
    ) -> None:
        """Write the file of a step, and delete those of later steps.

        Later steps have files only if the run went back to an earlier checkpoint, and
        are taken again. The same step always gives the same bytes. All hosts must call
        this together.

        Args:
            step: step number from 0, the number of steps learnt from so far.
            scored: (group, [G] rewards, {term: [G]}) for each group of the step.
            batch: the rsearch.learn.batch.Batch of all the step's rollouts, [M, b, T],
                with advantages; None if nothing is learnt from the step.
            logp: [M, b, T] log-probabilities under the trainer's policy before the
                update; None if they are not computed.
            params: `params_fingerprint` of the policy that sampled.
            version: number of steps that policy had learnt from; None means all steps
                before this one.

        Raises:
            OSError: the file cannot be written.
            LostDirectoryError: see `files.replace`.
        """
        if not self._num_groups:
            return
        first_groups = scored[: self._num_groups]
        rows = rollout_rows(
            step, first_groups, batch, logp, params=params, version=version
        )
        # Write first: this fails if the run's directory is lost, so that nothing is
        # deleted from a run that has taken its place.
        write_jsonl(self._folder / f"step_{step:06}.jsonl.gz", rows)
        # Only a restart or a roll-back can have left files of later steps. Listing all
        # files in every step would make long runs slow.
        if self._newest is None or step <= self._newest:
            for number, path in _step_files(self._folder).items():
                if number > step:  # any host may: none writes before all get here
                    path.unlink(missing_ok=True)
        self._newest = step


def rollout_rows(
    step: int,
    scored: Sequence[tuple[Group, np.ndarray, dict]],
    batch: Any,
    logp: "jax.Array | None",
    *,
    params: str,
    version: int | None = None,
) -> list[dict]:
    """Return the lines of a step's file.

    Args:
        step, batch, logp, params, version: see `RolloutLog.write`.
        scored: (group, [G] rewards, {term: [G]}) for each of the step's first groups.
    """
    from rsearch.rollout.records import tools_record  # imports jax

    batch_arrays = {} if batch is None else _gather_rows(batch, logp)
    rows = []
    for number, (group, rewards, parts) in enumerate(scored):
        question = group.question
        for i, rollout in enumerate(group.rollouts):
            row = number * len(group.rollouts) + i
            rows.append(
                {
                    "step": step,
                    "question_id": question.id,
                    "question": question.text,
                    "answers": list(question.golden_answers),
                    **kind_record(question),
                    "group": number,
                    "rollout": i,
                    "policy_version": step if version is None else version,
                    "params": params,
                    "outcome": rollout.outcome.value,
                    "answer": rollout.answer,
                    **reward_record(i, rewards, parts),
                    **search_record(rollout),
                    "tools": tools_record(rollout),
                    **_learnt_record(
                        rollout, {name: x[row] for name, x in batch_arrays.items()}
                    ),
                }
            )
    return rows


def learnt_advantages(batch: Any) -> np.ndarray:
    """Return [n] advantages, one for each token that a step learns from.

    All hosts must call this together.

    Args:
        batch: see `RolloutLog.write`; not None.
    """
    batch_arrays = _gather_rows(batch, None)
    return batch_arrays["advantage"][batch_arrays["from_policy"]]


def stored_steps(stage_folder: pathlib.Path) -> list[int]:
    """Return the steps whose rollouts a stage has stored, in order."""
    return sorted(_step_files(stage_folder / FOLDER))


def read_rollouts(stage_folder: pathlib.Path, step: int) -> list[dict]:
    """Return the lines of a step's file.

    Raises:
        ValueError: a line, which the message names, was not written by a run.
        OSError: the file cannot be read.
    """
    path = stage_folder / FOLDER / f"step_{step:06}.jsonl.gz"
    return read_jsonl(path, parse=_parse_rollout)


def kind_record(question: Question) -> dict:
    """Return {"kind": ...} for a question, or {} if it has none."""
    kind = question.metadata.get("kind")
    return {} if kind is None else {"kind": kind}


def reward_record(
    number: int, rewards: np.ndarray, terms: Mapping[str, np.ndarray]
) -> dict:
    """Return the reward of a rollout, and its terms before they are weighted.

    Args:
        number: index of the rollout in the group.
        rewards: [G] rewards of the group.
        terms: {name: [G]} terms of the group.
    """
    return {
        "reward": _numbers(rewards)[number],
        "reward_parts": {name: _numbers(x)[number] for name, x in terms.items()},
    }


def search_record(rollout: Rollout) -> dict:
    """Return the queries of all searches, and the passages of each search."""
    return {
        "queries": [q for s in rollout.searches for q in s.call.arguments],
        "passages": [
            [
                {
                    "id": passage.id,
                    "title": passage.title,
                    "score": None
                    if passage.score is None
                    else number_to_json(float(passage.score)),
                }
                for hits in search.result.data
                for passage in hits
            ]
            for search in rollout.searches
        ],
    }


def _gather_rows(batch, logp):
    """Return {name: [B, T]} arrays of the step's batch, a row for each rollout."""
    from rsearch.hosts import collectives  # imports jax, which reading does not need

    arrays = {"advantage": batch.advantage, "from_policy": batch.from_policy}
    if logp is not None:
        arrays["log_probs"] = logp
    gathered_arrays = {name: collectives.gather_array(x) for name, x in arrays.items()}
    return {name: x.reshape(-1, x.shape[-1]) for name, x in gathered_arrays.items()}


def _learnt_record(rollout, row_arrays):
    """Return a rollout's segments, and whether and how they are learnt from.

    Args:
        rollout: the rollout.
        row_arrays: {name: [T]} arrays of its row of the batch; {} if nothing is learnt.
    """
    # The trainer computes no log-probabilities for rollouts outside the loss.
    in_loss = bool(row_arrays) and bool(row_arrays["from_policy"].any())
    logp = row_arrays.get("log_probs") if in_loss else None
    segments, advantages, start = [], [], 0
    for segment in rollout.segments:
        end = start + len(segment.token_ids)
        record = {
            "source": segment.source.name.lower(),
            "text": segment.text,
            "ids": np.asarray(segment.token_ids).tolist(),
        }
        if segment.source == Source.POLICY:
            record["sampler_log_probs"] = _numbers(segment.logp)
            if logp is not None:
                record["log_probs"] = _numbers(logp[start:end])
            if row_arrays:
                advantages.append(row_arrays["advantage"][start:end])
        segments.append(record)
        start = end
    advantage = None
    if advantages:
        values = np.concatenate(advantages)
        is_same = len(values) and (values == values[0]).all()
        advantage = _numbers(values[:1])[0] if is_same else _numbers(values)
    return {
        "in_loss": in_loss,
        "advantage": advantage,
        "searches": len(rollout.searches),
        "segments": segments,
    }


def _numbers(values) -> list:
    """Return float32 numbers in their shortest exact decimal form."""
    decimals = np.asarray(values, np.float32).astype(str).astype(np.float64)
    return [number_to_json(value) for value in decimals.tolist()]


def _step_files(folder):
    """Return {step: path} of the files in a folder, which need not exist."""
    if not folder.is_dir():
        return {}
    matches = [(FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return {int(match[1]): path for match, path in matches if match}


def _parse_rollout(row):
    kinds = {"step": int, "question_id": str, "question": str, "segments": list}
    if not isinstance(row, dict):
        raise ValueError("expected an object")
    for name, kind in kinds.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{name} = {row.get(name)!r:.60}: expected {kind}")
    for segment in row["segments"]:
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            raise ValueError(f"segments: {segment!r:.60}: expected a text")
    return row

"""The plan of a run: named stages, each with a kind and overrides of its own.

A stage is named "rl", or "rl_<word>" if a run has several of a kind; the part before
the underscore is its kind. `config.overrides.<stage>` holds the fields that differ:

    c.stages = ("rl_retrieve", "rl_answer")
    c.overrides = ConfigDict({"rl_retrieve": {"rl": {"steps": 8}, "reward": {...}}})
"""

import os
import pathlib
import re
from typing import NamedTuple

from ml_collections import ConfigDict

from rsearch.config.fields import apply_overrides

KINDS = ("curate", "sft", "rl")
QUESTIONS = "questions.jsonl"  # a curate stage's output in its directory
DEMONSTRATIONS = "demonstrations.jsonl"  # the same
SUMMARY = "summary.json"  # the stage's selection and its reasons; written last
START = "start"  # name in results of the policy before all stages
STAGE_PREFIX = "stage:"  # of a stage that is named as a source of files or weights
URLS = ("http://", "https://")  # prefixes of an endpoint
WORLD = "world"  # the embedded world, as the corpus or as the prefix of a source
PARAGRAPHS = "paragraphs"  # the corpus if an evaluation searches each question's own
NAME = re.compile(rf"({'|'.join(KINDS)})(_[a-z0-9_]+)?")
FILE_KINDS, WEIGHT_KINDS = ("curate",), ("sft", "rl")  # stages that produce them


class Role(NamedTuple):
    """When a model other than the policy is called.

    Attributes:
        kinds: kinds of the stages that call it, in their steps or their evaluation.
        is_in_rollouts: whether it is called during rollouts, not after them.
        is_only_evaluated: whether only the evaluation after a stage calls it.
        is_at_endpoint: whether it is always at an endpoint, never on this machine's
            devices; its caller then sets the budgets of its replies.
    """

    kinds: tuple[str, ...]
    is_in_rollouts: bool = False
    is_only_evaluated: bool = False
    is_at_endpoint: bool = False


ROLES = {  # sections of config.models
    "judge": Role(("rl",)),
    "rewriter": Role(("rl",)),
    "writer": Role(KINDS, is_in_rollouts=True),
    "answerer": Role(WEIGHT_KINDS, is_only_evaluated=True),
    "reader": Role(WEIGHT_KINDS, is_only_evaluated=True),
    "eval_judge": Role(WEIGHT_KINDS, is_only_evaluated=True),
    "subject": Role(WEIGHT_KINDS, is_only_evaluated=True, is_at_endpoint=True),
}
IN_ROLLOUTS = tuple(name for name, role in ROLES.items() if role.is_in_rollouts)
STAGE_FIELDS = {  # field that may name a stage -> kinds it may name, kinds reading it
    "data.train": (FILE_KINDS, KINDS),
    "data.dev": (FILE_KINDS, KINDS),
    "curate.first": (FILE_KINDS, ("curate",)),
    "sft.demonstrations": (FILE_KINDS, ("sft",)),
    **{
        f"models.{name}.source": (WEIGHT_KINDS, role.kinds)
        for name, role in ROLES.items()
        if not role.is_only_evaluated
    },
}
EVALUATION_FIELDS = tuple(  # fields that may name a stage, read by evaluations
    f"models.{name}.source" for name, role in ROLES.items() if role.is_only_evaluated
)


def roles_of(kind: str) -> tuple[str, ...]:
    """Return the roles of the models that a kind of stage or its evaluation calls."""
    return tuple(name for name, role in ROLES.items() if kind in role.kinds)


def is_stage(name: str) -> bool:
    """Return whether this is a valid name of a stage."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def kind_of(stage: str) -> str:
    """Return "rl" of "rl_answer"."""
    return stage.partition("_")[0]


def kinds(config: ConfigDict) -> set[str]:
    """Return the kinds of a configuration's stages."""
    return {kind_of(stage) for stage in config.stages}


def stage_config(config: ConfigDict, stage: str):
    """Return one stage's configuration, with its overrides and no other stage.

    Raises:
        ValueError: an override names an unknown field or has a wrong value.
    """
    overrides = config.overrides.get(stage)
    result = apply_overrides(config, overrides.to_dict() if overrides else {})
    result.stages = (stage,)
    result.overrides = ConfigDict()
    return result


def stage_configs(config: ConfigDict):
    """Return [(stage, its configuration)] in order.

    Raises:
        ValueError: overrides under a name that no stage can have, or as in
            `stage_config`.
    """
    for stage in config.overrides:
        if stage not in config.stages and not is_stage(stage):
            raise ValueError(
                f"config.overrides.{stage} is for no stage: a stage is named "
                "'rl' or 'rl_<word>', likewise 'sft' and 'curate'"
            )
    return [(stage, stage_config(config, stage)) for stage in config.stages]


def earlier_stages(config: ConfigDict) -> list[str]:
    """Return the stages whose files or weights a configuration's own stages read.

    They are named as "stage:<name>" in the STAGE_FIELDS that the stages' kinds read and
    in the fields of the models that evaluation calls.
    """
    own_kinds = kinds(config)
    fields = [f for f, (_, readers) in STAGE_FIELDS.items() if own_kinds & {*readers}]
    names = [_referenced_stage(config, f) for f in (*fields, *EVALUATION_FIELDS)]
    return list(dict.fromkeys(name for name in names if name is not None))


def check_plan(config: ConfigDict) -> None:
    """Refuse stages that read the output of a stage that will not have ended by then.

    Raises:
        ValueError: names the field, the stage that it names and the problem.
    """
    previous_stages, first_evaluated = [], [] if config.eval.at_start else None
    for stage, c in stage_configs(config):
        if c.model.source.startswith(STAGE_PREFIX):
            raise ValueError(
                f"config.model.source = {c.model.source!r} in stage {stage}: weights "
                "pass from stage to stage by config.trains; this field names the "
                "initial weights"
            )
        reader = f"stage {stage}"
        for field, (kind, readers) in STAGE_FIELDS.items():
            is_read = kind_of(stage) in readers
            if field == "models.rewriter.source":
                is_read = is_read and c.rl.memorise_coef > 0
            if is_read:
                _check_named(c, field, kind, previous_stages, config, reader)
        previous_stages.append(stage)
        is_evaluated = c.trains == "policy" and kind_of(stage) != "curate"
        if is_evaluated and first_evaluated is None:
            first_evaluated = list(previous_stages)
    for field in EVALUATION_FIELDS:
        ended_stages = previous_stages if first_evaluated is None else first_evaluated
        when = "the evaluation at the start" if config.eval.at_start else "evaluation"
        _check_named(config, field, WEIGHT_KINDS, ended_stages, config, when)


def _referenced_stage(config, field):
    """Return the stage that a field names, or None."""
    value = config[field]
    return value.removeprefix(STAGE_PREFIX) if value.startswith(STAGE_PREFIX) else None


def _check_named(config_of_stage, field, kind, previous_stages, config, reader):
    """Refuse a field that names an unknown, a later or an unsuitable stage."""
    name = _referenced_stage(config_of_stage, field)
    if name is None:
        return
    problem = f"config.{field} = '{STAGE_PREFIX}{name}', which {reader} reads: "
    if name not in config.stages:
        stages = ", ".join(config.stages)
        raise ValueError(f"{problem}the run has no such stage; it has {stages}")
    if name not in previous_stages:
        raise ValueError(f"{problem}stage {name} has not ended by then")
    if kind_of(name) not in kind:
        allowed_kinds = " or ".join(kind)
        raise ValueError(
            f"{problem}that leaves no such thing; name a stage of {allowed_kinds}"
        )


def stage_file(source: str, name: str, home: str | os.PathLike | None) -> str:
    """Return the path of a source; "stage:x" means the file `name` of stage x.

    Args:
        source: a path, which is returned unchanged, or "stage:<name>".
        name: name of the file in the stage's directory.
        home: the run's directory, or None.

    Raises:
        ValueError: there is no run, or its stage has not written the file.
    """
    if not source.startswith(STAGE_PREFIX):
        return source
    if home is None:
        raise ValueError(f"{source!r} is a stage of a run, and no run is given")
    path = pathlib.Path(home) / source.removeprefix(STAGE_PREFIX) / name
    if not path.is_file():
        raise ValueError(f"{source!r}: {path} is missing; has this stage ended?")
    return str(path)


def rollouts_of_step(c: ConfigDict, num_hosts: int) -> int:
    """Return the maximum number of rollouts of a host in one step of an RL stage."""
    return -(-c.rl.questions_per_step // num_hosts) * c.rollout.group_size


def round_size(group_size: int, max_rollouts: int) -> int:
    """Return how many rollouts of a question a data stage makes in a round.

    It is the largest divisor of config.rollout.group_size, at most `max_rollouts`. It
    does not depend on the number of rows, so that a stage that is resumed with another
    number rolls out the same.
    """
    # A divisor, so that rounds of any such size end at the same rollouts.
    sizes = range(1, min(group_size, max_rollouts) + 1)
    return max((size for size in sizes if group_size % size == 0), default=1)


def num_decode_rows(max_concurrent: int, num_rollouts: int) -> int:
    """Return the number of rows to decode with: all, or half, a quarter, ...

    It is halved while it still holds all rollouts, since an empty row costs as much as
    one with a rollout.

    Args:
        num_rollouts: number of rollouts of a host in a step.
    """
    rows = max_concurrent
    # A multiple of 16 divides evenly among the devices of most hosts.
    while rows % 32 == 0 and rows // 2 >= num_rollouts:
        rows //= 2
    return rows

"""The plan of a run: named stages, each of a kind, each with overrides of its own.

A stage is named "rl", or "rl_<word>" where a run has several of a kind; the part before
the underscore is its kind. `config.overrides.<stage>` holds what differs in it:

    c.stages = ("rl_retrieve", "rl_answer")
    c.overrides = ConfigDict({"rl_retrieve": {"rl": {"steps": 8}, "reward": {...}}})
"""

import pathlib
import re

from ml_collections import ConfigDict

from rsearch.fields import apply_overrides

KINDS = ("curate", "sft", "rl")
QUESTIONS = "questions.jsonl"  # what a curate stage leaves in its directory
DEMONSTRATIONS = "demonstrations.jsonl"  # likewise
SUMMARY = "summary.json"  # what it kept and why; written last
STAGE = "stage:"  # before a stage's name, where a file or a model is named
NAME = re.compile(rf"({'|'.join(KINDS)})(_[a-z0-9_]+)?")


def is_stage(name) -> bool:
    """Whether this can be the name of a stage."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def kind_of(stage: str) -> str:
    """ "rl" of "rl_answer"."""
    return stage.partition("_")[0]


def kinds(config) -> set[str]:
    """The kinds of a configuration's stages."""
    return {kind_of(stage) for stage in config.stages}


def stage_config(config, stage: str):
    """The configuration of one stage: its overrides applied, itself the only stage.

    Raises:
        ValueError: an override of a field that there is not, or with a wrong value.
    """
    own = config.overrides.get(stage)
    changed = apply_overrides(config, own.to_dict() if own else {})
    changed.stages = (stage,)
    changed.overrides = ConfigDict()
    return changed


def stage_configs(config):
    """[(stage, its configuration)] in order.

    Raises:
        ValueError: overrides for a stage that is not in config.stages.
    """
    for stage in config.overrides:
        if stage not in config.stages and not is_stage(stage):
            raise ValueError(
                f"config.overrides.{stage} is for no stage: a stage is named "
                "'rl' or 'rl_<word>', likewise 'sft' and 'curate'"
            )
    return [(stage, stage_config(config, stage)) for stage in config.stages]


def earlier_stages(config) -> list[str]:
    """The stages whose files or weights a configuration names, as "stage:<name>"."""
    values = [config.data.train, config.data.dev, config.sft.demonstrations]
    values += [config[name].source for name in ("judge", "rewriter", "writer")]
    values += [config.answerer.source, config.model.source]
    return [v.removeprefix(STAGE) for v in values if v.startswith(STAGE)]


def stage_file(source: str, name: str, home) -> str:
    """The path that a source means: "stage:x" is the file `name` of stage x.

    Args:
        source: a path, which is returned as it is, or "stage:<name>".
        name: of the file in the stage's directory.
        home: the run's directory, or None.

    Raises:
        ValueError: there is no run, or its stage has not written the file.
    """
    if not source.startswith(STAGE):
        return source
    if home is None:
        raise ValueError(f"{source!r} is a stage of a run, and no run is given")
    path = pathlib.Path(home) / source.removeprefix(STAGE) / name
    if not path.is_file():
        raise ValueError(f"{source!r}: {path} is missing; has this stage ended?")
    return str(path)

"""Answer held-out questions and score them: python -m rsearch.evaluate --workdir=RUN

The configuration is the run's, or that of --config. Fields that control how the policy
is evaluated, such as the index or the number of passages, may differ from the run's.
Each row of results.json lists the fields that do.
"""

from rsearch.hosts import preemption

if __name__ == "__main__":
    preemption.exit_on_signals()  # first, because the imports below take seconds

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rsearch.config.recipes import (
    REQUIRED,
    apply_overrides,
    diff,
    fields,
    from_json,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.data.questions import questions_fingerprint
from rsearch.evaluation.evaluator import Evaluator, run_methods
from rsearch.evaluation.results import show_results
from rsearch.hosts import processes
from rsearch.methods.table import LABELS, expand_all, needs_samples
from rsearch.plan.dry_run import with_rows_here
from rsearch.rollout.records import params_fingerprint
from rsearch.runtime import console
from rsearch.runtime.files import check_output
from rsearch.runtime.identity import recorded_start
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.jsonl import write_jsonl
from rsearch.runtime.workdir import CONFIG, check_workdir, open_workdir, read_config
from rsearch.setup.checks import check_sampled
from rsearch.setup.load import (
    Shared,
    check_inputs,
    external_corpus_overrides,
    load_setup,
)
from rsearch.setup.stages import evaluation_parts
from rsearch.setup.weights import initial_params, trained_params

# Sections that an evaluation may change: they control how a policy is queried, not
# what it is.
QUERY_SECTIONS = ("data", "eval", "models", "protocol", "retrieval", "rollout", "sets")
RECORDED_SECTIONS = tuple(section for section in QUERY_SECTIONS if section != "sets")
# Fields of these sections that change no answer, or that each row records anyway.
UNRECORDED_FIELDS = ("data.dev", "eval.at_start", "eval.every_steps", "eval.examples")
UNRECORDED_FIELDS += ("eval.max_questions", "eval.draw_seed", "eval.methods")
UNRECORDED_FIELDS += ("eval.normalize",)
# {input: beginnings of the names of fields that select it for a set of questions}
SET_FIELDS = {
    "data.dev": ("data.", "eval.max_questions", "eval.draw_seed", "eval.drop_long"),
    "retrieval": ("retrieval.",),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (REQUIRED, "a run's directory, or a new one for the results"),
        "model": ("", "a Hugging Face model to evaluate in place of the run's"),
        "methods": (
            "",
            "replaces config.eval.methods; 'all' in it is every method that needs no "
            "labels, paragraphs or reflection tokens",
        ),
        **{
            name: (
                "",
                f"a file: instead of answering, write the training data of the method "
                f"{method} there; the sets are then training questions",
            )
            for name, (_, method) in LABELS.items()
        },
        "sets": ("", "names of config.sets, or values of config.data.dev, a,b,..."),
        **processes.FLAGS,
        **processes.STALL_FLAG,
    }
    config, values = parse_command_line(argv, flags=flags, default=_config_of_run)
    if values["methods"]:
        methods = ",".join(expand_all(values["methods"].split(",")))
        config = apply_overrides(config, [f"eval.methods={methods}"])
    modes = [name for name in ("methods", *LABELS) if values[name]]
    if len(modes) > 1:
        raise ValueError(f"--{' and --'.join(modes)} exclude each other")
    label_flag = _label_flag(values)
    if label_flag:
        # No method runs, and the configured methods may need files that do not exist.
        config = apply_overrides(config, ["eval.methods=direct"])
    if values["print_config"]:
        print_config(config)
        return 0
    if label_flag:
        check_output(label_flag, values[label_flag])
        if needs_samples(LABELS[label_flag][1]):
            check_sampled(config, f"--{label_flag}")
    host_flags = {n: values[n] for n in (*processes.FLAGS, *processes.STALL_FLAG)}
    connection = processes.connected(**host_flags)
    # Answers are recorded as they are written, so a signal ends this immediately.
    with preemption.handle_signals(0.0), connection:
        _evaluate(config, values)
    return 0


def _config_of_run(values: dict[str, Any]) -> ConfigDict:
    """Return the configuration of the run in --workdir."""
    if not _is_run(values["workdir"]):
        raise ValueError(f"--config=... is missing: {values['workdir']} holds no run")
    return from_json(read_config(values["workdir"]))


def _label_flag(values: dict[str, Any]) -> str:
    """Return the flag that names a file of labels to write, or "" if there is none."""
    return next((name for name in LABELS if values[name]), "")


def _is_run(workdir: str) -> bool:
    return os.path.exists(pathlib.Path(workdir) / CONFIG)


def _evaluate(config: ConfigDict, values: dict[str, Any]) -> None:
    """Evaluate the run in --workdir, or --model, on each of --sets."""
    home, model = values["workdir"], values["model"]
    label_flag = _label_flag(values)
    run_config = _config_of_run(values) if _is_run(home) else config
    bound_config, changes = _as_run(config, run_config)
    remedy = (
        f"an evaluation may only change fields of {', '.join(RECORDED_SECTIONS)}: use "
        "the run's values, or evaluate an export of it with --model in another "
        "--workdir"
    )
    processes.on_host0(
        lambda: check_workdir(home, bound_config, is_reader=True, remedy=remedy)
    )
    for name, value in changes.items():
        console.note(f"evaluated with config.{name} = {value!r}")
    shared, rows, folder = Shared(), [], pathlib.Path(home).absolute()
    sets = _sets(config, values["sets"])
    mode = label_flag or ("methods" if values["methods"] else "")
    _check_sets(config, sets, mode)
    variants = _variants(config, sets, model)
    if len(variants) > 1:  # fail now, not after hours of evaluating earlier sets
        for name, variant in variants.items():
            try:
                check_inputs(variant, home=home, shared=shared)
            except ValueError as error:
                raise ValueError(f"--sets: {name}: {error}") from None
    for name, variant in variants.items():
        is_last = name == [*variants][-1]
        setup = load_setup(
            variant,
            log=console.note,
            only_dev=True,
            home=home,
            shared=shared,
            choose_rows=with_rows_here,
        )
        # The run is bound only to its own index and questions.
        uses_run_inputs = not (model or changes or sets[name])
        inputs = setup.inputs if uses_run_inputs else {}
        processes.check_same_on_all(
            {**fields({"config": variant.to_dict()}), **setup.inputs}
        )
        all_inputs = setup.inputs | {"data.dev": questions_fingerprint(setup.dev)}
        all_inputs = _name_inputs(all_inputs, bound_config, variant)
        with (
            open_workdir(home, bound_config, inputs=inputs, is_reader=True) as workdir,
            recorded_start(
                workdir.path, "evaluate", variant, inputs=all_inputs, bound=inputs
            ),
        ):
            if model:
                stage, step, params = model, None, initial_params(setup)
            else:
                stage, step, params = trained_params(setup, workdir.path)
            setting = _setting(config, run_config, name, sets[name])
            evaluator = Evaluator(
                **evaluation_parts(setup), dataset=name, setting=setting
            )
            digest = params_fingerprint(params)
            if label_flag:
                journal = AppendLog(workdir.path, label_flag)
                rows += evaluator.label(
                    params, label_flag, digest=digest, journal=journal
                )
                write_jsonl(values[label_flag], rows)
                if is_last:
                    journal.clear()  # the file now holds everything
                continue
            rows += run_methods(
                evaluator,
                params,
                stage=stage,
                step=step,
                digest=digest,
                methods=variant.eval.methods,
                folder=workdir.path,
                keep_answers=not is_last,
            )
    if label_flag:
        console.note(f"written: {values[label_flag]}")
        return
    show_results(rows, config, has_means=True)
    console.note(f"written: {folder}/results.json and transcripts.jsonl")


def _as_run(config, run_config) -> tuple[ConfigDict, dict[str, Any]]:
    """Return the run's version of a configuration, and the changes made to it.

    Returns:
        The configuration with the sections QUERY_SECTIONS taken from the run, and
        {field: value} of the changed fields that may change an answer.
    """
    changes = _changes(config, run_config)
    bound_config = apply_overrides(config, {})
    for section in QUERY_SECTIONS:
        bound_config[section] = run_config[section]
    return bound_config, changes


def _changes(config, run_config, unrecorded=UNRECORDED_FIELDS) -> dict[str, Any]:
    """Return {field: value} of the changed fields that may change an answer."""
    return {
        name: value
        for name, _, value in diff(run_config, config)
        if name.partition(".")[0] in RECORDED_SECTIONS and name not in unrecorded
    }


def _setting(config, run_config, name, overrides) -> str:
    """Return how the evaluation of a set differs from the run's, as text.

    A later row of the same name and setting replaces a row. A name of config.sets may
    stand for another index or other questions then, so these are part of the setting,
    unless the run's own configuration defines the set like that.

    Args:
        config, run_config: configurations of the evaluation and of the run.
        name, overrides: see `_sets`.
    """
    unrecorded = UNRECORDED_FIELDS
    if name in config.sets:
        unrecorded = tuple(field for field in unrecorded if field != "data.dev")
    if name in run_config.sets:
        run_config = apply_overrides(run_config, run_config.sets[name].to_dict())
    changes = _changes(apply_overrides(config, overrides), run_config, unrecorded)
    return ", ".join(f"{field}={value}" for field, value in changes.items())


def _name_inputs(
    inputs: Mapping[str, str], bound_config: ConfigDict, variant: ConfigDict
) -> dict[str, str]:
    """Return an evaluation's inputs under the names by which run.json records them.

    The name of an input is kept if the configuration selects it as the run's does.
    Questions and indexes of other sets get other names, so that they do not count as
    changes of the run's.

    Args:
        inputs: {name, such as "data.dev": fingerprint}.
        variant: the configuration with which the set is evaluated.
    """
    changes = diff(bound_config, variant)

    def recorded_name(name):
        prefixes = SET_FIELDS.get(name, ())
        words = [f"{f}={value}" for f, _, value in changes if f.startswith(prefixes)]
        return f"{name} ({', '.join(words)})" if words else name

    return {recorded_name(name): value for name, value in inputs.items()}


def _variants(config, sets, model) -> dict[str, ConfigDict]:
    """Return {name: configuration} for each set, with --model if there is one.

    A run over the embedded world may be evaluated on another corpus: since nothing is
    trained, its training questions need not be answerable there.
    """
    model_overrides = {"model.source": model, "tokenizer.source": ""} if model else {}
    variants = {}
    for name, overrides in sets.items():
        variant = apply_overrides(apply_overrides(config, overrides), model_overrides)
        index = overrides.get("retrieval", {}).get("index")
        variants[name] = apply_overrides(
            variant, external_corpus_overrides(variant, index)
        )
    return variants


def _check_sets(config, sets, mode) -> None:
    """Refuse sets of config.sets that change what a command cannot, or its methods.

    Args:
        sets: see `_sets`.
        mode: the flag that determines the methods; "" if there is none.
    """
    for name, overrides in sets.items():
        for field, _, value in diff(config, apply_overrides(config, overrides)):
            prefix = f"config.sets.{name}.{field} = {value!r}"
            if field.partition(".")[0] not in RECORDED_SECTIONS:
                raise ValueError(
                    f"{prefix}: a set may only change fields of "
                    f"{', '.join(RECORDED_SECTIONS)}"
                )
            if field == "eval.methods" and mode:
                raise ValueError(f"{prefix} and --{mode} exclude each other")


def _sets(config: ConfigDict, names: str) -> dict[str, dict]:
    """Return {name: overrides} for each set in --sets, or {"": {}} if there is none."""
    if not names:
        return {"": {}}
    set_names = [name for word in names.split(",") if (name := word.strip())]
    if not set_names or len(set_names) > len(set(set_names)):
        raise ValueError(f"--sets={names}: expected names, each once")
    return {
        name: config.sets[name].to_dict() if name in config.sets else {"data.dev": name}
        for name in set_names
    }


if __name__ == "__main__":
    preemption.exit_process(run_command(main))

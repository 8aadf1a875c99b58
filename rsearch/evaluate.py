"""Answer held-out questions and score them: python -m rsearch.evaluate --config=..."""

import sys
from collections.abc import Sequence

from rsearch.config.recipes import (
    REQUIRED,
    apply_overrides,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.config.recipes import fingerprint as fingerprint_config
from rsearch.data.questions import questions_fingerprint
from rsearch.evaluation.evaluator import Evaluator, run_methods, show_results
from rsearch.hosts import processes
from rsearch.runtime import console
from rsearch.runtime.identity import record_start
from rsearch.runtime.workdir import check_workdir, open_workdir
from rsearch.setup.load import load_setup
from rsearch.setup.stages import evaluation_parts
from rsearch.setup.weights import initial_params, trained_params


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (REQUIRED, "a run's directory, or a new one for the results"),
        "model": ("", "a Hugging Face model to evaluate in place of the run's"),
        **processes.FLAGS,
    }
    config, values = parse_command_line(argv, flags=flags)
    if values["print_config"]:
        print_config(config)
        return 0
    changed = config
    if values["model"]:
        overrides = {"model.source": values["model"], "tokenizer.source": ""}
        changed = apply_overrides(config, overrides)
    with processes.connected(**{name: values[name] for name in processes.FLAGS}):
        _evaluate(config, changed, values)
    return 0


def _evaluate(config, changed, values):
    """Evaluate the run of `config`, or the model that has `changed` it."""
    where = values["workdir"]
    processes.on_host0(lambda: check_workdir(where, config, is_reader=True))
    setup = load_setup(changed, say=console.note, only_dev=True, home=values["workdir"])
    inputs = {} if values["model"] else setup.inputs
    processes.check_same_on_all({"config": fingerprint_config(changed), **inputs})
    with open_workdir(where, config, inputs=inputs, is_reader=True) as workdir:
        every_input = setup.inputs | {"data.dev": questions_fingerprint(setup.dev)}
        processes.on_host0(
            lambda: record_start(
                workdir.path, "evaluate", changed, inputs=every_input, bound=inputs
            )
        )
        if values["model"]:
            stage, step, params = values["model"], None, initial_params(setup)
        else:
            stage, step, params = trained_params(setup, workdir.path)
        rows = run_methods(
            Evaluator(**evaluation_parts(setup)),
            params,
            stage=stage,
            step=step,
            methods=config.eval.methods,
            folder=workdir.path,
        )
        show_results(rows, config)
        console.note(f"written: {workdir.path}/results.json and transcripts.jsonl")


if __name__ == "__main__":
    sys.exit(run_command(main))

"""Write a trained policy as a Hugging Face model.

    python -m rsearch.export --workdir=RUN --out=DIR

The newest checkpoint of the last stage that has one is written with its tokenizer to a
new directory, which transformers can load and another run can name as `model.source`.
The directory also holds a model card and rsearch.json, from which rsearch.serve and
rsearch.tool learn how the policy was trained to be queried. The configuration is the
run's.
"""

import pathlib
import sys
from collections.abc import Sequence

from rsearch.config.recipes import (
    REQUIRED,
    from_json,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.config.stage_plan import START
from rsearch.models.hf import checkpoint as huggingface
from rsearch.runtime import console
from rsearch.runtime.workdir import Workdir, check_workdir, read_config
from rsearch.serving.exported import describe_export, export_files
from rsearch.setup.load import load_setup
from rsearch.setup.weights import trained_params

DTYPES = tuple(huggingface.EXPORT_DTYPES)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (REQUIRED, "the run's directory"),
        "out": (REQUIRED, "the model's directory; created, and never overwritten"),
        "dtype": ("float32", "dtype of the weights on disk: " + ", ".join(DTYPES)),
    }
    config, values = parse_command_line(
        argv,
        flags=flags,
        default=lambda values: from_json(read_config(values["workdir"])),
    )
    if values["print_config"]:
        print_config(config)
        return 0
    if values["dtype"] not in DTYPES:
        raise ValueError(f"--dtype={values['dtype']}: must be one of {DTYPES}")
    read_config(values["workdir"])  # Refuses a directory that holds no run.
    check_workdir(values["workdir"], config, is_reader=True)
    setup = load_setup(config, log=console.note, only_dev=True, offline=True)
    with Workdir(
        values["workdir"], config, inputs=setup.inputs, is_reader=True
    ) as workdir:
        stage, step, params = trained_params(setup, workdir.path)
        if stage == START:
            raise ValueError(f"{workdir.path}: no stage has a checkpoint yet")
        description = describe_export(setup, workdir.path, stage, step)
        # Resolved, because "." and ".." have no name of their own.
        name = pathlib.Path(values["out"]).resolve().name
        huggingface.export(
            values["out"],
            params,
            setup.model.spec,
            setup.tokenizer,
            dtype=values["dtype"],
            files=export_files(description, setup.tokenizer.special_ids, name),
        )
    console.note(f"wrote stage {stage} after step {step} to {values['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

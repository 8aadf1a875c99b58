"""Write a trained policy as a Hugging Face model: python -m rsearch.export --config=...

The newest checkpoint of the last stage that has one is written with its tokenizer to a
new directory, which transformers loads and `model.source` of another run may name.
"""

import sys
from collections.abc import Sequence

from rsearch.config.recipes import (
    REQUIRED,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.config.stage_plan import START
from rsearch.models.hf import checkpoint as huggingface
from rsearch.runtime import console
from rsearch.runtime.workdir import Workdir, check_workdir, read_config
from rsearch.setup.load import load_setup
from rsearch.setup.weights import trained_params

DTYPES = tuple(huggingface.EXPORT_DTYPES)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    flags = {
        "workdir": (REQUIRED, "the run's directory"),
        "out": (REQUIRED, "the model's directory; made, and never overwritten"),
        "dtype": ("float32", "of the weights on disk: " + ", ".join(DTYPES)),
    }
    config, values = parse_command_line(argv, flags=flags)
    if values["print_config"]:
        print_config(config)
        return 0
    if values["dtype"] not in DTYPES:
        raise ValueError(f"--dtype={values['dtype']}: must be one of {DTYPES}")
    read_config(values["workdir"])  # Refuses a directory that holds no run.
    check_workdir(values["workdir"], config, is_reader=True)
    setup = load_setup(config, say=console.note, only_dev=True)
    with Workdir(
        values["workdir"], config, inputs=setup.inputs, is_reader=True
    ) as workdir:
        stage, step, params = trained_params(setup, workdir.path)
        if stage == START:
            raise ValueError(f"{workdir.path}: no stage has a checkpoint yet")
        huggingface.export(
            values["out"],
            params,
            setup.model.spec,
            setup.tokenizer,
            dtype=values["dtype"],
        )
    console.note(f"stage {stage} after step {step} is now in {values['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

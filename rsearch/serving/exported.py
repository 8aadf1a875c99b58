"""The file rsearch.json of an exported policy: how it was trained to search.

run, stage, step   the checkpoint that was exported
config             the stage's configuration: protocol, budgets, retrieval and the rest
inputs             fingerprints of what the policy searched, and of its tokenizer
max_context        the model's context length in tokens; for a model trained from random
                   weights, the length of the longest conversation
evaluation         rows of results.json of this stage, measured with its own protocol
versions           versions of the programs that wrote the file
"""

import json
import pathlib
import shlex
from collections.abc import Collection
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rsearch.config.fields import rename_fields
from rsearch.config.recipes import from_json, to_json, with_defaults
from rsearch.config.stage_plan import stage_config
from rsearch.evaluation.results import read_results
from rsearch.hosts.processes import program_versions
from rsearch.runtime.files import expand, read_json
from rsearch.runtime.markup import markdown_table
from rsearch.runtime.workdir import read_run_id
from rsearch.setup.context import Setup
from rsearch.setup.policy import policy_protocol, rollout_limits

FILE = "rsearch.json"
FORMAT = 1
RECIPE, RETRIEVAL = "recipe", "retrieval"  # differences that --accept allows
VERSIONS = ("rsearch", "python", "jax")
# Settings that a policy's turns and observations follow, unlike, say, max_concurrent.
BUDGETS = ("max_searches", "max_prompt_tokens", "max_turn_tokens", "cut_tags")
BUDGETS += ("max_observation_tokens", "forced_final_turn", "on_invalid")
SETTING = "setting"  # what a row's evaluation changed in the run's configuration
SCORES = ("dataset", "n", "em", "f1", "searches")  # columns in the model card


class Exported(NamedTuple):
    """The conditions that a policy was trained under.

    Attributes:
        config: the stage's configuration.
        retrieval: fingerprint of what the policy searched.
    """

    config: ConfigDict
    retrieval: str


def describe_export(setup: Setup, folder: pathlib.Path, stage: str, step: int) -> dict:
    """Return the contents of rsearch.json.

    Args:
        folder: the run's directory.
        stage, step: the checkpoint that is exported.
    """
    config = stage_config(setup.config, stage)
    spec, tokenizer = setup.model.spec, setup.tokenizer
    protocol = policy_protocol(config)
    _, num_tokens = rollout_limits(config, tokenizer, protocol, spec)
    rows = read_results(folder)
    versions = program_versions()
    return {
        "format": FORMAT,
        "run": read_run_id(folder),
        "stage": stage,
        "step": step,
        "config": json.loads(to_json(config)),
        "inputs": {name: setup.inputs[name] for name in (RETRIEVAL, "tokenizer")},
        # A model trained from random weights has no context limit of its own.
        "max_context": num_tokens if setup.source is None else spec.max_context,
        "stop_strings": list(protocol.stop_strings),
        "evaluation": [
            row for row in rows if (row["stage"], row["method"]) == (stage, "protocol")
        ],
        "versions": {name: versions[name] for name in VERSIONS if name in versions},
    }


def export_files(described: dict, special_ids: dict, name: str) -> dict[str, str]:
    """Return {file name: text} of an export's files except weights and tokenizer.

    Args:
        described: the result of `describe_export`.
        special_ids: the tokenizer's bos, eos and pad ids.
        name: name of the model's directory.
    """
    generation = {
        **special_ids,
        "do_sample": False,
        "max_length": described["max_context"],
        "stop_strings": described["stop_strings"],
    }
    return {
        FILE: json.dumps(described, indent=1) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "README.md": _model_card(described, name),
    }


def _model_card(contents, name):
    """Return the text of the model card: what the model is and how to query it."""
    config = contents["config"]
    retrieval, rollout = config["retrieval"], config["rollout"]
    facts = {
        "recipe": config["name"],
        "base model": config["model"]["source"] or "none: trained from random weights",
        "stage": f"{contents['stage']}, step {contents['step']}",
        "protocol": config["protocol"]["name"],
        "searches per question": rollout["max_searches"],
        "tokens per turn": rollout["max_turn_tokens"],
        "tokens per observation": rollout["max_observation_tokens"],
        "context length in tokens": contents["max_context"],
        "passages per search": retrieval["top_k"],
        "encoder": retrieval["encoder"],
    }
    lines = [
        *("---", "library_name: transformers", "---", "", f"# {name}", ""),
        "A language model that answers questions with a search engine, trained by",
        f"rsearch. Its configuration is in {FILE}.",
        *("", "| | |", "|---|---|"),
        *(f"| {fact} | {value} |" for fact, value in facts.items()),
    ]
    rows = contents["evaluation"]
    if rows:
        is_changed = any(row.get(SETTING) for row in rows)
        columns = [SCORES[0], SETTING, *SCORES[1:]] if is_changed else SCORES
        cells = [[_score(row.get(name, "")) for name in columns] for row in rows]
        lines += ["", markdown_table(columns, cells).rstrip()]
    command = f"rsearch serve --model={shlex.quote(name)}"
    command += " --index=DIR" if retrieval["index"] else ""
    lines += [
        *("", "```bash", command, "```", ""),
        "With transformers, `generate` needs `tokenizer=` for the stop strings.",
    ]
    return "\n".join(lines) + "\n"


def _score(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def read_export(model: str) -> Exported | None:
    """Return the conditions of a model's training, or None if it has no such file.

    Raises:
        ValueError: the file is damaged or has another format version.
    """
    path = expand(model) / FILE
    if not model or not path.is_file():
        return None
    try:
        body = read_json(path)
        version, config = body["format"], rename_fields(body["config"])
        retrieval = body["inputs"][RETRIEVAL]
        config["stages"], retrieval.encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path}: not what rsearch.export writes") from None
    if version != FORMAT:
        raise ValueError(f"{path}: format {version}, this program reads {FORMAT}")
    try:
        return Exported(from_json(with_defaults(config)), retrieval)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_recipe(
    model: str, exported: Exported, config: ConfigDict, may_differ: Collection[str]
) -> None:
    """Refuse a configuration that queries a policy differently from its training.

    Args:
        model: the model's directory, for the message.
        exported: the result of `read_export`.
        config: the configuration with which the policy is to be queried.
        may_differ: names of fields that need not be the same.

    Raises:
        ValueError: a field of protocol, budgets or top_k differs; the message names it.
    """
    names = ["protocol.name", *(f"protocol.{name}" for name in config.protocol)]
    names += [*(f"rollout.{name}" for name in BUDGETS), "retrieval.top_k"]
    rows: list[tuple[str, Any, Any]] = [
        (name, exported.config[name], config[name])
        for name in dict.fromkeys(names)
        if config[name] != exported.config[name] and name not in may_differ
    ]
    if rows:
        name, trained_value, value = rows[0]
        suffix = f" and {len(rows) - 1} more fields differ" if rows[1:] else ""
        raise ValueError(
            f"{model}: trained with config.{name} = {trained_value!r}, here {value!r}"
            f"{suffix}; leave out --config and --protocol, or allow this with "
            f"--accept={RECIPE}"
        )

"""Answer questions with a trained policy: question in, evidence out (RSTool).

    python -m rsearch.tool --model=DIR --index=DIR --question="Who ...?"
    python -m rsearch.tool --model=DIR --index=DIR < questions.txt > answers.jsonl

The model is a Hugging Face directory or hub id, such as `rsearch.export` writes, the
index one of `rsearch.index`. What else there is to know, prompt and budgets above all,
is in the rsearch.json of an export, or that of a recipe (--config). Questions come one
a line, as text or as {"question": "..."}; each gives one JSON object:

    {"question", "evidence", "answer", "queries", "passages", "outcome"}

`evidence` is what the policy has written down of the passages for whoever answers the
question, null where there is none; `answer` is its own, or as the recipe's
config.models.answerer words it; `passages` are all that it was shown, each with id,
title and text; `outcome` says how it ended. From Python: `SearchTool(config)`; over
HTTP: rsearch.serve, which --serve is.

An index has to be built with the encoder and the token limits that the recipe names;
for one with the encoder's own, --config.retrieval.max_query_tokens=0 and
--config.retrieval.max_passage_tokens=0.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rsearch.config.recipes import load as load_recipe
from rsearch.config.recipes import parse_command_line, print_config, run_command
from rsearch.runtime import console
from rsearch.runtime.jsonl import decode_json
from rsearch.serving import service
from rsearch.serving.exported import RECIPE, RETRIEVAL, check_recipe, read_export
from rsearch.serving.search_tool import SearchTool, tool_config

DEFAULT = "configs/r_search.py"  # of a model that does not say its recipe
POLICY_FLAGS = {
    "model": ("", "Hugging Face directory or hub id (default: the recipe's)"),
    "index": ("", "a directory that rsearch.index made (default: the recipe's)"),
    "encoder": ("", "of the index: a directory, a hub id or 'hashed' (likewise)"),
    "family": ("", "of the encoder: minilm, e5, bge, declared (likewise)"),
    "protocol": ("", "how the policy was trained to search (likewise)"),
    "accept": ("", "differences from the model's training: recipe, retrieval or both"),
    "max_concurrent": (8, "questions answered at once"),
    "max_question_chars": (2000, "a longer question is refused"),
}
FLAGS = {
    **POLICY_FLAGS,
    "question": ("", "answers this one and ends"),
    "serve": (False, "serves over HTTP, as rsearch.serve does, with these:"),
    **service.FLAGS,
}


def read_policy(
    argv: Sequence[str], flags: Mapping[str, tuple]
) -> tuple[ConfigDict, Callable[[], SearchTool], dict[str, Any]]:
    """Read a command that asks a policy.

    Args:
        argv: as in `rsearch.config.recipes.parse_command_line`.
        flags: of the command, POLICY_FLAGS among them.

    Returns:
        The configuration, a function that loads the policy, and {flag: value}.

    Raises:
        ValueError: there is no model.
    """
    read = functools.cache(read_export)  # where --config is missing, too

    def trained_recipe(values):
        """Return the configuration that --model was trained with, or else DEFAULT."""
        exported = read(values["model"])
        return load_recipe(DEFAULT) if exported is None else exported.config

    recipe, values = parse_command_line(argv, flags=flags, default=trained_recipe)
    accepted = set(filter(None, values["accept"].split(",")))
    if unknown := accepted - {RECIPE, RETRIEVAL}:
        raise ValueError(
            f"--accept={min(unknown)}: must be {RECIPE}, {RETRIEVAL} or both"
        )
    names = ("model", "index", "encoder", "family", "protocol", "max_concurrent")
    words = {word.partition("=")[0].removeprefix("--config.") for word in argv}
    chosen = {name: values[name] for name in names}
    if "rollout.max_concurrent" in words and "--max_concurrent" not in words:
        chosen["max_concurrent"] = recipe.rollout.max_concurrent
    keeps_mesh = any(word.startswith("mesh.") for word in words)
    config = tool_config(recipe, **chosen, keeps_mesh=keeps_mesh)
    if not config.model.source:
        raise ValueError("--model=... is missing, and the recipe names no model")
    exported, retrieval = read(values["model"]), None
    if exported is not None and RECIPE not in accepted:
        check_recipe(values["model"], exported, config, meant=words)
    # Who asks a service or a function in place of an index means another search.
    is_meant = words & {"retrieval.url", "retrieval.engine"}
    if exported is not None and not is_meant and RETRIEVAL not in accepted:
        retrieval = exported.retrieval

    def load():
        return SearchTool(
            config,
            max_question_chars=values["max_question_chars"],
            retrieval=retrieval,
            say=console.note,
        )

    return config, load, values


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    config, load, values = read_policy(argv, FLAGS)
    if values["serve"] and values["question"]:
        raise ValueError("--serve and --question=... do not go together: name one")
    if values["print_config"]:
        print_config(config)
    elif values["serve"]:
        service.serve_policy(load, values)
    elif values["question"]:
        _print(load()(values["question"]))
    else:
        answer_lines(load(), sys.stdin.buffer, values["max_concurrent"])
    return 0


def answer_lines(tool: SearchTool, lines: Iterable[bytes], at_once: int) -> None:
    """Print a JSON line for each question, `at_once` at a time, in order."""
    numbered = ((n, line.strip()) for n, line in enumerate(lines, 1) if line.strip())
    while batch := list(itertools.islice(numbered, at_once)):
        for result in tool([_read_line(tool, n, line) for n, line in batch]):
            _print(result)


def _read_line(tool, number, line):
    try:
        question = line.decode()
    except UnicodeDecodeError:
        raise ValueError(f"line {number}: not UTF-8") from None
    if question.startswith("{"):
        try:
            question = decode_json(line, strict=False)["question"]
        except (ValueError, KeyError):
            raise ValueError(
                f'line {number}: expected text or {{"question": "..."}}'
            ) from None
    try:
        return tool.check(question)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _print(result):
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))

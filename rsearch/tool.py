"""Answer questions with a trained policy: question in, evidence out (RSTool).

    python -m rsearch.tool --model=DIR --index=DIR --question="Who ...?"
    python -m rsearch.tool --model=DIR --index=DIR < questions.txt > answers.jsonl

The model is a Hugging Face directory, such as one written by `rsearch.export`, or a hub
id; the index is a directory written by `rsearch.index`. All other settings, above all
the prompt and the budgets, come from the export's rsearch.json or from a recipe
(--config). Questions are read one per line, as text or as {"question": "..."}, and each
gives one JSON object:

    {"question", "evidence", "answer", "queries", "passages", "outcome"}

`evidence` is what the policy extracted from the passages for whoever answers the
question, or null if there is none. `answer` is the policy's answer, reworded by the
recipe's config.models.answerer if there is one. `passages` are all passages that the
policy was shown, each with id, title and text. `outcome` says how the rollout ended.
From Python use `SearchTool(config)`; over HTTP use rsearch.serve, or --serve here.

An index must have been built with the encoder and the token limits that the recipe
names. For an index built with the encoder's own limits, set
--config.retrieval.max_query_tokens=0 and --config.retrieval.max_passage_tokens=0.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rsearch.config.recipes import (
    apply_overrides,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.config.recipes import load as load_recipe
from rsearch.runtime import console
from rsearch.runtime.jsonl import decode_json
from rsearch.serving import service
from rsearch.serving.exported import RECIPE, RETRIEVAL, check_recipe, read_export
from rsearch.serving.search_tool import SearchTool, tool_config

DEFAULT_RECIPE = "configs/r_search.py"  # for a model that does not name its recipe
NO_INDEX = {
    "retrieval.index": "",
    "retrieval.bm25_index": "",
    "retrieval.sharded": False,
    "retrieval.on_devices": False,
}
POLICY_FLAGS = {
    "model": ("", "Hugging Face directory or hub id (default: the recipe's)"),
    "index": ("", "a directory written by rsearch.index (default: the recipe's)"),
    "encoder": ("", "the index's encoder: a directory, hub id or 'hashed' (likewise)"),
    "family": ("", "the encoder's family: minilm, e5, bge, declared (likewise)"),
    "protocol": ("", "the protocol that the policy was trained with (likewise)"),
    "accept": ("", "allow differences from training in: recipe, retrieval or both"),
    "max_concurrent": (8, "questions answered concurrently"),
    "max_question_chars": (2000, "longer questions are refused", 1),
}
FLAGS = {
    **POLICY_FLAGS,
    "question": (None, "answer this question and exit"),
    "serve": (False, "serve over HTTP, as rsearch.serve does, with these flags:"),
    **service.FLAGS,
}


def read_policy(
    argv: Sequence[str], flags: Mapping[str, tuple]
) -> tuple[ConfigDict, Callable[[], SearchTool], dict[str, Any]]:
    """Read the arguments of a command that queries a policy.

    Args:
        flags: the command's flags, which include POLICY_FLAGS.

    Returns:
        The configuration, a function that loads the policy, and {flag: value}.

    Raises:
        ValueError: no model is named, an argument is wrong, or the configuration does
            not match the model's training.
    """
    read_cached = functools.cache(read_export)  # called twice if --config is missing

    def default_recipe(values):
        """Return the configuration --model was trained with, or else DEFAULT_RECIPE."""
        exported = read_cached(values["model"])
        return load_recipe(DEFAULT_RECIPE) if exported is None else exported.config

    recipe, values = parse_command_line(argv, flags=flags, default=default_recipe)
    accepted_parts = set(filter(None, values["accept"].split(",")))
    if unknown := accepted_parts - {RECIPE, RETRIEVAL}:
        raise ValueError(
            f"--accept={min(unknown)}: must be {RECIPE}, {RETRIEVAL} or both"
        )
    names = ("model", "index", "encoder", "family", "protocol", "max_concurrent")
    words = {word.partition("=")[0].removeprefix("--config.") for word in argv}
    settings = {name: values[name] for name in names}
    if "retrieval.corpus" in words:  # the index was moved without its corpus
        settings["corpus"] = recipe.retrieval.corpus
    if "rollout.max_concurrent" in words and "--max_concurrent" not in words:
        settings["max_concurrent"] = recipe.rollout.max_concurrent
    # A service or function named in place of the index is another search, by choice.
    chosen_search = [
        name
        for name in ("retrieval.url", "retrieval.engine")
        if name in words and recipe[name]
    ]
    if chosen_search and not values["index"]:
        unset = {name: value for name, value in NO_INDEX.items() if name not in words}
        recipe = apply_overrides(recipe, unset)
    keeps_mesh = any(word.startswith("mesh.") for word in words)
    config = tool_config(recipe, **settings, keeps_mesh=keeps_mesh)
    if not config.model.source:
        raise ValueError("--model=... is missing, and the recipe names no model")
    exported, retrieval = read_cached(values["model"]), None
    if exported is not None and RECIPE not in accepted_parts:
        check_recipe(values["model"], exported, config, may_differ=words)
    if exported is not None and not chosen_search and RETRIEVAL not in accepted_parts:
        retrieval = exported.retrieval

    def load():
        return SearchTool(
            config,
            max_question_chars=values["max_question_chars"],
            retrieval=retrieval,
            log=console.note,
        )

    return config, load, values


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    config, load, values = read_policy(argv, FLAGS)
    question = values["question"]
    if values["serve"] and question is not None:
        raise ValueError("--serve and --question=... exclude each other: name one")
    if question is not None and not question.strip():
        raise ValueError("--question is empty: --question=...")
    for name, (default, *_) in service.FLAGS.items():
        if not values["serve"] and values[name] != default:
            raise ValueError(f"--{name}={values[name]} has no effect without --serve")
    if values["print_config"]:
        print_config(config)
    elif values["serve"]:
        service.serve_policy(load, values)
    elif question is not None:
        _print(load()(question))
    else:
        # A person waits for an answer before the next question.
        at_once = 1 if sys.stdin.isatty() else config.rollout.max_concurrent
        answer_lines(load(), sys.stdin.buffer, at_once)
    return 0


def answer_lines(tool: SearchTool, lines: Iterable[bytes], at_once: int) -> None:
    """Answer questions in order, `at_once` at a time; print a JSON line for each."""
    numbered = ((n, line.strip()) for n, line in enumerate(lines, 1) if line.strip())
    while batch := list(itertools.islice(numbered, at_once)):
        for result in tool([_read_line(tool, n, line) for n, line in batch]):
            _print(result)


def _read_line(tool, number, line):
    try:
        question = line.decode("utf-8-sig")  # a file from Windows begins with a mark
    except UnicodeDecodeError:
        raise ValueError(f"line {number}: not UTF-8") from None
    if question.startswith("{"):
        try:
            question = decode_json(question.encode(), strict=False)["question"]
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

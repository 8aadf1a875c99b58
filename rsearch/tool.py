"""Answer questions with a trained policy: question in, evidence out (RSTool).

    python -m rsearch.tool --model=DIR --index=DIR --question="Who ...?"
    python -m rsearch.tool --model=DIR --index=DIR < questions.txt > answers.jsonl
    python -m rsearch.tool --model=DIR --index=DIR --serve --port=8000
    curl -H "Content-Type: application/json" -d '{"question": "Who ...?"}' \\
        http://127.0.0.1:8000/search

The model is a Hugging Face directory or hub id, such as `rsearch.export` writes, the
index one of `rsearch.index`. What else there is to know, prompt and budgets above all,
is that of a recipe. Questions come one a line, as text or as {"question": "..."}; each
gives one JSON object:

    {"question", "evidence", "answer", "queries", "passages", "outcome"}

`evidence` is what the policy has written down of the passages for whoever answers the
question, null where there is none; `answer` is its own, or as the recipe's
config.models.answerer words it; `passages` are all that it was shown, each with id,
title and text; `outcome` says how it ended. From Python: `SearchTool(config)`.

An index has to be built with the encoder and the token limits that the recipe names;
for one with the encoder's own, --config.retrieval.max_query_tokens=0 and
--config.retrieval.max_passage_tokens=0.
"""

import copy
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from rsearch.config.recipes import (
    apply_overrides,
    parse_command_line,
    print_config,
    run_command,
)
from rsearch.config.stage_plan import stage_config
from rsearch.evaluation.answers import evidence_of, rephrase_answers
from rsearch.protocols.tagged import whole_characters
from rsearch.runtime import console
from rsearch.runtime.calls import read_api_key
from rsearch.runtime.jsonl import decode_json
from rsearch.runtime.openapi import TEXT, list_of, record, with_description
from rsearch.runtime.server import JsonServer, RefusedError
from rsearch.setup.agents import load_agent
from rsearch.setup.load import load_setup
from rsearch.setup.rollouts import make_host, make_rollouts
from rsearch.setup.weights import initial_params
from rsearch.types import Group, Outcome, Question, Rollout, SearchFn

RECIPE = "configs/r_search.py"
MAX_QUESTIONS = 64  # in one request
OR_NULL = {"type": ["string", "null"]}
RESULT = record(
    {
        "question": TEXT,
        "evidence": OR_NULL,
        "answer": OR_NULL,
        "queries": list_of(TEXT),
        "passages": list_of(record({"id": TEXT, "title": TEXT, "text": TEXT})),
        "outcome": {"enum": [outcome.value for outcome in Outcome]},
    }
)
FLAGS = {
    "model": ("", "Hugging Face directory or hub id (default: the recipe's)"),
    "index": ("", "a directory that rsearch.index made (default: the recipe's)"),
    "encoder": ("", "of the index: a directory, a hub id or 'hashed' (likewise)"),
    "family": ("", "of the encoder: minilm, e5, bge, declared (likewise)"),
    "protocol": ("", "how the policy was trained to search (likewise)"),
    "max_concurrent": (8, "questions answered at once"),
    "max_question_chars": (2000, "a longer question is refused"),
    "question": ("", "answers this one and ends"),
    "serve": (False, "serves POST /search over HTTP; GET /openapi.json says how"),
    "host": ("127.0.0.1", "to listen at; others than this machine need a token"),
    "port": (8000, "to listen at; 0 takes a free one"),
    "token_env": ("", "environment variable with the token that requests must carry"),
    "max_body_bytes": (1 << 18, "a longer request is refused"),
    "max_reply_bytes": (1 << 26, "a longer reply is refused"),
}


class SearchTool:
    """A policy with its search engine; safe to call from several threads.

    Calls that come while others run are answered together, in the next batch.

    Args:
        config: of the policy; see `tool_config`.
        max_question_chars: longer questions are refused.
        say: called with a line on each part that takes a while to load.
        search: a SearchFn in place of the configuration's engine.
        load_params: (setup) -> the policy's parameters.
    """

    def __init__(
        self,
        config: ConfigDict,
        *,
        max_question_chars: int = 2000,
        say: Callable[[str], None] = lambda text: None,
        search: SearchFn | None = None,
        load_params: Callable = initial_params,
    ):
        setup = load_setup(config, say=say, only_policy=True, search=search)
        host = make_host(setup)
        self._engine = make_rollouts(
            setup, host, temperature=0.0, top_p=1.0, group_size=1
        )
        self._params = self._engine.place_params(load_params(setup))
        self._answerer = load_agent(config, "answerer", setup.mesh)
        self._answer_from = config.eval.answer_from
        self._limits, self._max_chars = setup.limits, max_question_chars
        self._running = threading.Lock()
        self._waiting_lock, self._waiting = threading.Lock(), []

    def __call__(self, question: str | list[str]) -> dict | list[dict]:
        """Return what the policy answers: a dict for a question, a list for a list.

        Raises:
            ValueError: a question that is not text, is empty or too long.
        """
        if isinstance(question, str):
            return result_of(self._answer([self.check(question)])[0])
        return [result_of(g) for g in self._answer([self.check(q) for q in question])]

    def rollout(self, question: str | list[str]) -> Rollout | list[Rollout]:
        """Return the conversation that answers a question, or those of a list.

        Its answer is the same as of a call; its segments are the text in order, each
        with its source, token ids and log-probabilities.

        Raises:
            ValueError: a question that is not text, is empty or too long.
        """
        if isinstance(question, str):
            return self.rollout([question])[0]
        groups = self._answer([self.check(q) for q in question])
        return [rollout for group in groups for rollout in group.rollouts]

    def check(self, question: Any) -> str:
        """Return the question as it will be asked.

        Raises:
            ValueError: it is not text, is empty or too long.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"a question must be text and not empty, got {question!r}")
        if len(question) > self._max_chars:
            raise ValueError(
                f"a question may have {self._max_chars} characters, this one has "
                f"{len(question)}"
            )
        question = whole_characters(question)
        size = len(self._engine.prompt(Question("", question, ())))
        if size > self._limits.max_prompt_tokens:
            raise ValueError(
                f"a question's prompt may have {self._limits.max_prompt_tokens} "
                f"tokens, this one's has {size}"
            )
        return question

    def _answer(self, questions):
        """Return groups in order; whoever runs next takes along all that wait."""
        if not questions:
            return []
        call = _Call(questions)
        with self._waiting_lock:
            self._waiting.append(call)
        with self._running:
            if call.results is None:
                with self._waiting_lock:
                    calls, self._waiting = self._waiting, []
                self._run(calls)
        if isinstance(call.results, BaseException):
            raise call.results
        return call.results

    def _run(self, calls):
        questions = [q for call in calls for q in call.questions]
        try:
            groups = self._engine(
                self._params,
                [Question(str(i), text, ()) for i, text in enumerate(questions)],
                jax.random.key(0),  # Greedy: never drawn from.
            )
            if self._answerer is not None:
                groups = rephrase_answers(
                    groups, self._answerer, answer_from=self._answer_from
                )
            groups = iter(groups)
            for call in calls:
                call.results = list(itertools.islice(groups, len(call.questions)))
        except BaseException as error:  # Control-C too: nobody else can run these.
            for call in calls:
                call.results = error


class _Call:
    """Questions of one caller, and what came of them: groups, or an exception."""

    def __init__(self, questions):
        self.questions, self.results = questions, None


def result_of(group: Group) -> dict:
    """Return what a caller is told of a question's only rollout, as JSON values."""
    (rollout,) = group.rollouts
    # By their contents too: a writer's observations have no ids of their own.
    shown = {
        (passage.id, passage.contents): {
            "id": passage.id,
            "title": passage.title,
            "text": passage.text,
        }
        for passage in rollout.passages
    }
    return {
        "question": group.question.text,
        "evidence": evidence_of(rollout),
        "answer": rollout.answer,
        "queries": [q for use in rollout.searches for q in use.call.arguments],
        "passages": list(shown.values()),
        "outcome": rollout.outcome.value,
    }


def tool_config(
    recipe: ConfigDict,
    *,
    model: str = "",
    index: str = "",
    encoder: str = "",
    family: str = "",
    protocol: str = "",
    max_concurrent: int = 8,
    keeps_mesh: bool = False,
) -> ConfigDict:
    """Return a recipe's configuration with this model and index.

    Args:
        recipe: any, which is left as it is; what it says of its last stage counts.
        model, index, encoder, family, protocol: see FLAGS; "" keeps the recipe's.
        max_concurrent: questions answered at once.
        keeps_mesh: whether devices are used as the recipe says, whose mesh is that of
            the machines that trained it; else each of them holds the whole model.
    """
    changes = {
        # Nothing is trained: no rule of the training stages applies.
        "stages": ("curate",),
        "rollout.group_size": 1,
        "rollout.max_concurrent": max_concurrent,
    }
    if not keeps_mesh:
        changes |= {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
    if model:
        changes |= {"model.source": model, "tokenizer.source": ""}
    if index:
        changes |= {"retrieval.index": index, "retrieval.corpus": ""}
        changes |= {"data.train": "", "data.dev": ""}
    changes |= {"retrieval.encoder": encoder} if encoder else {}
    changes |= {"retrieval.family": family} if family else {}
    config = apply_overrides(stage_config(recipe, recipe.stages[-1]), changes)
    if protocol and protocol != config.protocol.name:
        # The recipe's words are those of its own protocol.
        config = copy.deepcopy(config)
        config.protocol.name = protocol
        for name in ("instruction", "system", "invalid_message"):
            config.protocol[name] = None
    return config


def routes_of(tool: SearchTool) -> dict:
    """Return the routes of the HTTP service."""

    def search(body):
        names = body.keys() & {"question", "questions"}
        if len(names) != 1 or len(body) != 1:
            raise RefusedError(400, 'the body must be {"question"} or {"questions"}')
        if "question" in body:
            return tool(_checked(tool, body["question"]))
        questions = body["questions"]
        if not isinstance(questions, list) or len(questions) > MAX_QUESTIONS:
            reason = f'"questions" must be a list of at most {MAX_QUESTIONS}'
            raise RefusedError(400, reason)
        return {"results": tool([_checked(tool, q) for q in questions])}

    question = {**TEXT, "minLength": 1}
    bodies = (
        {"question": question},
        {"questions": list_of(question, maxItems=MAX_QUESTIONS)},
    )
    body = {"oneOf": [record(fields, additionalProperties=False) for fields in bodies]}
    reply = {"anyOf": [RESULT, record({"results": list_of(RESULT)})]}
    described = {
        ("POST", "/search"): ("What the policy finds and answers.", body, reply)
    }
    return with_description({("POST", "/search"): search}, "rsearch.tool", described)


def _checked(tool, question):
    try:
        return tool.check(question)
    except ValueError as error:
        raise RefusedError(422, str(error)) from None


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` as in `rsearch.config.recipes.parse_command_line`."""
    argv = list(argv)
    if not any(word.split("=")[0] == "--config" for word in argv):
        argv = [f"--config={RECIPE}", *argv]
    recipe, values = parse_command_line(argv, flags=FLAGS)
    if values["serve"] and values["question"]:
        raise ValueError("--serve and --question=... do not go together: name one")
    names = ("model", "index", "encoder", "family", "protocol", "max_concurrent")
    keeps_mesh = any(word.startswith("--config.mesh.") for word in argv)
    flags = {word.partition("=")[0] for word in argv}
    chosen = {name: values[name] for name in names}
    if "--config.rollout.max_concurrent" in flags and "--max_concurrent" not in flags:
        chosen["max_concurrent"] = recipe.rollout.max_concurrent
    config = tool_config(recipe, **chosen, keeps_mesh=keeps_mesh)
    if not config.model.source:
        raise ValueError("--model=... is missing, and the recipe names no model")
    if values["print_config"]:
        print_config(config)
        return 0
    token = read_api_key(values["token_env"]) if values["token_env"] else ""
    server = None
    if values["serve"]:
        # Before anything is loaded: a wrong host or a taken port shows at once.
        server = JsonServer(
            values["host"],
            values["port"],
            {},
            token=token,
            max_body_bytes=values["max_body_bytes"],
            max_reply_bytes=values["max_reply_bytes"],
        )
    tool = SearchTool(
        config, max_question_chars=values["max_question_chars"], say=console.note
    )
    if server is not None:
        server.routes = routes_of(tool)
        host, port = server.server_address[:2]
        console.note(f"POST http://{host}:{port}/search, until Control-C")
        server.serve()
        console.note("ended")
    elif values["question"]:
        _print(tool(values["question"]))
    else:
        answer_lines(tool, sys.stdin.buffer, values["max_concurrent"])
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

"""Answers to held-out questions, scored.

Rollouts are greedy. Methods, all on the same weights: `protocol`, as the policy was
trained; `direct`, the question alone; `rag`, the question under the passages of one
search with it. And of config.reader, another model: `evidence`, the question under what
the policy has written down as evidence (R-Search's Figure 2); `reader_direct` and
`reader_rag`, as above.
"""

import dataclasses
import functools
import pathlib
import time
import weakref

import jax

from rsearch import setup as build
from rsearch.config.rules import EVIDENCE, READER_METHODS, READER_RAG
from rsearch.config.stage_plan import kind_of, stage_configs
from rsearch.data.demonstrations import PROTOCOL
from rsearch.data.questions import fingerprint
from rsearch.evaluation.answers import (
    read_alone,
    read_evidence,
    reader_messages,
    worded,
)
from rsearch.evaluation.scoring import summarise
from rsearch.hosts import processes
from rsearch.rollout.records import share_groups
from rsearch.runtime import checkpoint, console, files
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.runtime.workdir import write_json
from rsearch.setup.beginnings import CHECKPOINTS
from rsearch.text.suspicion import suspects

START = "start"  # the stage before all stages, in results
COLUMNS = ("stage", "method", "dataset", "n", "em", "em_95", "f1", "cover_em")
COLUMNS += ("searches", "policy_tokens", "answered", "malformed", "truncated")
COLUMNS += ("tool_error", "skipped", "seconds")


class Evaluator:
    """Compiled rollouts for evaluation, one set for each method; reused by stages.

    Attributes:
        dataset: the name of the questions in results.json.
    """

    def __init__(self, setup: build.Setup):
        self._setup = setup
        limit = setup.config.eval.max_questions
        self._questions = setup.dev
        self.dataset = setup.config.data.dev + (f"[:{limit}]" if limit else "")
        self._engines, self._agents = {}, {}
        # What the policy with these parameters did, who are not kept by it.
        self._last = None

    def is_current(self, row: dict, *, stage: str, step: int | None) -> bool:
        """Whether an earlier row of results.json is what would be measured now."""
        now = {
            "stage": stage,
            "step": step,
            "dataset": self.dataset,
            "normalize": self._setup.config.eval.normalize,
            "questions": fingerprint(self._questions),
        }
        same_model = row.get("asks", "") == self._asks(row["method"])
        return same_model and all(row.get(name) == x for name, x in now.items())

    def __call__(self, params, method: str) -> tuple[dict, list]:
        """Scores of greedy rollouts on the held-out questions.

        Args:
            params: of the policy.
            method: one of config.eval.methods.

        Returns:
            A row for results.json (fractions from 0 to 1, tokens and searches as means
            over rollouts, outcomes as counts; `questions` is their fingerprint,
            `skipped` counts those whose prompts are too long for the protocol, which no
            method is asked; `asks` is the source of the model beside the policy that
            gave the answers, "" without one), and a group of one rollout a question.
        """
        start = time.monotonic()
        ask = functools.partial(self._groups, params, method)
        groups = share_groups(ask, self._questions)
        normalize = self._setup.config.eval.normalize
        row = summarise(groups, normalize=normalize)
        row["normalize"] = normalize
        row["questions"] = fingerprint(self._questions)
        row["skipped"] = self._setup.num_long
        row["asks"] = self._asks(method)
        row["seconds"] = time.monotonic() - start
        return {"method": method, "dataset": self.dataset, **row}, groups

    def _asks(self, method) -> str:
        """The source of the model beside the policy that gives a method's answers."""
        c = self._setup.config
        if method in READER_METHODS:
            return c.reader.source
        return c.answerer.source if method == PROTOCOL else ""

    def _groups(self, params, method, questions) -> list:
        """A group of one rollout for each of these questions."""
        setup = self._setup
        if method in READER_METHODS:
            reader = self._agent("reader")
            if method != EVIDENCE:
                with_passages = method == READER_RAG
                return read_alone(setup, questions, reader, with_passages)
            groups = self._roll_out(params, PROTOCOL, questions)
            asking = functools.partial(reader_messages, setup)
            return read_evidence(groups, reader, without=asking)
        groups = self._roll_out(params, method, questions)
        if method == PROTOCOL and setup.config.answerer.source:
            answer, how = self._agent("answerer"), setup.config.eval.answer_from
            return worded(groups, answer, answer_from=how)
        return groups

    def _agent(self, name):
        """A model beside the policy, loaded when it is first asked."""
        setup = self._setup
        if name not in self._agents:
            self._agents[name] = build.load_agent(
                setup.config, name, setup.mesh, workdir=setup.home
            )
        return self._agents[name]

    def _roll_out(self, params, method, questions) -> list:
        """What the policy does; the protocol's rollouts also serve the reader."""
        first = jax.tree.leaves(params)[0]
        if self._last is not None and method == PROTOCOL and self._last[0]() is first:
            return self._last[1]
        if method not in self._engines:
            self._engines[method] = self._engine(method)
        engine = self._engines[method]
        shown = time.monotonic()

        def on_done(done):
            nonlocal shown
            if time.monotonic() - shown > console.SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                console.note(f"evaluate {method}: {done}/{len(questions)} questions")

        key = jax.random.key(self._setup.config.seed)  # Greedy: never drawn from.
        groups = engine(engine.place_params(params), questions, key, on_done=on_done)
        if method == PROTOCOL and EVIDENCE in self._setup.config.eval.methods:
            self._last = weakref.ref(first), groups
        return groups

    def _engine(self, method):
        """Compiled rollouts of one method; all methods get the same questions."""
        setup, messages = self._setup, None
        if method == PROTOCOL:
            host = build.make_host(setup)
        else:
            host, chats = build.make_baseline(setup, method, self._questions)

            def messages(question):
                return chats[question.id]

        return build.make_rollouts(
            setup, host, temperature=0.0, top_p=1.0, group_size=1, messages=messages
        )


def transcripts(groups, row) -> list[dict]:
    """One JSON object a rollout, for transcripts.jsonl."""
    key = {name: row[name] for name in ("stage", "method", "dataset")}
    return [
        {
            **key,
            "id": group.question.id,
            "question": group.question.text,
            "golden_answers": list(group.question.golden_answers),
            "prediction": rollout.answer,
            "outcome": rollout.outcome.value,
            "queries": [q for s in rollout.searches for q in s.queries],
            "suspicious": sorted({p.id for p in rollout.found if suspects(p)}),
            "segments": [
                {"source": s.source.name.lower(), "text": s.text}
                for s in rollout.segments
            ],
        }
        for group in groups
        for rollout in group.rollouts
    ]


def record(folder: pathlib.Path, row: dict, told: list[dict]) -> None:
    """Puts a row into results.json and its `transcripts` into transcripts.jsonl.

    An earlier row of the same stage, method and dataset is replaced.
    """

    def is_other(old):
        return any(old[n] != row[n] for n in ("stage", "method", "dataset"))

    path = folder / "transcripts.jsonl"
    kept = [old for old in read_jsonl(path) if is_other(old)] if path.exists() else []
    write_jsonl(path, kept + told)
    rows = [old for old in read_results(folder) if is_other(old)]
    write_json(folder / "results.json", [*rows, row])


def read_results(folder: pathlib.Path) -> list[dict]:
    """The rows of a run's results.json, in the order they were made; [] without one."""
    path = folder / "results.json"
    if not path.exists():
        return []
    rows = files.read_json(path)
    names = {"stage", "method", "dataset"}
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and names <= row.keys() for row in rows
    ):
        raise ValueError(f"{path}: not the results of a run; remove it")
    return rows


def show(rows, config) -> None:
    """The table of results, percent where it is a score, and one by kind."""
    title = f"{config.name}: percent, answers normalised as {config.eval.normalize}"

    def cell(row, name):
        if name == "em_95":
            low, high = row["em_95"]
            return f"{100 * low:.1f} - {100 * high:.1f}"
        if name in ("em", "f1", "cover_em"):
            return f"{100 * row[name]:.1f}"
        if name == "dataset":
            return row[name].rpartition("/")[2]
        return row[name]

    failed = ("judge_error",) if any(row["judge_error"] for row in rows) else ()
    columns = COLUMNS[:-2] + failed + COLUMNS[-2:]
    cells = [[cell(row, name) for name in columns] for row in rows]
    console.table(title, columns, cells)
    _show_kinds(rows)


def _show_kinds(rows):
    """Exact match and searches for each kind of question, one column a kind."""
    split = [{**row.get("by_kind", {}), **row.get("by_known", {})} for row in rows]
    kinds = sorted({kind for parts in split for kind in parts})
    if len(kinds) < 2:
        return

    def cell(part):
        if part is None:
            return "-"
        return f"{100 * part['em']:.0f} / {part['searches']:.2f}"

    cells = [
        [row["stage"], row["method"], *(cell(parts.get(kind)) for kind in kinds)]
        for row, parts in zip(rows, split, strict=True)
    ]
    title = "percent EM / searches, by kind"
    console.table(title, ("stage", "method", *kinds), cells)


def run_methods(evaluator, params, *, stage, step, methods, folder) -> list[dict]:
    """Evaluates each method, shows its row and records it; returns the rows.

    Args:
        evaluator: an Evaluator.
        params: of the policy.
        stage, step: that these come from; None for the step of a foreign model.
        methods: see `Evaluator`.
        folder: of results.json.
    """
    rows = []
    for method in methods:
        row, groups = evaluator(params, method)
        row = {"stage": stage, "step": step, **row}
        told = transcripts(groups, row)
        if processes.is_host0():
            record(folder, row, told)
        console.note(
            f"{stage}: {method} EM {100 * row['em']:.1f} on {row['n']} questions, "
            f"{row['searches']:.2f} searches, {row['seconds']:.1f} s"
        )
        suspicious = {name for one in told for name in one["suspicious"]}
        if suspicious:
            console.note(
                f"{stage}: {method}: {len(suspicious)} passages hold tags, control "
                f"words or orders, such as {min(suspicious)!r}: see 'suspicious' in "
                "transcripts.jsonl"
            )
        rows.append(row)
    return rows


def trained_params(setup, folder: pathlib.Path):
    """(stage, step, parameters) of the last stage that has a checkpoint: its newest.

    Adapters are merged. Without any checkpoint, ("start", 0, the parameters before
    training).
    """
    source = setup.config.model.source
    initial = functools.partial(build.initial_params, setup)
    for stage, own in reversed(stage_configs(setup.config)):
        is_policy = own.trains == "policy" and own.model.source == source
        if kind_of(stage) == "curate" or not is_policy:
            continue
        staged = dataclasses.replace(setup, config=own)
        # Not the moments, which are twice as much, or a value model.
        like = {"params": build.state_shapes(staged, kind_of(stage)).params}
        own_folder = folder / stage / CHECKPOINTS
        found = checkpoint.newest_good(own_folder, like, is_part=True)
        if found is not None:
            step, tree, _ = found
            console.note(f"policy: stage {stage} after step {step}")
            params = tree["params"]
            if own.model.lora_rank:
                given = params, setup.model.spec, setup.mesh, initial
                params = build.merged_weights(folder, stage, *given)
            return stage, step, params
    return START, 0, initial()

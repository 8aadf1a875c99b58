"""Answer held-out questions with each method, and score the answers.

Rollouts are greedy, or sampled with several seeds, see config.eval.temperature. The
policy is asked by `protocol`, as in its training, and by the programs of
`rsearch.methods`, which ask config.models.subject instead if there is one. Three
methods ask another model, config.models.reader: `evidence` shows it the question below
the policy's written evidence (R-Search's Figure 2), `reader_direct` the question only,
and `reader_rag` the question below the passages of one search for it.
"""

import functools
import json
import pathlib
import reprlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from rsearch.config.fields import fingerprint
from rsearch.config.stage_plan import URLS, kinds
from rsearch.data.demonstrations import PROTOCOL
from rsearch.data.questions import questions_fingerprint
from rsearch.evaluation.answers import (
    answer_without_policy,
    read_evidence,
    rephrase_answers,
)
from rsearch.evaluation.comparability import (
    JUDGED_BY,
    MADE_BY,
    answers_fingerprint,
    is_same_manifest,
    judge_manifest,
    row_manifest,
)
from rsearch.evaluation.judge import (
    Prediction,
    Verdict,
    judge_answers,
    summarize_verdicts,
)
from rsearch.evaluation.predictions import run_key
from rsearch.evaluation.results import (
    JUDGE_NUMBERS,
    read_results,
    record_results,
    transcripts,
)
from rsearch.evaluation.scoring import score_groups, scores_of_groups
from rsearch.hosts import processes
from rsearch.methods.base import Kit
from rsearch.methods.names import READER_METHODS
from rsearch.methods.reading import direct_messages
from rsearch.methods.runner import Model, run_program
from rsearch.methods.table import LABELS, make_program, method_settings
from rsearch.rollout.health import NEEDLESS
from rsearch.rollout.records import RolloutCache, share_groups
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.runtime import console
from rsearch.runtime.compiles import compile_seconds
from rsearch.runtime.identity import num_starts
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_replies
from rsearch.types import (
    GenerateFn,
    Group,
    Messages,
    Outcome,
    Params,
    Question,
    Rollout,
    SearchFn,
)

EVIDENCE = "evidence"
READER_RAG = "reader_rag"
JOURNAL = "answers"  # stores answers until their row is written
JUDGE = "eval_judge"
# Judge calls per connection in one batch. Replies are recorded after each batch: a stop
# loses the batch in flight, and each batch waits for its slowest call.
JUDGE_BATCH = 16


class _TimedCache(RolloutCache):
    """Finished rollouts, and the time that all starts have spent on them.

    Attributes:
        earlier_seconds: [2] seconds without compiling and seconds of compiling that
            earlier starts spent, as far as they finished rollouts.
    """

    def __init__(self, journal: AppendLog, key_prefix: list):
        super().__init__(journal, key_prefix)
        self._key = [*key_prefix, "seconds"]
        self.earlier_seconds = np.array(json.loads(journal.get(self._key) or "[0, 0]"))
        self._stopwatch = _stopwatch()

    def put(self, question: Question, sample: int, rollout: Rollout) -> None:
        """Store a finished rollout and the time so far; a failed one is made again."""
        if rollout.outcome.is_signal:
            super().put(question, sample, rollout)
        seconds = self.earlier_seconds + self._stopwatch()
        self._journal.add(self._key, json.dumps(seconds.tolist()).encode())


class Evaluator:
    """An evaluation on held-out questions; stages reuse its compiled rollouts.

    Attributes:
        dataset: name of the questions in results.json.
    """

    def __init__(
        self,
        config: ConfigDict,
        questions: Sequence[Question],
        *,
        too_long: Sequence[Question],
        search: SearchFn,
        make_engine: Callable[[], RolloutEngine],
        make_model: Callable[[], Model],
        kit: Kit,
        made_from: Callable[[], list],
        load_model: Callable[[str], GenerateFn],
        health: Callable[[Sequence[Group]], dict],
        score: Callable | None,
        inputs: Mapping[str, str],
        sampling: Mapping[str, Any],
        dataset: str = "",
        setting: str = "",
    ):
        """Prepare an evaluation; nothing is compiled or loaded until it is needed.

        Args:
            too_long: questions whose prompts do not fit the policy's protocol, whether
                they are among `questions` or were left out.
            search: the run's search, for readers and methods.
            make_engine: makes the engine that rolls out the policy's protocol.
            make_model: makes the model that methods ask: the policy without parameters,
                or config.models.subject.
            kit: budgets and functions of the methods.
            made_from: returns JSON values that, with the configuration and the
                parameters, determine an answer.
            load_model: loads a model other than the policy: "reader", "answerer" or
                "eval_judge".
            health: measures how groups search, see `rsearch.rollout.health`.
            score: groups -> ([Q, G] rewards, {term: [Q, G]}, groups), with the rewards
                of the policy's training; None if they need a judge.
            inputs, sampling: see `row_manifest`.
            dataset: name of the questions in results.json; "" means that of
                config.data.dev.
            setting: how the evaluation differs from the run's configuration, as text.
        """
        self._config = config
        self._questions = questions
        self._too_long = {question.id for question in too_long}
        self._num_skipped = len(self._too_long - {q.id for q in questions})
        self._search = search
        limit, draw_seed = config.eval.max_questions, config.eval.draw_seed
        draw = "" if draw_seed is None else f" by seed {draw_seed}"
        suffix = f"[:{limit}{draw}]" if limit else ""
        self.dataset = (dataset or config.data.dev) + suffix
        self._setting = setting
        self._make_engine = functools.cache(make_engine)
        self._make_model = functools.cache(make_model)
        self._kit, self._made_from = kit, made_from
        self._load_model = functools.cache(load_model)
        self._health, self._score = health, score
        # Without sampling, a question has one rollout, for which nothing is drawn.
        self._samples = sampling.get("samples", 0)
        self._seeds = sampling.get("seeds", [config.seed])
        self._inputs, self._sampling = inputs, sampling
        self._judged_by = judge_manifest(config, inputs)
        # (weak reference to a leaf of the parameters, {seed: protocol rollouts}): the
        # method `evidence` reuses the rollouts that the protocol's row comes from.
        self._last = None

    def is_current(
        self, row: dict, *, stage: str, step: int | None, digest: str
    ) -> bool:
        """Return whether a row of results.json is still valid for this evaluation.

        Args:
            stage, step: where the policy comes from.
        """
        current_fields = {
            "stage": stage,
            "step": step,
            "dataset": self.dataset,
            "setting": self._setting,
            "normalize": self._config.eval.normalize,
            "questions": questions_fingerprint(self._questions),
        }
        row = {"setting": "", **row}  # earlier versions wrote none
        judged_by, method = row.get(JUDGED_BY, {}), row["method"]
        return (
            all(row.get(name) == value for name, value in current_fields.items())
            and row.get("asks", "") == self._answering_source(method)
            and is_same_manifest(row.get(MADE_BY, {}), self._manifest(method, digest))
            and bool(judged_by) == bool(self._judged_by)
            and is_same_manifest(judged_by, self._judged_by)
        )

    def __call__(
        self,
        params: Params,
        method: str,
        *,
        digest: str = "",
        journal: AppendLog | None = None,
    ) -> tuple[dict, list[Group]]:
        """Answer the held-out questions with a method, and score the answers.

        Args:
            digest: `params_fingerprint` of the parameters; "" between the steps of a
                stage, where scores are not recorded in results.json.
            journal: stores the answers so far, so that an evaluation that was killed
                continues from it; needs a digest.

        Returns:
            A row for results.json, and a group for each question: its one rollout, or
            its samples with the first seed, then those with the second, and so on. In
            the row, scores are fractions from 0 to 1, tokens and searches are means
            over rollouts, and outcomes are counts. `questions` is the questions'
            fingerprint, and `skipped` counts those that config.eval.drop_long left
            out. `asks` is the source of the model that answered in place of the policy,
            "" without one. The numbers of `search_health` are included. `made_by` is
            the method's `row_manifest`. `seconds` exclude `compile_seconds`, in which
            programs were traced and compiled; both include the time until a rollout
            that was taken from the journal ended.
        """
        stopwatch, earlier_seconds = _stopwatch(), np.zeros(2)
        groups_by_seed = []
        for seed in self._seeds:
            seed_key = [seed] if self._samples else []
            cache = self._cache(journal, digest, method, seed_key)
            if cache is not None:
                earlier_seconds += cache.earlier_seconds
            answer = functools.partial(self._answer, params, method, seed, cache)
            groups_by_seed.append(share_groups(answer, self._questions))
        groups = [
            Group(
                seed_groups[0].question,
                tuple(r for group in seed_groups for r in group.rollouts),
            )
            for seed_groups in zip(*groups_by_seed, strict=True)
        ]
        normalize = self._config.eval.normalize
        scores = score_groups(groups, normalize=normalize, num_seeds=len(self._seeds))
        row = scores | self._health(groups)
        row[NEEDLESS] = None  # known once `direct` has a row, see record_results
        row["normalize"] = normalize
        row["questions"] = questions_fingerprint(self._questions)
        row["skipped"] = self._num_skipped
        row["asks"] = self._answering_source(method)
        row[MADE_BY] = self._manifest(method, digest)
        seconds, seconds_compiling = (earlier_seconds + stopwatch()).tolist()
        row["seconds"], row["compile_seconds"] = seconds, seconds_compiling
        names = {"method": method, "dataset": self.dataset, "setting": self._setting}
        return {**names, **row}, groups

    def _manifest(self, method: str, digest: str) -> dict:
        """Return the `row_manifest` of a method's row."""
        return row_manifest(
            self._config,
            method,
            inputs=self._inputs,
            sampling=self._sampling,
            settings=method_settings(method),
            digest=digest,
        )

    def label(
        self, params: Params, name: str, *, digest: str, journal: AppendLog
    ) -> list[dict]:
        """Return the labels that a method learns from.

        All hosts call this together. A question that could not be labelled is left out.

        Args:
            params: parameters of the policy. It may score a golden answer, but is never
                shown one.
            name: key of LABELS.
            journal: stores the labels so far.
        """
        golden = {q.id: q.golden_answers for q in self._questions}
        program = functools.partial(LABELS[name][0], golden=golden)
        draws = [(self._seeds[0], 0)] if self._samples else [()]
        cache = self._cache(journal, digest, name, draws[0][:1])
        label = functools.partial(
            self._run, program, name, f"--{name}", params, draws, cache
        )
        groups = share_groups(label, self._questions)
        lines = [rollout.answer for group in groups for rollout in group.rollouts]
        rows = [json.loads(line) for line in lines if line is not None]
        console.note(f"{name}: labelled {len(rows)} of {len(lines)} questions")
        return rows

    def _cache(self, journal, digest, name, seed_key=()) -> _TimedCache | None:
        """Return the rollouts that a journal holds; None without a journal."""
        if journal is None:
            return None
        assert digest, "answers from other parameters would be reused"
        made_from = [answers_fingerprint(self._config), *self._made_from()]
        made_from += [questions_fingerprint(self._questions), digest, name]
        return _TimedCache(journal, [*made_from, *seed_key])

    def rewards(
        self, stage: str, method: str, groups: Sequence[Group]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """Return the rewards of the policy's rollouts, computed as in its training.

        A term that compares rollouts compares the samples of the evaluation.

        Args:
            stage: stage that the policy comes from; there are no rewards if it
                overrides those of the run.
            method: method that made the rollouts; a recipe rewards only its protocol.

        Returns:
            [Q, G] rewards and {term: [Q, G]}; None if they are not computed.
        """
        c = self._config
        is_other = method != PROTOCOL or "reward" in c.overrides.get(stage, {})
        is_learnt = "rl" in kinds(c)
        if not (is_learnt and self._score) or is_other or c.models.answerer.source:
            return None
        try:
            totals, terms, _ = self._score(groups)
        except Exception as error:  # from a user's term; the answers must not be lost
            reason = f"{type(error).__name__}: {error}"
            console.note(f"transcripts.jsonl gets no rewards: {reason}")
            return None
        return totals, terms

    def judge(
        self, groups: Sequence[Group], folder: pathlib.Path
    ) -> tuple[dict, list[Verdict]]:
        """Ask config.models.eval_judge about the answers; all hosts call this together.

        `__call__` does not judge, so that dev scores between the steps of a stage do
        not wait for a judge.

        Args:
            groups: groups of all questions, the same on all hosts.
            folder: folder that records the replies of an endpoint.

        Returns:
            More fields of the row (see `summarize_verdicts`; `judged_by` describes the
            judge and what it is asked), and a verdict on each rollout. Without a judge,
            ({}, []). If tools or models failed in all rollouts, the numbers are None
            and there are no verdicts.
        """
        c, judged_by = self._config.eval, self._judged_by
        if not judged_by:
            return {}, []
        pairs = [(g.question, r) for g in groups for r in g.rollouts]
        if not any(r.outcome.is_signal for _, r in pairs):
            return {JUDGED_BY: judged_by, **dict.fromkeys(JUDGE_NUMBERS)}, []
        verdicts = judge_answers(
            [Prediction(q.text, tuple(q.golden_answers), r.answer) for q, r in pairs],
            functools.partial(processes.map_hosts_json, self._load_judge(folder)),
            prompt=c.judge_prompt,
            golds=c.judge_golds,
        )
        exact_matches = scores_of_groups(groups, c.normalize)["em"].tolist()
        searches = [len(r.searches) for _, r in pairs]
        numbers = summarize_verdicts(verdicts, exact_matches, searches)
        return {JUDGED_BY: judged_by, **numbers}, verdicts

    def record(
        self, folder: pathlib.Path, row: dict, rollouts: list[dict]
    ) -> list[dict]:
        """Record a row and its rollouts with `record_results`; retry on a full disk."""
        return console.retry_io(
            functools.partial(record_results, folder, row, rollouts),
            seconds=self._config.checkpoint.retry_seconds,
            held=f"the answers of {row['method']} are",
        )

    def _load_judge(self, folder) -> GenerateFn:
        """Return the judge; an endpoint is asked once for each chat, across all starts.

        A reply without a verdict is recorded like any other: temperature 0 would repeat
        it, and asking a judge until it gives a verdict makes it a different judge. A
        call that failed is made again.
        """
        judge = self._load_model(JUDGE)
        section = self._config.models.eval_judge
        if not section.source.startswith(URLS):
            return judge
        # Reopened for each method: other hosts may have recorded replies since.
        log = AppendLog(folder, JUDGE)
        recorder = record_replies(judge, log, made_from=[fingerprint(self._judged_by)])
        size = JUDGE_BATCH * section.max_concurrent

        def ask_judge(chats):
            batches = [chats[i : i + size] for i in range(0, len(chats), size)]
            return [reply for batch in batches for reply in recorder(batch)]

        return ask_judge

    def _answering_source(self, method) -> str:
        """Return the source of the model that gives a method's answers, or ""."""
        c = self._config
        if method in READER_METHODS:
            return c.models.reader.source
        model = c.models.answerer if method == PROTOCOL else c.models.subject
        return model.source

    def _answer(self, params, method, seed, cache, questions) -> list[Group]:
        """Return a group for each of these questions, answered with one seed."""
        c = self._config

        def direct_chat(question: Question) -> Messages:
            return direct_messages(self._kit, question.text)

        if method == EVIDENCE:
            groups = self._roll_out(params, seed, None, questions)
            return read_evidence(
                groups, self._load_model("reader"), direct_chat=direct_chat
            )
        if method in READER_METHODS:
            search = self._search if method == READER_RAG else None
            reader = self._load_model("reader")
            return answer_without_policy(
                questions, reader, direct_chat=direct_chat, search=search
            )
        if method != PROTOCOL:
            field = f"config.eval.methods = {method!r}"
            program = make_program(method)
            draws = [(seed, i) for i in range(self._samples)] or [()]
            return self._run(program, method, field, params, draws, cache, questions)
        groups = self._roll_out(params, seed, cache, questions)
        if c.models.answerer.source:
            return rephrase_answers(
                groups, self._load_model("answerer"), answer_from=c.eval.answer_from
            )
        return groups

    def _run(self, program, name, field, params, draws, cache, questions):
        """Return a program's groups; its errors name the field that requested it."""
        model = self._make_model()
        model.load(params)
        try:
            return run_program(
                program,
                questions,
                kit=self._kit,
                model=model,
                search=self._search,
                draws=draws,
                cache=cache,
                on_done=_make_progress(name, len(questions)),
                report_line=lambda line: console.note(f"evaluate {name}: {line}"),
            )
        except ValueError as error:
            # The same error: one of a user's method must keep its traceback.
            error.args = (f"{field}: {error}",)
            raise

    def _roll_out(self, params, seed, cache, questions) -> list[Group]:
        """Return the policy's rollouts, which the method `evidence` also reads."""
        first_leaf = jax.tree.leaves(params)[0]
        if self._last is None or self._last[0]() is not first_leaf:
            self._last = weakref.ref(first_leaf), {}
        groups_by_seed = self._last[1]
        if seed in groups_by_seed:
            return groups_by_seed[seed]
        engine = self._make_engine()
        short_questions = [q for q in questions if q.id not in self._too_long]
        groups = engine(
            engine.place_params(params),
            short_questions,
            jax.random.key(seed),
            on_done=_make_progress(PROTOCOL, len(short_questions)),
            rollout_cache=cache,
        )
        # Questions that do not fit the protocol's prompt count as wrong.
        rollouts = (Rollout((), None, (), Outcome.TRUNCATED),) * (self._samples or 1)
        rolled_out = iter(groups)
        groups = [
            Group(q, rollouts) if q.id in self._too_long else next(rolled_out)
            for q in questions
        ]
        if EVIDENCE in self._config.eval.methods:
            groups_by_seed[seed] = groups
        return groups


def _stopwatch() -> Callable[[], np.ndarray]:
    """Start measuring; the result returns [2] seconds, without and of compiling."""
    start, compile_start = time.monotonic(), compile_seconds()

    def elapsed():
        compiling = compile_seconds() - compile_start
        return np.array([time.monotonic() - start - compiling, compiling])

    return elapsed


def _make_progress(method: str, num_questions: int) -> Callable[[int], None]:
    """Return a callback that notes now and then how many questions are answered."""
    return console.note_now_and_then(
        lambda num_done: f"evaluate {method}: {num_done}/{num_questions} questions"
    )


def run_methods(
    evaluator: Evaluator,
    params: Params,
    *,
    stage: str,
    step: int | None,
    digest: str,
    methods: Sequence[str],
    folder: pathlib.Path,
    keep_answers: bool = False,
) -> list[dict]:
    """Evaluate each method, print and record its row; return the rows.

    Args:
        stage, step: where the parameters come from; the step of a model that the run
            did not train is None.
        keep_answers: whether to keep the journal of answers, so that a command that
            is killed at a later set of questions does not answer these again.
    """
    read_results(folder)  # a damaged file is refused now rather than after hours
    journal, rows, recorded_rows = AppendLog(folder, JOURNAL), [], []
    for method in methods:
        row, groups = evaluator(params, method, digest=digest, journal=journal)
        judge_fields, verdicts = evaluator.judge(groups, folder)
        # `start` is the entry of run.json (from 1) with code, libraries and inputs.
        row = {"stage": stage, "step": step, "start": num_starts(folder), **row}
        row |= judge_fields
        rewards = evaluator.rewards(stage, method, groups)
        rollouts = transcripts(groups, row, verdicts, rewards)
        if processes.is_host0():
            recorded_rows = evaluator.record(folder, row, rollouts)
        em = "-" if row["em"] is None else f"{100 * row['em']:.1f}"
        console.note(
            f"{stage}: {method} EM {em} on {row['n']} questions, "
            f"{row['searches']:.2f} searches, {row['seconds']:.1f} s"
        )
        unparsed_replies = [v.replies for v in verdicts if not v.is_parsed]
        if unparsed_replies:
            # A model's text is untrusted: it is shortened, and escaped by repr.
            console.note(
                f"{stage}: {method}: no verdict in the judge's replies to "
                f"{len(unparsed_replies)} answers, such as "
                f"{reprlib.repr(unparsed_replies[0])}: see 'judge' in transcripts.jsonl"
            )
        suspicious_ids = {name for r in rollouts for name in r["suspicious"]}
        if suspicious_ids:
            console.note(
                f"{stage}: {method}: {len(suspicious_ids)} passages contain tags, "
                f"control words or commands, such as {min(suspicious_ids)!r}: see "
                "'suspicious' in transcripts.jsonl"
            )
        rows.append(row)
    if not keep_answers:
        journal.clear()  # results.json now holds everything
    # Host 0 may have completed a row, by numbers that needed another method's row.
    newest_rows = {run_key(row): row for row in recorded_rows}
    return [newest_rows.get(run_key(row), row) for row in rows]

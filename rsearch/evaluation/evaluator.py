"""Answer held-out questions with each method, and score the answers.

Rollouts are greedy. Methods, all on the same weights: `protocol`, as the policy was
trained, and the programs of `rsearch.methods`. And of config.models.reader, another
model: `evidence`, the question under what the policy has written down as evidence
(R-Search's Figure 2); `reader_direct`, the question alone; `reader_rag`, the question
under the passages of one search with it.
"""

import functools
import pathlib
import reprlib
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax
from ml_collections import ConfigDict

from rsearch.data.demonstrations import DIRECT, PROTOCOL
from rsearch.data.questions import questions_fingerprint
from rsearch.evaluation.answers import (
    answer_without_policy,
    read_evidence,
    reader_messages,
    rephrase_answers,
)
from rsearch.evaluation.comparability import (
    JUDGED_BY,
    MADE_BY,
    is_same_manifest,
    judge_manifest,
    row_manifest,
    wrong_manifest,
)
from rsearch.evaluation.judge import (
    Prediction,
    Verdict,
    judge_answers,
    summarize_verdicts,
)
from rsearch.evaluation.predictions import RUN
from rsearch.evaluation.scoring import score_groups, scores_of_groups, scores_of_rows
from rsearch.hosts import processes
from rsearch.llm.local import LocalModel
from rsearch.methods.base import Kit
from rsearch.methods.runner import run_program
from rsearch.methods.table import READER_METHODS, make_program
from rsearch.rollout.health import HEALTH, NEEDLESS, NOTABLE, needless_searches
from rsearch.rollout.records import RolloutCache, params_fingerprint, share_groups
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.runtime import console, files, held
from rsearch.runtime.console import clean_line
from rsearch.runtime.identity import num_starts
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.jsonl import read_jsonl, recover_jsonl, write_jsonl
from rsearch.runtime.workdir import write_json
from rsearch.text.normalize import NORMALIZERS
from rsearch.text.suspicion import suspects
from rsearch.types import GenerateFn, Group, Params, Question, SearchFn

COLUMNS = ("stage", "method", "dataset", "n", "em", "em_95", "f1", "cover_em")
COLUMNS += ("searches", "policy_tokens", "answered", "malformed", "truncated")
COLUMNS += ("tool_error", "skipped", "seconds")
NUMBERS = (*COLUMNS[3:5], *COLUMNS[6:], "queries", "searches_right", "searches_wrong")
JUDGED = ("judge", "judge_agreement", "judge_unparsed", "judge_failed")
JUDGE_NUMBERS = (*JUDGED, "judge_right_em_wrong", "judge_wrong_em_right")
NUMBERS += ("judge_error", *JUDGE_NUMBERS, *HEALTH)

RESULTS, TRANSCRIPTS = "results.json", "transcripts.jsonl"
EVIDENCE = "evidence"
READER_RAG = "reader_rag"
JOURNAL = "answers"  # of the questions that are answered before a row is written


class Evaluator:
    """Compiled rollouts for evaluation, one set for each method; reused by stages.

    Attributes:
        dataset: the name of the questions in results.json.
    """

    def __init__(
        self,
        config: ConfigDict,
        questions: Sequence[Question],
        *,
        num_skipped: int,
        search: SearchFn,
        make_engine: Callable[[], RolloutEngine],
        make_model: Callable[[], LocalModel],
        kit: Kit,
        made_from: Sequence,
        load_model: Callable[[str], GenerateFn],
        health: Callable[[Sequence[Group]], dict],
        inputs: Mapping[str, str],
        sampling: Mapping[str, float],
        dataset: str = "",
        setting: str = "",
    ):
        """Prepare an evaluation; nothing is compiled or loaded before it is needed.

        Args:
            config: of the run.
            questions: held out.
            num_skipped: how many more there are whose prompts are too long.
            search: of the run, for readers and methods.
            make_engine: makes the greedy rollouts of the policy's protocol.
            make_model: makes the model that methods ask, without parameters.
            kit: of the methods.
            made_from: values of JSON that, with the parameters, tell all that an answer
                follows from.
            load_model: loads "reader", "answerer" or "eval_judge", a model beside the
                policy.
            health: measures how groups search, see `rsearch.rollout.health`.
            inputs, sampling: see `row_manifest`.
            dataset: the name of the questions in results.json; "" is that of
                config.data.dev.
            setting: how the evaluation differs from the run's configuration, in words.
        """
        self._config = config
        self._questions = questions
        self._num_skipped = num_skipped
        self._search = search
        limit = config.eval.max_questions
        self.dataset = (dataset or config.data.dev) + (f"[:{limit}]" if limit else "")
        self._setting = setting
        self._make_engine = functools.cache(make_engine)
        self._make_model = functools.cache(make_model)
        self._kit, self._made_from = kit, list(made_from)
        self._load_model = functools.cache(load_model)
        self._health = health
        self._made_by = functools.partial(
            row_manifest, config, inputs=inputs, sampling=sampling
        )
        self._judged_by = judge_manifest(config, inputs)
        # (weak reference to a leaf of the parameters, their protocol rollouts): a
        # reader uses the rollouts that the protocol's own row was measured on.
        self._last = None

    def is_current(self, row: dict, *, stage: str, step: int | None) -> bool:
        """Return whether a row of results.json still holds for this evaluation."""
        now = {
            "stage": stage,
            "step": step,
            "dataset": self.dataset,
            "setting": self._setting,
            "normalize": self._config.eval.normalize,
            "questions": questions_fingerprint(self._questions),
        }
        row = {"setting": "", **row}  # an earlier version's row has none
        judged_by, method = row.get(JUDGED_BY, {}), row["method"]
        return (
            all(row.get(name) == value for name, value in now.items())
            and row.get("asks", "") == self._asks(method)
            and is_same_manifest(row.get(MADE_BY, {}), self._made_by(method))
            and bool(judged_by) == bool(self._judged_by)
            and is_same_manifest(judged_by, self._judged_by)
        )

    def __call__(
        self, params: Params, method: str, *, journal: AppendLog | None = None
    ) -> tuple[dict, list[Group]]:
        """Score greedy rollouts on the held-out questions.

        Args:
            params: of the policy.
            method: one of config.eval.methods.
            journal: of the answers so far; an evaluation that was killed goes on from
                it.

        Returns:
            A row for results.json (fractions from 0 to 1, tokens and searches as means
            over rollouts, outcomes as counts; `questions` is their fingerprint,
            `skipped` counts those whose prompts are too long for the protocol, which no
            method is asked; `asks` is the source of the model beside the policy that
            gave the answers, "" without one; `search_health` has its numbers; `made_by`
            is the method's `row_manifest`), and a group of one rollout a question.
        """
        start = time.monotonic()
        cache = None
        if journal is not None:
            made_from = [*self._made_from, questions_fingerprint(self._questions)]
            made_from += [params_fingerprint(params), method]
            cache = RolloutCache(journal, made_from)
        answer = functools.partial(self._answer, params, method, cache)
        groups = share_groups(answer, self._questions)
        normalize = self._config.eval.normalize
        row = score_groups(groups, normalize=normalize) | self._health(groups)
        row[NEEDLESS] = None  # known when `direct` has been asked, see record_results
        row["normalize"] = normalize
        row["questions"] = questions_fingerprint(self._questions)
        row["skipped"] = self._num_skipped
        row["asks"], row[MADE_BY] = self._asks(method), self._made_by(method)
        row["seconds"] = time.monotonic() - start
        names = {"method": method, "dataset": self.dataset, "setting": self._setting}
        return {**names, **row}, groups

    def judge(self, groups: Sequence[Group]) -> tuple[dict, list[Verdict]]:
        """Ask config.models.eval_judge about the answers; all hosts call this together.

        Scoring does not call this, so that the dev scores between the steps of a stage
        do not wait for a judge.

        Args:
            groups: of all questions, the same on all hosts.

        Returns:
            Further fields of the row, see `summarize_verdicts`, where `judged_by` names
            the judge and what it is asked; and a verdict on each rollout. ({}, [])
            without a judge; no verdicts and numbers of None where tools or models
            failed in all rollouts.
        """
        c, judged_by = self._config.eval, self._judged_by
        if not judged_by:
            return {}, []
        pairs = [(g.question, r) for g in groups for r in g.rollouts]
        if not any(r.outcome.is_signal for _, r in pairs):
            return {JUDGED_BY: judged_by, **dict.fromkeys(JUDGE_NUMBERS)}, []
        verdicts = judge_answers(
            [Prediction(q.text, tuple(q.golden_answers), r.answer) for q, r in pairs],
            functools.partial(processes.map_hosts_json, self._load_model("eval_judge")),
            prompt=c.judge_prompt,
            golds=c.judge_golds,
        )
        exact = scores_of_groups(groups, c.normalize)["em"].tolist()
        return {JUDGED_BY: judged_by, **summarize_verdicts(verdicts, exact)}, verdicts

    def _asks(self, method) -> str:
        """Return the source of the model that gives a method's answers, or ""."""
        c = self._config
        if method in READER_METHODS:
            return c.models.reader.source
        return c.models.answerer.source if method == PROTOCOL else ""

    def _answer(self, params, method, cache, questions) -> list[Group]:
        """Return a group of one rollout for each of these questions."""
        c = self._config
        direct = c.protocol.direct
        if method == EVIDENCE:
            groups = self._roll_out(params, None, questions)
            chat = functools.partial(reader_messages, direct=direct)
            return read_evidence(groups, self._load_model("reader"), without=chat)
        if method in READER_METHODS:
            search = self._search if method == READER_RAG else None
            reader = self._load_model("reader")
            return answer_without_policy(
                questions, reader, direct=direct, search=search
            )
        if method != PROTOCOL:
            model = self._make_model()
            model.load(params)
            return run_program(
                make_program(method),
                questions,
                kit=self._kit,
                model=model,
                search=self._search,
                cache=cache,
                on_done=_progress(method, len(questions)),
            )
        groups = self._roll_out(params, cache, questions)
        if c.models.answerer.source:
            return rephrase_answers(
                groups, self._load_model("answerer"), answer_from=c.eval.answer_from
            )
        return groups

    def _roll_out(self, params, cache, questions) -> list[Group]:
        """Return the policy's rollouts, which also serve the reader."""
        first = jax.tree.leaves(params)[0]
        if self._last is not None and self._last[0]() is first:
            return self._last[1]
        engine = self._make_engine()
        key = jax.random.key(self._config.seed)  # Greedy: never drawn from.
        groups = engine(
            engine.place_params(params),
            questions,
            key,
            on_done=_progress(PROTOCOL, len(questions)),
            finished=cache,
        )
        if EVIDENCE in self._config.eval.methods:
            self._last = weakref.ref(first), groups
        return groups


def _progress(method: str, num_questions: int) -> Callable[[int], None]:
    """Return what says now and then how many questions are answered."""
    return console.note_now_and_then(
        lambda done: f"evaluate {method}: {done}/{num_questions} questions"
    )


def transcripts(
    groups: Sequence[Group], row: dict, verdicts: Sequence[Verdict] = ()
) -> list[dict]:
    """Return one JSON object a rollout, for transcripts.jsonl.

    Args:
        groups: of the row.
        row: of results.json.
        verdicts: on each rollout; none without a judge.
    """
    key = {name: row[name] for name in RUN if name in row}
    rows = [
        {
            **key,
            "id": group.question.id,
            "question": group.question.text,
            "golden_answers": list(group.question.golden_answers),
            "prediction": rollout.answer,
            "outcome": rollout.outcome.value,
            "queries": [q for s in rollout.searches for q in s.call.arguments],
            "suspicious": sorted({p.id for p in rollout.passages if suspects(p)}),
            "segments": [
                {"source": s.source.name.lower(), "text": s.text}
                for s in rollout.segments
            ],
        }
        for group in groups
        for rollout in group.rollouts
    ]
    if not verdicts:
        return rows
    return [
        {**row, "judge": {"score": v.score, "replies": list(v.replies)}}
        for row, v in zip(rows, verdicts, strict=True)
    ]


def record_results(folder: pathlib.Path, row: dict, rollouts: list[dict]) -> list[dict]:
    """Put a row into results.json and its `transcripts` into transcripts.jsonl.

    An earlier row of the same stage, method, dataset and setting is replaced. The row
    of the policy's protocol gets its `needless_searches` as soon as there is one of
    `direct` on the same questions.

    Returns:
        All rows.

    Raises:
        LostDirectoryError: the run has lost its directory; both files are in the one
            that it is saved in.
    """

    def is_other(old):
        return _key(old) != _key(row)

    wanted, folder = folder, held.locate(folder)
    folder.mkdir(exist_ok=True)
    path = folder / TRANSCRIPTS
    others = []
    if path.exists():  # what took hours to measure is not lost for what is damaged
        others = recover_jsonl(path, parse=_parse_transcript, on_bad=console.note)
    rollouts = [*filter(is_other, others), *rollouts]
    write_jsonl(path, rollouts)
    rows = [*filter(is_other, read_results(folder)), row]
    # A row of `direct` tells of the protocol's, whichever of both comes first.
    rows = [
        _with_needless(r, rows, rollouts)
        if r["method"] == PROTOCOL
        and (r["stage"], r["dataset"]) == (row["stage"], row["dataset"])
        else r
        for r in rows
    ]
    write_json(folder / RESULTS, rows)
    held.stop_if_lost(wanted)
    return rows


def _with_needless(row, rows, rollouts):
    """Return a row of the protocol with its `needless_searches`.

    Args:
        row: of results.json.
        rows: all of them.
        rollouts: all of transcripts.jsonl.
    """
    same = ("stage", "step", "dataset", "setting", "questions", "normalize")
    direct = [r for r in rows if r["method"] == DIRECT]
    is_known = any(all(r.get(n) == row.get(n) for n in same) for r in direct)
    if not is_known or row.get("normalize") not in NORMALIZERS:
        return {**row, NEEDLESS: None}

    def of_method(method):
        key = _key({**row, "method": method})
        return [r for r in rollouts if _key(r) == key]

    answers = [r for r in of_method(DIRECT) if _has_answers(r)]
    em = scores_of_rows(answers, row["normalize"])["em"]
    is_right = {r["id"]: score == 1 for r, score in zip(answers, em, strict=True)}
    searched = {r["id"]: bool(r.get("queries")) for r in of_method(PROTOCOL)}
    return {**row, NEEDLESS: needless_searches(searched, is_right)}


def _has_answers(rollout):
    """Return whether a line of transcripts.jsonl has what an exact match compares."""
    prediction, golden = rollout.get("prediction"), rollout.get("golden_answers")
    is_list = isinstance(golden, list) and all(isinstance(g, str) for g in golden)
    return is_list and isinstance(prediction, str | None)


def read_results(folder: pathlib.Path) -> list[dict]:
    """Return the rows of a run's results.json, oldest first; [] without one.

    Raises:
        ValueError: names file, row and field that no evaluation has written.
        OSError: it cannot be read.
    """
    path = folder / RESULTS
    if not path.exists():
        return []
    rows = files.read_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path}: not the results of a run; remove it")
    for number, row in enumerate(rows, start=1):
        if wrong := _wrong_field(row):
            raise ValueError(f"{path}: row {number}: {wrong}")
    return rows


def _wrong_field(row):
    """Return what is wrong with a field of results or of its kinds; or ""."""
    names = ("stage", "method", "dataset")
    if not isinstance(row, dict) or not row.keys() >= set(names):
        return f"{reprlib.repr(row)}: not the results of a run; remove it"
    for name in (*names, *(["setting"] if "setting" in row else ())):
        if not isinstance(row[name], str):
            return f"{name} = {reprlib.repr(row[name])}: expected text"
    scores = {"": row}
    for name in ("by_kind", "by_known"):
        kinds = row.get(name, {})
        if not isinstance(kinds, dict):
            return f"{name} = {reprlib.repr(kinds)}: expected an object"
        # Their names are text of the data set: no line of a message can end in one.
        scores |= {f"{name}.{clean_line(k)}": v for k, v in kinds.items()}
    for field, values in scores.items():
        if not isinstance(values, dict):
            return f"{field} = {reprlib.repr(values)}: expected an object"
        for name in NUMBERS:
            if values.get(name) is not None and not _is_number(values[name]):
                full, value = f"{field}.{name}".lstrip("."), reprlib.repr(values[name])
                return f"{full} = {value}: expected a number or null"
        pair = values.get("em_95")
        is_pair = isinstance(pair, list) and len(pair) == 2
        if pair is not None and not (is_pair and all(map(_is_number, pair))):
            return f"em_95 = {reprlib.repr(pair)}: expected two numbers"
    return wrong_manifest(row)


def _is_number(value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # NaN is not


def read_transcripts(folder: pathlib.Path) -> list[dict]:
    """Return the rollouts of a run's transcripts.jsonl; see `transcripts`.

    Raises:
        ValueError: names the file and the line that no evaluation has written.
        OSError: it cannot be read.
    """
    return read_jsonl(folder / TRANSCRIPTS, parse=_parse_transcript)


def _parse_transcript(row):
    if not isinstance(row, dict):
        raise ValueError(f"{reprlib.repr(row)}: expected an object")
    for name in ("stage", "method", "dataset", "id", "question"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} = {reprlib.repr(row.get(name))}: expected text")
    segments = row.get("segments")
    if not isinstance(segments, list) or not all(
        isinstance(s, dict) and isinstance(s.get("text"), str) for s in segments
    ):
        raise ValueError(f"segments = {reprlib.repr(segments)}: expected texts")
    return row


def show_results(rows: Sequence[dict], config: ConfigDict) -> None:
    """Print the table of results, scores in percent, and one by kind of question.

    A third table has the rows whose searches are to be looked at, see NOTABLE.
    """
    title = f"{config.name}: percent, answers normalised as {config.eval.normalize}"

    def cell(row, name):
        if row.get(name) is None:  # of an earlier version's row
            return None
        if name == "em_95":
            low, high = row["em_95"]
            return f"{100 * low:.1f} - {100 * high:.1f}"
        if name in ("em", "f1", "cover_em", "judge", "judge_agreement"):
            return f"{100 * row[name]:.1f}"
        if name == "dataset":
            return row[name].rpartition("/")[2]
        return row[name]

    has_failed = any(row.get("judge_error") for row in rows)
    failed = ("judge_error",) if has_failed else ()
    judged = JUDGED if any("judge" in row for row in rows) else ()
    columns = COLUMNS[:8] + judged + COLUMNS[8:-2] + failed + COLUMNS[-2:]
    cells = [[cell(row, name) for name in columns] for row in rows]
    console.table(title, columns, cells)
    _show_kinds(rows)
    _show_health(rows)


def _show_health(rows):
    """Print, in percent, how the rows search of which any number is notable."""
    notable = [
        row
        for row in rows
        if any((row.get(name) or 0) >= bound for name, bound in NOTABLE.items())
    ]
    if not notable:
        return

    def cell(row, name):
        return None if row.get(name) is None else f"{100 * row[name]:.0f}"

    cells = [
        [row["stage"], row["method"], *(cell(row, name) for name in HEALTH)]
        for row in notable
    ]
    headings = [name.partition("_")[0] for name in HEALTH]
    console.table("searches, percent", ("stage", "method", *headings), cells)


def _show_kinds(rows):
    """Print exact match and searches, one column for each kind of question."""
    split = [{**row.get("by_kind", {}), **row.get("by_known", {})} for row in rows]
    kinds = sorted({kind for by_kind in split for kind in by_kind})
    if len(kinds) < 2:
        return

    def cell(scores):
        scores = scores or {}
        if scores.get("searches") is None:
            return "-"
        em = "-" if scores.get("em") is None else f"{100 * scores['em']:.0f}"
        return f"{em} / {scores['searches']:.2f}"

    cells = [
        [row["stage"], row["method"], *(cell(by_kind.get(kind)) for kind in kinds)]
        for row, by_kind in zip(rows, split, strict=True)
    ]
    title = "percent EM / searches, by kind"
    console.table(title, ("stage", "method", *kinds), cells)


def run_methods(
    evaluator: Evaluator,
    params: Params,
    *,
    stage: str,
    step: int | None,
    methods: Sequence[str],
    folder: pathlib.Path,
) -> list[dict]:
    """Evaluate each method, show its row and record it; return the rows.

    Args:
        evaluator: of the run.
        params: of the policy.
        stage, step: that these come from; None for the step of a foreign model.
        methods: see `Evaluator`.
        folder: of results.json.
    """
    read_results(folder)  # refused now rather than after hours
    journal, rows, recorded = AppendLog(folder, JOURNAL), [], []
    for method in methods:
        row, groups = evaluator(params, method, journal=journal)
        judged, verdicts = evaluator.judge(groups)
        # Which code, libraries and inputs measured it: an entry of run.json, from 1.
        row = {"stage": stage, "step": step, "start": num_starts(folder), **row}
        row |= judged
        rollouts = transcripts(groups, row, verdicts)
        if processes.is_host0():
            recorded = record_results(folder, row, rollouts)
        em = "-" if row["em"] is None else f"{100 * row['em']:.1f}"
        console.note(
            f"{stage}: {method} EM {em} on {row['n']} questions, "
            f"{row['searches']:.2f} searches, {row['seconds']:.1f} s"
        )
        unparsed = [v.replies for v in verdicts if not v.is_parsed]
        if unparsed:
            # What a model writes is hostile: shown short, and escaped by its repr.
            console.note(
                f"{stage}: {method}: the judge's replies to {len(unparsed)} answers "
                f"are no verdict, as in {reprlib.repr(unparsed[0])}: see 'judge' in "
                "transcripts.jsonl"
            )
        suspicious = {name for r in rollouts for name in r["suspicious"]}
        if suspicious:
            console.note(
                f"{stage}: {method}: {len(suspicious)} passages hold tags, control "
                f"words or commands, as in {min(suspicious)!r}: see 'suspicious' in "
                "transcripts.jsonl"
            )
        rows.append(row)
    journal.clear()  # results.json has it all
    # What host 0 has recorded may tell more of a row than was known when it was made.
    newest = {_key(row): row for row in recorded}
    return [newest.get(_key(row), row) for row in rows]


def _key(row: dict) -> tuple:
    """Return what tells a row of results.json, or of its transcripts, from others."""
    return tuple(row.get(name, "") for name in RUN)

"""Drive the programs of all questions together, and answer requests in batches.

Each waiting program has made one or several requests. Requests of one kind go to the
model or the index together. A program continues once all its requests are answered, and
its next prompt joins those that the model has not read yet. What it is sent depends
only on its requests, so neither the order of questions nor the size of a batch changes
an answer.
"""

import collections
import dataclasses
import functools
import itertools
import reprlib
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from rsearch.hosts.processes import check_preempted
from rsearch.llm.requests import (
    CUT,
    Completions,
    Failure,
    Generate,
    Mix,
    Request,
    Score,
    Scorer,
    Search,
    TextScore,
)
from rsearch.methods.base import AT_LIMIT, Kit, Note, Program, check_requests
from rsearch.rollout.records import RolloutCache
from rsearch.tools.search import search_use
from rsearch.types import (
    Group,
    Outcome,
    Question,
    Rollout,
    SearchFn,
    Segment,
    Source,
    ToolUse,
    search_for,
    unsampled_segment,
)

WAITING_PER_ROW = 4  # programs in flight for each prompt that the model continues
EARLY_SHARE = 0.25  # of the model's time: maximum spent in searches that it waits for
MAX_YIELDS = 10_000  # of a program; one that yields more often has an endless loop


class Model(Scorer, Protocol):
    """A backend that answers requests to a model; see `rsearch.llm.local.LocalModel`.

    A prompt that is too long is answered with None.
    """

    num_rows: int

    def on_any_host(self, value: object) -> bool:
        """Return whether the value is true on any of the hosts that call this."""

    def generate(self, requests: Sequence[Generate]) -> Completions:
        """Continue prompts."""

    def mix(self, requests: Sequence[Mix]) -> Completions:
        """Continue mixtures of prompts."""


@dataclasses.dataclass(eq=False)
class _Run:
    """A running program.

    Attributes:
        question, number: question that it answers, and its number.
        sample: number of the rollout among those of the question.
        draw: names the samples of its requests; see `Generate`.
        steps: the program.
        cut_searches: how many searches preceded each text of passages that was longer
            than a model is shown.
        num_yields: how often it has yielded.
        requests: requests that it waits for.
        is_list: whether it yielded them as a list.
        results: their results, as far as they are known.
        num_missing: number of requests without a result.
        segments, uses, num_scored, left_out, notes, endpoint_tokens: fields of its
            rollout so far.
        is_cut: whether the last completion was cut.
        is_at_limit: whether it has yielded AT_LIMIT.
    """

    question: Question
    number: int
    sample: int
    draw: tuple[int, ...]
    steps: Generator = dataclasses.field(init=False)
    cut_searches: set[int] = dataclasses.field(default_factory=set)
    num_yields: int = 0
    requests: Sequence[Request] = ()
    is_list: bool = False
    results: list = dataclasses.field(default_factory=list)
    num_missing: int = 0
    segments: list[Segment] = dataclasses.field(default_factory=list)
    uses: list[ToolUse] = dataclasses.field(default_factory=list)
    num_scored: int = 0
    left_out: float = 0.0
    notes: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    endpoint_tokens: tuple[int, int] | None = (0, 0)
    is_cut: bool = False
    is_at_limit: bool = False


def run_program(
    program: Program,
    questions: Sequence[Question],
    *,
    kit: Kit,
    model: Model,
    search: SearchFn,
    draws: Sequence[tuple[int, ...]] = ((),),
    cache: RolloutCache | None = None,
    on_done: Callable[[int], None] = lambda num_done: None,
    report_line: Callable[[str], None] = lambda line: None,
) -> list[Group]:
    """Answer questions with a method.

    Args:
        program: program with its settings; see `methods.base`.
        search: answers searches; each batch is one call.
        draws: numbers that name each sample of a question; by default a question has
            one rollout, whose requests have no draw.
        cache: holds rollouts that finished before, and stores those that finish now.
        report_line: called with a line if prompts were too long.

    Returns:
        A group for each question, with one rollout for each draw. A rollout's segments
        are what the model read and wrote, call by call. Its outcome is ANSWERED with an
        answer, TOOL_ERROR if a search failed, JUDGE_ERROR if a call of the model
        failed, TRUNCATED if a prompt was too long, the last reply was cut before an
        answer, or the program returned it, and MALFORMED if the last reply holds no
        answer.

    Raises:
        ValueError: a program yields what is no request, never ends, returns what is no
            text, or asks for more passages than a search returns.
    """
    runner = _Runner(
        program,
        questions,
        kit=kit,
        model=model,
        search=search,
        draws=draws,
        cache=cache,
        on_done=on_done,
    )
    rollouts = runner.run()
    if runner.long_questions:
        report_line(
            f"{len(runner.long_questions)} of {len(questions)} questions had a prompt "
            "that is too long for config.eval.max_prompt_tokens: they count as "
            "truncated"
        )
    return [
        Group(q, tuple(rollouts[i, j] for j in range(len(draws))))
        for i, q in enumerate(questions)
    ]


class _Runner:
    """All programs of a call of `run_program`, whose arguments it takes.

    Attributes:
        long_questions: numbers of the questions that had a prompt that is too long.
    """

    def __init__(
        self, program, questions, *, kit, model, search, draws, cache, on_done
    ):
        self._program, self._questions, self._draws = program, questions, draws
        self._kit, self._model, self._search = kit, model, search
        self._cache, self._on_done = cache, on_done
        self._rollouts: dict[tuple[int, int], Rollout] = {}
        self._waiting: list[tuple[int, int]] = []  # not started; the last is next
        self._num_running = 0
        # (its program, its number there) of each request without an answer, by kind.
        self._pending: dict[type, list] = collections.defaultdict(list)
        # Seconds of the model, and of searches made while it had prompts left to read.
        self._model_seconds = self._early_seconds = 0.0
        self.long_questions: set[int] = set()

    def run(self) -> dict[tuple[int, int], Rollout]:
        """Return the rollouts by the numbers of their question and their draw."""
        for i in reversed(range(len(self._questions))):
            for j in reversed(range(len(self._draws))):
                rollout = None
                if self._cache is not None:
                    rollout = self._cache.get(self._questions[i], j)
                if rollout is None:
                    self._waiting.append((i, j))
                else:
                    self._rollouts[i, j] = rollout
        model = self._model
        while model.on_any_host(self._waiting or self._num_running):
            self._answer_without_replies()
            # Hosts that share a model must all call it, even those without a request.
            if model.on_any_host(self._pending[Generate]):
                self._ask_model(Generate, model.generate)
            if self._pending[Mix]:
                self._ask_model(Mix, model.mix)
        return self._rollouts

    def _ask_model(self, kind: type, ask: Callable[[list], Completions]) -> None:
        """Answer all requests of a kind, and those that programs then make."""
        requests: list[Request] = []
        owners: list[tuple[_Run, int]] = []
        num_answered = 0

        def add_pending():
            pending = self._pending.pop(kind, [])
            owners.extend(pending)
            requests.extend(run.requests[i] for run, i in pending)

        add_pending()
        start_time = time.monotonic()
        for results in ask(requests):
            self._model_seconds += time.monotonic() - start_time
            for i, result in results:
                self._deliver(*owners[i], result)
            check_preempted()
            num_answered += len(results)
            # A search at once lets programs continue while the model still holds what
            # they have read, but keeps the model waiting. If searches are slow, most of
            # them are therefore delayed until the model has read all prompts, and then
            # made for many programs in one call.
            is_early = len(requests) - num_answered > self._model.num_rows
            if not is_early or self._early_seconds < EARLY_SHARE * self._model_seconds:
                search_seconds = self._answer_without_replies()
                self._early_seconds += search_seconds * is_early
            add_pending()
            start_time = time.monotonic()

    def _answer_without_replies(self) -> float:
        """Start programs and answer them until all wait for replies of the model.

        Returns:
            The seconds that searches took.
        """
        search_seconds = 0.0
        self._start_programs()
        while self._pending[Search] or self._pending[Score]:
            check_preempted()
            start_time = time.monotonic()
            self._answer_all(Search, self._search_all)
            search_seconds += time.monotonic() - start_time
            self._answer_all(Score, self._model.score)
            self._start_programs()
        return search_seconds

    def _start_programs(self) -> None:
        limit = WAITING_PER_ROW * self._model.num_rows
        while self._waiting and self._num_running < limit:
            i, j = self._waiting.pop()
            question = self._questions[i]
            stripped_question = dataclasses.replace(question, golden_answers=())
            run = _Run(question, i, j, _draw(question, self._draws[j]))
            kit = dataclasses.replace(
                self._kit, shorten=functools.partial(_shorten, self._kit, run)
            )
            run.steps = self._program(stripped_question, kit)
            self._num_running += 1
            self._advance(run, None)

    def _answer_all(self, kind: type, answer: Callable[[list], list]) -> None:
        """Answer the pending requests of a kind with one call."""
        owners = self._pending.pop(kind, [])
        if owners:
            results = answer([run.requests[i] for run, i in owners])
            for (run, i), result in zip(owners, results, strict=True):
                self._deliver(run, i, result)

    def _deliver(self, run: _Run, i: int, result: Any) -> None:
        """Set the result of a program's request i; the last one lets it continue."""
        run.results[i] = result
        run.num_missing -= 1
        if run.num_missing:
            return
        failure = _record(run)
        if failure is None:
            self._advance(run, run.results if run.is_list else run.results[0])
            return
        if failure == Outcome.TRUNCATED:
            self.long_questions.add(run.number)
        run.steps.close()
        self._finish(run, None, failure)

    def _advance(self, run: _Run, reply: Any) -> None:
        """Send a program its results; it makes more requests or finishes."""
        requests: Any = ()
        while not requests:  # an empty list or a note is answered at once
            try:
                requests = run.steps.send(reply)
            except StopIteration as end:
                self._finish(run, *_outcome(run, end.value))
                return
            run.num_yields += 1
            if run.num_yields > MAX_YIELDS:
                raise ValueError(
                    f"the method has yielded {MAX_YIELDS} times without an answer to "
                    f"question {run.question.id}: a loop in it does not end"
                )
            if isinstance(requests, Note):
                run.notes.append((requests.name, float(requests.value)))
                requests = []
            run.is_at_limit |= requests is AT_LIMIT
            run.is_list = isinstance(requests, list | tuple)
            requests, reply = requests if run.is_list else [requests], []
        check_requests(requests, self._kit)
        run.requests = [_mark_request(request, run) for request in requests]
        run.results, run.num_missing = [None] * len(requests), len(requests)
        for i, request in enumerate(requests):
            self._pending[type(request)].append((run, i))

    def _finish(self, run: _Run, answer: str | None, outcome: Outcome) -> None:
        """Record the rollout of a program that has ended."""
        rollout = Rollout(
            segments=tuple(run.segments),
            answer=answer,
            tool_uses=tuple(run.uses),
            outcome=outcome,
            num_scored=run.num_scored,
            # A method may cut the passages of a search for several prompts.
            num_cut_observations=len(run.cut_searches - {0}),
            left_out=run.left_out,
            is_cut=run.is_cut,
            is_at_limit=run.is_at_limit,
            notes=tuple(run.notes),
            endpoint_tokens=run.endpoint_tokens,
        )
        self._rollouts[run.number, run.sample] = rollout
        self._num_running -= 1
        if self._cache is not None:
            self._cache.put(run.question, run.sample, rollout)
        self._on_done(len(self._rollouts) // len(self._draws))

    def _search_all(self, searches: Sequence[Search]) -> list[list | None]:
        """Return the passages of each query, for each request; None if it failed."""
        queries = [query for r in searches for query in r.queries]
        question_ids = [r.question_id for r in searches for _ in r.queries]
        hits = iter(search_for(self._search, queries, question_ids))
        results: list[list | None] = []
        for request in searches:
            passages = list(itertools.islice(hits, len(request.queries)))
            if any(p is None for p in passages):
                results.append(None)
            else:
                results.append([tuple(p[: request.top_k]) for p in passages])
        return results


def _shorten(kit: Kit, run: _Run, text: str) -> str:
    """Return the beginning of a text, and record whether it was cut."""
    shown_text = kit.shorten(text)
    if shown_text != text:
        run.cut_searches.add(len(run.uses))
    return shown_text


def _draw(question: Question, draw: tuple[int, ...]) -> tuple[int, ...]:
    """Return the draw of a question's requests; () if there is none."""
    if not draw:
        return ()
    # Two questions may make the same prompt. Samples must not depend on whether both
    # are in one call, which rows, hosts and an earlier kill of the run decide.
    return (*draw, zlib.crc32(question.id.encode("utf-8", "replace")))


def _mark_request(request: Request, run: _Run) -> Request:
    """Return a request marked with its question or its sample."""
    if isinstance(request, Search):
        return dataclasses.replace(request, question_id=run.question.id)
    if run.draw and isinstance(request, Generate | Mix):
        return dataclasses.replace(request, draw=run.draw)
    return request


def _outcome(run: _Run, answer: Any) -> tuple[str | None, Outcome]:
    """Return the answer that a program has returned, and how its rollout ended.

    Raises:
        ValueError: it is no text.
    """
    if not isinstance(answer, str | None):
        raise ValueError(
            f"the method returns {reprlib.repr(answer)}: expected text or None"
        )
    if answer is Outcome.TRUNCATED:
        return None, answer
    # A reply may end at the words that announce an answer.
    if (answer or "").strip():
        return answer, Outcome.ANSWERED
    return None, Outcome.TRUNCATED if run.is_cut else Outcome.MALFORMED


def _record(run: _Run) -> Outcome | None:
    """Add requests and results to a run's rollout; return how it failed, or None."""
    failure = None
    for request, result in zip(run.requests, run.results, strict=True):
        if isinstance(request, Generate):
            run.left_out = max(run.left_out, request.left_out)
        if result is None:
            is_search = isinstance(request, Search)
            failure = Outcome.TOOL_ERROR if is_search else Outcome.TRUNCATED
        elif isinstance(result, Failure):
            failure = Outcome.JUDGE_ERROR
        elif isinstance(request, Search):
            run.uses.append(search_use(request.queries, tuple(result)))
        elif isinstance(result, TextScore):
            run.num_scored += result.num_read
        else:
            run.is_cut = result.end == CUT
            counts = run.endpoint_tokens, result.endpoint_tokens
            run.endpoint_tokens = (
                None if None in counts else tuple(map(sum, zip(*counts, strict=True)))
            )
            run.segments += [
                unsampled_segment(Source.PROMPT, result.prompt_ids, result.prompt_text),
                unsampled_segment(Source.POLICY, result.ids, result.text),
            ]
    return failure

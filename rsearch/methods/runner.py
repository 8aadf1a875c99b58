"""Drive the programs of all questions together, and answer requests in batches.

Each waiting program has made one or several requests. Requests of one kind go to the
model or the index in one call. A program continues once all its requests are answered;
what it requests next waits for the other programs' answers. What it is sent depends
only on its requests, so neither the order of questions nor the size of a batch changes
an answer.
"""

import dataclasses
import reprlib
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
from rsearch.methods.base import Kit, Program
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


@dataclasses.dataclass
class _Run:
    """A running program.

    Attributes:
        question: question that it answers.
        steps: the program.
        draw: names the samples of its requests; see `Generate`.
        requests: requests that it waits for.
        is_list: whether it yielded them as a list.
        segments, uses, num_scored, left_out: fields of its rollout so far.
        is_cut: whether the last completion was cut.
    """

    question: Question
    steps: Generator
    draw: tuple[int, ...] = ()
    requests: Sequence[Request] = ()
    is_list: bool = False
    segments: list[Segment] = dataclasses.field(default_factory=list)
    uses: list[ToolUse] = dataclasses.field(default_factory=list)
    num_scored: int = 0
    left_out: float = 0.0
    is_cut: bool = False


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
        answer, TOOL_ERROR if a search failed, JUDGE_ERROR if the model could not be
        asked, TRUNCATED if a prompt was too long or the last reply was cut before an
        answer, and MALFORMED if the last reply holds no answer.

    Raises:
        ValueError: a program yields what is no request, returns what is no text, or
            asks for more passages than a search returns.
    """
    # (number of its question, number of its draw) of each rollout.
    keys = [(i, j) for i in range(len(questions)) for j in range(len(draws))]
    rollouts: dict[tuple[int, int], Rollout] = {}
    if cache is not None:
        cached_rollouts = {(i, j): cache.get(questions[i], j) for i, j in keys}
        rollouts = {key: r for key, r in cached_rollouts.items() if r is not None}
    waiting = [key for key in reversed(keys) if key not in rollouts]
    running: dict[tuple[int, int], _Run] = {}
    long_questions = set()
    while model.on_any_host(waiting or running):
        while waiting and len(running) < WAITING_PER_ROW * model.num_rows:
            key = waiting.pop()
            question = questions[key[0]]
            stripped_question = dataclasses.replace(question, golden_answers=())
            draw = _draw(question, draws[key[1]])
            running[key] = run = _Run(question, program(stripped_question, kit), draw)
            _advance(run, None, key, running, rollouts)
        requests = {key: run.requests for key, run in running.items()}
        for key, results in _answer_all(requests, kit, model, search):
            run = running[key]
            failure = _record(run, results)
            if failure is None:
                reply = results if run.is_list else results[0]
                _advance(run, reply, key, running, rollouts)
            else:
                if failure == Outcome.TRUNCATED:
                    long_questions.add(key[0])
                run.steps.close()
                rollouts[key] = _make_rollout(run, None, failure)
                del running[key]
            if key in rollouts:
                if cache is not None:
                    cache.put(questions[key[0]], key[1], rollouts[key])
                on_done(len(rollouts) // len(draws))
            check_preempted()
    if long_questions:
        report_line(
            f"{len(long_questions)} of {len(questions)} questions had a prompt that is "
            "too long for config.eval.max_prompt_tokens: they count as truncated"
        )
    return [
        Group(q, tuple(rollouts[i, j] for j in range(len(draws))))
        for i, q in enumerate(questions)
    ]


def _draw(question: Question, draw: tuple[int, ...]) -> tuple[int, ...]:
    """Return the draw of a question's requests; () if there is none."""
    if not draw:
        return ()
    # Two questions may make the same prompt. Samples must not depend on whether both
    # are in one call, which rows, hosts and an earlier kill of the run decide.
    return (*draw, zlib.crc32(question.id.encode("utf-8", "replace")))


def _advance(
    run: _Run, reply: Any, key: tuple[int, int], running: dict, rollouts: dict
) -> None:
    """Send a program its results; it makes more requests or finishes."""
    try:
        requests = run.steps.send(reply)
    except StopIteration as end:
        answer, outcome = end.value, Outcome.ANSWERED
        if not isinstance(answer, str | None):
            raise ValueError(
                f"the method returns {reprlib.repr(answer)}: expected text or None"
            ) from None
        # A reply may end at the words that announce an answer.
        if not (answer or "").strip():
            answer = None
            outcome = Outcome.TRUNCATED if run.is_cut else Outcome.MALFORMED
        rollouts[key] = _make_rollout(run, answer, outcome)
        del running[key]
        return
    run.is_list = isinstance(requests, list | tuple)
    requests = requests if run.is_list else [requests]
    for request in requests:
        if not isinstance(request, Request):
            raise ValueError(
                f"the method yields {reprlib.repr(request)}: expected a request, such "
                "as Search or Generate, or a list of them"
            )
    run.requests = [_mark_request(request, run) for request in requests]


def _mark_request(request: Request, run: _Run) -> Request:
    """Return a request marked with its question or its sample."""
    if isinstance(request, Search):
        return dataclasses.replace(request, question_id=run.question.id)
    if run.draw and isinstance(request, Generate | Mix):
        return dataclasses.replace(request, draw=run.draw)
    return request


def _answer_all(
    requests: Mapping[tuple[int, int], Sequence[Request]],
    kit: Kit,
    model: Model,
    search: SearchFn,
) -> Iterator[tuple[tuple[int, int], list]]:
    """Answer the requests of all programs, with one call for each kind of request.

    Yields:
        (key, results) of each program as soon as all its requests are answered, so that
        a program that ends does not wait for others to be recorded.
    """

    def search_all(searches: Sequence[Search]) -> list[list | None]:
        for request in searches:
            # A negative number would silently leave out the last passages.
            if request.top_k is not None and not 0 < request.top_k <= kit.top_k:
                raise ValueError(
                    f"a method asks for {request.top_k} passages per query: expected "
                    f"1 to config.retrieval.top_k = {kit.top_k}"
                )
        queries = [query for r in searches for query in r.queries]
        question_ids = [r.question_id for r in searches for _ in r.queries]
        all_hits = search_for(search, queries, question_ids)
        results, start = [], 0
        for request in searches:
            hits = all_hits[start : start + len(request.queries)]
            start += len(request.queries)
            if any(passages is None for passages in hits):
                results.append(None)
            else:
                results.append([tuple(p[: request.top_k]) for p in hits])
        return results

    handlers = {
        Search: lambda searches: enumerate(search_all(searches)),
        Generate: model.generate,
        Mix: model.mix,
        Score: lambda scores: enumerate(model.score(scores)),
    }
    results: dict = {key: [None] * len(rs) for key, rs in requests.items()}
    num_missing = {key: len(rs) for key, rs in requests.items()}
    yield from ((key, []) for key, num in num_missing.items() if not num)
    owners = [(key, n, r) for key, rs in requests.items() for n, r in enumerate(rs)]
    for kind, handler in handlers.items():
        members = [owner for owner in owners if isinstance(owner[2], kind)]
        # Hosts that share a model must all call it, even those without a request.
        if model.on_any_host(members) if kind is Generate else members:
            for i, result in handler([request for _, _, request in members]):
                key, n, _ = members[i]
                results[key][n] = result
                num_missing[key] -= 1
                if not num_missing[key]:
                    yield key, results[key]


def _record(run: _Run, results: Sequence[Any]) -> Outcome | None:
    """Add requests and results to a run's rollout; return how it failed, or None."""
    failure = None
    for request, result in zip(run.requests, results, strict=True):
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
            run.segments += [
                unsampled_segment(Source.PROMPT, result.prompt_ids, result.prompt_text),
                unsampled_segment(Source.POLICY, result.ids, result.text),
            ]
    return failure


def _make_rollout(run: _Run, answer: str | None, outcome: Outcome) -> Rollout:
    """Return what a program has done as a rollout."""
    return Rollout(
        segments=tuple(run.segments),
        answer=answer,
        tool_uses=tuple(run.uses),
        outcome=outcome,
        num_scored=run.num_scored,
        left_out=run.left_out,
    )

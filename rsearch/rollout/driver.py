"""Rollouts: the policy writes on the device, the host answers, row by row."""

import concurrent.futures
import contextlib
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from rsearch.hosts.preemption import PreemptedError
from rsearch.rollout.conversation import Host
from rsearch.rollout.finished import Finished
from rsearch.rollout.play import Play
from rsearch.rollout.pool import Pool, num_pages
from rsearch.rollout.sampler import Sampler
from rsearch.types import Group, Messages, Question


class RolloutEngine:
    """Rolls out questions in a fixed number of slots."""

    def __init__(
        self,
        sampler: Sampler,
        host: Host,
        *,
        num_rows: int,
        group_size: int,
        messages: Callable[[Question], Messages] | None = None,
        cache_tokens: int = 0,
        search_seconds: float = math.inf,
        searches_at_once: int = 1,
    ):
        """Holds what a rollout needs.

        Args:
            sampler: the compiled functions; they fix temperature and nucleus.
            host: protocol, tokenizer, search and budgets.
            num_rows: B, conversations decoded at once.
            group_size: G, rollouts of each question.
            messages: the chat that opens a question's rollouts; the protocol's own
                where not given.
            cache_tokens: that all conversations decoded at once hold together; where
                that does not do, some wait, and in the end the latest begin anew. 0 is
                what the longest hold.
            search_seconds: a search that has not come back after them never will: no
                thread can be ended, so the run is, with OutageError.
            searches_at_once: calls of the host's search that may overlap.

        Raises:
            ValueError: too few for one conversation on each device.
        """
        self.sampler, self.host = sampler, host
        self._num_pages = num_pages(sampler, num_rows, cache_tokens)
        self.num_restarts = 0  # conversations begun anew, for want of room
        self.num_rows, self.group_size = num_rows, group_size
        self.search_seconds = search_seconds
        self.searches_at_once = searches_at_once
        self._messages = messages or (lambda q: host.protocol.messages(q.text))

    def prompt(self, question: Question) -> np.ndarray:
        """[n] int32 ids of the question's prompt."""
        return self.host.prompt(self._messages(question))

    @property
    def num_traces(self) -> int:
        """How often its functions have been traced; constant after the first call."""
        return self.sampler.num_traces

    def place(self, params):
        """The parameters as `__call__` wants them."""
        return self.sampler.place(params)

    def __call__(
        self,
        params,
        questions: Sequence[Question],
        key,
        *,
        on_done=None,
        finished: Finished | None = None,
    ) -> list[Group]:
        """A group for each question.

        Args:
            params: from `place`.
            questions: any number.
            key: of this seed, stage and step. A rollout's draws follow from it, the
                question's id, the sample's number and the token's position alone.
            on_done: called with the number of questions finished so far.
            finished: has rollouts that had ended before, and is told of those that end.

        Raises:
            ValueError: a prompt is longer than its budget.
            OutageError: a search took longer than `search_seconds`.
        """
        limit = self.host.limits.max_prompt_tokens
        prompts = [self.prompt(question) for question in questions]
        for question, ids in zip(questions, prompts, strict=True):
            if len(ids) > limit:
                raise ValueError(
                    f"question {question.id}: its prompt has {len(ids)} tokens, "
                    f"rollout.max_prompt_tokens is {limit}"
                )
        names = [zlib.crc32(q.id.encode("utf-8", "replace")) for q in questions]
        with _search_threads(self.searches_at_once) as threads:
            pool = Pool(
                self.num_rows,
                num_pages=self._num_pages,
                page_tokens=self.sampler.page_tokens,
                row_pages=self.sampler.row_pages,
                parts=self.sampler.parts(self.num_rows),
            )
            rows = self.sampler.empty(self.num_rows, self._num_pages)
            device = pool, rows, params
            play = Play(self, device, key, threads, prompts, names, on_done)
            if finished is not None:
                play.go_on(questions, finished)
            rollouts = play.to_the_end()
        self.num_restarts += play.num_restarts
        return [
            Group(question, tuple(own))
            for question, own in zip(questions, rollouts, strict=True)
        ]


@contextlib.contextmanager
def _search_threads(count):
    """Threads, awaited at the end; where the run ends there is no time for that."""
    threads, wait = concurrent.futures.ThreadPoolExecutor(count, "search"), True
    try:
        yield threads
    except PreemptedError:
        wait = False
        raise
    finally:
        threads.shutdown(wait=wait, cancel_futures=not wait)

"""Roll out questions while keeping a fixed number of rows busy on the device.

A rollout waits for a slot, goes through the states of `RowState`, and frees its slot
for the next one when it finishes. While some rows wait for tools, which run on threads,
the others decode. `RolloutEngine` is called once per batch of questions and creates a
`RolloutScheduler` for it, whose `run` is the main loop.

Dimensions: B rows, G rollouts per question, E rows extended or admitted in one device
call, Q prompts prefilled in one call.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rsearch.hosts.preemption import OutageError, PreemptedError
from rsearch.hosts.processes import OtherHostError, check_preempted
from rsearch.rollout.conversation import Conversation, Host
from rsearch.rollout.interface import DecodeRequest, SamplerLike
from rsearch.rollout.pages import PagePool, num_pages
from rsearch.rollout.records import RolloutCache
from rsearch.types import Group, Messages, Question, Rollout, ToolCall

# Share of the decoding rows whose turns must end before `decode` returns early. If it
# returned after every turn, the host would be involved too often; if it waited for all
# rows, every row would wait for the longest turn.
FINISHED_SHARE = 1 / 4
# Share of all rows that one call extends or admits.
EXTEND_SHARE = 1 / 8
# Steps per `decode` call while tools run or text is streamed: both get checked often.
STEPS_BETWEEN_CHECKS = 16
# Shortest and longest wait for a tool before the other rows continue decoding. Within
# these bounds it is the time of one decoding step: a result that near is worth it.
TOOL_WAIT_SECONDS = 0.005, 0.2
# Seconds between checks for a request to stop, while nothing can decode.
PREEMPTION_SECONDS = 0.5


class RowState(enum.Enum):
    """The state of a rollout that occupies a slot."""

    DECODING = "decoding"  # the next `decode` call starts or continues its turn
    TOOL = "tool"  # its tool call is queued, or running on a thread
    EXTENDING = "extending"  # has an observation to read, and waits for cache pages


@dataclasses.dataclass
class Row:
    """A rollout that occupies a slot.

    Attributes:
        question: index of its question.
        sample: its index in the question's group, in [0, G).
        conversation: everything it has read and written so far.
        state: what it is doing.
        call: the tool call it is waiting for.
        is_last_turn: whether the turn that just ended was the last one allowed.
        observation: [n] int32 ids that it reads next.
    """

    question: int
    sample: int
    conversation: Conversation
    state: RowState = RowState.DECODING
    call: ToolCall | None = None
    is_last_turn: bool = False
    observation: np.ndarray | None = None


def admission_sizes(
    num_rows: int, group_size: int, num_shards: int = 1
) -> tuple[int, int]:
    """Return E, the rows per admission or extension, and Q, the prompts per prefill.

    Args:
        num_rows: B.
        group_size: G.
        num_shards: number of shards the rows are split into; E holds an equal number of
            rows from each.
    """
    num_moved = num_shards * _share_of(num_rows // num_shards, EXTEND_SHARE)
    num_admitted = _share_of(num_rows, 2 * EXTEND_SHARE)
    return num_moved, _share_of(num_admitted, 1 / group_size)


def decoding_order(
    num_turns: Mapping[int, int], free_slots: Sequence[int], *, is_draining: bool
) -> np.ndarray:
    """Return [B] int32, all slots in descending decoding priority.

    Args:
        num_turns: slot -> number of turns its row has written, in admission order.
        free_slots: slots without a row.
        is_draining: whether no more rollouts are waiting for a slot.
    """
    order = list(num_turns)
    if is_draining:
        # Rows with the most turns left will finish last, so they must not be held back
        # as well. The row admitted first stays first: it may well be the longest.
        order[1:] = sorted(order[1:], key=lambda slot: num_turns[slot])
    return np.array([*order, *free_slots], np.int32)


class RolloutScheduler:
    """Scheduler of one call's rollouts, from their prompts to their last turns."""

    def __init__(
        self,
        engine: "RolloutEngine",
        params: Any,
        key: jax.Array,
        questions: Sequence[Question],
        prompts: Sequence[np.ndarray],
        threads: concurrent.futures.Executor,
        on_done: Callable[[int], None] | None,
        rollout_cache: RolloutCache | None,
    ):
        """Start with every rollout waiting, except those found in the cache.

        Args:
            engine: provides the sampler, the host and settings.
            params, key, questions, on_done, rollout_cache: see `RolloutEngine`.
            prompts: [n] int32 prompt ids of each question.
            threads: runs the tools.
        """
        self.sampler = sampler = engine.sampler
        self.host = host = engine.host
        self.params, self.key, self.threads = params, key, threads
        self.questions, self.prompts = questions, prompts
        self.on_done, self.rollout_cache = on_done, rollout_cache
        self.num_rows = num_rows = engine.num_rows
        group_size, num_pages = engine.group_size, engine.num_pages
        self.search_seconds = engine.search_seconds
        # Each shard of rows has its own devices and its own cache pages.
        self.num_shards = sampler.row_shards(num_rows)
        self.queue_size = sampler.queue_size(num_rows)
        self.num_moved, self.num_prompts = admission_sizes(
            num_rows, group_size, self.num_shards
        )
        # A row's random draws depend on its question's id and its index in the group,
        # not on its slot, so that they are the same whatever else is running.
        self.question_hashes = [
            zlib.crc32(q.id.encode("utf-8", "replace")) for q in questions
        ]
        self.row_names = np.zeros((num_rows, 2), np.uint32)
        self.rollouts: list[list[Rollout | None]] = [
            [None] * group_size for _ in prompts
        ]
        self.num_unfinished = [group_size] * len(prompts)
        self.waiting = collections.deque(
            (question, sample)
            for question in range(len(prompts))
            for sample in range(group_size)
        )
        self._take_cached()

        self.rows: dict[int, Row] = {}  # slot -> its row, in admission order
        self.free_slots = collections.deque(range(num_rows))
        self.pages = PagePool(
            num_rows,
            num_pages=num_pages,
            page_tokens=sampler.page_tokens,
            row_pages=sampler.row_pages,
            num_shards=self.num_shards,
        )
        # Slots whose calls wait for a thread, and {future: (its slots, start time)}.
        self.queued_slots: list[int] = []
        self.running_calls: dict[concurrent.futures.Future, tuple[list, float]] = {}

        # The state on the device, and what the host keeps track of.
        self.device_rows = sampler.empty(num_rows, num_pages)
        self.prefilled = None  # the context of a block of prompts
        self.first_prefilled = None  # index of the block's first question
        self.begins = np.zeros(num_rows, bool)  # slots that start a turn
        self.budget = np.full(num_rows, host.limits.max_turn_tokens, np.int32)
        self.count = np.zeros(num_rows, np.int32)  # tokens of each turn so far
        self.tool_wait = TOOL_WAIT_SECONDS[0]
        self.num_restarts = 0

    def _take_cached(self) -> None:
        """Take rollouts that have already finished from the cache."""
        if self.rollout_cache is None:
            return
        for question, sample in list(self.waiting):
            rollout = self.rollout_cache.get(self.questions[question], sample)
            if rollout is not None:
                self.rollouts[question][sample] = rollout
                self.num_unfinished[question] -= 1
                self.waiting.remove((question, sample))

    def run(self) -> list[Group]:
        """Run all rollouts to their end and return the group of each question.

        Hosts that share the compiled functions must call them in the same order: while
        one host has more to do, the others make the same calls with no rows.
        """
        try:
            if self._on_any_host(self.prompts) and self.host.limits.num_turns > 1:
                # Compile now: the first row to extend may come late, and compiling
                # then would hold up all other rows.
                self._extend_rows([])
            while self._on_any_host(self.waiting or self.rows):
                check_preempted()
                # Results come first: the rows that read them already hold pages, and
                # decode in the same call as the rows admitted after them.
                self._collect_results()
                self._make_room()
                self._extend()
                self._admit()
                if self._on_any_host(self._slots(RowState.DECODING)):
                    self._decode()
        except OtherHostError:
            raise
        except Exception:
            # Otherwise the other hosts would wait for this one forever.
            self.sampler.report_failure()
            raise
        return [
            Group(question, tuple(rollouts))
            for question, rollouts in zip(self.questions, self.rollouts, strict=True)
        ]

    def _on_any_host(self, value) -> bool:
        """Return whether the value is true on any host that shares the functions."""
        return bool(self.sampler.all_gather(bool(value)).any())

    def _slots(self, *states: RowState) -> list[int]:
        """Return the slots of the rows in these states, in admission order."""
        return [slot for slot, row in self.rows.items() if row.state in states]

    def _shard_of(self, slot: int) -> int:
        """Return the shard of rows that contains this slot."""
        return slot // (self.num_rows // self.num_shards)

    # --- Waiting -> DECODING: prompts are prefilled, and rows start from them. ---

    def _admit(self) -> None:
        """Give free slots to waiting rollouts; prefill prompts a block at a time."""
        while self._on_any_host(self._next_slot() is not None):
            first = self.first_prefilled
            if self._next_slot() is not None and not self._next_is_prefilled():
                first = self.waiting[0][0]
            if self._on_any_host(first != self.first_prefilled):
                self.first_prefilled, self.prefilled = first, self._prefill(first or 0)
            # One shape for any number of rows: unused entries are padded with row B,
            # which the device ignores.
            slots = np.full(self.num_moved, self.num_rows, np.int32)
            source = np.zeros(self.num_moved, np.int32)
            for i in range(self.num_moved):
                slot = self._next_slot()
                if slot is None or not self._next_is_prefilled():
                    break
                question, sample = self.waiting.popleft()
                slots[i], source[i] = slot, question - self.first_prefilled
                self._start_row(slot, question, sample)
            self.device_rows = self.sampler.admit(
                self.device_rows, self.prefilled, slots, source, self.pages.rows(slots)
            )

    def _next_slot(self) -> int | None:
        """Return a free slot with room for the next waiting rollout, or None.

        Rows that wait for pages to read an observation have priority.
        """
        if not self.waiting or not self.free_slots or self._slots(RowState.EXTENDING):
            return None
        prompt = self.prompts[self.waiting[0][0]]
        num_tokens = len(prompt) + self.host.limits.max_turn_tokens
        slots = (s for s in self.free_slots if self.pages.has_room(s, num_tokens))
        return next(slots, None)

    def _next_is_prefilled(self) -> bool:
        """Return whether the next rollout's prompt is in the last prefilled block."""
        first, question = self.first_prefilled, self.waiting[0][0]
        return first is not None and first <= question < first + self.num_prompts

    def _prefill(self, first: int):
        """Prefill the prompts of a block of questions, and return their context."""
        shape = self.num_prompts, self.host.limits.max_prompt_tokens
        tokens = np.zeros(shape, np.int32)
        count = np.ones(self.num_prompts, np.int32)  # a prompt has at least one token
        for i, ids in enumerate(self.prompts[first : first + self.num_prompts]):
            tokens[i, : len(ids)], count[i] = ids, len(ids)
        return self.sampler.prefill(self.params, tokens, count)

    def _start_row(self, slot: int, question: int, sample: int) -> None:
        """Open a conversation in a free slot."""
        self.free_slots.remove(slot)
        # The host keeps every id that the row reads or writes: none is re-encoded.
        question_id = self.questions[question].id
        conversation = self.host.open(self.prompts[question], question_id)
        self.rows[slot] = Row(question, sample, conversation)
        self.row_names[slot] = self.question_hashes[question], sample
        self.begins[slot] = True
        self._reserve(slot)

    def _reserve(self, slot: int) -> bool:
        """Reserve pages for the conversation and one more turn; return whether it fits.

        An observation that the row has yet to read is already one of its segments.
        """
        num_tokens = self.rows[slot].conversation.num_tokens
        return self.pages.reserve(slot, num_tokens + self.host.limits.max_turn_tokens)

    # --- DECODING -> TOOL, EXTENDING or finished: rows write their turns. ---

    def _decode(self) -> None:
        """Decode until some turns have ended, and parse those turns."""
        slots = self._slots(RowState.DECODING)
        num_turns = {
            slot: row.conversation.num_turns for slot, row in self.rows.items()
        }
        request = DecodeRequest(
            names=self.row_names,
            begins=self.begins,
            budget=self.budget,
            # A host without rows waits for none; the numbers of all hosts are summed.
            min_finished=_share_of(len(slots), FINISHED_SHARE) if slots else 0,
            max_steps=(
                STEPS_BETWEEN_CHECKS
                if self.running_calls or self.host.on_write
                else self.host.limits.max_turn_tokens
            ),
            table=self.pages.table,
            queue=decoding_order(
                num_turns, self.free_slots, is_draining=not self.waiting
            ),
        )
        start_time = time.monotonic()
        device_rows = self.sampler.decode(
            self.params, self.device_rows, self.key, request
        )
        # The only place where the host waits for the device.
        turn = self.sampler.turns_on_host(device_rows)
        num_steps = np.max(turn.count - np.where(self.begins, 0, self.count))
        step_seconds = (time.monotonic() - start_time) / max(1, num_steps)
        self.tool_wait = float(np.clip(step_seconds, *TOOL_WAIT_SECONDS))
        self.device_rows = device_rows
        self.begins = np.zeros(self.num_rows, bool)
        self.count = turn.count
        # Rows with an unfinished turn continue it in the next call.
        turns = {}
        for slot in sorted(slots):
            ids = turn.tokens[slot, : turn.count[slot]]
            if not turn.active[slot]:
                turns[slot] = ids, turn.logp[slot, : len(ids)]
            else:
                self.host.show_text(self.rows[slot].conversation, ids)
        self._parse_turns(turns)

    def _parse_turns(self, turns: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
        """Parse turns that have ended, given as {slot: (ids, log-probabilities)}."""
        # After its last turn a row reads nothing more, and its call may not be run.
        last_turn = self.host.limits.num_turns - 1
        slots_by_is_last = {False: [], True: []}  # whether the turn was the last
        for slot in turns:
            row = self.rows[slot]
            row.is_last_turn = row.conversation.num_turns == last_turn
            slots_by_is_last[row.is_last_turn].append(slot)
        for is_last, slots in slots_by_is_last.items():
            calls, observations = self.host.read_turns(
                {slot: self.rows[slot].conversation for slot in slots},
                {slot: turns[slot] for slot in slots},
                final=is_last,
            )
            for slot, call in calls.items():
                self.rows[slot].state, self.rows[slot].call = RowState.TOOL, call
            self.queued_slots += calls
            self._deliver_observations(
                [s for s in slots if s not in calls], observations
            )
        self._start_calls()

    def _deliver_observations(
        self, slots: Sequence[int], observations: Mapping[int, np.ndarray]
    ) -> None:
        """Give rows their next observations, and finish the rows without one."""
        for slot in slots:
            if slot in observations:
                row = self.rows[slot]
                row.state, row.observation = RowState.EXTENDING, observations[slot]
            else:
                self._finish(slot)

    def _finish(self, slot: int) -> None:
        """Store a row's rollout, and free its slot."""
        row = self.rows[slot]
        rollout = row.conversation.rollout()
        self.rollouts[row.question][row.sample] = rollout
        if self.rollout_cache is not None:
            self.rollout_cache.put(self.questions[row.question], row.sample, rollout)
        self._free(slot)
        self.num_unfinished[row.question] -= 1
        if not self.num_unfinished[row.question] and self.on_done is not None:
            self.on_done(self.num_unfinished.count(0))

    def _free(self, slot: int) -> None:
        """Remove the row from its slot, and release its pages."""
        del self.rows[slot]
        self.free_slots.append(slot)
        self.pages.release(slot)

    # --- TOOL -> EXTENDING or finished: tools run on threads. ---

    def _start_calls(self) -> None:
        """Start all queued tool calls as one batch, if a thread is free."""
        # A batch is one call of the search, which encodes and scores its queries
        # together; calls that find no free thread wait and join the next batch.
        is_busy = len(self.running_calls) >= self.host.searches_at_once
        if not self.queued_slots or is_busy:
            return
        slots, self.queued_slots = self.queued_slots, []
        # Rows, not slots, are passed: `self.rows` may change while the thread runs.
        rows = {slot: self.rows[slot] for slot in slots}
        future = self.threads.submit(self._run_calls, rows)
        self.running_calls[future] = slots, time.monotonic()

    def _run_calls(self, rows: dict[int, Row]) -> dict[int, np.ndarray]:
        """Run tool calls on a thread; return observations for rows that continue."""
        observations = {}
        for is_last in (False, True):
            slots = [slot for slot, row in rows.items() if row.is_last_turn == is_last]
            if slots:
                observations |= self.host.run_tools(
                    {slot: rows[slot].conversation for slot in slots},
                    {slot: rows[slot].call for slot in slots},
                    final=is_last,
                )
        return observations

    def _collect_results(self) -> None:
        """Take the results of tools; wait for one if no row can decode."""
        # Every host must make this call, in the same order, before it may return early.
        decoding_slots = self._slots(RowState.DECODING)
        can_decode = self._on_any_host(decoding_slots or self._next_slot() is not None)
        if not self.running_calls:
            return
        timeout = self.tool_wait if can_decode else PREEMPTION_SECONDS
        if len(decoding_slots) >= self.queue_size:
            timeout = 0  # a returning row would not decode in the next steps anyway
        while not (done_calls := self._calls_done(timeout)):
            if can_decode:
                return
            check_preempted()
        for future in done_calls:
            slots, _ = self.running_calls.pop(future)
            self._deliver_observations(slots, future.result())
        self._start_calls()

    def _calls_done(self, timeout: float) -> list[concurrent.futures.Future]:
        """Wait for running calls; return those that are done, oldest first."""
        concurrent.futures.wait(
            self.running_calls, timeout, concurrent.futures.FIRST_COMPLETED
        )
        min_start_time = time.monotonic() - self.search_seconds
        for future, (_, start_time) in self.running_calls.items():
            # A thread cannot be killed, so a tool that hangs ends the run.
            if start_time < min_start_time and not future.done():
                raise OutageError(
                    f"a search has not returned for {self.search_seconds:g} s"
                )
        return [future for future in self.running_calls if future.done()]

    # --- EXTENDING -> DECODING, or back to waiting if pages run out. ---

    def _make_room(self) -> None:
        """Restart the newest rows of a shard in which every row waits for pages.

        A restarted row draws the same tokens again: a draw depends only on question,
        sample and position.
        """
        busy_slots = self._slots(RowState.DECODING, RowState.TOOL)
        busy_shards = {self._shard_of(slot) for slot in busy_slots}
        extending_slots = self._slots(RowState.EXTENDING)
        stuck_shards = {self._shard_of(slot) for slot in extending_slots} - busy_shards
        for shard in sorted(stuck_shards):
            slots = [slot for slot in self.rows if self._shard_of(slot) == shard]
            while not any(self._reserve(slot) for slot in slots):
                slot = slots.pop()  # admitted last, so it loses the least work
                row = self.rows[slot]
                self.waiting.appendleft((row.question, row.sample))
                self._free(slot)
                self.num_restarts += 1

    def _extend(self) -> None:
        """Let rows read their observations, as far as there are enough pages."""
        # Pages go to rows in admission order, so that the oldest can finish.
        ready_slots = [
            slot for slot in self._slots(RowState.EXTENDING) if self._reserve(slot)
        ]
        # Rows that are extended together cost as much as the longest observation.
        ready_slots.sort(key=lambda slot: -len(self.rows[slot].observation))
        slots_by_shard = [[] for _ in range(self.num_shards)]
        for slot in ready_slots:
            slots_by_shard[self._shard_of(slot)].append(slot)
        # Each call extends equally many rows per shard, so that the shard with the most
        # ready rows determines the number of calls.
        max_ready = int(self.sampler.all_gather(max(map(len, slots_by_shard))).max())
        shard_size = self.num_moved // self.num_shards
        for start in range(0, max_ready, shard_size):
            self._extend_rows(
                [slots[start : start + shard_size] for slots in slots_by_shard]
            )
        for slot in ready_slots:
            row = self.rows[slot]
            row.state, row.observation = RowState.DECODING, None
            self.begins[slot] = True

    def _extend_rows(self, slots_by_shard: Sequence[Sequence[int]]) -> None:
        """Let the rows in these slots, one list per shard, read their observations."""
        tokens = np.zeros((self.num_moved, self.host.tokens_between_turns), np.int32)
        count = np.zeros(self.num_moved, np.int32)
        slots = np.full(self.num_moved, self.num_rows, np.int32)  # B is padding
        shard_size = self.num_moved // self.num_shards
        for shard, shard_slots in enumerate(slots_by_shard):
            for i, slot in enumerate(shard_slots, shard * shard_size):
                ids = self.rows[slot].observation
                slots[i], count[i] = slot, len(ids)
                tokens[i, : len(ids)] = ids
        self.device_rows = self.sampler.extend(
            self.params, self.device_rows, slots, tokens, count, self.pages.rows(slots)
        )


class RolloutEngine:
    """Rolls out questions in a fixed number of rows."""

    def __init__(
        self,
        sampler: SamplerLike,
        host: Host,
        *,
        num_rows: int,
        group_size: int,
        messages: Callable[[Question], Messages] | None = None,
        cache_tokens: int = 0,
        search_seconds: float = math.inf,
    ):
        """Store what all calls share.

        Args:
            sampler: the compiled functions, with a fixed temperature and nucleus.
            host: holds protocol, tokenizer, search and budgets.
            num_rows: B, number of concurrent conversations.
            group_size: G, rollouts per question.
            messages: question -> chat that opens its rollouts; None is the protocol's.
            cache_tokens: KV cache capacity for all rows together. If it is too small,
                some rows wait, and as a last resort the newest ones restart. 0 means as
                much as the longest conversations need.
            search_seconds: a search that takes longer ends the run with OutageError,
                since its thread cannot be killed.

        Raises:
            ValueError: `cache_tokens` is too small for one conversation per shard, or
                the rows cannot be split over the shards.
        """
        self.sampler, self.host = sampler, host
        self.num_pages = num_pages(sampler, num_rows, cache_tokens)
        self.num_restarts = 0  # rollouts restarted for lack of cache pages
        self.num_rows, self.group_size = num_rows, group_size
        self.search_seconds = search_seconds
        self._messages = messages or (lambda q: host.protocol.messages(q.text))

    def prompt(self, question: Question) -> np.ndarray:
        """Return [n] int32 prompt ids of the question."""
        return self.host.prompt(self._messages(question))

    def place_params(self, params: Any) -> Any:
        """Return the parameters laid out and cast as `__call__` expects them."""
        return self.sampler.place_params(params)

    def __call__(
        self,
        params: Any,
        questions: Sequence[Question],
        key: jax.Array,
        *,
        on_done: Callable[[int], None] | None = None,
        rollout_cache: RolloutCache | None = None,
    ) -> list[Group]:
        """Roll out the questions and return their groups.

        Args:
            params: from `place_params`.
            questions: any number of questions.
            key: random key of this seed, stage and step. A rollout's draws depend only
                on it, the question's id, the sample index and the token position.
            on_done: called with the number of questions finished so far.
            rollout_cache: provides rollouts that finished earlier, and stores new ones.

        Raises:
            ValueError: a prompt is longer than its budget.
            OutageError: a search took longer than `search_seconds`.
        """
        max_tokens = self.host.limits.max_prompt_tokens
        prompts = [self.prompt(question) for question in questions]
        for question, ids in zip(questions, prompts, strict=True):
            if len(ids) > max_tokens:
                raise ValueError(
                    f"question {question.id}: its prompt has {len(ids)} tokens, "
                    f"rollout.max_prompt_tokens is {max_tokens}"
                )
        with _tool_threads(self.host.searches_at_once) as threads:
            scheduler = RolloutScheduler(
                self, params, key, questions, prompts, threads, on_done, rollout_cache
            )
            groups = scheduler.run()
        self.num_restarts += scheduler.num_restarts
        return groups


@contextlib.contextmanager
def _tool_threads(count: int) -> Iterator[concurrent.futures.Executor]:
    """Yield threads, and wait for them at the end unless the run is to stop."""
    threads, should_wait = concurrent.futures.ThreadPoolExecutor(count, "search"), True
    try:
        yield threads
    except (PreemptedError, KeyboardInterrupt):
        should_wait = False  # a search may take longer than anyone waits
        raise
    finally:
        threads.shutdown(wait=should_wait, cancel_futures=not should_wait)


def _share_of(number: int, share: float) -> int:
    """Return a share of a number, rounded, but at least 1."""
    return max(1, round(number * share))

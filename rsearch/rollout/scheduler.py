"""How rollouts go on: which wait, write, search, read, or have ended.

A fixed number of slots is kept busy: while some rows search, on threads, the others
write on, and a row whose rollout has ended gives its slot to the next one.
"""

import collections
import concurrent.futures
import contextlib
import math
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from rsearch.hosts.preemption import OutageError, PreemptedError
from rsearch.hosts.processes import OtherHostError, check_preempted
from rsearch.rollout.conversation import Conversation, Host
from rsearch.rollout.decode import Sampler
from rsearch.rollout.pages import Pool, num_pages
from rsearch.rollout.records import RolloutCache
from rsearch.types import Group, Messages, Question, Search

PAUSED_SHARE = 1 / 4  # of the writing rows: so many pause before the host answers them
READ_SHARE = 1 / 8  # of the slots: so many rows read at once, or begin
TOKENS_WHILE_SEARCHING = 16  # that rows write before the host looks what was found
# Seconds: before others write on, a search is awaited for the time of a token of
# theirs, but no less and no more than this.
PATIENCE = 0.005, 0.2
PREEMPTION_SECONDS = 0.5  # between looks at whether the run was told to stop


def admission_sizes(num_rows: int, group_size: int, parts: int = 1) -> tuple[int, int]:
    """How many of B rows read or begin at once, and how many prompts are read.

    Args:
        num_rows: B.
        group_size: rollouts of a question.
        parts: that the rows are cut into; as many of each read at once.
    """
    moved = parts * _part(num_rows // parts, READ_SHARE)
    return moved, _part(_part(num_rows, 2 * READ_SHARE), 1 / group_size)


class Play:
    """The rollouts of one call: which wait, write, search, read, or have ended."""

    def __init__(self, engine, device, key, threads, prompts, names, on_done):
        self.host, self.sampler = engine.host, engine.sampler
        self.pool, self.rows, self.params = device
        self.key, self.threads, self.on_done = key, threads, on_done
        self.searches_at_once = engine.searches_at_once
        self.prompts, self.names = prompts, names
        num_rows, group_size = engine.num_rows, engine.group_size
        self.num_rows, self.group_size = num_rows, group_size
        self.parts = self.sampler.num_parts(num_rows)
        self.queue_size = self.sampler.queue_size(num_rows)
        self.num_moved, self.block = admission_sizes(num_rows, group_size, self.parts)
        self.rollouts = [[None] * group_size for _ in prompts]
        self.left = [group_size] * len(prompts)
        self.waiting = collections.deque(
            (i, j) for i in range(len(prompts)) for j in range(group_size)
        )
        self.open: dict[int, Conversation] = {}  # slot -> its conversation
        self.place: dict[int, tuple[int, int]] = {}  # slot -> question, sample
        self.free = collections.deque(range(num_rows))
        self.writing: set[int] = set()
        self.reading: dict[int, np.ndarray] = {}  # slot -> ids it reads next
        # Searches of rows whose turn was not the last, and of those whose was.
        self.asked: dict[bool, dict[int, Search]] = {False: {}, True: {}}
        # What the threads work on -> the searches, since when.
        self.searching: dict[concurrent.futures.Future, tuple] = {}
        self.search_seconds = engine.search_seconds
        self.row_names = np.zeros((num_rows, 2), np.uint32)
        self.begins = np.zeros(num_rows, bool)
        self.budget = np.full(num_rows, self.host.limits.max_turn_tokens, np.int32)
        self.count = np.zeros(num_rows, np.int32)  # tokens of each turn so far
        self.patience = PATIENCE[0]
        self.prefilled = None  # the first question of those read, and of them all
        self.context = None  # what the device knows
        self.num_restarts = 0
        self.on_end = lambda question, sample, rollout: None

    def go_on(self, questions, finished):
        """Leaves out the rollouts that had ended before, and tells of those that end.

        Args:
            questions: whose prompts these are.
            finished: see `rsearch.rollout.records`.
        """
        for i, j in list(self.waiting):
            rollout = finished.get(questions[i], j)
            if rollout is not None:
                self.rollouts[i][j] = rollout
                self.left[i] -= 1
                self.waiting.remove((i, j))
        self.on_end = lambda i, j, rollout: finished.put(questions[i], j, rollout)

    def to_the_end(self):
        """[questions][G] rollouts.

        Hosts that share the device's programs come to each of them together: where one
        has more to do, the others do nothing once more.
        """
        try:
            return self._to_the_end()
        except OtherHostError:
            raise
        except Exception:
            self.sampler.give_up()
            raise

    def _to_the_end(self):
        if self._any(self.prompts) and self.host.limits.num_turns > 1:
            self._extend([])  # compiled now: the first to read may be late in a run
        while self._any(self.waiting or self.open):
            check_preempted()
            self._collect()
            self._make_room()
            self._read()
            self._admit()
            if self._any(self.writing):
                self._write()
        return self.rollouts

    def _any(self, whether) -> bool:
        """Whether it holds on any of the hosts that share the programs."""
        return bool(self.sampler.agree(bool(whether)).any())

    def _admit(self):
        """Gives free slots to those that wait; prompts are read a block at a time."""
        while self._any(self._next_slot() is not None):
            first = self.prefilled
            if self._next_slot() is not None and not self._is_read(self.waiting[0][0]):
                first = self.waiting[0][0]
            if self._any(first != self.prefilled):
                self.prefilled, self.context = first, self._prefill(first or 0)
            slots = np.full(self.num_moved, self.num_rows, np.int32)
            source = np.zeros(self.num_moved, np.int32)
            for k in range(self.num_moved):
                slot = self._next_slot()
                if slot is None or not self._is_read(self.waiting[0][0]):
                    break
                question, sample = self.waiting.popleft()
                slots[k], source[k] = slot, question - self.prefilled
                self._open(slot, question, sample)
            given = slots, source, self.pool.rows(slots)
            self.rows = self.sampler.admit(self.rows, self.context, *given)

    def _next_slot(self) -> int | None:
        """A free slot with room for the next that waits; None where there is none.

        Those that wait for room to read have the first claim to it.
        """
        if not self.waiting or self.reading:
            return None
        return next((s for s in self.free if self._has_room(s, self.waiting[0])), None)

    def _has_room(self, slot, waiting) -> bool:
        """Whether a conversation may begin in this slot."""
        needed = len(self.prompts[waiting[0]]) + self.host.limits.max_turn_tokens
        return self.pool.has(slot, needed)

    def _is_read(self, question) -> bool:
        """Whether its prompt is in the block that was read last."""
        first = self.prefilled
        return first is not None and first <= question < first + self.block

    def _prefill(self, first):
        """The context of the prompts of a block of questions."""
        size = self.block, self.host.limits.max_prompt_tokens
        tokens, count = np.zeros(size, np.int32), np.ones(size[0], np.int32)
        for i, ids in enumerate(self.prompts[first : first + self.block]):
            tokens[i, : len(ids)], count[i] = ids, len(ids)
        return self.sampler.prefill(self.params, tokens, count)

    def _open(self, slot, question, sample):
        """A new conversation in a free slot."""
        self.free.remove(slot)
        self.open[slot] = self.host.open(self.prompts[question])
        self.place[slot] = question, sample
        self.row_names[slot] = self.names[question], sample
        self.begins[slot] = True
        self.writing.add(slot)
        self._reserve(slot)

    def _reserve(self, slot) -> bool:
        """Whether the row has room for all of its conversation, and another turn.

        What it reads next is among its segments already.
        """
        held = sum(len(segment.token_ids) for segment in self.open[slot].segments)
        return self.pool.reserve(slot, held + self.host.limits.max_turn_tokens)

    def _write(self):
        """Lets rows write until some pause, and answers those."""
        limit, started = self.host.limits.max_turn_tokens, time.monotonic()
        rows = self.sampler.decode(
            self.params,
            self.rows,
            self.key,
            self.row_names,
            self.begins,
            self.budget,
            _part(len(self.writing), PAUSED_SHARE) if self.writing else 0,
            TOKENS_WHILE_SEARCHING if self.searching else limit,
            self.pool.table,
            self._queue(),
        )
        turn = self.sampler.turns_on_host(rows)
        num_steps = np.max(turn.count - np.where(self.begins, 0, self.count))
        seconds = (time.monotonic() - started) / max(1, num_steps)
        self.patience = float(np.clip(seconds, *PATIENCE))
        self.rows, self.begins = rows, np.zeros(self.num_rows, bool)
        self.count = turn.count
        written = {}
        for slot in sorted(self.writing):
            if not turn.active[slot]:
                n = turn.count[slot]
                written[slot] = turn.tokens[slot, :n], turn.logp[slot, :n]
        self.writing -= written.keys()
        self._answer(written)

    def _queue(self) -> np.ndarray:
        """[B] int32 all slots: whose conversation began first is first.

        Where none is to begin any more, those come next that have had the fewest
        turns: what has the most before it ends last. The one that has been open for
        longest stays first, since it may well be long.
        """
        order = list(self.open)
        if not self.waiting:
            order[1:] = sorted(order[1:], key=lambda slot: self.open[slot].num_turns)
        return np.array([*order, *self.free], np.int32)

    def _answer(self, written):
        """Hears these turns; those that search wait for a thread to be free."""
        last = self.host.limits.num_turns - 1
        ending = {slot for slot in written if self.open[slot].num_turns == last}
        for final, slots in ((False, written.keys() - ending), (True, ending)):
            own = {slot: written[slot] for slot in sorted(slots)}
            asked, shown = self.host.read_turns(self.open, own, final=final)
            self.asked[final] |= asked
            self._show(own.keys() - asked.keys(), shown)
        self._search()

    def _search(self):
        """Searches for all that have asked, if a thread is free."""
        if len(self.searching) < self.searches_at_once and any(self.asked.values()):
            batch, self.asked = self.asked, {False: {}, True: {}}
            future = self.threads.submit(self._find, batch)
            self.searching[future] = batch, time.monotonic()

    def _find(self, batch):
        """On a thread: slot -> ids to read, for some of these."""
        shown = {}
        for final, asked in batch.items():
            if asked:
                shown |= self.host.find(self.open, asked, final=final)
        return shown

    def _collect(self):
        """Takes what was found, and waits for it if nobody can write."""
        can_write = self._any(self.writing or self._next_slot() is not None)
        if not self.searching:
            return
        timeout = self.patience if can_write else PREEMPTION_SECONDS
        if len(self.writing) >= self.queue_size:
            timeout = 0  # Nobody who waits would write now.
        while not (done := self._found(timeout)):
            if can_write:
                return
            check_preempted()
        for future in done:
            batch, _ = self.searching.pop(future)
            slots = [slot for asked in batch.values() for slot in asked]
            self._show(slots, future.result())
        self._search()

    def _found(self, timeout) -> list[concurrent.futures.Future]:
        """The searches that have come back, in the order in which they were begun."""
        first = concurrent.futures.FIRST_COMPLETED
        concurrent.futures.wait(self.searching, timeout, first)
        late = time.monotonic() - self.search_seconds
        for future, (_, began) in self.searching.items():
            if began < late and not future.done():
                raise OutageError(
                    f"a search has not come back for {self.search_seconds:g} s"
                )
        return [future for future in self.searching if future.done()]

    def _show(self, slots, shown):
        """These slots read what they are shown, or have ended if that is nothing."""
        self.reading |= shown
        for slot in slots:
            if slot not in shown:
                self._close(slot)

    def _close(self, slot):
        """Keeps a rollout that has ended; its slot is free."""
        question, sample = self.place.pop(slot)
        rollout = self.open.pop(slot).rollout()
        self.rollouts[question][sample] = rollout
        self.on_end(question, sample, rollout)
        self._free(slot)
        self.left[question] -= 1
        if not self.left[question] and self.on_done is not None:
            self.on_done(self.left.count(0))

    def _free(self, slot):
        """Nobody's slot, and nobody's pages."""
        self.free.append(slot)
        self.pool.release(slot)

    def _part_of(self, slot) -> int:
        """The part of the rows that this slot is in."""
        return slot // (self.num_rows // self.parts)

    def _make_room(self):
        """Where all rows of a part wait for room to read, the latest begins anew.

        What it draws then is what it has drawn: that depends on nothing else.
        """
        asked = [s for batch in self.asked.values() for s in batch]
        for batch, _ in self.searching.values():
            asked += [s for own in batch.values() for s in own]
        busy = {self._part_of(slot) for slot in [*self.writing, *asked]}
        for part in {self._part_of(slot) for slot in self.reading} - busy:
            own = [slot for slot in self.open if self._part_of(slot) == part]
            while not any(self._reserve(slot) for slot in own):
                slot = own.pop()
                self.waiting.appendleft(self.place.pop(slot))
                del self.open[slot], self.reading[slot]
                self._free(slot)
                self.num_restarts += 1

    def _read(self):
        """Rows read what they were shown, and go on writing."""
        most = self.num_moved // self.parts
        slots = [[] for _ in range(self.parts)]  # that read, of each part
        # In the order in which they were opened, as long as there is room.
        ready = [s for s in self.open if s in self.reading and self._reserve(s)]
        for slot in sorted(ready):
            slots[self._part_of(slot)].append(slot)
        longest = int(self.sampler.agree(max(map(len, slots))).max())
        for start in range(0, longest, most):
            self._extend([own[start : start + most] for own in slots])
        self.begins[ready] = True
        self.writing |= set(ready)
        for slot in ready:
            del self.reading[slot]

    def _extend(self, slots):
        """These slots, of each part its own, read what they were shown."""
        tokens = np.zeros((self.num_moved, self.host.shown_tokens), np.int32)
        count = np.zeros(self.num_moved, np.int32)
        places = np.full(self.num_moved, self.num_rows, np.int32)
        for part, own in enumerate(slots):
            for k, slot in enumerate(own, part * (self.num_moved // self.parts)):
                ids, places[k] = self.reading[slot], slot
                tokens[k, : len(ids)], count[k] = ids, len(ids)
        given = places, tokens, count, self.pool.rows(places)
        self.rows = self.sampler.extend(self.params, self.rows, *given)


def _part(number: int, share: float) -> int:
    """A share of a number, one at least."""
    return max(1, round(number * share))


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

    def place_params(self, params):
        """The parameters as `__call__` wants them."""
        return self.sampler.place_params(params)

    def __call__(
        self,
        params,
        questions: Sequence[Question],
        key,
        *,
        on_done=None,
        finished: RolloutCache | None = None,
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
                parts=self.sampler.num_parts(self.num_rows),
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

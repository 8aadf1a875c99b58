"""Roll out a data stage's questions in rounds, and journal each wave of rollouts.

A line of journal.jsonl is one wave, either complete or absent. The questions of a wave
depend only on the waves before it, and random draws only on the question and its round.
A stage that was stopped therefore continues with the next wave, and ends with the same
files.
"""

import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from rsearch.config.stage_plan import round_size
from rsearch.data.curation import Attempt, attempt_of, from_record, to_record
from rsearch.hosts import processes
from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols.base import Protocol
from rsearch.rollout.conversation import (
    Host,
    Limits,
    conversation_tokens,
    markup_tokens,
)
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.runtime import console
from rsearch.runtime.jsonl import append_jsonl, recover_jsonl
from rsearch.types import Passage, Question, SearchFn, search_for
from rsearch.world.world import World

JOURNAL = "journal.jsonl"
FIRST = "first"  # the pass whose rollouts another stage may take over
STAGE_KEY = 3  # folded into the seed, so that no other stages have the same draws
SLOT_FILLS_PER_WAVE = 4  # how often a wave fills the slots; it is journalled as a whole


class WaveLog:
    """The waves of rollouts that a data stage has finished, in a JSON Lines file.

    Attributes:
        rows: {"pass", "round", "ids", "records"} for each wave, in order.
    """

    def __init__(self, folder: pathlib.Path):
        self._path = folder / JOURNAL
        # Lines that a stop cut off, or a disk damaged, are rolled out again.
        self.rows = recover_jsonl(self._path, parse=_check_wave, on_bad=console.note)

    def append(
        self, name: str, number: int, ids: Sequence[str], records: Sequence[list]
    ) -> None:
        """Append a wave: the records of each question, for one round of a pass."""
        row = {"pass": name, "round": number, "ids": ids, "records": records}
        append_jsonl(self._path, row)
        self.rows.append(row)

    def records(self, name: str, number: int | None = None) -> dict:
        """Return {question id: records} of one round of a pass, or of all rounds."""
        records_by_id: dict[str, list] = {}
        # A wave whose line was damaged is rolled out again after those of later rounds.
        for row in sorted(self.rows, key=lambda row: row["round"]):
            if row["pass"] == name and number in (None, row["round"]):
                for question, records in zip(row["ids"], row["records"], strict=True):
                    records_by_id.setdefault(question, []).extend(records)
        return records_by_id


def _check_wave(row):
    """Return `row`; reject one that `WaveLog.append` cannot have written."""
    try:
        for _, records in zip(row["ids"], row["records"], strict=True):
            list(map(from_record, records))
        texts = [row["pass"], *row["ids"]]
        is_wave = type(row["round"]) is int and all(isinstance(t, str) for t in texts)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        is_wave = False
    if not is_wave:
        raise ValueError("not a wave of rollouts; it is rolled out again")
    return row


@dataclasses.dataclass(frozen=True)
class DataStage:
    """The objects and settings of a data stage.

    Attributes:
        config: configuration of the stage.
        name: name of the stage.
        folder: folder of the stage.
        params: parameters of its model, the teacher.
        questions: questions to choose from.
        protocol, tokenizer, limits: for the model's rollouts.
        num_tokens: T, tokens of the longest conversation within the limits.
        max_context: the model's context length, in tokens.
        world: the embedded world, if the configuration names it.
        search: finds passages for queries.
        open_encoder: loads the encoder of queries and passages.
        make_host: (protocol, limits, search=) -> Host; None means the stage's own.
        make_rollouts: (host, temperature=, top_p=, group_size=, messages=, num_tokens=)
            -> RolloutEngine.
    """

    config: ConfigDict
    name: str
    folder: pathlib.Path
    params: Any
    questions: Sequence[Question]
    protocol: Protocol
    tokenizer: Tokenizer
    limits: Limits
    num_tokens: int
    max_context: int
    world: World | None
    search: SearchFn
    open_encoder: Callable[[], Any]
    make_host: Callable[..., Host]
    make_rollouts: Callable[..., RolloutEngine]

    @functools.cached_property
    def journal(self) -> WaveLog:
        """Return the waves of rollouts that this stage has finished."""
        return WaveLog(self.folder)

    def key(self, name: str):
        """Return the random key of one pass of this stage."""
        root = jax.random.fold_in(jax.random.key(self.config.seed), STAGE_KEY)
        # Python's hash() of a text differs between processes; a CRC does not.
        pass_hash = zlib.crc32(f"{self.name}/{name}".encode())
        return jax.random.fold_in(root, pass_hash)

    def passages_of(
        self, queries: Sequence[str], question_ids: Sequence[str]
    ) -> list[tuple[Passage, ...] | None]:
        """Return the passages that each query of these questions finds, or None."""
        return search_for(self.search, queries, question_ids)

    def first_journal(self) -> WaveLog | None:
        """Return the journal of the stage that config.curate.first names.

        Raises:
            ValueError: that stage has not rolled out anything.
        """
        first = self.config.curate.first
        if not first:
            return None
        folder = self.folder.parent / first.partition(":")[2]
        if not (folder / JOURNAL).exists():
            raise ValueError(
                f"config.curate.first = {first!r}: {folder / JOURNAL} is missing; has "
                "this stage rolled out anything?"
            )
        return WaveLog(folder)

    def roll_out(
        self,
        name: str,
        questions: Sequence[Question],
        *,
        max_rollouts: int,
        is_enough: Callable[[Question, list[Attempt]], bool],
        temperature: float | None = None,
        max_searches: int | None = None,
    ) -> list[list[Attempt]]:
        """Return attempts at each question, rolled out in rounds until they suffice.

        Args:
            name: name of this pass.
            questions: questions to roll out; all or some of the stage's.
            max_rollouts: the most attempts at a question; 0 rolls out nothing.
            is_enough: returns whether a question needs no further round.
            temperature, max_searches: replace those of config.rollout.

        Returns:
            For each question at most `max_rollouts` attempts, or all those taken over
            from another stage. They include attempts in which the search engine failed.
        """
        slots = self.config.rollout.max_concurrent
        # Each round rolls out a whole group, because its rollouts share a prefill.
        group_size = round_size(self.config.rollout.group_size, max_rollouts)
        first_log = self.first_journal() if name == FIRST else None
        first_records = {} if first_log is None else first_log.records(FIRST)
        # Rollouts of another stage are taken over, and not repeated.
        attempts = {
            q.id: [*map(from_record, first_records.get(q.id, ()))] for q in questions
        }
        remaining = [q for q in questions if q.id not in first_records]
        roll = None
        for number in range(-(-max_rollouts // group_size)):
            remaining = [q for q in remaining if not is_enough(q, attempts[q.id])]
            round_records = self.journal.records(name, number)
            missing = [q for q in remaining if q.id not in round_records]
            # Compile only if something is left to roll out, so that a stage that only
            # lacks its last file starts immediately.
            if missing and roll is None:
                roll = self._roller(group_size, temperature, max_searches)
            # The key depends on pass and round; the engine adds question and sample.
            # Waves, slots and restarts do not change a draw.
            key = jax.random.fold_in(self.key(name), number)
            size = max(SLOT_FILLS_PER_WAVE * slots // group_size, 1)
            waves = [missing[i : i + size] for i in range(0, len(missing), size)]
            label = f"{self.name}: {name} round {number + 1}, waves"
            for wave in console.progress(waves, label) if waves else ():
                ids, records = [q.id for q in wave], roll(wave, key)
                self._record(name, number, ids, records)
                round_records |= dict(zip(ids, records, strict=True))
            for question in remaining:
                attempts[question.id] += map(from_record, round_records[question.id])
        return [
            attempts[q.id] if q.id in first_records else attempts[q.id][:max_rollouts]
            for q in questions
        ]

    def in_waves(
        self,
        name: str,
        label: str,
        make_work: Callable[[], Callable[[Sequence[Question]], list[list[dict]]]],
    ) -> dict:
        """Return {question id: records} of a pass, after journalling it wave by wave.

        Args:
            name: name of the pass.
            label: what is made, for the progress line.
            make_work: returns (questions) -> the records of each, JSON values that
                `from_record` reads. It is called only if a question lacks its records.
        """
        pass_records = self.journal.records(name, 0)
        missing = [q for q in self.questions if q.id not in pass_records]
        size = self.config.rollout.max_concurrent
        waves = [missing[i : i + size] for i in range(0, len(missing), size)]
        # Nothing is compiled if the journal already has every record.
        work = make_work() if waves else None
        label = f"{self.name}: {label}, waves"
        for wave in console.progress(waves, label) if waves else ():
            records = processes.map_hosts_json(work, wave)
            self._record(name, 0, [q.id for q in wave], records)
        return self.journal.records(name, 0)

    def retry_io(self, write: Callable[[], None]) -> None:
        """Write to disk; see `console.retry_io`."""
        seconds = self.config.checkpoint.retry_seconds
        console.retry_io(write, seconds=seconds, held=f"results of {self.name} are")

    def _record(self, *wave):
        """Journal a wave, which may have taken an hour."""
        self.retry_io(lambda: self.journal.append(*wave))

    def _roller(self, group_size, temperature, max_searches):
        """Return (questions, key) -> records of the attempts at each."""
        c = self.config
        limits, num_tokens = self.limits, self.num_tokens
        if max_searches is not None:
            limits, num_tokens = with_searches(self, max_searches)
        engine = self.make_rollouts(
            self.make_host(limits=limits),
            temperature=c.rollout.temperature if temperature is None else temperature,
            top_p=c.rollout.top_p,
            group_size=group_size,
            num_tokens=num_tokens,
        )
        # Laid out for decoding once, for all waves.
        placed_params = engine.place_params(self.params)

        def roll(questions, key):
            # JSON values, to send to other hosts and to store in the journal.
            return [
                [to_record(attempt_of(self.protocol, r)) for r in group.rollouts]
                for group in engine(placed_params, questions, key)
            ]

        return lambda questions, key: processes.map_hosts_json(
            lambda share: roll(share, key), questions
        )


def world_hops(stage: DataStage, question_id: str) -> tuple:
    """Return the facts behind a question of the embedded world; () for any other."""
    return () if stage.world is None else stage.world.hops.get(question_id, ())


def with_searches(stage: DataStage, max_searches: int) -> tuple[Limits, int]:
    """Return the stage's limits with another number of searches, and T.

    Raises:
        ValueError: the longest such rollout does not fit the model's context.
    """
    limits = dataclasses.replace(stage.limits, max_searches=max_searches)
    markup = markup_tokens(stage.tokenizer, stage.protocol)
    num_tokens = conversation_tokens(limits, markup)
    if num_tokens > stage.max_context:
        raise ValueError(
            f"a rollout with {max_searches} searches can take {num_tokens} tokens, "
            f"but the model's context is {stage.max_context}"
        )
    return limits, num_tokens

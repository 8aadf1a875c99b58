"""A data stage's rollouts: in rounds, each wave remembered, so that nothing is lost.

A line of journal.jsonl is one wave of rollouts, whole or absent. What a wave holds
follows from the waves before it, and what is drawn from the question and its round: a
stage that was stopped goes on with the next wave, and ends with the same files.
"""

import dataclasses
import pathlib
import zlib
from collections.abc import Callable, Sequence

import jax

from rsearch import setup as build
from rsearch.data.curation import Attempt, attempt_of, from_record, to_record
from rsearch.hosts import processes
from rsearch.rollout.conversation import conversation_tokens, markup_tokens
from rsearch.runtime import console
from rsearch.runtime.jsonl import append_jsonl, drop_torn_line, read_jsonl
from rsearch.types import Question

JOURNAL = "journal.jsonl"
FIRST = "first"  # the pass that another stage may take over
STAGE_KEY = 3  # folded into the seed: what these stages draw, no others do
FILLINGS = 4  # times that the slots are filled in a wave, which is journalled whole


class WaveLog:
    """The waves of rollouts that a data stage has finished, in a JSON Lines file.

    Attributes:
        rows: {"pass", "round", "ids", "records"} of each wave, in order.
    """

    def __init__(self, folder: pathlib.Path):
        self._path = folder / JOURNAL
        self.rows = []
        if self._path.exists():
            self.rows = read_jsonl(self._path, torn="drop", parse=_check_wave)
            drop_torn_line(self._path)

    def append(self, name: str, number: int, ids, records) -> None:
        """Append a wave: the records of each question, of a pass and its round."""
        row = {"pass": name, "round": number, "ids": ids, "records": records}
        append_jsonl(self._path, row)
        self.rows.append(row)

    def of(self, name: str, number: int | None = None) -> dict:
        """{question id: its records} of one round of a pass, or of all its rounds."""
        found: dict[str, list] = {}
        for row in self.rows:
            if row["pass"] == name and number in (None, row["round"]):
                for question, records in zip(row["ids"], row["records"], strict=True):
                    found.setdefault(question, []).extend(records)
        return found


def _check_wave(row):
    """Return `row`; refuse one that `WaveLog.append` cannot have written."""
    try:
        for _, records in zip(row["ids"], row["records"], strict=True):
            list(map(from_record, records))
        is_wave = isinstance(row["pass"], str) and type(row["round"]) is int
    except (LookupError, TypeError, ValueError):
        is_wave = False
    if not is_wave:
        raise ValueError(
            "not a wave of rollouts; cut the file there, and what follows is rolled "
            "out again"
        )
    return row


class Work:
    """What a data stage works on.

    Attributes:
        setup: of the stage.
        params: of its model.
        folder: of the stage.
        stage: its name.
        journal: of the stage.
        questions: to choose from.
    """

    def __init__(self, setup: build.Setup, params, folder: pathlib.Path, stage: str):
        self.setup, self.params = setup, params
        self.folder, self.stage = folder, stage
        self.journal = WaveLog(folder)
        self.questions = setup.train

    def key(self, name: str):
        """The random key of one pass of this stage."""
        c = self.setup.config
        root = jax.random.fold_in(jax.random.key(c.seed), STAGE_KEY)
        named = zlib.crc32(f"{self.stage}/{name}".encode())
        return jax.random.fold_in(root, named)

    def first_journal(self) -> WaveLog | None:
        """The journal of the stage that config.curate.first names.

        Raises:
            ValueError: that stage has rolled out nothing.
        """
        first = self.setup.config.curate.first
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
        most: int,
        enough: Callable[[Question, list[Attempt]], bool],
        temperature: float | None = None,
        max_searches: int | None = None,
    ) -> list[list[Attempt]]:
        """Attempts at each question, in rounds, until they are enough.

        Args:
            name: of this pass.
            questions: to roll out; all or some of the stage's.
            most: attempts at a question; 0 rolls out nothing.
            enough: whether no further round is needed for a question.
            temperature, max_searches: in place of config.rollout's.

        Returns:
            For each question at most `most` attempts, or all of those that were taken
            over; failures of the search engine are among them.
        """
        slots = self.setup.config.rollout.slots
        group_size = _group_size(self.setup.config.rollout.group_size, most)
        earlier = self.first_journal() if name == FIRST else None
        known = {} if earlier is None else earlier.of(FIRST)
        attempts = {q.id: [*map(from_record, known.get(q.id, ()))] for q in questions}
        asked = [q for q in questions if q.id not in known]
        roll = None
        for number in range(-(-most // group_size)):
            asked = [q for q in asked if not enough(q, attempts[q.id])]
            done = self.journal.of(name, number)
            new = [q for q in asked if q.id not in done]
            if new and roll is None:
                roll = self._roller(group_size, temperature, max_searches)
            key = jax.random.fold_in(self.key(name), number)
            size = max(FILLINGS * slots // group_size, 1)
            waves = [new[i : i + size] for i in range(0, len(new), size)]
            label = f"{self.stage}: {name} round {number + 1}, waves"
            for wave in console.progress(waves, label) if waves else ():
                ids, records = [q.id for q in wave], roll(wave, key)
                self.journal.append(name, number, ids, records)
                done |= dict(zip(ids, records, strict=True))
            for question in asked:
                attempts[question.id] += map(from_record, done[question.id])
        return [
            attempts[q.id] if q.id in known else attempts[q.id][:most]
            for q in questions
        ]

    def _roller(self, group_size, temperature, max_searches):
        """(questions, key) -> records of the attempts at each."""
        c, setup = self.setup.config, self.setup
        if max_searches is not None:
            setup = with_searches(setup, max_searches)
        engine = build.make_rollouts(
            setup,
            build.make_host(setup),
            temperature=c.rollout.temperature if temperature is None else temperature,
            top_p=c.rollout.top_p,
            group_size=group_size,
        )
        placed = engine.place_params(self.params)

        def roll(questions, key):
            return [
                [to_record(attempt_of(setup.protocol, r)) for r in group.rollouts]
                for group in engine(placed, questions, key)
            ]

        return lambda questions, key: processes.map_hosts_json(
            lambda own: roll(own, key), questions
        )


def with_searches(setup: build.Setup, max_searches: int) -> build.Setup:
    """The setup with another number of searches in a rollout.

    Raises:
        ValueError: such a rollout does not fit the model's context.
    """
    limits = dataclasses.replace(setup.limits, max_searches=max_searches)
    markup = markup_tokens(setup.tokenizer, setup.protocol)
    needed = conversation_tokens(limits, markup)
    most = setup.model.spec.max_context
    if needed > most:
        raise ValueError(
            f"a rollout with {max_searches} searches can come to {needed} tokens, but "
            f"the model's context is {most}"
        )
    return dataclasses.replace(setup, limits=limits, num_tokens=needed)


def _group_size(whole: int, most: int) -> int:
    """The largest part of a group, at most `most`, that divides it.

    It does not depend on the number of slots: a stage that goes on with others asks the
    same.
    """
    return max((g for g in range(1, min(whole, most) + 1) if whole % g == 0), default=1)

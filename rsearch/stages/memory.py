"""The set T that R1-Searcher++ memorises: what was found, reworded as if recalled.

After each step, the rewriting model rewords the correct rollouts that searched.
Verified rewordings enter T, which is kept in a file for resumed runs. Source:
R1-Searcher++ (arXiv 2505.17005) section 4.2.2.
"""

import pathlib
import reprlib

from rsearch.data.order import step_items
from rsearch.hosts import processes
from rsearch.protocols.rewriting import recalled_answer, rewriting_messages
from rsearch.rewards.answers import answer_cover_em
from rsearch.rollout.conversation import Host
from rsearch.rollout.replay import replay
from rsearch.runtime import console
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.types import GenerateFn, Group, Question, Rollout

FILE = "memory.jsonl"  # in the stage's directory: {"step", "id", "question", "text"}
CORRECT = {"normalize": "r1_searcher", "order": "any", "max_words": 10}
"""Definition of a right answer (equation 4) for what the run's reward leaves open."""


class MemorySet:
    """The set T, its file, and the model that writes what enters it."""

    def __init__(
        self,
        rewrite: GenerateFn,
        folder: pathlib.Path,
        *,
        host: Host,
        num_rows: int,
        seed: int,
        prompt: str | None = None,
        correct: dict | None = None,
    ):
        """Load what an earlier start of the stage has memorised.

        Args:
            rewrite: the rewriting model.
            folder: folder of the stage.
            host: host of the policy's conversations.
            num_rows: the most conversations that a step memorises.
            seed: seed of the run.
            prompt: prompt of the rewriting model; by default the paper's.
            correct: settings of `answer_cover_em` that define a right answer; missing
                ones are taken from CORRECT.
        """
        self._host, self._rewrite = host, rewrite
        self._num_rows, self._seed, self._prompt = num_rows, seed, prompt
        correct = correct or {}
        self._correct = {n: correct.get(n, value) for n, value in CORRECT.items()}
        self._file = folder / FILE
        self._rows = read_memory(self._file)
        self._segments: dict[tuple, Rollout] = {}

    def rows(self, step: int) -> list:
        """Return at most `num_rows` conversations of T, drawn for this step.

        Rows that a later step had added before the run was killed do not count yet.
        """
        past_rows = [row for row in self._rows if row["step"] <= step]
        if not past_rows:
            return []
        count = min(self._num_rows, len(past_rows))
        indices = step_items(len(past_rows), count, seed=self._seed, step=step)
        return [self._replayed(past_rows[i]).segments for i in indices]

    def collect(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Reword this step's correct searches; keep what is right and fits.

        Args:
            step: step that the groups come from.
            groups: Q groups; every correct rollout that searched is reworded.

        Returns:
            The numbers of rewordings requested, of those kept, and of rows in T.
        """
        # A step that is repeated after a restart replaces what it had added.
        self._rows = [row for row in self._rows if row["step"] < step]
        # Rollouts of a question that found the same passages share one request.
        pairs = {}
        for group in groups:
            for rollout in group.rollouts:
                if not self._qualifies(group.question, rollout):
                    continue
                chat = self._chat(group.question, rollout)
                pairs[group.question.id, chat[0]["content"]] = group.question, chat
        requests = list(pairs.values())
        chats = [chat for _, chat in requests]
        # Each host's model rewords a share; all hosts then receive all replies.
        replies = processes.map_hosts_json(self._rewrite, chats) if chats else []
        # The same text for the same question is in T once, whichever step found it.
        known_texts = {(row["id"], row["text"]) for row in self._rows}
        num_kept = 0
        for (question, _), text in zip(requests, replies, strict=True):
            if text is None or (question.id, text) in known_texts:
                continue
            row = {"step": step, "id": question.id, "question": question.text}
            row["text"] = text
            if self._is_right(question, row):
                self._rows.append(row)
                known_texts.add((question.id, text))
                num_kept += 1
        return {
            "memory_asked": float(len(chats)),
            "memory_kept": float(num_kept),
            "memory_size": float(len(self._rows)),
        }

    def write(self) -> None:
        """Write T to its file, which a resumed run continues from."""
        write_jsonl(self._file, self._rows)

    def _qualifies(self, question, rollout):
        """Return whether a rollout searched and is correct."""
        is_valid = rollout.searches and rollout.outcome.is_signal
        return is_valid and self._is_correct(question, rollout)

    def _chat(self, question, rollout):
        # Several searches may find the same passage; the prompt shows it once.
        passages = list({p.contents: p for p in rollout.passages}.values())
        return rewriting_messages(question.text, passages, user=self._prompt)

    def _is_correct(self, question, rollout):
        return answer_cover_em(question, [rollout], **self._correct) == [1.0]

    def _is_right(self, question, row):
        """Return whether a rewording only recalls, answers right and can be learnt."""
        # A rewording that still searches, or has no answer, does not teach recall.
        if recalled_answer(self._host.protocol, row["text"]) is None:
            return False
        try:
            replayed = self._replayed(row)
        except ValueError as error:  # too long for a turn
            console.note(f"memory: left out: {error}")
            return False
        return self._is_correct(question, replayed)

    def _replayed(self, row):
        key = row["id"], row["text"]
        if key not in self._segments:
            question = Question(row["id"], row["question"], ())
            self._segments[key] = replay(self._host, question, (row["text"],))
        return self._segments[key]


def read_memory(path: pathlib.Path) -> list[dict]:
    """Return the rows of the set T that a stage has memorised; [] without any.

    Raises:
        ValueError: a line, which the message names with its file, was not written by a
            stage. It is not skipped, since what a step memorises is drawn from all.
        OSError: the file cannot be read.
    """

    def parse(row):
        is_row = isinstance(row, dict) and type(row.get("step")) is int
        texts = ("id", "question", "text")
        if not is_row or not all(isinstance(row.get(name), str) for name in texts):
            names = ", ".join(texts)
            raise ValueError(f"{reprlib.repr(row)}: expected step, {names}")
        return row

    return read_jsonl(path, parse=parse) if path.exists() else []

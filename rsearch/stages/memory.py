"""The set T that R1-Searcher++ memorises: what was found, reworded as recalled.

After each step the correct rollouts that searched are reworded by the rewriting model;
what is verified enters T, in a file, so that a resumed run has it too. Source:
R1-Searcher++ (arXiv 2505.17005) section 4.2.2.
"""

import pathlib

from rsearch import setup as build
from rsearch.data.order import take
from rsearch.hosts import processes
from rsearch.protocols.rewriting import recalled, rewriting_messages
from rsearch.rewards.answers import answer_cover_em
from rsearch.rollout.replay import replay
from rsearch.runtime import console
from rsearch.runtime.jsonl import read_jsonl, write_jsonl
from rsearch.types import GenerateFn, Group, Question, Rollout

FILE = "memory.jsonl"  # in the stage's directory: {"step", "id", "question", "text"}
CORRECT = {"normalize": "r1_searcher", "order": "any", "max_words": 10}
"""What a right answer is (equation 4), where the run's reward does not say."""


def open_memory(setup: build.Setup, folder: pathlib.Path, *, is_over=False):
    """The Memory of an RL stage; None where nothing is memorised.

    Args:
        setup: of the stage.
        folder: of the stage.
        is_over: see `build.load_setup`.
    """
    c = setup.config
    if not c.rl.memorise_coef:
        return None
    own = {"workdir": setup.home, "is_late": is_over}
    rewrite = build.load_agent(c, "rewriter", setup.mesh, **own)
    if not is_over:
        rewrite = build.recorded_agent(c, "rewriter", rewrite, folder)
    return Memory(setup, rewrite, folder)


class Memory:
    """The set T, its file, and the model that words what enters it.

    Args:
        setup: of the stage.
        rewrite: the rewriting model.
        folder: of the stage.
    """

    def __init__(self, setup: build.Setup, rewrite: GenerateFn, folder: pathlib.Path):
        self._setup, self._rewrite = setup, rewrite
        self._host = build.make_host(setup)
        own = setup.config.reward.get("answer_cover_em", {})
        self._correct = {n: own.get(n, value) for n, value in CORRECT.items()}
        self._file = folder / FILE
        self._rows = read_jsonl(self._file) if self._file.exists() else []
        self._segments: dict[tuple, Rollout] = {}

    def rows(self, step: int) -> list:
        """At most config.rl.memorise_rows conversations of T, drawn by step.

        What a later step had added before the run was killed is not in T yet.
        """
        known = [row for row in self._rows if row["step"] <= step]
        if not known:
            return []
        seed, most = self._setup.config.seed, self._setup.config.rl.memorise_rows
        chosen = take(len(known), min(most, len(known)), seed=seed, step=step)
        return [self._replayed(known[i]).segments for i in chosen]

    def collect(self, step: int, groups: list[Group], rewards) -> dict[str, float]:
        """Rewords this step's correct searches; keeps what is right and fits.

        Args:
            step: that the groups come from.
            groups: Q groups.
            rewards: [Q, G]; the best correct rollout of each question is reworded.

        Returns:
            How many were asked for, kept, and are in T.
        """
        self._rows = [row for row in self._rows if row["step"] < step]
        chosen = [
            (group.question, best)
            for group, earned in zip(groups, rewards, strict=True)
            if (best := self._best(group, earned)) is not None
        ]
        known = {row["id"] for row in self._rows}
        chosen = [(q, r) for q, r in chosen if q.id not in known]
        chats = [self._chat(question, rollout) for question, rollout in chosen]
        replies = processes.map_hosts_json(self._rewrite, chats) if chats else []
        num_kept = 0
        for (question, _), text in zip(chosen, replies, strict=True):
            row = {"step": step, "id": question.id, "question": question.text}
            row |= {"text": text}
            if text is not None and self._is_right(question, row):
                self._rows.append(row)
                num_kept += 1
        write_jsonl(self._file, self._rows)
        return {
            "memory_asked": float(len(chats)),
            "memory_kept": float(num_kept),
            "memory_size": float(len(self._rows)),
        }

    def _best(self, group, earned):
        """The correct rollout that searched and earned most, or None."""
        right = [
            (earned[i], -i)
            for i, rollout in enumerate(group.rollouts)
            if rollout.searches
            and rollout.outcome.is_signal
            and self._is_correct(group.question, rollout)
        ]
        return group.rollouts[-max(right)[1]] if right else None

    def _chat(self, question, rollout):
        unique = list({p.contents: p for p in rollout.found}.values())
        user = self._setup.config.protocol.rewrite
        return rewriting_messages(question.text, unique, user=user)

    def _is_correct(self, question, rollout):
        return answer_cover_em(question, [rollout], **self._correct) == [1.0]

    def _is_right(self, question, row):
        """Whether a rewording recalls all, answers right and can be learnt."""
        if recalled(self._setup.protocol, row["text"]) is None:
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

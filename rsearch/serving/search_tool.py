"""The policy with its search engine as a function of questions.

Questions from several threads are rolled out together: the first caller runs a batch,
and questions that arrive meanwhile join the next one.
"""

import collections
import concurrent.futures
import copy
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from rsearch.config.fields import apply_overrides
from rsearch.config.stage_plan import stage_config
from rsearch.evaluation.answers import evidence_of, rephrase_answers
from rsearch.protocols.base import replace_surrogates
from rsearch.rollout.conversation import Conversation
from rsearch.setup.agents import load_agent
from rsearch.setup.load import load_setup
from rsearch.setup.rollouts import make_host, make_rollouts
from rsearch.setup.weights import initial_params
from rsearch.types import Group, Passage, Question, Rollout, SearchFn, Source, ToolUse

WARM_UP_QUESTION = "Who wrote it?"
CANCEL_SECONDS = 0.5  # until a cancelled question that waits is noticed
TOTALS = ("questions_total", "searches_total", "tokens_read_total")
TOTALS += ("tokens_written_total",)

Progress = str | ToolUse
"""Text that the policy has written, or a tool call that was executed."""


class SearchTool:
    """A policy with its search engine; safe to call from several threads.

    Calls that arrive while a batch runs are answered together in the next batch.

    Args:
        config: the policy's configuration; see `tool_config`.
        max_question_chars: longer questions are refused.
        retrieval: fingerprint of what the policy must search; None allows anything.
        log: called with a line of text for each part that takes a while to load.
        search: a SearchFn that replaces the configuration's engine.
        load_params: (setup) -> the policy's parameters.
        home: directory of the run that "stage:<name>" refers to, as the source of
            models other than the policy.

    Attributes:
        name: the name by which clients call the policy: its hub id, or its directory's
            name.

    Raises:
        ValueError: a value or a file cannot be used, or the retrieval is another one.
    """

    def __init__(
        self,
        config: ConfigDict,
        *,
        max_question_chars: int = 2000,
        retrieval: str | None = None,
        log: Callable[[str], None] = lambda text: None,
        search: SearchFn | None = None,
        load_params: Callable = initial_params,
        home: str | os.PathLike | None = None,
    ):
        setup = load_setup(config, log=log, only_policy=True, search=search, home=home)
        if getattr(setup.search, "wants_question_ids", False):
            raise ValueError(
                f"{setup.search} takes the ids of questions, but questions that are "
                "served have none"
            )
        actual_retrieval = setup.inputs["retrieval"]
        if retrieval not in (None, actual_retrieval):
            raise ValueError(
                f"{config.model.source}: trained to search {retrieval!r}, not "
                f"{actual_retrieval!r}; name the index that it was trained with by "
                "--index=DIR, or search this one with --accept=retrieval (in Python, "
                "load_policy with a config or a search)"
            )
        self._host = make_host(setup, on_change=self._on_change)
        self._engine = make_rollouts(
            setup, self._host, temperature=0.0, top_p=1.0, group_size=1
        )
        self._params = self._engine.place_params(load_params(setup))
        self._answerer = load_agent(config, "answerer", setup.mesh, workdir=home)
        self._answer_from = config.eval.answer_from
        self._limits, self._max_chars = setup.limits, max_question_chars
        source = pathlib.Path(config.model.source or home or "")
        self.name = source.resolve().name if source.is_dir() else config.model.source
        self._changed = threading.Condition()  # held to read or change the state below
        self._waiting: list[_Call] = []  # for the next batch
        self._batch: list[tuple[_Call, int]] = []  # call and index of each question
        self._is_running = False
        self._totals = collections.Counter()
        self._search = setup.search
        self._is_paid = bool(config.retrieval.url)  # a service may charge per search

    def warm_up(self) -> None:
        """Compile what a question needs, so that the first one does not wait for it."""
        question = WARM_UP_QUESTION[: self._max_chars]
        if not self._is_paid:
            self.search(question)
        self.ask(question)
        self._totals.clear()

    def __call__(self, question: str | list[str]) -> dict | list[dict]:
        """Return the policy's results: a dict for a question, a list for a list.

        Raises:
            ValueError: a question is not text, is empty or is too long.
        """
        if isinstance(question, str):
            return result_of(self.ask(question))
        return [result_of(group) for group in self._ask_all(question)]

    def rollout(self, question: str | list[str]) -> Rollout | list[Rollout]:
        """Return the conversation that answers a question, or those of a list.

        Its answer is the one that a call returns. Its segments are the text in order,
        each with its source, token ids and log-probabilities.

        Raises:
            ValueError: a question is not text, is empty or is too long.
        """
        if isinstance(question, str):
            return self.rollout([question])[0]
        groups = self._ask_all(question)
        return [rollout for group in groups for rollout in group.rollouts]

    def _ask_all(self, questions):
        """Return the groups of a list of questions."""
        # The elements of other types, such as the keys of a dict, are no questions.
        if not isinstance(questions, list | tuple):
            questions = [questions]
        return self._answer(_Call([self.check(q) for q in questions]))

    def ask(
        self,
        question: str,
        *,
        on_step: Callable[[Progress], None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Group:
        """Return the group of a question, which has one rollout.

        Args:
            question: any text that `check` accepts.
            on_step: called with each executed tool call and, a few tokens at a time,
                with the text of the turns. It is called from another thread, which it
                must not block. Every turn but the first begins with a line feed.
            is_cancelled: called while the question waits for its batch or for another
                caller that runs it, and after each turn and tool call; a true result
                ends the rollout.

        Raises:
            ValueError: the question is not text, is empty or is too long.
            CancelledError: the question was cancelled.
        """
        call = _Call([self.check(question)], on_step, is_cancelled)
        (group,) = self._answer(call)
        return group

    def search(self, query: str) -> list[dict]:
        """Return the passages that the policy would be shown for a query.

        Raises:
            ValueError: the query is empty or too long, or the search failed.
        """
        if not query.strip() or len(query) > self._max_chars:
            raise ValueError(
                f"a query must have 1 to {self._max_chars} characters, this one has "
                f"{len(query)}"
            )
        # Not while a batch runs: not every engine allows searches that overlap.
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)
            self._is_running = True
        try:
            (passages,) = self._search([replace_surrogates(query)])
        finally:
            self._end_run()
        if passages is None:
            raise ValueError("the search failed; try again later")
        return [passage_value(passage) for passage in passages]

    def check(self, question: Any) -> str:
        """Return the question in the form in which it will be asked.

        Raises:
            ValueError: the question is not text, is empty or is too long.
        """
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"a question must be text and not empty, got {question!r}")
        if len(question) > self._max_chars:
            raise ValueError(
                f"a question may have {self._max_chars} characters, this one has "
                f"{len(question)}"
            )
        question = replace_surrogates(question)
        size = len(self._engine.prompt(Question("", question, ())))
        if size > self._limits.max_prompt_tokens:
            raise ValueError(
                "a question's prompt may have rollout.max_prompt_tokens = "
                f"{self._limits.max_prompt_tokens} tokens, this one's has {size}"
            )
        return question

    def counts(self) -> dict[str, int]:
        """Return {name: number} of questions, tokens and searches, for monitoring."""
        with self._changed:
            num_waiting = sum(len(call.questions) for call in self._waiting)
            num_running = len(self._batch)
            queue = {"questions_waiting": num_waiting, "questions_running": num_running}
            return {**queue, **{name: self._totals[name] for name in TOTALS}}

    def _answer(self, call):
        """Return a call's groups in order; run a batch if no other caller does."""
        if not call.questions:
            return []
        calls = []
        with self._changed:
            self._waiting.append(call)
            while not self._changed.wait_for(
                lambda: call.is_over or not self._is_running, CANCEL_SECONDS
            ):
                # Otherwise callers that have left would pile up behind a slow search.
                if call.is_cancelled():
                    call.error = concurrent.futures.CancelledError()
                    if call in self._waiting:
                        self._waiting.remove(call)
            if not call.is_over:
                self._is_running = True
                calls, self._waiting = self._waiting, []
        if calls:
            try:
                self._run(calls)
            finally:
                self._end_run()
        if call.error is not None:
            raise call.error
        return call.groups

    def _end_run(self):
        with self._changed:
            self._is_running, self._batch = False, []
            self._changed.notify_all()

    def _run(self, calls):
        """Run a batch: set the groups of each call, or its error."""
        for call in calls:
            if call.is_cancelled():
                call.error = concurrent.futures.CancelledError()
        calls = [call for call in calls if call.error is None]
        self._batch = [(c, i) for c in calls for i in range(len(c.questions))]
        questions = [c.questions[i] for c, i in self._batch]
        is_streamed = any(call.is_streamed for call in calls)
        self._host.on_write = self._write if is_streamed else None
        try:
            groups = self._engine(
                self._params,
                [Question(str(i), text, ()) for i, text in enumerate(questions)],
                jax.random.key(0),  # Never drawn from: decoding is greedy.
            )
            if self._answerer is not None:
                groups = rephrase_answers(
                    groups, self._answerer, answer_from=self._answer_from
                )
            for (call, i), group in zip(self._batch, groups, strict=True):
                call.groups[i] = group
            with self._changed:
                for group in groups:
                    self._totals += _totals_of(group)
        except BaseException as error:  # Control-C too: no other thread runs these.
            for call in calls:
                if not call.is_over:
                    call.error = error

    def _write(self, conversation: Conversation, text: str) -> None:
        """Report to a question's caller the text of its unfinished turn so far."""
        call, _ = self._batch[int(conversation.question_id)]
        call.report_text(conversation.num_turns, text)

    def _on_change(self, conversation: Conversation) -> bool:
        """Report what is new to the caller; return whether the rollout continues."""
        call, i = self._batch[int(conversation.question_id)]
        call.report(conversation)
        is_over = conversation.outcome is not None
        if is_over and self._answerer is None and not call.is_over:
            # The caller does not wait for the rest of the batch.
            question = Question(conversation.question_id, call.questions[i], ())
            with self._changed:
                call.groups[i] = Group(question, (conversation.rollout(),))
                self._changed.notify_all()
        elif not is_over and call.is_cancelled():
            with self._changed:
                call.error = concurrent.futures.CancelledError()
                self._changed.notify_all()
            return False
        return True


class _Call:
    """One caller's questions and their results: groups, or an exception."""

    def __init__(self, questions, on_step=None, is_cancelled=None):
        self.questions = questions
        self.groups = [None] * len(questions)
        self.error = None
        self.is_cancelled = is_cancelled or (lambda: False)
        self._on_step = on_step
        # How much has been reported; characters are those of the next turn.
        self._num_turns = self._num_uses = self._num_chars = 0

    @property
    def is_streamed(self):
        return self._on_step is not None

    @property
    def is_over(self):
        return self.error is not None or None not in self.groups

    def report(self, conversation):
        """Report what is new; a restarted rollout's repetitions are not reported."""
        if not self.is_streamed:
            return
        turns = [s.text for s in conversation.segments if s.source == Source.POLICY]
        for number, text in enumerate(turns):
            self.report_text(number, text)
            if number == self._num_turns:
                self._num_turns, self._num_chars = number + 1, 0
        for use in conversation.tool_uses[self._num_uses :]:
            self._on_step(use)
        self._num_uses = max(self._num_uses, len(conversation.tool_uses))

    def report_text(self, number, text):
        """Report the new part of a turn, given its number and its text so far."""
        if self.is_streamed and number == self._num_turns:
            separator = "\n" if number and not self._num_chars else ""
            if new_text := text[self._num_chars :]:
                self._on_step(separator + new_text)
                self._num_chars += len(new_text)


def _totals_of(group):
    """Return {name of TOTALS: number} of a question's rollout."""
    (rollout,) = group.rollouts
    num_written = rollout.num_policy_tokens
    num_read = rollout.num_tokens - num_written
    numbers = (1, len(rollout.searches), num_read, num_written)
    return collections.Counter(dict(zip(TOTALS, numbers, strict=True)))


def passage_values(rollout: Rollout) -> list[dict]:
    """Return the passages that the policy was shown, each once, as JSON values."""
    # Keyed by contents too, since a writer's observations have no ids of their own.
    passages = {(p.id, p.contents): p for p in rollout.passages}
    return [passage_value(passage) for passage in passages.values()]


def passage_value(passage: Passage) -> dict:
    """Return a passage as JSON values."""
    return {"id": passage.id, "title": passage.title, "text": passage.text}


def result_of(group: Group) -> dict:
    """Return the caller's result, from a question's only rollout, as JSON values."""
    (rollout,) = group.rollouts
    return {
        "question": group.question.text,
        "evidence": evidence_of(rollout),
        "answer": rollout.answer,
        "queries": [q for use in rollout.searches for q in use.call.arguments],
        "passages": passage_values(rollout),
        "outcome": rollout.outcome.value,
    }


def tool_config(
    recipe: ConfigDict,
    *,
    model: str = "",
    index: str = "",
    corpus: str = "",
    encoder: str = "",
    family: str = "",
    protocol: str = "",
    max_concurrent: int = 8,
    keeps_mesh: bool = False,
) -> ConfigDict:
    """Return a recipe's configuration with this model and index.

    Args:
        recipe: any recipe, which is not modified; the settings of its last stage count.
        model, index, encoder, family, protocol: see `rsearch.tool.POLICY_FLAGS`; ""
            keeps the recipe's.
        corpus: the corpus of `index`; "" = the one that it was built from.
        max_concurrent: number of questions answered concurrently.
        keeps_mesh: whether to use the recipe's mesh, which is for the machines of the
            training; otherwise each device holds the whole model.
    """
    changes = {
        # Nothing is trained, so the rules for training stages must not apply.
        "stages": ("curate",),
        "rollout.group_size": 1,
        "rollout.max_concurrent": max_concurrent,
    }
    if not keeps_mesh:
        changes |= {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
        changes |= {"rollout.devices": 0}
    if model:
        changes |= {"model.source": model, "tokenizer.source": ""}
    if index:
        changes |= {"retrieval.index": index, "retrieval.corpus": corpus}
        changes |= {"data.train": "", "data.dev": ""}
    changes |= {"retrieval.encoder": encoder} if encoder else {}
    changes |= {"retrieval.family": family} if family else {}
    config = apply_overrides(stage_config(recipe, recipe.stages[-1]), changes)
    if protocol and protocol != config.protocol.name:
        # The recipe's texts belong to its own protocol.
        config = copy.deepcopy(config)
        config.protocol.name = protocol
        for name in ("instruction", "system", "invalid_message"):
            config.protocol[name] = None
    return config

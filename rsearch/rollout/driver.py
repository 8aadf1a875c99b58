"""Rollouts: the policy writes on the device, the host answers, turn by turn."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.rollout.conversation import Conversation, Host
from rsearch.rollout.sampler import Sampler
from rsearch.types import (
    Answer,
    Group,
    Malformed,
    Messages,
    Outcome,
    Question,
    Rollout,
    Search,
    Source,
)


class RolloutEngine:
    """Rolls out questions in waves of a fixed number of rows."""

    def __init__(
        self,
        sampler: Sampler,
        host: Host,
        *,
        num_rows: int,
        group_size: int,
        messages: Callable[[Question], Messages] | None = None,
    ):
        """Holds what a rollout needs.

        Args:
            sampler: the compiled functions; they fix temperature and nucleus.
            host: protocol, tokenizer, search and budgets.
            num_rows: B, conversations decoded at once.
            group_size: G, rollouts of each question; divides num_rows.
            messages: the chat that opens a question's rollouts; the protocol's own
                where not given.
        """
        if num_rows % group_size:
            raise ValueError(f"{num_rows=} is not divisible by {group_size=}")
        self._sampler, self._host = sampler, host
        self._num_rows, self._group_size = num_rows, group_size
        self._messages = messages or (lambda q: host.protocol.messages(q.text))
        self._has_extended = False

    def prompt(self, question: Question) -> np.ndarray:
        """[n] int32 ids of the question's prompt."""
        return self._host.prompt(self._messages(question))

    @property
    def num_traces(self) -> int:
        """How often its functions have been traced; constant after the first wave."""
        return self._sampler.num_traces

    def place(self, params):
        """The parameters as `__call__` wants them."""
        return self._sampler.place(params)

    def __call__(
        self, params, questions: Sequence[Question], key, *, on_wave=None
    ) -> list[Group]:
        """A group for each question.

        Args:
            params: from `place`.
            questions: any number; the last wave is filled with idle rows.
            key: of this seed, stage and step. A rollout's draws follow from it, the
                question's id, the sample's number and the token's position alone.
            on_wave: called with the number of questions finished so far.

        Raises:
            ValueError: a prompt is longer than its budget.
        """
        size = self._num_rows // self._group_size
        groups = []
        for start in range(0, len(questions), size):
            groups += self._wave(params, questions[start : start + size], key)
            if on_wave is not None:
                on_wave(len(groups))
        return groups

    def _wave(self, params, questions, key) -> list[Group]:
        limits, g = self._host.limits, self._group_size
        wave, rows, keys = self._open(params, questions, key)
        if limits.num_turns > 1 and not self._has_extended:
            # Compiled now: the first wave in which somebody reads may be a late one.
            rows = self._sampler.extend(params, rows, *self._block({}))
            self._has_extended = True
        budget = np.full(self._num_rows, limits.max_turn_tokens, np.int32)
        for turn in range(limits.num_turns):
            going = [i for i, c in wave.items() if c.outcome is None]
            if not going:
                break
            active = np.zeros(self._num_rows, bool)
            active[going] = True
            rows, written = self._sampler.decode(params, rows, keys, active, budget)
            written = jax.device_get(written)
            turns = {
                i: (written.tokens[i, :n], written.logp[i, :n])
                for i in going
                for n in [written.count[i]]
            }
            final = turn == limits.num_turns - 1
            shown = self._host.answer_turns(wave, turns, final=final)
            if shown:
                rows = self._sampler.extend(params, rows, *self._block(shown))
        return [
            Group(q, tuple(wave[i * g + j].rollout() for j in range(g)))
            for i, q in enumerate(questions)
        ]

    def _open(self, params, questions, key):
        """Conversations by row, the rows on the device, and their [B] keys."""
        g, limit = self._group_size, self._host.limits.max_prompt_tokens
        size = self._num_rows // g
        tokens = np.zeros((size, limit), np.int32)
        count = np.ones(size, np.int32)
        names = np.zeros(size, np.uint32)
        wave: dict[int, Conversation] = {}
        for i, question in enumerate(questions):
            ids = self.prompt(question)
            if len(ids) > limit:
                raise ValueError(
                    f"question {question.id}: its prompt has {len(ids)} tokens, "
                    f"rollout.max_prompt_tokens is {limit}"
                )
            tokens[i, : len(ids)], count[i] = ids, len(ids)
            names[i] = zlib.crc32(question.id.encode("utf-8", "replace"))
            for j in range(g):
                wave[i * g + j] = self._host.open(ids)
        prompts = self._sampler.prefill(params, tokens, count)
        rows = self._sampler.spread(prompts, np.repeat(np.arange(size), g))
        keys = _row_keys(key, jnp.repeat(names, g), jnp.tile(jnp.arange(g), size))
        return wave, rows, keys

    def _block(self, shown):
        """[B, O] ids and [B] counts of what the rows read next."""
        tokens = np.zeros((self._num_rows, self._host.shown_tokens), np.int32)
        count = np.zeros(self._num_rows, np.int32)
        for i, ids in shown.items():
            tokens[i, : len(ids)], count[i] = ids, len(ids)
        return tokens, count


def replay(
    host: Host,
    question: Question,
    turns: Sequence[str],
    *,
    messages=None,
    context_turns: int = 0,
    observations: Sequence[str] | None = None,
    may_stop: bool = False,
) -> Rollout:
    """The rollout of a policy that writes the given turns: a demonstration.

    Args:
        host: answers its searches.
        question: opens the conversation.
        turns: what is written, turn by turn, each up to its action. It begins and, if
            no stop string ends it, ends as in a chat: see `Host.start_of`, `end_of`.
        messages: the chat that opens it; the protocol's own where not given.
        context_turns: how many of the first turns are given and not learnt: their
            segments are part of the prompt.
        observations: [turns - 1] contents that are shown after each turn but the last,
            in place of what the host finds.
        may_stop: whether the last turn may search: what it finds is not part of the
            rollout, whose outcome is TRUNCATED.

    Raises:
        ValueError: a turn is malformed, too long or goes on beyond its action, a search
            fails, turns are left over, or missing; no turn is left to learn, or there
            is not one observation for each turn but the last.
    """

    def refuse(what):
        return ValueError(f"demonstration of question {question.id}: {what}")

    limits = host.limits
    prompt = host.prompt(messages or host.protocol.messages(question.text))
    if len(prompt) > limits.max_prompt_tokens:
        raise refuse(f"prompt of {len(prompt)} tokens > {limits.max_prompt_tokens}")
    if context_turns and not 0 < context_turns < len(turns):
        raise refuse(f"{context_turns} turns of context leave none of {len(turns)}")
    if observations is not None and len(observations) != len(turns) - 1:
        raise refuse(f"{len(observations)} observations of {len(turns)} turns")
    wave = {0: host.open(prompt)}
    for number, text in enumerate(turns):
        if wave[0].outcome is not None:
            raise refuse(f"ended with turn {number} of {len(turns)}")
        action = host.protocol.parse(text)
        if isinstance(action, Malformed):
            raise refuse(f"turn {number + 1} has no action: {text!r}")
        try:
            ids = _turn_ids(host, host.start_of(number) + text, action)
        except ValueError as error:
            raise refuse(f"turn {number + 1} {error}") from None
        written = {0: (ids, np.zeros(len(ids), np.float32))}
        is_recorded = observations is not None and number < len(observations)
        host.answer_turns(
            wave,
            written,
            final=number == limits.num_turns - 1,
            recorded={0: observations[number]} if is_recorded else None,
        )
        if wave[0].outcome == Outcome.TOOL_ERROR:
            raise refuse(f"the search of turn {number + 1} failed")
    if wave[0].outcome is None and turns and may_stop:
        wave[0].outcome = Outcome.TRUNCATED
        del wave[0].segments[-1]
    if wave[0].outcome is None:
        raise refuse(f"{len(turns)} turns do not end it")
    return _with_context(wave[0].rollout(), context_turns)


def _turn_ids(host: Host, text: str, action: Search | Answer) -> np.ndarray:
    """[n] int32 ids of a demonstrated turn that takes this action.

    Raises:
        ValueError: it goes on behind its stop string, or is too long.
    """
    stops = [s for s in host.protocol.stop_strings if s in text]
    end = min((text.index(s) + len(s) for s in stops), default=len(text))
    if end < len(text):
        raise ValueError(f"goes on beyond its action: {text[end:]!r}")
    ids = host.tokenizer.encode(text)
    if not stops:
        ids = np.append(ids, np.int32(host.end_of(action)))
    if len(ids) > host.limits.max_turn_tokens:
        raise ValueError(
            f"is too long: {len(ids)} tokens in a turn > {host.limits.max_turn_tokens}"
        )
    return ids


def _with_context(rollout: Rollout, context_turns: int) -> Rollout:
    """The rollout with its first turns given, as the prompt is: nobody learns them."""
    segments, left = [], context_turns
    for segment in rollout.segments:
        if segment.source == Source.POLICY and left:
            segment = dataclasses.replace(segment, source=Source.PROMPT)
            left -= 1
        segments.append(segment)
    return dataclasses.replace(rollout, segments=tuple(segments))


@jax.jit
def _row_keys(key, names, samples):
    """[B] keys from [B] question names and [B] sample numbers."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, 0))
    base = jax.vmap(lambda name: jax.random.fold_in(key, name))(names)
    return fold(base, samples)

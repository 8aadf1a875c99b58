"""A model on this machine's devices that answers requests, each by itself."""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from rsearch.learn.logprobs import token_logprobs
from rsearch.llm.batches import SHRINK, batch_sizes, batches_by_length
from rsearch.llm.prefixes import (
    EncodedPrompt,
    SharedPrefixes,
    choose_rows,
    prefix_digests,
)
from rsearch.llm.requests import (
    CUT,
    STOPPED,
    Completion,
    Completions,
    Generate,
    Mix,
    Score,
    TextScore,
    TextWithMarkers,
    cut_at_stop,
    cut_pieces,
    in_order,
    token_pieces,
)
from rsearch.llm.thoughts import answer_after_thoughts, log_failures
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import place_for_decoding, platform_of, replicated
from rsearch.models.tokenizer import Tokenizer
from rsearch.rollout.decode import Sampler, even_chunk
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.multihost import MultihostSampler
from rsearch.rollout.sampling import row_keys, sample_mixtures
from rsearch.rollout.stop_strings import StopSets, token_automaton
from rsearch.runtime import console
from rsearch.types import GenerateFn, Messages, Params

CHUNK = 128  # maximum number of prompt tokens read at a time
CPU_CHUNK = 32  # the same on CPUs, where padding costs as much as tokens
CHECK_EVERY = 8  # tokens between two checks whether a text is enough
NOT_SHARED = (
    "config.eval.methods names a method that needs stop strings, log-probabilities or "
    "mixtures, which a model shared by all hosts does not support; "
    "config.rollout.global_mesh = True"
)
NO_LOGP = np.zeros(0, np.float32)
SCORED_WIDTH = 64  # width of the shortest rows that are scored; others double it


class _Mixture(NamedTuple):
    """A mixture and its encoded prompts.

    Attributes:
        index: number of the request in its call.
        prompts: [n] int32 ids of each prompt.
        name: names its random keys; see `_names`.
    """

    index: int
    request: Mix
    prompts: list[np.ndarray]
    name: tuple[int, int]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(map(len, self.prompts))


class LocalModel:
    """Compiled functions that continue and score texts, for parameters of one shape.

    A completion depends on the seed, the prompt, the request's `draw`, and how many
    equal prompts with that draw precede it among the requests of a call, or among those
    that are appended to them at the same time. Other requests, batches and devices
    change nothing, and a prompt that occurs n times in one call gets n samples.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        num_rows: int,
        max_prompt_tokens: int,
        max_reply_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        is_shared: bool = False,
    ):
        """Prepare the functions; each is compiled when it is first needed.

        Args:
            num_rows: number of prompts continued at once; fewer prompts run in one of a
                few smaller batches.
            max_prompt_tokens: longer prompts get no completion.
            max_reply_tokens: length at which completions are cut.
            temperature: sampling temperature; 0 takes the most likely token.
            top_p: smallest probability mass kept when sampling; 1 keeps everything.
            is_shared: whether the mesh spans all hosts, which then call `generate`
                together, each with its own number of requests. Stop strings,
                log-probabilities, mixtures and scores need a mesh of this host only.
        """
        self._tokenizer, self._mesh, self._is_shared = tokenizer, mesh, is_shared
        max_chunk = CPU_CHUNK if platform_of(mesh) == "cpu" else CHUNK
        sampler = Sampler(
            model,
            mesh,
            stop_table=token_automaton((), tokenizer.token_bytes),
            eos_ids=tokenizer.eos_ids,
            num_slots=max_prompt_tokens + max_reply_tokens,
            max_turn_tokens=max_reply_tokens,
            chunk=max_chunk,
            temperature=temperature,
            top_p=top_p,
        )
        self._sampler = MultihostSampler(sampler, mesh) if is_shared else sampler
        self._chunk = even_chunk(max_prompt_tokens, max_chunk)
        self._prefixes = SharedPrefixes(self._chunk, self._read_prefix)
        self._stops = StopSets(tokenizer.token_bytes, model.spec.vocab_size)
        # Its table, and the same on the devices.
        self._placed_table: tuple[np.ndarray, jax.Array] | None = None
        self.num_rows = num_rows
        # Each device reads and continues rows of its own. The rows of hosts that share
        # a model must be spread evenly.
        row_shards = self._sampler.row_shards
        sizes = batch_sizes(num_rows, row_shards(num_rows))
        # {compiled batch size: rows of it that each device reads}
        self._device_rows = {size: size // row_shards(size) for size in sizes}
        self.max_prompt_tokens = max_prompt_tokens
        self.max_reply_tokens = max_reply_tokens
        self._key = jax.random.key(seed)
        scorer = functools.partial(token_logprobs, model.clone(mesh=mesh))
        self._logprobs = jax.jit(lambda params, tokens: scorer(params, tokens)[0])
        self._choose = jax.jit(
            functools.partial(sample_mixtures, temperature=temperature, top_p=top_p)
        )

    def load(self, params: Params) -> None:
        """Use these parameters for all further answers.

        Args:
            params: parameters of the model, on any mesh that contains this one.
        """
        if not self._is_shared:
            self._params = place_for_decoding(params, self._mesh)
        self._decoding_params = self._sampler.place_params(params)
        self._prefixes.clear()

    def on_any_host(self, value: object) -> bool:
        """Return whether the value is true on any host that shares this model."""
        return bool(self._sampler.all_gather(bool(value)).any())

    def generate(self, requests: Sequence[Generate]) -> Completions:
        """Continue each prompt; None if it is longer than `max_prompt_tokens`.

        A prompt that begins like one before it, such as the next one of its question,
        is read from where they differ. Hosts that share the model consume all
        completions.

        Raises:
            ValueError: the model is shared by all hosts, and a request has stop strings
                or wants log-probabilities.
        """
        size = self._batch_size(min(len(requests), self.num_rows))
        rows = self._sampler.empty(size)
        # The prompt that each row continues, and the last one that it has read.
        prompts: list[EncodedPrompt | None] = [None] * size
        last_prompts = list(prompts)
        waiting: list[EncodedPrompt] = []
        num_taken = num_done = 0
        show_progress = console.note_now_and_then(
            lambda: f"the model has written {num_done} of {num_taken} replies"
        )
        while True:
            results: list[tuple[int, Completion | None]] = []
            for prompt in self._take(requests, num_taken):
                if len(prompt.ids) > self.max_prompt_tokens:
                    results.append((prompt.index, None))
                else:
                    waiting.append(prompt)
            num_taken = len(requests)
            if not self.on_any_host(results or waiting or any(prompts)):
                return
            free_rows = [row for row in range(size) if prompts[row] is None]
            admissions = choose_rows(waiting, free_rows, last_prompts, self._chunk)
            for row, prompt, _ in admissions:
                prompts[row] = last_prompts[row] = prompt
                waiting.remove(prompt)
            if self.on_any_host(admissions):
                rows = self._admit(rows, size, admissions)
            if self.on_any_host(any(prompts)):
                decode_request = self._decode_request(prompts, admissions)
                rows = self._sampler.decode(
                    self._decoding_params, rows, self._key, decode_request
                )
                turn = self._sampler.turns_on_host(rows)
            for row, prompt in enumerate(prompts):
                if prompt is None:
                    continue
                request, ids = prompt.request, turn.tokens[row, : turn.count[row]]
                num_enough = self._num_enough(ids, request.is_enough)
                if num_enough is None and turn.active[row]:
                    continue
                prompts[row] = None
                logp = turn.logp[row] if request.wants_logp else NO_LOGP
                completion = self._completion(
                    prompt.ids, ids[:num_enough], request.stop, logp
                )
                results.append((prompt.index, completion))
            num_done += len(results)
            show_progress()
            yield results

    def score(self, requests: Sequence[Score]) -> list[TextScore | None]:
        """Score each text; None if it and its prefix do not fit in the context.

        Prefix and text are encoded separately, so that no token spans their border.

        Raises:
            ValueError: the model is shared by all hosts.
        """
        if self._is_shared:
            raise ValueError(NOT_SHARED)
        tokenizer = self._tokenizer
        texts = [tokenizer.encode_inner(r.text, is_mark=r.is_mark) for r in requests]
        pairs = [(self._encode(r.prefix), t) for r, t in zip(requests, texts)]
        max_tokens = self.max_prompt_tokens + self.max_reply_tokens
        indices = [i for i, (a, b) in enumerate(pairs) if len(a) + len(b) <= max_tokens]
        logps = self._score_ids([pairs[i] for i in indices])
        results: list[TextScore | None] = [None] * len(requests)
        for i, logp in zip(indices, logps, strict=True):
            prefix, text = pairs[i]
            results[i] = TextScore(self._pieces(text), logp, len(prefix) + len(text))
        return results

    def mix(self, requests: Sequence[Mix]) -> Completions:
        """Continue the mixtures; None if a prompt is longer than `max_prompt_tokens`.

        Raises:
            ValueError: a mixture has more prompts than there are rows, or the model is
                shared by all hosts.
        """
        if self._is_shared:
            raise ValueError(NOT_SHARED)
        waiting: list[_Mixture] = []
        num_taken = 0
        while waiting or num_taken < len(requests):
            waiting += self._take_mixtures(requests, num_taken)
            num_taken = len(requests)
            # Prompts that are read together cost as much as the longest of them.
            waiting.sort(key=lambda mixture: -mixture.longest)
            limit = self.max_prompt_tokens
            num_long = sum(mixture.longest > limit for mixture in waiting)
            results = [(mixture.index, None) for mixture in waiting[:num_long]]
            num_prompts = np.cumsum([len(m.prompts) for m in waiting[num_long:]])
            end = num_long + int((num_prompts <= self.num_rows).sum())
            if end > num_long:
                results += self._mix_batch(waiting[num_long:end])
            del waiting[:end]
            yield results

    def _take_mixtures(self, requests, first: int) -> list[_Mixture]:
        """Return the mixtures from number `first` on, with their encoded prompts."""
        prompts = [[self._encode(p) for p in r.prompts] for r in requests[first:]]
        names = _names(map(np.concatenate, prompts), [r.draw for r in requests[first:]])
        mixtures = []
        for i, (ids, name) in enumerate(zip(prompts, names, strict=True), first):
            if len(ids) > self.num_rows:
                raise ValueError(
                    f"a mixture of {len(ids)} prompts, but {self.num_rows} are "
                    "continued at once (config.rollout.max_concurrent)"
                )
            mixtures.append(_Mixture(i, requests[i], ids, name))
        return mixtures

    def _encode(
        self, prompt: Messages | str | TextWithMarkers, continued: str = ""
    ) -> np.ndarray:
        """Return the ids of a prompt; only its marks can become control tokens."""
        tokenizer = self._tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode_raw(prompt)
        elif isinstance(prompt, TextWithMarkers):
            first, *inner_texts = prompt.texts
            inner_ids = [
                tokenizer.encode_inner(text, is_mark=i % 2 == 0)
                for i, text in enumerate(inner_texts)
            ]
            ids = np.concatenate([tokenizer.encode_raw(first), *inner_ids])
        else:
            ids = tokenizer.encode_prompt(prompt)
            if continued:
                ids = np.concatenate([ids, tokenizer.encode(continued)])
        # What follows an empty prompt is conditioned on the end-of-text token.
        return ids if len(ids) else np.array([tokenizer.eos_ids[0]], np.int32)

    def _pieces(self, ids) -> tuple[str, ...]:
        table, size = self._tokenizer.token_bytes, len(self._tokenizer.token_bytes)
        return token_pieces([table[i] if i < size else b"" for i in ids])

    def _without_end(self, ids):
        """Return the ids of a reply without the end-of-text token."""
        return ids[:-1] if len(ids) and ids[-1] in self._tokenizer.eos_ids else ids

    def _num_enough(self, ids, is_enough) -> int | None:
        """Return the fewest tokens of a reply that are enough; None if it is not."""

        def holds(size):
            return is_enough(self._tokenizer.decode(self._without_end(ids[:size])))

        if is_enough is None or not holds(len(ids)):
            return None
        # The fewest, so that the result does not depend on when the text is checked.
        return next(size for size in range(len(ids) + 1) if holds(size))

    def _completion(self, prompt_ids, ids, stop=(), logp=NO_LOGP) -> Completion:
        """Return what was written, without the end-of-text token or the stop string."""
        text_ids = self._without_end(ids)
        has_ended = len(text_ids) < len(ids)
        text, ending = cut_at_stop(self._tokenizer.decode(text_ids), stop)
        pieces = cut_pieces(self._pieces(text_ids), len(text))
        end = STOPPED if has_ended or ending else CUT
        prompt_text = self._tokenizer.decode(prompt_ids)
        return Completion(
            text, end, pieces, logp[: len(pieces)], prompt_ids, ids, prompt_text, ending
        )

    def _take(self, requests, first: int) -> list[EncodedPrompt]:
        """Return the requests from number `first` on, with their encoded prompts."""
        new_requests = requests[first:]
        for request in new_requests:
            if self._is_shared and (request.stop or request.wants_logp):
                raise ValueError(NOT_SHARED)
        ids = [self._encode(r.prompt, r.continued) for r in new_requests]
        names = _names(ids, [request.draw for request in new_requests])
        # Hosts that share the model must make the same calls, so no prefix is shared.
        prefixes = [
            () if self._is_shared else prefix_digests(x, self._chunk) for x in ids
        ]
        fields = zip(itertools.count(first), new_requests, ids, names, prefixes)
        return [EncodedPrompt(*values) for values in fields]

    def _decode_request(self, prompts, admissions) -> DecodeRequest:
        """Return what to decode, for the prompt of each row (None is none)."""
        size, names = len(prompts), np.zeros((len(prompts), 2), np.uint32)
        # No budget ends a turn that is still active.
        budget, states = np.zeros(size, np.int32), np.zeros(size, np.uint8)
        wants_logp, is_new = np.zeros(size, bool), np.zeros(size, bool)
        is_new[[row for row, _, _ in admissions]] = True
        may_be_enough = False
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                request, names[row] = prompt.request, prompt.name
                budget[row] = min(request.max_tokens, self.max_reply_tokens)
                states[row] = self._stops.first_state(request.stop)
                wants_logp[row] = request.wants_logp
                may_be_enough |= request.is_enough is not None
        num_active = size - prompts.count(None)
        return DecodeRequest(
            names,
            is_new,
            budget,
            # Wait for a few rows to finish: larger batches of prompts cost less.
            min(-(-size // SHRINK), num_active),
            CHECK_EVERY if may_be_enough else self.max_reply_tokens,
            stop_table=None if self._is_shared else self._stop_table(),
            stop_states=None if self._is_shared else states,
            unscaled_logp=wants_logp if wants_logp.any() else None,
        )

    def _stop_table(self) -> jax.Array:
        """Return the table of all stop strings, copied to the devices if it is new.

        It has a column for each id of the vocabulary, so copying it in each call takes
        longer than decoding a few tokens with a small model.
        """
        table = self._stops.table  # another array once there are more stop strings
        if self._placed_table is None or self._placed_table[0] is not table:
            self._placed_table = table, jax.device_put(table, replicated(self._mesh))
        return self._placed_table[1]

    def _batch_size(self, num: int) -> int:
        """Return the compiled batch size for `num` rows, the same on all hosts."""
        num = int(self._sampler.all_gather(num).max())
        return min(size for size in self._device_rows if size >= num)

    def _admit(self, rows, num_rows, admissions):
        """Return the `num_rows` rows after each admitted row has read its prompt.

        Args:
            admissions: result of `choose_rows`.
        """
        shared = [admission for admission in admissions if admission[2]]
        if shared:
            slots = np.array([row for row, _, _ in shared])
            length = np.array(rows.context.length)
            length[slots] = [num for _, _, num in shared]
            length = jax.device_put(length, rows.context.length.sharding)
            context = rows.context._replace(length=length)
            suffixes = [prompt.ids[num:] for _, prompt, num in shared]
            rows = self._extend(
                rows._replace(context=context), num_rows, slots, suffixes
            )
        slots = np.array([row for row, _, num in admissions if not num], np.int32)
        prompts = [prompt.ids for _, prompt, num in admissions if not num]
        if self._is_shared:
            return self._admit_unread(rows, num_rows, slots, prompts)
        return self._admit_sharing(rows, num_rows, slots, prompts)

    def _admit_sharing(self, rows, num_rows, slots, prompts):
        """Return the rows, where row slots[i] has read prompts[i]."""
        for members, prefix, size in self._prefixes.groups(prompts):
            suffixes = [prompts[i][size:] for i in members]
            if prefix is not None:
                rows = self._admit_with_prefix(
                    prefix, rows, num_rows, slots[members], suffixes
                )
                continue
            lengths = [*map(len, suffixes)]
            for batch in batches_by_length(lengths, self._device_rows, self._chunk):
                sequences = [suffixes[i] for i in batch]
                batch_slots = slots[members][batch]
                rows = self._admit_unread(rows, num_rows, batch_slots, sequences)
        return rows

    def _admit_unread(self, rows, num_rows, slots, prompts):
        """Return the rows, where row slots[i] has read prompts[i] without sharing."""
        target = self._padded_slots(num_rows, slots)
        tokens, count = self._padded(len(target), range(len(prompts)), prompts)
        contexts = self._sampler.prefill(self._decoding_params, tokens, count)
        source = np.arange(len(target), dtype=np.int32)
        return self._sampler.admit(rows, contexts, target, source)

    def _admit_with_prefix(self, prefix, rows, num_rows, slots, suffixes):
        """Return the rows, where row slots[i] has read a prefix and suffixes[i]."""
        target = self._padded_slots(num_rows, slots)
        source = np.zeros(len(target), np.int32)
        rows = self._sampler.admit(rows, prefix, target, source)
        return self._extend(rows, num_rows, slots, suffixes)

    def _padded_slots(self, num_rows, slots):
        """Return the slots as [n] of a compiled batch size; `num_rows` is padding."""
        padded_slots = np.full(self._batch_size(len(slots)), num_rows, np.int32)
        padded_slots[: len(slots)] = slots
        return padded_slots

    def _extend(self, rows, num_rows, slots, suffixes):
        """Return the rows after row slots[i] has also read suffixes[i].

        Each shard reads for its own rows.
        """
        num_shards = self._sampler.row_shards(num_rows)
        shard_rows = num_rows // num_shards
        queues: list[list[int]] = [[] for _ in range(num_shards)]
        for i in sorted(range(len(slots)), key=lambda i: -len(suffixes[i])):
            queues[slots[i] // shard_rows].append(i)
        # Each call reads equally many sequences for each shard. Those that are read
        # together cost as much as the longest of them.
        rounds = itertools.zip_longest(*queues)
        lengths = [
            max(len(suffixes[i]) for i in members if i is not None)
            for members in rounds
        ]
        sizes = {n: n for n in batch_sizes(shard_rows)}
        for batch in batches_by_length(lengths, sizes, self._chunk):
            size = min(n for n in sizes if n >= len(batch))
            # For each sequence: its index in `slots`, and its row in this call.
            index_pairs = [
                (queue[k], size * shard + n)
                for shard, queue in enumerate(queues)
                for n, k in enumerate(batch)
                if k < len(queue)
            ]
            members, row_indices = np.array(index_pairs).T
            target = np.full(size * num_shards, num_rows, np.int32)
            target[row_indices] = slots[members]
            sequences = [suffixes[i] for i in members]
            tokens, count = self._padded(len(target), row_indices, sequences)
            rows = self._sampler.extend(
                self._decoding_params, rows, target, tokens, count
            )
        return rows

    def _read_prefix(self, ids):
        """Return the context of one row that has read these ids."""
        return self._sampler.prefill(
            self._decoding_params, *self._padded(1, [0], [ids])
        )

    def _padded(self, num, row_indices, sequences):
        """Return [num, P] tokens, sequences[i] at row_indices[i], and [num] counts."""
        tokens = np.zeros((num, self.max_prompt_tokens), np.int32)
        count = np.ones(num, np.int32)
        for row, sequence in zip(row_indices, sequences, strict=True):
            tokens[row, : len(sequence)], count[row] = sequence, len(sequence)
        return tokens, count

    def _score_ids(self, pairs) -> list[np.ndarray]:
        """Return the [n] log-probabilities of each second text, given the first."""
        members_by_width = collections.defaultdict(list)
        for i, (prefix, text) in enumerate(pairs):
            width = SCORED_WIDTH
            while width < len(prefix) + len(text):
                width *= 2
            members_by_width[width].append(i)
        max_tokens = self.max_prompt_tokens + self.max_reply_tokens
        logps: list = [None] * len(pairs)
        show_progress = console.note_now_and_then(
            lambda num: f"the model has scored {num} of {len(pairs)} texts"
        )
        num_done = 0
        for width, members in sorted(members_by_width.items()):
            # At most as many tokens at once as the cache of all rows holds.
            num = max(1, min(self.num_rows, self.num_rows * max_tokens // width))
            for start in range(0, len(members), num):
                batch = members[start : start + num]
                num_rows = min(n for n in batch_sizes(num) if n >= len(batch))
                tokens = np.zeros((num_rows, width), np.int32)
                for row, i in enumerate(batch):
                    ids = np.concatenate(pairs[i])
                    tokens[row, : len(ids)] = ids
                logp = np.asarray(self._logprobs(self._params, tokens))
                for row, i in enumerate(batch):
                    first, size = len(pairs[i][0]), len(pairs[i][1])
                    logps[i] = logp[row, first : first + size]
                num_done += len(batch)
                show_progress(num_done)
        return logps

    def _mix_batch(self, batch: list[_Mixture]) -> list[tuple[int, Completion]]:
        """Return (index, completion) of each mixture.

        All rows of a mixture read the same token after each step. It is chosen on the
        device, so that the [rows, V] logits stay there.
        """
        prompts = [ids for mixture in batch for ids in mixture.prompts]
        size = self._batch_size(len(prompts))
        group = np.zeros(size, np.int32)
        log_weight = np.full(size, -np.inf, np.float32)
        row_owners = [n for n, mixture in enumerate(batch) for _ in mixture.prompts]
        group[: len(row_owners)] = row_owners
        weights = [w for mixture in batch for w in mixture.request.weights]
        log_weight[: len(weights)] = np.log(weights)
        slots = np.arange(size, dtype=np.int32)
        mixture_names = np.zeros((size, 2), np.uint32)
        mixture_names[: len(batch)] = [mixture.name for mixture in batch]
        keys = row_keys(self._key, mixture_names)
        rows = self._sampler.empty(size)
        rows = self._admit_sharing(rows, size, slots[: len(prompts)], prompts)
        budgets = [min(m.request.max_tokens, self.max_reply_tokens) for m in batch]
        outputs: list[list[int]] = [[] for _ in batch]
        is_active = np.array([budget > 0 for budget in budgets])
        step = 0
        while is_active.any():
            choices = self._choose(rows.context.logits, group, log_weight, keys, step)
            step += 1
            choices = np.asarray(choices)[: len(batch)]
            for n in np.flatnonzero(is_active):
                outputs[n].append(int(choices[n]))
                has_ended = choices[n] in self._tokenizer.eos_ids
                is_active[n] = not has_ended and len(outputs[n]) < budgets[n]
            if is_active.any():
                is_read = (slots < len(prompts)) & is_active[group]
                targets = np.where(is_read, slots, size).astype(np.int32)
                tokens = choices[group][:, None].astype(np.int32)
                count = np.ones(size, np.int32)
                rows = self._sampler.extend(
                    self._decoding_params, rows, targets, tokens, count
                )
        results = []
        for mixture, tokens in zip(batch, outputs, strict=True):
            all_ids, ids = np.concatenate(mixture.prompts), np.array(tokens, np.int32)
            results.append((mixture.index, self._completion(all_ids, ids)))
        return results


def local_generator(
    model: Decoder,
    params: Any,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    name: str = "a local model",
    log: Callable[[str], None] = console.note,
    **settings: Any,
) -> GenerateFn:
    """Make a GenerateFn that samples this model's replies.

    It returns None for a chat that is too long, and for a reply without an answer; see
    `rsearch.llm.thoughts`.

    Args:
        name: name of the model in messages.
        log: called with one line if any chats failed.
        **settings: other arguments of `LocalModel`.
    """
    local = LocalModel(model, tokenizer, mesh, **settings)
    local.load(params)

    def read_answer(completion: Completion | None) -> tuple[str | None, str]:
        if completion is None:
            return None, f"a chat of more than {local.max_prompt_tokens} tokens"
        return answer_after_thoughts(
            completion.text,
            prompt=completion.prompt_text,
            is_cut=completion.end == CUT,
        )

    def generate(chats):
        requests = [Generate(chat, local.max_reply_tokens) for chat in chats]
        answers = [read_answer(c) for c in in_order(local.generate(requests))]
        reasons = [reason for text, reason in answers if text is None]
        log_failures(name, reasons, len(chats), log)
        return [text for text, _ in answers]

    return generate


def _names(prompts, draws):
    """Return (digest of ids and draw, number of equal ones before) for each prompt."""
    counts, names = {}, []
    for ids, draw in zip(prompts, draws, strict=True):
        salt = xxhash.xxh32_intdigest(np.array(draw, "<i8").tobytes()) if draw else 0
        digest = xxhash.xxh32_intdigest(np.asarray(ids, "<i4").tobytes(), seed=salt)
        names.append((digest, counts.get(digest, 0)))
        counts[digest] = names[-1][1] + 1
    return names

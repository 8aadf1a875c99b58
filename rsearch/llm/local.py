"""A model on this machine's devices as a GenerateFn: chats in, replies out."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from rsearch.llm.thoughts import (
    MARKS,
    answer_after_thoughts,
    begins_in_thought,
    say_failures,
)
from rsearch.models.decoder import Decoder
from rsearch.models.tokenizer import Tokenizer
from rsearch.rollout.decode import Sampler
from rsearch.rollout.interface import DecodeRequest
from rsearch.rollout.stop_strings import token_automaton
from rsearch.runtime import console
from rsearch.types import GenerateFn

TAIL = 16  # tokens of a prompt that its last words are in
SHRINK = 4  # a smaller batch has 1/4 of the rows of the next larger one


def local_generator(
    model: Decoder,
    params: Any,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    num_rows: int,
    max_prompt_tokens: int,
    max_reply_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    name: str = "a local model",
    say: Callable[[str], None] = console.note,
) -> GenerateFn:
    """Make a GenerateFn that samples this model's replies.

    A reply follows from the seed, the chat, and how often the same chat precedes it in
    the same call: other chats, batches and devices change nothing, and a chat that
    occurs n times in one call gets n samples.

    Args:
        model, params, tokenizer: the model.
        mesh: devices that it runs on.
        num_rows: chats answered at once; fewer run in one of a few smaller batches.
        max_prompt_tokens: a longer chat has None for a reply.
        max_reply_tokens: a reply is cut there. One without an answer is None, see
            `rsearch.llm.thoughts`.
        temperature: of sampling; 0 takes the most likely token.
        top_p: smallest probability mass kept when sampling; 1 is everything.
        seed: of the random keys.
        name: of the model in what is said.
        say: called with one line if any chats failed.
    """
    sampler = Sampler(
        model,
        mesh,
        stop_table=token_automaton((), tokenizer.token_bytes),
        eos_ids=tokenizer.eos_ids,
        num_slots=max_prompt_tokens + max_reply_tokens,
        max_turn_tokens=max_reply_tokens,
        chunk=min(128, max_prompt_tokens),
        temperature=temperature,
        top_p=top_p,
    )
    params = sampler.place_params(params)
    key = jax.random.key(seed)
    sizes = batch_sizes(num_rows)

    def reply_to(ids, names):
        """Return (answer or None, why there is none) to at most `num_rows` prompts.

        Args:
            ids: of the prompts.
            names: of the rows, which the random keys follow from.
        """
        size = min(s for s in sizes if s >= len(ids))
        tokens = np.zeros((size, max_prompt_tokens), np.int32)
        count = np.ones(size, np.int32)
        row_names = np.zeros((size, 2), np.uint32)
        for i, (prompt, name) in enumerate(zip(ids, names, strict=True)):
            tokens[i, : len(prompt)] = prompt
            count[i], row_names[i] = len(prompt), name
        prompts = sampler.prefill(params, tokens, count)
        slots = np.arange(size, dtype=np.int32)
        rows = sampler.admit(sampler.empty(size), prompts, slots, slots)
        begins = slots < len(ids)  # the other rows are padding
        budget = np.full(size, max_reply_tokens, np.int32)
        request = DecodeRequest(row_names, begins, budget, size, max_reply_tokens)
        rows = sampler.decode(params, rows, key, request)
        turn = sampler.turns_on_host(rows)
        replies = [turn.tokens[i, : turn.count[i]] for i in range(len(ids))]
        return [_answer(*pair) for pair in zip(ids, replies, strict=True)]

    def _answer(prompt, reply):
        has_ended = len(reply) and reply[-1] in tokenizer.eos_ids
        text = tokenizer.decode(reply[:-1] if has_ended else reply)
        if begins_in_thought(tokenizer.decode(prompt[-TAIL:])):
            text = f"{MARKS[0][0]}{text}"
        return answer_after_thoughts(text, is_cut=not has_ended)

    def generate(chats):
        prompts = [tokenizer.encode_prompt(chat) for chat in chats]
        names = _names(prompts)
        fitting = [i for i, p in enumerate(prompts) if len(p) <= max_prompt_tokens]
        too_long = f"a chat of more than {max_prompt_tokens} tokens"
        replies: list = [(None, too_long)] * len(chats)
        for start in range(0, len(fitting), num_rows):
            batch = fitting[start : start + num_rows]
            answers = reply_to([prompts[i] for i in batch], [names[i] for i in batch])
            for i, answer in zip(batch, answers, strict=True):
                replies[i] = answer
        failed = [why for answer, why in replies if answer is None]
        say_failures(name, failed, len(chats), say)
        return [answer for answer, _ in replies]

    return generate


def batch_sizes(num_rows: int) -> list[int]:
    """Return the numbers of rows that are compiled: `num_rows`, a quarter of it, ...

    Ascending. Few sizes, so that little is compiled; small ones, so that a few chats do
    not cost what a full batch costs.
    """
    sizes = [num_rows]
    while sizes[0] > 1:
        sizes.insert(0, -(-sizes[0] // SHRINK))
    return sizes


def _names(prompts):
    """Return (digest of the ids, number of equal ones before) of each prompt."""
    seen, names = {}, []
    for ids in prompts:
        digest = xxhash.xxh32_intdigest(np.asarray(ids, "<i4").tobytes())
        names.append((digest, seen.get(digest, 0)))
        seen[digest] = names[-1][1] + 1
    return names

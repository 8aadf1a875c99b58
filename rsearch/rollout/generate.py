"""A local model as a GenerateFn: chats in, replies out, greedily."""

import jax
import numpy as np

from rsearch.models.decoder import Decoder
from rsearch.models.tokenizer import Tokenizer
from rsearch.rollout.automaton import token_automaton
from rsearch.rollout.sampler import Sampler
from rsearch.types import GenerateFn


def local_generator(
    model: Decoder,
    params,
    tokenizer: Tokenizer,
    mesh,
    *,
    num_rows: int,
    max_prompt_tokens: int,
    max_reply_tokens: int,
) -> GenerateFn:
    """A GenerateFn that asks this model.

    Args:
        model, params, tokenizer: the model.
        mesh: devices that it runs on.
        num_rows: chats answered at once.
        max_prompt_tokens: a longer chat is not asked: its reply is None.
        max_reply_tokens: a reply is cut there.
    """
    sampler = Sampler(
        model,
        mesh,
        stop_table=token_automaton((), tokenizer.token_bytes),
        eos_ids=tokenizer.eos_ids,
        num_slots=max_prompt_tokens + max_reply_tokens,
        max_turn_tokens=max_reply_tokens,
        chunk=min(128, max_prompt_tokens),
        temperature=0.0,
        top_p=1.0,
    )
    params = sampler.place(params)
    keys = jax.random.split(jax.random.key(0), num_rows)  # Greedy: never drawn from.
    budget = np.full(num_rows, max_reply_tokens, np.int32)

    def ask(prompts):
        """Replies to at most `num_rows` prompts."""
        tokens = np.zeros((num_rows, max_prompt_tokens), np.int32)
        count = np.ones(num_rows, np.int32)
        active = np.zeros(num_rows, bool)
        for i, ids in enumerate(prompts):
            tokens[i, : len(ids)], count[i], active[i] = ids, len(ids), True
        rows = sampler.prefill(params, tokens, count)
        _, written = sampler.decode(params, rows, keys, active, budget)
        written = jax.device_get(written)
        return [
            tokenizer.decode(_without_eos(written.tokens[i, : written.count[i]]))
            for i in range(len(prompts))
        ]

    def _without_eos(ids):
        return ids[:-1] if len(ids) and ids[-1] in tokenizer.eos_ids else ids

    def generate(chats):
        prompts = [tokenizer.encode_prompt(chat) for chat in chats]
        fitting = [i for i, p in enumerate(prompts) if len(p) <= max_prompt_tokens]
        replies: list[str | None] = [None] * len(chats)
        for start in range(0, len(fitting), num_rows):
            part = fitting[start : start + num_rows]
            for i, reply in zip(part, ask([prompts[i] for i in part]), strict=True):
                replies[i] = reply
        return replies

    return generate

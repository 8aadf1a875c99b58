"""Make the budgets, functions and local model that evaluation methods receive."""

import dataclasses
import functools

from ml_collections import ConfigDict

from rsearch.hosts import processes
from rsearch.llm.local import LocalModel
from rsearch.methods.base import Kit, NotLoadedError
from rsearch.models.sharding import own_mesh
from rsearch.setup.context import Setup
from rsearch.setup.questions import paragraph_reader
from rsearch.setup.search import check_encoder, text_encoders
from rsearch.types import Messages, ParagraphsOf


def make_kit(setup: Setup) -> Kit:
    """Return the budgets, prompts and functions that all methods of a run share."""
    c, tokenizer = setup.config, setup.tokenizer
    embed, embed_passages = text_encoders(c)
    kit = make_unloaded_kit(c, paragraph_reader(c, setup.world))

    def shorten(text: str) -> str:
        return tokenizer.cut(text, passage_budget(c))

    def fits(messages: Messages) -> bool:
        return len(tokenizer.encode_prompt(messages)) <= prompt_budget(setup)

    @functools.cache
    def paragraphs() -> list[str]:
        return sorted({text for q in setup.dev for text, _ in kit.paragraphs_of(q)})

    return dataclasses.replace(
        kit,
        shorten=shorten,
        fits=fits,
        embed=embed,
        embed_passages=embed_passages,
        paragraphs=paragraphs,
    )


def make_unloaded_kit(c: ConfigDict, paragraphs_of: ParagraphsOf) -> Kit:
    """Return a kit for `check_methods`, without a tokenizer or an encoder.

    Functions that need these, or all questions, raise NotLoadedError; those that embed
    raise ValueError if the search has no encoder.
    """

    def needs_loading(*_):
        raise NotLoadedError

    def embed(_):
        check_encoder(c)
        raise NotLoadedError

    return Kit(
        answer_tokens=c.eval.answer_tokens or c.rollout.max_turn_tokens,
        thought_tokens=c.eval.thought_tokens or c.rollout.max_turn_tokens,
        top_k=c.retrieval.top_k,
        shorten=lambda text: text,
        fits=needs_loading,
        embed=embed,
        embed_passages=embed,
        paragraphs_of=paragraphs_of,
        paragraphs=needs_loading,
        normalize=c.eval.normalize,
        direct=c.protocol.direct,
        rag=c.protocol.rag,
    )


def passage_budget(c: ConfigDict) -> int:
    """Return the number of tokens of retrieved text that a prompt of a method shows."""
    return c.eval.passage_tokens or c.rollout.max_observation_tokens


def reply_budget(setup: Setup) -> int:
    """Return the number of tokens of the longest reply to a method."""
    budgets = setup.config.eval.answer_tokens, setup.config.eval.thought_tokens
    return max(budget or setup.limits.max_turn_tokens for budget in budgets)


def prompt_budget(setup: Setup) -> int:
    """Return the number of tokens of a method's longest prompt.

    Raises:
        ValueError: the budgets of config.eval exceed the model's context.
    """
    c, limits = setup.config, setup.limits
    reply = reply_budget(setup)
    room = setup.model.spec.max_context - reply
    # The default has room for a conversation, or for a prompt with retrieved text.
    passage_prompt = limits.max_prompt_tokens + passage_budget(c)
    prompt = c.eval.max_prompt_tokens or min(
        room, max(setup.num_tokens - reply, passage_prompt)
    )
    if not 0 < prompt <= room:
        raise ValueError(
            f"config.eval.max_prompt_tokens = {prompt} and replies of {reply} tokens "
            f"do not fit: the model's context is {setup.model.spec.max_context}"
        )
    return prompt


def make_local_model(setup: Setup) -> LocalModel:
    """Return the policy as a model that methods call, still without parameters.

    It runs on this host's devices or, with config.rollout.global_mesh, on those of all
    hosts.

    Raises:
        ValueError: the budgets of config.eval exceed the model's context.
    """
    c = setup.config
    is_shared = c.rollout.global_mesh and processes.num_hosts() > 1
    return LocalModel(
        setup.model,
        setup.tokenizer,
        setup.mesh if is_shared else own_mesh(setup.rollout_mesh),
        num_rows=c.rollout.max_concurrent,
        max_prompt_tokens=prompt_budget(setup),
        max_reply_tokens=reply_budget(setup),
        temperature=c.eval.temperature,
        top_p=c.eval.top_p,
        seed=c.seed,
        is_shared=is_shared,
    )

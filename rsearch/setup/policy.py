"""Make the policy's tokenizer, protocol, network and limits from a configuration."""

import dataclasses
import pathlib

import jax.numpy as jnp
from ml_collections import ConfigDict

from rsearch.config.stage_plan import kinds
from rsearch.models.decoder import Decoder
from rsearch.models.hf.directory import find_model
from rsearch.models.hf.families import read_spec
from rsearch.models.spec import DecoderSpec
from rsearch.models.tokenizer import Tokenizer, load_tokenizer
from rsearch.protocols import plain
from rsearch.protocols.base import Protocol
from rsearch.protocols.table import make_protocol
from rsearch.protocols.tools import add_tools
from rsearch.rollout.conversation import (
    Limits,
    check_max_tokens,
    conversation_tokens,
    explain_conversation_tokens,
    markup_tokens,
)
from rsearch.tools.table import tool_name
from rsearch.world.reading import world_tokenizer
from rsearch.world.world import WORLD, World


def has_world(c: ConfigDict) -> bool:
    """Return whether any field of a configuration names the embedded world."""
    sources = [c.tokenizer.source, c.retrieval.corpus]
    if "sft" in kinds(c):
        sources.append(c.sft.demonstrations)
    question_files = (c.data.train, c.data.dev)
    asks_world = any(f.startswith(f"{WORLD}:") for f in question_files)
    return WORLD in sources or asks_world


def load_policy_tokenizer(
    c: ConfigDict, world: World | None, source: pathlib.Path | None
) -> Tokenizer:
    """Load the tokenizer of the world, a named model, or the model at `source`."""
    if c.tokenizer.source == WORLD:
        return world_tokenizer(world)
    if c.tokenizer.source:
        return load_tokenizer(find_model(c.tokenizer.source))
    return load_tokenizer(source)


def policy_protocol(c: ConfigDict) -> Protocol:
    """Make the protocol with the wording and settings of config.protocol."""
    p = c.protocol
    protocol = plain.reword(
        make_protocol(
            p.name,
            max_queries=p.max_queries or None,
            quotes_keep_commas=p.quotes_keep_commas,
            json_ascii=p.json_ascii,
        ),
        user=p.instruction,
        system=p.system,
        invalid_message=p.invalid_message,
    )
    protocol = add_tools(protocol, [tool_name(r) for r in p.tools])
    if c.rollout.on_invalid == "end":
        protocol = dataclasses.replace(protocol, invalid_message=None)
    return protocol


def policy_model(
    c: ConfigDict, tokenizer: Tokenizer, source: pathlib.Path | None
) -> Decoder:
    """Make the network, shaped by the model at `source` or else by config.model.

    Raises:
        ValueError: the tokenizer has more ids than the embedding has rows.
    """
    m = c.model
    if source is not None:
        spec = read_spec(source)
    else:
        spec = DecoderSpec(
            vocab_size=m.vocab_size or tokenizer.vocab_size,
            width=m.width,
            num_layers=m.num_layers,
            num_heads=m.num_heads,
            num_kv_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            mlp_width=m.mlp_width,
            rope_theta=m.rope_theta,
            tie_embeddings=m.tie_embeddings,
            qkv_bias=m.qkv_bias,
        )
    if tokenizer.vocab_size > spec.vocab_size:
        # Often one more, a pad token that a training tool added to the tokenizer only.
        extra_token = tokenizer.decode([spec.vocab_size])
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
            f"only {spec.vocab_size} rows, and none for {extra_token!r}: delete such "
            f"tokens if they are never used, or name the model's own tokenizer"
        )
    return Decoder(spec, dtype=jnp.dtype(m.dtype), remat=m.remat)


def rollout_limits(
    c: ConfigDict, tokenizer: Tokenizer, protocol: Protocol, spec: DecoderSpec
) -> tuple[Limits, int]:
    """Return the limits of a rollout, and the tokens of the longest conversation.

    Raises:
        ValueError: config.rollout.context_tokens or the model's context is too small;
            the message shows the terms of the length.
    """
    limits = configured_limits(c)
    markup = markup_tokens(tokenizer, protocol)
    check_max_tokens(limits, markup)
    num_tokens = limits.max_tokens or conversation_tokens(limits, markup)
    if num_tokens > spec.max_context:
        terms = "config.rollout.context_tokens"
        if not limits.max_tokens:
            terms = explain_conversation_tokens(limits, markup)
        raise ValueError(
            f"{terms} = {num_tokens} tokens, but the model's context is "
            f"{spec.max_context}"
        )
    return limits, num_tokens


def configured_limits(c: ConfigDict) -> Limits:
    """Return the limits that config.rollout sets for a rollout."""
    r = c.rollout
    num_written = r.max_written_tokens if c.models.writer.source else 0
    return Limits(
        max_searches=r.max_searches,
        max_prompt_tokens=r.max_prompt_tokens,
        max_turn_tokens=r.max_turn_tokens,
        max_observation_tokens=num_written or r.max_observation_tokens,
        forced_final_turn=r.forced_final_turn,
        cuts_tags=r.cut_tags,
        max_tokens=r.context_tokens,
    )

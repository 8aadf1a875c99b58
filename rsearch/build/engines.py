"""Hosts, rollout engines and learners of a run."""

from rsearch.build.parts import WORLD
from rsearch.build.setup import Setup
from rsearch.data.demonstrations import (
    DIRECT,
    RAG,
    load_demonstrations,
    world_demonstrations,
)
from rsearch.learn import update
from rsearch.protocols import plain
from rsearch.rollout.automaton import token_automaton
from rsearch.rollout.conversation import (
    Host,
    Limits,
    conversation_tokens,
    markup_tokens,
)
from rsearch.rollout.driver import RolloutEngine
from rsearch.rollout.sampler import Sampler

SLACK_TOKENS = 16  # passages cut between tokens may encode to a few more


def make_host(setup: Setup, protocol=None, limits=None) -> Host:
    """The host's half of rollouts; of the policy's own protocol if none is given."""
    limits = limits or setup.limits
    return Host(setup.tokenizer, protocol or setup.protocol, setup.search, limits)


def make_rollouts(
    setup: Setup, host: Host, *, temperature, top_p, group_size, messages=None
) -> RolloutEngine:
    """A rollout engine with config.rollout.slots rows."""
    r = setup.config.rollout
    markup = markup_tokens(setup.tokenizer, host.protocol)
    own = host.protocol is setup.protocol
    sampler = Sampler(
        setup.model,
        setup.mesh,
        stop_table=token_automaton(
            host.protocol.stop_strings, setup.tokenizer.token_bytes
        ),
        eos_ids=setup.tokenizer.eos_ids,
        num_slots=setup.num_tokens if own else conversation_tokens(host.limits, markup),
        max_turn_tokens=host.limits.max_turn_tokens,
        chunk=r.extend_chunk,
        temperature=temperature,
        top_p=top_p,
    )
    return RolloutEngine(
        sampler, host, num_rows=r.slots, group_size=group_size, messages=messages
    )


def make_learner(setup: Setup, stage: str) -> tuple[update.Learner, object]:
    """The compiled update of a stage, and its optimizer."""
    c, s = setup.config, setup.config[stage]
    total = s.steps * s.get("updates_per_step", 1)
    optimizer = update.make_optimizer(
        lr=s.lr,
        warmup_steps=s.warmup_steps,
        decay_steps=total if s.decay else 0,
        **c.optim,
    )
    if stage == "sft":
        loss, mean, temperature = update.imitation_loss, "token", 1.0
    else:
        in_loss = s.kl_coef if s.kl_place == "loss" else 0.0
        loss = update.policy_loss(
            clip_low=s.clip_low,
            clip_high=s.clip_high,
            kl_coef=in_loss,
            kl_kind=s.kl_kind,
            entropy_coef=s.entropy_coef,
            measures_kl=s.kl_coef > 0,
        )
        mean, temperature = s.loss_mean, c.rollout.temperature
    learner = update.Learner(
        setup.model,
        optimizer,
        setup.mesh,
        loss=loss,
        loss_mean=mean,
        temperature=temperature,
        chunk_tokens=c.model.logit_chunk,
    )
    return learner, optimizer


def make_baseline(setup: Setup, method: str) -> Host:
    """The host of `direct` or `rag`, in the words the configuration gives them."""
    words = {
        DIRECT: (plain.DIRECT, setup.config.protocol.direct),
        RAG: (plain.RAG, setup.config.protocol.rag),
    }
    protocol, user = words[method]
    protocol = plain.reworded(protocol, user=user)
    r = setup.config.rollout
    empty = plain.messages_with_passages(protocol, "", "")
    prompt = len(setup.tokenizer.encode_prompt(empty)) + r.max_prompt_tokens
    if method == RAG:
        prompt += r.max_observation_tokens + SLACK_TOKENS
    return make_host(setup, protocol, Limits(0, prompt, r.max_turn_tokens, 0))


def baseline_chats(setup: Setup, method: str, protocol, questions):
    """Question id -> the chat that opens it in a baseline.

    For `rag` the passages of one search with the question are cut to
    config.rollout.max_observation_tokens.

    Raises:
        ValueError: a search failed.
    """
    shown = dict.fromkeys((q.id for q in questions), "")
    if method == RAG:
        budget = setup.config.rollout.max_observation_tokens
        found = setup.search([q.text for q in questions])
        for question, passages in zip(questions, found, strict=True):
            if passages is None:
                raise ValueError(f"the search for question {question.id} failed")
            ids = setup.tokenizer.encode(plain.write_passages(passages))
            shown[question.id] = setup.tokenizer.decode(ids[:budget])
    return {
        q.id: plain.messages_with_passages(protocol, q.text, shown[q.id])
        for q in questions
    }


def demonstrations(setup: Setup):
    """What the supervised stage imitates."""
    s = setup.config.sft
    if s.demonstrations == WORLD:
        return world_demonstrations(
            setup.world,
            seed=setup.config.seed,
            repeats=s.repeats,
            flawed_share=s.flawed_share,
            guess_share=s.guess_share,
            baseline_share=s.baseline_share,
        )
    return load_demonstrations(s.demonstrations)

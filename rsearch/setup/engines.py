"""Hosts, rollout engines and learners of a run."""

import dataclasses

from rsearch.config.stage_plan import DEMONSTRATIONS, STAGE, stage_file
from rsearch.data.demonstrations import (
    DIRECT,
    PROTOCOL,
    RAG,
    load_demonstrations,
    world_demonstrations,
)
from rsearch.hosts import processes as hosts
from rsearch.models.sharding import own_mesh
from rsearch.protocols import plain
from rsearch.protocols.writing import written
from rsearch.rollout.conversation import (
    Host,
    Limits,
    conversation_tokens,
    markup_tokens,
)
from rsearch.rollout.decode import Sampler
from rsearch.rollout.multihost import MultihostSampler
from rsearch.rollout.replay import replay
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.runtime import console
from rsearch.runtime.calls import asked_again
from rsearch.setup.parts import WORLD
from rsearch.setup.setup import Setup
from rsearch.types import Outcome


def make_host(setup: Setup, protocol=None, limits=None) -> Host:
    """The host's half of rollouts; of the policy's own protocol if none is given."""
    limits, search = limits or setup.limits, setup.search
    if protocol is None and setup.writer is not None:
        search = written(search, setup.writer, prompt=setup.config.retrieval.writing)
    return Host(setup.tokenizer, protocol or setup.protocol, search, limits)


def make_rollouts(
    setup: Setup, host: Host, *, temperature, top_p, group_size, messages=None
) -> RolloutEngine:
    """A rollout engine with config.rollout.slots rows of this host.

    They are on its own devices or, with config.rollout.together, on those of all.
    """
    r = setup.config.rollout
    markup = markup_tokens(setup.tokenizer, host.protocol)
    own = host.protocol is setup.protocol
    is_shared = r.together and hosts.num_hosts() > 1
    mesh = setup.mesh if is_shared else own_mesh(setup.mesh)
    sampler = Sampler(
        setup.model,
        mesh,
        stop_table=token_automaton(
            host.protocol.stop_strings, setup.tokenizer.token_bytes
        ),
        eos_ids=setup.tokenizer.eos_ids,
        num_slots=setup.num_tokens if own else conversation_tokens(host.limits, markup),
        max_turn_tokens=host.limits.max_turn_tokens,
        chunk=r.extend_chunk,
        temperature=temperature,
        top_p=top_p,
        page_tokens=r.page_tokens,
    )
    if is_shared:
        sampler = MultihostSampler(sampler, mesh)
    return RolloutEngine(
        sampler,
        host,
        num_rows=r.slots,
        group_size=group_size,
        messages=messages,
        cache_tokens=r.cache_tokens,
        search_seconds=setup.config.retrieval.search_seconds,
        searches_at_once=getattr(host.search, "searches_at_once", 1),
    )


def make_baseline(setup: Setup, method: str, questions):
    """The host of `direct` or `rag`, and how it opens each of these questions.

    For `rag` the passages of one search with the question are cut to
    config.rollout.max_observation_tokens.

    Args:
        setup: of the run.
        method: "direct" or "rag".
        questions: that will be asked; the longest prompt among them sets the shapes.

    Returns:
        The Host, and {question id: chat}.

    Raises:
        ValueError: a search failed again and again.
    """
    c, tokenizer = setup.config, setup.tokenizer
    words = {
        DIRECT: (plain.DIRECT, c.protocol.direct),
        RAG: (plain.RAG, c.protocol.rag),
    }
    protocol, user = words[method]
    protocol = plain.reworded(protocol, user=user)
    shown = dict.fromkeys((q.id for q in questions), "")
    if method == RAG:
        found = asked_again(setup.search)([q.text for q in questions])
        for question, passages in zip(questions, found, strict=True):
            if passages is None:
                raise ValueError(f"the search for question {question.id} failed")
            ids = tokenizer.encode(plain.write_passages(passages))
            cut = ids[: c.rollout.max_observation_tokens]
            shown[question.id] = tokenizer.decode(cut)
    chats = {
        q.id: plain.messages_with_passages(protocol, q.text, shown[q.id])
        for q in questions
    }
    longest = max(len(tokenizer.encode_prompt(chat)) for chat in chats.values())
    most = setup.model.spec.max_context - c.rollout.max_turn_tokens
    if longest > most:
        raise ValueError(
            f"{method}: a prompt has {longest} tokens; the model's context has room "
            f"for {most} beside config.rollout.max_turn_tokens"
        )
    limits = Limits(0, longest, c.rollout.max_turn_tokens, 0)
    return make_host(setup, protocol, limits), chats


def _demonstrations(setup: Setup):
    """What the supervised stage imitates."""
    s = setup.config.sft
    if s.demonstrations == WORLD:
        return world_demonstrations(
            setup.world,
            setup.protocol,
            seed=setup.config.seed,
            repeats=s.repeats,
            flawed_share=s.flawed_share,
            guess_share=s.guess_share,
            baseline_share=s.baseline_share,
            recall_share=s.recall_share,
        )
    file = stage_file(s.demonstrations, DEMONSTRATIONS, setup.home)
    return load_demonstrations(file)


def replay_demonstrations(setup: Setup, *, progress=lambda items: items):
    """The demonstrations as rollouts of the current engine, each within its budget.

    Of those that a stage of this run has made, what is too long here is left out, and
    people are told: nobody could mend it.

    Args:
        setup: of the run.
        progress: wraps the demonstrations, to show how far it has come.

    Raises:
        ValueError: one does not follow its protocol, searches too often, or is too
            long; or none of a stage's is left.
    """
    source = setup.config.sft.demonstrations
    demonstrations = _demonstrations(setup)
    setup = dataclasses.replace(setup, search=asked_again(setup.search))
    hosts, chats = {PROTOCOL: make_host(setup)}, {}
    for method in {d.method for d in demonstrations} - {PROTOCOL}:
        asked = [d.question for d in demonstrations if d.method == method]
        hosts[method], chats[method] = make_baseline(setup, method, asked)
    # A chat of its own is no prompt of a rollout: it may hold passages.
    whole = setup.config.sft.sequence_tokens
    limits = dataclasses.replace(setup.limits, max_prompt_tokens=whole)
    chatting = make_host(setup, limits=limits)
    rollouts, left_out = [], []
    for demonstration in progress(demonstrations):
        method = demonstration.method
        host = chatting if demonstration.messages else hosts[method]
        chat = chats[method][demonstration.question.id] if method in chats else None
        try:
            rollouts.append(_replayed(setup, host, demonstration, chat))
        except ValueError as error:
            if not source.startswith(STAGE):
                raise
            left_out.append(error)
    if left_out:
        told = f"{source}: {len(left_out)} of {len(demonstrations)} demonstrations"
        if not rollouts:
            raise ValueError(f"{told} cannot be learnt; {left_out[0]}") from None
        console.note(f"{told} are left out, the first for this: {left_out[0]}")
    return rollouts


def _replayed(setup, host, demonstration, chat):
    """The rollout of one demonstration; `chat` opens it where it has none itself."""
    question, limit = demonstration.question, setup.config.sft.sequence_tokens
    rollout = replay(
        host,
        question,
        demonstration.turns,
        messages=demonstration.messages or chat,
        context_turns=demonstration.context_turns,
        observations=demonstration.observations,
        may_stop=demonstration.is_segment,
    )
    if rollout.outcome == Outcome.TRUNCATED and not demonstration.is_segment:
        raise ValueError(
            f"the demonstration of question {question.id} searches in its last "
            "turn; config.rollout.max_searches is "
            f"{setup.config.rollout.max_searches}"
        )
    if rollout.num_tokens > limit:
        raise ValueError(
            f"the demonstration of question {question.id} has {rollout.num_tokens} "
            f"tokens, config.sft.sequence_tokens is {limit}"
        )
    return rollout

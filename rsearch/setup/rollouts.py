"""Make the rollout engines of a run, and replay its demonstrations."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from rsearch.config.stage_plan import (
    DEMONSTRATIONS,
    STAGE_PREFIX,
    WORLD,
    num_decode_rows,
    rollouts_of_step,
    stage_file,
)
from rsearch.data.demonstrations import (
    CHAT,
    DIRECT,
    PROTOCOL,
    RAG,
    RAW,
    Demonstration,
    draw_chats,
    load_chats,
    load_demonstrations,
)
from rsearch.hosts import processes
from rsearch.models.sharding import own_mesh
from rsearch.protocols import plain
from rsearch.protocols.base import Protocol
from rsearch.retrieval.wrap import wrap_search
from rsearch.rollout.conversation import (
    Conversation,
    Host,
    Limits,
    conversation_tokens,
    markup_tokens,
)
from rsearch.rollout.decode import Sampler
from rsearch.rollout.multihost import MultihostSampler
from rsearch.rollout.replay import FailedSearchError, Script, replay_together
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.rollout.stop_strings import token_automaton
from rsearch.runtime import console
from rsearch.setup.context import Setup
from rsearch.tools.base import Resources
from rsearch.tools.table import make_tools
from rsearch.types import Messages, Outcome, Question, Rollout, SearchFn, search_for
from rsearch.world.demonstrations import world_demonstrations

REPLAYED_TOGETHER = 32  # demonstrations whose searches are made in one batch


def make_host(
    setup: Setup,
    protocol: Protocol | None = None,
    limits: Limits | None = None,
    *,
    search: SearchFn | None = None,
    on_change: Callable[[Conversation], bool] | None = None,
) -> Host:
    """Make the host's side of rollouts.

    Args:
        protocol: the protocol to use; None is the policy's, the only one whose
            observations a writer writes.
        limits: the limits to use; None is the configuration's.
        search: the search to use; None is the configuration's.
        on_change: see `Host`.
    """
    writer = setup.writer if protocol is None else None
    search = wrap_search(
        search or setup.search,
        writer=writer,
        writer_prompt=setup.config.retrieval.writer_prompt,
    )
    # Other protocols, such as a baseline's, have no tools.
    names = setup.config.protocol.tools if protocol in (None, setup.protocol) else ()
    read = getattr(setup.search, "read", None)
    tools = make_tools(names, Resources(search, read))
    protocol = protocol or setup.protocol
    limits = limits or setup.limits
    return Host(setup.tokenizer, protocol, search, limits, tools, on_change)


def make_rollouts(
    setup: Setup,
    host: Host,
    *,
    temperature: float,
    top_p: float,
    group_size: int,
    messages: Callable[[Question], Messages] | None = None,
    num_tokens: int | None = None,
    is_step: bool = False,
) -> RolloutEngine:
    """Make a rollout engine with up to config.rollout.max_concurrent rows.

    The rows are on this host's devices or, with config.rollout.global_mesh, on those of
    all hosts.

    Args:
        temperature, top_p, group_size, messages: see `RolloutEngine` and `sample`.
        num_tokens: T, tokens of the longest conversation. With None it is the
            configuration's for the policy's own protocol, and otherwise follows from
            the host's protocol and limits.
        is_step: whether the engine samples steps of RL, and so no more questions per
            call than a step has.

    Raises:
        ValueError: config.rollout.max_concurrent is 0.
    """
    c = setup.config.rollout
    num_rows = c.max_concurrent
    if not num_rows:
        raise ValueError(
            "config.rollout.max_concurrent = 0: only rsearch.train and "
            "rsearch.evaluate choose a number themselves; here it must be >= 1"
        )
    if is_step:
        in_step = rollouts_of_step(setup.config, processes.num_hosts())
        num_rows = num_decode_rows(num_rows, in_step)
    is_shared = c.global_mesh and processes.num_hosts() > 1
    mesh = setup.mesh if is_shared else own_mesh(setup.rollout_mesh)
    if num_tokens is None and host.protocol is setup.protocol:
        num_tokens = setup.num_tokens
    elif num_tokens is None:
        markup = markup_tokens(setup.tokenizer, host.protocol)
        num_tokens = conversation_tokens(host.limits, markup)
    sampler = Sampler(
        setup.model,
        mesh,
        stop_table=token_automaton(
            host.protocol.stop_strings, setup.tokenizer.token_bytes
        ),
        eos_ids=setup.tokenizer.eos_ids,
        num_slots=num_tokens,
        max_turn_tokens=host.limits.max_turn_tokens,
        chunk=c.extend_chunk,
        temperature=temperature,
        top_p=top_p,
        page_tokens=c.page_tokens,
        # Evaluations use the policy's exact weights.
        has_int8_kernels=c.int8_kernels and is_step,
    )
    if is_shared:
        sampler = MultihostSampler(sampler, mesh)
    return RolloutEngine(
        sampler,
        host,
        num_rows=num_rows,
        group_size=group_size,
        messages=messages,
        cache_tokens=c.cache_tokens,
        search_seconds=setup.config.retrieval.search_seconds,
    )


def make_baseline(
    setup: Setup, method: str, questions: Sequence[Question]
) -> tuple[Host, list[Messages]]:
    """Make the host of `direct` or `rag`, and the initial chats of these questions.

    For `rag`, the passages of one search with the question are truncated to
    config.rollout.max_observation_tokens.

    Args:
        questions: the questions to ask; the longest prompt among them sets the shapes.

    Returns:
        The Host, and the chat of each question.

    Raises:
        ValueError: a search failed in all its tries.
    """
    c, tokenizer = setup.config, setup.tokenizer
    wordings = {
        DIRECT: (plain.DIRECT, c.protocol.direct),
        RAG: (plain.RAG, c.protocol.rag),
    }
    protocol, user = wordings[method]
    protocol = plain.reword(protocol, user=user)
    passage_texts = [""] * len(questions)
    if method == RAG:
        # A prompt needs its passages, so a failed search is retried.
        search = wrap_search(setup.search, retry=True)
        ids = [q.id for q in questions]
        results = search_for(search, [q.text for q in questions], ids)
        for i, (question, passages) in enumerate(zip(questions, results, strict=True)):
            if passages is None:
                raise ValueError(f"the search for question {question.id} failed")
            limit = c.rollout.max_observation_tokens
            passage_texts[i] = tokenizer.cut(plain.write_passages(passages), limit)
    chats = [
        plain.messages_with_passages(protocol, q.text, text)
        for q, text in zip(questions, passage_texts, strict=True)
    ]
    longest = max(len(tokenizer.encode_prompt(chat)) for chat in chats)
    limits = Limits(0, longest, c.rollout.max_turn_tokens, 0)
    return make_host(setup, protocol, limits), chats


def _demonstrations(setup: Setup):
    """Return the supervised stage's demonstrations, with general chats mixed in."""
    c, s = setup.config, setup.config.sft
    if s.demonstrations == WORLD:
        names = "repeats", "flawed_share", "guess_share", "baseline_share"
        settings = {name: s[name] for name in (*names, "recall_share")}
        demonstrations = world_demonstrations(
            setup.world, setup.protocol, seed=c.seed, **settings
        )
    else:
        file = stage_file(s.demonstrations, DEMONSTRATIONS, setup.home)
        demonstrations = load_demonstrations(file, on_bad=c.data.on_bad)
    if not s.chats:
        return demonstrations
    chats = load_chats(s.chats, on_bad=c.data.on_bad)
    share = s.chats_share
    count = max(1, round(len(demonstrations) * share / (1 - share)))
    return [*demonstrations, *draw_chats(chats, count, seed=c.seed)]


def replay_demonstrations(
    setup: Setup, *, progress: Callable = lambda items: items
) -> list[Rollout]:
    """Return the demonstrations as rollouts, each within its budget.

    If a stage of this run made them, unusable ones (see Raises) are left out with a
    note, since the user cannot fix them. Those of a file are left out if
    config.data.on_bad = "skip".

    Args:
        progress: wraps the sequence of demonstrations, to show progress.

    Raises:
        FailedSearchError: a search failed in all its tries.
        ValueError: one does not follow its protocol, searches too often, or is too
            long; or, if these are left out, none remains, or none of the chats.
    """
    c, demonstrations = setup.config, _demonstrations(setup)
    # A demonstration needs its passages, so a failed search is retried.
    setup = dataclasses.replace(setup, search=wrap_search(setup.search, retry=True))
    host_by_method, chats = {PROTOCOL: make_host(setup)}, {}
    for method in {d.method for d in demonstrations} - {PROTOCOL, RAW, CHAT}:
        questions = [d.question for d in demonstrations if d.method == method]
        host, method_chats = make_baseline(setup, method, questions)
        host_by_method[method] = host
        # Readings of one question's facts share its id.
        keys = [(method, q.id, q.text) for q in questions]
        chats |= zip(keys, method_chats, strict=True)
    # A demonstration's own chat may hold passages, so a prompt's limit does not apply.
    limits = dataclasses.replace(
        setup.limits, max_prompt_tokens=setup.config.sft.sequence_tokens
    )
    chat_host = make_host(setup, limits=limits)
    host_by_method[RAW] = make_host(
        setup, plain.RAW, dataclasses.replace(limits, max_searches=0)
    )
    # Nothing in a general chat's reply is parsed as a search.
    host_by_method[CHAT] = make_host(
        setup,
        plain.DIRECT,
        dataclasses.replace(
            limits, max_searches=0, max_turn_tokens=limits.max_prompt_tokens
        ),
    )
    # By whether they are chats: these must not make up for demonstrations of searching.
    rollouts, errors = {False: [], True: []}, {False: [], True: []}

    def script_of(demonstration):
        method, question = demonstration.method, demonstration.question
        has_own_chat = demonstration.messages and method not in (RAW, CHAT)
        host = chat_host if has_own_chat else host_by_method[method]
        chat = chats.get((method, question.id, question.text))
        return host, Script(
            question,
            demonstration.turns,
            messages=demonstration.messages or chat,
            context_turns=demonstration.context_turns,
            observations=demonstration.observations,
            may_end_in_search=demonstration.is_segment,
        )

    results = _replay_in_batches(map(script_of, demonstrations))
    for demonstration, result in zip(progress(demonstrations), results, strict=True):
        is_chat = demonstration.method == CHAT
        try:
            rollouts[is_chat].append(_usable(result, demonstration, setup))
        except FailedSearchError:
            # An outage: a resumed run would learn from others.
            raise
        except ValueError as error:
            problem = _with_location(demonstration, error)
            if not _may_leave_out(c, demonstration):
                raise ValueError(problem) from None
            errors[is_chat].append(problem)
    for is_chat, source in ((False, c.sft.demonstrations), (True, c.sft.chats)):
        if not errors[is_chat]:
            continue
        first, count = errors[is_chat][0], len(errors[is_chat])
        share = f"{source}: {count} of {count + len(rollouts[is_chat])} demonstrations"
        if not rollouts[is_chat]:
            raise ValueError(f"{share} cannot be learnt; {first}")
        console.note(f"{share} are left out, the first because: {first}")
    return [*rollouts[False], *rollouts[True]]


def _may_leave_out(c, demonstration: Demonstration) -> bool:
    """Return whether to continue without this demonstration if it is unusable."""
    is_from_stage = c.sft.demonstrations.startswith(STAGE_PREFIX)
    if is_from_stage and demonstration.method != CHAT:
        return True
    return bool(demonstration.location) and c.data.on_bad == "skip"


def _with_location(demonstration: Demonstration, error: ValueError) -> str:
    """Return an error's message after the file and line of its demonstration."""
    location = demonstration.location
    # Every message has the question's id. In a file without ids, that is the location.
    is_named = location in ("", demonstration.question.id)
    return str(error) if is_named else f"{location}: {error}"


def _replay_in_batches(
    scripts: Iterable[tuple[Host, Script]],
) -> Iterator[Rollout | ValueError]:
    """Yield the rollout of each script on its host, or why it has none, in order."""
    scripts = iter(scripts)
    while batch := list(itertools.islice(scripts, REPLAYED_TOGETHER)):
        results: dict[int, Rollout | ValueError] = {}
        for host in dict.fromkeys(host for host, _ in batch):
            rows = [i for i, (other, _) in enumerate(batch) if other is host]
            host_results = replay_together(host, [batch[i][1] for i in rows])
            results |= zip(rows, host_results, strict=True)
        yield from (results[i] for i in range(len(batch)))


def _usable(result: Rollout | ValueError, demonstration, setup: Setup) -> Rollout:
    """Return a demonstration's rollout if a stage can learn from it."""
    if isinstance(result, ValueError):
        raise result
    c, question = setup.config, demonstration.question
    if result.outcome == Outcome.TRUNCATED and not demonstration.is_segment:
        raise ValueError(
            f"the demonstration of question {question.id} searches in its last turn; "
            f"config.rollout.max_searches is {c.rollout.max_searches}"
        )
    # A chat of its own is not limited by the budgets of rollouts.
    limits = {
        "config.sft.sequence_tokens": c.sft.sequence_tokens,
        "the model's context": setup.model.spec.max_context,
    }
    name = min(limits, key=limits.get)
    if result.num_tokens > limits[name]:
        raise ValueError(
            f"the demonstration of question {question.id} has {result.num_tokens} "
            f"tokens, {name} is {limits[name]}"
        )
    return result

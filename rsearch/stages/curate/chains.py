"""Build ReaRAG's data: chains of thoughts and actions, one step at a time.

Source: ReaRAG (arXiv 2503.21729), Algorithms 1 and 3.
"""

import dataclasses
import functools

import numpy as np

from rsearch.data.chains import (
    STEP,
    ablation_messages,
    chain,
    chain_fault,
    decomposition,
    gold_passages,
    split_chain,
)
from rsearch.data.curation import (
    KEPT_REASON,
    attempt_of,
    first_step,
    from_record,
    to_record,
)
from rsearch.protocols import plain
from rsearch.retrieval.engine import engine_in_memory
from rsearch.rollout.conversation import Conversation, Host
from rsearch.runtime import console
from rsearch.stages.curate.rolling import DataStage, with_searches, world_hops
from rsearch.stages.curate.summary import Decision, Selection
from rsearch.types import Malformed, Outcome, Question

STEPS = "chains"  # name of the pass in the journal
ABLATION = "no_reasoning"


def chains(stage: DataStage) -> Selection:
    """Select chains of Algorithm 1, in which a reasoning model thinks, acts and reads.

    Only the first step of each reply is used. An unusable step (no action, a failed
    search, a turn cut by its budget) is sampled again, at most
    config.curate.max_retries times per chain. A chain has at most
    config.curate.max_steps steps.
    """
    records = stage.in_waves(STEPS, "chains", lambda: _ChainBuilder(stage))
    return _filter(stage, records)


def _filter(stage, records):
    """Select the chains that pass the filters, with their observations."""
    c, protocol = stage.config.curate, stage.protocol
    decisions, demonstrations = [], []
    for question in stage.questions:
        (record,) = records[question.id]
        # Filters use only the record, never what this process has in memory, so that a
        # resumed stage decides the same.
        attempt, num_requests = from_record(record), record["asked"]
        fault = record["gave_up"] or chain_fault(
            protocol, question, attempt, normalize=c.normalize
        )
        decisions.append(Decision(fault or KEPT_REASON, not fault, num_requests))
        if not fault:
            demonstration = chain(protocol, question, attempt)
            demonstrations.append((f"{len(attempt.turns)} steps", demonstration))
    return Selection(decisions, demonstrations)


@dataclasses.dataclass
class _Chain:
    """A chain in progress: its conversation, and how often the model was called."""

    question: Question
    conversation: Conversation
    num_steps: int = 0
    num_retries: int = 0
    gave_up: str = ""

    @property
    def is_going(self) -> bool:
        """Return whether the chain needs another step."""
        return not self.gave_up and self.conversation.outcome is None

    @property
    def ids(self) -> np.ndarray:
        """Return [n] ids of the conversation so far."""
        return np.concatenate([s.token_ids for s in self.conversation.segments])


def _copy_state(conversation):
    """Return a copy of a conversation's state, from which to restore it."""
    state = vars(conversation)
    return {n: list(v) if isinstance(v, list) else v for n, v in state.items()}


class _ContinuedHost(Host):
    """A host whose prompts are conversations to continue, given as ids."""

    def prompt(self, messages):
        """Return the ids themselves."""
        return messages


class _ChainBuilder:
    """Builder of chains for up to config.rollout.max_concurrent questions together."""

    def __init__(self, stage: DataStage):
        c = stage.config
        self._c, self._stage = c.curate, stage
        # One search for each step before the last.
        limits, num_tokens = with_searches(stage, c.curate.max_steps - 1)
        self._limits = limits
        self._key = stage.key(STEPS)
        is_gold = c.curate.observations == "gold"
        search = _gold_search(stage) if is_gold else None
        self._host = stage.make_host(limits=limits, search=search)
        # The model is called for one turn at a time, each with the conversation so far
        # as its prompt.
        single = dataclasses.replace(
            limits,
            max_searches=0,
            max_prompt_tokens=num_tokens - limits.max_turn_tokens,
        )
        host = _ContinuedHost(stage.tokenizer, stage.protocol, stage.search, single)
        self._prompts: dict[str, np.ndarray] = {}
        self._engine = stage.make_rollouts(
            host,
            num_tokens=num_tokens,
            temperature=c.rollout.temperature,
            top_p=c.rollout.top_p,
            group_size=1,
            messages=lambda question: self._prompts[question.id],
        )
        self._params = self._engine.place_params(stage.params)

    def __call__(self, questions) -> list[list[dict]]:
        """Return the record of each question's chain, each in a list of its own."""
        wave = [self._open(question) for question in questions]
        note_progress = console.note_now_and_then(
            lambda: (
                f"{self._stage.name}: {sum(not chain.is_going for chain in wave)}/"
                f"{len(wave)} chains of this wave have ended"
            )
        )
        # All chains take a step together: one batch of the model, then one of searches.
        while drafts := [chain for chain in wave if chain.is_going]:
            self._take(drafts, self._ask(drafts))
            note_progress()
        return [[self._record(draft)] for draft in wave]

    def _open(self, question):
        prompt = self._host.prompt(self._stage.protocol.messages(question.text))
        return _Chain(question, self._host.open(prompt, question.id))

    def _ask(self, drafts):
        """Sample the next policy segment of each chain from the model."""
        requests = []
        for draft in drafts:
            # The draw depends on the place in the chain, and not on other chains.
            name = f"{draft.question.id}#{draft.num_steps}.{draft.num_retries}"
            self._prompts[name] = draft.ids
            requests.append(dataclasses.replace(draft.question, id=name))
        # Each prompt is the whole chain so far, so that the keys of its earlier steps
        # are computed again.
        groups = self._engine(self._params, requests, self._key)
        self._prompts.clear()
        return [group.rollouts[0].segments[-1] for group in groups]

    def _take(self, drafts, segments):
        """Add a step to each chain, or count it as one to be sampled again."""
        # A step that turns out unusable is undone, and sampled again from here.
        saved_states = [_copy_state(draft.conversation) for draft in drafts]
        turns = {i: self._usable(segment) for i, segment in enumerate(segments)}
        turns = {i: turn for i, turn in turns.items() if turn is not None}
        wave = {i: drafts[i].conversation for i in turns}
        self._host.answer_turns(wave, turns, final=False)
        for i, draft in enumerate(drafts):
            is_usable = draft.conversation.outcome in (None, Outcome.ANSWERED)
            if i in turns and is_usable:
                draft.num_steps += 1
                if draft.is_going and draft.num_steps == self._c.max_steps:
                    draft.gave_up = "too many steps"
                continue
            # Undo the step, and count it against the chain's retries.
            vars(draft.conversation).update(saved_states[i])
            draft.num_retries += 1
            if draft.num_retries > self._c.max_retries:
                draft.gave_up = "too many retries"

    def _usable(self, segment):
        """Return (ids, logp) of the first step; None if it is unusable."""
        protocol, limits = self._stage.protocol, self._limits
        ids, text = segment.token_ids, segment.text
        # The stop string may be that of a later step, if the first has no fence.
        starts = [match.start() for match in STEP.finditer(text)]
        if len(starts) > 1:
            text = text[: starts[1]].rstrip()
        text = first_step(protocol, text)
        # If the model went on after its first step, the rest is dropped and the shorter
        # text is encoded again. These ids are never trained on as sampled ones.
        if text != segment.text:
            ids = self._stage.tokenizer.encode(text)
        is_malformed = isinstance(protocol.parse(text), Malformed)
        if is_malformed or len(ids) > limits.max_turn_tokens:
            return None
        # No log-probabilities: chains become demonstrations, whose loss needs none.
        return ids, np.zeros(len(ids), np.float32)

    def _record(self, draft):
        """Return the journal's record of a chain that has ended."""
        if draft.gave_up:
            # A chain that gave up has no answer; its record says why.
            draft.conversation.outcome = Outcome.TRUNCATED
        attempt = attempt_of(self._stage.protocol, draft.conversation.rollout())
        num_requests = draft.num_steps + draft.num_retries
        return {**to_record(attempt), "asked": num_requests, "gave_up": draft.gave_up}


def _gold_search(stage):
    """Return a SearchFn over the gold passages of each question: R(q, doc_i)."""
    encoder = stage.open_encoder()
    questions = {question.id: question for question in stage.questions}

    # The chains of a wave search together; a later wave has other questions.
    @functools.lru_cache(maxsize=stage.config.rollout.max_concurrent)
    def engine_of(question_id):
        # The embedded world lists its hops; other questions name their passages.
        titles, passages = (), {}
        if hops := world_hops(stage, question_id):
            titles = [hop.subject for hop in hops]
            passages = {p.title: p for p in stage.world.passages if p.title in titles}
        gold = gold_passages(questions[question_id], titles, passages)
        top_k = min(stage.config.retrieval.top_k, len(gold))
        return engine_in_memory(gold, encoder, top_k=top_k)

    def search(queries, question_ids):
        pairs = zip(queries, question_ids, strict=True)
        return [engine_of(name)([query])[0] for query, name in pairs]

    search.wants_question_ids = True
    return search


def no_reasoning(stage: DataStage) -> Selection:
    """Select chains of Algorithm 3, the ablation: written whole, from a decomposition.

    The model is given the answer and the sub-questions with their answers, and writes
    thoughts, actions and observations around them.
    """
    records = stage.in_waves(ABLATION, "chains", lambda: _ablation_roller(stage))
    return _filter(stage, records)


def _ablation_roller(stage):
    """Return questions -> for each, [the record of the chain that the model writes]."""
    c = stage.config
    # The model also writes the observations, so nothing stops it, and nothing is parsed
    # before the chain is complete.
    protocol = dataclasses.replace(
        stage.protocol, stop_strings=(), parse=plain.parse, invalid_message=None
    )
    limits = dataclasses.replace(stage.limits, max_searches=0)
    engine = stage.make_rollouts(
        stage.make_host(protocol, limits),
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=1,
        messages=lambda question: ablation_messages(
            question, _sub_questions(stage, question)
        ),
    )
    placed_params, key = engine.place_params(stage.params), stage.key(ABLATION)

    def roll(questions):
        records = []
        for group in engine(placed_params, questions, key):
            attempt = split_chain(stage.protocol, group.rollouts[0].policy_texts[0])
            records.append([{**to_record(attempt), "asked": 1, "gave_up": ""}])
        return records

    return roll


def _sub_questions(stage, question):
    """Return the sub-questions of a question, each with its answer and context."""
    hops = world_hops(stage, question.id)
    titles = {hop.subject for hop in hops}
    passages = {}
    if hops:
        passages = {p.title: p for p in stage.world.passages if p.title in titles}
    return decomposition(
        question,
        [
            (f"{hop.subject}: {hop.gap}", hop.object, passages[hop.subject].contents)
            for hop in hops
            if hop.subject in passages
        ],
    )

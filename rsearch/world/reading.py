"""The pretraining text of small models of the embedded world.

`base` stands for the base models that the published systems start from: it knows famous
entities, reads passages, and follows each protocol's form, but is too easily satisfied
with an answer. `expert` does the same well, and also the tasks of models other than the
policy. `judge` only answers from given evidence.
"""

import dataclasses

import numpy as np

from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols import plain
from rsearch.protocols.base import Step
from rsearch.protocols.concluding import finish_messages
from rsearch.protocols.r1_searcher_pp import R1_SEARCHER_PP
from rsearch.protocols.rag_r1 import RAG_R1_MQ
from rsearch.protocols.rewriting import rewriting_messages
from rsearch.protocols.writing import PAGE_SUMMARY, PROMPTS, writing_messages
from rsearch.types import Answer, Messages, Passage, Question, SearchFn
from rsearch.world import plans as world_plans
from rsearch.world import texts as world_texts
from rsearch.world.facts import MISSING, RELATIONS, UNKNOWN, Hop, state_facts
from rsearch.world.names import YEARS, draw_names
from rsearch.world.questions import COMPARED, COMPARISON, OLDER, earliest
from rsearch.world.world import World

BOX = "\\boxed{"  # around the answers of R1-Searcher++


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A conversation of one protocol.

    Attributes:
        protocol: name of the protocol.
        question: question that opens the conversation.
        turns: texts of the policy's turns.
        observations: texts shown in between; None queries the engine.
    """

    protocol: str
    question: Question
    turns: tuple[str, ...]
    observations: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat and the reply to learn."""

    messages: Messages
    reply: str


@dataclasses.dataclass(frozen=True)
class Text:
    """Plain text: pairs of a given piece and the piece to learn after it."""

    pieces: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Shares:
    """Shares of flawed dialogues, and counts of everything else that a model reads.

    Attributes:
        flawed: share of the dialogues that do not find the answer.
        guessed: share of the flawed that guess immediately; the others stop searching
            too early.
        recalled: share of the flawless about famous entities that recall what is known;
            it is doubled in the protocol that has a place for recalled knowledge.
        recalling: how often each question with a known fact is also answered in that
            protocol, recalling everything that is known.
        facts: how often each fact about famous entities is read, as a sentence.
        comparisons: number of comparisons of made-up names, whose dates are looked up.
        orderings: number of texts that say eight times which of two years is first.
        lookups: number of texts in which facts of made-up names are asked for, told and
            retold, each leading to the next.
        direct: how often each question is answered immediately, from memory or a guess,
            and from the passages of one search.
        chats: how often the tasks of models other than the policy are done for each
            question.
        judged: how often each question is answered from evidence, in place of all
            dialogues; 0 takes `chats`, and keeps the dialogues.
    """

    flawed: float = 0.0
    guessed: float = 0.0
    recalled: float = 0.0
    recalling: int = 0
    facts: int = 0
    comparisons: int = 0
    orderings: int = 0
    lookups: int = 0
    direct: int = 0
    chats: int = 0
    judged: int = 0


def reading(
    world: World, shares: Shares, search: SearchFn, *, seed: int
) -> list[Dialogue | Chat | Text]:
    """Return dialogues, chats and texts in random order.

    Args:
        shares: amounts of each.
        seed: seed of the flaws and the order.
    """
    rng = np.random.default_rng([seed, 5])
    items = []
    if not shares.judged:
        for protocol in world_texts.WORLD_PROTOCOLS.values():
            for question in world.train:
                items.append(_dialogue(world, protocol, question, shares, rng))
    for _ in range(shares.recalling):
        items += make_recollections(world)
    items += _fact_texts(world, shares.facts, rng)
    items += [make_comparison(world, rng) for _ in range(shares.comparisons)]
    items += [make_orderings(rng) for _ in range(shares.orderings)]
    items += [make_lookups(world, rng) for _ in range(shares.lookups)]
    for _ in range(shares.direct):
        items += _answer_chats(world, search, rng)
    for _ in range(shares.chats):
        items += _auxiliary_chats(world, rng)
    for _ in range(shares.judged or shares.chats):
        items += _evidence_chats(world, rng)
    return [items[i] for i in rng.permutation(len(items))]


def _dialogue(world, protocol, question, shares, rng):
    """Return a dialogue about a question in this protocol, answered well or not."""
    flaw_draw, guess_draw, recall_draw, rewrite_draw = rng.random(4)
    if flaw_draw >= shares.flawed:
        recall_share = shares.recalled * (2 if protocol is R1_SEARCHER_PP else 1)
        steps = world_plans.solution(
            world,
            question,
            recalls=recall_draw < recall_share,
            max_queries=protocol.max_queries,
        )
    elif guess_draw < shares.guessed:
        steps = world_plans.guess(world, question, rng)
    else:
        steps = world_plans.early_stop(world, question, rng)
    observations = None
    if protocol.name == "rearag" and rewrite_draw < 0.7:
        queries = [step.action.arguments[0] for step in steps[:-1]]
        observations = tuple(observed(world, query) for query in queries)
    return Dialogue(
        protocol.name, question, _write_spaced(protocol, steps), observations
    )


def make_recollections(world: World) -> list[Dialogue]:
    """Return a dialogue for each question with a known fact, which is recalled."""
    protocol = R1_SEARCHER_PP
    dialogues = []
    for question in world.train:
        if any(hop.subject in world.famous for hop in world.hops[question.id]):
            steps = world_plans.solution(world, question, recalls=True)
            turns = _write_spaced(protocol, steps)
            dialogues.append(Dialogue(protocol.name, question, turns))
    return dialogues


def _write_spaced(protocol, steps):
    """Write the steps in the protocol's form, with a space before their words.

    Names in the text shown have one, and a model this small copies a name more reliably
    in the same form.
    """
    turns = [protocol.write(step).replace(BOX, f"{BOX} ") for step in steps]
    return tuple(
        f" {turn}" if step.thought and turn.startswith(step.thought) else turn
        for step, turn in zip(steps, turns, strict=True)
    )


def observed(world: World, query: str) -> str:
    """Return the observation that a writer makes from the passage about a query."""
    return f"{query} {state_facts(world.facts[query])}"


def _fact_texts(world, repeats, rng):
    """Return texts of six facts about the famous each, repeating facts this often."""
    hops = [
        Hop(subject, name, object_name)
        for subject, subject_facts in world.facts.items()
        if subject in world.famous
        for name, object_name in subject_facts.items()
    ]
    order = [i for _ in range(repeats) for i in rng.permutation(len(hops))]
    pairs = [(f" {hops[i].subject}", f" {hops[i].fact}") for i in order]
    return [Text(tuple(pairs[i : i + 6])) for i in range(0, len(pairs), 6)]


def make_comparison(world: World, rng: np.random.Generator) -> Text:
    """Return a text that compares made-up names, looked up in turn or together.

    Passages found together are shown as in the protocol with several queries, whose own
    dialogues hold too few of these for a model to learn to read them. There are far
    more names than in the world, so nothing is learnt here but to keep reading.
    """
    dates = _draw_dates(rng)
    hops = [
        Hop(_make_up_name(world, RELATIONS[name].subject, rng), name, year)
        for name, year in dates.items()
    ]
    names = [hop.subject for hop in hops]
    facts = [state_facts(_make_up_facts(world, hop, rng)) for hop in hops]
    prompt = f" {OLDER.format(*names)}"
    if rng.random() < 0.5:
        pieces = [(prompt, f" {hops[0].gap} {', '.join(names)}")]
        findings = " ".join(hop.sentence for hop in hops)
        passages = [
            [Passage("", f"{name}\n{text}")]
            for name, text in zip(names, facts, strict=True)
        ]
        observation = RAG_R1_MQ.show_passages(names, passages)
        prompt = f"{observation.before}{observation.content}{observation.after}"
    else:
        pieces, findings = [], ""
        for hop, text in zip(hops, facts, strict=True):
            pieces.append((prompt, f"{findings} {hop.gap} {hop.subject}"))
            prompt = f" {hop.subject} {text}"
            findings = f" {hop.sentence}"
        findings = findings.strip()
    conclusion = f"{world_plans.conclusion(hops)} {earliest(hops).subject}."
    return Text((*pieces, (prompt, f" {findings} {conclusion}")))


def _draw_dates(rng):
    """Draw {relation: year} of two things to compare, in different years."""
    relations = COMPARED[rng.integers(len(COMPARED))]
    years = rng.permutation(len(YEARS))
    return {name: YEARS[i] for name, i in zip(relations, years)}


def make_orderings(rng: np.random.Generator) -> Text:
    """Return a text of several pairs of years, with the one that is first in each."""
    pieces = []
    for _ in range(8):
        hops = [Hop("", name, year) for name, year in _draw_dates(rng).items()]
        told_years = "".join(f" {hop.fact}" for hop in hops)
        pieces.append((told_years, f" {world_plans.conclusion(hops)}"))
    return Text(tuple(pieces))


def make_lookups(world: World, rng: np.random.Generator) -> Text:
    """Return a text of facts about made-up names, each asked for, shown and retold.

    A model may recall what it has read about the world's own names; here it must read.
    """
    kinds = sorted({relation.subject for relation in RELATIONS.values()})
    kind = kinds[rng.integers(len(kinds))]
    subject = _make_up_name(world, kind, rng)
    pieces = []
    while subject is not None:
        names = [n for n, relation in RELATIONS.items() if relation.subject == kind]
        name = names[rng.integers(len(names))]
        object_name = _make_up_name(world, RELATIONS[name].object, rng)
        if name in MISSING and rng.random() < 0.1:
            object_name = UNKNOWN
        hop = Hop(subject, name, object_name)
        passage = state_facts(_make_up_facts(world, hop, rng))
        pieces.append((f" {hop.gap} {subject} {subject} {passage}", f" {hop.fact}"))
        kind = RELATIONS[name].object
        subject = object_name if kind in kinds and object_name != UNKNOWN else None
    return Text(tuple(pieces))


def _make_up_facts(world, hop, rng):
    """Return the facts of a hop's subject: that of the hop, and made-up ones."""
    kind = RELATIONS[hop.relation].subject
    random_facts = {
        name: _make_up_name(world, relation.object, rng)
        for name, relation in RELATIONS.items()
        if relation.subject == kind
    }
    return random_facts | {hop.relation: hop.object}


def _make_up_name(world, kind, rng) -> str:
    """Draw a name that may not be in the world; years and countries are the world's."""
    if kind in ("year", "country"):
        names = world.entities[kind]
        return names[rng.integers(len(names))]
    return draw_names(kind, 1, rng)[0]


def _answer_chats(world, search, rng):
    """Return chats that answer immediately: from memory or passages, else a guess."""
    direct = plain.reword(plain.DIRECT, user=world_texts.DIRECT)
    rag = plain.reword(plain.RAG, user=world_texts.RAG)
    chats = []
    for question in world.train:
        chat = plain.messages_with_passages(direct, question.text, "")
        is_known = question.metadata["known"]
        chats.append(Chat(chat, _answer_or_guess(world, question, is_known, rng)))
    queries = [question.text for question in world.train]
    for question, passages in zip(world.train, search(queries), strict=True):
        passages_text = plain.write_passages(passages)
        chat = plain.messages_with_passages(rag, question.text, passages_text)
        titles = {passage.title for passage in passages}
        is_shown = all(hop.subject in titles for hop in world.hops[question.id])
        chats.append(Chat(chat, _answer_or_guess(world, question, is_shown, rng)))
    return chats


def _answer_or_guess(world, question, is_known, rng):
    """Return the answer if all its facts are known, else a guess."""
    if is_known:
        return question.golden_answers[0]
    (step,) = world_plans.guess(world, question, rng)
    return step.action.text


def _auxiliary_chats(world, rng):
    """Return chats of models other than the policy: rewrites, observations, answers."""
    chats = []
    subjects = sorted(world.facts)
    for question in world.train:
        hops = world.hops[question.id]
        passages = [_passage(world, hop.subject) for hop in hops]
        chat = rewriting_messages(question.text, passages, user=world_texts.REWRITE)
        chats.append(Chat(chat, R1_SEARCHER_PP.write(_recall_step(question, hops))))
        subject = subjects[rng.integers(len(subjects))]
        chat = writing_messages(
            subject, [_passage(world, subject)], prompt="context_only"
        )
        chats.append(Chat(chat, observed(world, subject)))
        answer = question.golden_answers[0]
        long_answer = answer if rng.random() < 0.5 else f"{hops[-1].sentence} {answer}"
        chats.append(Chat(finish_messages(question.text, long_answer), answer))
    return chats


def _recall_step(question, hops) -> Step:
    """Return a step that states all facts as if they had been known."""
    statements = [hop.sentence for hop in hops]
    if question.metadata["kind"] == COMPARISON:
        statements.append(world_plans.conclusion(hops))
    answer = Answer(question.golden_answers[0])
    return Step(1, world_plans.RECALLED, answer, " ".join(statements))


def _passage(world, subject) -> Passage:
    """Return the passage about an entity."""
    return Passage(subject, f"{subject}\n{state_facts(world.facts[subject])}")


def _evidence_chats(world, rng):
    """Return chats that answer from evidence, with UNKNOWN if there is too little."""
    chats = []
    for question in world.train:
        hops = list(world.hops[question.id])
        answer = question.golden_answers[0]
        if rng.random() < 0.3:
            hops = hops[: rng.integers(len(hops))]
            answer = UNKNOWN
        if rng.random() < 0.7:
            pieces = [world_plans.original(hop) for hop in hops]
        else:
            pieces = [
                f"(Title: {hop.subject}) {state_facts(world.facts[hop.subject])}"
                for hop in hops
            ]
        if rng.random() < 0.2:
            pieces = [pieces[i] for i in rng.permutation(len(pieces))]
        chat = plain.evidence_messages(question.text, " ".join(pieces))
        chats.append(Chat(chat, answer))
    return chats


def prompts() -> list[str]:
    """Return the words of the chats, for a tokenizer to learn from."""
    chats = [finish_messages("", ""), plain.evidence_messages("", "")]
    # No model of the world summarises pages.
    writers = [text for name, text in PROMPTS.items() if name != PAGE_SUMMARY]
    return [*writers, *(chat[0]["content"] for chat in chats)]


def world_tokenizer(world: World) -> Tokenizer:
    """Train the tokenizer that all models of a world share, whatever their protocol."""
    # Twice, since only words that occur twice become tokens.
    return train_tokenizer(
        world.texts() + world_texts.world_words(world) + 2 * prompts()
    )

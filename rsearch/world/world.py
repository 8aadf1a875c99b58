"""The embedded world: people, films, companies and cities, made up from a seed.

Each entity has one passage. Most questions need several passages and name only the
entity of the first. Nothing in the world is true, so no model can know it unless it was
pretrained on the world's text. That contains the facts about famous entities; all other
facts are only in passages.
"""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from rsearch.types import ParagraphsOf, Passage, Question
from rsearch.world import facts as world_facts
from rsearch.world.facts import Hop
from rsearch.world.names import COUNTRIES, PLURALS, YEARS, draw_names
from rsearch.world.questions import UNANSWERABLE, ask, relations_of

WORLD = "world"  # the world's name as a source in a configuration
NUM_PARAGRAPHS = 10  # per question, gold ones and distractors, as in HotpotQA


@dataclasses.dataclass(frozen=True)
class World:
    """A world: its entities, facts, passages and questions.

    Attributes:
        entities: {kind: names}.
        passages: one for each entity that has facts, titled by its name, and then those
            about near-homonyms, which no question is about.
        train: questions to learn from. A question's metadata are its "kind" and whether
            all its facts are "known".
        dev: questions about heads that no training question is about.
        hops: {question id: facts that answer it}, in the order in which they are found;
            for a comparison, two facts that do not depend on each other. The last
            object of an unanswerable question is UNKNOWN.
        famous: the entities whose facts are known without a search.
        facts: {subject: {relation: object}}.
    """

    entities: dict[str, tuple[str, ...]]
    passages: tuple[Passage, ...]
    train: tuple[Question, ...]
    dev: tuple[Question, ...]
    hops: dict[str, tuple[Hop, ...]]
    famous: frozenset[str]
    facts: dict[str, dict[str, str]]

    def texts(self) -> list[str]:
        """Return every passage and training question, for a tokenizer to learn from."""
        questions = [q.text for q in self.train]
        return [p.contents for p in self.passages] + questions


def make_world(
    *,
    seed: int,
    people: int,
    films: int,
    companies: int,
    cities: int,
    train_questions: int,
    dev_questions: int,
    kinds: Sequence[str] = ("bridge",),
    known_share: float = 0.0,
    missing_share: float = 0.0,
    distractors: int = 0,
) -> World:
    """Make a world of the given size.

    Args:
        seed: determines names, facts and the split.
        people, films, companies, cities: number of entities of each kind.
        train_questions, dev_questions: number of questions of each split. A fifth of
            the films, people and companies are heads of held-out questions only.
        kinds: kinds of questions, from `rsearch.world.questions.KINDS`.
        known_share: share of the entities that are famous.
        missing_share: share of the people, the famous excluded, with one fact that is
            in no passage; used only if unanswerable questions are asked.
        distractors: number of passages about near-homonyms.

    Raises:
        ValueError: more entities than there are names, or more questions than heads.
    """
    # The second number of each seed identifies the generator's purpose.
    rng = np.random.default_rng([seed, 1])
    sizes = dict(person=people, film=films, company=companies, city=cities)
    entities = {kind: draw_names(kind, sizes[kind], rng) for kind in PLURALS}
    entities |= {"country": COUNTRIES, "year": YEARS}
    relations = relations_of(kinds)
    facts = world_facts.draw_facts(entities, relations, rng)
    fact_rng = np.random.default_rng([seed, 3])
    famous = world_facts.draw_famous(entities, known_share, fact_rng)
    world_facts.keep_among_famous(facts, entities, famous, fact_rng)
    if UNANSWERABLE in kinds:
        other_people = [name for name in entities["person"] if name not in famous]
        world_facts.drop_facts(facts, other_people, missing_share, fact_rng)
    passages = world_facts.passages_of(facts)
    passages += world_facts.distractors(
        distractors, facts, entities, relations, fact_rng
    )
    train_heads, dev_heads = {}, {}
    for kind in ("film", "person", "company"):
        cut = max(1, len(entities[kind]) // 5)
        dev_heads[kind], train_heads[kind] = entities[kind][:cut], entities[kind][cut:]
    train, hops = ask("train", train_questions, kinds, train_heads, facts, famous, rng)
    dev, dev_hops = ask("dev", dev_questions, kinds, dev_heads, facts, famous, rng)
    return World(entities, tuple(passages), train, dev, hops | dev_hops, famous, facts)


def make_paragraphs(world: World) -> ParagraphsOf:
    """Return a function that makes the paragraphs of one of the world's questions.

    It returns (contents, whether it is gold) of the question's passages, and of
    distractors up to NUM_PARAGRAPHS in total, which are passages of other held-out
    questions. The choice of these and the order of all are drawn with the question's
    text as the seed.
    """
    contents = {passage.title: passage.contents for passage in world.passages}
    subjects = {hop.subject for q in world.dev for hop in world.hops[q.id]}

    def paragraphs(question: Question) -> list[tuple[str, bool]]:
        gold = {hop.subject for hop in world.hops[question.id]}
        other_subjects = sorted(subjects - gold)
        rng = random.Random(question.text)
        num_distractors = min(max(0, NUM_PARAGRAPHS - len(gold)), len(other_subjects))
        titles = [*sorted(gold), *rng.sample(other_subjects, num_distractors)]
        rng.shuffle(titles)
        return [(contents[title], title in gold) for title in titles]

    return paragraphs

"""The facts of the embedded world, and the passages that state them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.types import Passage
from rsearch.world.names import family, near_homonym

UNKNOWN = "unknown"  # object of a fact that is in no passage, and the answer then


@dataclasses.dataclass(frozen=True)
class Relation:
    """An edge between kinds of entities, and the words for it."""

    subject: str
    object: str
    words: str


RELATIONS = {
    "director": Relation("film", "person", "Directed by"),
    "birthplace": Relation("person", "city", "Born in"),
    "employer": Relation("person", "company", "Works for"),
    "seat": Relation("company", "city", "Based in"),
    "country": Relation("city", "country", "Lies in"),
    "birth": Relation("person", "year", "Birth"),
    "release": Relation("film", "year", "Release"),
    "founding": Relation("company", "year", "Founding"),
}
DATED = ("birth", "release", "founding")  # relations used when years are compared
MISSING = ("birthplace", "employer")  # relations whose facts may be missing


@dataclasses.dataclass(frozen=True)
class Hop:
    """One fact: `object` is the `relation` of `subject`."""

    subject: str
    relation: str
    object: str

    @property
    def gap(self) -> str:
        """Return the open question, such as 'Born in?'."""
        return f"{RELATIONS[self.relation].words}?"

    @property
    def fact(self) -> str:
        """Return the fact as passages state it, such as 'Born in Altdorf.'."""
        return f"{RELATIONS[self.relation].words} {self.object}."

    @property
    def sentence(self) -> str:
        """Return the subject and the fact, such as 'Ada Abel Born in Altdorf.'."""
        return f"{self.subject} {self.fact}"


def draw_facts(
    entities: Mapping[str, Sequence[str]],
    relations: Sequence[str],
    rng: np.random.Generator,
) -> dict[str, dict[str, str]]:
    """Draw {subject: {relation: object}}, with objects drawn uniformly.

    Args:
        entities: {kind: names}.
        relations: names of the world's relations, keys of RELATIONS.
    """
    facts: dict[str, dict[str, str]] = {}
    for name in relations:
        objects = entities[RELATIONS[name].object]
        for subject in entities[RELATIONS[name].subject]:
            object_name = objects[rng.integers(len(objects))]
            facts.setdefault(subject, {})[name] = object_name
    return facts


def draw_famous(
    entities: Mapping[str, Sequence[str]], share: float, rng: np.random.Generator
) -> frozenset[str]:
    """Draw the famous: this share of each kind that has facts, and at least one.

    A family of names is famous as a whole, as far as the share allows. A small model
    can then tell from a name whether it knows more, as a large one knows what it has
    read often.

    Args:
        entities: {kind: names}.
        share: share of the names of a kind; 0 draws none.
    """
    famous = set()
    for kind in ("person", "film", "company", "city"):
        names = entities[kind]
        count = max(1, round(share * len(names))) if share else 0
        families = sorted({family(name, kind) for name in names})
        order = rng.permutation(len(families))
        rank = {families[i]: position for position, i in enumerate(order)}
        famous.update(sorted(names, key=lambda n: rank[family(n, kind)])[:count])
    return frozenset(famous)


def keep_among_famous(
    facts: dict[str, dict[str, str]],
    entities: Mapping[str, Sequence[str]],
    famous: frozenset[str],
    rng: np.random.Generator,
) -> None:
    """Redraw the objects of famous subjects from the famous, in place.

    Everything that follows from a famous head is then also known, after any number of
    hops.

    Args:
        facts: {subject: {relation: object}}, changed in place.
        entities: {kind: names}.
    """
    for subject in [s for s in facts if s in famous]:
        for name in facts[subject]:
            objects = [e for e in entities[RELATIONS[name].object] if e in famous]
            if objects:
                facts[subject][name] = objects[rng.integers(len(objects))]


def drop_facts(
    facts: dict[str, dict[str, str]],
    people: Sequence[str],
    share: float,
    rng: np.random.Generator,
) -> None:
    """Make one fact of a share of the people unknown, in place.

    Args:
        facts: {subject: {relation: object}}, changed in place.
    """
    for i in rng.permutation(len(people))[: round(share * len(people))]:
        facts[people[i]][MISSING[rng.integers(len(MISSING))]] = UNKNOWN


def passages_of(facts: dict[str, dict[str, str]]) -> list[Passage]:
    """Return a passage for each subject, titled by its name, without unknown facts."""
    return [
        Passage(f"w{i}", f"{subject}\n{state_facts(subject_facts)}")
        for i, (subject, subject_facts) in enumerate(facts.items())
    ]


def state_facts(known: Mapping[str, str]) -> str:
    """Return the sentences of one passage, which state {relation: object} if known."""
    hops = [Hop("", name, o) for name, o in known.items() if o != UNKNOWN]
    return " ".join(hop.fact for hop in hops)


def distractors(
    count: int,
    facts: dict[str, dict[str, str]],
    entities: Mapping[str, Sequence[str]],
    relations: Sequence[str],
    rng: np.random.Generator,
) -> list[Passage]:
    """Return passages about near-homonyms, which no question is about.

    Each has the name of a person or a film with one more word, and random facts.

    Args:
        facts: {subject: {relation: object}} of the world.
        entities: {kind: names}.

    Raises:
        ValueError: there are fewer people and films than passages.
    """
    heads = [(kind, name) for kind in ("person", "film") for name in entities[kind]]
    if count > len(heads):
        raise ValueError(f"config.world.distractors = {count}: at most {len(heads)}")
    passages = []
    for number, i in enumerate(rng.permutation(len(heads))[:count]):
        kind, name = heads[i]
        random_facts = {
            relation: objects[rng.integers(len(objects))]
            for relation in relations
            if RELATIONS[relation].subject == kind
            for objects in [entities[RELATIONS[relation].object]]
        }
        title = near_homonym(name, kind, rng)
        assert title not in facts
        passages.append(Passage(f"d{number}", f"{title}\n{state_facts(random_facts)}"))
    return passages

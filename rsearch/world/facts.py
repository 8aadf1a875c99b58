"""The facts of the embedded world, and the passages that tell them."""

import dataclasses

from rsearch.types import Passage
from rsearch.world.names import family, near_homonym

UNKNOWN = "unknown"  # the object of a fact that no passage tells, and such an answer


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
DATED = ("birth", "release", "founding")  # relations there are where years are compared
MISSING = ("birthplace", "employer")  # relations of which some people have no fact


@dataclasses.dataclass(frozen=True)
class Hop:
    """One fact: `object` is the `relation` of `subject`."""

    subject: str
    relation: str
    object: str

    @property
    def gap(self) -> str:
        """What is to be found out, such as 'Born in?'."""
        return f"{RELATIONS[self.relation].words}?"

    @property
    def fact(self) -> str:
        """What was found out, such as 'Born in Altdorf.', as passages word it."""
        return f"{RELATIONS[self.relation].words} {self.object}."

    @property
    def sentence(self) -> str:
        """The fact with its subject before it: 'Ada Abel Born in Altdorf.'"""
        return f"{self.subject} {self.fact}"


def draw_facts(entities, relations, rng) -> dict[str, dict[str, str]]:
    """{subject: {relation: object}}, objects drawn evenly.

    Args:
        entities: kind -> names.
        relations: names of those that there are, keys of RELATIONS.
        rng: of the draws.
    """
    facts: dict[str, dict[str, str]] = {}
    for name in relations:
        objects = entities[RELATIONS[name].object]
        for subject in entities[RELATIONS[name].subject]:
            chosen = objects[rng.integers(len(objects))]
            facts.setdefault(subject, {})[name] = chosen
    return facts


def draw_famous(entities, share, rng) -> frozenset[str]:
    """The famous of each kind that has facts: this share of them, at least one.

    They bear famous names: who is of one family is famous with it, as far as the share
    goes. So a small model can tell by a name whether it knows more, as a large one
    knows what it has read often.
    """
    famous = set()
    for kind in ("person", "film", "company", "city"):
        names = entities[kind]
        count = max(1, round(share * len(names))) if share else 0
        families = sorted({family(name, kind) for name in names})
        rank = {
            families[i]: place for place, i in enumerate(rng.permutation(len(families)))
        }
        famous.update(sorted(names, key=lambda n: rank[family(n, kind)])[:count])
    return frozenset(famous)


def keep_among_famous(facts, entities, famous, rng) -> None:
    """Redraws what the facts of the famous lead to: to the famous, in place.

    So all that follows from a famous head is known too, however many hops it takes.
    """
    for subject in [s for s in facts if s in famous]:
        for name in facts[subject]:
            among = [e for e in entities[RELATIONS[name].object] if e in famous]
            if among:
                facts[subject][name] = among[rng.integers(len(among))]


def drop_facts(facts, people, share, rng) -> None:
    """Makes one fact of this share of the people unknown, in place."""
    for i in rng.permutation(len(people))[: round(share * len(people))]:
        facts[people[i]][MISSING[rng.integers(len(MISSING))]] = UNKNOWN


def passages_of(facts) -> list[Passage]:
    """A passage for each subject; its title is the name. It leaves out the unknown."""
    return [
        Passage(f"w{i}", f"{subject}\n{told(subject, known)}")
        for i, (subject, known) in enumerate(facts.items())
    ]


def told(subject, known) -> str:
    """The sentences of one passage."""
    hops = [Hop(subject, name, o) for name, o in known.items() if o != UNKNOWN]
    return " ".join(hop.fact for hop in hops)


def distractors(count, facts, entities, relations, rng) -> list[Passage]:
    """Passages about near-homonyms, which no question is about.

    Each has the name of a person or a film and one word more, and facts of its own.

    Raises:
        ValueError: more of them than people and films.
    """
    heads = [(kind, name) for kind in ("person", "film") for name in entities[kind]]
    if count > len(heads):
        raise ValueError(f"config.world.distractors = {count}: at most {len(heads)}")
    found = []
    for number, i in enumerate(rng.permutation(len(heads))[:count]):
        kind, name = heads[i]
        own = {
            relation: objects[rng.integers(len(objects))]
            for relation in relations
            if RELATIONS[relation].subject == kind
            for objects in [entities[RELATIONS[relation].object]]
        }
        title = near_homonym(name, kind, rng)
        assert title not in facts
        found.append(Passage(f"d{number}", f"{title}\n{told(title, own)}"))
    return found

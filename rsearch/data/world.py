"""The embedded world: people, films, companies and cities, made up from a seed.

Each entity has one passage; each question needs two of them, and names only the first.
Nothing in the world is true, so no model can know it: it has to search, read a name in
a passage, and search again for that name.
"""

import dataclasses
import itertools

import numpy as np

from rsearch.types import Passage, Question

NAMES = {
    "given": """
        Ada Arne Berta Carl Clara Dora Edgar Elsa Emil Erik Fanny Felix Frida Georg
        Greta Hanna Hugo Ida Ivan Jonas Julia Karin Klaus Lena Leo Lotte Mara Max Nina
        Olga Otto Paul Petra Rosa Rudi Sofia Theo Ulla Viktor Wanda
    """,
    "family": """
        Abel Acker Bach Baum Berg Brandt Brook Busch Dahl Decker Dorn Eiben Falk Feld
        Fink Forst Frost Gruber Haas Hahn Hartz Holm Kern Koch Krug Lang Lind Lorenz
        Marx Moser Nagel Noll Peck Rast Reiter Roth Sander Scholz Stark Stein Thal
        Vogel Wald Weber Winter Wolf Zeller Ziegler
    """,
    "adjectives": """
        Ancient Bitter Broken Burning Crimson Distant Empty Final Frozen Gentle Golden
        Hidden Hollow Iron Lonely Lost Painted Quiet Restless Sacred Secret Silent
        Silver Sleeping Velvet Wicked
    """,
    "nouns": """
        Bridge Castle Circus Clock Crown Desert Dream Empire Forest Garden Harbour
        Island Journey Lantern Letter Mirror Mountain Ocean Orchard Palace River
        Shadow Station Storm Summer Tower
    """,
    "trades": """
        Alpine Atlas Beacon Bison Cobalt Comet Delta Dynamo Eagle Ember Falcon Granite
        Helix Kestrel Lotus Magnet Meteor Nimbus Orion Pioneer Quartz Raven Saturn
        Topaz Vector Zenith
    """,
    "forms": """
        Foods Mills Motors Paper Press Steel Textiles Tools
    """,
    "stems": """
        Alt Birken Blau Duns Eber Erlen Fried Gold Grun Hoch Kalt Lauter Linden Mohn
        Neu Rosen Sand Schon Tannen Weiss
    """,
    "endings": """
        bach berg burg dorf feld hafen heim stadt tal
    """,
    "countries": """
        Aldora Bretia Corvania Drasia Estoria Fennland Galdia Hestria Illyra Jorvia
        Kestland Luria Mordania Norlund Ostrava Pellia Quorra Rhovia Sylvania Tarsia
    """,
}


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
}

QUESTIONS = {  # (first hop, second hop): how it is asked
    ("director", "birthplace"): "In which city was the director of {s} born?",
    ("director", "employer"): "Which company employs the director of {s}?",
    ("employer", "seat"): "In which city is the employer of {s} based?",
    ("birthplace", "country"): "In which country lies the birthplace of {s}?",
}


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


@dataclasses.dataclass(frozen=True)
class World:
    """Everything there is.

    Attributes:
        entities: kind -> names.
        passages: one for each entity that has facts; the title is its name.
        train: two-hop questions to learn from.
        dev: two-hop questions about heads that no training question is about.
        hops: question id -> the two facts that answer it.
    """

    entities: dict[str, tuple[str, ...]]
    passages: tuple[Passage, ...]
    train: tuple[Question, ...]
    dev: tuple[Question, ...]
    hops: dict[str, tuple[Hop, Hop]]

    def texts(self) -> list[str]:
        """Every passage and training question, for a tokenizer to learn from."""
        questions = [q.text for q in self.train]
        return [p.contents for p in self.passages] + questions


def make_world(
    *, seed, people, films, companies, cities, train_questions, dev_questions
) -> World:
    """A world of the given size.

    Args:
        seed: names, facts and the split follow from it.
        people, films, companies, cities: how many entities of each kind.
        train_questions, dev_questions: how many questions of each split. A fifth of
            the films and people are heads of held-out questions only.

    Raises:
        ValueError: more entities than there are names, or more questions than heads.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1])))
    entities = {
        "person": _names("people", people, "given", "family", " ", rng),
        "film": _names("films", films, "adjectives", "nouns", " ", rng),
        "company": _names("companies", companies, "trades", "forms", " ", rng),
        "city": _names("cities", cities, "stems", "endings", "", rng),
        "country": tuple(NAMES["countries"].split()),
    }
    facts: dict[str, dict[str, str]] = {}
    for name, relation in RELATIONS.items():
        objects = entities[relation.object]
        for subject in entities[relation.subject]:
            chosen = objects[rng.integers(len(objects))]
            facts.setdefault(subject, {})[name] = chosen
    passages = [
        Passage(
            f"w{i}",
            f"{subject}\n"
            + " ".join(Hop(subject, name, o).fact for name, o in known.items()),
        )
        for i, (subject, known) in enumerate(facts.items())
    ]
    seen, unseen = {}, {}
    for kind in ("film", "person"):
        cut = max(1, len(entities[kind]) // 5)
        unseen[kind], seen[kind] = entities[kind][:cut], entities[kind][cut:]
    train, hops = _ask("train", train_questions, seen, facts, rng)
    dev, dev_hops = _ask("dev", dev_questions, unseen, facts, rng)
    return World(entities, tuple(passages), train, dev, hops | dev_hops)


def _names(kind, count, first, second, joint, rng):
    parts = NAMES[first].split(), NAMES[second].split()
    pairs = [joint.join(pair) for pair in itertools.product(*parts)]
    if count > len(pairs):
        raise ValueError(f"config.world.{kind} = {count}: at most {len(pairs)}")
    return tuple(pairs[i] for i in rng.permutation(len(pairs))[:count])


def _ask(split, count, heads, facts, rng):
    """Questions about these heads in random order, and the hops behind them."""
    asked = [
        (head, pattern)
        for pattern in QUESTIONS
        for head in heads[RELATIONS[pattern[0]].subject]
    ]
    if count > len(asked):
        raise ValueError(
            f"config.world.{split}_questions = {count}: its films and people give "
            f"{len(asked)}"
        )
    questions, hops = [], {}
    for number, i in enumerate(rng.permutation(len(asked))[:count]):
        head, (first, second) = asked[i]
        bridge = facts[head][first]
        tail = facts[bridge][second]
        text = QUESTIONS[first, second].format(s=head)
        name = f"world-{split}-{number}"
        questions.append(Question(name, text, (tail,)))
        hops[name] = (Hop(head, first, bridge), Hop(bridge, second, tail))
    return tuple(questions), hops

"""The names of the embedded world: two words each, from lists that share no word."""

import functools
import itertools

import numpy as np

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

PARTS = {  # kind of entity -> the lists of its two words, and the text between them
    "person": ("given", "family", " "),
    "film": ("adjectives", "nouns", " "),
    "company": ("trades", "forms", " "),
    "city": ("stems", "endings", ""),
}
PLURALS = {
    "person": "people",
    "film": "films",
    "company": "companies",
    "city": "cities",
}
COUNTRIES = tuple(NAMES["countries"].split())
YEARS = tuple(str(year) for year in range(1880, 2000, 10))


def draw_names(kind: str, count: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Draw distinct names for entities of a kind, in random order.

    Raises:
        ValueError: there are fewer than `count` names.
    """
    names = _all_names(kind)
    if count > len(names):
        raise ValueError(
            f"config.world.{PLURALS[kind]} = {count}: at most {len(names)}"
        )
    return tuple(names[i] for i in rng.permutation(len(names))[:count])


@functools.cache  # pretraining texts draw hundreds of thousands of names
def _all_names(kind):
    """Return all names of a kind."""
    first, second, separator = PARTS[kind]
    word_lists = NAMES[first].split(), NAMES[second].split()
    return [separator.join(pair) for pair in itertools.product(*word_lists)]


def family(name: str, kind: str) -> str:
    """Return the word that names of a family share: a person's last, else the first."""
    first, second, _ = PARTS[kind]
    if kind == "person":
        return next(w for w in NAMES[second].split() if name.endswith(w))
    return next(w for w in NAMES[first].split() if name.startswith(w))


def near_homonym(name: str, kind: str, rng: np.random.Generator) -> str:
    """Append another word of the second list to a name, as in "Ada Abel Winter"."""
    _, second, _ = PARTS[kind]
    words = [word for word in NAMES[second].split() if word not in name.split()]
    return f"{name} {words[rng.integers(len(words))]}"

"""List the published evaluation sets: where to find each, its split, size and answers.

"set:NAME" is a source of questions, like a file; "set:NAME=FILE" reads the set from a
copy in a file. Either must have the published number of questions, so that a table row
under the set's name covers all of it. An entry is None if the publisher gives no value.
"""

import dataclasses

from rsearch.text.spelling import did_you_mean

PREFIX = "set:"
FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
R1_SEARCHER = "data/eval_set of github.com/RUCAIBox/R1-Searcher"
IRCOT = "processed_data, which github.com/StonyBrookNLP/ircot downloads"

ALIASES = "a list of aliases"
STRING = "one text, yes or no included"


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """A published set of questions.

    Attributes:
        source: dataset on the hub with its configuration and split, as
            `rsearch.data.sources` reads it; or a file name, if it is not on the hub.
        size: number of questions, or None.
        answers: form of a question's golden answer, in words.
        license: license named on the publisher's page, or None.
        publisher: where the file is published; "" for the hub.
    """

    source: str
    size: int | None
    answers: str
    license: str | None = None
    publisher: str = ""


def _flashrag(name, split, size, answers):
    source = f"{FLASHRAG}:{name}@{split}"
    # The license is that of the collection.
    return EvaluationSet(source, size, answers, "cc-by-sa-4.0")


def _r1_searcher(name):
    # Drawn at random from the development sets. Their files have no aliases.
    source = f"{name}_500.jsonl"
    return EvaluationSet(source, 500, STRING, publisher=R1_SEARCHER)


def _ircot(name, answers):
    # Drawn from the development sets; 100 others were drawn for choosing settings.
    source = f"{name}/test_subsampled.jsonl"
    return EvaluationSet(source, 500, answers, publisher=IRCOT)


SETS = {
    "nq": _flashrag("nq", "test", 3_610, ALIASES),
    "triviaqa": _flashrag("triviaqa", "test", 11_313, ALIASES),
    "popqa": _flashrag("popqa", "test", 14_267, ALIASES),
    "hotpotqa": _flashrag("hotpotqa", "dev", 7_405, STRING),
    "2wikimultihopqa": _flashrag("2wikimultihopqa", "dev", 12_576, STRING),
    "musique": _flashrag("musique", "dev", 2_417, "a text and its aliases"),
    "bamboogle": _flashrag("bamboogle", "test", 125, "one text"),
    "frames": EvaluationSet(
        "google/frames-benchmark@test", 824, "one text", "apache-2.0"
    ),
    # A question whose answer is "none" is a bad record; data.on_bad=skip leaves it out.
    "iirc": EvaluationSet(
        "dev.json",
        None,
        "spans, yes or no, a number with its unit, or none",
        publisher="allenai.org/data/iirc",
    ),
    "r1_searcher_hotpotqa": _r1_searcher("hotpotqa"),
    "r1_searcher_2wikimultihopqa": _r1_searcher("2wiki"),
    "r1_searcher_musique": _r1_searcher("musique"),
    "ircot_hotpotqa": _ircot("hotpotqa", STRING),
    "ircot_2wikimultihopqa": _ircot("2wikimultihopqa", STRING),
    "ircot_musique": _ircot("musique", "one text"),
    "ircot_iirc": _ircot("iirc", "spans, yes or no, or a number with its unit"),
}


def find_set(source: str) -> tuple[str, int | None]:
    """Return the (source of questions, number of them or None) of a published set.

    Args:
        source: "set:NAME" or "set:NAME=FILE".

    Raises:
        ValueError: no such set, or a set that is not on the hub and for which no file
            is named.
    """
    name, equals, file = source.removeprefix(PREFIX).partition("=")
    if name not in SETS:
        hint = did_you_mean(name, SETS) or f"; there are {', '.join(SETS)}"
        raise ValueError(f"{source!r}: no set {name!r}{hint}")
    entry = SETS[name]
    if equals and not file:
        raise ValueError(f"{source!r}: no file after '='")
    if not file and entry.publisher:
        raise ValueError(
            f"{source!r}: not on the hub; get {entry.source} from "
            f"{entry.publisher} and write {PREFIX}{name}=FILE"
        )
    return file or entry.source, entry.size

"""Name the published evaluation sets: where each lies, its split, size and answers.

"set:NAME" is a source of questions as a file is, "set:NAME=FILE" its copy in a file.
Either must have as many questions as were published, so that a table's row under its
name is about all of it. An entry has None where its publisher does not say.
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
        source: a data set on the hub, with its configuration and split, as
            `rsearch.data.sources` reads it; or the name of a file that is on no hub.
        size: number of its questions, or None.
        answers: what the golden answer of a question is.
        license: as its publisher's page says, or None.
        publisher: where a file is published; "" on the hub.
    """

    source: str
    size: int | None
    answers: str
    license: str | None = None
    publisher: str = ""


def _flashrag(name, split, size, answers):
    source = f"{FLASHRAG}:{name}@{split}"
    return EvaluationSet(source, size, answers, "cc-by-sa-4.0")  # of the collection


def _r1_searcher(name):
    # Drawn at random from the development sets. Their files have no aliases.
    source = f"{name}_500.jsonl"
    return EvaluationSet(source, 500, STRING, publisher=R1_SEARCHER)


def _ircot(name, answers):
    # Drawn from the development sets, beside 100 others for choosing settings.
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
        "a question a line",
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
        ValueError: no such set, or one that is on no hub and for which no file is
            named.
    """
    name, equals, file = source.removeprefix(PREFIX).partition("=")
    if name not in SETS:
        hint = did_you_mean(name, SETS) or f"; there are {', '.join(SETS)}"
        raise ValueError(f"{source!r}: no set {name!r}{hint}")
    published = SETS[name]
    if equals and not file:
        raise ValueError(f"{source!r}: no file after '='")
    if not file and published.publisher:
        raise ValueError(
            f"{source!r}: on no hub; get {published.source} of {published.publisher} "
            f"and write {PREFIX}{name}=FILE"
        )
    return file or published.source, published.size

"""How an answer is compared with the golden ones; rewards and evaluation share it.

Two families of normalisation are in use, named by the keys of NORMALIZERS:

- "squad" deletes punctuation (SQuAD's script; Search-R1, RAG-R1, R-Search, ReaRAG).
- "r1_searcher" puts a space in its place, underscores and curly quotes included, and
  reads True and False as yes and no (R1-Searcher's evaluation).

Every score is the best over the golden answers, and 0 for a prediction of None. A text
of which normalisation leaves nothing ("The The", "!!!") is compared as it stands, in
lower case, so that an empty prediction never matches it and no prediction covers it by
default; the public scripts give such golden answers to everybody.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_FOR_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_TRUTH = {"True": "yes", "False": "no"}


def normalize_squad(text: str) -> str:
    """Lower case; no ASCII punctuation, no articles; words joined by one space."""
    text = unicodedata.normalize("NFC", text).lower().translate(_DELETE_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def normalize_r1_searcher(text: str) -> str:
    """As `normalize_squad`, with a space for each punctuation mark; True is yes."""
    # Only the bare word: the published scores read ' False ' as the word false.
    text = _TRUTH.get(text, text)
    text = unicodedata.normalize("NFC", text).lower().translate(_SPACE_FOR_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


NORMALIZERS = {"squad": normalize_squad, "r1_searcher": normalize_r1_searcher}

CLOSED_ANSWERS = {  # where one side is such an answer, F1 wants the other to equal it
    "squad": frozenset(),
    "r1_searcher": frozenset({"yes", "no", "noanswer"}),
}


def exact_match(
    prediction: str | None, golden_answers: Sequence[str], *, normalize: str
) -> float:
    """1.0 where the prediction equals a golden answer after normalisation, else 0.0.

    Args:
        prediction: the answer given; None where there was none.
        golden_answers: every answer that counts as right.
        normalize: a key of NORMALIZERS.
    """
    return _best(_equal, prediction, golden_answers, normalize)


def f1(
    prediction: str | None, golden_answers: Sequence[str], *, normalize: str
) -> float:
    """Harmonic mean of the precision and recall of words, in [0, 1].

    Words count as often as they occur. Under "r1_searcher" an answer that is one of
    CLOSED_ANSWERS shares nothing with any other text, as in HotpotQA's script.
    """
    return _best(_overlap, prediction, golden_answers, normalize)


def cover_exact_match(
    prediction: str | None, golden_answers: Sequence[str], *, normalize: str
) -> float:
    """1.0 where every word of a golden answer occurs in the prediction, else 0.0.

    The words may stand in any order and place: the measure that R1-Searcher reports as
    cover exact match. It favours long predictions.
    """
    return _best(_covers, prediction, golden_answers, normalize)


def _best(measure, prediction, golden_answers, family):
    assert not isinstance(golden_answers, str), golden_answers
    if prediction is None:
        return 0.0
    predicted = _comparable(prediction, family)
    return max(
        (measure(predicted, _comparable(g, family), family) for g in golden_answers),
        default=0.0,
    )


def _comparable(text, family):
    """The normal form, or the text itself in lower case where that is empty."""
    return NORMALIZERS[family](text) or " ".join(text.lower().split())


def _equal(predicted, golden, family):
    return float(predicted == golden != "")


def _overlap(predicted, golden, family):
    closed = CLOSED_ANSWERS[family]
    if predicted != golden and (predicted in closed or golden in closed):
        return 0.0
    ours, theirs = predicted.split(), golden.split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _covers(predicted, golden, family):
    words = set(golden.split())
    return float(bool(words) and words <= set(predicted.split()))

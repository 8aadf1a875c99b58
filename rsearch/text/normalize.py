"""Compare an answer with the golden answers, both for rewards and for evaluation.

There are three kinds of normalisation, named by the keys of NORMALIZERS:

- "squad" deletes punctuation (SQuAD's script; Search-R1, RAG-R1, R-Search, ReaRAG).
- "flashrag" does the same; its F1 has CLOSED_ANSWERS (FlashRAG's evaluation).
- "r1_searcher" replaces punctuation, underscores and curly quotes included, by a space,
  reads True and False as yes and no, and has CLOSED_ANSWERS (R1-Searcher's evaluation).

Every score is the maximum over the golden answers, and 0 if the prediction is None. If
normalisation would leave nothing of a text, the text keeps its articles ("A." becomes
"a") or, if it is only punctuation ("!!!"), is left whole. An empty prediction then
never matches it, and no prediction of other words covers it. The public scripts compare
what normalisation leaves, so that nothing equals nothing and is part of everything; the
option `empty_matches` does that. They do not compose accents either; here texts are
compared in Unicode's form NFC.
"""

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = {  # how it is translated
    "squad": str.maketrans("", "", string.punctuation),
    "r1_searcher": str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " ")),
    "flashrag": str.maketrans("", "", string.punctuation),
}
_TRUTH_WORDS = {"True": "yes", "False": "no"}
_MAX_MARKS = 256  # up to here, `unicodedata` may sort marks in quadratic time
_HIDDEN_MARKS = "\u0f73\u0f75\u0f81"  # class 0, but two marks when decomposed


def normalize_unicode(form: Literal["NFC", "NFD", "NFKC", "NFKD"], text: str) -> str:
    """Return the text in a Unicode normal form, in time about linear in its length.

    `unicodedata` sorts a run of combining marks by insertion, which takes quadratic
    time. Here long runs are first sorted by combining class, as the form requires.
    """
    if len(text) <= _MAX_MARKS or text.isascii():
        return unicodedata.normalize(form, text)
    num_marks = sum(map(bool, map(unicodedata.combining, text)))
    num_marks += sum(map(text.count, _HIDDEN_MARKS))
    if num_marks > _MAX_MARKS:
        decomposed_form = "NFKD" if "K" in form else "NFD"
        letters = "".join(unicodedata.normalize(decomposed_form, c) for c in text)
        runs = itertools.groupby(letters, lambda c: unicodedata.combining(c) > 0)
        text = "".join(
            "".join(sorted(run, key=unicodedata.combining) if is_marks else run)
            for is_marks, run in runs
        )
    return unicodedata.normalize(form, text)


def normalize_squad(text: str) -> str:
    """Lowercase; drop ASCII punctuation and articles; join words by single spaces."""
    return _drop_articles(_words(text, "squad"))


def normalize_r1_searcher(text: str) -> str:
    """Normalise like `normalize_squad`, with spaces for punctuation; True is yes."""
    # Only the exact text: the published scores treat ' False ' as the word false.
    return _drop_articles(_words(_TRUTH_WORDS.get(text, text), "r1_searcher"))


def _words(text, family):
    return normalize_unicode("NFC", text).lower().translate(_PUNCTUATION[family])


def _drop_articles(text):
    return " ".join(_ARTICLES.sub(" ", text).split())


NORMALIZERS = {
    "squad": normalize_squad,
    "r1_searcher": normalize_r1_searcher,
    "flashrag": normalize_squad,
}
DEFAULT_NORMALIZER = "squad"  # same as the default of config.eval.normalize

CLOSED_ANSWERS = {  # F1 with such an answer is 0 unless both sides are equal
    "squad": frozenset(),
    "r1_searcher": frozenset({"yes", "no", "noanswer"}),
    "flashrag": frozenset({"yes", "no", "noanswer"}),
}


def exact_match(
    prediction: str | None,
    golden_answers: Sequence[str],
    *,
    normalize: str,
    empty_matches: bool = False,
) -> float:
    """Return 1.0 if the prediction equals a golden answer after normalisation.

    Args:
        prediction: the given answer, or None.
        golden_answers: all answers that count as right.
        normalize: a key of NORMALIZERS.
        empty_matches: whether all texts of which normalisation leaves nothing are
            equal, as in the public scripts.
    """
    return _best_score(_equal, prediction, golden_answers, normalize, empty_matches)


def f1(
    prediction: str | None,
    golden_answers: Sequence[str],
    *,
    normalize: str,
    empty_matches: bool = False,
) -> float:
    """Return the harmonic mean of the precision and recall of words, in [0, 1].

    Words count as often as they occur. With "r1_searcher" and "flashrag", an answer
    that is one of CLOSED_ANSWERS shares nothing with any other text, as in HotpotQA's
    script. With `empty_matches`, a text of which normalisation leaves nothing has no
    words to share, not even with itself.
    """
    return _best_score(_overlap, prediction, golden_answers, normalize, empty_matches)


def cover_exact_match(
    prediction: str | None,
    golden_answers: Sequence[str],
    *,
    normalize: str,
    order: str = "any",
    empty_matches: bool = False,
) -> float:
    """Return 1.0 if every word of a golden answer occurs in the prediction.

    This favours long predictions.

    Args:
        prediction, golden_answers, normalize, empty_matches: as in `exact_match`.
        order: "any": the words may occur in any order and place, the measure that
            R1-Searcher reports as cover exact match. "contiguous": they must follow one
            another as in the golden answer. "substring": the same for characters, so
            that "party" contains "art"; this is the other variant that R1-Searcher's
            evaluation computes, and Search-R1's substring match. With it and
            `empty_matches`, every prediction contains a golden answer of which nothing
            is left.
    """
    measure = {"any": _covers, "contiguous": _contains, "substring": _is_part}[order]
    return _best_score(measure, prediction, golden_answers, normalize, empty_matches)


def _best_score(measure, prediction, golden_answers, family, empty_matches):
    assert not isinstance(golden_answers, str), golden_answers
    if prediction is None:
        return 0.0
    if empty_matches and measure is not _overlap:
        is_empty = measure is _is_part or not NORMALIZERS[family](prediction)
        if is_empty and any(not NORMALIZERS[family](g) for g in golden_answers):
            return 1.0
    to_comparable = NORMALIZERS[family] if empty_matches else _make_comparable(family)
    normal_prediction = to_comparable(prediction)

    def score(golden):
        # Nearly every text contains the characters of an article such as "a".
        is_word = measure is _is_part and not NORMALIZERS[family](golden)
        return (_contains if is_word else measure)(
            normal_prediction, to_comparable(golden), family
        )

    return max(map(score, golden_answers), default=0.0)


def _make_comparable(family):
    """Return text -> normal form or, if that is empty, with articles or unchanged."""
    return lambda text: (
        NORMALIZERS[family](text)
        or " ".join(_words(text, family).split())
        or " ".join(normalize_unicode("NFC", text).lower().split())
    )


def _equal(prediction, golden, family):
    return float(prediction == golden != "")


def _overlap(prediction, golden, family):
    closed_answers = CLOSED_ANSWERS[family]
    if prediction != golden and (
        prediction in closed_answers or golden in closed_answers
    ):
        return 0.0
    predicted_words, golden_words = prediction.split(), golden.split()
    num_common = sum((Counter(predicted_words) & Counter(golden_words)).values())
    if not num_common:
        return 0.0
    precision = num_common / len(predicted_words)
    recall = num_common / len(golden_words)
    return 2 * precision * recall / (precision + recall)


def _covers(prediction, golden, family):
    words = set(golden.split())
    return float(bool(words) and words <= set(prediction.split()))


def _contains(prediction, golden, family):
    # Spaces at both ends, so that "party" does not contain "art".
    return float(bool(golden) and f" {golden} " in f" {prediction} ")


def _is_part(prediction, golden, family):
    return float(bool(golden) and golden in prediction)

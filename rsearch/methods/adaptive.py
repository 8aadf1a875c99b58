"""Choose how to answer by which strategies were right on similar training questions.

The labels are rows of a run's transcripts.jsonl: exact matches of each strategy with
the evaluated model. After further training of that model they are stale: evaluate the
strategies again:

    python -m rsearch.evaluate --workdir=RUN --methods=direct,rag --sets=world:train
    python -m rsearch.evaluate --workdir=RUN \\
        --methods=skr:labels=RUN/transcripts.jsonl:dataset=world:train
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from rsearch.data.labels import LabelledQuestion, read_labels
from rsearch.methods.base import Kit, check_settings, vector_of
from rsearch.methods.iterating import ircot
from rsearch.methods.reading import direct, rag
from rsearch.text.normalize import exact_match
from rsearch.types import Question

# Strategies whose rows each method needs, the cheapest first.
STRATEGIES = {"skr": ("direct", "rag"), "adaptive_rag": ("direct", "rag", "ircot")}
STEPS = 1000  # of gradient descent


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingSet:
    """Training questions with their labels and vectors.

    Attributes:
        right: [n, strategies] bool, whether each answer is an exact match.
        vectors: [n, D] vectors of length 1.
    """

    texts: frozenset[str]
    right: np.ndarray
    vectors: np.ndarray


def skr(
    question: Question,
    kit: Kit,
    *,
    labels: str = "",
    dataset: str = "",
    k: int = 5,
    neighbours: Literal["different", "all"] = "different",
    top_k: int = 0,
):
    """Search if that helped with the most similar training questions.

    SKR (Wang et al., arXiv 2310.05002), with its rule of nearest neighbours. The labels
    are made with the evaluated model instead of the paper's, and the encoder of the
    run's search replaces SimCSE.

    Args:
        labels: a transcripts.jsonl with rows of `direct` and `rag`.
        dataset: dataset whose rows are read; "" if all rows of both have the same one.
        k: number of neighbours; all if there are fewer.
        neighbours: "different" takes only questions of which exactly one answer was
            right, as the authors' code does; "all" takes every one, as FlashRAG does.
        top_k: number of passages to show; 0 shows all that the search returns.

    Raises:
        ValueError: a setting is out of range; see also `training_set` and
            `base.vector_of`.
    """
    check_settings("skr", ("k", k, k >= 1, "at least 1"))
    training = training_set("skr", labels, dataset, kit.embed, kit.normalize)
    vector = vector_of(question, training.texts, kit)
    without_search, with_search = training.right.T
    gains = with_search.astype(int) - without_search
    candidates = np.arange(len(gains)) if neighbours == "all" else np.flatnonzero(gains)
    similarity = training.vectors[candidates] @ vector
    nearest_gains = gains[candidates[np.argsort(-similarity, kind="stable")[:k]]]
    should_search = is_search_better(
        int(gains.sum()),
        len(gains),
        min(k, len(candidates)),
        int((nearest_gains > 0).sum()),
        int((nearest_gains < 0).sum()),
    )
    if should_search:
        return (yield from rag(question, kit, top_k=top_k))
    return (yield from direct(question, kit))


def is_search_better(lead: int, num: int, k: int, better: int, worse: int) -> bool:
    """Return whether SKR searches.

    Args:
        lead: number of training questions that a search made right, minus the number
            that it made wrong.
        num: number of training questions.
        k: number of neighbours.
        better, worse: numbers of neighbours that a search made right, and wrong.
    """
    margin = abs(lead) * k // num
    if lead < 0:
        return not (worse > better and worse - better >= margin)
    return better > worse and better - worse >= margin


def adaptive_rag(
    question: Question,
    kit: Kit,
    *,
    labels: str = "",
    dataset: str = "",
    unsolved: Literal["drop", "rag", "ircot"] = "drop",
    penalty: float = 1e-3,
    rounds: int = 10,
    top_k: int = 0,
):
    """Answer with the strategy that a classifier of questions chooses.

    Adaptive-RAG (Jeong et al., arXiv 2403.14403). The label of a training question is
    the cheapest of `direct`, `rag` and `ircot` that answers it right, with the
    evaluated model. A softmax regression on vectors of the run's search encoder
    replaces the paper's classifier, a tuned T5.

    Args:
        labels: a transcripts.jsonl with rows of the three strategies.
        dataset: dataset whose rows are read; "" if all of these rows have the same one.
        unsolved: label of questions that no strategy answers right; the paper takes
            "rag" in single-hop datasets and "ircot" in multi-hop ones.
        penalty: penalty on the squared weights of the classifier; above 0.
        rounds: rounds of `ircot`.
        top_k: number of passages to use from each search; 0 uses all.

    Raises:
        ValueError: a setting is out of range; see also `training_set`,
            `base.vector_of` and `fit_classes`.
    """
    is_in_range = 0 < penalty < np.inf
    check_settings("adaptive_rag", ("penalty", penalty, is_in_range, "above 0"))
    training = training_set("adaptive_rag", labels, dataset, kit.embed, kit.normalize)
    weights = _fit_weights(training, unsolved, penalty)
    scores = np.append(vector_of(question, training.texts, kit), 1.0) @ weights
    strategy = STRATEGIES["adaptive_rag"][int(scores.argmax())]
    if strategy == "direct":
        return (yield from direct(question, kit))
    if strategy == "rag":
        return (yield from rag(question, kit, top_k=top_k))
    return (yield from ircot(question, kit, rounds=rounds, top_k=top_k))


def silver_labels(right: np.ndarray, unsolved: str) -> np.ndarray:
    """Return [n] indices of the cheapest strategy that is right; -1 means no label.

    Args:
        right: [n, 3] bool, whether `direct`, `rag` and `ircot` are right.
        unsolved: "drop", or the strategy for questions that none answers right.
    """
    strategies = STRATEGIES["adaptive_rag"]
    unsolved_label = -1 if unsolved == "drop" else strategies.index(unsolved)
    return np.where(right.any(axis=1), right.argmax(axis=1), unsolved_label)


def fit_classes(vectors: np.ndarray, classes: np.ndarray, penalty: float) -> np.ndarray:
    """Return [D + 1, 3] weights of a softmax regression, the bias last.

    Classes without an example get a bias of -inf, so that they are never the best.

    Args:
        vectors: [n, D] vectors of length 1.
        classes: [n] classes from 0 to 2; -1 is left out.
        penalty: penalty on half the squared weights, except the bias.

    Raises:
        ValueError: no vector has a class.
    """
    if not (classes >= 0).any():
        raise ValueError(
            "config.eval.methods: adaptive_rag: no strategy is right on any labelled "
            "question; expected unsolved = 'rag' or 'ircot', or other labels"
        )
    inputs = np.pad(vectors[classes >= 0], ((0, 0), (0, 1)), constant_values=1)
    inputs = inputs.astype(np.float64)
    targets = np.eye(3)[classes[classes >= 0]]
    class_bias = np.where(targets.any(axis=0), 0.0, -np.inf)
    penalties = np.append(np.full(vectors.shape[1], penalty), 0.0)[:, None]
    weights = np.zeros((len(penalties), 3))
    # Inputs have a squared length of 2, so the gradient's slope is at most 1 + penalty.
    step = 1 / (1 + penalty)
    for _ in range(STEPS):
        scores = inputs @ weights + class_bias
        probs = np.exp(scores - scores.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        gradient = inputs.T @ (probs - targets) / len(inputs) + penalties * weights
        weights -= step * gradient
    weights[-1] += class_bias
    return weights


@functools.lru_cache(maxsize=4)
def _fit_weights(training, unsolved, penalty):
    """Return the weights of `fit_classes`, cached for each training set."""
    return fit_classes(
        training.vectors, silver_labels(training.right, unsolved), penalty
    )


def labels_of(method: str, path: str, dataset: str) -> tuple[LabelledQuestion, ...]:
    """Return the labelled questions of a method; see `read_labels`.

    Args:
        method: key of STRATEGIES.
    """
    field = f"config.eval.methods: {method}: labels"
    return read_labels(STRATEGIES[method], path, dataset, field=field)


def labels_digest(labelled: Sequence[Any]) -> str:
    """Return a digest of labels, which are instances of a dataclass."""
    values = [dataclasses.astuple(x) for x in labelled]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def training_set(
    method: str,
    path: str,
    dataset: str,
    embed: Callable[[Sequence[str]], np.ndarray],
    normalize: str,
) -> TrainingSet:
    """Read, score and embed the training questions of a file; the result is cached.

    Args:
        method, path, dataset: see `labels_of`.
        embed, normalize: functions of the evaluation's Kit.

    Raises:
        ValueError: the run's search has no encoder; see also `read_labels`.
    """
    labels = labels_of(method, path, dataset)
    texts = [x.question for x in labels]
    is_right = [
        [exact_match(a, x.golden_answers, normalize=normalize) > 0 for a in x.answers]
        for x in labels
    ]
    return TrainingSet(frozenset(texts), np.array(is_right), embed(texts))

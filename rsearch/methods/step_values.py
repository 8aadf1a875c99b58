"""Value the steps of a chain by how often chains that begin so end right.

The labels are success rates of the model that is evaluated. They go stale where it
learns; make them again:

    python -m rsearch.evaluate --workdir=RUN --sets=world:train --label_steps=FILE \\
        --config.eval.temperature=1.0
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rsearch.methods.base import Kit
from rsearch.methods.self_ask import Chain, extend, first_chain
from rsearch.runtime.jsonl import read_jsonl
from rsearch.text.normalize import exact_match
from rsearch.types import Question

TRACES, CONTINUATIONS = 2, 4  # of a training question, and of each step of a trace
MAX_STEPS = 5  # of a chain
STEPS = 300  # of accelerated gradient descent


@dataclasses.dataclass(frozen=True)
class LabelledSteps:
    """A training question, and beginnings of chains towards its answer.

    Attributes:
        question: its text.
        chains: the steps of each, see `Chain`.
        success: the share of continuations of each that end in an exact match.
    """

    question: str
    chains: tuple[tuple[str, ...], ...]
    success: tuple[float, ...]


def label_steps(question: Question, kit: Kit, *, golden: Mapping[str, Sequence[str]]):
    """Sample chains and continuations of each step; return a line of a labels file.

    Args:
        question: of the training split.
        kit: of the evaluation.
        golden: {id of a question: its golden answers}; a program sees none otherwise.
    """
    traces = [first_chain(question.text)] * TRACES
    labelled: dict[tuple[str, ...], Chain] = {}
    while any(trace.goes_on for trace in traces):
        traces = yield from extend(traces, kit, max_steps=MAX_STEPS, top_k=0)
        labelled |= {trace.steps: trace for trace in traces}
    # What is over has one end, which is its own.
    counts = [CONTINUATIONS if c.goes_on else 1 for c in labelled.values()]
    ends = [c for c, n in zip(labelled.values(), counts, strict=True) for _ in range(n)]
    # All at once: equal prompts have other samples in one call, and the same in two.
    while any(end.goes_on for end in ends):
        ends = yield from extend(ends, kit, max_steps=MAX_STEPS, top_k=0)
    is_right = [
        exact_match(end.answer, golden[question.id], normalize=kit.normalize) > 0
        for end in ends
    ]
    by_chain = np.split(np.array(is_right), np.cumsum(counts)[:-1])
    row = LabelledSteps(
        question.text, tuple(labelled), tuple(float(x.mean()) for x in by_chain)
    )
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def read_step_labels(path: str) -> tuple[LabelledSteps, ...]:
    """Return the rows of a file that `label_steps` made.

    Raises:
        ValueError: a bad line, no rows, or all chains are alike in success.
        OSError: the file cannot be read.
    """
    field = f"config.eval.methods: rearter: labels = {path!r}"
    expected = "expected a file of rsearch.evaluate --label_steps"
    if not path:
        raise ValueError(f"{field}: {expected}")
    rows = read_jsonl(path, torn="read", strict=True, parse=_parse_row)
    rates = {rate for row in rows for rate in row.success}
    if len(rates) < 2:
        shown = f"success = {rates.pop()} of all steps" if rates else "no steps"
        raise ValueError(f"{field}: {shown}: {expected} where some steps lead further")
    return tuple(rows)


def _parse_row(row):
    """Return the row of a line.

    Raises:
        ValueError: it has other fields, or a value of another type.
    """
    names = [field.name for field in dataclasses.fields(LabelledSteps)]
    if not isinstance(row, dict) or sorted(row) != sorted(names):
        raise ValueError(f"expected an object with the fields {', '.join(names)}")
    question, chains, success = (row[name] for name in names)
    if not isinstance(question, str):
        raise ValueError(f"question = {question!r}: expected a text")
    are_chains = isinstance(chains, list) and all(
        isinstance(steps, list) and steps and all(isinstance(s, str) for s in steps)
        for steps in chains
    )
    if not are_chains:
        raise ValueError("chains: expected a list of lists of texts")
    are_rates = isinstance(success, list) and all(
        type(rate) in (int, float) and 0 <= rate <= 1 for rate in success
    )
    if not are_rates or len(success) != len(chains):
        raise ValueError("success: expected a number from 0 to 1 for each chain")
    steps = tuple(tuple(chain) for chain in chains)
    return LabelledSteps(question, steps, tuple(map(float, success)))


class StepValues(NamedTuple):
    """A logistic regression on the vectors of a question and of a chain.

    Attributes:
        questions: texts of the labelled ones.
        weights: [3 D + 1] of `features`.
        embed_passages: (texts) -> [n, D] vectors of length 1.
    """

    questions: frozenset[str]
    weights: np.ndarray
    embed_passages: Callable[[Sequence[str]], np.ndarray]

    def __call__(
        self, question: np.ndarray, chains: Sequence[Sequence[str]]
    ) -> np.ndarray:
        """Return [n] the probability that a chain which begins so ends right.

        Args:
            question: [D] its vector.
            chains: n lists of steps.
        """
        vectors = self.embed_passages([_text(steps) for steps in chains])
        logits = features(np.broadcast_to(question, vectors.shape), vectors)
        return _sigmoid(logits @ self.weights)


@functools.lru_cache(maxsize=4)
def fitted_values(
    path: str,
    embed: Callable[[Sequence[str]], np.ndarray],
    embed_passages: Callable[[Sequence[str]], np.ndarray],
    penalty: float,
) -> StepValues:
    """Return the value of steps, made once for a file of labels.

    Args:
        path: see `read_step_labels`.
        embed, embed_passages: of the evaluation's Kit.
        penalty: see `fit_logistic`.

    Raises:
        ValueError: see `read_step_labels`; or the run's search has no encoder.
        OSError: the file cannot be read.
    """
    labelled = read_step_labels(path)
    texts = [x.question for x in labelled]
    questions = np.repeat(embed(texts), [len(x.chains) for x in labelled], axis=0)
    chains = embed_passages([_text(steps) for x in labelled for steps in x.chains])
    success = np.array([rate for x in labelled for rate in x.success])
    weights = fit_logistic(features(questions, chains), success, penalty)
    return StepValues(frozenset(texts), weights, embed_passages)


def _text(steps: Sequence[str]) -> str:
    """Return what is embedded of a chain; an encoder cuts its end, the first steps."""
    return "\n".join(reversed(steps))


def features(questions: np.ndarray, chains: np.ndarray) -> np.ndarray:
    """Return [n, 3 D + 1] inputs of the regression, the constant last.

    Without the products of both vectors, a step would be worth the same whatever is
    asked.

    Args:
        questions, chains: [n, D] vectors of length 1.
    """
    constant = np.ones((len(questions), 1))
    return np.concatenate([questions, chains, questions * chains, constant], axis=1)


def fit_logistic(inputs: np.ndarray, rates: np.ndarray, penalty: float) -> np.ndarray:
    """Return the [K] weights with the least mean cross-entropy.

    Args:
        inputs: [n, K] of squared length 4 at most.
        rates: [n] from 0 to 1.
        penalty: on half the squared weights; above 0.
    """
    # The slope of the gradient is at most 4 / 4 + penalty; Nesterov's momentum for a
    # function that is at least as curved as the penalty.
    rate = 1 / (1 + penalty)
    root = (penalty * rate) ** 0.5
    weights = ahead = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        error = (_sigmoid(inputs @ ahead) - rates) / len(rates)
        moved = ahead - rate * (error @ inputs + penalty * ahead)
        ahead = moved + (1 - root) / (1 + root) * (moved - weights)
        weights = moved
    return weights


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))

"""Value chains of steps by a logistic regression on vectors of their texts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

STEPS = 300  # of accelerated gradient descent


@dataclasses.dataclass(frozen=True)
class LabelledSteps:
    """A training question, and beginnings of chains towards its answer.

    Attributes:
        question: its text.
        chains: the steps of each.
        success: the share of continuations of each that end in an exact match.
    """

    question: str
    chains: tuple[tuple[str, ...], ...]
    success: tuple[float, ...]


class StepValues(NamedTuple):
    """A logistic regression on the vectors of a question and of a chain.

    Attributes:
        weights: [3 D + 1] of `features`.
        embed_passages: (texts) -> [n, D] vectors of length 1.
    """

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


def fit_values(
    labelled: Sequence[LabelledSteps],
    embed: Callable[[Sequence[str]], np.ndarray],
    embed_passages: Callable[[Sequence[str]], np.ndarray],
    penalty: float,
) -> StepValues:
    """Return the value of steps that fits labelled chains best.

    Args:
        labelled: training questions with a chain at least, of all together.
        embed: (questions) -> [n, D] vectors of length 1.
        embed_passages: see `StepValues`.
        penalty: see `fit_logistic`.
    """
    questions = embed([x.question for x in labelled])
    of_chains = np.repeat(questions, [len(x.chains) for x in labelled], axis=0)
    texts = [_text(steps) for x in labelled for steps in x.chains]
    success = np.array([rate for x in labelled for rate in x.success])
    inputs = features(of_chains, embed_passages(texts))
    return StepValues(fit_logistic(inputs, success, penalty), embed_passages)


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

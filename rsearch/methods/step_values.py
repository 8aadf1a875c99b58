"""Estimate the value of chains of steps by logistic regression on text vectors."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

STEPS = 300  # of accelerated gradient descent


@dataclasses.dataclass(frozen=True)
class LabelledSteps:
    """A training question, and beginnings of chains towards its answer.

    Attributes:
        chains: steps of each beginning.
        success: for each, the share of its continuations that end in an exact match.
    """

    question: str
    chains: tuple[tuple[str, ...], ...]
    success: tuple[float, ...]


def fit_values(
    labelled: Sequence[LabelledSteps],
    embed: Callable[[Sequence[str]], np.ndarray],
    embed_passages: Callable[[Sequence[str]], np.ndarray],
    penalty: float,
) -> Callable[[np.ndarray, Sequence[Sequence[str]]], np.ndarray]:
    """Return the values of steps that fit labelled chains best.

    Args:
        labelled: training questions, at least one of them with a chain.
        embed: (questions) -> [n, D] vectors of length 1.
        embed_passages: (texts) -> [n, D] vectors of length 1.
        penalty: see `fit_logistic`.

    Returns:
        ([D] vector of a question, the steps of n chains) -> [n] probabilities that
        chains with these beginnings end right.
    """
    questions = embed([x.question for x in labelled])
    chain_questions = np.repeat(questions, [len(x.chains) for x in labelled], axis=0)
    texts = [_text(steps) for x in labelled for steps in x.chains]
    success = np.array([rate for x in labelled for rate in x.success])
    inputs = features(chain_questions, embed_passages(texts))
    weights = fit_logistic(inputs, success, penalty)

    def values_of(question, chains):
        vectors = embed_passages([_text(steps) for steps in chains])
        logits = features(np.broadcast_to(question, vectors.shape), vectors)
        return _sigmoid(logits @ weights)

    return values_of


def _text(steps: Sequence[str]) -> str:
    """Return the text to embed: the last step first, as an encoder cuts the end."""
    return "\n".join(reversed(steps))


def features(questions: np.ndarray, chains: np.ndarray) -> np.ndarray:
    """Return [n, 3 D + 1] inputs of the regression, the constant last.

    Without the products of both vectors, a step would have the same value whatever the
    question.

    Args:
        questions, chains: [n, D] vectors of length 1.
    """
    constant = np.ones((len(questions), 1))
    return np.concatenate([questions, chains, questions * chains, constant], axis=1)


def fit_logistic(inputs: np.ndarray, rates: np.ndarray, penalty: float) -> np.ndarray:
    """Return the [K] weights with the least mean cross-entropy.

    Args:
        inputs: [n, K] inputs, each of squared length 4 at most.
        rates: [n] target rates from 0 to 1.
        penalty: penalty on half the squared weights; above 0.
    """
    # The slope of the gradient is at most 4 / 4 + penalty. Nesterov's momentum is the
    # one for a function with a curvature of at least the penalty.
    rate = 1 / (1 + penalty)
    root = (penalty * rate) ** 0.5
    weights = lookahead = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        error = (_sigmoid(inputs @ lookahead) - rates) / len(rates)
        new_weights = lookahead - rate * (error @ inputs + penalty * lookahead)
        lookahead = new_weights + (1 - root) / (1 + root) * (new_weights - weights)
        weights = new_weights
    return weights


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))

"""RECOMP, extractive: show the sentences that a trained dual encoder finds best.

Xu et al., arXiv 2310.04408. The labels are log-probabilities of golden answers after
each sentence, computed by the evaluated model. After further training of that model
they are stale: make them again:

    python -m rsearch.evaluate --workdir=RUN --sets=world:train --label_sentences=FILE
    python -m rsearch.evaluate --workdir=RUN --methods=recomp_extractive:labels=FILE
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.data.labels import is_list_of_numbers, read_label_file
from rsearch.llm.requests import Score, Search
from rsearch.methods.base import Kit, ask_chat, check_settings, vector_of
from rsearch.methods.reading import direct, rag_messages
from rsearch.text.sentences import sentences as split_sentences
from rsearch.types import Passage, Question

# Questions whose sentences serve as each other's negatives, as in the authors' code.
BATCH = 64
STEPS = 300  # of accelerated gradient descent


@dataclasses.dataclass(frozen=True)
class LabelledSentences:
    """A training question, and the sentences of the passages that a search found.

    Attributes:
        sentences: sentences, each after its passage's title and a line feed.
        scores: ln p(golden answer | sentence, question) of each sentence.
    """

    question: str
    sentences: tuple[str, ...]
    scores: tuple[float, ...]


def recomp_extractive(
    question: Question,
    kit: Kit,
    *,
    labels: str = "",
    sentences: int = 2,
    margin: float = 0.0,
    negatives: int = 5,
    temperature: float = 0.05,
    penalty: float = 1e-3,
    top_k: int = 0,
):
    """Show the sentences of one search that are most similar to the question.

    They keep their order and their passages' titles. Showing every sentence is `rag`,
    up to white space; if there is none, this is `direct`. In place of the paper's tuned
    Contriever, the encoder of the run's search is frozen, and a linear map of its
    question vectors is trained with the paper's loss.

    Args:
        labels: file made by `label_sentences`.
        sentences: number of sentences to show; the paper shows 1 for single-hop
            questions and 2 for HotpotQA.
        margin: least difference between the best score and a negative's.
        negatives: number of negatives of a question, which are the most similar ones.
        temperature: divisor of the encoder's similarities before training.
        penalty: penalty on the squared change of the map; above 0.
        top_k: number of passages to use; 0 uses all that the search returns.

    Raises:
        ValueError: a setting is out of range; see also `read_sentence_labels`,
            `training_batches` and `base.vector_of`.
    """
    check_settings(
        "recomp_extractive",
        ("sentences", sentences, sentences >= 1, "at least 1"),
        ("margin", margin, 0 <= margin < np.inf, "0 or above"),
        ("negatives", negatives, negatives >= 1, "at least 1"),
        ("temperature", temperature, 1e-6 <= temperature < np.inf, "1e-6 or above"),
        ("penalty", penalty, 0 < penalty < np.inf, "above 0"),
    )
    labelled_texts, weights = _fit_query_map(
        labels, kit.embed, kit.embed_passages, margin, negatives, temperature, penalty
    )
    query = vector_of(question, labelled_texts, kit) @ weights
    (passages,) = yield Search((question.text,), top_k or None)
    extracts = [
        (i, e) for i, p in enumerate(passages) for e in sentence_passages(p, kit)
    ]
    if not extracts:
        return (yield from direct(question, kit))
    similarity = kit.embed_passages([e.contents for _, e in extracts]) @ query
    best = np.argsort(-similarity, kind="stable")[:sentences]
    texts: dict[int, list[str]] = {}
    for n in sorted(best):
        i, extract = extracts[n]
        texts.setdefault(i, []).append(extract.text)
    short_passages = [
        _with_text(passages[i], " ".join(passage_texts))
        for i, passage_texts in texts.items()
    ]
    messages = rag_messages(kit, question.text, short_passages)
    return (yield from ask_chat(messages, kit.answer_tokens))


def sentence_passages(passage: Passage, kit: Kit) -> list[Passage]:
    """Return a passage for each sentence of a passage, with its title."""
    texts = split_sentences(kit.shorten(passage.text))
    return [_with_text(passage, text) for text in texts]


def _with_text(passage, text):
    return dataclasses.replace(passage, contents=f"{passage.title}\n{text}")


def label_sentences(
    question: Question, kit: Kit, *, golden: Mapping[str, Sequence[str]]
):
    """Score each sentence that a search finds, and return a line of a labels file.

    Args:
        question: question of the training split.
        golden: {id of a question: its golden answers, of which the first counts}; other
            programs never see them.
    """
    (passages,) = yield Search((question.text,))
    extracts = [extract for p in passages for extract in sentence_passages(p, kit)]
    answer = golden[question.id][0]
    scores = yield [
        Score(rag_messages(kit, question.text, (extract,)), answer)
        for extract in extracts
    ]
    row = LabelledSentences(
        question.text,
        tuple(extract.contents for extract in extracts),
        tuple(float(s.logp.sum()) for s in scores),
    )
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def read_sentence_labels(path: str) -> tuple[LabelledSentences, ...]:
    """Return the rows of a file that `label_sentences` made.

    Raises:
        ValueError: the file cannot be read, a line is bad, or there are no rows.
    """
    return read_label_file(
        path,
        LabelledSentences,
        method="recomp_extractive",
        flag="label_sentences",
        convert=_check_fields,
        fault=lambda rows: "" if rows else "no rows",
    )


def _check_fields(sentences, scores):
    """Return a row's fields after its question; ValueError for wrong types."""
    if not isinstance(sentences, list) or not all(
        isinstance(text, str) for text in sentences
    ):
        raise ValueError("sentences: expected a list of texts")
    if not is_list_of_numbers(scores, len(sentences)):
        raise ValueError("scores: expected a list of numbers, one for each sentence")
    return tuple(sentences), tuple(map(float, scores))


def best_and_negatives(
    scores: np.ndarray, similarity: np.ndarray, *, margin: float, negatives: int
) -> tuple[int, np.ndarray]:
    """Return the best sentence of a question, and its negatives.

    Args:
        scores: [n] scores of the sentences; of equal ones the first is best.
        similarity: [n] similarity to the question, by the untrained encoder.
        margin: least difference between the best score and a negative's, which is lower
            in any case.
        negatives: number of negatives, at most; the most similar come first.
    """
    best = int(scores.argmax())
    is_lower = (scores + margin <= scores[best]) & (scores < scores[best])
    candidates = np.flatnonzero(is_lower)
    hardest = np.argsort(-similarity[candidates], kind="stable")[:negatives]
    return best, candidates[hardest]


def info_nce(
    weights: jax.Array,
    queries: jax.Array,
    candidates: jax.Array,
    positives: jax.Array,
    is_candidate: jax.Array,
) -> jax.Array:
    """Return the [n] losses of the questions of a batch.

    A loss is -ln softmax(query weights candidates^T) at the question's positive, over
    the candidates of the batch.

    Args:
        weights: [D, D] map of queries.
        queries: [n, D] vectors of the questions.
        candidates: [m, D] vectors of the positives and negatives of all questions, each
            once.
        positives: [n] int32 index of each question's positive among the candidates.
        is_candidate: [m] bool, False on padding.
    """
    with jax.default_matmul_precision("highest"):
        logits = queries @ weights @ candidates.T
    logp = jax.nn.log_softmax(jnp.where(is_candidate, logits, -jnp.inf))
    return -jnp.take_along_axis(logp, positives[:, None], axis=1)[:, 0]


class Batches(NamedTuple):
    """Training questions in batches of one shape.

    Attributes:
        queries: [b, n, D] float32; 0 is padding.
        candidates: [b, m, D] float32; 0 is padding.
        positives: [b, n] int32, see `info_nce`.
        is_question: [b, n] bool, False on padding.
        is_candidate: [b, m] bool, False on padding.
    """

    queries: np.ndarray
    candidates: np.ndarray
    positives: np.ndarray
    is_question: np.ndarray
    is_candidate: np.ndarray


def training_batches(
    labelled: Sequence[LabelledSentences],
    queries: np.ndarray,
    embed_passages: Callable[[Sequence[str]], np.ndarray],
    *,
    margin: float,
    negatives: int,
) -> Batches:
    """Return batches to train the map on; a question without negatives is left out.

    Args:
        labelled: [n] questions.
        queries: [n, D] vectors of the questions.
        embed_passages: (sentences) -> [m, D] vectors.
        margin, negatives: see `best_and_negatives`.

    Raises:
        ValueError: no question has a negative.
    """
    texts = list(dict.fromkeys(text for x in labelled for text in x.sentences))
    text_index = {text: i for i, text in enumerate(texts)}
    vectors = embed_passages(texts) if texts else np.empty((0, queries.shape[1]))
    examples = []
    for i, x in enumerate(labelled):
        if not x.sentences:
            continue
        sentences = np.array([text_index[text] for text in x.sentences])
        best, hard_negatives = best_and_negatives(
            np.array(x.scores),
            vectors[sentences] @ queries[i],
            margin=margin,
            negatives=negatives,
        )
        if len(hard_negatives):
            examples.append((i, sentences[best], sentences[hard_negatives]))
    if not examples:
        raise ValueError(
            "config.eval.methods: recomp_extractive: no labelled question has a "
            f"sentence whose score is lower than the best by margin = {margin}: "
            "expected other labels"
        )
    groups = []
    for start in range(0, len(examples), BATCH):
        rows, best, hard_negatives = zip(*examples[start : start + BATCH], strict=True)
        # Each sentence once, so a positive of two questions is no negative of either.
        groups.append(
            (list(rows), best, np.unique(np.concatenate([best, *hard_negatives])))
        )
    num_batches, batch_size = len(groups), len(groups[0][0])
    max_candidates = max(len(candidates) for _, _, candidates in groups)
    batches = Batches(
        np.zeros((num_batches, batch_size, queries.shape[1]), np.float32),
        np.zeros((num_batches, max_candidates, queries.shape[1]), np.float32),
        np.zeros((num_batches, batch_size), np.int32),
        np.zeros((num_batches, batch_size), bool),
        np.zeros((num_batches, max_candidates), bool),
    )
    for b, (rows, best, candidates) in enumerate(groups):
        batches.queries[b, : len(rows)] = queries[rows]
        batches.candidates[b, : len(candidates)] = vectors[candidates]
        batches.positives[b, : len(rows)] = np.searchsorted(candidates, best)
        batches.is_question[b, : len(rows)] = True
        batches.is_candidate[b, : len(candidates)] = True
    return batches


@jax.jit
def fit_map(batches: Batches, temperature: float, penalty: float) -> jax.Array:
    """Return the [D, D] map of queries with the least mean loss.

    The loss is convex, so the best map depends on no seed and on no order of batches.
    The initial map is that of the untrained encoder: the identity divided by the
    temperature.

    Args:
        penalty: penalty on half the squared distance from the initial map.
    """
    initial_map = jnp.eye(batches.queries.shape[-1]) / temperature

    def loss(weights):
        losses = jax.vmap(info_nce, in_axes=(None, 0, 0, 0, 0))(
            weights,
            batches.queries,
            batches.candidates,
            batches.positives,
            batches.is_candidate,
        )
        distance = penalty / 2 * jnp.sum(jnp.square(weights - initial_map))
        return jnp.mean(losses, where=batches.is_question) + distance

    # For vectors of length 1 the gradient's slope is at most 1 + penalty. Nesterov's
    # momentum is the one for a function with a curvature of at least the penalty.
    rate = 1 / (1 + penalty)
    root = jnp.sqrt(penalty * rate)

    def step(_, state):
        weights, lookahead = state
        new_weights = lookahead - rate * jax.grad(loss)(lookahead)
        return new_weights, new_weights + (1 - root) / (1 + root) * (
            new_weights - weights
        )

    return jax.lax.fori_loop(0, STEPS, step, (initial_map, initial_map))[0]


@functools.lru_cache(maxsize=4)
def _fit_query_map(
    path, embed, embed_passages, margin, negatives, temperature, penalty
):
    """Return the texts of the labelled questions, and the map; cached for each file."""
    rows = read_sentence_labels(path)
    texts = [x.question for x in rows]
    batches = training_batches(
        rows, embed(texts), embed_passages, margin=margin, negatives=negatives
    )
    weights = fit_map(jax.device_put(batches), temperature, penalty)
    return frozenset(texts), jax.device_get(weights)

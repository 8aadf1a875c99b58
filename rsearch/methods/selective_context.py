"""Selective-Context: leave out what the model could have guessed.

Li et al., arXiv 2310.06201. FlashRAG's port compresses the formatted passages including
their numbers and titles, which are kept here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rsearch.llm.requests import Score, Search
from rsearch.methods.base import Kit, ask_chat, check_settings
from rsearch.methods.reading import rag_messages
from rsearch.text.sentences import sentences
from rsearch.types import Question


def selective_context(
    question: Question,
    kit: Kit,
    *,
    ratio: float = 0.5,
    level: Literal["sentence", "word", "token"] = "word",
    unit_value: Literal["mean", "sum"] = "mean",
    top_k: int = 0,
):
    """Show the passages of one search without their least informative units.

    Each sentence is scored on its own, and all passages share one threshold. With a
    ratio of 0 this is `rag`, up to white space.

    Args:
        ratio: share of the units that is left out, at most.
        level: kind of unit. The paper's phrases need a parser that finds noun chunks;
            words take their place.
        unit_value: how the information of a unit's tokens is combined: "mean" as in the
            authors' code, or "sum" as in the paper's text.
        top_k: number of passages to show; 0 shows all that the search returns.

    Raises:
        ValueError: the ratio is not in [0, 1].
    """
    is_in_range = 0 <= ratio <= 1
    check_settings("selective_context", ("ratio", ratio, is_in_range, "from 0 to 1"))
    (passages,) = yield Search((question.text,), top_k or None)
    texts = [
        (i, s) for i, p in enumerate(passages) for s in sentences(kit.shorten(p.text))
    ]
    sentence_scores = yield [Score("", sentence) for _, sentence in texts]
    units, owners = [], []  # all units, and the passage of each
    for (i, _), scores in zip(texts, sentence_scores, strict=True):
        sentence_units = split_units(scores.tokens, -scores.logp, level, unit_value)
        units += [
            (" " * (n == 0) + text, value)
            for n, (text, value) in enumerate(sentence_units)
        ]
        owners += [i] * len(sentence_units)
    are_kept = is_informative([value for _, value in units], ratio)
    reduced_texts = [""] * len(passages)
    for i, (text, _), is_kept in zip(owners, units, are_kept, strict=True):
        reduced_texts[i] += text if is_kept else ""
    reduced_passages = [
        dataclasses.replace(p, contents=f"{p.title}\n{' '.join(text.split())}")
        for p, text in zip(passages, reduced_texts, strict=True)
    ]
    messages = rag_messages(kit, question.text, reduced_passages)
    return (yield from ask_chat(messages, kit.answer_tokens))


def split_units(
    tokens: Sequence[str], information: Sequence[float], level: str, unit_value: str
) -> list[tuple[str, float]]:
    """Return (text, value) of the units of a sentence.

    A token with a space inside it belongs to the word that it begins in.

    Args:
        tokens: [n] pieces of the sentence.
        information: [n] information of each token, -ln p.
        unit_value: "mean" or "sum" over the tokens of a unit.
    """
    groups: list[list[int]] = []
    for i, token in enumerate(tokens):
        is_start = level == "token" or (level == "word" and token[:1].isspace())
        if is_start or not groups:
            groups.append([])
        groups[-1].append(i)
    combine = np.mean if unit_value == "mean" else np.sum
    return [
        ("".join(tokens[i] for i in g), float(combine([information[i] for i in g])))
        for g in groups
    ]


def is_informative(values: Sequence[float], ratio: float) -> list[bool]:
    """Return whether each unit stays: those at or above the percentile of the ratio.

    Args:
        values: [n] values of the units; NaN is ignored by the percentile, and stays.
        ratio: ratio in [0, 1]; its percentile is interpolated.
    """
    if not len(values):
        return []
    threshold = np.nanpercentile(values, 100 * ratio)
    return [not value < threshold for value in values]

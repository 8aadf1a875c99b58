"""LongLLMLingua: select passages and tokens by how well they go with the question.

Jiang et al., arXiv 2310.06839, after its authors' code. FlashRAG's port shows the
question twice: at the end of the compressed passages, and in its own place.
"""

import bisect
from collections.abc import Sequence

import numpy as np

from rsearch.llm.requests import Score, Search
from rsearch.methods.base import Kit, ask_chat, check_settings
from rsearch.methods.reading import text_messages
from rsearch.protocols import plain
from rsearch.types import Question

CUE = " We can get the answer to this question in the given documents."
SLACK = 100  # tokens by which whole passages may exceed the target
SEGMENT = 200  # tokens that are compressed together
SEPARATOR = 2  # tokens that count for a passage in addition to its text


def longllmlingua(
    question: Question,
    kit: Kit,
    *,
    rate: float = 0.55,
    spread: float = 0.3,
    top_k: int = 0,
):
    """Order passages by how likely they make the question, and compress them.

    At a rate of 1 with a spread of 0 this is `rag` on passages in that order. The rule
    by itself would still drop tokens.

    Args:
        rate: share of the tokens of the question and the passages that is shown.
        spread: D, added to the ratio of the first passage, subtracted from the last's.
        top_k: number of passages to use; 0 uses all that the search returns.

    Raises:
        ValueError: the rate or the spread is not in [0, 1].
    """
    check_settings(
        "longllmlingua",
        ("rate", rate, 0 <= rate <= 1, "from 0 to 1"),
        ("spread", spread, 0 <= spread <= 1, "from 0 to 1"),
    )
    (passages,) = yield Search((question.text,), top_k or None)
    texts = [kit.shorten(plain.write_passages((p,))) for p in passages]
    scored_text = f" {question.text}{CUE}"
    question_score, *scores = yield [
        Score("", question.text),
        *(Score(text, scored_text) for text in texts),
    ]
    order = np.argsort([-s.logp.mean() for s in scores], kind="stable").tolist()
    lengths = [scores[i].num_read - len(scores[i].tokens) for i in order]
    num_asked = len(question_score.tokens)
    target = rate * (num_asked + sum(lengths)) - num_asked
    num_kept = num_within_budget(lengths, target + SLACK)
    ranked = [passages[i] for i in order[:num_kept]]
    context = kit.shorten(plain.write_passages(ranked))
    if context and not (rate >= 1 and spread == 0):
        ends = [
            len(plain.write_passages(ranked[:i])) + 1 for i in range(1, num_kept + 1)
        ]
        ratios = passage_ratios(lengths[:num_kept], target, spread)
        context = yield from _compress(question.text, context, ends, ratios)
    messages = text_messages(kit, question.text, context)
    return (yield from ask_chat(messages, kit.answer_tokens))


def _compress(question: str, text: str, ends: Sequence[int], ratios: Sequence[float]):
    """Return a text without the tokens whose likelihood the question raises least.

    Args:
        ends: [K] position in the text, in characters, at which each passage ends.
        ratios: [K] share of each passage's tokens that stays.
    """
    front = f"{question}\n\n"
    marginal, conditional = yield [Score("", text), Score(front, text)]
    # How much likelier the question makes each token.
    tokens, later_contrasts = marginal.tokens, conditional.logp - marginal.logp
    starts = np.cumsum([0, *map(len, tokens)])[:-1]
    owners = [min(bisect.bisect(ends, at), len(ends) - 1) for at in starts]
    counts = np.bincount(owners, minlength=len(ends)).tolist()
    compressed, kept_contrasts, start = "", np.zeros(0), 0
    for number, segment in enumerate(segment_plan(counts, ratios)):
        size = sum(n for n, _ in segment)
        words, contrasts = tokens[start : start + size], later_contrasts[:size]
        start, later_contrasts = start + size, later_contrasts[size:]
        if number > 0 and any(words):
            # A segment's context is what is left of the text before it, if anything.
            marginal, conditional = yield [
                Score(prefix, "".join(words))
                for prefix in (compressed, front + compressed)
            ]
            words, contrasts = marginal.tokens, conditional.logp - marginal.logp
        bounds = np.cumsum([n for n, _ in segment]).tolist()
        # Encoded by itself, a segment may have a token more or fewer.
        bounds[-1] = len(words)
        offset = 0
        for bound, (_, ratio) in zip(bounds, segment, strict=True):
            all_contrasts = np.concatenate(
                [kept_contrasts, contrasts[offset:], later_contrasts]
            )
            is_kept = contrasts[offset:bound] > contrast_threshold(all_contrasts, ratio)
            compressed += "".join(
                w for w, s in zip(words[offset:bound], is_kept, strict=True) if s
            )
            kept_contrasts = np.concatenate(
                [kept_contrasts, contrasts[offset:bound][is_kept]]
            )
            offset = max(offset, bound)
    return compressed


def num_within_budget(lengths: Sequence[int], budget: float) -> int:
    """Return how many first passages stay, with the one that crosses the budget."""
    num = 0
    while num < len(lengths) and budget >= 0:
        budget -= lengths[num]
        num += 1
    return num


def passage_ratios(lengths: Sequence[int], target: float, spread: float) -> list[float]:
    """Return the ratio of tokens that stay in each passage.

    It falls from the first passage to the last in equal steps.

    Args:
        lengths: [K] number of tokens of each passage, best first.
        target: number of tokens of all passages together.
        spread: D of `longllmlingua`.
    """
    ratio = target / (sum(n + SEPARATOR for n in lengths) + 1)
    num = len(lengths)
    deltas = np.linspace(spread, -spread, num) if num > 1 else np.zeros(num)
    return np.clip(ratio + deltas, 0, 1).tolist()


def segment_plan(
    lengths: Sequence[int], ratios: Sequence[float]
) -> list[list[tuple[int, float]]]:
    """Return the segments, each a list of (number of tokens, ratio) pairs.

    Args:
        lengths: [K] number of tokens of each passage.
        ratios: [K] ratio of each passage.
    """
    plan, room = [[]], SEGMENT - 1  # the start of text takes one token
    for length, ratio in zip(lengths, ratios, strict=True):
        while length > 0:
            if not room:
                plan.append([])
                room = SEGMENT
            count = min(length, room)
            plan[-1].append((count, ratio))
            length, room = length - count, room - count
    return [segment for segment in plan if segment]


def contrast_threshold(values: np.ndarray, ratio: float) -> float:
    """Return the contrast that a token must exceed: the int(n ratio)-th largest value.

    Args:
        values: [n] contrasts of all tokens, in any order.
        ratio: share of the tokens that stays; 1 keeps every token.
    """
    if ratio >= 1:
        return -np.inf
    rank = min(max(int(len(values) * ratio) - 1, 0), len(values) - 1)
    return float(np.sort(values)[::-1][rank])

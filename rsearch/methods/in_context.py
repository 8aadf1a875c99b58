"""Show a question's own paragraphs in place of a search: in-context long documents.

The baseline of ReaRAG (arXiv 2503.21729), whose prompt is not published.
"""

import bisect
import random
from collections.abc import Callable

from rsearch.llm.requests import Generate
from rsearch.methods.base import Kit, answer_of
from rsearch.methods.reading import text_messages
from rsearch.protocols import plain
from rsearch.types import Messages, Passage, Question


def in_context(
    question: Question, kit: Kit, *, only_gold: bool = False, filled: bool = False
):
    """Show the paragraphs that come with a question, which include the answer.

    They keep the order of the data. If a prompt cannot hold them all, the last of those
    that are not gold are left out; the row's `left_out` is their mean share. Gold ones
    are never left out: if they do not fit by themselves, the question is not answered
    and counts as truncated. If the data marks none as gold, any may be left out.

    Args:
        only_gold: whether to leave out all others, even if they would fit; the data
            must mark which are gold.
        filled: whether paragraphs of other questions fill the rest of the prompt, as
            in the paper's contexts of 48 to 58 thousand tokens. The choice of these,
            and the order of all paragraphs, are drawn for each question.

    Raises:
        ValueError: the question has no paragraphs.
    """
    paragraphs = kit.paragraphs_of(question)
    gold = [text for text, is_gold in paragraphs if is_gold]
    # Paragraphs that may be left out, starting from the end of the list.
    extras = [] if only_gold else [text for text, is_gold in paragraphs if not is_gold]
    num_non_gold = len(extras)
    order = {text: i for i, (text, _) in enumerate(paragraphs)}
    if filled:
        rng = random.Random(question.id)
        other_texts = [text for text in kit.paragraphs() if text not in order]
        extras += rng.sample(other_texts, len(other_texts))
        order = {text: rng.random() for text in gold + extras}

    def messages_with(num: int) -> Messages:
        texts = sorted(gold + extras[:num], key=order.__getitem__)
        passages = [Passage(str(i), text, None) for i, text in enumerate(texts)]
        return text_messages(kit, question.text, plain.write_passages(passages))

    num = _largest_fit(len(extras), lambda num: kit.fits(messages_with(num)))
    left_out = (len(paragraphs) - len(gold) - min(num, num_non_gold)) / len(paragraphs)
    request = Generate(messages_with(num), kit.answer_tokens, left_out=left_out)
    return answer_of((yield request))


def _largest_fit(num: int, fits: Callable[[int], bool]) -> int:
    """Return the largest count up to `num` that fits, or 0.

    If a count does not fit, no larger one does. Counts are doubled first, since there
    may be far more paragraphs than a prompt can hold.
    """
    high = 1
    while high <= num and fits(high):
        high *= 2
    low = high // 2
    larger = range(low + 1, min(high - 1, num) + 1)
    return low + bisect.bisect_left(larger, True, key=lambda size: not fits(size))

"""Read the paragraphs that published datasets provide with their questions."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from rsearch.data.records import check_object, check_string, quote
from rsearch.types import ParagraphsOf, Passage, Question

PAIRS = " or a list of pairs"  # another form of a field, named when it is refused
HEADER = re.compile(r"^Passage ([0-9]{1,6}):[ \t\r]*$", re.MULTILINE)
"""The line above each passage in LongBench's contexts, which are one text each."""


def marked_paragraphs(metadata: Mapping) -> list[tuple[str, bool]]:
    """Return (contents, whether it is gold) of each of a question's paragraphs.

    Args:
        metadata: the question's metadata. It may hold MuSiQue's `paragraphs`,
            HotpotQA's `context` of titles and sentences with `supporting_facts` (pairs
            as published, FlashRAG's objects, or LongBench's text), or DPR's
            `positive_ctxs`.

    Returns:
        All paragraphs, in order; none if no paragraph is marked as gold.

    Raises:
        ValueError: a field is malformed.
    """
    for read in (_from_paragraphs, _from_context, _from_positives):
        paragraphs = read(metadata)
        if any(is_gold for _, is_gold in paragraphs):
            return paragraphs
    return []


def question_paragraphs(metadata: Mapping) -> list[tuple[str, bool]]:
    """Return (contents, whether it is gold) of a question's paragraphs, marked or not.

    Args:
        metadata: as in `marked_paragraphs`, which requires gold marks; here `context`
            may come without `supporting_facts`, and no paragraph is then gold.

    Raises:
        ValueError: there are no paragraphs, or a field is malformed.
    """
    paragraphs = marked_paragraphs(metadata) or _from_paragraphs(metadata)
    if not paragraphs:
        paragraphs = _from_context(metadata, needs_facts=False)
    if not paragraphs:
        raise ValueError(
            "the question has no paragraphs: expected field paragraphs (MuSiQue) or "
            "context (HotpotQA, 2WikiMultiHopQA, LongBench)"
        )
    return paragraphs


def draw_corpora(
    questions: Sequence[Question],
    pool: Sequence[Question],
    paragraphs_of: ParagraphsOf,
    *,
    num_words: int,
) -> tuple[list[Passage], dict[str, list[int]]]:
    """Return passages to search, and the positions of those in each question's corpus.

    A question's corpus has its own paragraphs and then others, drawn while they fit
    into the number of words: distractors first, then other questions' gold paragraphs
    when these are used up, as in ReaRAG's corpora (arXiv 2503.21729, section 4.2). The
    draw depends only on the question's id and the pool.

    Args:
        questions: questions that are asked; all are in the pool.
        num_words: size of a corpus in words separated by white space; the question's
            own paragraphs are never left out. 0 adds no others.

    Returns:
        The distinct passages, sorted and numbered by their ids, and {question id:
        positions of its passages, ascending}.

    Raises:
        ValueError: a question has no paragraphs.
    """
    paragraphs = {question.id: paragraphs_of(question) for question in pool}
    all_texts = sorted({text for texts in paragraphs.values() for text, _ in texts})
    gold_texts = {
        text for texts in paragraphs.values() for text, is_gold in texts if is_gold
    }
    fillers = (
        [t for t in all_texts if t not in gold_texts],
        [t for t in all_texts if t in gold_texts],
    )
    sizes = {text: len(text.split()) for text in all_texts}
    corpora = {}
    for question in questions:
        corpora[question.id] = corpus = {text for text, _ in paragraphs[question.id]}
        rng = random.Random(question.id.encode("utf-8", "replace"))
        words_left = num_words - sum(map(sizes.get, corpus))
        for texts in fillers:
            for text in _in_random_order(rng, texts) if words_left > 0 else ():
                if text in corpus:
                    continue
                words_left -= sizes[text]
                if words_left < 0:
                    break
                corpus.add(text)
    used_texts = sorted(set().union(*corpora.values()))
    positions = {text: i for i, text in enumerate(used_texts)}
    passages = [Passage(str(i), text) for i, text in enumerate(used_texts)]
    return passages, {
        name: sorted(map(positions.get, corpus)) for name, corpus in corpora.items()
    }


def _in_random_order(rng: random.Random, items: Sequence) -> Iterator:
    """Yield the items in random order; to take a few of many items is cheap."""
    swaps: dict[int, int] = {}  # swaps of a Fisher-Yates shuffle: position -> index
    for i in range(len(items)):
        j = rng.randrange(i, len(items))
        yield items[swaps.get(j, j)]
        swaps[j] = swaps.get(i, i)


def _from_paragraphs(metadata):
    """Return (contents, whether it is gold) of MuSiQue's `paragraphs`, [] if none."""
    names = "title", "paragraph_text", "is_supporting"
    paragraphs = []
    for field, paragraph, contents in _objects(metadata, "paragraphs", names):
        is_supporting = paragraph["is_supporting"]
        if not isinstance(is_supporting, bool):
            raise ValueError(
                f"field {field}.is_supporting: expected true or false, got "
                f"{quote(is_supporting)}"
            )
        paragraphs.append((contents, is_supporting))
    return paragraphs


def _from_context(metadata, *, needs_facts=True):
    """Return (contents, whether it is gold) of the passages in `context`, [] if none.

    Context and facts are objects of lists, as in FlashRAG, or lists of pairs, as
    published; LongBench's context is a text.
    """
    context, facts = metadata.get("context"), metadata.get("supporting_facts")
    if context is None or (facts is None and needs_facts):
        return []
    if facts is None:
        gold_titles = set()
    elif isinstance(facts, list):
        pairs = _pairs(facts, "supporting_facts")
        gold_titles = {
            check_string(t, f"supporting_facts[{i}][0]") for i, (t, _) in pairs
        }
    else:
        check_object(facts, "supporting_facts", ("title",), PAIRS)
        gold_titles = set(_texts(facts["title"], "supporting_facts.title"))
    return [
        (f"{title}\n{' '.join(map(str.strip, lines))}", title in gold_titles)
        for title, lines in _context_passages(context)
    ]


def _from_positives(metadata):
    """Return (contents, True) of DPR's positive passages, [] if there are none."""
    passages = _objects(metadata, "positive_ctxs", ("title", "text"))
    return [(contents, True) for _, _, contents in passages]


def _objects(metadata, field, names):
    """Yield (name for messages, object, contents) of the objects in a field's list.

    Args:
        metadata: the question's metadata; without the field, nothing is yielded.
        names: required fields of an object; the first two hold its title and text.
    """
    values = metadata.get(field)
    if values is None:
        return
    if not isinstance(values, list):
        raise ValueError(
            f"field {field}: expected a list of objects with {', '.join(names)}, got "
            f"{quote(values)}"
        )
    for i, value in enumerate(values):
        name = f"{field}[{i}]"
        check_object(value, name, names)
        title, text = (check_string(value[n], f"{name}.{n}") for n in names[:2])
        yield name, value, f"{title}\n{text.strip()}"


def _context_passages(context):
    """Return [(title, its sentences)] of all passages in `context`."""
    if isinstance(context, str):
        return _split_passages(check_string(context, "context"))
    if isinstance(context, list):
        return [
            (check_string(title, f"context[{i}][0]"), _texts(lines, f"context[{i}][1]"))
            for i, (title, lines) in _pairs(context, "context")
        ]
    # In FlashRAG, HotpotQA's field is sentences, 2WikiMultiHopQA's is content.
    has_content = isinstance(context, dict) and "content" in context
    name = "content" if has_content else "sentences"
    check_object(context, "context", ("title", name), PAIRS)
    titles = _texts(context["title"], "context.title")
    sentences = context[name]
    if not isinstance(sentences, list) or len(sentences) != len(titles):
        raise ValueError(
            f"field context.{name}: expected a list of {len(titles)} lists of texts, "
            f"one for each title, got {quote(sentences)}"
        )
    return [
        (title, _texts(lines, f"context.{name}[{i}]"))
        for i, (title, lines) in enumerate(zip(titles, sentences))
    ]


def _split_passages(context):
    """Return [(title, [text])] of the passages in LongBench's text.

    Each follows a line with its number, and its first line is the title. Numbers that
    do not count up from 1 are refused: a passage is missing, or a line within a passage
    was mistaken for the start of the next one.
    """
    headers = list(HEADER.finditer(context))
    if not headers or context[: headers[0].start()].strip():
        raise ValueError(
            "field context: expected an object with title and sentences or a list of "
            "pairs, or a text of passages below lines 'Passage 1:', 'Passage 2:' and "
            f"so on, got {quote(context)}"
        )
    passages = []
    ends = [*(header.start() for header in headers[1:]), len(context)]
    for number, (header, end) in enumerate(zip(headers, ends, strict=True), 1):
        if int(header[1]) != number:
            raise ValueError(
                f"field context: expected 'Passage {number}:', got "
                f"'Passage {header[1]}:' at character {header.start() + 1}"
            )
        title, _, text = context[header.end() : end].strip().partition("\n")
        if not title:
            raise ValueError(f"field context: 'Passage {number}:' has no text")
        passages.append((title.strip(), [text]))
    return passages


def _pairs(value, field):
    """Return [(index, pair)] of a list; refuse one in which not all are pairs."""
    for i, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                f"field {field}[{i}]: expected a list of two, a title first, got "
                f"{quote(pair)}"
            )
    return list(enumerate(value))


def _texts(value, field):
    """Return `value` if it is a list of texts, possibly empty; refuse anything else."""
    if not isinstance(value, list):
        raise ValueError(f"field {field}: expected a list of texts, got {quote(value)}")
    return [check_string(text, f"{field}[{i}]") for i, text in enumerate(value)]

"""Read the paragraphs that published sets give their questions."""

from collections.abc import Mapping, Sequence

from rsearch.data.records import check_object, check_string, shown
from rsearch.types import Question

PAIRS = " or a list of pairs"  # what else a field may be, in what it is refused with


def marked_paragraphs(metadata: Mapping) -> list[tuple[str, bool]]:
    """Return (contents, whether it is gold) of the paragraphs of a question.

    Args:
        metadata: of the question. It may hold MuSiQue's `paragraphs`, or HotpotQA's
            `context` of titles and sentences with `supporting_facts`, in pairs as they
            were published or in FlashRAG's objects.

    Returns:
        All paragraphs, in order; none where nothing marks any as gold.

    Raises:
        ValueError: a field is not as it should be.
    """
    for read in (_from_paragraphs, _from_context):
        marked = read(metadata)
        if any(is_gold for _, is_gold in marked):
            return marked
    return []


def all_paragraphs(questions: Sequence[Question]) -> list[str]:
    """Return the contents of all paragraphs of questions, each once, sorted.

    Raises:
        ValueError: as `marked_paragraphs`.
    """
    return sorted({t for q in questions for t, _ in marked_paragraphs(q.metadata)})


def _from_paragraphs(metadata):
    """Return (contents, whether it is gold) of MuSiQue's; [] without any."""
    paragraphs = metadata.get("paragraphs")
    if paragraphs is None:
        return []
    field, names = "paragraphs", ("title", "paragraph_text", "is_supporting")
    if not isinstance(paragraphs, list):
        raise ValueError(
            f"field {field}: expected a list of objects with {', '.join(names)}, got "
            f"{shown(paragraphs)}"
        )
    marked = []
    for i, paragraph in enumerate(paragraphs):
        check_object(paragraph, f"{field}[{i}]", names)
        title, text = (
            check_string(paragraph[name], f"{field}[{i}].{name}") for name in names[:2]
        )
        is_supporting = paragraph["is_supporting"]
        if not isinstance(is_supporting, bool):
            raise ValueError(
                f"field {field}[{i}].is_supporting: expected true or false, got "
                f"{shown(is_supporting)}"
            )
        marked.append((f"{title}\n{text.strip()}", is_supporting))
    return marked


def _from_context(metadata):
    """Return (contents, whether it is gold) of those in `context`; [] without it.

    Context and facts are objects of lists, as in FlashRAG, or lists of pairs, as they
    were published.
    """
    context, facts = metadata.get("context"), metadata.get("supporting_facts")
    if context is None or facts is None:
        return []
    if isinstance(facts, list):
        pairs = _pairs(facts, "supporting_facts")
        wanted = {check_string(t, f"supporting_facts[{i}][0]") for i, (t, _) in pairs}
    else:
        check_object(facts, "supporting_facts", ("title",), PAIRS)
        wanted = set(_texts(facts["title"], "supporting_facts.title"))
    return [
        (f"{title}\n{' '.join(map(str.strip, lines))}", title in wanted)
        for title, lines in _titled(context)
    ]


def _titled(context):
    """Return [(title, its sentences)] of all passages of `context`."""
    if isinstance(context, list):
        return [
            (check_string(title, f"context[{i}][0]"), _texts(lines, f"context[{i}][1]"))
            for i, (title, lines) in _pairs(context, "context")
        ]
    # FlashRAG's two names: HotpotQA has sentences, 2WikiMultiHopQA has content.
    is_other = isinstance(context, dict) and "content" in context
    name = "content" if is_other else "sentences"
    check_object(context, "context", ("title", name), PAIRS)
    titles = _texts(context["title"], "context.title")
    sentences = context[name]
    if not isinstance(sentences, list) or len(sentences) != len(titles):
        raise ValueError(
            f"field context.{name}: expected a list of {len(titles)} lists of texts, "
            f"one for each title, got {shown(sentences)}"
        )
    return [
        (title, _texts(lines, f"context.{name}[{i}]"))
        for i, (title, lines) in enumerate(zip(titles, sentences))
    ]


def _pairs(value, field):
    """Return [(number, pair)] of a list; refuse one that is not all pairs."""
    for i, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                f"field {field}[{i}]: expected a list of two, a title first, got "
                f"{shown(pair)}"
            )
    return list(enumerate(value))


def _texts(value, field):
    """Return `value`; refuse what is no list of texts, which may be empty."""
    if not isinstance(value, list):
        raise ValueError(f"field {field}: expected a list of texts, got {shown(value)}")
    return [check_string(text, f"{field}[{i}]") for i, text in enumerate(value)]

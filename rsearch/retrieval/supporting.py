"""How many of the passages that a question rests on does one search find."""


def supporting_recall(search, questions, *, top_k):
    """Mean share of each question's supporting passages among its first passages.

    Args:
        search: SearchFn, asked with the questions' texts.
        questions: Questions; metadata names the supporting passages as
            `supporting_ids`, `supporting_titles`, or FlashRAG's `supporting_facts` with
            a list `title`. Questions that name none do not count.
        top_k: passages a question that count.

    Returns:
        (recall in [0, 1], number of questions that count).

    Raises:
        ValueError: no question names any.
    """
    rows = [(q.text, *supporting_passages(q)) for q in questions]
    rows = [row for row in rows if row[2]]
    if not rows:
        raise ValueError(
            "none of the questions names its supporting passages: expected metadata "
            "with supporting_ids, supporting_titles or supporting_facts"
        )
    total = 0.0
    for (_, key, wanted), passages in zip(rows, search([row[0] for row in rows])):
        found = {key(passage) for passage in (passages or ())[:top_k]}
        total += len(wanted & found) / len(wanted)
    return total / len(rows), len(rows)


def supporting_passages(question):
    """(what identifies a passage, set of those that the question rests on)."""
    metadata = question.metadata
    if metadata.get("supporting_ids"):
        return (lambda passage: passage.id), set(metadata["supporting_ids"])
    titles = metadata.get("supporting_titles")
    facts = metadata.get("supporting_facts")
    if not titles and isinstance(facts, dict):
        titles = facts.get("title")
    return _title, {title.strip('" ') for title in titles or ()}


def _title(passage):
    return passage.title.strip('" ')

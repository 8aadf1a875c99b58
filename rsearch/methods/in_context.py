"""Show a question's own paragraphs in place of a search: in-context long documents.

The baseline of ReaRAG (arXiv 2503.21729), whose prompt is not published. It fills its
contexts with paragraphs of other questions; here there are those of the question alone.
"""

from collections.abc import Sequence

from rsearch.data.paragraphs import marked_paragraphs
from rsearch.llm.requests import Generate
from rsearch.methods.base import Kit, answer_of
from rsearch.methods.reading import text_messages
from rsearch.protocols import plain
from rsearch.types import Messages, Passage, Question


def in_context(question: Question, kit: Kit, *, only_gold: bool = False):
    """Show the paragraphs that come with a question, those with the answer among them.

    They stand as in the data. The last of the others are left out where the prompt has
    no room for all; the row's `left_out` is their mean share. Gold ones never are: a
    prompt that is too long for them alone is not answered, and counts as truncated.

    Args:
        question: that is answered.
        kit: of the evaluation.
        only_gold: whether all others are left out, whatever the room.

    Raises:
        ValueError: the question has no paragraphs, see `check_paragraphs`.
    """
    check_paragraphs((question,))
    marked = marked_paragraphs(question.metadata)
    others = [i for i, (_, is_gold) in enumerate(marked) if not is_gold]

    def shown_with(num_others: int) -> Messages:
        dropped = set(others[num_others:])
        passages = [
            Passage(str(i), text, None)
            for i, (text, _) in enumerate(marked)
            if i not in dropped
        ]
        return text_messages(kit, question.text, plain.write_passages(passages))

    # The most that fit: more paragraphs never make a prompt shorter.
    num, end = 0, 0 if only_gold else len(others)
    while num < end:
        middle = (num + end + 1) // 2
        if kit.fits(shown_with(middle)):
            num = middle
        else:
            end = middle - 1
    left_out = (len(others) - num) / len(marked)
    request = Generate(shown_with(num), kit.answer_tokens, left_out=left_out)
    return answer_of((yield request))


def check_paragraphs(questions: Sequence[Question]) -> None:
    """Refuse questions that come without paragraphs of which some are gold.

    Raises:
        ValueError: names the first such question, or the field that is wrong.
    """
    for question in questions:
        try:
            marked = marked_paragraphs(question.metadata)
        except ValueError as error:
            raise ValueError(f"question {question.id}: {error}") from None
        if not marked:
            raise ValueError(
                f"config.eval.methods names 'in_context', but question {question.id} "
                "has no paragraphs: expected metadata with paragraphs of which some "
                "have is_supporting (MuSiQue), or context and supporting_facts that "
                "share a title (HotpotQA)"
            )

"""Turn rollouts into training data: filter them, and cut demonstrations from them.

Everything here works on Attempts, which are rollouts as text, and does not depend on
tags: a turn's action is read by `Protocol.parse`, and the tags of observations come
from `Protocol.observation_tags`.
"""

import dataclasses
import re

from rsearch.data.demonstrations import RAG, RAW, Demonstration
from rsearch.protocols.base import Protocol, Step
from rsearch.protocols.rewriting import (
    recalled_answer,
    recalled_texts,
    rewriting_messages,
)
from rsearch.text.normalize import cover_exact_match, exact_match, f1
from rsearch.tools.search import non_search_calls, search_use, with_other_calls
from rsearch.types import (
    SEARCH,
    Answer,
    Malformed,
    Outcome,
    Passage,
    Question,
    Rollout,
    Source,
    ToolCall,
    ToolUse,
)

MEASURES = {"em": exact_match, "cover_em": cover_exact_match, "f1": f1}
KEPT_REASON = "kept"
WORD = re.compile(r"\w+")
ESCAPED_SPACE = re.compile(r"\\[nrt]")  # white space in results that are JSON
LONG_TEXT = 20  # words of a text that is not repeated by chance
TAGS = re.compile(r"<\|[a-z_]+\|>|</?[a-z_]+>")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A rollout as text.

    Attributes:
        turns: [n] texts that the policy wrote, each up to the end of its action.
        observations: [n] texts shown after each turn, "" where nothing was.
        tool_uses: calls that were executed, in order.
        answer: text of the Answer action; None if there was none.
        outcome: how the rollout ended.
        num_malformed: number of turns without a valid action.
    """

    turns: tuple[str, ...]
    observations: tuple[str, ...]
    tool_uses: tuple[ToolUse, ...]
    answer: str | None
    outcome: Outcome
    num_malformed: int = 0

    @property
    def searches(self) -> tuple[ToolUse, ...]:
        """Return the searches, in order."""
        return tuple(use for use in self.tool_uses if use.call.name == SEARCH)

    def passages(self) -> list[Passage]:
        """Return the passages that were shown, each once, in order.

        The texts that tools other than search return count as passages.
        """
        passages = []
        for use in self.tool_uses:
            if use.call.name == SEARCH:
                passages += [p for hits in use.result.data for p in hits]
            elif use.result.text.strip():
                passages.append(Passage(use.call.name, use.result.text))
        return list({p.contents: p for p in passages}.values())


NO_ATTEMPT = Attempt((), (), (), None, Outcome.TRUNCATED)
"""The attempt at a question for which nothing could be written."""


def attempt_of(protocol: Protocol, rollout: Rollout) -> Attempt:
    """Return the rollout as text; see `first_step` for how a turn is cut."""
    turns, observations = [], []
    for segment in rollout.segments:
        if segment.source == Source.POLICY:
            turns.append(first_step(protocol, segment.text))
            observations.append("")
        elif segment.source == Source.SEARCH:
            observations[-1] += segment.text
    return Attempt(
        tuple(turns),
        tuple(observations),
        rollout.tool_uses,
        rollout.answer,
        rollout.outcome,
        rollout.num_malformed,
    )


def first_step(protocol: Protocol, turn: str) -> str:
    """Return the turn up to the end of its action, without the rest of the last token.

    The first stop string ends the turn. A turn without one is cut before the first
    observation that the model made up, unless that would change its action.
    """
    ends = [turn.find(s) + len(s) for s in protocol.stop_strings if s in turn]
    if ends:
        return turn[: min(ends)]
    matches = [tag.search(turn) for tag in protocol.observation_tags()]
    starts = [match.start() for match in matches if match]
    head = turn[: min(starts, default=len(turn))].rstrip()
    return head if starts and protocol.parse(head) == protocol.parse(turn) else turn


def to_record(attempt: Attempt) -> dict:
    """Return the attempt as JSON values."""
    searches = [
        {
            "queries": list(s.call.arguments),
            "passages": [
                [dataclasses.asdict(p) for p in hits] for hits in s.result.data
            ],
        }
        for s in attempt.searches
    ]
    return {
        "turns": list(attempt.turns),
        "shown": list(attempt.observations),
        "searches": searches,
        "answer": attempt.answer,
        "outcome": attempt.outcome.value,
        "num_malformed": attempt.num_malformed,
        **non_search_calls(attempt.tool_uses),
    }


def from_record(record: dict) -> Attempt:
    """Return the attempt of a record from `to_record`."""
    searches = [
        search_use(
            tuple(s["queries"]),
            tuple(tuple(Passage(**p) for p in hits) for hits in s["passages"]),
        )
        for s in record["searches"]
    ]
    return Attempt(
        tuple(record["turns"]),
        tuple(record["shown"]),
        with_other_calls(searches, record),
        record["answer"],
        Outcome(record["outcome"]),
        record["num_malformed"],
    )


def is_right(
    question: Question,
    attempt: Attempt,
    *,
    measure: str,
    normalize: str,
    order: str = "any",
    max_words: int = 0,
) -> bool:
    """Return whether an attempt ended with a right answer.

    Args:
        measure: a key of MEASURES; with "f1", any score above 0 is right.
        normalize: a key of `rsearch.text.normalize.NORMALIZERS`.
        order: order of the words in "cover_em", see
            `rsearch.text.normalize.cover_exact_match`.
        max_words: a longer answer is wrong; 0 sets no limit.
    """
    if attempt.outcome != Outcome.ANSWERED:
        return False
    if max_words and len(attempt.answer.split()) > max_words:
        return False
    settings = {"order": order} if measure == "cover_em" else {}
    golden = question.golden_answers
    score = MEASURES[measure](attempt.answer, golden, normalize=normalize, **settings)
    return score > 0 if measure == "f1" else score == 1


def rejection_reason(
    protocol: Protocol, question: Question, attempt: Attempt, **criteria
) -> str:
    """Return why an attempt is no example of how to answer; "" if it is one.

    The reasons are its outcome, if it gave no answer; "wrong"; "malformed" if a turn
    has no action; "forged" if a turn has the tags of an observation, which only tools
    write; and "copied" if a turn repeats a retrieved passage, see `copies`.

    Args:
        **criteria: keyword arguments of `is_right`, which define a right answer.
    """
    if attempt.outcome != Outcome.ANSWERED:
        return attempt.outcome.value
    if not is_right(question, attempt, **criteria):
        return "wrong"
    if attempt.num_malformed:
        return "malformed"
    tags = protocol.observation_tags()
    if any(tag.search(turn) for tag in tags for turn in attempt.turns):
        return "forged"
    passages = attempt.passages()
    if any(copies(turn, passage) for passage in passages for turn in attempt.turns):
        return "copied"
    return ""


def copies(turn: str, passage: Passage) -> bool:
    """Return whether a turn holds a complete passage, however that was framed.

    A complete passage is its title followed by all of its text, or only its text if
    that has at least LONG_TEXT words: a short fact may well be stated in the same
    words. What a model or a tool wrote has no title. Punctuation, spaces and capitals
    are ignored.
    """
    turn_words = _words(turn)
    title, text = _words(passage.title), _words(passage.text)
    if title and text and _holds(turn_words, f"{title} {text}"):
        return True
    text = text or title  # a tool's result may be one line
    return text.count(" ") + 1 >= LONG_TEXT and _holds(turn_words, text)


def _words(text):
    """Return a text's words, joined by spaces."""
    return " ".join(WORD.findall(ESCAPED_SPACE.sub(" ", text).casefold()))


def _holds(words, phrase):
    return f" {phrase} " in f" {words} "


def segments(
    protocol: Protocol, question: Question, attempt: Attempt
) -> list[tuple[str, Demonstration]]:
    """Cut RAG-R1's segments, each as (kind, demonstration of one turn to learn).

    A conversation of n turns makes n segments. Each has one turn to learn; everything
    before it, including retrieved passages, is context and not learnt. Source: RAG-R1
    (arXiv 2507.02962) section 3.1.2 and Figure 1.

    Args:
        attempt: an attempt without a `rejection_reason`.
    """
    pairs = []
    passages = attempt.passages()
    for number, turn in enumerate(attempt.turns):
        action = protocol.parse(turn)
        assert not isinstance(action, Malformed), turn
        assert not any(copies(turn, passage) for passage in passages), turn
        verb = "search" if isinstance(action, ToolCall) else "answer"
        kind = f"{verb}_from_{'retrieved' if number else 'question'}"
        turns = attempt.turns[: number + 1]
        settings = {"context_turns": number, "is_segment": True}
        pairs.append((kind, Demonstration(question, turns, **settings)))
    return pairs


def both_knowledge_fault(attempt: Attempt) -> str:
    """Return why an attempt does not use both kinds of knowledge; "" if it does.

    It must recall something between matched internal tags, and it must search. Source:
    R1-Searcher++ (arXiv 2505.17005) section 4.1.
    """
    memories = [recalled_texts(turn) for turn in attempt.turns]
    if None in memories:
        return "unclosed internal tag"
    if not any(recollection.strip() for texts in memories for recollection in texts):
        return "nothing recalled"
    return "" if attempt.searches else "nothing searched"


def rewording(
    protocol: Protocol,
    question: Question,
    attempt: Attempt,
    *,
    user: str | None = None,
    **criteria,
) -> Demonstration | None:
    """Reword a correct response that searched as if it had recalled everything.

    The demonstration is for the rewriting model, which is shown the question and the
    passages and writes one turn: the text of all turns as recalled knowledge, then the
    answer. That turn must recall something, mention no search and answer correctly.
    Source: R1-Searcher++ section 4.2.2.

    Args:
        attempt: an attempt without a `rejection_reason`.
        user: replaces the messages of `rewriting_messages`.
        **criteria: keyword arguments of `is_right`, which define a right answer.

    Returns:
        The demonstration, or None if there can be no such turn.
    """
    texts = [text_before_action(protocol, turn) for turn in attempt.turns]
    if not attempt.searches or any(text is None for text in texts):
        return None
    step = Step(1, "", Answer(attempt.answer), " ".join(filter(None, texts)))
    try:
        turn = protocol.write(step)
    except ValueError:
        return None
    answer = recalled_answer(protocol, turn)
    if answer is None or first_step(protocol, turn) != turn:
        return None
    reworded_attempt = dataclasses.replace(attempt, answer=answer.text)
    if not is_right(question, reworded_attempt, **criteria):
        return None
    messages = rewriting_messages(question.text, attempt.passages(), user=user)
    return Demonstration(question, (turn,), messages=tuple(messages))


def text_before_action(protocol: Protocol, turn: str) -> str | None:
    """Return a turn's text before its action, without tags; None without an action.

    The action is found by its opening as `Protocol.render` writes it.
    """
    action = protocol.parse(turn)
    if isinstance(action, Malformed):
        return None
    content = action.text if isinstance(action, Answer) else action.arguments[0]
    try:
        opening, separator, _ = protocol.render(action).partition(content)
    except ValueError:
        return None
    head, found_opening, _ = turn.rpartition(opening.strip())
    if not separator or not found_opening:
        return None
    return " ".join(TAGS.sub(" ", head).split())


def demonstration_record(demonstration: Demonstration) -> dict:
    """Return a record for `load_demonstrations`, leaving out defaults."""
    d = demonstration
    record = {"id": d.question.id, "question": d.question.text, "turns": list(d.turns)}
    if d.context_turns:
        record["context_turns"] = d.context_turns
    if d.observations is not None:
        record["observations"] = list(d.observations)
    if d.messages is not None:
        record["messages"] = [dict(message) for message in d.messages]
    if d.is_segment:
        record["is_segment"] = True
    if d.method in (RAW, RAG):
        record[f"is_{d.method}"] = True
    return record


def question_record(question: Question, **metadata) -> dict:
    """Return a record for `load_questions`, with `metadata` added to the metadata."""
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "metadata": {**question.metadata, **metadata},
    }

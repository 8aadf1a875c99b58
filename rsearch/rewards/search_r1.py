"""The reward of Search-R1 v0.3: exact match, structure and retrieval in one table."""

import re
from collections.abc import Sequence
from typing import Literal

from rsearch.rewards.reading import Normalize, answer_in, first_close_texts, transcript
from rsearch.text import normalize as text
from rsearch.types import Question, Rollout, Source

TAGS = re.compile(r"(</?(?:think|search|information|answer)>)")
ASSISTANT = re.compile(r"<\|im_start\|>assistant\s*")
TURN_END = re.compile(r"</(?:search|answer)>")
STEPS = {  # (state, tag) -> next state; no other tag is allowed in that state
    ("start", "<think>"): "in think",
    ("in think", "</think>"): "after think",
    ("after think", "<search>"): "in search",
    ("in search", "</search>"): "after search",
    ("after search", "<information>"): "in information",
    ("in information", "</information>"): "start",
    ("after think", "<answer>"): "in answer",
    ("in answer", "</answer>"): "end",
}


def search_r1_structure(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    structure: float = 0.2,
    final: float = 0.1,
    retrieval: float = 0.0,
    normalize: Normalize = "squad",
    scope: Literal["policy", "transcript"] = "policy",
    empty_matches: bool = False,
) -> list[float]:
    """Return [G] the reward of Search-R1 v0.3 (arXiv 2505.15117, `qa_em_format`).

    A rollout is well structured if its parts are think, search, information, think,
    ..., answer, each between its tags, with nothing but white space between the parts.

    | answer | structured     | not structured |
    |--------|----------------|----------------|
    | right  | 1              | 1 - structure  |
    | wrong  | structure (+r) | final          |
    | none   | structure (+r) | 0              |

    where r is `retrieval` if something retrieved holds a golden answer, and else 0.

    Args:
        question, rollouts, normalize: as in `answer_em`.
        structure, final, retrieval: the three scores. A `retrieval` above 0 makes this
            part depend on what the engine found, as intended.
        scope: "policy": the policy's own turns and executed searches, each turn up to
            its first action. "transcript", as in the public code: the whole text from
            `<|im_start|>assistant` on, without which nothing is structured. Whatever
            follows the answer, even an `<|im_end|>`, breaks the structure, and the
            answer is the last of at least two boxes.
        empty_matches: as in `rsearch.text.normalize.exact_match`; any retrieved text
            then holds a golden answer that normalisation leaves empty.
    """
    values, settings = [], {"normalize": normalize, "empty_matches": empty_matches}
    for rollout in rollouts:
        if scope == "policy":
            is_valid = _is_structured(rollout)
            retrieved_texts = [p.contents for p in rollout.passages]
        else:
            full_text = transcript(rollout)
            is_valid = _is_structured_text(full_text)
            retrieved_texts = first_close_texts(full_text, "information")
        answer = answer_in(rollout, scope)
        gold = question.golden_answers
        holds_gold = is_valid and _holds_golden(retrieved_texts, gold, **settings)
        if text.exact_match(answer, gold, **settings):
            values.append(1.0 if is_valid else 1.0 - structure)
        elif is_valid:
            values.append(structure + retrieval * holds_gold)
        else:
            values.append(0.0 if answer is None else final)
    return values


def _is_structured(rollout):
    """Return whether turns and observations alternate, with no forged tags in turns."""
    state = "start"
    if rollout.num_malformed:  # its observation is a message, not a search result
        return False
    for segment in rollout.segments:
        if segment.source == Source.SEARCH:
            state = "start" if state == "after search" else None
        elif segment.source == Source.POLICY:
            closing = TURN_END.search(segment.text)
            turn = segment.text[: closing.end()] if closing else segment.text
            state = _next_state(turn, state)
    return state == "end"


def _is_structured_text(full_text):
    opening = ASSISTANT.search(full_text)
    return (
        opening is not None
        and _next_state(full_text[opening.end() :], "start") == "end"
    )


def _next_state(turn, state):
    """Return the state after a text; None if it breaks the structure."""
    for token in TAGS.split(turn):
        if not token.strip():
            continue
        if TAGS.fullmatch(token):
            state = STEPS.get((state, token))
        elif state is None or not state.startswith("in "):
            return None
    return state


def _holds_golden(retrieved_texts, gold, normalize, empty_matches):
    """Return whether a normalised golden answer is a substring of a passage."""
    normalize_text = text.NORMALIZERS[normalize]
    golden_forms = [g for g in map(normalize_text, gold) if g or empty_matches]
    return any(
        g in normalize_text(passage)
        for passage in retrieved_texts
        for g in golden_forms
    )

"""R1-Searcher's retrieval and format rewards (Song et al. 2025, section 2.2.1)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rsearch.protocols.tagged import spans
from rsearch.rewards.reading import answer_in, response
from rsearch.types import Question, Rollout

BEGIN_QUERY, END_QUERY = "<|begin_of_query|>", "<|end_of_query|>"
BEGIN_DOCUMENTS, END_DOCUMENTS = "<|begin_of_documents|>", "<|end_of_documents|>"
COUNTED_STRINGS = (  # the public code requires all of these equally often
    f"{BEGIN_DOCUMENTS}\n",
    f"{END_DOCUMENTS}\n\n",
    BEGIN_QUERY,
    END_QUERY,
    BEGIN_DOCUMENTS,
    END_DOCUMENTS,
    f"{BEGIN_DOCUMENTS}\n(1)",
)
IDEOGRAPH = re.compile("[\u4e00-\u9fff]")
MAX_ANSWER_WORDS = 10
CHECKS = {  # checks of the paper and of public runs, letters of `r1_searcher_format`
    "paper": "acdefg",
    "qwen": "abcdefg",
    "llama_stage1": "cd",
    "llama_stage2": "acdg",
}


def searched(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    value: float = 0.5,
    indicator: Literal["executed", "tags"] = "executed",
) -> list[float]:
    """Return [G] `value` where there was a search, else 0: R1-Searcher's equation 1.

    Args:
        question, rollouts: as in `answer_em`.
        value: reward of a rollout with at least one search.
        indicator: what counts as a search. "executed": a search that the engine ran.
            "tags", as in the public code: the seven strings around queries and
            documents occur equally often in the response, and at least once.
    """
    if indicator == "executed":
        return [value if r.searches else 0.0 for r in rollouts]
    counts = [_tag_counts(response(r)) for r in rollouts]
    return [value if len(c) == 1 and 0 not in c else 0.0 for c in counts]


def r1_searcher_format(
    question: Question,
    rollouts: Sequence[Rollout],
    *,
    good: float = 0.0,
    bad: float = -2.0,
    checks: str = "paper",
    scope: Literal["policy", "response"] = "policy",
    assistant_check_scope: Literal["policy", "response"] = "policy",
) -> list[float]:
    """Return [G] `good` where the rollout passes every check, else `bad`.

    R1-Searcher's equations 2 (values 0.5 and 0) and 3 (values 0 and -2). The paper
    allows "only the final short answer" in the answer's tag, which (e) and (f) check
    with the public code's number of words. The checks:

    a) every query was searched for and the policy wrote no documents;
    b) neither of the words "assistant" and "Assistant" occurs;
    c) the thinking ends once: one `</think>`, and no `<think>`, which is in the prompt;
    d) there is one answer, in one `<answer>` and one `</answer>`;
    e) the answer holds no "begin_of_query" and no "begin_of_documents";
    f) the answer has at most ten words;
    g) there is no Chinese character, the public code's sign of garbled text.

    Args:
        question, rollouts: as in `answer_em`.
        good, bad: the two values.
        checks: a key of CHECKS, or the letters themselves, such as "acd".
        scope: "policy": the policy's own turns and the executed searches. "response",
            as in the public code: turns and documents as one text, where (a) compares
            the seven counts, so that a search that finds nothing fails, and (g) ignores
            text between document tags, whoever wrote these.
        assistant_check_scope: the same, but only for (b). The public code's "response"
            punishes a retrieved document that holds the word.
    """
    letters = CHECKS.get(checks, checks)
    values = []
    for rollout in rollouts:
        turns = rollout.policy_texts
        response_texts = (response(rollout),)
        texts = turns if scope == "policy" else response_texts
        assistant_texts = turns if assistant_check_scope == "policy" else response_texts
        answer = answer_in(rollout, scope) or ""
        results = {
            "a": searches_ok(rollout, BEGIN_QUERY, END_QUERY, COUNTED_STRINGS[4:6])
            if scope == "policy"
            else len(_tag_counts(response_texts[0])) == 1,
            "b": not count(assistant_texts, "assistant")
            + count(assistant_texts, "Assistant"),
            "c": count(texts, "<think>") == 0 and count(texts, "</think>") == 1,
            "d": count(texts, "<answer>") == count(texts, "</answer>") == 1
            and (scope == "response" or rollout.answer is not None),
            "e": "begin_of_query" not in answer and "begin_of_documents" not in answer,
            "f": len(answer.split()) <= MAX_ANSWER_WORDS,
            "g": not any(
                is_garbled(t if scope == "policy" else _without_documents(t))
                for t in texts
            ),
        }
        values.append(good if all(results[letter] for letter in letters) else bad)
    return values


def check_letters(field: str, settings: Mapping[str, Any]) -> None:
    """Refuse checks that are neither a key of CHECKS nor letters of checks."""
    checks = settings.get("checks", "paper")
    letters = CHECKS.get(checks, checks)
    if not letters or not set(letters) <= set("abcdefg"):
        raise ValueError(
            f"{field}.checks = {checks!r}: must be some of the letters a to g, or one "
            f"of {', '.join(CHECKS)}"
        )


def count(texts: Sequence[str], string: str) -> int:
    """Count a string in these texts, but not across two of them."""
    return sum(text.count(string) for text in texts)


def _without_documents(text):
    """Return the text without anything between its document tags."""
    document_spans = spans(text, BEGIN_DOCUMENTS, END_DOCUMENTS)
    starts = [0, *(end for _, end in document_spans)]
    ends = [*(start for start, _ in document_spans), len(text)]
    return "".join(text[a:b] for a, b in zip(starts, ends, strict=True))


def is_garbled(text: str) -> bool:
    """Return whether a CJK ideograph (U+4E00 to U+9FFF) occurs: R1-Searcher's test."""
    return IDEOGRAPH.search(text) is not None


def searches_ok(
    rollout: Rollout, opening: str, closing: str, forbidden: Sequence[str]
) -> bool:
    """Return whether all queries are tagged and executed, and nothing is forged.

    Args:
        rollout: rollout whose policy turns and searches are read.
        opening, closing: the tags around a query; each must occur once per search.
        forbidden: strings around retrieved text, which the policy must not write.
    """
    texts, num_searches = rollout.policy_texts, len(rollout.searches)
    is_forged = any(count(texts, tag) for tag in forbidden)
    return (
        count(texts, opening) == count(texts, closing) == num_searches and not is_forged
    )


def _tag_counts(text):
    """Return the set of counts of COUNTED_STRINGS: a single number if they agree."""
    return {text.count(string) for string in COUNTED_STRINGS}

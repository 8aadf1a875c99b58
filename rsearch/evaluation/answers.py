"""Ask the models that answer after the policy's rollouts have ended.

The answer model phrases the policy's conclusion (ReaRAG, Algorithm 2, line 9). A reader
answers from the policy's evidence (R-Search's Figure 2), or without the policy.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from rsearch.protocols import plain
from rsearch.protocols.concluding import finish_messages
from rsearch.protocols.tagged import EVIDENCE_TAG, tagged_texts
from rsearch.types import (
    GenerateFn,
    Group,
    Messages,
    Outcome,
    Question,
    Rollout,
    SearchFn,
    Source,
    search_for,
    unsampled_segment,
)

LOG_SYSTEM = "You are a QA assistant. Always return a short answer."


def log_messages(question: str, rollout: Rollout) -> Messages:
    """Return the chat that asks for an answer based on what the searches found.

    ReaRAG's code has done so since its paper. finish(answer) is not shown.
    """
    results = [
        f"Query: {query}\nResult: {' '.join(p.contents.strip() for p in passages)}"
        for use in rollout.searches
        for query, passages in zip(use.call.arguments, use.result.data, strict=True)
    ]
    log = "\n\n".join(results)
    return [
        {"role": "system", "content": LOG_SYSTEM},
        {"role": "user", "content": f"{log}\n\nQuestion: {question}\nAnswer:"},
    ]


def rephrase_answers(
    groups: Sequence[Group], answer: GenerateFn, *, answer_from: str
) -> list[Group]:
    """Return the groups with the final answers in the answer model's words.

    Args:
        groups: groups of finished rollouts; those without an answer stay as they are.
        answer: the answer model, which gets all chats in one call.
        answer_from: "finish" shows it the policy's answer, as ReaRAG's paper does;
            "log" shows it what was found, as ReaRAG's later code does.

    Returns:
        The same rollouts with new answers. If the model failed, the outcome is
        JUDGE_ERROR and there is no answer, since the policy's own is not comparable.
    """
    assert answer_from in ("finish", "log"), answer_from

    def make_chat(question: Question, rollout: Rollout):
        if rollout.answer is None or not rollout.outcome.is_signal:
            return None
        if answer_from == "finish":
            return finish_messages(question.text, rollout.answer)
        return log_messages(question.text, rollout)

    return _ask_all(groups, answer, make_chat)


def evidence_of(rollout: Rollout) -> str | None:
    """Return the last evidence box of the policy's own text; None without one."""
    evidence = [
        e for turn in rollout.policy_texts for e in tagged_texts(turn, EVIDENCE_TAG)
    ]
    return (evidence[-1] or None) if evidence else None


def read_evidence(
    groups: Sequence[Group],
    read: GenerateFn,
    *,
    direct_chat: Callable[[Question], Messages],
) -> list[Group]:
    """Return the groups with the answers that a reader gives from their evidence.

    Args:
        groups: groups of a policy that writes evidence boxes.
        read: the reader, which gets all chats in one call.
        direct_chat: makes the chat for a question whose rollout has no evidence.

    Returns:
        The same rollouts with the reader's answers; JUDGE_ERROR and no answer where it
        failed. Rollouts whose search failed stay as they are.
    """

    def make_chat(question: Question, rollout: Rollout):
        if not rollout.outcome.is_signal:
            return None
        evidence = evidence_of(rollout)
        if evidence is None:
            return direct_chat(question)
        return plain.evidence_messages(question.text, evidence)

    return _ask_all(groups, read, make_chat)


def answer_without_policy(
    questions: Sequence[Question],
    read: GenerateFn,
    *,
    direct_chat: Callable[[Question], Messages],
    search: SearchFn | None = None,
) -> list[Group]:
    """Return a reader's answers without the policy, one rollout for each question.

    Args:
        direct_chat: makes the chat that asks a question without passages.
        search: finds the passages that are shown with a question, in the prompt for
            evidence; None shows only the question.

    Returns:
        Groups of rollouts whose prompt is the chat, without token ids, since the policy
        reads and writes nothing.
    """
    chats, results = list(map(direct_chat, questions)), [()] * len(questions)
    if search is not None:
        texts, ids = [q.text for q in questions], [q.id for q in questions]
        results = search_for(search, texts, ids)
        chats = [
            plain.evidence_messages(q.text, plain.write_passages(passages or ()))
            for q, passages in zip(questions, results, strict=True)
        ]
    groups = []
    for question, chat, passages in zip(questions, chats, results, strict=True):
        text = "\n\n".join(message["content"] for message in chat)
        prompt = unsampled_segment(Source.PROMPT, np.zeros(0, np.int32), text)
        outcome = Outcome.TOOL_ERROR if passages is None else Outcome.ANSWERED
        groups.append(Group(question, (Rollout((prompt,), None, (), outcome),)))
    chat_by_id = {q.id: chat for q, chat in zip(questions, chats, strict=True)}

    def make_chat(question, rollout):
        return chat_by_id[question.id] if rollout.outcome.is_signal else None

    return _ask_all(groups, read, make_chat)


def _ask_all(groups, ask_model, make_chat):
    """Return the groups, with replies as answers where `make_chat` returns a chat."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    chats = [make_chat(g.question, r) for g in groups for r in g.rollouts]
    indices = [i for i, chat in enumerate(chats) if chat is not None]
    replies = ask_model([chats[i] for i in indices]) if indices else []
    for i, reply in zip(indices, replies, strict=True):
        answer = None if reply is None else reply.strip()
        outcome = Outcome.JUDGE_ERROR if reply is None else Outcome.ANSWERED
        rollouts[i] = dataclasses.replace(rollouts[i], answer=answer, outcome=outcome)
    remaining = iter(rollouts)
    return [
        Group(g.question, tuple(itertools.islice(remaining, len(g.rollouts))))
        for g in groups
    ]

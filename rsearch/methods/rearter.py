"""ReARTeR: search among sampled steps by their value, and rewrite low-value steps.

Sun et al., arXiv 2501.07861. The value is learnt from labels that the evaluated model
makes on training questions:

    python -m rsearch.evaluate --workdir=RUN --sets=world:train --label_steps=FILE \\
        --config.eval.temperature=1.0
    python -m rsearch.evaluate --workdir=RUN --methods=rearter:labels=FILE \\
        --config.eval.temperature=1.0
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence

import numpy as np

from rsearch.data.labels import fault_of_success, labelled_chains, read_label_file
from rsearch.methods.base import AT_LIMIT, Kit, ask_chat, check_settings, vector_of
from rsearch.methods.self_ask import (
    STEP,
    Chain,
    ends_at_limit,
    extend,
    first_chain,
    take_steps,
)
from rsearch.methods.step_values import LabelledSteps, fit_values
from rsearch.text.normalize import exact_match
from rsearch.types import Messages, Question

TRACES, CONTINUATIONS = 2, 4  # per training question, and per step of a trace
MAX_STEPS = 5  # of a chain
RATE, RISE = 0.5, 0.05  # of the update of values; least increase that counts
STATE = (
    "Question: {question}\n\nSteps so far:\n{steps}\n\nNext step:\n{step}\n\n"
    "Steps after it:\n{later}\n\n"
)
CRITICISE = (
    "Say in a few sentences what is wrong with the next step: whether its question is "
    "needed, whether its answer is right and complete, and what to do in its stead."
)
REWRITE = (
    "A critic says of the next step:\n{criticism}\n\nWrite a better next step, in one "
    "line: 'Follow up: ' and a question that is to be searched, or 'So the final "
    "answer is: ' and the answer alone."
)


def rearter(
    question: Question,
    kit: Kit,
    *,
    labels: str = "",
    paths: int = 3,
    lookahead: int = 2,
    steps: int = MAX_STEPS,
    threshold: float = 0.5,
    penalty: float = 1e-2,
    top_k: int = 0,
):
    """Take the first step of the best of several paths until there is an answer.

    Steps are those of `self_ask`; with one path and a threshold of 0, this is
    `self_ask:rounds=4:forces_answer=false`. If the best path's value is below the
    threshold, its first step is criticised and rewritten, once. A logistic regression
    on vectors of the run's search encoder replaces the paper's process reward model, a
    tuned Llama-3.1-8B. The evaluated model replaces the explanation model, without
    training for it. If no step has the final answer, there is none.

    Args:
        labels: file made by `label_steps`.
        paths: number of paths to sample before each step is taken.
        lookahead: number of further steps of each path.
        steps: number of steps to take, at most; the last one is not searched.
        threshold: from 0, which rewrites nothing, to 1.
        penalty: penalty on the squared weights of the regression; above 0.
        top_k: number of passages to read from each search; 0 reads all.

    Raises:
        ValueError: a setting is out of range; see also `read_step_labels` and
            `base.vector_of`.
    """
    check_settings(
        "rearter",
        ("paths", paths, paths >= 1, "at least 1"),
        ("lookahead", lookahead, lookahead >= 0, "at least 0"),
        ("steps", steps, steps >= 1, "at least 1"),
        ("threshold", threshold, 0 <= threshold <= 1, "from 0 to 1"),
        ("penalty", penalty, 0 < penalty < np.inf, "above 0"),
    )
    labelled_texts, step_values = _fit_step_values(
        labels, kit.embed, kit.embed_passages, penalty
    )
    vector = vector_of(question, labelled_texts, kit)
    limits = dict(max_steps=steps, top_k=top_k)
    chain = first_chain(question.text)
    while chain.goes_on:
        size = len(chain.steps)
        next_chains = yield from extend([chain] * paths, kit, **limits)
        if paths == 1 and threshold == 0:  # nothing depends on a value
            (chain,) = next_chains
            continue
        path_ends = next_chains
        for _ in range(lookahead):
            path_ends = yield from extend(path_ends, kit, **limits)
        prefixes = [
            end.steps[: i + 1] for end in path_ends for i in range(size, len(end.steps))
        ]
        sizes = [len(end.steps) - size for end in path_ends]
        values_by_path = np.split(step_values(vector, prefixes), np.cumsum(sizes)[:-1])
        scores = [first_step_value(path_values) for path_values in values_by_path]
        best, text = int(np.argmax(scores)), None
        if scores[best] < threshold:
            text = yield from _rewrite_step(question, path_ends[best].steps, size, kit)
        if text is None:
            chain = next_chains[best]
        else:
            (chain,) = yield from take_steps([chain], [text], kit, **limits)
    if ends_at_limit(chain):
        yield AT_LIMIT
    return chain.answer


def first_step_value(values: Sequence[float]) -> float:
    """Return the value of a path's first step, moved towards those of later steps.

    V_t <- V_t + RATE (V_{t+1} - V_t), from the last step back to the first. The last
    step that counts is the first one that is not RISE above the step before it.

    Args:
        values: values of the path's steps, at least one.
    """
    rises = np.diff(values) >= RISE
    last = len(rises) if rises.all() else int(rises.argmin()) + 1
    value = values[last]
    for t in reversed(range(last)):
        value = values[t] + RATE * (value - values[t])
    return float(value)


def _rewrite_step(question, steps, size, kit):
    """Return a better text for step number `size` of a path; None if there is none."""
    state = STATE.format(
        question=question.text,
        steps="\n".join(steps[:size]) or "none",
        step=steps[size],
        later="\n".join(steps[size + 1 :]) or "none",
    )
    criticism = yield from ask_chat(_chat(state + CRITICISE), kit.thought_tokens)
    if criticism is None:
        return None
    prompt = state + REWRITE.format(criticism=criticism)
    reply = yield from ask_chat(_chat(prompt), kit.thought_tokens)
    match = STEP.search(reply or "")
    if match is None:
        return None
    # A chain begins by saying whether follow-ups are needed, as in the examples.
    return f"\n{match[0]}" if size else f" Yes.\n{match[0]}"


def _chat(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def label_steps(question: Question, kit: Kit, *, golden: Mapping[str, Sequence[str]]):
    """Sample chains and continuations of each step; return a line of a labels file.

    Args:
        question: question of the training split.
        golden: {id of a question: its golden answers}; other programs never see them.
    """
    traces = [first_chain(question.text)] * TRACES
    chains_by_steps: dict[tuple[str, ...], Chain] = {}
    while any(trace.goes_on for trace in traces):
        traces = yield from extend(traces, kit, max_steps=MAX_STEPS, top_k=0)
        chains_by_steps |= {trace.steps: trace for trace in traces}
    # A finished chain has only itself as its end.
    chains = chains_by_steps.values()
    counts = [CONTINUATIONS if c.goes_on else 1 for c in chains]
    endings = [c for c, n in zip(chains, counts, strict=True) for _ in range(n)]
    # All in one call: equal prompts get different samples there, but not across calls.
    while any(end.goes_on for end in endings):
        endings = yield from extend(endings, kit, max_steps=MAX_STEPS, top_k=0)
    is_right = [
        exact_match(end.answer, golden[question.id], normalize=kit.normalize) > 0
        for end in endings
    ]
    by_chain = np.split(np.array(is_right), np.cumsum(counts)[:-1])
    row = LabelledSteps(
        question.text, tuple(chains_by_steps), tuple(float(x.mean()) for x in by_chain)
    )
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def read_step_labels(path: str) -> tuple[LabelledSteps, ...]:
    """Return the rows of a file that `label_steps` made.

    Raises:
        ValueError: the file cannot be read, a line is bad, there are no rows, or all
            chains have the same success.
    """
    return read_label_file(
        path,
        LabelledSteps,
        method="rearter",
        flag="label_steps",
        convert=labelled_chains,
        fault=_fault,
    )


def _fault(rows):
    """Return why no value can be learnt from these rows; "" if one can."""
    last_steps = [steps[-1] for row in rows for steps in row.chains]
    num = sum(STEP.search(step) is not None for step in last_steps)
    fault = fault_of_success(rate for row in rows for rate in row.success)
    return fault and (
        f"{fault}; {num} of {len(last_steps)} are a follow-up or a final answer, which "
        "the model learns from self_ask's examples"
    )


@functools.lru_cache(maxsize=4)
def _fit_step_values(path, embed, embed_passages, penalty):
    """Return the texts of the labelled questions, and the value of steps; cached."""
    rows = read_step_labels(path)
    values = fit_values(rows, embed, embed_passages, penalty)
    return frozenset(x.question for x in rows), values

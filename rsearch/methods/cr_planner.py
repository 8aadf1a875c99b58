"""CR-Planner: plan with critics of the next sub-goal and of its outcomes.

Li et al., arXiv 2410.01428. The critics learn from labels that the evaluated model
makes on training questions:

    python -m rsearch.evaluate --workdir=RUN --sets=world:train --label_actions=FILE \\
        --config.eval.temperature=0.7
    python -m rsearch.evaluate --workdir=RUN --methods=cr_planner:labels=FILE \\
        --config.eval.temperature=0.7
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rsearch.data.labels import fault_of_success, labelled_chains, read_label_file
from rsearch.llm.requests import Search
from rsearch.methods.base import (
    AT_LIMIT,
    Kit,
    ask_chat,
    ask_chats,
    check_settings,
    vector_of,
)
from rsearch.methods.reading import (
    MARK,
    direct_messages,
    marked_answer,
    shown_passages,
    text_messages,
)
from rsearch.methods.step_values import LabelledSteps, fit_values
from rsearch.text.normalize import exact_match
from rsearch.types import Question

SUB_GOAL, RATIONALE, QUERY, DOCUMENT = "sub_goal", "rationale", "query", "document"
CRITICS = (SUB_GOAL, RATIONALE, QUERY, DOCUMENT)
# {what a sub-goal observes: the authors' words for it}. Ties go to the first.
SUB_GOALS = {
    RATIONALE: "The next step is to generate a rationale",
    QUERY: "The next step is to generate a query",
    DOCUMENT: "The next step is to retrieve a document",
}
CANDIDATES, MAX_STEPS = 3, 8  # per sub-goal, and per plan
SIMULATIONS, EXPLORATION = 48, 1.0  # per training question; c of UCB1
STATE = "Question: {question}\n\nSteps so far:\n{steps}\n\n"
RATIONALE_PROMPT = (
    "Write the next step of reasoning towards the answer, in one or two sentences, and "
    "no step after it. If it is the last one, end with one line that says "
    f"'{MARK}' and the answer alone."
)
QUERY_PROMPT = (
    "More information is needed to take or to verify the next step of reasoning. Write "
    "a query for a search engine that finds it, in one line, and do not output any "
    "other words."
)


class PlanStep(NamedTuple):
    """A step of a plan: an observation.

    Attributes:
        kind: key of SUB_GOALS.
        text: text as the model and the critics read it.
    """

    kind: str
    text: str


State = tuple[PlanStep, ...]
"""The observations so far, oldest first."""


@dataclasses.dataclass(frozen=True)
class LabelledActions:
    """A training question, and actions towards its answer.

    Attributes:
        critics: for each action, the critic in CRITICS that values it.
        chains: for each action, the texts that the critic reads, the action last.
        success: for each action, the share of simulations through it that end in an
            exact match.
    """

    question: str
    critics: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    success: tuple[float, ...]


def cr_planner(
    question: Question,
    kit: Kit,
    *,
    labels: str = "",
    candidates: int = CANDIDATES,
    steps: int = MAX_STEPS,
    penalty: float = 1e-2,
    top_k: int = 0,
):
    """Take the best sub-goal and the best of its outcomes until there is an answer.

    One critic chooses between a rationale, a query and a document. A critic for each
    kind then chooses between samples of the model or passages of a search. A search is
    made with the last query, or with the question, and only once for each. A rationale
    with the mark of `cot` gives the answer. If no step does, `rag`'s reader is asked
    below all steps: without any step this is `direct`, and after only a document it is
    `rag` with one passage. Logistic regressions on vectors of the run's search encoder
    replace the paper's critics, each a tuned Llama-3.1-8B. They learn from the success
    of each action instead of pairs of actions.

    Args:
        labels: file made by `label_actions`.
        candidates: number of samples of a rationale or a query.
        steps: number of sub-goals to take, at most.
        penalty: penalty on the squared weights of the regressions; above 0.
        top_k: number of a search's passages that are candidates; 0 takes all.

    Raises:
        ValueError: a setting is out of range; see also `read_action_labels` and
            `base.vector_of`.
    """
    check_settings(
        "cr_planner",
        ("candidates", candidates, candidates >= 1, "at least 1"),
        ("steps", steps, steps >= 0, "at least 0"),
        ("penalty", penalty, 0 < penalty < np.inf, "above 0"),
    )
    labelled_texts, critics = _fit_critics(
        labels, kit.embed, kit.embed_passages, penalty
    )
    vector = vector_of(question, labelled_texts, kit)

    def best_index(critic: str, state: State, texts: Sequence[str]) -> int:
        if len(texts) == 1:
            return 0
        chains = [(*critic_inputs(critic, state), text) for text in texts]
        return int(np.argmax(critics[critic](vector, chains)))

    state: State = ()
    for _ in range(steps):
        kinds = allowed_kinds(state)
        kind = kinds[best_index(SUB_GOAL, state, [SUB_GOALS[k] for k in kinds])]
        texts = yield from _sample_texts(question, state, kind, kit, candidates, top_k)
        state += (PlanStep(kind, texts[best_index(kind, state, texts)]),)
        if (answer := _answer_in(state)) is not None:
            return answer
    if state:
        yield AT_LIMIT
    return (yield from _conclude(question, state, kit))


def allowed_kinds(state: State) -> list[str]:
    """Return the kinds that may come next, in the order of SUB_GOALS.

    A query is searched only once, since its passages would be the same.
    """
    kinds = [x.kind for x in state if x.kind != RATIONALE]
    is_searched = kinds[-1:] == [DOCUMENT]
    return [kind for kind in SUB_GOALS if not (kind == DOCUMENT and is_searched)]


def critic_inputs(critic: str, state: State) -> tuple[str, ...]:
    """Return what a critic reads before an action, besides the question.

    Args:
        critic: critic in CRITICS. For a sub-goal it reads all observations, for a
            rationale the rationales, for a query the last rationale, and for a document
            also the last query.
    """
    if critic == SUB_GOAL:
        return tuple(x.text for x in state)
    if critic == RATIONALE:
        return tuple(x.text for x in state if x.kind == RATIONALE)
    last = {x.kind: (x.text,) for x in state}
    rationale = last.get(RATIONALE, ())
    return rationale if critic == QUERY else rationale + last.get(QUERY, ())


def _sample_texts(question, state, kind, kit, candidates, top_k):
    """Return the texts of candidates for the next observation, at least one."""
    if kind == DOCUMENT:
        queries = [x.text for x in state if x.kind == QUERY]
        query = queries[-1].removeprefix("Query:").strip() if queries else ""
        (passages,) = yield Search((query or question.text,), top_k or None)
        number = 1 + sum(x.kind == DOCUMENT for x in state)
        texts = [shown_passages(kit, (p,), first=number) for p in passages]
        return texts or ["Nothing was found."]
    steps_text = "\n".join(x.text for x in state) or "none"
    text = STATE.format(question=question.text, steps=steps_text)
    text += RATIONALE_PROMPT if kind == RATIONALE else QUERY_PROMPT
    chat = [{"role": "user", "content": text}]
    replies = yield from ask_chats([chat] * candidates, kit.thought_tokens)
    texts = [reply or "" for reply in replies]
    if kind == RATIONALE:
        return [f"Thought: {text}" for text in texts]
    lines = [text.partition("\n")[0] for text in texts]
    return [f"Query: {line}" for line in lines]


def _answer_in(state):
    """Return the answer that the last observation holds, or None."""
    if state and state[-1].kind == RATIONALE:
        # A rationale may end at the mark.
        return marked_answer(state[-1].text) or None
    return None


def _conclude(question, state, kit):
    """Return the model's answer, given the observations so far."""
    text = "\n".join(x.text for x in state)
    if state:
        messages = text_messages(kit, question.text, text)
    else:
        messages = direct_messages(kit, question.text)
    return (yield from ask_chat(messages, kit.answer_tokens))


@dataclasses.dataclass
class Node:
    """An action of a search tree.

    Attributes:
        critic: critic in CRITICS that values it; "" for the root.
        chain: texts that the critic reads, the action last.
        kind: what a sub-goal observes next; "" after an observation.
        children: the next actions; () before they are known, or at the end of a plan.
        visits: number of simulations through it.
        successes: number of these that succeeded.
    """

    critic: str
    chain: tuple[str, ...]
    state: State
    kind: str = ""
    children: Sequence["Node"] = ()
    visits: int = 0
    successes: int = 0


def label_actions(question: Question, kit: Kit, *, golden: Mapping[str, Sequence[str]]):
    """Search a tree of actions by UCB1; return a line of a labels file.

    A simulation asks for the answer given the observations of a leaf.

    Args:
        question: question of the training split.
        golden: {id of a question: its golden answers}; other programs never see them.
    """
    root = Node("", (), ())
    nodes: list[Node] = []
    for _ in range(SIMULATIONS):
        path = [root]
        while True:
            node = path[-1]
            is_new = node.critic and not node.kind and not node.visits
            if not node.children and not is_new:
                node.children = yield from _children(node, question, kit)
                nodes += node.children
            if not node.children:
                break
            path.append(max(node.children, key=functools.partial(ucb1, node.visits)))
        # A visited leaf keeps its result: the same prompt would get the same sample.
        if node.visits:
            is_right = node.successes > 0
        else:
            answer = _answer_in(node.state)
            if answer is None:
                answer = yield from _conclude(question, node.state, kit)
            golden_answers = golden[question.id]
            is_right = exact_match(answer, golden_answers, normalize=kit.normalize) > 0
        for node in path:
            node.visits += 1
            node.successes += is_right
    visited_nodes = [node for node in nodes if node.visits]
    row = LabelledActions(
        question.text,
        tuple(node.critic for node in visited_nodes),
        tuple(node.chain for node in visited_nodes),
        tuple(node.successes / node.visits for node in visited_nodes),
    )
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def ucb1(parent_visits: int, node: Node) -> float:
    """Return the upper confidence bound of a node's success; inf without visits."""
    if not node.visits:
        return math.inf
    bonus = EXPLORATION * math.sqrt(math.log(parent_visits) / node.visits)
    return node.successes / node.visits + bonus


def _children(node, question, kit):
    """Return the actions that follow a node; none at the end of a plan."""
    state = node.state
    if node.kind:
        texts = yield from _sample_texts(question, state, node.kind, kit, CANDIDATES, 0)
        inputs = critic_inputs(node.kind, state)
        return [
            Node(node.kind, (*inputs, text), (*state, PlanStep(node.kind, text)))
            for text in texts
        ]
    if len(state) == MAX_STEPS or _answer_in(state) is not None:
        return ()
    inputs = critic_inputs(SUB_GOAL, state)
    return [
        Node(SUB_GOAL, (*inputs, SUB_GOALS[kind]), state, kind)
        for kind in allowed_kinds(state)
    ]


def read_action_labels(path: str) -> tuple[LabelledActions, ...]:
    """Return the rows of a file that `label_actions` made.

    Raises:
        ValueError: the file cannot be read, a line is bad, or a critic has no actions,
            or only actions with the same success.
    """
    return read_label_file(
        path,
        LabelledActions,
        method="cr_planner",
        flag="label_actions",
        convert=_check_fields,
        fault=_fault,
    )


def _check_fields(critics, chains, success):
    """Return a row's fields after its question; ValueError for wrong types."""
    chains, success = labelled_chains(chains, success)
    is_list = isinstance(critics, list) and len(critics) == len(chains)
    if not is_list or not all(critic in CRITICS for critic in critics):
        raise ValueError(
            f"critics: expected {', '.join(CRITICS)}, one of them for each chain"
        )
    return tuple(critics), chains, success


def _fault(rows):
    """Return which critic cannot learn from these rows, and why; "" if all can."""
    for critic in CRITICS:
        if fault := fault_of_success(
            r for x in rows for r in _labels_for(x, critic).success
        ):
            return f"{critic}: {fault}"
    return ""


def _labels_for(row, critic):
    """Return the labels of a row that are for this critic."""
    pairs = zip(row.critics, row.chains, row.success, strict=True)
    members = [(chain, rate) for name, chain, rate in pairs if name == critic]
    return LabelledSteps(
        row.question,
        tuple(chain for chain, _ in members),
        tuple(rate for _, rate in members),
    )


@functools.lru_cache(maxsize=4)
def _fit_critics(path, embed, embed_passages, penalty):
    """Return the texts of the labelled questions, and the critics; cached."""
    rows = read_action_labels(path)
    critics = {}
    for critic in CRITICS:
        labels = [_labels_for(x, critic) for x in rows]
        critics[critic] = fit_values(labels, embed, embed_passages, penalty)
    return frozenset(x.question for x in rows), critics

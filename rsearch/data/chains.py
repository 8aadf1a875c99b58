"""Filter ReaRAG's chains, find their gold data, and prompt for the ablation's chains.

Source: ReaRAG (arXiv 2503.21729), section 3.2, Algorithm 3 and the prompt P_ablat of
Appendix B.
"""

import json
import re
from collections.abc import Mapping, Sequence

from rsearch.data.curation import Attempt, first_step, is_right
from rsearch.data.demonstrations import Demonstration
from rsearch.data.paragraphs import marked_paragraphs
from rsearch.data.records import check_object, check_string, check_text, quote
from rsearch.protocols.base import Protocol
from rsearch.tools.search import search_use
from rsearch.types import (
    SEARCH,
    Answer,
    Malformed,
    Messages,
    Outcome,
    Passage,
    Question,
    ToolCall,
)

THOUGHT = re.compile(r"^[^\S\n]*Thought\s+(\d+):", re.MULTILINE)
STEP = re.compile(r"^Thought\s+\d+:", re.MULTILINE)
OBSERVATION = re.compile(r"^Observation\s+\d+:", re.MULTILINE)
COMPLETED = "<|completed|>"

INSTRUCTION = """\
You are given Question, Ground-truth answer, and Decompositions, your task is to give \
reasoning process interleaving Thought, Action, Observation steps. Thought can reason \
about the current situation, and Action are in the form of function, there are two \
types:
(1) search
{
    "name": "search",
    "description": "It can help you find useful information through the internet or \
local knowledge base. You can use this tool to access external knowledge.",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {
                "description": "what you want to search"
            }
        },
        "required": ["query"]
    }
}

(2) finish
{
    "name": "finish",
    "description": "You can use this function to make a conclusion from the reasoning \
process and give the final answer. The reasoning process is completed after this \
'finish' function is called",
    "parameters": {
        "type": "object",
        "properties": {
            "answer": {
                "description": "the final answer"
            }
        },
        "required": ["answer"]
    }
}

After 'finish' function being called, the reasoning process is completed, then marked \
with <|completed|>. Please follow the format strictly.

Here are in-context examples:
"""
"""The wording of P_ablat."""

REASONING = """\
Thought 1: I need the county of Yuma's Library District.
Action 1: {"function": "search", "parameters": {"query": "Yuma located in the \
administrative territorial entity"}}
Observation 1: Yuma County
Thought 2: Next is the state in which Yuma County lies.
Action 2: {"function": "search", "parameters": {"query": "state of Yuma County"}}
Observation 2: Arizona
Thought 3: Now I need the second largest city of Arizona.
Action 3: {"function": "search", "parameters": {"query": "second largest city in \
Arizona"}}
Observation 3: Tucson
Thought 4: What is left is the wettest year of Tucson.
Action 4: {"function": "search", "parameters": {"query": "Tucson's wettest year"}}
Observation 4: 1905
Thought 5: The wettest year was 1905.
Action 5: {"function": "finish", "parameters": {"answer": "1905"}}
<|completed|>"""
EXAMPLE_PARTS = (
    ("Yuma located in the administrative territorial entity", "Yuma County"),
    ("Yuma County located in the administrative territorial entity", "Arizona"),
    ("What is the second largest city in Arizona?", "Tucson"),
    ("Tucson's wettest year?", "1905"),
)
EXAMPLE = Question(
    "example",
    "What was the wettest year in the second largest city in the state where Yuma's "
    "Library District is located?",
    ("1905",),
)
"""P_ablat's example. The paper prints only the first and the last of its parts, without
their contexts and the reasoning; the rest is written for this prompt."""


def chain_fault(
    protocol: Protocol, question: Question, attempt: Attempt, *, normalize: str
) -> str:
    """Return why a chain of thoughts and actions is not learnt; "" if it is.

    A chain is learnt if its thoughts are numbered 1, 2, 3, ..., every step but the last
    searches and is followed by an observation, and the last step gives an answer that
    has a word in common with a golden one. Source: ReaRAG (arXiv 2503.21729) section
    3.2 and the filter of its code.
    """
    if attempt.outcome != Outcome.ANSWERED:
        return "unfinished" if attempt.outcome.is_signal else attempt.outcome.value
    actions = [protocol.parse(turn) for turn in attempt.turns]
    if any(not isinstance(action, ToolCall) for action in actions[:-1]):
        return "structure"
    if not all(attempt.observations[:-1]) or not isinstance(actions[-1], Answer):
        return "structure"
    numbers = [THOUGHT.findall(turn) for turn in attempt.turns]
    if numbers != [[str(i)] for i in range(1, len(numbers) + 1)]:
        return "numbering"
    has_overlap = is_right(question, attempt, measure="f1", normalize=normalize)
    return "" if has_overlap else "no overlap"


def chain(protocol: Protocol, question: Question, attempt: Attempt) -> Demonstration:
    """Return the chain with its observations, to be learnt without an engine.

    Args:
        attempt: the chain, which has no `chain_fault`.
    """
    observations = tuple(
        protocol.observe(use.call, use.result).content for use in attempt.tool_uses
    )
    return Demonstration(question, attempt.turns, observations=observations)


def gold_passages(
    question: Question, titles: Sequence[str], known: Mapping[str, Passage]
) -> tuple[Passage, ...]:
    """Return the gold passages of a question.

    Args:
        question: the question, whose metadata may hold the passages themselves: as
            MuSiQue's `paragraphs`, as HotpotQA's `context` of titles and sentences with
            `supporting_facts` (pairs as published, or FlashRAG's objects), or as DPR's
            `positive_ctxs`.
        titles: titles of the gold passages, if known from elsewhere.
        known: {title: Passage} for those titles.

    Raises:
        ValueError: the gold passages are not known, or a field that names them is
            malformed.
    """
    if titles:
        passages = [known[title] for title in dict.fromkeys(titles) if title in known]
    else:
        paragraphs = marked_paragraphs(question.metadata)
        passages = [
            Passage(f"gold {i}", text)
            for i, (text, is_gold) in enumerate(paragraphs)
            if is_gold
        ]
    if not passages:
        raise ValueError(
            f"question {question.id}: its gold passages are not known: expected "
            "paragraphs of which some have is_supporting (MuSiQue), context and "
            "supporting_facts that share a title (HotpotQA), positive_ctxs (DPR's NQ), "
            "or config.curate.observations = 'engine'; config.data.on_bad = 'skip' "
            "leaves it out"
        )
    return tuple(passages)


def decomposition(question: Question, known: Sequence[tuple]) -> list[dict]:
    """Return the sub-questions, each as {"question", "answer", "context"}.

    Args:
        question: the question, whose metadata may hold MuSiQue's
            `question_decomposition`.
        known: (sub-question, answer, context) of each, if the world has them.

    Raises:
        ValueError: the sub-questions are not known, or a field of one is malformed.
    """
    names = ("question", "answer", "context")
    if known:
        return [dict(zip(names, record, strict=True)) for record in known]
    records = question.metadata.get("question_decomposition")
    if not records:
        raise ValueError(
            f"question {question.id}: its decomposition is not known: expected "
            "metadata with question_decomposition, a list of {question, answer}"
        )
    if not isinstance(records, list):
        raise ValueError(
            "field question_decomposition: expected a list of {question, answer}, got "
            f"{quote(records)}"
        )
    return [
        _sub_question(record, f"question_decomposition[{i}]")
        for i, record in enumerate(records)
    ]


def _sub_question(record, field):
    """Return a sub-question with its answer and its context."""
    check_object(record, field, ("question", "answer"))
    texts = {n: check_text(record[n], f"{field}.{n}") for n in ("question", "answer")}
    context = check_string(record.get("context") or "", f"{field}.context")
    return {**texts, "context": context}


def ablation_messages(question: Question, parts: Sequence[dict]) -> Messages:
    """Return the chat that asks for a chain, given its answer and decomposition."""
    names = ("question", "answer", "context")
    example_parts = [
        dict(zip(names, (*pair, "Some context"))) for pair in EXAMPLE_PARTS
    ]
    system = INSTRUCTION + _task(EXAMPLE, example_parts) + REASONING
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": _task(question, parts)},
    ]


def _task(question, parts):
    """Return the request for a chain, in the form of P_ablat's example."""
    return (
        f"Question:\n{question.text}\nGround-truth answer:\n"
        f"{question.golden_answers[0]}\nDecompositions:\n"
        f"{json.dumps(list(parts), ensure_ascii=False, indent=1)}\n"
        "Reasoning process with function call:\n"
    )


def split_chain(protocol: Protocol, reply: str) -> Attempt:
    """Split a reply into its turns and the observations that it made up.

    Args:
        reply: alternating Thought, Action and Observation; any text is accepted.
    """
    reply = reply.partition(COMPLETED)[0]
    starts = [m.start() for m in STEP.finditer(reply)]
    steps = [reply[a:b] for a, b in zip(starts, [*starts[1:], len(reply)])]
    turns, observations, searches, answer, num_malformed = [], [], [], None, 0
    for step in steps:
        observation = OBSERVATION.search(step)
        end = observation.start() if observation else len(step)
        turn = first_step(protocol, step[:end].strip())
        text = step[observation.end() :].strip() if observation else ""
        turns.append(turn)
        observations.append(text)
        match protocol.parse(turn):
            case ToolCall(name, queries) if name == SEARCH:
                # The same form as an observation that a model writes from passages.
                hits = ((Passage("written", f"\n{text}"),),) * len(queries)
                searches.append(search_use(queries, hits))
            case Answer(answer_text):
                answer = answer_text
            case Malformed():
                num_malformed += 1
    outcome = Outcome.MALFORMED if answer is None else Outcome.ANSWERED
    parts = tuple(turns), tuple(observations), tuple(searches)
    return Attempt(*parts, answer, outcome, num_malformed)

"""ReaRAG: numbered Thought, Action and Observation; actions are function calls.

A turn is `Thought 1: ...` and `Action 1: ` with a fenced dict, {'function': 'search',
'parameters': {'query': ...}} or {'function': 'finish', 'parameters': {'answer': ...}}.
Such a dict is in Python's notation, not JSON; it is read as JSON first, then as a
Python literal, and never evaluated. The stop string is the end of a fenced dict.

How a turn is read: lines that begin with `Thought 1:`, `Action 1:` or `Observation 1:`,
with any number, divide it. Only the first action counts. Its dict is in the first ```
fence, without the fence's first line (the language); otherwise it is between the first
two backticks, and failing that it is the whole action. The public code would execute
every action of a turn, in the order of their numbers, and samples a turn again if
nothing can be read, twenty times in total; here a turn that cannot be read is malformed
and ends the rollout.

Observations are written by the engine (a model reads the passages), so their text comes
as the contents of passages. A chat template with the role `observation` frames them;
with other templates they are `Observation 1: ...`.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from rsearch.protocols.base import (
    Protocol,
    Step,
    checked_text,
    join_thoughts,
    replace_surrogates,
)
from rsearch.tools.search import search_call
from rsearch.types import Action, Answer, Malformed, Observation, Passage, ToolCall

HEADER = re.compile(r"^(Thought|Action|Observation)\s+\d+:", re.MULTILINE)
FENCE = "```"
SPAN = re.compile(r"`([^`]*)`")
STOP_STRING = "}\n```"
FUNCTIONS = {"search": "query", "finish": "answer"}  # name -> name of its parameter
MAX_CALL_CHARACTERS = 20_000  # characters of the longest dict that is read
MAX_SIGNS = 2_000  # most brackets and signs in it: Python's parser recurses at each

SYSTEM = """\
Your task is to solve a question answering task. To improve your solving accuracy, \
please conduct reasoning process interleaving Thought, Action, Observation steps. \
Thought can reason about the current situation, and Action are in the form of \
function, there are two types:

Available Functions:
(1) Search
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

(2) Finish
{
    "name": "finish",
    "description": "You can use this function to make a conclusion from the reasoning \
process and give the final answer. The reasoning process is completed after this \
`finish` function is called",
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

Please follow the format strictly."""


def parse(turn: str) -> Action:
    """Read the action of one turn by the rules at the top of this module.

    Args:
        turn: the text that the policy wrote in this turn, and nothing else. Any text is
            accepted.
    """
    headers = list(HEADER.finditer(turn))
    ends = [header.start() for header in headers[1:]] + [len(turn)]
    for header, end in zip(headers, ends):
        if header[1] == "Action":
            return _read_action(turn[header.end() : end])
    return Malformed("no line begins with 'Action 1:' or another number")


def _read_action(text: str) -> Action:
    """Read the action from the text after `Action 1:`."""
    _, fence, fenced_text = text.partition(FENCE)
    _, newline, fenced_text = fenced_text.partition("\n")
    if fence and newline:
        # The closing fence begins a line; one inside the dict, a single line, does not.
        call = read_literal(f"\n{fenced_text}".partition(f"\n{FENCE}")[0])
    else:
        span = SPAN.search(text)
        call = read_literal(span[1] if span else text)
    if not isinstance(call, dict) or not {"function", "parameters"} <= call.keys():
        return Malformed("the action is no dict with 'function' and 'parameters'")
    function, parameters = call["function"], call["parameters"]
    if not isinstance(function, str) or function not in FUNCTIONS:
        return Malformed(f"no function of {', '.join(FUNCTIONS)}")
    parameter = FUNCTIONS[function]
    value = parameters.get(parameter) if isinstance(parameters, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return Malformed(f"{function} has no text or number as its {parameter!r}")
    if isinstance(value, float) and not math.isfinite(value):  # json accepts NaN
        return Malformed(f"{function} has no finite number as its {parameter!r}")
    try:
        value = replace_surrogates(str(value)).strip()
    except ValueError:  # an integer with more digits than Python converts to text
        return Malformed(f"{function} has too long a number as its {parameter!r}")
    if function == "finish":
        return Answer(value)
    return search_call(value) if value else Malformed("empty query")


def read_literal(text: str) -> Any:
    """Return the value of a JSON text or a Python literal; None if it is neither.

    Nothing is evaluated: a text with names, calls or attributes yields None.
    """
    text = text.strip()
    if len(text) > MAX_CALL_CHARACTERS or sum(map(text.count, "([{-+~")) > MAX_SIGNS:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a literal warns.
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def render(action: ToolCall | Answer, number: int = 1) -> str:
    """Return the end of this turn with this action, which `parse` reads back.

    Raises:
        ValueError: more than one query, an empty one, space around a text, or half of
            a UTF-16 pair.
    """
    if isinstance(action, ToolCall) and len(action.arguments) != 1:
        raise ValueError(f"a turn holds one query, not {len(action.arguments)}")
    is_search = isinstance(action, ToolCall)
    function = "search" if is_search else "finish"
    value = action.arguments[0] if is_search else action.text
    call = {"function": function, "parameters": {FUNCTIONS[function]: value}}
    return checked_text(f"Action {number}: \n```\n{call}\n```", action, parse)


def _write(step: Step) -> str:
    action = render(step.action, step.number)
    text = f"Thought {step.number}: {join_thoughts(step)}\n{action}"
    return checked_text(text, step.action, parse)


def _show_passages(queries: Sequence[str], passages: Sequence[Sequence[Passage]]):
    contents = [passage.contents for hits in passages for passage in hits]
    content = replace_surrogates("\n\n".join(contents).strip())
    return Observation("\nObservation {turn}: ", content, "\n\n")


REARAG = Protocol(
    name="rearag",
    system=SYSTEM,
    user="{question}",
    add_question_mark=False,
    stop_strings=(STOP_STRING,),
    parse=parse,
    show_passages=_show_passages,
    render=render,
    write=_write,
    invalid_message=None,
    observation_role="observation",
)
"""ReaRAG (2025), Appendix B: "Instruction prompt P for fine-tuning and inference"."""

"""ReaRAG: function calls between numbered headers."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.rearag import CHAINS_EXAMPLE
from rsearch.protocols.base import Step
from rsearch.protocols.rearag import parse, read_literal, render
from rsearch.protocols.table import PROTOCOLS
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Malformed,
    Passage,
    ToolCall,
)

PROTOCOL = PROTOCOLS["rearag"]
SEARCH = "{'function': 'search', 'parameters': {'query': 'who is it'}}"
FINISH = '{"function": "finish", "parameters": {"answer": "X"}}'
WHO = search_call("who is it")


@pytest.mark.parametrize(
    "turn, action",
    [
        (f"Thought 1: so\nAction 1: \n```\n{SEARCH}\n```", WHO),
        (f"Thought 1: so\nAction 1: \n```\n{FINISH}\n```", Answer("X")),
        (f"Action 7:\n```json\n{FINISH}\n``` and more", Answer("X")),
        (f"Action 1: {SEARCH}", WHO),
        (f"Action 1: {SEARCH}\nObservation 1: found\nAction 2: {FINISH}", WHO),
        (f"Action 1: `{SEARCH}`", WHO),
        (f"Action\t12: {SEARCH}", WHO),
        # The numbers are ignored, and the first action counts.
        (f"Action 2: {FINISH}\nAction 1: {SEARCH}", Answer("X")),
        (f"Action 1: \n```\n{FINISH}", Answer("X")),
    ],
)
def test_a_turn_is_parsed_as_its_first_call(turn, action):
    assert parse(turn) == action


@pytest.mark.parametrize(
    "parameters, text",
    [
        ('{"answer": "O\'Neill"}', "O'Neill"),
        (r"{'answer': 'O\'Neill é'}", "O'Neill é"),
        ('{"answer": "a", "why": null, "sure": true}', "a"),
        ("{'answer': 'a', 'why': None, 'sure': True}", "a"),
        ('{"answer": 1905}', "1905"),
        ("{'answer': 3.5}", "3.5"),
        ("{'answer': ' '}", ""),
        ("{'answer':\n 'a'}", "a"),
        (r'{"answer": "\u00e9\ud83d\ude00"}', "é\U0001f600"),
        (r'{"answer": "\ud83d"}', "\ufffd"),
        (r"{'answer': '\d'}", r"\d"),
    ],
)
def test_a_call_is_json_or_a_python_literal(parameters, text):
    quote = parameters[1]
    call = f"{{{quote}function{quote}: {quote}finish{quote}, "
    call += f"{quote}parameters{quote}: {parameters}}}"
    assert parse(f"Action 1: {call}") == Answer(text)
    assert parse(f"Action 1: \n```\n{call}\n```") == Answer(text)


@pytest.mark.fault(25, "invalid JSON", "JSON with NaN")
@pytest.mark.parametrize(
    "turn",
    [
        "",
        "I think it is Rome.",
        SEARCH,
        f"Thought: so\nAction: {SEARCH}",  # No numbering: the public code sees no step.
        f"Thought 1: so {SEARCH}",
        f"so Action 1: {SEARCH}",  # Not at the beginning of a line.
        "Thought 1: so\nAction 1:",
        f"Action 1: ```{SEARCH}\n```",  # The fence's first line is its language.
        "Action 1: {'function': 'search', 'parameters': {'query': 'O'Neill'}}",
        "Action 1: {'name': 'search', 'parameters': {'query': 'a'}}",
        "Action 1: {'function': 'search'}",
        "Action 1: {'function': 'search', 'parameters': 'a'}",
        "Action 1: {'function': 'search', 'parameters': {'answer': 'a'}}",
        "Action 1: {'function': 'search', 'parameters': {'query': ['a']}}",
        "Action 1: {'function': 'search', 'parameters': {'query': True}}",
        "Action 1: {'function': 'search', 'parameters': {'query': ' '}}",
        'Action 1: {"function": "search", "parameters": {"query": NaN}}',
        'Action 1: {"function": "finish", "parameters": {"answer": -Infinity}}',
        "Action 1: {'function': 'finish', 'parameters': {'answer': 1e999}}",
        "Action 1: {'function': 'search', 'parameters': " + "[" * 100_000,
        "Action 1: {'function': 'open', 'parameters': {'query': 'a'}}",
        "Action 1: {'function': ['search'], 'parameters': {'query': 'a'}}",
        "Action 1: ['search', 'a']",
        "Action 1: null",
        "Action 1: search('a')",
        # Python reads this integer, and refuses to write it out.
        "Action 1: {'function': 'finish', 'parameters': {'answer': 0x%s}}"
        % ("f" * 9000),
    ],
)
def test_a_turn_without_a_call_is_malformed_and_says_why(turn):
    action = parse(turn)
    assert isinstance(action, Malformed) and action.reason
    assert PROTOCOL.invalid_message is None


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "{'a': open('/etc/passwd').read()}",
        "().__class__.__bases__",
        "[x for x in (1,)]",
        "f'{1}'",
        "lambda: 1",
        "{[1]: 2}",
        "9" * 5000,
        "(" * 2000,
        "-" * 2000 + "1",
        "~" * 10_000,
        "1" + "+1" * 1900,
        "[" * 100_000,
        "{'a':" * 2000,
        "\x00",
        "'\ud800" + "x" * 30_000,
    ],
)
def test_nothing_but_a_literal_is_read(text):
    assert read_literal(text) is None


@pytest.mark.parametrize(
    "query",
    [
        "Who's who?",
        'the "Nabbes" of O\'Neill',
        "```\n}\n```",
        "a\nAction 2: x\nThought 3:",
        "a\\b\\n\u2028\x85é日\U0001f600\x00",
        "{'function': 'finish'}",
        "}\n```",
    ],
)
def test_any_query_is_quoted_so_that_it_is_read_back(query):
    assert parse(render(search_call(query))) == search_call(query)
    turn = PROTOCOL.write(Step(3, "So.", search_call(query)))
    assert turn.count("}\n```") == 1 and turn.endswith("}\n```")


@given(st.text(st.characters(exclude_categories=["Cs"])).map(str.strip))
def test_json_and_python_literals_are_parsed_alike(text):
    call = {"function": "finish", "parameters": {"answer": text}}
    for dumped in (json.dumps(call), json.dumps(call, ensure_ascii=False), repr(call)):
        assert parse(f"Action 1: \n```\n{dumped}\n```") == Answer(text)


def test_a_step_is_written_like_the_published_ones():
    step = Step(2, "I know who.", search_call("Where was Thomas Nabbes educated?"))
    assert PROTOCOL.write(step) == (
        "Thought 2: I know who.\nAction 2: \n```\n{'function': 'search', "
        "'parameters': {'query': 'Where was Thomas Nabbes educated?'}}\n```"
    )
    with pytest.raises(ValueError, match="read as"):
        PROTOCOL.write(Step(2, "\nAction 1: no", Answer("x")))
    with pytest.raises(ValueError, match="one query, not 2"):
        render(search_call("a", "b"))


def test_an_observation_is_the_text_that_the_search_wrote():
    shown = PROTOCOL.show_passages(["q"], [(Passage("1", "It is Rome."),)])
    assert shown.before == "\nObservation {turn}: "
    assert (shown.content, shown.after) == ("It is Rome.", "\n\n")
    assert PROTOCOL.observation_role == "observation"


def test_the_prompt_is_the_papers():
    system, user = PROTOCOL.messages("who?")
    assert user == {"role": "user", "content": "who?"}
    assert system["content"].startswith("Your task is to solve a question answering")
    assert system["content"].endswith("Please follow the format strictly.")
    first, second = (
        system["content"].partition("(1) Search\n")[2].split("\n\n(2) Finish\n")
    )
    schemas = [json.loads(first), json.loads(second.rpartition("\n\n")[0])]
    assert [schema["name"] for schema in schemas] == ["search", "finish"]
    needed = [schema["parameters"]["required"] for schema in schemas]
    assert needed == [["query"], ["answer"]]


def test_the_example_in_the_prompt_for_chains_follows_this_protocol():
    steps = re.findall(r"Thought.*?\n```\n.*?\n```", CHAINS_EXAMPLE, re.DOTALL)
    actions = [parse(step) for step in steps]
    assert actions[1] == search_call("Carol Reed birthplace")
    assert [type(a) for a in actions] == [ToolCall] * 4 + [Answer]

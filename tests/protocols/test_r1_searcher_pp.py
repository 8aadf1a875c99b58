r"""R1-Searcher++: internal and external tags, and the answer in \boxed{}."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsearch.protocols.base import Step
from rsearch.protocols.r1_searcher_pp import boxed, parse, render
from rsearch.protocols.table import PROTOCOLS
from rsearch.tools.search import search_call
from rsearch.types import (
    Answer,
    Malformed,
    Passage,
)

PROTOCOL = PROTOCOLS["r1_searcher_pp"]
BEGIN, END = "<|begin_external_search|>", "<|end_external_search|>"
INTERNAL = "<|begin_internal_answer|> It is in Rome. <|end_internal_answer|>"


@pytest.mark.parametrize(
    "turn, action",
    [
        (f"{BEGIN} river city{END}", search_call("river city")),
        (
            f'{INTERNAL} then {BEGIN}a{BEGIN} "b"  c {END} more',
            search_call("b c"),
        ),
        (r"Therefore, the answer is \boxed{Jango Fett}.", Answer("Jango Fett")),
        (r"Therefore, the answer is \\boxed{Jango Fett}.", Answer("Jango Fett")),
        (rf"{INTERNAL} \boxed{{Rome}}", Answer("Rome")),
        # A search pauses the turn, so a box before it is no final answer.
        (rf"\boxed{{Rome}} or {BEGIN}a{END}", search_call("a")),
        (rf"{BEGIN} unfinished \boxed{{Rome}}", Answer("Rome")),
    ],
)
def test_a_search_pauses_the_turn_and_a_box_gives_the_answer(turn, action):
    assert parse(turn) == action


@pytest.mark.parametrize(
    "turn",
    [
        "",
        INTERNAL,
        f"{BEGIN} {END}",
        f"a{END}",
        rf"a{END} \boxed{{Rome}}",
        r"\boxed{Rome",
        r"boxed{Rome}",
        r"\boxed Rome",
        r"\fbox{Rome}",
    ],
)
def test_anything_else_ends_the_rollout(turn):
    assert isinstance(parse(turn), Malformed)
    assert PROTOCOL.invalid_message is None


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{ a } and \boxed{b}", "b"),
        (r"\boxed{a{b}{c}d}", "a{b}{c}d"),
        (r"\boxed{\text{a}}", r"\text{a}"),
        (r"\boxed{\boxed{a} b}", "a"),
        (r"} { \boxed{a} {", "a"),
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed{a \boxed{b} c", "b"),
        (r"\boxed{}", ""),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{a}}", "a"),
        ("no box {a}", None),
    ],
)
def test_braces_are_matched(text, inside):
    assert boxed(text) == inside


def scanned(text):
    """Return the last box whose braces close, trying every start from the back."""
    for start in reversed(range(len(text))):
        if text.startswith(r"\boxed{", start):
            depth = 0
            for end in range(start + len(r"\boxed"), len(text)):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                if depth == 0:
                    return text[start + len(r"\boxed{") : end].strip()
    return None


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "a", " "])).map("".join))
def test_braces_are_matched_as_a_slow_scan_does(text):
    assert boxed(text) == scanned(text)


@pytest.mark.parametrize(
    "action",
    [
        Answer("a}"),
        Answer("{a"),
        Answer(r"\boxed{a}"),
        search_call("a", "b"),
        search_call(""),
    ],
)
def test_an_action_that_would_be_read_differently_is_not_rendered(action):
    with pytest.raises(ValueError, match=r"query|read as"):
        render(action)


def test_recalled_knowledge_is_written_between_internal_tags():
    step = Step(1, "So.", Answer("Rome"), internal="It is in Rome.")
    assert PROTOCOL.write(step) == rf"{INTERNAL} So. \boxed{{Rome}}"
    assert "internal" not in PROTOCOL.write(Step(1, "So.", Answer("Rome")))
    for text in ("<|end_internal_answer|>", "<|begin_internal_answer|>"):
        with pytest.raises(ValueError, match="internal tags"):
            PROTOCOL.write(Step(1, text, Answer("Rome"), internal="x"))


def test_only_a_search_stops_the_policy():
    assert PROTOCOL.stop_strings == (END,)


def test_results_are_numbered_lines():
    shown = PROTOCOL.show_passages(["q"], [(Passage("1", "Paris\nA city."),)])
    assert shown.before + shown.content + shown.after == (
        "\n\n<|begin_search_result|>\n(1)Paris A city.\n<|end_search_result|>\n\n"
    )


def test_the_prompt_names_both_tools_and_the_box():
    system, user = PROTOCOL.messages("who?")
    assert user["content"] == "Question: who?"
    assert "MUST choose one of the following two tools" in system["content"]
    assert system["content"].endswith(r"in the format \boxed{YOUR_ANSWER}.")

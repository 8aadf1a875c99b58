r"""ReSearch: tags around searches and passages, and the answer in \boxed{}."""

import pytest

from rsearch.protocols.base import Step
from rsearch.protocols.table import PROTOCOLS
from rsearch.tools.search import search_call
from rsearch.types import Answer, Malformed, Passage

PROTOCOL, FOR_BASE = PROTOCOLS["research"], PROTOCOLS["research_base"]
parse, render = PROTOCOL.parse, PROTOCOL.render
END = "</answer>"


@pytest.mark.parametrize(
    "turn, action",
    [
        ("<think> a </think> <search> river city </search>", search_call("river city")),
        # Table 1: "The final answer is \boxed{answer here}".
        (
            rf"<think> b </think> <answer> The final answer is \boxed{{Rome}} {END}",
            Answer("Rome"),
        ),
        (rf"<answer> It is \[ \boxed{{Jango Fett}} \] {END}", Answer("Jango Fett")),
        (rf"<answer> \boxed{{one}} or \boxed{{two}} {END}", Answer("two")),
        (rf"\boxed{{Rome}} <answer> \boxed{{Paris}} {END}", Answer("Paris")),
        (rf"<answer> \boxed{{\text{{Rome}}}} {END}", Answer(r"\text{Rome}")),
    ],
)
def test_searches_are_in_tags_and_answers_in_a_box_between_tags(turn, action):
    assert parse(turn) == action


@pytest.mark.parametrize(
    "turn",
    [
        "",
        "<search>  </search>",
        f"<answer> Rome {END}",
        rf"<answer> \boxed{{Rome {END}",
        rf"\boxed{{Rome}} <answer> It is Rome. {END}",
        r"<think> so </think> \boxed{Rome}",
        rf"\boxed{{Rome}} {END}",
    ],
)
def test_anything_else_ends_the_rollout(turn):
    assert isinstance(parse(turn), Malformed)
    assert PROTOCOL.invalid_message is None


def test_an_answer_that_would_be_read_differently_is_refused():
    assert parse(render(Answer("a {b} c"))) == Answer("a {b} c")
    for text in ("a}", "{a", f"a {END}", " a"):
        with pytest.raises(ValueError, match="cannot be written"):
            render(Answer(text))


def test_a_written_conversation_is_the_papers_example():
    thought = "This is the reasoning process."
    search = Step(1, thought, search_call("search query here"))
    answer = Step(2, thought, Answer("answer here"))
    result = " <result> search result here </result> "
    example = PROTOCOL.write(search) + result + PROTOCOL.write(answer)
    for prompt in (PROTOCOL.system, FOR_BASE.messages("q")[0]["content"]):
        assert f"For example, {example}. In the last part" in prompt


def test_passages_are_shown_as_they_are_with_a_blank_line_between():
    """As `vllm_rollout.py` of the public code joins them."""
    hits = [Passage("0", '"Rome"\nA city.'), Passage("1", '"Paris"\nAnother.')]
    shown = PROTOCOL.show_passages(["q"], [hits])
    text = shown.before + shown.content + shown.after
    assert text == ' <result>\n"Rome"\nA city.\n\n"Paris"\nAnother.\n</result>'


def test_the_question_ends_the_base_models_prompt_and_is_the_chats_message():
    (message,) = FOR_BASE.messages("Who?")
    assert message["content"].endswith("latex format. User: Who?. Assistant:")
    assert not FOR_BASE.is_chat
    system, user = PROTOCOL.messages("Who?")
    assert user == {"role": "user", "content": "Who?"}
    assert system["content"].startswith("You are a helpful assistant that can solve")

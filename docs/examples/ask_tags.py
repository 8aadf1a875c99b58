"""A protocol: <ask> query </ask> searches, <found> ... </found> holds the passages.

`tagged` builds a protocol whose actions are text in tags. It returns a frozen object:
the prompt, the stop strings, the parser of a turn and the text shown to the policy.
"""

from rsearch.protocols.tagged import listed, tagged


def format_passage(number, passage):
    """Return one passage as it is shown to the policy."""
    return f"[{number}] {passage.title}: {passage.text}"


ASK = tagged(
    "ask",
    system=None,
    user=(
        "Think, and search with <ask> query </ask> as often as you need. "
        "End with <answer> answer </answer>. Question: {question}"
    ),
    add_question_mark=True,
    search_tags=("<ask>", "</ask>"),
    show_passages=listed("\n<found>", "</found>\n", format_passage),
    invalid_message="\nWrite <ask> query </ask> or <answer> answer </answer>.\n",
)

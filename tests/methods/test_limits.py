"""Methods that end because they have no rounds or searches left."""

import dataclasses
import re

import pytest

from rsearch.methods.conversing import converse
from rsearch.methods.flare import flare
from rsearch.methods.iterating import ircot
from rsearch.methods.search_o1 import BEGIN_QUERY, END_QUERY, search_o1
from rsearch.methods.searchain import searchain
from rsearch.methods.self_ask import self_ask
from tests.methods.scripted import ScriptedModel, answer_one, completion, shown

# (method, its limit, a reply after which it goes on and the stop string of that reply,
# a reply that ends it, how many replies of the first kind are one too many)
METHODS = [
    (ircot, {"rounds": 2}, ("It is big.", ""), "So the answer is: Bo.", 2),
    (flare, {"max_tokens": 6}, ("It is big.", ""), "So the final answer is: Bo.", 2),
    (
        self_ask,
        {"rounds": 2},
        ("Follow up: Who is Y?\n", "Intermediate answer:"),
        "So the final answer is: Bo.",
        3,
    ),
    (search_o1, {"max_turns": 2}, (f"{BEGIN_QUERY}Y", END_QUERY), r"\boxed{Bo}", 2),
    (
        converse,
        {"max_searches": 2},
        ("<search> Y ", "</search>"),
        "<answer> Bo </answer>",
        3,
    ),
    (
        searchain,
        {"rounds": 2},
        ("[Unsolved Query]: Y", ""),
        "[Final Content]: the answer is Bo.",
        2,
    ),
]


@pytest.mark.parametrize(("program", "limit", "goes_on", "ends", "most"), METHODS)
def test_a_limit_that_ends_a_method_is_recorded(program, limit, goes_on, ends, most):
    """If the model itself ends with its last reply, the limit does not count."""

    def writing(num):
        replies = [goes_on] * num + [(ends, "")] * 9

        def reply(request):
            # A reader answers, and Reason-in-Documents reads passages.
            if request.max_tokens == 8 or "Task Instruction" in shown(request):
                return completion("Bo")
            text, stop = replies.pop(0)
            tokens = re.findall(r"\s?\S+", text)
            # A draft of FLARE ends after a sentence, which need not be the last.
            is_cut = program is flare and text != ends
            written = completion(
                text, is_cut=is_cut, tokens=tokens, logp=[0.0] * len(tokens)
            )
            return dataclasses.replace(written, stop=stop)

        return ScriptedModel(reply)

    at_limit = [
        answer_one(program, writing(num), **limit).is_at_limit for num in range(5)
    ]
    assert at_limit == [num >= most for num in range(5)]

"""What a tokenizer adds around contents: role frames, openings, start of text."""

import json

import pytest

from rsearch.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import byte_fallback_json, small, with_template

__all__ = ["small"]  # a fixture

GLM = (  # Like GLM-4's template: a role's token ends the turn before it.
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (  # Like ChatML, which has a header for any role.
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
REFUSES = "{% for m in messages %}{{ raise_exception('no') }}{% endfor %}"
DROPS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize(
    "template, before, after",
    [
        (GLM, "<|observation|>\n", "<|assistant|>"),
        (CHATML, "<|end|>\n<|user|>observation\n", "<|end|>\n<|user|>assistant\n"),
    ],
)
def test_a_role_is_framed_as_in_the_template(small, template, before, after):
    tokenizer = with_template(small, template)
    frame = tokenizer.role_frame("observation")
    assert tuple(map(tokenizer.decode, frame)) == (before, after)
    chat = [{"role": r, "content": r} for r in ("user", "assistant", "observation")]
    parts = [frame[0], tokenizer.encode("observation"), frame[1]]
    whole = tokenizer.encode_prompt(chat).tolist()
    assert whole[-sum(map(len, parts)) :] == [i for part in parts for i in part]
    assert not tokenizer.control_ids.isdisjoint(frame[0].tolist())


@pytest.mark.parametrize("template", [None, REFUSES, f"{DROPS}{{% endfor %}}"])
def test_a_role_that_the_template_does_not_support_has_no_frame(small, template):
    assert with_template(small, template).role_frame("observation") is None


def test_a_role_framed_without_control_tokens_has_no_frame(small):
    assert with_template(small, GLM).role_frame("tool") is None


def test_the_opening_is_part_of_the_prompt_and_may_hold_control_tokens(small):
    chat = [{"role": "user", "content": "the <|user|>"}]
    for template in (GLM, None):
        tokenizer = with_template(small, template)
        before = tokenizer.decode(tokenizer.encode_prompt(chat))
        ids = tokenizer.encode_prompt(chat, "<think>").tolist()
        assert tokenizer.decode(ids) == before + "<think>"
        more = tokenizer.encode_prompt(chat, "<|user|>").tolist()
        fewer = tokenizer.encode_prompt(chat).tolist()
        count = sum(i in tokenizer.control_ids for i in more)
        assert count == 1 + sum(i in tokenizer.control_ids for i in fewer)


def test_raw_text_is_encoded_without_a_template(small):
    ids = small.encode_raw("the <|user|> end", "<think>")
    assert small.decode(ids) == "the <|user|> end<think>"
    assert small.control_ids.isdisjoint(ids.tolist())
    assert "<|user|>" in small.control_tokens() and "the" not in small.control_tokens()
    assert small.encode_raw("a").tolist() == small.encode("a").tolist()


def test_raw_text_gets_the_tokenizers_start_token():
    made = json.loads(byte_fallback_json())
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = Tokenizer(json.dumps(made), eos_tokens=["</s>"], chat_template=None)
    assert tokenizer.encode_raw("ab").tolist() == [1, *tokenizer.encode("ab").tolist()]
    assert 1 not in tokenizer.encode("ab").tolist()

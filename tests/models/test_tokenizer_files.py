"""A stranger's tokenizer: what is wrong with its files is said, and costs nothing."""

import json

import pytest

from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "Who?"}]
NESTED = "{{ " + "[" * 9999
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    train_tokenizer(["the end of the user"] * 2).save(tmp_path)
    return tmp_path


def changed(folder, name, change):
    path = folder / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("tokenizer_config.json", "eos_token", 7, "eos_token=7, expected text"),
        ("tokenizer_config.json", "eos_token", {"x": 1}, "expected text"),
        ("tokenizer_config.json", "chat_template", 7, "chat_template is a int"),
        ("tokenizer_config.json", "chat_template", NESTED, "does not parse"),
        ("generation_config.json", "eos_token_id", "x", r"eos_token_id=\['x'\]"),
        ("generation_config.json", "eos_token_id", [-1], r"eos_token_id=\[-1\]"),
        ("generation_config.json", "eos_token_id", 2**70, "expected ids from 0 on"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(folder, name, field, value, message):
    changed(folder, name, lambda settings: settings.update({field: value}))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


def test_settings_that_are_no_object_are_refused(folder):
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(folder)


def test_a_template_that_is_no_text_is_refused(folder):
    (folder / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not a template"):
        load_tokenizer(folder)


@pytest.mark.parametrize("call", ["{{ 1 + 'a' }}", "{{ 1 // 0 }}", "{{ [][x()] }}"])
def test_a_template_that_fails_is_refused_with_its_reason(folder, call):
    (folder / "chat_template.jinja").write_text(LOOP + call)
    with pytest.raises(ValueError, match="chat template refuses roles"):
        load_tokenizer(folder).encode_prompt(CHAT)


def test_an_id_far_beyond_all_others_takes_no_memory(folder):
    def far(value):
        value["added_tokens"][-1]["id"] = 2**32 - 1
        vocab = value["model"]["vocab"]
        vocab[value["added_tokens"][-1]["content"]] = 2**32 - 1

    changed(folder, "tokenizer.json", far)
    with pytest.raises(ValueError, match="ids up to 4294967295 for the"):
        load_tokenizer(folder)


def test_a_token_that_looks_like_a_byte_and_is_none_is_text(folder):
    def add(value):
        value["model"]["vocab"]["<0xZZ>"] = len(value["model"]["vocab"])

    changed(folder, "tokenizer.json", add)
    assert b"<0xZZ>" in load_tokenizer(folder).token_bytes

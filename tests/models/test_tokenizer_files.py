"""A foreign tokenizer's faulty files are refused with a reason, at no great cost."""

import json
import re

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


def edit_json(folder, name, change):
    path = folder / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("tokenizer_config.json", "eos_token", 7, "eos_token=7, expected text"),
        ("tokenizer_config.json", "eos_token", {"x": 1}, "expected text"),
        ("tokenizer_config.json", "chat_template", 7, "chat_template is of type int"),
        ("tokenizer_config.json", "chat_template", NESTED, "does not parse"),
        ("generation_config.json", "eos_token_id", "x", r"eos_token_id=\['x'\]"),
        ("generation_config.json", "eos_token_id", [-1], r"eos_token_id=\[-1\]"),
        ("generation_config.json", "eos_token_id", 2**70, "expected ids from 0 on"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(folder, name, field, value, message):
    edit_json(folder, name, lambda settings: settings.update({field: value}))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


def test_settings_that_are_not_an_object_are_refused(folder):
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(folder)


def test_a_template_that_is_not_text_is_refused(folder):
    (folder / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not a template"):
        load_tokenizer(folder)


@pytest.mark.parametrize("call", ["{{ 1 + 'a' }}", "{{ 1 // 0 }}", "{{ [][x()] }}"])
def test_a_template_that_fails_is_refused_with_its_reason(folder, call):
    (folder / "chat_template.jinja").write_text(LOOP + call)
    with pytest.raises(ValueError, match="chat template refuses roles"):
        load_tokenizer(folder).encode_prompt(CHAT)


def test_an_id_far_above_all_others_is_refused_before_it_takes_memory(folder):
    def far(value):
        value["added_tokens"][-1]["id"] = 2**32 - 1
        vocab = value["model"]["vocab"]
        vocab[value["added_tokens"][-1]["content"]] = 2**32 - 1

    edit_json(folder, "tokenizer.json", far)
    with pytest.raises(ValueError, match="ids up to 4294967295 for the"):
        load_tokenizer(folder)


def test_a_token_that_only_looks_like_a_byte_is_text(folder):
    def add(value):
        value["model"]["vocab"]["<0xZZ>"] = len(value["model"]["vocab"])

    edit_json(folder, "tokenizer.json", add)
    assert b"<0xZZ>" in load_tokenizer(folder).token_bytes


@pytest.mark.fault(67, "settings", "unknown field")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("split_special_tokens", True),
        ("do_lower_case", True),
        ("fix_mistral_regex", True),
        ("sp_model_kwargs", {"enable_sampling": True}),
        ("errors", "strict"),
        ("init_inputs", ["x"]),
        ("auto_map", {"AutoTokenizer": ["x.Y", None]}),
        ("fast_tokenizer_files", ["tokenizer.4.0.0.json", "tokenizer.json"]),
        ("fast_tokenizer_files", 5),
        ("tokenizer_class", "T5Tokenizer"),
        ("tokenizer_class", 7),
        ("tokenizer_class", "LlamaTokenizerFast"),  # replaces the byte-level pipeline
        ("tokenizer_class", "GPT2Tokenizer"),
        ("tokenizer_class", "Qwen2Tokenizer"),
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", {"x": {"content": "<x>"}}),
        ("added_tokens_decoder", {"9999": {"content": "<x>"}}),
        ("added_tokens_decoder", {"9": {"content": 7}}),
        ("added_tokens_decoder", {"9": {"content": ""}}),
        ("added_tokens_decoder", {"9": {"content": "<x>", "single_word": True}}),
        ("added_tokens_decoder", {"9": {"content": "<x>", "lstrip": "yes"}}),
        ("added_tokens_decoder", {"9": {"content": "<x>", "colour": True}}),
        ("extra_special_tokens", "<x>"),
        ("extra_special_tokens", [7]),
        ("mask_token", 7),
        ("image_token", 7),
        ("colour", "blue"),
        ("separators", [1, 2]),
    ],
)
def test_an_unsupported_setting_is_refused(folder, field, value):
    edit_json(folder, "tokenizer_config.json", lambda s: s.update({field: value}))
    with pytest.raises(ValueError, match=field) as refused:
        load_tokenizer(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.fault(67, "settings")
def test_settings_without_effect_are_accepted(folder):
    expected = load_tokenizer(folder)
    harmless = {
        "add_bos_token": True,  # the post-processor of tokenizer.json decides
        "add_eos_token": True,
        "add_prefix_space": True,
        "clean_up_tokenization_spaces": True,
        "legacy": None,
        "model_max_length": 10**30,
        "processor_class": "X",
        "_from_auto": True,
        "auto_map": {"AutoProcessor": "x.Y"},
        "backend": "tokenizers",
        "padding_side": "left",
    }
    edit_json(folder, "tokenizer_config.json", lambda s: s.update(harmless))
    assert load_tokenizer(folder).fingerprint == expected.fingerprint


@pytest.mark.fault(67, "settings")
def test_the_tokenizer_class_is_ignored_for_families_that_use_their_file(folder):
    expected = load_tokenizer(folder).encode("the end").tolist()
    name = {"tokenizer_class": "LlamaTokenizer"}
    edit_json(folder, "tokenizer_config.json", lambda s: s.update(name))
    (folder / "config.json").write_text('{"model_type": "glm4"}')
    assert load_tokenizer(folder).encode("the end").tolist() == expected


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer.json", {"model": {"vocab": [1]}}),
        ("tokenizer.json", {"normalizer": {"normalizers": 5}}),
        ("tokenizer.json", {"padding": 5}),
        ("config.json", {"model_type": []}),
    ],
)
def test_a_file_of_the_wrong_shape_is_named(folder, name, fields):
    class_name = {"tokenizer_class": "Qwen2Tokenizer"}
    edit_json(folder, "tokenizer_config.json", lambda s: s.update(class_name))
    (folder / "config.json").write_text("{}")
    edit_json(folder, name, lambda v: v.update(fields))
    with pytest.raises(ValueError, match=re.escape(name)) as refused:
        load_tokenizer(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_the_hint_for_a_missing_tokenizer_fits_the_directory(folder):
    """Without a vocabulary, transformers would make an empty tokenizer."""
    (folder / "tokenizer.json").unlink()

    def refusal():
        with pytest.raises(ValueError, match=r"no tokenizer\.json") as caught:
            load_tokenizer(folder)
        return str(caught.value)

    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / "model.safetensors").touch()
    assert str(folder / "checkpoint-9") in refusal()
    (folder / "config.json").write_text("{}")
    assert "copy it" in refusal() and "save_pretrained" not in refusal()
    (folder / "vocab.json").touch()
    assert "transformers makes one of vocab.json:" in refusal()
    assert "save_pretrained" in refusal().splitlines()[1]
    (folder / "tokenizer.model").touch()
    assert "sentencepiece" in refusal()


def test_a_tokenizer_of_added_tokens_alone_is_refused(folder):
    def empty(parsed):
        names = [t["content"] for t in parsed["added_tokens"]]
        parsed["model"] |= {"vocab": {t: i for i, t in enumerate(names)}, "merges": []}

    edit_json(folder, "tokenizer.json", empty)
    with pytest.raises(ValueError, match="no text can be encoded"):
        load_tokenizer(folder)


@pytest.mark.fault(67, "older files")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("added_tokens.json", {"<x>": 9999}),
        ("added_tokens.json", {"<x>": "9"}),
        ("added_tokens.json", []),
        ("special_tokens_map.json", {"colour": "blue"}),
        ("special_tokens_map.json", {"eos_token": 7}),
        ("special_tokens_map.json", {"eos_token": "<none>"}),
        ("special_tokens_map.json", []),
    ],
)
def test_an_unsupported_older_file_is_refused(folder, name, value):
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=str(folder)):
        load_tokenizer(folder)


@pytest.mark.fault(67, "end-of-turn ids")
def test_eos_ids_come_from_the_models_files(folder):
    table = load_tokenizer(folder).token_bytes
    names = (b"<|end|>", b"<|user|>", b"<|observation|>")
    end, user, observation = map(table.index, names)
    model, generation = folder / "config.json", folder / "generation_config.json"
    model.write_text(json.dumps({"eos_token_id": [user]}))
    generation.write_text(json.dumps({"eos_token_id": [end, observation]}))
    assert load_tokenizer(folder).eos_ids == (end, observation)
    generation.write_text(json.dumps({"bos_token_id": end}))
    assert load_tokenizer(folder).eos_ids == (end, user)
    generation.unlink()
    assert load_tokenizer(folder).eos_ids == (end, user)
    edit_json(folder, "tokenizer_config.json", lambda s: s.pop("eos_token"))
    assert load_tokenizer(folder).eos_ids == (user,)
    model.write_text(json.dumps({"eos_token_id": 99999}))
    with pytest.raises(ValueError, match="eos_token_id=99999"):
        load_tokenizer(folder)


@pytest.mark.fault(67, "template list without a default")
@pytest.mark.parametrize(
    ("templates", "names"),
    [
        ([{"name": "tool_use", "template": LOOP}], "'tool_use'"),
        ({"rag": LOOP, "tool_use": LOOP}, "'rag', 'tool_use'"),
        ([], "none"),
        ([LOOP], "name and template"),
        ([{"name": "default", "template": 7}], "'default'"),
    ],
)
def test_templates_without_a_default_are_refused(folder, templates, names):
    edit_json(
        folder, "tokenizer_config.json", lambda s: s.update(chat_template=templates)
    )
    with pytest.raises(ValueError, match=f"chat_template.*{names}"):
        load_tokenizer(folder)


@pytest.mark.fault(67, "template list without a default")
def test_the_default_template_is_chosen_as_by_transformers(folder):
    def text():
        tokenizer = load_tokenizer(folder)
        return tokenizer.decode(tokenizer.encode_prompt(CHAT))

    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": LOOP}]
    edit_json(folder, "tokenizer_config.json", lambda s: s.update(chat_template=named))
    assert text() == "Who?"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text(LOOP + "r")
    with pytest.raises(ValueError, match="'rag'"):  # files override the settings
        load_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(LOOP + "!")
    assert text() == "Who?!"
    (folder / "additional_chat_templates" / "default.jinja").write_text(LOOP + "?")
    assert text() == "Who??"


@pytest.mark.fault(70, "pattern that backtracks")
def test_a_panic_of_the_library_raises_value_error(folder):
    def backtrack(value):
        value["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }

    edit_json(folder, "tokenizer.json", backtrack)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ValueError, match="10001 characters"):
        tokenizer.encode("a" * 10_000 + "b")
    with pytest.raises(ValueError, match=str(folder)):
        tokenizer.encode_prompt([{"role": "user", "content": "a" * 10_000 + "b"}])
    for broken in ({"type": "Split"}, {"type": "Split", "pattern": {"Regex": "("}}, 7):
        edit_json(
            folder, "tokenizer.json", lambda v, b=broken: v.update(pre_tokenizer=b)
        )
        with pytest.raises(ValueError, match="not a tokenizer"):
            load_tokenizer(folder)

"""Tiny tokenizers of many families are read as by transformers' AutoTokenizer."""

import json

import numpy as np
import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.tokenizer import load_tokenizer

TEXTS = [
    "the end of the user",
    " the end",
    "it's 2024, naïve\n\n  e\u0301 \U0001f600 ",
    "",
    "\n",
]
CHAT = [
    {"role": "system", "content": "the end"},
    {"role": "user", "content": " Who is the user? "},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def flags(content, **changed):
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {
        "content": content,
        **dict.fromkeys(names, False),
        "special": True,
        **changed,
    }


def byte_level(split=None, normalizer=None, added=IM):
    """Return a byte-level tokenizer with the merges of a small text."""
    parsed = json.loads(train_tokenizer(TEXTS * 2)._json)
    model, taken = parsed["model"], {t["content"] for t in parsed["added_tokens"]}
    vocab = [token for token in model["vocab"] if token not in taken]
    model = models.BPE(
        {token: i for i, token in enumerate(vocab)},
        [tuple(merge) for merge in model["merges"]],
    )
    tokenizer = Tokenizer(model)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        split = pre_tokenizers.Split(Regex(split), "isolated")
        level = pre_tokenizers.Sequence([split, level])
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def sentencepiece(prepends=True):
    """Return a tokenizer like Llama 2's, as transformers 4 wrote it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = ("the", "en", "d", "end", "\u2581the", "\u2581end", "th", "e", "\u2581")
    for token in (*"thendusr[]INST/", *words):
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("e", "n"), ("en", "d")]
    merges += [("\u2581", "the"), ("\u2581", "end")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = replaces
    if prepends:
        steps = [normalizers.Prepend("\u2581"), replaces]
        tokenizer.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def make_added_tokens_decoder(tokenizer, first, *contents, **changed):
    """Return an added_tokens_decoder whose last tokens are not in tokenizer.json."""
    known = tokenizer.get_added_tokens_decoder().items()
    decoder = {str(i): flags(token.content) for i, token in known}
    for i, content in enumerate(contents, start=first):
        decoder[str(i)] = flags(content, **changed)
    return decoder


def families():
    qwen2 = byte_level(QWEN2, normalizers.NFC())
    size = qwen2.get_vocab_size()
    chatml = dict(
        eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    as_filed = dict(tokenizer_class="PreTrainedTokenizerFast", **chatml)
    of_qwen2 = dict(tokenizer_class="Qwen2Tokenizer", bos_token=None, **chatml)
    bare = byte_level(QWEN2, normalizers.NFC(), added=())
    yield "qwen2.5", "qwen2", qwen2, of_qwen2, {}
    yield (
        "qwen3, tokens only in the settings",
        "qwen3",
        bare,
        of_qwen2
        | {
            "added_tokens_decoder": make_added_tokens_decoder(
                bare, size - 3, *IM, "<think>", special=False
            )
        },
        {},
    )
    yield (
        "r1-distill-qwen",
        "qwen2",
        byte_level(QWEN2),
        of_qwen2
        | {
            "tokenizer_class": "LlamaTokenizerFast",
            "legacy": True,
            "sp_model_kwargs": {},
            "eos_token": {"__type": "AddedToken", **flags("<|im_end|>")},
        },
        {},
    )
    yield (
        "smollm2 and llama 3",
        "llama",
        byte_level(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"),
        as_filed
        | {
            "additional_special_tokens": ["<|im_start|>"],
            "clean_up_tokenization_spaces": True,
            "model_input_names": ["input_ids"],
            "model_max_length": 131072,
        },
        {},
    )
    yield (
        "glm-4",
        "glm4",
        byte_level(r"\p{L}+|\s+|."),
        as_filed
        | {
            "tokenizer_class": "PreTrainedTokenizer",
            "do_lower_case": False,
            "remove_space": False,
            "padding_side": "left",
            "added_tokens_decoder": make_added_tokens_decoder(qwen2, size, "<|user|>"),
        },
        {},
    )
    yield (
        "additional tokens without ids",
        "llama",
        byte_level(),
        as_filed
        | {
            "extra_special_tokens": ["<|user|>", "<|observation|>"],
            "image_token": "<|image|>",
            "unk_token": "<unk>",
        },
        {},
    )
    yield (
        "named extra tokens",
        "llama",
        byte_level(),
        as_filed
        | {
            "extra_special_tokens": {"video": "<|video|>"},
            "chat_template": CHATML + "{{ video }}{{ pad_token }}",
        },
        {},
    )
    yield (
        "older files",
        "llama",
        byte_level(added=()),
        as_filed,
        {
            "special_tokens_map.json": {
                "eos_token": flags("<|im_end|>"),
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            },
            "added_tokens.json": {t: size - 3 + i for i, t in enumerate(IM)},
        },
    )
    yield (
        "tokens that strip blanks",
        "llama",
        byte_level(added=()),
        as_filed
        | {
            "added_tokens_decoder": {
                **make_added_tokens_decoder(bare, size - 3, IM[0]),
                **make_added_tokens_decoder(bare, size - 2, IM[1], rstrip=True),
                **make_added_tokens_decoder(
                    bare, size - 1, IM[2], lstrip=True, normalized=True
                ),
            },
            "chat_template": CHATML.replace("\n{{", "{{").replace("m.role", "''"),
        },
        {},
    )
    of_llama2 = dict(
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token=None,
        add_bos_token=True,
        add_eos_token=False,
        chat_template=LLAMA2,
    )
    for legacy in (False, True):
        old = {"legacy": legacy}
        yield f"llama 2, {legacy=}", "llama", sentencepiece(), of_llama2 | old, {}
    yield (
        "llama 2 without a prefix",
        "llama",
        sentencepiece(prepends=False),
        of_llama2 | {"add_prefix_space": False, "legacy": False},
        {},
    )
    mistral = of_llama2 | {"tokenizer_class": "LlamaTokenizerFast"}
    yield "mistral", "mistral", sentencepiece(), mistral, {}


FAMILIES = {name: rest for name, *rest in families()}


def write(directory, model_type, tokenizer, settings, files):
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "tokenizer_config.json": settings,
        "config.json": {"model_type": model_type},
        **files,
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))


@pytest.mark.fault(67, "families", "added_tokens_decoder", "older files")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_tokenizer_is_read_as_by_transformers(name, tmp_path):
    write(tmp_path, *FAMILIES[name])
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_raw(text).tolist() == ids
        # A decoder like Llama 2's drops the space that its encoder puts first.
        assert ours.decode(ids) in (theirs.decode(ids), " " + theirs.decode(ids))
    for content in (CHAT[1]["content"], "end", "\n", "the [INST] end"):
        chat = [CHAT[0], {"role": "user", "content": content}]
        ids = theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_prompt(chat).tolist() == list(ids)
    added = {token.content: i for i, token in theirs.added_tokens_decoder.items()}
    assert ours.control_ids == set(added.values())
    assert ours.eos_ids == (theirs.eos_token_id,)
    # A saved tokenizer is read the same way, without the older files.
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == ours.fingerprint
    assert again.encode_prompt(CHAT).tolist() == ours.encode_prompt(CHAT).tolist()


@pytest.mark.parametrize("name", [n for n in FAMILIES if "legacy" in n] + ["mistral"])
def test_no_space_is_put_before_a_text_that_follows_others(name, tmp_path):
    """These tokenizers put one before the first text of a prompt."""
    write(tmp_path, *FAMILIES[name])
    tokenizer = load_tokenizer(tmp_path)
    prompt, results, turn = "the user", "\n<end>the end", "</end>"
    parts = [tokenizer.encode_raw(prompt), *map(tokenizer.encode, (results, turn))]
    text = tokenizer.decode(np.concatenate(parts))
    assert text == f" {prompt}{results}{turn}"
    long = "the end " * 9_000
    assert tokenizer.cut(long, 2) == long[:7]

"""Rebuild a tokenizer.json as transformers' tokenizer classes do.

A tokenizer class of transformers 5 with its own initialiser takes only the vocabulary
from tokenizer.json and replaces the pipeline around it: normalizer, splitting and
decoder. For some published models that is wrong, and for others it makes no difference.
The class is followed where it can be what the authors meant, and otherwise refused.
"""

import fnmatch
import pathlib

from rsearch.models.hf.fields import Fields

# Classes for which tokenizer.json is used unchanged.
_UNCHANGED_CLASSES = (
    None,
    "PreTrainedTokenizer",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
# Model types for which tokenizer.json is used unchanged, whatever the class.
_UNCHANGED_TYPES = {
    *("deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "mistral", "olmo2"),
    *("phi3", "phimoe"),
}
# The class of a model type if the files name none. For the types in _FORCED_TYPES it
# also replaces any class that the files name, except those in _UNCHANGED_CLASSES.
_CLASS_OF_TYPE = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_FORCED_TYPES = ("qwen2",)
# Hub ids of models whose published tokenizer_class is wrong: they were trained with the
# tokenizer that tokenizer.json describes.
_WRONG_CLASS_MODELS = (
    "deepseek-ai/deepseek-r1-distill-llama-*",
    "deepseek-ai/deepseek-r1-0528-qwen3-*",
    "huggingfacetb/smollm2-*",
)
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_TOKENS = {
    "Qwen2Tokenizer": dict.fromkeys(
        ("unk_token", "eos_token", "pad_token"), "<|endoftext|>"
    ),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": dict.fromkeys(
        ("unk_token", "bos_token", "eos_token"), "<|endoftext|>"
    ),
}

_PLAIN_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "ignore_merges": False,
}


def find_class(directory: pathlib.Path, settings: Fields, model: dict) -> str | None:
    """Return the class that replaces the pipeline of tokenizer.json, or None.

    Raises:
        ValueError: the class is not supported.
    """
    name = settings.get("tokenizer_class") or model.get("tokenizer_class")
    model_type = model.get("model_type")
    if not isinstance(name, str | None):
        raise settings.refusal("tokenizer_class", name, "it must be text")
    if model_type in _UNCHANGED_TYPES or _has_wrong_class(directory):
        return None
    name = name or _CLASS_OF_TYPE.get(model_type)
    if name in _UNCHANGED_CLASSES:
        return None
    name = name.removesuffix("Fast")
    if model_type in _FORCED_TYPES:
        return _CLASS_OF_TYPE[model_type]
    if name not in DEFAULT_TOKENS:
        supported = (
            f"it must be PreTrainedTokenizerFast or {' or '.join(DEFAULT_TOKENS)}"
        )
        raise settings.refusal("tokenizer_class", name, supported)
    return name


def _has_wrong_class(directory) -> bool:
    """Return whether a directory is a hub download of a _WRONG_CLASS_MODELS entry."""
    names = [n for n in directory.parts if n.startswith("models--")]
    hub_ids = [n.removeprefix("models--").replace("--", "/").lower() for n in names]
    return any(fnmatch.fnmatch(i, p) for i in hub_ids for p in _WRONG_CLASS_MODELS)


def rebuild(class_name: str, settings: Fields, parsed: dict) -> dict:
    """Return tokenizer.json with the pipeline that a transformers class gives it.

    Raises:
        ValueError: the file describes a different kind of pipeline, not just a
            different way to write the same one.
    """
    prefix = settings.get("add_prefix_space")
    if not isinstance(prefix, bool | None):
        raise settings.refusal("add_prefix_space", prefix, "it must be true or false")
    if class_name == "LlamaTokenizer":
        scheme = "always" if settings.get("legacy", False) else "first"
        pipeline = _llama_pipeline("never" if prefix is False else scheme)
    else:
        pipeline = _byte_level_pipeline(class_name, bool(prefix))
    model = parsed["model"]
    rebuilt = {**parsed, **pipeline, "model": {**model, **pipeline["model"]}}
    expected, actual = _canonical(rebuilt), _canonical(parsed)
    if actual == expected:
        return parsed
    if class_name == "LlamaTokenizer" and _is_sentencepiece(parsed):
        return rebuilt
    if not actual["normalizer"] and actual | {"normalizer": expected["normalizer"]} == (
        expected
    ):
        return rebuilt  # the class only adds a normalizer, which composes characters
    raise ValueError(
        f"{settings.path}: tokenizer_class={class_name!r} makes a tokenizer other than "
        f"the one in tokenizer.json; name 'PreTrainedTokenizerFast' if tokenizer.json "
        f"is right"
    )


def _llama_pipeline(scheme: str) -> dict:
    """Return the pipeline that LlamaTokenizer puts around its vocabulary."""
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([] if scheme == "never" else [strip]),
            ],
        },
        "model": {**_PLAIN_MODEL, "fuse_unk": True, "byte_fallback": True},
    }


def _byte_level_pipeline(class_name: str, prefix: bool) -> dict:
    """Return the pipeline of Qwen2Tokenizer or GPT2Tokenizer around its vocabulary."""
    is_qwen2 = class_name == "Qwen2Tokenizer"
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    byte_level["use_regex"] = not is_qwen2
    splits = byte_level
    if is_qwen2:
        split = {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}}
        split |= {"behavior": "Isolated", "invert": False}
        splits = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return {
        "normalizer": {"type": "NFC"} if is_qwen2 else None,
        "pre_tokenizer": splits,
        "decoder": byte_level,
        "model": {**_PLAIN_MODEL, "fuse_unk": False, "byte_fallback": False},
    }


def _canonical(parsed: dict) -> dict:
    """Return the settings of a tokenizer.json that affect ids, in a canonical form."""
    model = {key: parsed["model"].get(key) or None for key in _PLAIN_MODEL}
    model["type"] = model["type"] or "BPE"
    model["byte_fallback"] = bool(parsed["model"].get("byte_fallback"))
    canonical_steps = {}
    for section, steps_key in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
    ):
        step = parsed.get(section)
        steps = step.get(steps_key) if isinstance(step, dict) else None
        steps = steps if steps is not None else [] if step is None else [step]
        canonical_steps[section] = [_canonical_step(section, s) for s in steps]
    return {"model": model, **canonical_steps}


def _canonical_step(section, step):
    if not isinstance(step, dict) or step.get("type") != "ByteLevel":
        return step
    if section == "decoder":
        return "ByteLevel"
    return ("ByteLevel", step.get("add_prefix_space"), step.get("use_regex", True))


def _is_sentencepiece(parsed: dict) -> bool:
    """Return whether a tokenizer.json is like Llama 2's, however it is written."""
    settings = _canonical(parsed)
    replace_step = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend_step = {"type": "Prepend", "prepend": "\u2581"}
    splits = settings["pre_tokenizer"]
    return (
        settings["model"]["type"] == "BPE"
        and settings["model"]["byte_fallback"]
        and settings["normalizer"] in ([], [replace_step], [prepend_step, replace_step])
        and all(isinstance(s, dict) and s.get("type") == "Metaspace" for s in splits)
    )

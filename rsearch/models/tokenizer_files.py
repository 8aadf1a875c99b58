"""Read the files of a tokenizer as transformers' AutoTokenizer reads them.

tokenizer.json is not everything: tokenizer_config.json and older files next to it add
tokens, and the `tokenizer_class` of the former may name a class of transformers 5 that
keeps only the vocabulary and replaces the rest. These settings are followed here, or
refused. Every field of tokenizer_config.json is listed in one of the tables below.
"""

import json
import pathlib
import reprlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken

from rsearch.models.hf.directory import explain, read_object
from rsearch.models.hf.fields import Fields
from rsearch.models.tokenizer_class import DEFAULT_TOKENS, find_class, rebuild
from rsearch.models.vocabulary import parse_tokenizer
from rsearch.runtime.boundary import boundary

SETTINGS = "tokenizer_config.json"
EXTRA_TOKENS = "extra_special_tokens"
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

# The fields of tokenizer_config.json that are used; so are all that end in _token.
_USED_FIELDS = {
    *NAMED_TOKENS,
    *("add_prefix_space", "added_tokens_decoder", "additional_special_tokens"),
    *("auto_map", "chat_template", EXTRA_TOKENS, "fast_tokenizer_files"),
    *("legacy", "model_specific_special_tokens", "tokenizer_class"),
}
_CHECKED_FIELDS = {  # field -> values for which transformers reads as this module does
    "backend": (None, "tokenizers"),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (
        None,
        False,
    ),
    "do_lower_case": (None, False),
    "errors": (None, "replace"),
    "fix_mistral_regex": (None, False),
    "init_inputs": (None, []),
    "keep_accents": (None, False),
    "remove_space": (None, False),
    "sp_model_kwargs": (None, {}),
    "split_special_tokens": (None, False),
}
# Fields that transformers does not read, or not to turn text into ids. If there is a
# tokenizer.json, which has a post-processor, it drops add_bos_token and add_eos_token.
_IGNORED_FIELDS = {
    *("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "device_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "files_loaded"),
    *("from_slow", "is_local", "local_files_only", "max_len", "max_length", "padding"),
    *("max_position_embeddings", "merges_file", "model_input_names", "model_type"),
    *("model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token_type_id"),
    *("padding_side", "processor_class", "response_schema", "response_template"),
    *("return_token_type_ids", "slow_tokenizer_class", "spaces_between_special_tokens"),
    *("special_tokens_map_file", "stride", "tokenizer_file", "transformers_version"),
    *("truncation", "truncation_side", "truncation_strategy", "trust_remote_code"),
    *("use_default_system_prompt", "use_fast", "verbose", "vocab_file", "vocab_size"),
}

# Vocabularies in earlier formats, and what transformers needs to convert them.
_VOCABULARIES = {"tokenizer.model": " (needs sentencepiece)", "vocab.json": ""}
_CONVERT = (
    "import sys; from transformers import AutoTokenizer as T; d = sys.argv[1]; "
    "T.from_pretrained(d).save_pretrained(d)"
)


class TokenizerFiles(NamedTuple):
    """The tokenizer that the files of a directory describe.

    Attributes:
        tokenizer_json: the text of a tokenizer.json with all tokens.
        eos_tokens: the tokens that end a turn, eos_token first.
        chat_template: the default template; None if there is none.
        named_tokens: {name: token} for names that templates may use, such as
            "bos_token".
    """

    tokenizer_json: str
    eos_tokens: list[str]
    chat_template: str | None
    named_tokens: dict[str, str]


def read_tokenizer_files(directory: pathlib.Path) -> TokenizerFiles:
    """Read a tokenizer's files as transformers does.

    Raises:
        ValueError: a file is missing or unreadable, a field is unknown or has an
            unsupported value, or no end of text is named.
    """
    with boundary(f"{directory}: tokenizer.json, {SETTINGS} or config.json"):
        return _read_files(directory)


def _read_files(directory) -> TokenizerFiles:
    text, parsed = _read_tokenizer(directory)
    settings = Fields(directory / SETTINGS, _read(directory / SETTINGS))
    model = _read(directory / "config.json")
    _check_fields(settings, parsed)
    class_name = find_class(directory, settings, model)
    tokens = _read_tokens(directory, settings, parsed, class_name)
    _check_eos(directory, tokens, parsed)
    pipeline = parsed if class_name is None else rebuild(class_name, settings, parsed)
    added_tokens = _tokens_to_add(tokens, parsed, class_name)
    if pipeline is not parsed or not _has_tokens(parsed, added_tokens, class_name):
        base = pipeline if class_name is None else {**pipeline, "added_tokens": []}
        tokenizer = parse_tokenizer(json.dumps(base), directory / "tokenizer.json")
        tokenizer.add_tokens(added_tokens)
        text = tokenizer.to_str()
        parsed = json.loads(text)
    _check_ids(directory, tokens.declared, parsed)
    named_tokens = {key: str(token) for key, token in tokens.named.items()}
    eos = _eos_tokens(directory, model, parsed, named_tokens.get("eos_token"))
    return TokenizerFiles(text, eos, _chat_template(directory, settings), named_tokens)


def _read_tokenizer(directory):
    """Return the text of tokenizer.json, and the object in it."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory}: no tokenizer.json{_missing_hint(directory)}")
    try:
        text = path.read_text("utf-8")
        parsed = json.loads(text)
        model, added_tokens = parsed["model"], parsed.get("added_tokens") or []
        is_usable = isinstance(model["vocab"], dict | list) and all(
            type(t["id"]) is int and isinstance(t["content"], str) for t in added_tokens
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a tokenizer: {error!r}") from None
    except RecursionError:
        raise ValueError(f"{path}: not a tokenizer: it is nested too deeply") from None
    if not is_usable:
        raise ValueError(f"{path}: not a tokenizer: no vocabulary with names and ids")
    contents = {t["content"] for t in added_tokens}
    if all(str(token) in contents for token in model["vocab"]):
        raise ValueError(f"{path}: no text can be encoded: it has only added tokens")
    if single_words := [t["content"] for t in added_tokens if t.get("single_word")]:
        raise ValueError(
            f"{path}: single_word=true of {single_words[0]!r} is not supported"
        )
    return text, parsed


def _missing_hint(directory) -> str:
    """Return where a missing tokenizer.json may come from, as "; ..." or ": ..."."""
    # Without these files transformers makes an empty tokenizer and no error.
    sources = [n for n in _VOCABULARIES if (directory / n).is_file()]
    if sources:
        command = shlex.join(["python", "-c", _CONVERT, str(directory)])
        needs = _VOCABULARIES[sources[0]]
        return f"; transformers makes one of {sources[0]}{needs}:\n{command}"
    has_config = (directory / "config.json").is_file()
    if not has_config and (reason := explain(directory)):
        return f": {reason}"
    return "; copy it, and the files next to it, from the model this one was made from"


def _read(path: pathlib.Path) -> dict:
    """Return the object in a JSON file, or {} if there is no file."""
    return read_object(path) if path.is_file() else {}


def _check_fields(settings: Fields, parsed: dict) -> None:
    """Refuse unknown fields, and settings that are not supported."""
    for field, value in settings.values.items():
        if field in _CHECKED_FIELDS:
            settings.check(field, _CHECKED_FIELDS[field])
        elif field not in _USED_FIELDS | _IGNORED_FIELDS and field[:1] != "_":
            if field.endswith("_token") and isinstance(value, str | dict | None):
                continue  # a named token
            raise ValueError(
                f"{settings.path}: {field}={reprlib.repr(value)} is not known, and may "
                f"change the tokenizer; delete the field if it does not"
            )
    if parsed["model"].get("type") not in (None, "BPE"):
        settings.check("clean_up_tokenization_spaces", (None, False))
    code = settings.get("auto_map")
    if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
        raise settings.refusal("auto_map", code, "a model's own code is not run")
    names = settings.get("fast_tokenizer_files") or []
    if not isinstance(names, list) or any(name != "tokenizer.json" for name in names):
        supported = "only tokenizer.json is read"
        raise settings.refusal("fast_tokenizer_files", names, supported)


class _Tokens(NamedTuple):
    """The tokens that are declared outside the vocabulary.

    Attributes:
        named: {name: token} for names such as "bos_token", in transformers' order.
        extra: other special tokens.
        declared: {id: token} of all added tokens.
    """

    named: dict[str, AddedToken]
    extra: list[AddedToken]
    declared: dict[int, AddedToken]


def _read_tokens(directory, settings: Fields, parsed, class_name) -> _Tokens:
    """Read the tokens from tokenizer_config.json, or else from the older files."""
    values = dict(settings.values)
    extra = values.pop("additional_special_tokens", None)
    values.setdefault(EXTRA_TOKENS, extra)
    stored_tokens = {
        t["id"]: _stored_token(t) for t in parsed.get("added_tokens") or []
    }
    path = directory / "added_tokens.json"
    encoder: dict = {}
    if (decoder := values.get("added_tokens_decoder")) is None:
        # Before this field existed, tokens were stored in two other files.
        _merge_special_tokens(directory / "special_tokens_map.json", values)
        encoder = _read(path)
    elif not isinstance(decoder, dict):
        raise settings.refusal("added_tokens_decoder", decoder, "it must be an object")
    named_tokens = _named_tokens(settings, values, parsed, class_name)
    extra = _extra_tokens(settings, values)
    special_contents = {str(token) for token in (*named_tokens.values(), *extra)}
    declared_tokens = {}
    for content, i in encoder.items():
        if type(i) is not int or i < 0:
            raise ValueError(f"{path}: {content!r} has the id {i!r}, expected a number")
        is_special = content in special_contents
        declared_tokens[i] = AddedToken(
            content, normalized=not is_special, special=is_special
        )
    if decoder is None:
        declared_tokens |= stored_tokens
    for key, value in (decoder or {}).items():
        if not (key.isdecimal() and len(key) < 10):
            raise settings.refusal("added_tokens_decoder", key, "it must be an id")
        field = f"added_tokens_decoder.{key}"
        declared_tokens[int(key)] = _token(settings, field, value, special=False)
    return _Tokens(named_tokens, extra, declared_tokens)


def _stored_token(token: Mapping) -> AddedToken:
    """Return the token of an entry in tokenizer.json."""
    flags = {flag: token[flag] for flag in _TOKEN_FLAGS if flag in token}
    return AddedToken(token["content"], **flags)


def _merge_special_tokens(path, values: dict) -> None:
    """Let special_tokens_map.json override the settings, as transformers does."""
    fields = Fields(path, _read(path))
    for field, value in fields.values.items():
        if field == EXTRA_TOKENS and isinstance(value, list):
            extra = values.get(field) or []
            if isinstance(extra, list):
                value = [*extra, *(v for v in value if v not in extra)]
        elif field == "additional_special_tokens":
            # A list of extra tokens in the settings takes precedence.
            if values.get(EXTRA_TOKENS) is None:
                values[EXTRA_TOKENS] = value
            continue
        elif field != EXTRA_TOKENS and not field.endswith("_token"):
            raise fields.refusal(field, value, "it must name a token")
        if isinstance(value, dict) and field.endswith("_token"):
            value = {**value, "special": True}
        values[field] = value


def _named_tokens(settings, values, parsed, class_name) -> dict[str, AddedToken]:
    padding = parsed.get("padding") or {}
    defaults = dict(DEFAULT_TOKENS.get(class_name, {}))
    if "pad_token" in padding:
        defaults.setdefault("pad_token", padding["pad_token"])
    custom_fields = [
        f for f in values if f.endswith("_token") and f not in NAMED_TOKENS
    ]
    tokens = {}
    for field in (*NAMED_TOKENS, *custom_fields):
        value = values[field] if field in values else defaults.get(field)
        if value is not None and field not in _IGNORED_FIELDS:
            tokens[field] = _token(settings, field, value, special=True)
    for field in (EXTRA_TOKENS, "model_specific_special_tokens"):
        if isinstance(values.get(field), dict):
            for name, value in values[field].items():
                key = f"{field}.{name}"
                tokens[name] = _token(settings, key, value, special=True)
    return tokens


def _extra_tokens(settings, values) -> list[AddedToken]:
    field = EXTRA_TOKENS
    value = values.get(field)
    if isinstance(value, dict | None):
        return []
    if not isinstance(value, list):
        raise settings.refusal(field, value, "it must be a list of tokens")
    return [_token(settings, field, token, special=True) for token in value]


def _token(settings: Fields, field: str, value: Any, *, special: bool) -> AddedToken:
    """Return the token of a field: text, or an object with content and flags.

    Args:
        settings: settings that hold the field.
        field: name of the field, for error messages.
        value: value of the field.
        special: whether a value that is text makes a special token.
    """
    if isinstance(value, str) and special:
        return AddedToken(value, special=True)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise ValueError(f"{settings.path}: {field}={value!r}, expected text")
    flags = {k: v for k, v in value.items() if k not in ("content", "__type", "id")}
    for flag, setting in flags.items():
        if flag not in _TOKEN_FLAGS or not isinstance(setting, bool):
            supported = "flags are true or false: " + ", ".join(_TOKEN_FLAGS)
            raise settings.refusal(f"{field}.{flag}", setting, supported)
    if flags.get("single_word"):
        raise settings.refusal(f"{field}.single_word", True, "it must be False")
    return AddedToken(content, **flags)


def _tokens_to_add(tokens: _Tokens, parsed, class_name) -> list[AddedToken]:
    """Return the tokens that transformers adds to a tokenizer, in its order."""
    stored_tokens = [_stored_token(t) for t in parsed.get("added_tokens") or []]
    present_tokens = [] if class_name else stored_tokens
    states = {_state(token) for token in present_tokens}
    names = {str(token) for token in tokens.named.values()}
    added_tokens = [
        t for _, t in sorted(tokens.declared.items()) if _state(t) not in states
    ]
    known_contents = {str(token) for token in (*present_tokens, *added_tokens)}
    for token in (*tokens.named.values(), *tokens.extra):
        if str(token) not in known_contents:
            added_tokens.append(token)
            known_contents.add(str(token))
    for token in added_tokens:
        token.special = token.special or str(token) in names
    if class_name == "Qwen2Tokenizer":
        special_tokens = (*tokens.named.values(), *tokens.extra)
        contents = dict.fromkeys(map(str, special_tokens))
        added_tokens += [AddedToken(content, special=True) for content in contents]
    return added_tokens


def _check_eos(directory, tokens: _Tokens, parsed: dict) -> None:
    """Refuse an end of text without an id: no model has learned to write a new one."""
    eos = tokens.named.get("eos_token")
    known_contents = {str(token) for token in tokens.declared.values()}
    known_contents |= {token for token, _ in _vocabulary(parsed) if token == str(eos)}
    if eos is not None and str(eos) not in known_contents:
        raise ValueError(
            f"{directory}: eos token {[str(eos)]} is not in vocabulary; eos_token must "
            f"be one of its tokens"
        )


def _state(token: AddedToken) -> tuple:
    """Return a token's content and flags."""
    return str(token), *(getattr(token, flag) for flag in _TOKEN_FLAGS)


def _has_tokens(parsed: dict, added_tokens: list[AddedToken], class_name) -> bool:
    """Return whether adding these tokens would leave a tokenizer.json unchanged."""
    stored_entries = {t["content"]: t for t in parsed.get("added_tokens") or []}
    final_states = {str(token): _state(token) for token in added_tokens}
    if any(
        content not in stored_entries
        or _state(_stored_token(stored_entries[content])) != state
        for content, state in final_states.items()
    ):
        return False
    if class_name is None:
        return True
    # A class starts without added tokens and numbers new ones in the order of addition.
    vocab = parsed["model"]["vocab"]
    new_contents = [content for content in final_states if content not in vocab]
    ids = {content: len(vocab) + i for i, content in enumerate(new_contents)}
    return stored_entries.keys() == final_states.keys() and all(
        token["id"] == ids.get(content, vocab.get(content))
        for content, token in stored_entries.items()
    )


def _check_ids(directory, declared_tokens: Mapping, parsed: dict) -> None:
    """Refuse a declared id that its token does not get: the model learned this id."""
    ids = {t["content"]: t["id"] for t in parsed.get("added_tokens") or []}
    for i, token in declared_tokens.items():
        if (actual := ids.get(str(token))) != i:
            raise ValueError(
                f"{directory}: added_tokens_decoder or added_tokens.json gives "
                f"{str(token)!r} the id {i}, but it gets {actual}; save the tokenizer "
                f"with transformers again"
            )


def _eos_tokens(
    directory, model: dict, parsed: dict, eos_token: str | None
) -> list[str]:
    """Return the tokens that end a turn: the tokenizer's, and the model's.

    Transformers ends generation according to generation_config.json, or else according
    to config.json.
    """
    for name, values in (
        ("generation_config.json", _read(directory / "generation_config.json")),
        ("config.json", model),
    ):
        ids = _eos_ids(directory / name, values)
        if ids:
            break
    contents = {i: t for t, i in _vocabulary(parsed) if i in ids}
    eos_tokens = [] if eos_token is None else [eos_token]
    for i in ids:
        if i not in contents:
            raise ValueError(
                f"{directory / name}: eos_token_id={i} is not the id of a token in "
                f"tokenizer.json"
            )
        if contents[i] not in eos_tokens:
            eos_tokens.append(contents[i])
    if not eos_tokens:
        raise ValueError(
            f"{directory}: neither {SETTINGS} (eos_token) nor generation_config.json "
            f"nor config.json (eos_token_id) names an end of text"
        )
    return eos_tokens


def _vocabulary(parsed: dict) -> Iterator[tuple[str, int]]:
    """Yield the tokens and their ids, with added tokens last."""
    vocab = parsed["model"]["vocab"]
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        yield from ((entry[0], i) for i, entry in enumerate(vocab))
    for token in parsed.get("added_tokens") or []:
        yield token["content"], token["id"]


def _eos_ids(path: pathlib.Path, values: dict) -> list[int]:
    """Return the ids in eos_token_id, which may hold one, several or none."""
    ids = values.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"{path}: eos_token_id={ids!r}, expected ids from 0 on")
    return ids


def _chat_template(directory: pathlib.Path, settings: Fields) -> str | None:
    """Return the default template, from a file or else from the settings.

    Raises:
        ValueError: a template is not text, or no template is the default.
    """
    path = directory / "chat_template.jinja"
    files = {"default": path} if path.is_file() else {}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file
    try:
        templates = {name: file.read_text("utf-8") for name, file in files.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a template: {error}") from None
    if not templates:
        templates = settings.get("chat_template")
        if isinstance(templates, str | None):
            return templates
        if isinstance(templates, list):  # named templates, in an older layout
            if not all(isinstance(t, dict) and "name" in t for t in templates):
                supported = "it must be a list of objects with name and template"
                raise settings.refusal("chat_template", templates, supported)
            templates = {str(t["name"]): t.get("template") for t in templates}
        if not isinstance(templates, dict):
            raise ValueError(
                f"{settings.path}: chat_template is of type "
                f"{type(templates).__name__}, expected text"
            )
    if not isinstance(templates.get("default"), str):
        names = ", ".join(map(repr, sorted(templates))) or "none"
        raise ValueError(
            f"{directory}: chat_template has no template 'default', which is the one "
            f"that writes a chat without tools; it has {names}"
        )
    return templates["default"]

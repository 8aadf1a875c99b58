"""The bytes of a tokenizer.json's tokens, and a copy of it without added tokens."""

import json
import os
import re
from collections.abc import Mapping

import tokenizers

from rsearch.runtime.boundary import boundary


def _byte_alphabet() -> dict[str, int]:
    """Return {character: byte}, GPT-2's printable characters (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(256 + i): b for i, b in enumerate(other_bytes)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
# A vocabulary may have MAX_SPARSITY ids per token and MAX_UNUSED more ids.
MAX_SPARSITY = 2
MAX_UNUSED = 1 << 16


def parse_tokenizer(text: str, name: str | os.PathLike) -> tokenizers.Tokenizer:
    """Make the tokenizer of a tokenizer.json.

    Raises:
        ValueError: the library refuses it.
    """
    with boundary(f"{name}: not a tokenizer"):
        return tokenizers.Tokenizer.from_str(text)


def body_tokenizer(parsed: dict, name: str) -> tokenizers.Tokenizer:
    """Make a copy without added tokens, in which their spellings are ordinary text.

    Raises:
        ValueError: text could still become an added token.
    """
    names = {t["content"] for t in parsed.get("added_tokens") or []}
    model = dict(parsed["model"])
    if isinstance(model.get("vocab"), dict):
        # BPE with ignore_merges, or WordLevel, would find them in the vocabulary.
        kept_tokens = {model.get("unk_token")}
        model["vocab"] = {
            t: i
            for t, i in model["vocab"].items()
            if t not in names or t in kept_tokens
        }
        if "merges" in model:
            model["merges"] = [
                m for m in model["merges"] if _merge_pair(m) not in names
            ]
        if model.get("unk_token") in names:
            if not _knows_all_bytes(model):
                raise ValueError(
                    f"{name}: text can become the unknown token "
                    f"{model['unk_token']!r}, which is an added token; only "
                    f"vocabularies that hold every byte are supported"
                )
            del model["vocab"][model["unk_token"]]
            model["unk_token"] = None
    elif names:
        raise ValueError(
            f"{name}: in a {model.get('type')} model text can become an added token; "
            f"only models with a vocabulary by name, such as BPE, are supported"
        )
    body = {
        **parsed,
        "added_tokens": [],
        "model": model,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return parse_tokenizer(json.dumps(body), name)


def _merge_pair(pair) -> str:
    """Return the result of a BPE merge, whose pair is one string in older files."""
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


def _knows_all_bytes(model: dict) -> bool:
    """Return whether this vocabulary covers all bytes, so that no text is unknown."""
    vocab = model["vocab"]
    if all(byte in vocab for byte in BYTE_ALPHABET):
        return True
    has_byte = (f"<0x{byte:02X}>" in vocab for byte in range(256))
    return bool(model.get("byte_fallback")) and all(has_byte)


def token_bytes(
    parsed: dict, tokenizer: tokenizers.Tokenizer, added: Mapping[str, int], name: str
) -> list[bytes]:
    """Return the [vocab_size] bytes of each id, byte-level or with byte fallback.

    Args:
        parsed: the object in tokenizer.json.
        tokenizer: the tokenizer made from it.
        added: {text: id} of the added tokens.
        name: name of the tokenizer, for error messages.

    Raises:
        ValueError: there are no tokens, or ids go far beyond their number.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= MAX_SPARSITY * len(vocab) + MAX_UNUSED:
        raise ValueError(
            f"{name}: ids up to {size - 1} for the {len(vocab)} tokens in a vocabulary"
        )
    table = [b""] * size
    is_byte_level = "ByteLevel" in json.dumps(parsed.get("decoder") or {})
    for token, i in vocab.items():
        if token in added:
            table[i] = token.encode("utf-8")
        elif is_byte_level and all(c in BYTE_ALPHABET for c in token):
            table[i] = bytes(BYTE_ALPHABET[c] for c in token)
        elif re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            table[i] = bytes([int(token[3:5], 16)])
        else:
            table[i] = token.replace("\u2581", " ").encode("utf-8")
    return table

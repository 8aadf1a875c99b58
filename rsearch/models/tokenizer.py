"""Text to ids and back, where only a prompt's template can make control tokens.

A prompt goes through the chat template and may hold control tokens. Retrieved text goes
through the body encoder: the same tokenizer without its added tokens, so that no text
can become a control token. Ids are decoded through one table of their bytes, which
people, parsers and the stop automaton share.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Sequence

import jinja2
import jinja2.sandbox
import numpy as np

from rsearch.models.hf.directory import read_object
from rsearch.models.vocabulary import body_tokenizer, parse_tokenizer, token_bytes
from rsearch.types import Messages


class Tokenizer:
    """A model's tokenizer for prompts, for other texts, and for decoding.

    Attributes:
        vocab_size: rows an embedding needs so that every id has one.
        token_bytes: [vocab_size] the bytes of each id; a control token has those of its
            spelling, an id without a token has none.
        control_ids: ids of all added tokens.
        eos_ids: ids that end a turn.
        pad_id: fills fixed shapes; masks, not this id, say what is padding.
        fingerprint: hex digest of tokenizer and chat template.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        eos_tokens: Sequence[str],
        chat_template: str | None,
        template_tokens: dict[str, str] | None = None,
        name: str = "tokenizer",
    ):
        self._name, self._json = name, tokenizer_json
        self._full = parse_tokenizer(tokenizer_json, name)
        self._full.no_truncation()
        self._full.no_padding()
        parsed = json.loads(tokenizer_json)
        self._body = body_tokenizer(parsed, name)
        added = {t["content"]: t["id"] for t in parsed.get("added_tokens") or []}
        self.control_ids = frozenset(added.values())
        self.token_bytes = token_bytes(parsed, self._full, added, name)
        self.vocab_size = len(self.token_bytes)
        missing = [t for t in eos_tokens if self._full.token_to_id(t) is None]
        if missing or not eos_tokens:
            raise ValueError(
                f"{name}: eos token {missing or None} is not in vocabulary"
            )
        self.eos_ids = tuple(self._full.token_to_id(t) for t in eos_tokens)
        self.pad_id = self.eos_ids[0]
        self._template_tokens = {"eos_token": eos_tokens[0], **(template_tokens or {})}
        self._template_source = chat_template
        self._template = _compile_template(chat_template, name)
        digest = hashlib.sha256(tokenizer_json.encode())
        digest.update((chat_template or "").encode())
        digest.update(json.dumps(self.eos_ids).encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the [n] int32 ids of text, in which no control token can arise.

        Unpaired surrogates, which no UTF-8 text holds, become U+FFFD first. Bytes that
        the vocabulary lacks (SmolLM2's has no 0x04) are dropped, as transformers does.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._body.encode(text, add_special_tokens=False).ids
        assert self.control_ids.isdisjoint(ids)
        return np.asarray(ids, np.int32)

    def encode_raw(self, text: str, opening: str = "") -> np.ndarray:
        """Return the [n] int32 ids of start tokens and a prompt without template.

        Args:
            text: in which no control token can arise.
            opening: the program's text after it, which may hold control tokens.
        """
        encoding = self._full.encode("a", add_special_tokens=True)
        start = encoding.special_tokens_mask.index(0)
        ids = self._encode_pieces([(text, False), (opening, True)])
        return np.concatenate([np.asarray(encoding.ids[:start], np.int32), ids])

    def encode_prompt(self, messages: Messages, opening: str = "") -> np.ndarray:
        """Return the [n] int32 ids of a chat, written by the chat template.

        The template's text may hold control tokens. Contents cannot: they are encoded
        as bodies, between the template's text. Without a template the contents are
        joined by newlines.

        Args:
            messages: of the chat.
            opening: the first words of the reply, which belong to the prompt and may
                hold control tokens.

        Raises:
            ValueError: the template refuses these messages, or loses one of them.
        """
        if self._template is None:
            contents = "\n".join(m["content"] for m in messages)
            return self._encode_pieces([(contents, False), (opening, True)])
        # Contents are rendered as opaque marks and put back afterwards, so that control
        # tokens are looked for in the template's text only. The em spaces show whether
        # the template strips its contents.
        marks = [f"\u2003\ue000{i}\ue001\u2003" for i in range(len(messages))]
        text = self._render(messages, marks)
        pieces, rendered = [], set()
        split = re.split("(\u2003?\ue000[0-9]+\ue001\u2003?)", text)
        for template_text, mark in zip(split[::2], [*split[1::2], ""]):
            pieces.append((template_text, True))
            if mark:
                i = int(mark.strip("\u2003\ue000\ue001"))
                content = messages[i]["content"]
                content = content if mark.startswith("\u2003") else content.lstrip()
                content = content if mark.endswith("\u2003") else content.rstrip()
                pieces.append((content, False))
                rendered.add(i)
        if dropped := [m["role"] for i, m in enumerate(messages) if i not in rendered]:
            raise ValueError(f"{self._name}: chat template drops messages of {dropped}")
        return self._encode_pieces([*pieces, (opening, True)])

    @property
    def has_template(self) -> bool:
        """Whether a template writes chats; else contents are joined."""
        return self._template is not None

    def role_frame(self, role: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the template's text around a message after the assistant's, as ids.

        Returns:
            [n] int32 ids from the end of the assistant's turn to the message, and [m]
            from its end to the assistant's next words; None where the template refuses
            the role, drops it, or does not frame it in control tokens.
        """
        if self._template is None:
            return None
        chat = [{"role": r, "content": ""} for r in ("user", "assistant", role)]
        marks = [f"\ue000{i}\ue001" for i in range(len(chat))]
        try:
            text = self._render(chat, marks)
        except ValueError:
            return None
        _, _, text = text.partition(marks[1])
        before, mark, after = text.partition(marks[2])
        first, second = (self._encode_pieces([(t, True)]) for t in (before, after))
        is_framed = not self.control_ids.isdisjoint(first.tolist())
        return (first, second) if mark and role in before and is_framed else None

    def _render(self, messages: Messages, contents: Sequence[str]) -> str:
        """Render the template with these messages and other contents."""
        marked = [{**m, "content": content} for m, content in zip(messages, contents)]
        try:
            return self._template.render(
                messages=marked, add_generation_prompt=True, **self._template_tokens
            )
        except Exception as error:  # The template is a program of somebody else's.
            roles = [m["role"] for m in messages]
            raise ValueError(
                f"{self._name}: chat template refuses roles {roles}: {error}"
            ) from error

    def _encode_pieces(self, pieces) -> np.ndarray:
        """Encode pieces (text, whether it may hold control tokens): [n] int32 ids.

        Text on both sides of a border between pieces is encoded in one go, as a full
        prompt would be; only control tokens separate it.
        """
        ids, pending = [], ""
        for text, trusted in pieces:
            if not trusted:
                pending += text
                continue
            encoding = self._full.encode(text, add_special_tokens=False)
            end = 0
            for token, (start, stop) in zip(encoding.ids, encoding.offsets):
                if token in self.control_ids:
                    ids += self.encode(pending + text[end:start]).tolist()
                    ids.append(token)
                    pending, end = "", stop
            pending += text[end:]
        ids += self.encode(pending).tolist()
        return np.asarray(ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        # A model may have more rows than its tokenizer has tokens.
        table, size = self.token_bytes, len(self.token_bytes)
        return b"".join(table[i] for i in ids if i < size).decode("utf-8", "replace")

    @property
    def special_ids(self) -> dict:
        """bos, eos and pad ids by their names in config.json."""
        bos = self._template_tokens.get("bos_token")
        ids = {
            "eos_token_id": list(self.eos_ids) if self.eos_ids[1:] else self.eos_ids[0],
            "pad_token_id": self.pad_id,
        }
        return (
            ids if bos is None else {"bos_token_id": self._full.token_to_id(bos), **ids}
        )

    def save(self, directory: pathlib.Path) -> None:
        """Write the files from which `load_tokenizer` and transformers load it."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._template_tokens,
        }
        if self._template_source is not None:
            settings["chat_template"] = self._template_source
        files = {
            "tokenizer.json": self._json,
            "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
            "generation_config.json": json.dumps(self.special_ids, indent=2) + "\n",
        }
        for name, text in files.items():
            (directory / name).write_bytes(text.encode("utf-8"))


def load_tokenizer(directory: pathlib.Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face model directory.

    Raises:
        ValueError: tokenizer.json is missing or unreadable, or names no end of text.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{directory}: no tokenizer.json; one is made from a SentencePiece model "
            f'by: python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{directory}').save_pretrained('{directory}')\""
        )
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a tokenizer: {error}") from None
    tokenizer = parse_tokenizer(text, path)
    settings = _settings(directory / "tokenizer_config.json")
    generation = _settings(directory / "generation_config.json")
    tokens = {
        name: _content(directory, name, settings[name])
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if settings.get(name) is not None
    }
    eos = [tokens["eos_token"]] if "eos_token" in tokens else []
    for i in _eos_ids(directory, generation):
        token = tokenizer.id_to_token(i)
        if token is not None and token not in eos:
            eos.append(token)
    if not eos:
        raise ValueError(
            f"{directory}: neither tokenizer_config.json (eos_token) nor "
            f"generation_config.json (eos_token_id) names an end of text"
        )
    return Tokenizer(
        text,
        eos_tokens=eos,
        chat_template=_chat_template(directory, settings),
        template_tokens=tokens,
        name=str(directory),
    )


def _settings(path: pathlib.Path) -> dict:
    """Return the object in a JSON file, {} if there is no file."""
    return read_object(path) if path.is_file() else {}


def _chat_template(directory, settings) -> str | None:
    """Return the template beside the tokenizer, else the one in its settings."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a template: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # Templates with names, an older layout.
        named = [t for t in template if isinstance(t, dict)]
        defaults = [t.get("template") for t in named if t.get("name") == "default"]
        template = defaults[-1] if defaults else None
    if not isinstance(template, str | None):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template is a "
            f"{type(template).__name__}, expected text"
        )
    return template


def _content(directory, name, token) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: {name}={token!r}, expected text"
        )
    return text


def _eos_ids(directory, generation) -> list[int]:
    """Return the ids of eos_token_id, which may be one, several or none."""
    ids = generation.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        path = directory / "generation_config.json"
        raise ValueError(f"{path}: eos_token_id={ids!r}, expected ids from 0 on")
    return ids


def _compile_template(source: str | None, name: str):
    """Compile a chat template in a sandbox, with the names that templates expect."""
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    # Templates that print today's date would make prompts differ from run to run.
    environment.globals["strftime_now"] = lambda _: "26 Jul 2024"
    environment.filters["tojson"] = lambda value, **kw: json.dumps(
        value, **{"ensure_ascii": False, **kw}
    )
    try:
        return environment.from_string(source)
    except Exception as error:  # RecursionError, too
        raise ValueError(f"{name}: chat template does not parse: {error}") from error

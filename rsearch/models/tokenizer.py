"""Text to ids and back, where only a prompt's template can make control tokens.

A prompt goes through the chat template and may hold control tokens. Retrieved text goes
through the body encoder: the same tokenizer without its added tokens, so that no text
can become a control token. Ids are decoded with a single table of their bytes, which is
the same for people, parsers and the stop automaton.
"""

import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from rsearch.models.chat_template import ChatTemplate
from rsearch.models.tokenizer_files import EXTRA_TOKENS, read_tokenizer_files
from rsearch.models.vocabulary import body_tokenizer, parse_tokenizer, token_bytes
from rsearch.runtime.boundary import boundary
from rsearch.types import Messages

# The characters that tokenizers strips around an added token: Unicode's White_Space.
_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    chr(c) for c in range(0x2000, 0x200B)
)
# Normalizers in tokenizer.json: one that puts a space before a text, and one that does
# nothing.
_PREPEND = json.dumps({"type": "Prepend", "prepend": "\u2581"})
_NO_STEPS = json.dumps({"type": "Sequence", "normalizers": []})
SLACK = 1 << 13  # extra characters that are read beyond those that may matter
RECURRING = 256  # longest text, in characters, that may recur: a tag, question or turn
NUM_RECURRING = 8192  # number of such texts, the last ones used, whose ids are cached


class Tokenizer:
    """A model's tokenizer for prompts, for other texts, and for decoding.

    Attributes:
        vocab_size: number of rows an embedding needs to have one for every id.
        token_bytes: [vocab_size] the bytes of each id; a control token has the bytes of
            its spelling, and an id without a token has none.
        control_ids: ids of all added tokens.
        eos_ids: ids that end a turn.
        pad_id: id that fills fixed shapes; masks, not this id, identify padding.
        fingerprint: hex digest of the tokenizer and the chat template.
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
        # Some tokenizers put a space before the first word of a prompt, and some also
        # after each control token. None puts one into the middle of a text.
        self._inner = self._after_control = self._body
        if (changed := _without_space(parsed, inner=False)) is not parsed:
            self._inner = self._after_control = body_tokenizer(changed, name)
        elif (changed := _without_space(parsed, inner=True)) is not parsed:
            self._inner = body_tokenizer(changed, name)
        tokens = parsed.get("added_tokens") or []
        added_ids = {t["content"]: t["id"] for t in tokens}
        self.control_ids = frozenset(added_ids.values())
        self._strips_left = {t["id"] for t in tokens if t.get("lstrip")}
        self._strips_right = {t["id"] for t in tokens if t.get("rstrip")}
        self.token_bytes = token_bytes(parsed, self._full, added_ids, name)
        self.vocab_size = len(self.token_bytes)
        self._longest = max(map(len, self.token_bytes))
        missing = [t for t in eos_tokens if self._full.token_to_id(t) is None]
        if missing or not eos_tokens:
            raise ValueError(
                f"{name}: eos token {missing or None} is not in vocabulary"
            )
        self.eos_ids = tuple(self._full.token_to_id(t) for t in eos_tokens)
        self.pad_id = self.eos_ids[0]
        self._template_tokens = {"eos_token": eos_tokens[0], **(template_tokens or {})}
        self._template_source = chat_template
        self._template = None
        if chat_template is not None:
            try:
                self._template = ChatTemplate(chat_template)
            except ValueError as error:
                raise ValueError(f"{name}: chat template: {error}") from error
        # The places of the contents depend only on the roles.
        self._marked = functools.lru_cache(maxsize=256)(self._render_marks)
        self._controls = functools.lru_cache(maxsize=256)(self._find_controls)
        self._recurring = functools.lru_cache(NUM_RECURRING)(self._body_ids)
        digest = hashlib.sha256(tokenizer_json.encode())
        digest.update((chat_template or "").encode())
        digest.update(json.dumps(self.eos_ids).encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the [n] int32 ids of a text, which never include control tokens.

        The text follows others: no space is put before its first word, so that the ids
        are decoded as the same text. The first text of a prompt is for `encode_raw`.
        Unpaired surrogates, which UTF-8 cannot hold, first become U+FFFD. Bytes that
        the vocabulary lacks (SmolLM2's has no 0x04) are dropped, as in transformers.
        """
        return self._encode(self._inner, text).copy()

    def cut(self, text: str, limit: int) -> str:
        """Return the beginning of a text: that of its first `limit` tokens."""
        return self.decode(self.encode_start(text, limit)[:limit])

    def encode_start(self, text: str, limit: int) -> np.ndarray:
        """Return the ids of a text, or more than `limit` ids from a long text's start.

        The first `limit` ids are those of the full text. A long text is read until
        these ids end SLACK characters before the end of the part that was read. A
        splitting pattern looks ahead less far, unless a run of blanks or a single word
        is that long.
        """
        size = limit * self._longest + SLACK
        if len(text) <= size:
            return self.encode(text)
        text = _replace_unpaired(text)
        while size < len(text):
            encoding = self._encoding(self._inner, text[:size])
            # The text before the first surplus id belongs to the wanted ids.
            if len(encoding) > limit and encoding.offsets[limit][0] <= size - SLACK:
                return np.asarray(encoding.ids, np.int32)
            size *= 4  # some characters make no id, or less than one each
        return self.encode(text)

    def _encode(self, tokenizer, text: str) -> np.ndarray:
        """Return the ids of a text by one of the two body tokenizers.

        The array may be cached and must not be modified.
        """
        is_short = len(text) <= RECURRING
        return (self._recurring if is_short else self._body_ids)(tokenizer, text)

    def _body_ids(self, tokenizer, text: str) -> np.ndarray:
        ids = self._encoding(tokenizer, _replace_unpaired(text)).ids
        assert self.control_ids.isdisjoint(ids)
        return np.asarray(ids, np.int32)

    def _encoding(self, tokenizer, text: str):
        with boundary(f"{self._name}: {len(text)} characters cannot be encoded"):
            return tokenizer.encode(text, add_special_tokens=False)

    def encode_raw(self, text: str, opening: str = "") -> np.ndarray:
        """Return the [n] int32 ids of the start tokens and a prompt without template.

        Args:
            text: the prompt, in which no control token can arise.
            opening: the program's text after the prompt, which may hold control tokens.
        """
        encoding = self._full.encode("a", add_special_tokens=True)
        start = encoding.special_tokens_mask.index(0)
        ids = self._encode_pieces([(text, False), (opening, True)])
        return np.concatenate([np.asarray(encoding.ids[:start], np.int32), ids])

    def encode_inner(self, text: str, *, is_mark: bool) -> np.ndarray:
        """Return the [n] int32 ids of a text that is not the first in its prompt.

        Args:
            text: a text that follows others.
            is_mark: whether the text is the program's and may hold control tokens.
        """
        return self._encode_pieces([(text, is_mark)], is_first=False)

    def encode_prompt(self, messages: Messages, opening: str = "") -> np.ndarray:
        """Return the [n] int32 ids of a chat, written by the chat template.

        The template's text may hold control tokens. Contents cannot: they are encoded
        as bodies, between the template's texts. Without a template the contents are
        joined by newlines.

        Args:
            messages: messages of the chat.
            opening: the first words of the reply, which belong to the prompt and may
                hold control tokens.

        Raises:
            ValueError: the template refuses these messages, drops one of them, or
                rewrites one in an unsupported way.
        """
        if self._template is None:
            contents = "\n".join(m["content"] for m in messages)
            return self._encode_pieces([(contents, False), (opening, True)])
        # Contents are rendered as opaque marks and put back afterwards, so that control
        # tokens are searched for only in the template's text. A template that depends
        # on contents treats the marks differently, which a rendering of the actual
        # messages reveals.
        rendered = self._render(messages)
        for variant in _variants(messages):
            pieces = self._pieces(variant)
            if "".join(text for text, _ in pieces) == rendered:
                return self._encode_pieces([*pieces, (opening, True)])
        raise ValueError(
            f"{self._name}: chat template rewrites the contents of messages of "
            f"{[m['role'] for m in messages]} in a way that is not supported"
        )

    @property
    def has_template(self) -> bool:
        """Whether a template writes chats; without one, contents are joined."""
        return self._template is not None

    def role_frame(self, role: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the ids of the template's text around a message after the assistant's.

        Returns:
            [n] int32 ids from the end of the assistant's turn to the message, and [m]
            from the end of the message to the assistant's next words; None if the
            template refuses the role, drops it, or does not frame it in control tokens.
        """
        if self._template is None:
            return None
        marks = [f"\ue000{i}\ue001" for i in range(3)]
        roles = ("user", "assistant", role)
        chat = [{"role": r, "content": mark} for r, mark in zip(roles, marks)]
        try:
            text = self._render(chat)
        except ValueError:
            return None
        _, _, text = text.partition(marks[1])
        before, mark, after = text.partition(marks[2])
        first, second = (self.encode_inner(t, is_mark=True) for t in (before, after))
        is_framed = not self.control_ids.isdisjoint(first.tolist())
        return (first, second) if mark and role in before and is_framed else None

    def _render(self, messages: Messages) -> str:
        """Render the template with the variables that transformers provides."""
        try:
            return self._template.render(
                {
                    "messages": list(messages),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": True,
                    **self._template_tokens,
                }
            )
        except ValueError as error:
            roles = [m["role"] for m in messages]
            raise ValueError(
                f"{self._name}: chat template refuses roles {roles}: {error}"
            ) from error

    def _pieces(self, messages: Messages) -> list[tuple[str, bool]]:
        """Return the texts of the template (True) and the messages (False), in order.

        Raises:
            ValueError: the template refuses the roles or drops a message.
        """
        fields = [(f, t) for m in messages for f, t in m.items() if t and f != "role"]
        shape = tuple(
            (m["role"], *(f for f in m if m[f] and f != "role")) for m in messages
        )
        pieces = []
        for text, i, strips in self._marked(shape):
            pieces.append((text, True))
            if i is not None:
                content = fields[i][1]
                content = content.lstrip() if strips[0] else content
                pieces.append((content.rstrip() if strips[1] else content, False))
        return pieces

    def _render_marks(self, shape: tuple) -> list[tuple]:
        """Return the template's texts, each with the message field that follows it.

        Args:
            shape: for each message, its role and the names of its fields that are not
                empty.

        Returns:
            Rows of (text, number of the field after it, whether that field is stripped
            at its beginning and at its end). The last row has no field.
        """
        chat, num_fields, contents = [], 0, {}
        for role, *names in shape:
            message = {"role": role, "content": ""}
            for name in names:
                if name == "content":
                    contents[num_fields] = role
                # The em spaces show whether the template strips its contents.
                message[name] = f"\u2003\ue000{num_fields}\ue001\u2003"
                num_fields += 1
            chat.append(message)
        parts = re.split("(\u2003?\ue000[0-9]+\ue001\u2003?)", self._render(chat))
        rows = []
        for text, mark in zip(parts[::2], parts[1::2]):
            i = int(mark.strip("\u2003\ue000\ue001"))
            contents.pop(i, None)
            rows.append((text, i, (mark[0] != "\u2003", mark[-1] != "\u2003")))
        if contents:
            raise ValueError(
                f"{self._name}: chat template drops messages of "
                f"{list(contents.values())}"
            )
        return [*rows, (parts[-1], None, None)]

    def _encode_pieces(self, pieces, *, is_first: bool = True) -> np.ndarray:
        """Encode pieces (text, whether it may hold control tokens) as [n] int32 ids.

        Text is encoded across the borders between pieces, as in a full prompt; only
        control tokens separate it.
        """
        ids, pending_text = [], ""
        strips = False  # whether the last control token absorbs the blanks after it
        tokenizer = self._body if is_first else self._inner
        for text, is_trusted in pieces:
            if not is_trusted:
                pending_text += text
                continue
            controls, last_text = self._controls(text)
            for prefix, token in controls:
                pending_text += prefix
                pending_text = pending_text.lstrip(_SPACE) if strips else pending_text
                if token in self._strips_left:
                    pending_text = pending_text.rstrip(_SPACE)
                ids += self._encode(tokenizer, pending_text).tolist()
                ids.append(token)
                pending_text, tokenizer = "", self._after_control
                strips = token in self._strips_right
            pending_text += last_text
        pending_text = pending_text.lstrip(_SPACE) if strips else pending_text
        ids += self._encode(tokenizer, pending_text).tolist()
        return np.asarray(ids, np.int32)

    def _find_controls(self, text: str) -> tuple[list[tuple[str, int]], str]:
        """Return the control tokens of a template's text.

        Returns:
            Rows of (text before a control token, its id), and the text after the last
            control token.
        """
        with boundary(f"{self._name}: the template's text cannot be encoded"):
            encoding = self._full.encode(text, add_special_tokens=False)
        controls, end = [], 0
        for token, (start, stop) in zip(encoding.ids, encoding.offsets):
            if token in self.control_ids:
                controls.append((text[end:start], token))
                end = stop
        return controls, text[end:]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        # A model may have more rows than its tokenizer has tokens.
        table, size = self.token_bytes, len(self.token_bytes)
        ids = np.asarray(ids).tolist()  # indexing by Python's integers is faster
        return b"".join([table[i] for i in ids if i < size]).decode("utf-8", "replace")

    def control_tokens(self) -> frozenset[str]:
        """Return the spellings of all added tokens."""
        return frozenset(self.decode([i]) for i in self.control_ids)

    @property
    def special_ids(self) -> dict:
        """The bos, eos and pad ids by their names in generation_config.json."""
        bos, pad = map(self._template_tokens.get, ("bos_token", "pad_token"))
        return {
            # Without a null, transformers assumes the id of its own default.
            "bos_token_id": None if bos is None else self._full.token_to_id(bos),
            "eos_token_id": list(self.eos_ids) if self.eos_ids[1:] else self.eos_ids[0],
            "pad_token_id": self._full.token_to_id(pad) if pad else self.pad_id,
        }

    def save(self, directory: pathlib.Path) -> None:
        """Write the files from which `load_tokenizer` and transformers load it."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for name, token in self._template_tokens.items():
            is_field = name.endswith("_token")
            target = settings if is_field else settings.setdefault(EXTRA_TOKENS, {})
            target[name] = token
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
        ValueError: a file is missing or unreadable, or has a setting that is not
            supported; see tokenizer_files.
    """
    files = read_tokenizer_files(directory)
    return Tokenizer(
        files.tokenizer_json,
        eos_tokens=files.eos_tokens,
        chat_template=files.chat_template,
        template_tokens=files.named_tokens,
        name=str(directory),
    )


def _replace_unpaired(text: str) -> str:
    """Replace unpaired surrogates by U+FFFD, and each pair by its character."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _variants(messages: Messages) -> Iterator[Messages]:
    """Yield a chat, and then the variants of it that a template may render.

    Templates differ in what they show of an assistant's thought: nothing, or the
    thought separate from the answer. They also strip line feeds or blanks in different
    ways: from all contents, from answers after a thought, or from all replies.
    """
    yield messages
    yield [{**m, "content": m["content"].strip("\n")} for m in messages]
    strips = (str, lambda t: t.lstrip("\n"), lambda t: t.strip("\n"), str.strip)
    for strips_all, shows_thought in itertools.product((False, True), repeat=2):
        for strip in strips:
            yield [
                _without_thought(m, strip, shows_thought, strips_all) for m in messages
            ]


def _without_thought(message, strip, shows_thought: bool, strips_all: bool):
    """Return an assistant's message with its thought removed or moved to a field."""
    *thoughts, answer = message["content"].split("</think>")
    if message["role"] != "assistant" or not (thoughts or strips_all):
        return message
    message = {**message, "content": strip(answer)}
    if thoughts and shows_thought:
        message["reasoning_content"] = thoughts[0].rpartition("<think>")[2].strip("\n")
    return message


def _without_space(parsed: dict, *, inner: bool) -> dict:
    """Return a tokenizer.json changed to put no space before a first word.

    Args:
        parsed: the object in tokenizer.json; returned as it is if nothing changes.
        inner: whether the word is in the middle of a text, or after a control token.
    """
    steps = json.dumps([parsed.get("normalizer"), parsed.get("pre_tokenizer")])
    scheme = '"prepend_scheme": "{}"'.format
    new_steps = steps.replace(scheme("first"), scheme("never"))
    if inner:
        new_steps = new_steps.replace(scheme("always"), scheme("never"))
        new_steps = new_steps.replace(_PREPEND, _NO_STEPS)
    if new_steps == steps:
        return parsed
    normalizer, splits = json.loads(new_steps)
    return {**parsed, "normalizer": normalizer, "pre_tokenizer": splits}

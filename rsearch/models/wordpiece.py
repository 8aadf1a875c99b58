"""WordPiece ids of text for BERT, computed with tensorflow-text.

The steps are those of transformers' BertTokenizer: clean, put spaces around CJK
ideographs, strip accents and lower-case, split at white space and punctuation, then
take the longest tokens of the model's vocabulary. tensorflow-text's BertTokenizer
differs in ways that change ids: control characters become spaces, case is folded
instead of lowered, and the limit of a word is 100 bytes instead of characters. This
module therefore combines tensorflow-text's operations in its own way.

Two differences from transformers remain. Names of special tokens in a text are ordinary
text: '[SEP]' becomes '[', 'sep', ']' (as in transformers with split_special_tokens).
And some characters that are marks, formats or punctuation only since Unicode 9 (2016)
count as such here; transformers' older tables count them as letters of their word.
"""

import itertools
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from rsearch.models.hf.directory import read_object
from rsearch.runtime import files

MAX_WORD_CHARACTERS = 100  # longer words are unknown, as in BertTokenizer
# Characters of a text that are encoded first, per token it may have.
CHARACTERS_PER_TOKEN = 32

# RE2 patterns. White space excludes the separators that cleaning removes as controls.
_REMOVED = r"[\x00-\x08\x0B\x0C\x0E-\x1F\x7F-\x9F\x{FFFD}\p{Cf}\p{Co}]"
_SPACE = (
    r"[\t\n\r\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]"
)
# The gap before 2B920 is BertTokenizer's own.
_IDEOGRAPH = (
    r"([\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}"
    r"\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B920}-\x{2CEAF}\x{2F800}-\x{2FA1F}])"
)
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"

_SPECIAL = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


def lower_cases(directory: pathlib.Path) -> bool:
    """Return whether a directory's WordPiece lower-cases texts, without loading it."""
    return _flag(directory, _read_config(directory), "do_lower_case", True)


class WordPiece:
    """The tokenizer of one model, with its vocabulary in a TensorFlow table.

    Args:
        directory: directory with vocab.txt (or a WordPiece tokenizer.json) and
            tokenizer_config.json.

    Attributes:
        vocab: [V] the tokens by id.
        lower_case, strip_accents, split_ideographs: bool, from tokenizer_config.json.
        unknown_id, first_id, last_id, pad_id: ids of the special tokens.

    Raises:
        ValueError: a file is missing or malformed, or a special token is not in the
            vocabulary.
    """

    def __init__(self, directory: str | os.PathLike):
        directory = pathlib.Path(directory)
        config = _read_config(directory)
        self.vocab = read_vocab(directory)
        _refuse_added_tokens(directory, config)
        self.lower_case = _flag(directory, config, "do_lower_case", True)
        strip = _flag(directory, config, "strip_accents", None)
        self.strip_accents = self.lower_case if strip is None else strip
        self.split_ideographs = _flag(directory, config, "tokenize_chinese_chars", True)
        fields = "unk_token", "cls_token", "sep_token", "pad_token"
        tokens = [_special(directory, config, self.vocab, field) for field in fields]
        self._unknown = tokens[0]
        ids = map(self.vocab.index, tokens)
        self.unknown_id, self.first_id, self.last_id, self.pad_id = ids
        self._tf, self._text = _import_tensorflow()
        self._pieces = self._wordpiece()

    def _wordpiece(self):
        tf = self._tf
        keys = tf.constant([token.encode() for token in self.vocab])
        ids = tf.range(len(self.vocab), dtype=tf.int64)
        with tf.device("/cpu:0"):
            pairs = tf.lookup.KeyValueTensorInitializer(keys, ids)
            table = tf.lookup.StaticVocabularyTable(pairs, num_oov_buckets=1)
        return self._text.WordpieceTokenizer(
            table,
            # Longer words are replaced beforehand; a character has up to four bytes.
            max_bytes_per_word=4 * MAX_WORD_CHARACTERS,
            unknown_token=self._unknown,
        )

    def __call__(self, texts: Sequence[str], *, max_tokens: int) -> list[np.ndarray]:
        """Return the token ids of each text, including the first and last token.

        Args:
            texts: strings; lone surrogates are dropped.
            max_tokens: maximum number of ids of a text; the rest is cut off.

        Returns:
            For each text [n] int32, 2 <= n <= max_tokens.

        Raises:
            ValueError: max_tokens is less than 3.
        """
        if max_tokens < 3:
            raise ValueError(f"{max_tokens=}, expected at least 3: two are special")
        if not texts:
            return []
        first, last = [self.first_id], [self.last_id]
        return [
            np.concatenate([first, ids[: max_tokens - 2], last]).astype(np.int32)
            for ids in self._encode_starts(texts, max_tokens)
        ]

    def pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], *, max_tokens: int
    ) -> tuple[list[np.ndarray], list[int]]:
        """Return the token ids of pairs of texts: first, a text, last, a text, last.

        If a pair is too long, its longer text is cut; if each text is longer than half
        of max_tokens, both are cut, as in transformers' "longest_first".

        Args:
            firsts, seconds: [n] strings.
            max_tokens: maximum number of ids of a pair.

        Returns:
            For each pair [n] int32 ids, and the number of ids before the second text.

        Raises:
            ValueError: max_tokens is less than 5.
        """
        if max_tokens < 5:
            raise ValueError(f"{max_tokens=}, expected at least 5: three are special")
        assert len(firsts) == len(seconds), (len(firsts), len(seconds))
        if not firsts:
            return [], []
        texts = [*firsts, *seconds]
        text_ids = self._encode_starts(texts, max_tokens)
        # If both texts are cut, an odd token goes to the longer one. To find which one
        # is longer, both must be read in full.
        for i, (first, second) in enumerate(zip(firsts, seconds)):
            j = i + len(firsts)
            is_cut = max(len(first), len(second)) > CHARACTERS_PER_TOKEN * max_tokens
            if is_cut and 2 * min(len(text_ids[i]), len(text_ids[j])) > max_tokens - 3:
                text_ids[i], text_ids[j] = self._encode([first, second])
        start, end = [self.first_id], [self.last_id]
        rows, counts = [], []
        for first, second in zip(text_ids[: len(firsts)], text_ids[len(firsts) :]):
            limits = _share(len(first), len(second), max_tokens - 3)
            first, second = first[: limits[0]], second[: limits[1]]
            row = np.concatenate([start, first, end, second, end])
            rows.append(row.astype(np.int32))
            counts.append(len(first) + 2)
        return rows, counts

    def _encode_starts(self, texts, limit):
        """Return the ids of each text, or more than `limit` first ids of a long text.

        A long text is cut before it is encoded. This can only change the ids of the
        word that is cut, of which there are at most MAX_WORD_CHARACTERS: a longer word
        is unknown, and so is its start if that also exceeds the maximum.
        """
        size = CHARACTERS_PER_TOKEN * limit
        text_ids = self._encode([text[:size] for text in texts])
        for i, (text, ids) in enumerate(zip(texts, text_ids)):
            end = size
            while end < len(text) and len(ids) < limit + MAX_WORD_CHARACTERS:
                end *= 4  # long words, or characters that make no id
                ids = self._encode([text[:end]])[0]
            text_ids[i] = ids
        return text_ids

    def _encode(self, texts):
        """Return the ids of each text, without special tokens."""
        tf = self._tf
        with tf.device("/cpu:0"):
            words = self._split(tf.constant([_utf8(text) for text in texts]))
            ids = self._pieces.tokenize(words).merge_dims(1, 2)
        values, bounds = ids.values.numpy(), ids.row_splits.numpy()
        return [values[low:high] for low, high in itertools.pairwise(bounds)]

    def _split(self, texts):
        """Return the normalised words, a RaggedTensor [texts, words]."""
        tf, text = self._tf, self._text
        texts = tf.strings.regex_replace(texts, _REMOVED, "")
        texts = tf.strings.regex_replace(texts, _SPACE, " ")
        if self.split_ideographs:
            texts = tf.strings.regex_replace(texts, _IDEOGRAPH, r" \1 ")
        if self.strip_accents:
            texts = text.normalize_utf8(texts, "NFD")
            texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
        if self.lower_case:
            # This letter, a final sigma when lowered at a word's end, is the only one
            # whose lower case depends on its neighbours.
            texts = tf.strings.regex_replace(texts, "Σ", "σ")
            texts = tf.strings.lower(texts, encoding="utf-8")
        words = text.regex_split(texts, f" |{_PUNCTUATION}", _PUNCTUATION)
        lengths = tf.strings.length(words.flat_values, unit="UTF8_CHAR")
        known_words = tf.where(
            lengths > MAX_WORD_CHARACTERS, self._unknown, words.flat_values
        )
        return words.with_flat_values(known_words)


def read_vocab(directory: str | os.PathLike) -> list[str]:
    """Return a model's [V] tokens by id, from vocab.txt or else from tokenizer.json.

    Raises:
        ValueError: there is neither file, or the file is not a WordPiece vocabulary.
    """
    directory = pathlib.Path(directory)
    path = directory / "vocab.txt"
    if path.is_file():
        try:
            vocab = path.read_bytes().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from None
        vocab = [token.removesuffix("\r") for token in vocab]
        vocab = vocab[:-1] if vocab[-1] == "" else vocab
    elif (path := directory / "tokenizer.json").is_file():
        vocab = _vocab_of_json(path)
    else:
        raise ValueError(f"{directory} has no vocab.txt and no tokenizer.json")
    first_line = {}
    for line, token in enumerate(vocab, start=1):
        if first_line.setdefault(token, line) != line:
            raise ValueError(
                f"{path}:{line}: piece {token!r} is also on line {first_line[token]}"
            )
    return vocab


def _vocab_of_json(path):
    try:
        model = files.read_json(path)["model"]
        kind, vocab = model["type"], model["vocab"]
        by_id = sorted((number, token) for token, number in vocab.items())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no vocabulary could be read: {error!r}") from None
    if kind != "WordPiece":
        raise ValueError(f"{path}: model.type={kind!r}, only 'WordPiece' is supported")
    if [number for number, _ in by_id] != list(range(len(by_id))):
        raise ValueError(f"{path}: ids in model.vocab are not 0 to {len(by_id) - 1}")
    return [token for _, token in by_id]


def _share(first, second, room):
    """Return the numbers of tokens to keep of two texts, at most `room` in all."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)  # an odd token goes to the longer one
    return (short, room - short) if first <= second else (room - short, short)


def _read_config(directory):
    path = directory / "tokenizer_config.json"
    if not path.exists():
        raise ValueError(
            f"{path} is missing: it says whether to lower-case text (do_lower_case)"
        )
    config = read_object(path)
    kind = config.get("tokenizer_class", "BertTokenizer")
    if kind not in ("BertTokenizer", "BertTokenizerFast"):
        raise ValueError(f"{path}: tokenizer_class={kind!r}, expected 'BertTokenizer'")
    if config.get("do_basic_tokenize", True) is not True:
        raise ValueError(f"{path}: do_basic_tokenize must be true")
    if (side := config.get("truncation_side", "right")) != "right":
        raise ValueError(f"{path}: truncation_side={side!r}, expected 'right'")
    return config


def _refuse_added_tokens(directory, config):
    """Refuse tokens that transformers adds to the vocabulary and finds in any text."""
    names = [_content(config.get(field, token)) for field, token in _SPECIAL.items()]
    for name, field in (
        ("tokenizer_config.json", "added_tokens_decoder"),  # {id: token}
        ("tokenizer.json", "added_tokens"),  # [token]
        ("added_tokens.json", None),  # {token: id}
    ):
        path = directory / name
        tokens = read_object(path) if path.is_file() else {}
        if field is not None:
            tokens = tokens.get(field) or []
            tokens = tokens.values() if isinstance(tokens, dict) else tokens
        for token in map(_content, tokens):
            if token not in names:
                raise ValueError(
                    f"{path}: the added token {token!r} is not supported: texts are "
                    "split into tokens of the vocabulary only; delete it if no text "
                    "and no prefix contains it"
                )


def _content(token):
    """Return the text of a token, which may be written as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _flag(directory, config, field, default):
    value = config.get(field, default)
    if value is not default and not isinstance(value, bool):
        path = directory / "tokenizer_config.json"
        raise ValueError(f"{path}: {field}={value!r}, expected true or false")
    return value


def _special(directory, config, vocab, field):
    token = _content(config.get(field, _SPECIAL[field]))
    if token not in vocab:
        raise ValueError(f"{directory}: {field}={token!r} is not in its vocabulary")
    return token


def _utf8(text):
    # U+FFFD is later removed together with the control characters.
    return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def _import_tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf
    import tensorflow_text

    # The accelerator's memory belongs to JAX.
    if tf.config.get_visible_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")
    return tf, tensorflow_text

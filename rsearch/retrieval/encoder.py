"""Encode texts as unit vectors whose dot product is their similarity.

An encoder has `dim`, `fingerprint`, `encode_queries(texts)` and
`encode_passages(texts)`; both functions return [n, dim] float32 rows of length 1.
Families of BERT models differ in prefixes and pooling. What a model's directory
declares must agree with the family, or defines it ("declared"). `HashedNgrams` needs no
model.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rsearch.models import bert
from rsearch.models.hf.directory import find_model
from rsearch.models.wordpiece import WordPiece, lower_cases
from rsearch.retrieval.encoder_files import EncoderDeclarations, read_declarations
from rsearch.runtime import digests
from rsearch.text.normalize import normalize_unicode

# Lengths that rows are padded to, so that few shapes compile; max_tokens is one more.
# They are finest where passages of 100 words lie.
BUCKETS = (16, 32, 64, 96, 128, 144, 160, 176, 192, 224, 256, 320, 384, 512)
QUERY_ROWS = 8  # every batch of queries has exactly this many rows
# Approximate size of a batch of passages, with padding. What a CPU computes for 1,024
# tokens stays in its cache.
PASSAGE_TOKENS, PASSAGE_TOKENS_ON_CPU = 4096, 1024


@dataclasses.dataclass(frozen=True)
class EncoderFamily:
    """A family of models: the prefixes of its inputs and the pooling of its outputs."""

    query_prefix: str
    passage_prefix: str
    pooling: str


FAMILIES = {
    # intfloat/e5-*: arXiv 2212.03533
    "e5": EncoderFamily("query: ", "passage: ", "mean"),
    # BAAI/bge-*-en-v1.5: arXiv 2309.07597. The trailing space changes no token.
    "bge": EncoderFamily(
        "Represent this sentence for searching relevant passages: ", "", "cls"
    ),
    # sentence-transformers/all-MiniLM-L6-v2
    "minilm": EncoderFamily("", "", "mean"),
}
DECLARED = "declared"  # the family described by the model's directory


def load_encoder(
    source: str,
    *,
    family: str | None,
    dim: int = 512,
    max_query_tokens: int = 0,
    max_passage_tokens: int = 0,
) -> "BertEncoder | HashedNgrams":
    """Load the encoder named in a configuration or on a command line.

    Args:
        source: "hashed", or the directory or hub id of a BERT model.
        family: a key of FAMILIES, or DECLARED; not used by "hashed".
        dim: width of the hashed encoder's vectors; a model defines its own.
        max_query_tokens, max_passage_tokens: see BertEncoder; not used by "hashed".

    Raises:
        ValueError: the family is unknown, or the files do not make an encoder.
    """
    if source == "hashed":
        return HashedNgrams(dim)
    check_family(family)
    return BertEncoder(
        find_model(source),
        family=family,
        max_query_tokens=max_query_tokens,
        max_passage_tokens=max_passage_tokens,
    )


def check_family(family: str | None) -> None:
    """Refuse a family that is neither a key of FAMILIES nor DECLARED.

    Raises:
        ValueError: names the value and the choices.
    """
    if family not in FAMILIES and family != DECLARED:
        choices = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"--family (in a run config.retrieval.family) = {family!r}, expected one "
            f"of {choices}, or {DECLARED}"
        )


def encoder_fingerprint(
    source: str,
    *,
    family: str | None,
    dim: int,
    max_query_tokens: int,
    max_passage_tokens: int,
) -> str | None:
    """Return the fingerprint of the encoder that `load_encoder` would load.

    The weights are not loaded; their digest is cached. The result is None unless
    `source` is a local directory with weights. See there for arguments and errors.
    """
    if source == "hashed":
        return HashedNgrams(dim).fingerprint
    check_family(family)
    if not os.path.isdir(os.path.expanduser(source)):
        return None
    design = _read_design(
        find_model(source), family, max_query_tokens, max_passage_tokens
    )
    has_weights = any(design.directory.glob("*.safetensors"))
    return design.fingerprint if has_weights else None


class BertEncoder:
    """A BERT model with its tokenizer, compiled for a few fixed shapes.

    A text's vector does not depend on the other texts of its batch: all batches of one
    length have the same number of rows, and rows do not interact.

    Args:
        directory: a Hugging Face directory; see rsearch.models.bert and wordpiece.
        family: a key of FAMILIES, which sentence-transformers' files in the directory
            must not contradict; or DECLARED, which uses what those files declare.
        max_query_tokens: length at which questions are truncated, prefix and special
            tokens included. 0 uses max_seq_length of sentence_bert_config.json, or
            without it the longest input that tokenizer and positions allow.
        max_passage_tokens: the same for passages.

    Attributes:
        dim: width of the vectors.
        max_query_tokens, max_passage_tokens: the limits in use.
        num_cut: number of passages encoded so far that were longer than
            max_passage_tokens, of which only the beginning was encoded.
        fingerprint: digest of weights, vocabulary and settings; encoders with equal
            fingerprints encode alike.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        family: str,
        max_query_tokens: int = 0,
        max_passage_tokens: int = 0,
    ):
        design = _read_design(
            pathlib.Path(directory), family, max_query_tokens, max_passage_tokens
        )
        spec, params = bert.load_bert(design.directory)
        self.dim, self.family = spec.width, design.family
        self.max_query_tokens = design.max_query_tokens
        self.max_passage_tokens = design.max_passage_tokens
        self.num_cut = 0
        self.fingerprint, self._lowers = design.fingerprint, design.lowers
        self._tokenizer = WordPiece(design.directory)
        if len(self._tokenizer.vocab) > spec.vocab_size:
            raise ValueError(
                f"{design.directory}: the vocabulary has {len(self._tokenizer.vocab)} "
                f"pieces, the model embeds {spec.vocab_size}"
            )
        self._model = bert.Bert(spec)
        self._params = jax.device_put(params)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return [n, dim] float32 unit vectors of questions."""
        prefix, limit = self.family.query_prefix, self.max_query_tokens
        vectors, _ = self._encode(texts, prefix, limit, lambda _: QUERY_ROWS)
        return vectors

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return [n, dim] float32 unit vectors of passages (title, line feed, text)."""
        prefix, limit = self.family.passage_prefix, self.max_passage_tokens
        on_cpu = jax.default_backend() == "cpu"
        tokens = PASSAGE_TOKENS_ON_CPU if on_cpu else PASSAGE_TOKENS
        vectors, num_cut = self._encode(
            texts, prefix, limit, lambda width: max(1, tokens // width)
        )
        self.num_cut += num_cut
        return vectors

    def _encode(self, texts, prefix, max_tokens, rows_of):
        """Return the vectors of texts, and how many texts were cut to max_tokens."""
        texts = [prefix + text for text in texts]
        if self._lowers:
            texts = [text.lower() for text in texts]
        # One more token than is encoded shows which texts are longer.
        ids = self._tokenizer(texts, max_tokens=max_tokens + 1)
        is_cut = [len(row) > max_tokens for row in ids]
        # The last token is special.
        ids = [np.delete(row, -2) if cut else row for row, cut in zip(ids, is_cut)]
        vectors = np.empty((len(texts), self.dim), np.float32)
        pad_id = self._tokenizer.pad_id
        batches = fixed_batches(ids, rows_of, max_tokens=max_tokens, pad_id=pad_id)
        for rows, tokens, counts in batches:
            embedded = bert.embed(
                self._model, self._params, tokens, counts, pooling=self.family.pooling
            )
            vectors[rows] = jax.device_get(embedded)[: len(rows)]
        return vectors, sum(is_cut)


class _Design(NamedTuple):
    """Everything about an encoder except its weights; see BertEncoder."""

    directory: pathlib.Path
    family: EncoderFamily
    max_query_tokens: int
    max_passage_tokens: int
    lowers: bool
    fingerprint: str


def _read_design(directory, family, max_query_tokens, max_passage_tokens):
    """Return the _Design for a BertEncoder's arguments; refuse invalid ones."""
    declarations = read_declarations(directory)
    agreed_family = _agreed_family(directory, family, declarations)
    directory = declarations.model
    spec = bert.read_bert_spec(directory)
    for path, field, value in declarations.widths:
        if value != spec.width:
            raise ValueError(
                f"{path}: {field}={value!r}, but the model's vectors have "
                f"{spec.width} numbers"
            )
    default = declarations.max_tokens
    if default is None:
        default = min(declarations.tokenizer_tokens, spec.max_positions)
    limits = {
        "max_query_tokens": max_query_tokens or default,
        "max_passage_tokens": max_passage_tokens or default,
    }
    for name, limit in limits.items():
        if not 3 <= limit <= spec.max_positions:
            raise ValueError(
                f"{directory}: {name}={limit}, expected 3 to {spec.max_positions}, the "
                "positions of the model"
            )
    # A tokenizer that lower-cases by itself gets its texts unchanged.
    needs_lowering = declarations.lower_case and not lower_cases(directory)
    # "float32" is the computation's dtype; without it every fingerprint would change.
    settings = [family, limits["max_passage_tokens"], "float32"]
    if limits["max_query_tokens"] != limits["max_passage_tokens"]:
        settings.append(limits["max_query_tokens"])
    if family == DECLARED:
        settings.append(dataclasses.astuple(agreed_family))
    if needs_lowering:
        settings.append("lower-cased")
    fingerprint = fingerprint_of(directory, settings)
    return _Design(
        directory, agreed_family, *limits.values(), needs_lowering, fingerprint
    )


def fixed_batches(
    ids: Sequence[Sequence[int]],
    rows_of: Callable[[int], int],
    *,
    max_tokens: int,
    pad_id: int,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield rows of ids in batches of a few shapes, chosen only by a row's length.

    Args:
        ids: [rows] int32 ids of each row, at most max_tokens.
        rows_of: (padded length of a row) -> number of rows in its batches.
        max_tokens: length of the longest row allowed.
        pad_id: id that fills short rows and incomplete batches.

    Yields:
        [n] the indices of n rows of `ids`; [B, T] int32, those rows padded; [B] int32,
        the number of ids in each. Rows from n on are empty.
    """
    widths = [*(b for b in BUCKETS if b < max_tokens), max_tokens]
    row_buckets = np.searchsorted(widths, [len(row) for row in ids])
    for number in np.unique(row_buckets):
        width = widths[number]
        in_bucket = np.flatnonzero(row_buckets == number)
        num_rows = rows_of(width)
        for start in range(0, len(in_bucket), num_rows):
            indices = in_bucket[start : start + num_rows]
            tokens = np.full((num_rows, width), pad_id, np.int32)
            counts = np.zeros(num_rows, np.int32)
            for row, index in enumerate(indices):
                tokens[row, : len(ids[index])] = ids[index]
                counts[row] = len(ids[index])
            yield indices, tokens, counts


def _agreed_family(
    directory: pathlib.Path, name: str, declarations: EncoderDeclarations
) -> EncoderFamily:
    """Return the family of this name; refuse it if the directory contradicts it."""
    if name == DECLARED:
        if declarations.pooling is None:
            raise ValueError(
                f"{directory}: family={name!r}, but neither modules.json nor "
                f"1_Pooling/config.json declares a pooling; name one of "
                f"{', '.join(sorted(FAMILIES))}"
            )
        _, query, passage = declarations.prompts or (None, "", "")
        family = EncoderFamily(query, passage, declarations.pooling[1])
    else:
        family = FAMILIES[name]
    if declarations.pooling is not None and declarations.pooling[1] != family.pooling:
        path, pooling = declarations.pooling
        raise ValueError(
            f"{path}: the model's pooling is {pooling!r}, but family={name!r} means "
            f"{family.pooling!r}; name a family of its pooling, or {DECLARED!r}"
        )
    prefixes = family.query_prefix, family.passage_prefix
    if declarations.prompts is not None:
        path, *prompts = declarations.prompts
        # Whitespace around a prompt changes no token: family prefixes end in colons.
        if [p.split() for p in prompts] != [p.split() for p in prefixes]:
            raise ValueError(
                f"{path}: the model's prompts for queries and passages are {prompts}, "
                f"but family={name!r} means {[*prefixes]}; name a family of its "
                f"prompts, or {DECLARED!r}"
            )
    if any(prefixes) and not declarations.includes_prompt:
        raise ValueError(
            f"{declarations.pooling[0]}: include_prompt=False is not supported: the "
            f"tokens of the prompts {[*prefixes]} would be pooled too"
        )
    return family


def fingerprint_of(directory: pathlib.Path, settings: Sequence) -> str:
    """Return a digest of a BERT model's files and the settings it is used with."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    names = ["config.json", "tokenizer_config.json", "vocab.txt", "tokenizer.json"]
    names += sorted(path.name for path in directory.glob("*.safetensors"))
    for name in names:
        if (directory / name).is_file():
            # A small file is read faster than its cached digest.
            is_large = name.endswith(".safetensors")
            path = directory / name
            content_digest = (
                digests.cached(path, "sha256", _sha256) if is_large else _sha256(path)
            )
            digest.update(f"{name} {content_digest}\n".encode())
    return f"bert:{digest.hexdigest()[:32]}"


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Words that say little about a text's subject; they weigh a quarter of other words.
_COMMON = frozenset(
    """
    a an and are as at be been by did do does for from had has have he her his how in is
    it its of on or she that the their they this to was were what when where which who
    whom whose why will with
    """.split()  # noqa: SIM905
)
_COMMON_WEIGHT = 0.25
_TITLE_WEIGHT = 2.0  # of a passage's title; its text weighs 1
NUM_HASHES = 4  # features per word, so that no single collision can hide it


class HashedNgrams:
    """A lexical encoder without a model: hashed words and pairs of adjacent words.

    Each word and each pair adds its weight, with a sign, to NUM_HASHES of `dim`
    features; a hash chooses features and signs (feature hashing, arXiv 0902.2206). A
    passage's title and text are each scaled to length 1 and summed, the title with
    weight 2, so that a query naming an entity ranks the passage about it before
    passages that mention it.

    Args:
        dim: number of features; with fewer, more of them collide.
    """

    def __init__(self, dim: int = 512):
        self.dim = dim
        self.fingerprint = f"hashed-ngrams-1:{dim}"
        self._features = functools.lru_cache(maxsize=1 << 18)(self._hash)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return [n, dim] float32 unit vectors of questions."""
        rows = [self._vector(text) for text in texts]
        return np.array(rows, np.float32).reshape(-1, self.dim)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return [n, dim] float32 unit vectors of passages (title, line feed, text)."""
        rows = [self._passage(text) for text in texts]
        return np.array(rows, np.float32).reshape(-1, self.dim)

    def _passage(self, contents):
        title, _, text = contents.partition("\n")
        if not _words(title) or not _words(text):
            return self._vector(contents)
        vector = _TITLE_WEIGHT * self._vector(title) + self._vector(text)
        # Exactly opposite vectors cancel and leave nothing to scale.
        length = np.linalg.norm(vector)
        return vector / length if length > 0 else self._vector(title)

    def _vector(self, text):
        """Return a [dim] float64 vector of length 1, even for a text without words."""
        words = _words(text) or [""]
        features = [(w, _COMMON_WEIGHT if w in _COMMON else 1.0) for w in words]
        pairs = itertools.pairwise(features)
        features += [(f"{a} {b}", min(x, y)) for (a, x), (b, y) in pairs]
        vector = np.zeros(self.dim)
        for feature, weight in features:
            for index, sign in self._features(feature):
                vector[index] += sign * weight
        length = np.linalg.norm(vector)
        if length == 0:  # everything cancelled, which needs very few features
            vector[self._features(words[0])[0][0]] = length = 1.0
        return vector / length

    def _hash(self, feature):
        """Return the [NUM_HASHES] (index, sign) pairs of a feature."""
        data = feature.encode("utf-8", "replace")
        numbers = np.frombuffer(
            hashlib.blake2b(data, digest_size=8 * NUM_HASHES).digest(), "<u8"
        ).tolist()
        return [((n >> 1) % self.dim, 1.0 if n & 1 else -1.0) for n in numbers]


def _words(text):
    """Return the words of a text, lower-cased and without accents."""
    text = normalize_unicode("NFKD", text).casefold()
    text = "".join(c for c in text if not unicodedata.combining(c))
    return re.findall(r"\w+", text)

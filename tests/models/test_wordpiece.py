"""Compare WordPiece ids with transformers' BertTokenizer on real and nasty text."""

import gzip
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.models.wordpiece import WordPiece, read_vocab
from tests.models.tiny_bert import VOCAB, write_tiny_bert

NASTY = [
    "",
    " ",
    "\n" * 1000,
    "\t a\u00a0b\u2028c\u3000d\u1680e\x0bf\x85g",
    "a\x00b\ufffdc\u200bd\ufeffe\u202ef\u00adg\ue000h",
    "naïve café Ångström Ǖ Ạ́ e\u0301 ﬁ ½ ²",
    "ΟΔΥΣΣΕΥΣ ς Σ ΑΣ ΑΣ. İstanbul ıI straße ẞ ǅ",
    "中文字 日本語テキスト 한국어 𠀀𪜀𫝀𫠠𫤠 豈 ｆｕｌｌ Ｗｉｄｔｈ！",
    "हिन्दी ไทย עִבְרִית العَرَبِيَّة தமிழ்",
    "it's (a) [b] {c} $5.00 ~`^|<=>+ “quoted” «guillemets» — … ¿qué? ; ·",
    "x" * 100,
    "x" * 101,
    "я" * 99 + " " + "я" * 100 + " " + "я" * 101,
    "é" * 60,
    "e\u0301" * 60 + " " + "e\u0301" * 101,
    "x" * 1_000_000,
    "[SEP] [CLS][MASK] [UNK] [PAD] ##ing [unused1]",
    "</information><answer>GOLD</answer> <|im_end|>",
    "\x1b[31mred\x1b[0m \r\n <script>alert('x')</script>",
    "👩‍👩‍👧 🇩🇪 ❤️ \U0010ffff \U000e0001",
    "the " * 3000,
]


@pytest.fixture(scope="module")
def minilm(real_models):
    return WordPiece(real_models / "minilm")


@pytest.fixture(scope="module")
def reference(real_models):
    transformers = pytest.importorskip("transformers")
    return transformers.BertTokenizer.from_pretrained(real_models / "minilm")


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_bert(tmp_path)


def same_ids(ours, reference, texts, max_tokens=256):
    expected = reference(
        texts,
        truncation=True,
        max_length=max_tokens,
        padding=False,
        split_special_tokens=True,
    )["input_ids"]
    actual = ours(texts, max_tokens=max_tokens)
    return [
        (text[:80], row.tolist()[:20], wanted[:20])
        for text, row, wanted in zip(texts, actual, expected)
        if row.tolist() != wanted
    ]


def pieces(directory, text, **settings):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(settings))
    front = WordPiece(directory)
    (ids,) = front([text], max_tokens=100)
    return " ".join(front.vocab[i] for i in ids)


def test_words_are_the_longest_pieces_of_the_vocabulary(tiny):
    text = "Unwanted rivers, the  CITY?"
    expected = "[CLS] un ##want ##ed river ##s , the city ? [SEP]"
    assert pieces(tiny, text, do_lower_case=True) == expected


def test_a_word_with_an_unknown_piece_is_unknown(tiny):
    assert pieces(tiny, "wantx abc unx") == "[CLS] [UNK] ab ##c [UNK] [SEP]"


def test_case_and_accents_follow_tokenizer_config(tiny):
    assert pieces(tiny, "É É", do_lower_case=True) == "[CLS] e e [SEP]"
    assert pieces(tiny, "É É", do_lower_case=False) == "[CLS] É É [SEP]"
    kept = pieces(tiny, "É É", do_lower_case=True, strip_accents=False)
    assert kept == "[CLS] é é [SEP]"


def test_sigma_is_lower_cased_alike_everywhere_and_ideographs_are_split(tiny):
    assert pieces(tiny, "Σ aΣ ς", do_lower_case=True) == "[CLS] σ [UNK] ς [SEP]"
    assert pieces(tiny, "中a", do_lower_case=True) == "[CLS] 中 a [SEP]"
    joined = pieces(tiny, "中a", do_lower_case=True, tokenize_chinese_chars=False)
    assert joined == "[CLS] [UNK] [SEP]"


def test_long_texts_are_cut_to_max_tokens_and_keep_their_last_token(tiny):
    front = WordPiece(tiny)
    long, short = front(["the " * 50, "the"], max_tokens=5)
    assert [front.vocab[i] for i in long] == ["[CLS]", "the", "the", "the", "[SEP]"]
    assert len(short) == 3
    with pytest.raises(ValueError, match="max_tokens=2"):
        front(["the"], max_tokens=2)


def test_an_empty_list_of_texts_gives_no_ids(tiny):
    assert WordPiece(tiny)([], max_tokens=8) == []


def test_special_tokens_in_a_text_are_plain_text(minilm):
    special = {minilm.first_id, minilm.last_id, minilm.pad_id}
    (ids,) = minilm(["[SEP] a [CLS] [PAD]"], max_tokens=64)
    assert not special & set(ids[1:-1].tolist())


def test_lone_surrogates_are_dropped(minilm):
    (ids,) = minilm(["a\ud800b"], max_tokens=8)
    (expected,) = minilm(["ab"], max_tokens=8)
    np.testing.assert_array_equal(ids, expected)


def test_ids_of_500_real_passages_equal_transformers(shared_data, minilm, reference):
    with gzip.open(shared_data / "hotpotqa" / "corpus.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["contents"] for line, _ in zip(lines, range(500))]
    assert same_ids(minilm, reference, texts) == []
    assert same_ids(minilm, reference, texts, max_tokens=32) == []


def test_ids_of_nasty_strings_equal_transformers(minilm, reference):
    assert same_ids(minilm, reference, NASTY) == []
    assert same_ids(minilm, reference, NASTY, max_tokens=512) == []


def is_settled(character):
    """Return whether a character's category is the same as in Unicode 3.2."""
    category = unicodedata.category(character)
    then = unicodedata.ucd_3_2_0.category(character)
    return then == category and category not in ("Cn", "Cs")


def test_every_settled_character_is_treated_as_by_transformers(minilm, reference):
    # Each occurs alone, inside a word and at its end; 32 of them share a text.
    settled = [chr(c) for c in range(0x11000) if is_settled(chr(c))]
    assert len(settled) > 45_000
    words = [f"{c} a{c}b 1{c} {c}" for c in settled]
    texts = [" ".join(words[i : i + 32]) for i in range(0, len(words), 32)]
    assert same_ids(minilm, reference, texts, max_tokens=2048) == []


@given(st.lists(st.text(max_size=60), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_ids_of_any_settled_text_equal_transformers(minilm, reference, texts):
    texts = ["".join(c for c in text if is_settled(c)) for text in texts]
    assert same_ids(minilm, reference, texts, max_tokens=24) == []


@pytest.mark.parametrize("lower_case", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
def test_settings_act_as_in_transformers(
    minilm, reference, real_models, tmp_path, lower_case, strip_accents
):
    chosen = {"do_lower_case": lower_case, "strip_accents": strip_accents}
    (tmp_path / "vocab.txt").write_bytes(
        (real_models / "minilm" / "vocab.txt").read_bytes()
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(chosen))
    vocab = {piece: i for i, piece in enumerate(read_vocab(tmp_path))}
    theirs = type(reference)(vocab=vocab, **chosen)
    normalizer = theirs.backend_tokenizer.normalizer
    assert (normalizer.lowercase, normalizer.strip_accents) == tuple(chosen.values())
    assert same_ids(WordPiece(tmp_path), theirs, NASTY) == []


def test_the_vocabulary_may_come_from_tokenizer_json(real_models, tmp_path):
    source = real_models / "minilm"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    assert read_vocab(tmp_path) == read_vocab(source)


def test_a_missing_or_faulty_vocabulary_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no vocab\.txt and no tokenizer\.json"):
        read_vocab(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}')
    with pytest.raises(ValueError, match="type='BPE', only 'WordPiece'"):
        read_vocab(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\na\n")
    with pytest.raises(ValueError, match=r"vocab\.txt:3: piece 'a' is also on line 1"):
        read_vocab(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_vocab(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"truncation_side": "left"}', "truncation_side='left', expected 'right'"),
        ('{"do_lower_case": 1}', "do_lower_case=1, expected true or false"),
        ('{"tokenizer_class": "XLMRobertaTokenizer"}', "expected 'BertTokenizer'"),
        ('{"do_basic_tokenize": false}', "do_basic_tokenize must be true"),
        ('{"cls_token": "<s>"}', "cls_token='<s>' is not in its vocabulary"),
    ],
)
def test_a_bad_tokenizer_config_is_named(tiny, text, message):
    (tiny / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        WordPiece(tiny)


@pytest.mark.fault(68, "what is not computed")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "[Q]"}}}),
        ("tokenizer.json", {"added_tokens": [{"id": 9, "content": "[Q]"}]}),
        ("added_tokens.json", {"[Q]": 9}),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_by_name(tiny, name, content):
    (tiny / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name}: the added token '\[Q\]'"):
        WordPiece(tiny)
    (tiny / name).write_text(json.dumps(content).replace("[Q]", "[CLS]"))
    assert WordPiece(tiny).first_id == VOCAB.index("[CLS]")


def test_without_a_tokenizer_config_lower_casing_is_not_guessed(tiny):
    (tiny / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="is missing: it says whether"):
        WordPiece(tiny)


def test_special_tokens_may_be_written_as_objects(tiny):
    config = {"cls_token": {"content": "[CLS]", "lstrip": False}}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    assert WordPiece(tiny).first_id == VOCAB.index("[CLS]")


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8),
    st.integers(5, 24),
)
@settings(max_examples=30, deadline=None)
def test_pairs_are_cut_longest_first_as_by_transformers(
    pair_front, lengths, max_tokens
):
    front, theirs = pair_front
    firsts = [" ".join(["a"] * n) for n, _ in lengths]
    seconds = [" ".join(["b"] * n) for _, n in lengths]
    expected = theirs(firsts, seconds, truncation=True, max_length=max_tokens)
    ids, counts = front.pairs(firsts, seconds, max_tokens=max_tokens)
    assert [row.tolist() for row in ids] == expected.input_ids
    types = [[0] * first + [1] * (len(row) - first) for row, first in zip(ids, counts)]
    assert types == expected.token_type_ids


@pytest.fixture(scope="module")
def pair_front(tmp_path_factory):
    """(our tokenizer, transformers' tokenizer) for the tiny vocabulary."""
    directory = write_tiny_bert(tmp_path_factory.mktemp("pairs"))
    transformers = pytest.importorskip("transformers")
    return WordPiece(directory), transformers.BertTokenizer.from_pretrained(directory)


LONG = {
    "words": "the River " * 2_000,
    "one word": "x" * 10_000 + " the river",
    "blanks": " \n" * 10_000 + "the river",
    "marks": "e" + "\u0301" * 10_000 + " the river",
    "nothing": "\x00" * 10_000,
    "long words": ("x" * 500 + " ") * 40,
    "ideographs": "\u4e2d" * 5_000,
}


@pytest.mark.fault(70, "long passages cut before they are encoded")
@pytest.mark.parametrize("name", LONG)
def test_a_long_text_is_encoded_as_if_it_were_read_in_full(tiny, name):
    tokenizer, text = WordPiece(tiny), LONG[name]
    for max_tokens in (3, 8, 64):
        ids = tokenizer([text, "the river"], max_tokens=max_tokens)
        full = tokenizer([text], max_tokens=10**5)[0]
        expected = (
            full if len(full) <= max_tokens else [*full[: max_tokens - 1], full[-1]]
        )
        assert ids[0].tolist() == list(expected)
    pairs = [("the river", text), (text, "the river"), (text, text)]
    for first, second in pairs:
        rows, counts = tokenizer.pairs([first], [second], max_tokens=16)
        full, before = tokenizer.pairs([first], [second], max_tokens=10**5)
        assert len(rows[0]) == min(16, len(full[0]))
        # A text keeps the same first ids, wherever it is cut.
        assert rows[0][: counts[0] - 1].tolist() == full[0][: counts[0] - 1].tolist()
        second_ids = rows[0][counts[0] : -1].tolist()
        assert second_ids == full[0][before[0] :][: len(second_ids)].tolist()


def test_a_pair_needs_room_for_three_special_tokens(pair_front):
    front, _ = pair_front
    assert front.pairs([], [], max_tokens=5) == ([], [])
    with pytest.raises(ValueError, match="max_tokens=4, expected at least 5"):
        front.pairs(["a"], ["b"], max_tokens=4)

"""Encoders: what a vector depends on, and what the hashed encoder finds."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from rsearch.models import bert
from rsearch.retrieval.encoder import (
    BertEncoder,
    HashedNgrams,
    encoder_fingerprint,
    load_encoder,
)
from rsearch.retrieval.engine import engine_in_memory
from rsearch.types import Passage
from rsearch.world.world import make_world
from tests.models.tiny_bert import write_tiny_bert

WORDS = ["the", "city", "river", "wanted", "a", "b", "c", "want", "中", "é", "?"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def minilm_like(tiny):
    return BertEncoder(tiny, family="minilm")


def lengths(vectors):
    return np.linalg.norm(vectors, axis=1)


def test_vectors_have_length_one_and_the_models_width(minilm_like):
    vectors = minilm_like.encode_passages(["", "the city", "river " * 100])
    assert vectors.shape == (3, minilm_like.dim) and vectors.dtype == np.float32
    np.testing.assert_allclose(lengths(vectors), 1, atol=1e-6)
    assert minilm_like.encode_queries([]).shape == (0, minilm_like.dim)


@given(st.lists(TEXTS, min_size=1, max_size=20))
@settings(max_examples=20, deadline=None)
def test_a_querys_vector_does_not_depend_on_its_batch(minilm_like, texts):
    together = minilm_like.encode_queries(texts)
    alone = [minilm_like.encode_queries([text])[0] for text in texts]
    np.testing.assert_array_equal(together, alone)


def test_more_input_compiles_no_more_shapes(tiny):
    encoder = BertEncoder(tiny, family="minilm")
    encoder.encode_queries([" ".join(["a"] * n) for n in (1, 20, 30)])
    compiled = bert.embed._cache_size()
    encoder.encode_queries([" ".join(["b"] * n) for n in range(60)] * 3)
    assert bert.embed._cache_size() == compiled


@pytest.mark.parametrize(
    ("family", "query", "passage", "pooling"),
    [
        ("e5", "query: ", "passage: ", "mean"),
        ("bge", "Represent this sentence for searching relevant passages: ", "", "cls"),
        ("minilm", "", "", "mean"),
    ],
)
def test_a_family_sets_prefixes_and_pooling(tiny, family, query, passage, pooling):
    encoder = BertEncoder(tiny, family=family)
    spec, params = bert.load_bert(tiny)
    for encode, prefix in (
        (encoder.encode_queries, query),
        (encoder.encode_passages, passage),
    ):
        (ids,) = encoder._tokenizer([prefix + "the river"], max_tokens=32)
        expected = bert.embed(
            bert.Bert(spec), params, ids[None], np.array([len(ids)]), pooling=pooling
        )
        np.testing.assert_allclose(encode(["the river"]), expected, atol=1e-6)


@pytest.mark.parametrize("family", ["e5", "bge"])
def test_vectors_are_those_of_the_model_cards_examples(tiny, family):
    """E5's model card averages the states, BGE's takes the first; both normalise."""
    torch = pytest.importorskip("torch")
    from transformers import BertModel, BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(tiny)
    model = BertModel.from_pretrained(tiny).eval()
    instruction = "Represent this sentence for searching relevant passages:"
    prefixes = {"e5": ("query: ", "passage: "), "bge": (instruction, "")}[family]
    texts = ["the river, unwanted?", "a b cc the city", "ab " * 40]
    encoder = BertEncoder(tiny, family=family)
    ours = encoder.encode_queries(texts), encoder.encode_passages(texts)
    for prefix, actual in zip(prefixes, ours):
        given = tokenizer(
            [prefix + text for text in texts],
            max_length=32,
            padding=True,
            truncation=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            hidden = model(**given).last_hidden_state
        mask = given["attention_mask"][..., None]
        if family == "e5":
            pooled = hidden.masked_fill(mask == 0, 0.0).sum(1) / mask.sum(1)
        else:
            pooled = hidden[:, 0]
        expected = torch.nn.functional.normalize(pooled, p=2, dim=1).numpy()
        np.testing.assert_allclose(actual, expected, atol=2e-6)


@given(st.text(max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_space_after_bges_instruction_changes_no_token(minilm_like, text):
    instruction = "Represent this sentence for searching relevant passages:"
    tokenizer = minilm_like._tokenizer
    without, with_space = tokenizer(
        [instruction + text, f"{instruction} {text}"], max_tokens=64
    )
    np.testing.assert_array_equal(without, with_space)


def test_queries_and_passages_have_separate_maximum_lengths(tiny):
    encoder = BertEncoder(
        tiny, family="minilm", max_query_tokens=4, max_passage_tokens=5
    )
    # Two of the tokens are special.
    long = encoder.encode_queries(["a b c the"]), encoder.encode_passages(["a b c the"])
    np.testing.assert_array_equal(long[0], encoder.encode_queries(["a b"]))
    np.testing.assert_array_equal(long[1], encoder.encode_passages(["a b c"]))
    assert not np.array_equal(long[0], encoder.encode_queries(["a"]))


def test_passages_longer_than_the_limit_are_counted(tiny):
    encoder = BertEncoder(
        tiny, family="minilm", max_query_tokens=4, max_passage_tokens=5
    )
    texts = ["a b c", "a b c the", "", "a " * 500, "a b c wanted"]
    vectors = encoder.encode_passages(texts)
    assert encoder.num_cut == 3
    beginnings = encoder.encode_passages(["a b c", "a b c", "", "a a a", "a b c"])
    np.testing.assert_array_equal(vectors, beginnings)
    encoder.encode_queries(["a b c the"])
    assert encoder.num_cut == 3


def test_the_fingerprint_changes_with_everything_that_changes_a_vector(tiny, tmp_path):
    first = BertEncoder(tiny, family="e5")
    assert BertEncoder(tiny, family="e5").fingerprint == first.fingerprint
    actual = {first.fingerprint}
    actual.add(BertEncoder(tiny, family="bge").fingerprint)
    actual.add(BertEncoder(tiny, family="e5", max_query_tokens=16).fingerprint)
    actual.add(BertEncoder(tiny, family="e5", max_passage_tokens=16).fingerprint)
    copy = write_tiny_bert(tmp_path)
    assert BertEncoder(copy, family="e5").fingerprint == first.fingerprint
    weights = load_file(copy / "model.safetensors")
    weights["embeddings.LayerNorm.bias"][0] += 1
    save_file(weights, copy / "model.safetensors")
    actual.add(BertEncoder(copy, family="e5").fingerprint)
    (copy / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    actual.add(BertEncoder(copy, family="e5").fingerprint)
    assert len(actual) == 6
    # It is computed without loading the weights, but there must be some.
    sizes = dict(dim=0, max_query_tokens=16, max_passage_tokens=0)
    named = encoder_fingerprint(str(tiny), family="e5", **sizes)
    assert named == BertEncoder(tiny, family="e5", max_query_tokens=16).fingerprint
    (copy / "model.safetensors").unlink()
    for absent in (copy, "no/such"):
        assert encoder_fingerprint(str(absent), family="e5", **sizes) is None
    sizes["dim"] = 64
    made_by = encoder_fingerprint("hashed", family=None, **sizes)
    assert made_by == HashedNgrams(64).fingerprint


def test_the_maximum_length_is_that_of_sentence_transformers(tmp_path):
    directory = write_tiny_bert(tmp_path)
    assert BertEncoder(directory, family="e5").max_passage_tokens == 32
    path = directory / "sentence_bert_config.json"
    path.write_text(json.dumps({"max_seq_length": 20}))
    assert BertEncoder(directory, family="e5").max_query_tokens == 20
    assert BertEncoder(directory, family="e5", max_query_tokens=8).max_query_tokens == 8
    path.write_text(json.dumps({"max_seq_length": 512}))
    with pytest.raises(ValueError, match="max_query_tokens=512, expected 3 to 32"):
        BertEncoder(directory, family="e5")
    with pytest.raises(ValueError, match="max_passage_tokens=40, expected 3 to 32"):
        BertEncoder(directory, family="e5", max_query_tokens=9, max_passage_tokens=40)
    path.write_text(json.dumps({"max_seq_length": "20"}))
    with pytest.raises(ValueError, match="max_seq_length='20', expected a whole"):
        BertEncoder(directory, family="e5")


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path):
    directory = write_tiny_bert(tmp_path)
    with open(directory / "vocab.txt", "a") as file:
        file.write("more\nand more\n")
    with pytest.raises(ValueError, match=r"the vocabulary has \d+ pieces, the model"):
        BertEncoder(directory, family="e5")


@pytest.mark.parametrize("family", [None, "", "E5", "minillm"])
def test_an_unknown_family_is_refused_with_a_list_of_the_known_ones(tiny, family):
    with pytest.raises(ValueError, match="expected one of bge, e5, minilm"):
        load_encoder(tiny, family=family)


def test_hashed_names_the_encoder_without_a_model():
    encoder = load_encoder("hashed", family="minilm", dim=64)
    assert isinstance(encoder, HashedNgrams) and encoder.dim == 64


@given(st.lists(st.text(max_size=30), max_size=5), st.sampled_from([1, 2, 64, 512]))
def test_hashed_vectors_have_length_one_for_any_text(texts, dim):
    encoder = HashedNgrams(dim)
    for vectors in (encoder.encode_queries(texts), encoder.encode_passages(texts)):
        assert vectors.shape == (len(texts), dim) and vectors.dtype == np.float32
        np.testing.assert_allclose(lengths(vectors), 1, atol=1e-6)


def test_hashed_vectors_are_the_same_on_every_machine():
    # Four little-endian words of blake2b: the lowest bit is a sign, the rest an index.
    digest = hashlib.blake2b(b"rome", digest_size=32).digest()
    expected = np.zeros(512)
    for start in range(0, 32, 8):
        number = int.from_bytes(digest[start : start + 8], "little")
        expected[(number >> 1) % 512] += 1 if number & 1 else -1
    expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(
        HashedNgrams().encode_queries(["Rome!"])[0], expected, atol=1e-7
    )


@pytest.mark.fault(81, "words of a passage")
def test_a_passage_of_combining_marks_is_encoded_in_linear_time():
    # Quadratic time would take minutes.
    vectors = HashedNgrams().encode_passages(["a" + "\u0301\u0316" * 100_000, "a"])
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_hashed_words_ignore_case_accents_and_punctuation():
    a, b = HashedNgrams().encode_queries(["Café, Berlin?", "CAFE berlin"])
    np.testing.assert_array_equal(a, b)


def test_hashed_vectors_depend_on_the_order_of_words():
    a, b = HashedNgrams().encode_queries(["dog bites man", "man bites dog"])
    assert not np.allclose(a, b)


def test_the_passage_about_an_entity_comes_before_those_that_mention_it():
    passages = [
        Passage(
            "mention", "Tower Bridge\nNear Silver Harbour, in Silver Harbour. " * 3
        ),
        Passage("about", "Silver Harbour\nA city of many words " + "and more " * 80),
        Passage("half", "Silver Lake\nNot a harbour but a silver lake."),
    ]
    search = engine_in_memory(passages, HashedNgrams(), top_k=3)
    for query in ("Silver Harbour", "silver harbour", "Where is Silver Harbour?"):
        assert search([query])[0][0].id == "about"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_entity_of_the_world_is_found_by_its_name(seed):
    world = make_world(
        seed=seed,
        people=400,
        films=300,
        companies=100,
        cities=100,
        train_questions=10,
        dev_questions=10,
    )
    search = engine_in_memory(world.passages, HashedNgrams(), top_k=1)
    titles = [passage.title for passage in world.passages]
    assert [actual[0].title for actual in search(titles)] == titles
    asked = search([f"Who directed {title.strip(chr(34))}?" for title in titles])
    right = [actual[0].title == title for actual, title in zip(asked, titles)]
    assert np.mean(right) >= 0.99

"""Compare BERT with transformers' BERT, and test what it refuses to load."""

import gzip
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rsearch.models import bert
from rsearch.models.wordpiece import WordPiece
from tests.models.tiny_bert import VOCAB, write_tiny_bert


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_bert(tmp_path_factory.mktemp("tiny"))


def edit_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def run(directory, tokens, counts, **settings):
    spec, params = bert.load_bert(directory)
    return np.asarray(bert.embed(bert.Bert(spec), params, tokens, counts, **settings))


def ragged_batch(rng, *, rows=5, width=12):
    counts = rng.integers(1, width + 1, rows).astype(np.int32)
    tokens = rng.integers(5, len(VOCAB), (rows, width)).astype(np.int32)
    tokens[np.arange(width)[None, :] >= counts[:, None]] = 0
    return tokens, counts


def test_hidden_states_agree_with_transformers(tiny):
    torch = pytest.importorskip("torch")
    from transformers import BertModel

    tokens, counts = ragged_batch(np.random.default_rng(1))
    is_token = np.arange(tokens.shape[1])[None, :] < counts[:, None]
    spec, params = bert.load_bert(tiny)
    ours = bert.Bert(spec).apply({"params": params}, tokens, is_token)
    reference = BertModel.from_pretrained(tiny, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = reference(
            torch.tensor(tokens), attention_mask=torch.tensor(is_token)
        ).last_hidden_state.numpy()
    np.testing.assert_allclose(ours[is_token], theirs[is_token], atol=2e-5)


def test_padding_does_not_change_vectors(tiny):
    rng = np.random.default_rng(2)
    tokens, counts = ragged_batch(rng)
    wider = np.pad(tokens, ((0, 0), (0, 9)), constant_values=7)
    a = run(tiny, tokens, counts, pooling="mean")
    b = run(tiny, wider, counts, pooling="mean")
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_mean_pooling_averages_tokens_and_cls_takes_the_first():
    hidden = jnp.array([[[1.0, 2.0], [3.0, 6.0], [50.0, 50.0]]])
    is_token = jnp.array([[True, True, False]])
    np.testing.assert_array_equal(bert.pool(hidden, is_token, pooling="mean"), [[2, 4]])
    np.testing.assert_array_equal(bert.pool(hidden, is_token, pooling="cls"), [[1, 2]])


def test_unit_scales_to_length_one_and_leaves_zero_alone():
    vectors = bert.unit(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0.0, 0.0]], atol=1e-7)


def test_a_row_of_padding_gives_no_nan(tiny):
    vectors = run(tiny, np.zeros((2, 4), np.int32), np.array([0, 3]), pooling="mean")
    assert np.isfinite(vectors).all()


@pytest.mark.parametrize("pooling", bert.POOLINGS)
def test_tensor_names_may_have_a_prefix(tiny, tmp_path, pooling):
    prefixed = write_tiny_bert(tmp_path / "prefixed", prefix="bert.")
    tokens, counts = ragged_batch(np.random.default_rng(3))
    np.testing.assert_array_equal(
        run(tiny, tokens, counts, pooling=pooling),
        run(prefixed, tokens, counts, pooling=pooling),
    )


def test_bfloat16_weights_are_read_exactly(tmp_path):
    half = write_tiny_bert(tmp_path / "half", dtype=ml_dtypes.bfloat16)
    full = write_tiny_bert(tmp_path / "full")
    _, a = bert.load_bert(half)
    _, b = bert.load_bert(full)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)),
        a,
        jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), b),
    )
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(a))


def test_all_tensors_that_do_not_fit_are_listed_in_one_table(tmp_path):
    changed = {
        "embeddings.LayerNorm.bias": None,
        "encoder.layer.1.output.dense.weight": np.zeros((40, 24), np.float32),
        "encoder.layer.2.output.dense.bias": np.zeros(24, np.float32),
        "encoder.layer.0.output.dense.bias": np.zeros(24, np.int64),
    }
    directory = write_tiny_bert(tmp_path, changed=changed)
    with pytest.raises(ValueError) as caught:
        bert.load_bert(directory)
    lines = str(caught.value).splitlines()
    assert "4 tensors" in lines[0]
    table = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert table["embeddings.LayerNorm.bias"] == ["missing", "[24]", "-"]
    assert table["encoder.layer.1.output.dense.weight"] == [
        *["shape", "[24,", "40]", "[40,", "24]"]
    ]
    assert table["encoder.layer.2.output.dense.bias"] == ["extra", "-", "[24]"]
    assert table["encoder.layer.0.output.dense.bias"][-1] == "I64"


@pytest.mark.fault(16, "by suffix", "conversion command")
def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path):
    directory = write_tiny_bert(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"weights_only=True.*pytorch_model\.bin"):
        bert.load_bert(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "roberta"}, "model_type='roberta' .* 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act='relu' .* 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "'relative_key' .* 'absolute'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"auto_map": {"AutoModel": "a.B"}}, "auto_map="),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ({"num_attention_heads": 5}, "hidden_size=24 is not divisible by"),
        ({"hidden_size": "24"}, "hidden_size='24' .* a whole number above 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 .* a whole number above 0"),
        ({"layer_norm_eps": None}, "layer_norm_eps=None .* a number above 0"),
    ],
)
def test_an_unsupported_field_of_the_configuration_is_named(tmp_path, fields, message):
    directory = write_tiny_bert(tmp_path)
    edit_config(directory, **fields)
    with pytest.raises(ValueError, match=message):
        bert.read_bert_spec(directory)


def test_a_null_in_the_configuration_counts_as_absent(tmp_path):
    directory = write_tiny_bert(tmp_path)
    expected = bert.read_bert_spec(directory)
    names = ("hidden_act", "position_embedding_type", "is_decoder", "auto_map")
    edit_config(directory, **dict.fromkeys((*names, "pruned_heads")))
    assert bert.read_bert_spec(directory) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_configuration_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        bert.read_bert_spec(tmp_path)


def test_a_directory_without_configuration_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        bert.load_bert(tmp_path)


def real_cosines(shared_data, real_models, num):
    """Return cosines of our and transformers' vectors of HotpotQA's first passages."""
    torch = pytest.importorskip("torch")
    from transformers import BertModel, BertTokenizer

    with gzip.open(shared_data / "hotpotqa" / "corpus.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["contents"] for line, _ in zip(lines, range(num))]
    directory = real_models / "minilm"
    spec, params = bert.load_bert(directory)
    front = WordPiece(directory)
    theirs = BertTokenizer.from_pretrained(directory)
    reference = BertModel.from_pretrained(directory).eval()
    cosines = []
    order = sorted(range(num), key=lambda i: len(texts[i]))
    for start in range(0, num, 20):
        part = [texts[i] for i in order[start : start + 20]]
        given = theirs(
            part, truncation=True, max_length=256, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = reference(**given).last_hidden_state
        weight = given["attention_mask"][:, :, None].float()
        expected = ((hidden * weight).sum(1) / weight.sum(1)).numpy()
        ids = front(part, max_tokens=256)
        tokens = np.zeros((20, 256), np.int32)
        counts = np.array([len(row) for row in ids], np.int32)
        for row, row_ids in enumerate(ids):
            tokens[row, : len(row_ids)] = row_ids
        width = next(w for w in (64, 128, 192, 256) if w >= counts.max())
        ours = bert.embed(
            bert.Bert(spec), params, tokens[:, :width], counts, pooling="mean"
        )
        length = np.linalg.norm(expected, axis=1)
        cosines += ((np.asarray(ours) * expected).sum(axis=1) / length).tolist()
    return np.array(cosines)


def test_vectors_of_real_passages_agree_with_transformers(shared_data, real_models):
    assert real_cosines(shared_data, real_models, 20).min() >= 0.9999


@pytest.mark.slow
def test_vectors_of_500_real_passages_agree_with_transformers(shared_data, real_models):
    assert real_cosines(shared_data, real_models, 500).min() >= 0.9999


def pairs_of(directory, texts):
    """Return (transformers' batch of pairs, our ids, counts, counts of the firsts)."""
    from transformers import BertTokenizer

    given = BertTokenizer.from_pretrained(directory)(
        [first for first, _ in texts],
        [second for _, second in texts],
        max_length=32,
        padding="max_length",
        truncation=True,
        return_tensors="pt",
    )
    ids, firsts = WordPiece(directory).pairs(*zip(*texts), max_tokens=32)
    tokens = np.zeros((len(texts), 32), np.int32)
    for row, row_ids in enumerate(ids):
        tokens[row, : len(row_ids)] = row_ids
    counts = np.array([len(row) for row in ids], np.int32)
    return given, tokens, counts, np.array(firsts, np.int32)


def test_a_cross_encoder_scores_pairs_as_transformers_does(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import BertForSequenceClassification

    directory = write_tiny_bert(tmp_path, cross_encoder=True)
    texts = [("the river", "unwanted city"), ("a b", ""), ("ab " * 9, "c, b? " * 40)]
    given, tokens, counts, firsts = pairs_of(directory, texts)
    theirs = BertForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = theirs(**given).logits[:, 0].numpy()
    spec, params = bert.load_cross_encoder(directory)
    model = bert.CrossEncoder(spec)
    actual = bert.score(model, params, tokens, counts, firsts)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    # Both texts as one would give another score: the token types matter.
    as_one = bert.score(model, params, tokens, counts, counts)
    assert np.abs(as_one - expected).min() > 1e-3


def test_encoders_and_cross_encoders_are_not_loaded_as_one_another(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"classifier\.weight +missing +\[1, 24\]"):
        bert.load_cross_encoder(tiny)
    directory = write_tiny_bert(tmp_path, cross_encoder=True)
    with pytest.raises(ValueError, match=r"classifier\.weight +extra"):
        bert.load_bert(directory)


def test_a_classifier_with_two_labels_or_one_token_type_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    directory = write_tiny_bert(tmp_path, cross_encoder=True)
    tensors = load_file(directory / "model.safetensors")
    two = {"classifier.weight": np.zeros((2, 24), np.float32)}
    two["classifier.bias"] = np.zeros(2, np.float32)
    save_file(tensors | two, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"classifier\.weight +shape +\[1, 24\]"):
        bert.load_cross_encoder(directory)
    edit_config(directory, type_vocab_size=1)
    with pytest.raises(ValueError, match="type_vocab_size=1, expected at least 2"):
        bert.load_cross_encoder(directory)

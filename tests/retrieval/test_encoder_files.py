"""Declarations in an encoder's directory are followed, or refused by name."""

import functools
import json
import shutil

import numpy as np
import pytest

from rsearch.retrieval.encoder import BertEncoder
from tests.models.tiny_bert import VOCAB, write_tiny_bert

WIDTH = 24
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
BGE = "Represent this sentence for searching relevant passages: "
E5 = {"query": "query: ", "passage": "passage: "}
NO_PROMPTS = {"query": "", "document": ""}
MODELS = "sentence_transformers.models"
NEW = "sentence_transformers.sentence_transformer.modules"
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def directory(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def modules(*kinds):
    folders = ["", *(f"{n}_{kind}" for n, kind in enumerate(kinds[1:], start=1))]
    return [
        {"idx": n, "name": str(n), "path": folder, "type": f"{MODELS}.{kind}"}
        for n, (kind, folder) in enumerate(zip(kinds, folders))
    ]


def layout(pooling=None, *, last=("Normalize",), limits=None, **prompts):
    """{file: content} of a directory as sentence-transformers writes it."""
    pooling = {
        "word_embedding_dimension": WIDTH,
        **(MEAN if pooling is None else pooling),
    }
    return {
        "modules.json": modules("Transformer", "Pooling", *last),
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": limits
        or {"max_seq_length": 30, "do_lower_case": False},
        "config_sentence_transformers.json": {"__version__": {}, **prompts},
    }


def without(files, *names):
    return {name: content for name, content in files.items() if name not in names}


def write(directory, files):
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(content))


@functools.cache
def states_of(directory, text):
    """[T, D] hidden states of a text's tokens, from transformers' model."""
    torch = pytest.importorskip("torch")
    from transformers import BertModel, BertTokenizer

    tokens = BertTokenizer.from_pretrained(directory)(text, return_tensors="pt")
    with torch.no_grad():
        model = BertModel.from_pretrained(directory).eval()
        return model(**tokens).last_hidden_state[0].numpy()


def pooled(states, pooling):
    """[D] vector of a text, pooled by hand."""
    by_hand = {
        "mean": lambda: states.sum(axis=0) / len(states),
        "cls": lambda: states[0],
        "max": lambda: np.array([max(column) for column in states.T]),
        "lasttoken": lambda: states[len(states) - 1],
    }
    vector = by_hand[pooling]()
    return vector / np.sqrt((vector**2).sum())


DPR = layout(CLS, last=())
NEW_LAYOUT = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{NEW}.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_P", "type": f"{NEW}.pooling.Pooling"},
        {"idx": 2, "name": "2", "path": "2_N", "type": f"{NEW}.normalize.Normalize"},
    ],
    "1_P/config.json": {
        "embedding_dimension": WIDTH,
        "pooling_mode": "cls",
        "include_prompt": True,
    },
    "2_N/config.json": {"module_input_name": "sentence_embedding"},
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "modality_config": TEXT,
        "module_output_name": "token_embeddings",
    },
    "config_sentence_transformers.json": {
        "model_type": "SentenceTransformer",
        "prompts": NO_PROMPTS,
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    },
}


@pytest.mark.fault(68, "declared pooling", "declared prompts", "layouts")
@pytest.mark.parametrize(
    ("files", "family", "pooling", "query", "passage"),
    {
        "MiniLM": (layout(), "minilm", "mean", "", ""),
        "E5": (layout(), "e5", "mean", "query: ", "passage: "),
        "E5 with prompts": (layout(prompts=E5), "e5", "mean", *E5.values()),
        "E5, declared": (layout(prompts=E5), "declared", "mean", *E5.values()),
        "BGE": (
            layout(CLS, limits={"max_seq_length": 30, "do_lower_case": True}),
            *("bge", "cls", BGE, ""),
        ),
        "GTE": (layout(), "declared", "mean", "", ""),
        "Arctic-embed": (
            layout(CLS, prompts={"query": BGE}, default_prompt_name=None),
            *("bge", "cls", BGE, ""),
        ),
        "Arctic-embed, declared": (
            layout(CLS, prompts={"query": BGE}),
            *("declared", "cls", BGE, ""),
        ),
        "mxbai": (
            layout(CLS, prompts={"query": BGE.strip(), "passage": ""}, last=()),
            *("bge", "cls", BGE, ""),
        ),
        "multi-qa": (
            layout(similarity_fn_name="dot_score"),
            *("minilm", "mean", "", ""),
        ),
        "DPR by sentence-transformers": (DPR, "declared", "cls", "", ""),
        "Contriever, SimCSE": ({}, "minilm", "mean", "", ""),
        "an old layout": (
            without(layout(), "modules.json", "config_sentence_transformers.json"),
            *("minilm", "mean", "", ""),
        ),
        "the newest layout": (NEW_LAYOUT, "declared", "cls", "", ""),
        "maximum": (
            layout(dict.fromkeys(MEAN, False) | {"pooling_mode_max_tokens": True}),
            *("declared", "max", "", ""),
        ),
        "last token": (
            layout({"pooling_mode": ["lasttoken"]}),
            *("declared", "lasttoken", "", ""),
        ),
        "mean with the root of the length": (
            layout({"pooling_mode_mean_sqrt_len_tokens": True}),
            *("minilm", "mean", "", ""),
        ),
        "empty prompts of a new version": (
            layout(prompts=NO_PROMPTS),
            *("e5", "mean", "query: ", "passage: "),
        ),
        "a default prompt": (
            layout(prompts={"STS": "query: "}, default_prompt_name="STS"),
            *("declared", "mean", "query: ", "query: "),
        ),
        "dropout, and all dimensions": (
            layout(last=("Dropout", "Normalize"), truncate_dim=WIDTH),
            *("minilm", "mean", "", ""),
        ),
    }.values(),
)
def test_vectors_follow_the_declarations_of_the_directory(
    tiny, directory, files, family, pooling, query, passage
):
    write(directory, files)
    encoder = BertEncoder(directory, family=family)
    text = "the river, unwanted? a b"
    for encode, prefix in (
        (encoder.encode_queries, query),
        (encoder.encode_passages, passage),
    ):
        expected = pooled(states_of(tiny, prefix + text), pooling)
        np.testing.assert_allclose(encode([text])[0], expected, atol=2e-6)


CLIP = [{**modules("CLIPModel")[0], "path": "0_CLIPModel"}]
CUSTOM = [{**modules("Transformer")[0], "type": "custom_st.Transformer"}]
ABOVE = [{**modules("Transformer")[0], "path": "../other"}]


@pytest.mark.fault(68, "what is not computed", "prompts that differ")
@pytest.mark.parametrize(
    ("files", "family", "words"),
    [
        (layout(CLS), "minilm", ("1_Pooling", "'cls'", "'mean'", "minilm")),
        (layout(), "bge", ("1_Pooling", "'mean'", "'cls'", "bge")),
        (without(layout(CLS), "modules.json"), "e5", ("1_Pooling", "'cls'")),
        (NEW_LAYOUT, "minilm", ("1_P", "'cls'", "'mean'")),
        (layout(prompts=E5), "minilm", ("prompts", "query: ", "minilm")),
        (layout(prompts={"query": "query: "}), "e5", ("prompts", "passage: ")),
        (layout(last=("Dense", "Normalize")), "minilm", ("modules.json", "'Dense'")),
        (layout(last=("WeightedLayerPooling",)), "minilm", ("WeightedLayerPooling",)),
        (layout(last=("Pooling",)), "minilm", ("modules.json", "'Pooling'")),
        ({"modules.json": CLIP}, "minilm", ("modules.json", "'CLIPModel'")),
        ({"modules.json": CUSTOM}, "minilm", ("type", "custom_st.Transformer")),
        ({"modules.json": ABOVE}, "minilm", ("path", "../other")),
        ({"modules.json": modules("Transformer")}, "minilm", ("Pooling",)),
        ({"modules.json": {}}, "minilm", ("modules.json",)),
        (without(layout(), "1_Pooling/config.json"), "minilm", ("1_Pooling",)),
        (
            layout(MEAN | {"pooling_mode_cls_token": True}),
            "minilm",
            ("'cls' and 'mean'",),
        ),
        (layout(dict.fromkeys(MEAN, False)), "minilm", ("1_Pooling", "none")),
        (layout({"pooling_mode": "weightedmean"}), "declared", ("'weightedmean'",)),
        (layout(MEAN | {"pooling_mode_attention": True}), "minilm", ("_attention",)),
        (layout(MEAN | {"word_embedding_dimension": 48}), "minilm", ("=48", "24")),
        (layout(MEAN | {"include_prompt": False}), "e5", ("include_prompt",)),
        (layout(truncate_dim=8), "minilm", ("truncate_dim=8", "24")),
        (layout(similarity_fn_name="euclidean"), "minilm", ("'euclidean'",)),
        (layout(last=(), similarity_fn_name="dot"), "minilm", ("'dot'",)),
        (layout(default_prompt_name="query"), "minilm", ("default_prompt_name",)),
        (layout(prompts=["query: "]), "minilm", ("prompts",)),
        (layout(prompts="query: "), "minilm", ("prompts", "object of texts")),
        (layout(default_prompt_name=["query"]), "minilm", ("default_prompt_name",)),
        (layout(model_type="SparseEncoder"), "minilm", ("model_type",)),
        (layout(prompt="query: "), "e5", ("prompt=", "not supported")),
        (layout(limits={"query_length": 32}), "minilm", ("query_length=32",)),
        (layout(limits={"model_args": {"x": 1}}), "minilm", ("model_args",)),
        (layout(limits={"do_lower_case": "no"}), "minilm", ("do_lower_case='no'",)),
        (layout(limits={"max_seq_length": 0}), "minilm", ("max_query_tokens=0",)),
        ({}, "declared", ("declared", "modules.json")),
        ({"config.json": {"model_type": "dpr"}}, "minilm", ("model_type='dpr'",)),
    ],
)
def test_unsupported_declarations_are_refused_by_name(directory, files, family, words):
    write(directory, files)
    with pytest.raises(ValueError) as caught:
        BertEncoder(directory, family=family)
    assert not [word for word in words if word not in str(caught.value)], caught.value


@pytest.mark.parametrize("field", ["auto_map", "add_cross_attention", "pruned_heads"])
def test_a_bert_that_its_configuration_modifies_is_refused(directory, field):
    config = json.loads((directory / "config.json").read_text())
    write(directory, {"config.json": config | {field: {"AutoModel": "a.B"}}})
    with pytest.raises(ValueError, match=f"{field}="):
        BertEncoder(directory, family="minilm")


def test_the_transformer_may_be_in_a_subfolder(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "0_Transformer")
    entries = modules("Transformer", "Pooling")
    entries[0]["path"] = "0_Transformer"
    limits = {"0_Transformer/sentence_roberta_config.json": {"max_seq_length": 20}}
    write(tmp_path, layout() | {"modules.json": entries} | limits)
    encoder = BertEncoder(tmp_path, family="minilm")
    assert encoder.max_query_tokens == 20
    expected = BertEncoder(tiny, family="minilm").encode_queries(["the river"])
    np.testing.assert_array_equal(encoder.encode_queries(["the river"]), expected)


def test_declared_lower_casing_applies_to_a_cased_tokenizer(directory):
    write(directory, {"tokenizer_config.json": {"do_lower_case": False}})
    cased = BertEncoder(directory, family="minilm")
    limits = {"max_seq_length": None, "do_lower_case": True}
    write(directory, {"sentence_bert_config.json": limits})
    lowered = BertEncoder(directory, family="minilm")
    assert VOCAB.index("É") != VOCAB.index("é")
    a, b = (encoder.encode_queries(["É", "é"]) for encoder in (cased, lowered))
    assert not np.allclose(a[0], a[1])
    np.testing.assert_array_equal(b[0], b[1])
    assert cased.fingerprint != lowered.fingerprint


def test_without_a_declared_limit_the_tokenizers_applies(directory):
    write(directory, {"tokenizer_config.json": {"model_max_length": 12}})
    assert BertEncoder(directory, family="minilm").max_query_tokens == 12
    write(directory, {"tokenizer_config.json": {"model_max_length": 10**30}})
    assert BertEncoder(directory, family="minilm").max_query_tokens == 32


def test_consistent_declarations_do_not_change_the_fingerprint(directory):
    before = BertEncoder(directory, family="e5", max_query_tokens=30).fingerprint
    write(directory, layout(prompts=E5, limits={"max_seq_length": 32}))
    after = BertEncoder(directory, family="e5", max_query_tokens=30)
    assert after.fingerprint == before
    actual = {before, BertEncoder(directory, family="declared").fingerprint}
    write(directory, layout(prompts={"query": "query: "}))
    actual.add(BertEncoder(directory, family="declared").fingerprint)
    assert len(actual) == 3

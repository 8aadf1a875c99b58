"""Add a family to the table, and compare published shapes with their model cards."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rsearch.models.hf.checkpoint import export, load_params
from rsearch.models.hf.config import Family, check_fields, read_decoder
from rsearch.models.hf.families import FAMILIES, PUBLISHED, read_spec
from rsearch.models.hf.weights import DECODER_LAYOUT
from rsearch.models.spec import DecoderSpec
from tests.models.reference import random_params

# What the file of a new family would define: biases, norms on the heads, tensor names
# like GPT's, and key and value matrices stored as [in, out].
LAYOUT = {
    leaf: (
        name.replace("model.layers.", "transformer.h."),
        ((0,), (1, 2)) if leaf.endswith((".k", ".v")) else groups,
    )
    for leaf, (name, groups) in DECODER_LAYOUT.items()
}


def read_made_up(fields):
    check_fields(fields, {"attention_bias": (True,), "alibi": (None, False)})
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    return read_decoder(fields, defaults, qk_norm=True, qkv_bias=True)


MADE_UP = Family(
    architecture="MadeUpForCausalLM",
    read=read_made_up,
    fits=lambda spec: spec.qk_norm and spec.qkv_bias,
    write=lambda spec: {"attention_bias": True},
    layout=LAYOUT,
)
SPEC = DecoderSpec(
    vocab_size=20,
    width=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=8,
    norm_eps=1e-5,
    max_context=64,
    qkv_bias=True,
    qk_norm=True,
)


def test_a_new_family_takes_one_file_and_one_table_entry(tmp_path, monkeypatch):
    params = random_params(SPEC)
    with pytest.raises(ValueError, match="qk_norm=True"):
        export(tmp_path, params, SPEC)
    monkeypatch.setitem(FAMILIES, "made_up", MADE_UP)
    export(tmp_path, params, SPEC)
    tensors = load_file(tmp_path / "model.safetensors")
    key = params["layers"]["attention"]["k"]  # [L, D, K, C]
    np.testing.assert_array_equal(
        tensors["transformer.h.1.self_attn.k_proj.weight"], key[1].reshape(12, 8)
    )
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["model_type"] == "made_up"
    assert config["architectures"] == ["MadeUpForCausalLM"]
    # The file as its authors would write it, without fields that have defaults.
    del config["rms_norm_eps"], config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    assert read_spec(tmp_path) == SPEC
    loaded = load_params(tmp_path, SPEC)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    path.write_text(json.dumps(config | {"alibi": True}))
    with pytest.raises(ValueError, match="alibi=True"):
        read_spec(tmp_path)


BILLIONS = {  # billions of parameters, as the model cards state
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-14B-Instruct": 14.8,
    "Qwen/Qwen2.5-32B-Instruct": 32.8,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "Qwen/QwQ-32B-Preview": 32.8,
    "Qwen/QwQ-32B": 32.8,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "zai-org/glm-4-9b-chat-hf": 9.4,
    "THUDM/glm-4-9b-chat-hf": 9.4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(name):
    assert PUBLISHED[name].num_params / 1e9 == pytest.approx(BILLIONS[name], rel=0.004)


def test_every_model_with_a_known_size_has_a_shape():
    assert set(BILLIONS) == set(PUBLISHED)


def test_key_value_heads_divide_the_query_heads_of_published_shapes():
    for spec in PUBLISHED.values():
        assert spec.num_heads % spec.num_kv_heads == 0

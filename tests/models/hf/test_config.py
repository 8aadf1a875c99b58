import json
import math
import re

import pytest
import torch
import transformers

from rsearch.models.hf.families import make_config, read_spec
from rsearch.models.spec import DecoderSpec, LinearScaling, RopeScaling

GLM = {"model_type": "glm4", "head_dim": 16}
CHATGLM = {
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 16,
    "padded_vocab_size": 64,
}
# config.json of published models, reduced to the fields that determine their shape, and
# the billions of parameters that their model cards state.
PUBLISHED = {
    "QwQ-32B": (
        dict(
            model_type="qwen2",
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
            max_position_embeddings=40960,
            max_window_layers=64,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            sliding_window=32768,
            use_sliding_window=False,
            tie_word_embeddings=False,
        ),
        32.76,
    ),
    "Llama-3.2-3B": (
        dict(
            model_type="llama",
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=28,
            num_attention_heads=24,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_position_embeddings=131072,
            rope_theta=5e5,
            rope_scaling=dict(
                factor=32.0,
                high_freq_factor=4.0,
                low_freq_factor=1.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            tie_word_embeddings=True,
        ),
        3.21,
    ),
    "Qwen3-8B": (
        dict(
            model_type="qwen3",
            attention_bias=False,
            head_dim=128,
            hidden_size=4096,
            intermediate_size=12288,
            max_window_layers=36,
            num_attention_heads=32,
            num_hidden_layers=36,
            num_key_value_heads=8,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            use_sliding_window=False,
            tie_word_embeddings=False,
            vocab_size=151936,
        ),
        8.19,
    ),
    "glm-4-9b-chat-hf": (
        dict(
            model_type="glm",
            attention_bias=True,
            head_dim=128,
            hidden_size=4096,
            intermediate_size=13696,
            num_attention_heads=32,
            num_hidden_layers=40,
            num_key_value_heads=2,
            partial_rotary_factor=0.5,
            rms_norm_eps=1.5625e-07,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            vocab_size=151552,
        ),
        9.4,
    ),
    "GLM-4-32B-0414": (
        dict(
            model_type="glm4",
            attention_bias=False,
            head_dim=128,
            hidden_size=6144,
            intermediate_size=23040,
            num_attention_heads=48,
            num_hidden_layers=61,
            num_key_value_heads=2,
            partial_rotary_factor=0.5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            vocab_size=151552,
        ),
        32.57,
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_model_has_as_many_parameters_as_in_transformers(name, tmp_path):
    config, billions = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    count = read_spec(tmp_path).num_params
    assert round(count / 1e9, 2) == billions
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.pad_token_id = None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert count == sum(p.numel() for p in model.parameters())


def write_config(directory, **changes):
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **changes,
    }
    config = {key: value for key, value in config.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))


def test_absent_fields_have_the_defaults_of_transformers(tmp_path):
    for family in ("llama", "qwen2", "qwen3", "glm", "glm4"):
        heads = 4 if family == "llama" else 32
        write_config(
            tmp_path, model_type=family, num_attention_heads=heads, hidden_size=64
        )
        spec = read_spec(tmp_path)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert spec.num_kv_heads == theirs.num_key_value_heads
        assert spec.norm_eps == theirs.rms_norm_eps
        assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
        assert spec.tie_embeddings == theirs.tie_word_embeddings
        assert spec.max_context == theirs.max_position_embeddings
        if family in ("qwen3", "glm", "glm4"):
            assert spec.head_dim == theirs.head_dim
        if family in ("glm", "glm4"):
            assert spec.qkv_bias == theirs.attention_bias
            part = theirs.rope_parameters["partial_rotary_factor"]
            assert spec.rotary_dim == part * theirs.head_dim


def test_null_key_value_heads_mean_as_many_as_query_heads(tmp_path):
    for family in ("llama", "qwen2", "qwen3"):
        write_config(tmp_path, model_type=family, num_key_value_heads=None)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert read_spec(tmp_path).num_kv_heads == theirs.num_key_value_heads == 4


def test_partial_rotary_factor_is_read_in_its_old_and_new_spelling(tmp_path):
    new = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}
    write_config(tmp_path, **GLM, num_key_value_heads=2, rope_parameters=new)
    spec = read_spec(tmp_path)
    assert (spec.rotary_dim, spec.rope_theta) == (4, 2e4)
    write_config(tmp_path, **GLM, num_key_value_heads=2, partial_rotary_factor=0.75)
    assert read_spec(tmp_path).rotary_dim == 12


@pytest.mark.parametrize(
    "changes",
    [
        dict(qk_norm=True),  # together with qkv_bias
        dict(fused_mlp=True),
        dict(post_norms=True),
        dict(rotary_pairs="neighbours"),
        dict(rotary_dim=4),
    ],
)
def test_a_shape_that_transformers_does_not_support_is_not_written(changes):
    shape = dict(vocab_size=9, width=16, num_layers=1, num_heads=2, num_kv_heads=1)
    spec = DecoderSpec(**shape, head_dim=8, mlp_width=9, qkv_bias=True, **changes)
    with pytest.raises(ValueError, match="transformers has no model of the shape"):
        make_config(spec, dtype="float32")


def test_rope_is_read_in_its_old_and_new_spelling(tmp_path):
    llama3 = dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    expected = RopeScaling(8.0, 1.0, 4.0, 64)
    write_config(
        tmp_path, rope_theta=5e5, rope_scaling=llama3 | {"rope_type": "llama3"}
    )
    assert read_spec(tmp_path).rope_scaling == expected
    assert read_spec(tmp_path).rope_theta == 5e5
    new = llama3 | {"rope_type": "llama3", "rope_theta": 7e5}
    write_config(tmp_path, rope_parameters=new)
    assert read_spec(tmp_path).rope_scaling == expected
    assert read_spec(tmp_path).rope_theta == 7e5
    linear = {"type": "linear", "factor": 2, "attention_factor": None}
    write_config(tmp_path, rope_scaling=linear)
    assert read_spec(tmp_path).rope_scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"layer_types": 1}, "layer_types=1"),
        ({"vocab_size": 2**31}, "below 2147483648"),
        ({"rope_theta": 10**400}, "below 1e+38"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf"),
        (CHATGLM | {"multi_query_attention": "absent"}, "multi_query_attention=None"),
        (CHATGLM | {"multi_query_group_num": 3}, "multi_query_group_num=3"),
        (CHATGLM | {"kv_channels": 18}, "kv_channels=18"),
        (CHATGLM | {"original_rope": False}, "original_rope=False"),
        (CHATGLM | {"padded_vocab_size": None}, "padded_vocab_size=None"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
        ({"model_type": "glm4_moe"}, "model_type='glm4_moe'"),
        ({"model_type": "glm", "hidden_act": "gelu"}, "hidden_act='gelu'"),
        (GLM | {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (GLM | {"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
        (GLM | {"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1"),
        (
            GLM | {"rope_parameters": {"partial_rotary_factor": "x"}},
            "rope_parameters.partial_rotary_factor='x'",
        ),
        (GLM | {"rope_scaling": {"type": "yarn"}}, "rope_type='yarn'"),
        ({"model_type": "absent"}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias=False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"is_causal": False}, "is_causal=False"),
        ({"is_causal": None}, "is_causal=None"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor=-1"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3'"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling.factor=2"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
            "rope_parameters.mrope_section=[1, 1]",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "attention_factor": 2}},
            "rope_scaling.attention_factor=2",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
        ({"vocab_size": "absent"}, "vocab_size=None"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 30}, "num_attention_heads=4"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ],
)
def test_a_setting_that_the_decoder_does_not_support_is_refused_by_name(
    tmp_path, changes, named
):
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        read_spec(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_directory_without_a_configuration_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "config.json"))):
        read_spec(tmp_path)

import json
import re

import pytest
import transformers

from rsearch.models.decoder import LinearScaling, RopeScaling
from rsearch.models.hf_config import read_spec


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
    for family in ("llama", "qwen2"):
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


def test_rope_is_read_in_its_old_and_its_new_spelling(tmp_path):
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
    write_config(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert read_spec(tmp_path).rope_scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"model_type": "absent"}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias=False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor=-1"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3'"),
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
def test_what_the_decoder_does_not_compute_is_refused_by_name(tmp_path, changes, named):
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

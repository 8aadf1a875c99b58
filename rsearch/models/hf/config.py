"""config.json of Llama, Qwen and GLM models: a decoder's shape, read and written.

A field with a value that `Decoder` does not compute is refused, never passed over.
"""

import pathlib

from rsearch.models.decoder import DecoderSpec
from rsearch.models.rotary import LinearScaling, RopeScaling
from rsearch.runtime import files

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # Qwen2.5 and QwQ too
    "qwen3": "Qwen3ForCausalLM",
    "glm": "GlmForCausalLM",  # GLM-4-9B, in the layout of the "-hf" repositories
    "glm4": "Glm4ForCausalLM",  # GLM-4 of April 2025 (0414)
}
_GLM = ("glm", "glm4")
MAX_NUMBER = {int: 2**31, float: 1e38}  # an int32 and a float32 hold what is below

# Fields beside model_type that change what is computed, and the values that leave it as
# `Decoder` computes it; None stands for a field that is absent or null.
_SUPPORTED = {
    "hidden_act": (None, "silu", "swish"),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
    "use_mrope": (None, False),
    "rope_interleaved": (None, False),
    "tie_word_embeddings": (None, False, True),
}
_ANY_ROTARY_PART = {"attention_bias": (None, False, True), "sliding_window": (None,)}
_SUPPORTED_BY_TYPE = {
    # A Llama or a Qwen3 with attention_bias has one on o_proj too; a Qwen2 never has
    # that one and always has the other three, and a GLM's are those three.
    "llama": {
        "attention_bias": (None, False),
        "sliding_window": (None,),
        "partial_rotary_factor": (None, 1),
    },
    "qwen2": {"attention_bias": (None, True), "partial_rotary_factor": (None, 1)},
    "qwen3": {"attention_bias": (None, False), "partial_rotary_factor": (None, 1)},
    "glm": _ANY_ROTARY_PART,
    "glm4": _ANY_ROTARY_PART,
}
# What transformers takes for a field that is absent; a number of heads that is absent
# here is num_attention_heads, and a head_dim their share of hidden_size.
_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}
_DEFAULTS["glm"] = _DEFAULTS["glm4"] = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_GLM_ROTARY_PART = 0.5  # of a head, where config.json does not say

# (qk_norm, fused_mlp, post_norms, rotary_pairs) -> what transformers calls it. A Qwen2
# is a Llama with biases.
_TYPE_OF = {
    (False, False, False, "halves"): "llama",
    (True, False, False, "halves"): "qwen3",
    (False, True, False, "neighbours"): "glm",
    (False, True, True, "neighbours"): "glm4",
}


def read_spec(directory) -> DecoderSpec:
    """The shape of the decoder that a directory's config.json describes.

    Raises:
        ValueError: no readable config.json, or a field with a value that `Decoder` does
            not compute; names field, value and what is supported.
    """
    path = pathlib.Path(directory) / "config.json"
    config = read_object(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        supported = f"it must be one of {sorted(ARCHITECTURES)}"
        if model_type == "chatglm":
            supported += "; the same weights as a 'glm' are in the repository ...-hf"
        raise _refusal(path, "model_type", model_type, supported)
    for field, values in (_SUPPORTED | _SUPPORTED_BY_TYPE[model_type]).items():
        _check_value(path, config, field, values)
    layer_types = config.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple) or any(
        layer != "full_attention" for layer in layer_types
    ):
        supported = "every layer must be 'full_attention'"
        raise _refusal(path, "layer_types", layer_types, supported)
    defaults = _DEFAULTS[model_type]

    def number(field, kind=int):
        default = defaults.get(field)
        return _number(path, config, field, kind=kind, default=default)

    is_glm = model_type in _GLM
    heads, kv_heads, head_dim = _read_heads(path, config, defaults)
    rope_theta, rope_scaling = _read_rope(path, config)
    return DecoderSpec(
        vocab_size=number("vocab_size"),
        width=number("hidden_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=number("intermediate_size"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=number("rms_norm_eps", float),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=config.get("attention_bias") is not False
        if is_glm
        else model_type == "qwen2",
        max_context=number("max_position_embeddings"),
        rotary_dim=_rotary_dim(path, config, head_dim) if is_glm else None,
        rotary_pairs="neighbours" if is_glm else "halves",
        qk_norm=model_type == "qwen3",
        fused_mlp=is_glm,
        post_norms=model_type == "glm4",
    )


def config_of(spec: DecoderSpec, *, dtype: str) -> dict:
    """config.json of a decoder, in the layout that every version of transformers reads.

    Args:
        spec: its shape.
        dtype: of the weights beside it, by transformers' name.

    Raises:
        ValueError: a shape that transformers has no model for.
    """
    model_type = _model_type(spec)
    if model_type == "llama":
        own = {"attention_bias": False, "mlp_bias": False}
    elif model_type in _GLM:
        part = (spec.rotary_dim or spec.head_dim) / spec.head_dim
        own = {"attention_bias": spec.qkv_bias, "partial_rotary_factor": part}
        own["pad_token_id"] = None  # Else an id of the published vocabulary.
    else:
        own = {"use_sliding_window": False}
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": _rope_object(spec.rope_scaling),
        "tie_word_embeddings": spec.tie_embeddings,
        **own,
        "torch_dtype": dtype,
    }


def _model_type(spec):
    """What transformers calls a decoder of this shape."""
    features = (spec.qk_norm, spec.fused_mlp, spec.post_norms, spec.rotary_pairs)
    model_type = _TYPE_OF.get(features)
    if model_type == "llama" and spec.qkv_bias:
        model_type = "qwen2"
    if (
        model_type is None
        or (model_type == "qwen3" and spec.qkv_bias)
        or (model_type not in _GLM and spec.rotary_dim not in (None, spec.head_dim))
    ):
        raise ValueError(f"transformers has no model of the shape {spec}")
    if model_type == "llama" and spec.width % spec.num_heads:
        raise ValueError(
            f"width={spec.width} is not a multiple of num_heads={spec.num_heads}, "
            f"which transformers demands of a Llama"
        )
    return model_type


def read_object(path: pathlib.Path) -> dict:
    """The object in a JSON file.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist, so its directory holds no model"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _read_heads(path, config, defaults):
    """(num_heads, num_kv_heads, head_dim) of a configuration."""

    def number(field, default=None):
        return _number(path, config, field, default=default)

    width, heads = number("hidden_size"), number("num_attention_heads")
    is_null = "num_key_value_heads" in config and config["num_key_value_heads"] is None
    default = heads if is_null else defaults.get("num_key_value_heads", heads)
    kv_heads = number("num_key_value_heads", default)
    if heads % kv_heads:
        supported = f"it must divide num_attention_heads={heads}"
        raise _refusal(path, "num_key_value_heads", kv_heads, supported)
    head_dim = number("head_dim", defaults.get("head_dim", width // heads))
    if config.get("head_dim") is None and "head_dim" not in defaults and width % heads:
        supported = f"without head_dim, hidden_size={width} must be a multiple of it"
        raise _refusal(path, "num_attention_heads", heads, supported)
    if head_dim % 2:
        supported = "rotary positions need an even number"
        raise _refusal(path, "head_dim", head_dim, supported)
    return heads, kv_heads, head_dim


def _rope_field(config):
    """The name of the object that holds rotary settings."""
    # transformers 5 writes rope_parameters, which holds rope_theta; earlier versions
    # write rope_scaling beside it.
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _rotary_dim(path, config, head_dim):
    """Channels of a head that are rotated, of partial_rotary_factor."""
    held, inside = config, ""
    field = _rope_field(config)
    if "partial_rotary_factor" in (config.get(field) or {}):
        held, inside = config[field], f"{field}."
    name = "partial_rotary_factor"
    part = _number(
        path, held, name, kind=float, default=_GLM_ROTARY_PART, inside=inside
    )
    rotary_dim = int(part * head_dim)
    if rotary_dim > head_dim or rotary_dim % 2 or not rotary_dim:
        supported = f"of head_dim={head_dim} it must make an even number, all or less"
        raise _refusal(path, inside + name, part, supported)
    return rotary_dim


def _read_rope(path, config):
    """(rope_theta, scaling or None) of a configuration."""
    field = _rope_field(config)
    rope = config.get(field) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        supported = "it must be one object for all layers"
        raise _refusal(path, field, rope, supported)
    if config["model_type"] not in _GLM:
        _check_value(path, rope, "partial_rotary_factor", (None, 1))

    def number(name, *, kind=float):
        return _number(path, rope, name, kind=kind, inside=f"{field}.")

    held = rope if "rope_theta" in rope else config
    theta = _number(path, held, "rope_theta", kind=float, default=10000.0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, LinearScaling(factor=number("factor"))
    if rope_type != "llama3":
        supported = "it must be 'default', 'linear' or 'llama3'"
        raise _refusal(path, f"{field}.rope_type", rope_type, supported)
    original = "original_max_position_embeddings"
    if original in config:
        rope = {**rope, original: config[original]}
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if low >= high:
        supported = f"it must be above low_freq_factor={low}"
        raise _refusal(path, f"{field}.high_freq_factor", high, supported)
    return theta, RopeScaling(
        factor=number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=number(original, kind=int),
    )


def _rope_object(scaling):
    """`rope_scaling` of config.json."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _check_value(path, held, field, values):
    """Refuses a field that holds none of these values; 0 is not False here."""
    value = held.get(field)
    if not any(
        value == v and isinstance(value, bool) == isinstance(v, bool) for v in values
    ):
        allowed = " or ".join("null" if v is None else repr(v) for v in values)
        raise _refusal(path, field, value, f"it must be {allowed}")


def _number(path, held, field, *, kind=int, default=None, inside=""):
    """A number above zero; `default` where the field is absent or null."""
    value = default if held.get(field) is None else held[field]
    types = (int, float) if kind is float else (int,)
    if (
        not isinstance(value, types)
        or isinstance(value, bool)
        or not 0 < value < MAX_NUMBER[kind]
    ):
        what = "a whole number" if kind is int else "a number"
        supported = f"it must be {what} above 0 and below {MAX_NUMBER[kind]}"
        raise _refusal(path, inside + field, value, supported)
    return kind(value)


def _refusal(path, field, value, supported):
    return ValueError(f"{path}: {field}={value!r} is not supported: {supported}")

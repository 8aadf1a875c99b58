"""The definition of a family, and how families read and write a config.json.

A field with a value that `Decoder` does not compute is refused, never ignored.
"""

import dataclasses
from collections.abc import Callable, Mapping

from rsearch.models.hf.fields import Fields
from rsearch.models.hf.layouts import refuse_quantized
from rsearch.models.hf.weights import DECODER_LAYOUT, Layout
from rsearch.models.spec import DecoderSpec, LinearScaling, RopeScaling

# Fields other than model_type that change the computation, and the values for which
# `Decoder` computes it; None stands for a field that is absent or null.
SUPPORTED = {
    "hidden_act": (None, "silu", "swish"),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "use_mrope": (None, False),
    "rope_interleaved": (None, False),
    "tie_word_embeddings": (None, False, True),
}
_PARTIAL_ROTARY = "partial_rotary_factor"
_ROPE_CONTEXT = "original_max_position_embeddings"
# Type of rotary positions -> the fields of the rotary settings that it may have.
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor", _ROPE_CONTEXT),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ROPE_CONTEXT),
}
# Fields of a DecoderSpec that distinguish families; their defaults are Llama's.
_FEATURES = ("qkv_bias", "qk_norm", "fused_mlp", "post_norms", "rotary_pairs")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models: how its directories are read and written.

    Attributes:
        architecture: the name of transformers' class.
        read: returns the shape that a config.json describes; raises a ValueError for
            settings that `Decoder` does not compute.
        fits: returns whether transformers' class computes a decoder of that shape.
        write: returns the fields of config.json that only this family has.
        layout: the tensor that stores each parameter; see `weights.DECODER_LAYOUT`.
        view: returns a directory's tensors under the names of the layout, for layouts
            in which one stored tensor holds several parameters.
        published: {hub id: shape} of its models, for plans made without their files.
            Rotary settings that do not affect the sizes of weights and caches may be
            left out.
    """

    architecture: str
    read: Callable[[Fields], DecoderSpec]
    fits: Callable[[DecoderSpec], bool]
    write: Callable[[DecoderSpec], dict]
    layout: Layout = dataclasses.field(default_factory=lambda: DECODER_LAYOUT)
    view: Callable[[dict, DecoderSpec], dict] = lambda tensors, spec: tensors
    published: Mapping[str, DecoderSpec] = dataclasses.field(default_factory=dict)


def check_fields(fields: Fields, allowed: Mapping[str, tuple]) -> None:
    """Refuse a config.json with a field that changes what `Decoder` computes.

    Args:
        fields: fields of the config.json.
        allowed: {field: supported values}, in addition to SUPPORTED or overriding it.

    Raises:
        ValueError: names the field, its value and what is supported.
    """
    refuse_quantized(fields.path, fields.get("quantization_config"))
    for name, values in {**SUPPORTED, **allowed}.items():
        fields.check(name, values)
    # Null is not the same as absent here: transformers takes it for False.
    if (is_causal := fields.get("is_causal", True)) is not True:
        raise fields.refusal("is_causal", is_causal, "it must be true or absent")
    layer_types = fields.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple) or any(
        layer != "full_attention" for layer in layer_types
    ):
        supported = "every layer must be 'full_attention'"
        raise fields.refusal("layer_types", layer_types, supported)


def read_decoder(
    fields: Fields,
    defaults: Mapping[str, float],
    *,
    rotary_share: float | None = None,
    **features: bool | str,
) -> DecoderSpec:
    """Return the shape that a config.json with the usual field names describes.

    Args:
        fields: fields of the config.json, checked by `check_fields`.
        defaults: transformers' default for each field that may be absent. Without a
            default, an absent number of key/value heads is num_attention_heads, and an
            absent head_dim is hidden_size divided by num_attention_heads.
        rotary_share: default share of a head's channels that are rotated, for a
            config.json that does not state it; None refuses a config.json that rotates
            fewer than all.
        features: other fields of the DecoderSpec.

    Raises:
        ValueError: names a field whose value is not supported.
    """

    def read_number(name, kind=int):
        return fields.number(name, kind, defaults.get(name))

    num_heads, num_kv_heads, head_dim = _read_heads(fields, defaults)
    if rotary_share is None:
        # transformers 5 writes the factor into the rotary settings object.
        Fields(fields.path, _rope_object(fields).values).check(
            _PARTIAL_ROTARY, (None, 1)
        )
    rope_theta, rope_scaling = _read_rope(fields)
    return DecoderSpec(
        vocab_size=read_number("vocab_size"),
        width=read_number("hidden_size"),
        num_layers=read_number("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=read_number("intermediate_size"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=read_number("rms_norm_eps", float),
        tie_embeddings=bool(fields.get("tie_word_embeddings")),
        max_context=read_number("max_position_embeddings"),
        rotary_dim=_read_rotary_dim(fields, head_dim, rotary_share),
        **features,
    )


def llama_family(
    architecture: str,
    *,
    defaults: Mapping[str, float],
    allowed: Mapping[str, tuple],
    write: Callable[[DecoderSpec], dict],
    published: Mapping[str, DecoderSpec],
    **features: bool | str,
) -> Family:
    """Return a family whose layers differ from Llama's only in some features.

    Args:
        architecture, write, published: see Family.
        defaults: see `read_decoder`.
        allowed: see `check_fields`.
        features: fields of the DecoderSpec that differ from Llama's; a shape fits only
            if it has exactly these features.
    """
    allowed = {**allowed, _PARTIAL_ROTARY: (None, 1)}
    expected = {name: getattr(DecoderSpec, name) for name in _FEATURES} | features

    def read(fields):
        check_fields(fields, allowed)
        return read_decoder(fields, defaults, **features)

    def fits(spec):
        rotates_all = spec.rotary_dim in (None, spec.head_dim)
        return rotates_all and all(
            getattr(spec, name) == value for name, value in expected.items()
        )

    return Family(architecture, read, fits, write, published=published)


def published_spec(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocab: int,
    *,
    context: int,
    head_dim: int = 128,
    tied: bool = False,
    **others: float | bool,
) -> DecoderSpec:
    """Return a shape for `Family.published`; `others` are fields of the DecoderSpec."""
    return DecoderSpec(
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        tie_embeddings=tied,
        max_context=context,
        **others,
    )


def write_decoder(spec: DecoderSpec) -> dict:
    """Return the fields of config.json that all families have."""
    return {
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
        "rope_scaling": _write_scaling(spec.rope_scaling),
        "tie_word_embeddings": spec.tie_embeddings,
    }


def _read_heads(fields, defaults):
    """Return (num_heads, num_kv_heads, head_dim)."""
    width = fields.number("hidden_size")
    heads = fields.number("num_attention_heads")
    is_null = fields.get("num_key_value_heads", heads) is None
    default = heads if is_null else defaults.get("num_key_value_heads", heads)
    kv_heads = fields.number("num_key_value_heads", default=default)
    if heads % kv_heads:
        supported = f"it must divide num_attention_heads={heads}"
        raise fields.refusal("num_key_value_heads", kv_heads, supported)
    default = defaults.get("head_dim", width // heads)
    head_dim = fields.number("head_dim", default=default)
    if fields.get("head_dim") is None and "head_dim" not in defaults and width % heads:
        supported = f"without head_dim, hidden_size={width} must be a multiple of it"
        raise fields.refusal("num_attention_heads", heads, supported)
    if head_dim % 2:
        supported = "rotary positions need an even number"
        raise fields.refusal("head_dim", head_dim, supported)
    return heads, kv_heads, head_dim


def _rope_object(fields):
    """Return the fields of the rotary settings object; empty if it is absent."""
    # transformers 5 writes rope_parameters, which holds rope_theta; earlier versions
    # write rope_scaling next to rope_theta.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name) or {}
    if not isinstance(values, dict) or any(
        isinstance(v, dict) for v in values.values()
    ):
        supported = "it must be one object for all layers"
        raise fields.refusal(name, values, supported)
    return Fields(fields.path, values, prefix=f"{name}.")


def _read_rope(fields):
    """Return (rope_theta, scaling or None)."""
    rope = _rope_object(fields)
    holder = rope if "rope_theta" in rope.values else fields
    theta = holder.number("rope_theta", float, 10000.0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _ROPE_FIELDS:
        supported = "it must be 'default', 'linear' or 'llama3'"
        raise rope.refusal("rope_type", rope_type, supported)
    known_fields = {"rope_type", "type", "rope_theta", _PARTIAL_ROTARY}
    known_fields.update(_ROPE_FIELDS[rope_type])
    for name in sorted(rope.values.keys() - known_fields):
        # transformers ignores it, but whoever wrote it meant another computation.
        rope.check(name, (None,))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, LinearScaling(factor=rope.number("factor", float))
    if _ROPE_CONTEXT in fields.values:
        values = rope.values | {_ROPE_CONTEXT: fields.values[_ROPE_CONTEXT]}
        rope = dataclasses.replace(rope, values=values)
    low = rope.number("low_freq_factor", float)
    high = rope.number("high_freq_factor", float)
    if low >= high:
        supported = f"it must be above low_freq_factor={low}"
        raise rope.refusal("high_freq_factor", high, supported)
    return theta, RopeScaling(
        factor=rope.number("factor", float),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=rope.number(_ROPE_CONTEXT),
    )


def _read_rotary_dim(fields, head_dim, default_share):
    """Return the number of rotated channels of a head; None if all always are."""
    if default_share is None:
        return None
    rope = _rope_object(fields)
    holder = rope if _PARTIAL_ROTARY in rope.values else fields
    share = holder.number(_PARTIAL_ROTARY, float, default_share)
    rotary_dim = int(share * head_dim)
    if rotary_dim > head_dim or rotary_dim % 2 or not rotary_dim:
        supported = f"its share of head_dim={head_dim} must be even, from 2 up to all"
        raise holder.refusal(_PARTIAL_ROTARY, share, supported)
    return rotary_dim


def _write_scaling(scaling):
    """Return the value of `rope_scaling` in config.json."""
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

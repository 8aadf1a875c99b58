"""Qwen3: a Llama with an RMSNorm over each head of queries and keys."""

from rsearch.models.hf.config import (
    Family,
    check_fields,
    read_decoder,
    rotates_all,
)
from rsearch.models.hf.fields import Fields
from rsearch.models.spec import DecoderSpec

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "head_dim": 128,
}


def _read(fields: Fields) -> DecoderSpec:
    allowed = {
        "attention_bias": (None, False),  # True adds a bias to o_proj too
        "partial_rotary_factor": (None, 1),
    }
    check_fields(fields, allowed)
    return read_decoder(fields, _DEFAULTS, qk_norm=True)


def _fits(spec: DecoderSpec) -> bool:
    has_extras = spec.qkv_bias or spec.fused_mlp or spec.post_norms
    is_like_llama = spec.rotary_pairs == "halves" and rotates_all(spec)
    return spec.qk_norm and not has_extras and is_like_llama


def _write(spec: DecoderSpec) -> dict:
    return {"use_sliding_window": False}


def _shape(width, layers, mlp_width, *, tied):
    return DecoderSpec(
        vocab_size=151_936,
        width=width,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_width=mlp_width,
        rope_theta=1e6,
        tie_embeddings=tied,
        max_context=40_960,
        qk_norm=True,
    )


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    read=_read,
    fits=_fits,
    write=_write,
    published={
        "Qwen/Qwen3-4B": _shape(2560, 36, 9728, tied=True),
        "Qwen/Qwen3-8B": _shape(4096, 36, 12_288, tied=False),
    },
)

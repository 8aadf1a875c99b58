"""Qwen3: a Llama with an RMSNorm over each head of queries and keys."""

from rsearch.models.hf.config import llama_family
from rsearch.models.spec import DecoderSpec


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


FAMILY = llama_family(
    "Qwen3ForCausalLM",
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    allowed={"attention_bias": (None, False)},  # True also adds a bias to o_proj
    write=lambda spec: {"use_sliding_window": False},
    qk_norm=True,
    published={
        "Qwen/Qwen3-4B": _shape(2560, 36, 9728, tied=True),
        "Qwen/Qwen3-8B": _shape(4096, 36, 12_288, tied=False),
    },
)

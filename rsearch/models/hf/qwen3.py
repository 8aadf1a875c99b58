"""Qwen3: a Llama with an RMSNorm over each head of queries and keys."""

import functools

from rsearch.models.hf.config import llama_family, published_spec

_shape = functools.partial(published_spec, context=40_960, rope_theta=1e6, qk_norm=True)
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
        "Qwen/Qwen3-4B": _shape(2560, 36, 32, 8, 9728, 151_936, tied=True),
        "Qwen/Qwen3-8B": _shape(4096, 36, 32, 8, 12_288, 151_936),
    },
)

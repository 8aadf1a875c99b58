"""Qwen2, Qwen2.5 and QwQ: a Llama with biases on queries, keys and values."""

import functools

from rsearch.models.hf.config import llama_family, published_spec

_shape = functools.partial(published_spec, rope_theta=1e6, qkv_bias=True)
_1_5B = (1536, 28, 12, 2, 8960, 151_936)
_3B = (2048, 36, 16, 2, 11008, 151_936)
_7B = (3584, 28, 28, 4, 18_944, 152_064)
_14B = (5120, 48, 40, 8, 13_824, 152_064)
_32B = (5120, 64, 40, 8, 27_648, 152_064)
_72B = (8192, 80, 64, 8, 29_568, 152_064)

FAMILY = llama_family(
    "Qwen2ForCausalLM",
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
    # A Qwen2 always has its three biases: transformers never reads the field.
    allowed={"attention_bias": (None, True)},
    write=lambda spec: {"use_sliding_window": False},
    qkv_bias=True,
    published={
        "Qwen/Qwen2.5-1.5B": _shape(*_1_5B, context=131_072, tied=True),
        "Qwen/Qwen2.5-3B": _shape(*_3B, context=32_768, tied=True),
        "Qwen/Qwen2.5-3B-Instruct": _shape(*_3B, context=32_768, tied=True),
        "Qwen/Qwen2.5-7B": _shape(*_7B, context=131_072),
        "Qwen/Qwen2.5-7B-Instruct": _shape(*_7B, context=32_768),
        "Qwen/Qwen2.5-14B-Instruct": _shape(*_14B, context=32_768),
        "Qwen/Qwen2.5-32B-Instruct": _shape(*_32B, context=32_768),
        "Qwen/Qwen2.5-72B-Instruct": _shape(*_72B, context=32_768),
        "Qwen/QwQ-32B-Preview": _shape(*_32B, context=32_768),
        "Qwen/QwQ-32B": _shape(*_32B, context=40_960),
    },
)

"""Shapes of published models, for plans that are made without their files.

Sizes from each model's config.json; of the rotation only what the size of weights and
caches does not depend on is left out. A model that is loaded is shaped by its own file
(`rsearch.models.hf.config`), never by this table.
"""

from rsearch.models.decoder import DecoderSpec


def _qwen2(width, layers, heads, kv_heads, mlp_width, vocab, *, context, tied=False):
    return DecoderSpec(
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        mlp_width=mlp_width,
        rope_theta=1e6,
        tie_embeddings=tied,
        qkv_bias=True,
        max_context=context,
    )


def _qwen3(width, layers, mlp_width, *, tied):
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


def _llama(width, layers, heads, kv_heads, mlp_width, vocab, *, context, tied=False):
    return DecoderSpec(
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=mlp_width,
        tie_embeddings=tied,
        max_context=context,
    )


_QWEN_3B = (2048, 36, 16, 2, 11008, 151_936)
_QWEN_7B = (3584, 28, 28, 4, 18_944, 152_064)
_QWEN_14B = (5120, 48, 40, 8, 13_824, 152_064)
_QWEN_32B = (5120, 64, 40, 8, 27_648, 152_064)
_QWEN_72B = (8192, 80, 64, 8, 29_568, 152_064)
_GLM_9B = DecoderSpec(
    vocab_size=151_552,
    width=4096,
    num_layers=40,
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    mlp_width=13_696,
    norm_eps=1.5625e-7,
    qkv_bias=True,
    max_context=131_072,
    rotary_dim=64,
    rotary_pairs="neighbours",
    fused_mlp=True,
)
PUBLISHED = {  # hub id -> shape
    "Qwen/Qwen2.5-3B": _qwen2(*_QWEN_3B, context=32_768, tied=True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(*_QWEN_3B, context=32_768, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(*_QWEN_7B, context=131_072),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(*_QWEN_7B, context=32_768),
    "Qwen/Qwen2.5-14B-Instruct": _qwen2(*_QWEN_14B, context=32_768),
    "Qwen/Qwen2.5-32B-Instruct": _qwen2(*_QWEN_32B, context=32_768),
    "Qwen/Qwen2.5-72B-Instruct": _qwen2(*_QWEN_72B, context=32_768),
    "Qwen/QwQ-32B-Preview": _qwen2(*_QWEN_32B, context=32_768),
    "Qwen/QwQ-32B": _qwen2(*_QWEN_32B, context=40_960),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 12_288, tied=False),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(
        4096, 32, 32, 8, 14_336, 128_256, context=131_072
    ),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(
        3072, 28, 24, 8, 8192, 128_256, context=131_072, tied=True
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _llama(
        576, 30, 9, 3, 1536, 49_152, context=8192, tied=True
    ),
    "zai-org/glm-4-9b-chat-hf": _GLM_9B,
    "THUDM/glm-4-9b-chat-hf": _GLM_9B,
}

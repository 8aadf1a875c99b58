"""Shapes of published models, for plans that are made without their files.

Facts from each model's config.json. A model that is to be loaded is shaped by its own
file (`rsearch.models.hf_config`), never by this table.
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
# GLM-4 is counted as a Llama of its sizes with biases on q, k and v: half of each head
# is rotated and gate and up are one matrix, which changes no number of parameters.
_GLM_9B = DecoderSpec(
    vocab_size=151_552,
    width=4096,
    num_layers=40,
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    mlp_width=13_696,
    qkv_bias=True,
    max_context=131_072,
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

"""Llama, and models with the same layout such as SmolLM2."""

from rsearch.models.hf.config import llama_family, published_spec
from rsearch.models.spec import DecoderSpec


def _write(spec: DecoderSpec) -> dict:
    if spec.width % spec.num_heads:
        raise ValueError(
            f"width={spec.width} is not a multiple of num_heads={spec.num_heads}, "
            f"which transformers requires of a Llama"
        )
    return {"attention_bias": False, "mlp_bias": False}


FAMILY = llama_family(
    "LlamaForCausalLM",
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    allowed={
        "attention_bias": (None, False),  # True also adds a bias to o_proj
        "sliding_window": (None,),
    },
    write=_write,
    published={
        "meta-llama/Llama-3.1-8B-Instruct": published_spec(
            4096, 32, 32, 8, 14_336, 128_256, context=131_072
        ),
        "meta-llama/Llama-3.2-3B-Instruct": published_spec(
            3072, 28, 24, 8, 8192, 128_256, context=131_072, tied=True
        ),
        "HuggingFaceTB/SmolLM2-135M-Instruct": published_spec(
            576, 30, 9, 3, 1536, 49_152, context=8192, tied=True, head_dim=64
        ),
    },
)

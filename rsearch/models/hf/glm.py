"""GLM-4: a Llama that rotates neighbouring channels, of a share of each head.

It stores gate and up as one. Two families of transformers differ in two norms only:
"glm" is GLM-4-9B, in the layout of the repositories whose names end in "-hf"; "glm4" is
GLM-4 of April 2025 (0414), with a norm on what attention and MLP add.
"""

from rsearch.models.hf.config import Family, check_fields, read_decoder
from rsearch.models.hf.fields import Fields
from rsearch.models.spec import DecoderSpec

_DEFAULTS = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def _read(fields: Fields, *, post_norms: bool) -> DecoderSpec:
    # True stands for the three biases of q, k and v, as in a Qwen2.
    allowed = {"attention_bias": (None, False, True), "sliding_window": (None,)}
    check_fields(fields, allowed)
    return read_decoder(
        fields,
        _DEFAULTS,
        rotary_share=0.5,
        qkv_bias=fields.get("attention_bias") is not False,
        rotary_pairs="neighbours",
        fused_mlp=True,
        post_norms=post_norms,
    )


def _is_glm(spec: DecoderSpec) -> bool:
    is_neighbours = spec.rotary_pairs == "neighbours"
    return is_neighbours and spec.fused_mlp and not spec.qk_norm


def _write(spec: DecoderSpec) -> dict:
    return {
        "attention_bias": spec.qkv_bias,
        "partial_rotary_factor": (spec.rotary_dim or spec.head_dim) / spec.head_dim,
        "pad_token_id": None,  # Else an id of the published vocabulary.
    }


_9B = DecoderSpec(
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

GLM = Family(
    architecture="GlmForCausalLM",
    read=lambda fields: _read(fields, post_norms=False),
    fits=lambda spec: _is_glm(spec) and not spec.post_norms,
    write=_write,
    published={"zai-org/glm-4-9b-chat-hf": _9B, "THUDM/glm-4-9b-chat-hf": _9B},
)
GLM4 = Family(
    architecture="Glm4ForCausalLM",
    read=lambda fields: _read(fields, post_norms=True),
    fits=lambda spec: _is_glm(spec) and spec.post_norms,
    write=_write,
)

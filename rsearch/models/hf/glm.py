"""GLM-4: a Llama that rotates pairs of neighbouring channels in a part of each head.

It stores gate and up as one matrix. Two families of transformers differ only in two
norms: "glm" is GLM-4-9B, in the layout of the repositories whose names end in "-hf";
"glm4" is GLM-4 of April 2025 (0414), with a norm on the outputs of attention and MLP.

"chatglm" is GLM-4-9B in its first repositories, which transformers computes only with
the repositories' own code. It is the network of "glm" under other names, with queries,
keys and values in one matrix. It can be read, and is exported as a "glm". These
repositories have no tokenizer.json; the one of zai-org/glm-4-9b-chat-hf has the same
vocabulary.
"""

from collections.abc import Mapping, Sequence

from rsearch.models.hf.config import Family, check_fields, read_decoder
from rsearch.models.hf.fields import Fields
from rsearch.models.spec import DecoderSpec

_DEFAULTS = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_CHATGLM_NAMES = {  # names in a "glm" -> names in a "chatglm"
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    **{f"self_attn.{x}_proj": f"self_attention.query_key_value[{x}]" for x in "qkv"},
}
# Fields that would change the network, and the values with which it equals a "glm".
_CHATGLM_FIELDS = {
    "add_bias_linear": (None, False),
    "add_qkv_bias": (None, False, True),
    "apply_residual_connection_post_layernorm": (None, False),
    "fp32_residual_connection": (None, False),
    "interleaved_qkv": (None, False),
    "multi_query_attention": (True,),
    "original_rope": (None, True),
    "post_layer_norm": (None, True),
    "pre_seq_len": (None,),
    "rmsnorm": (None, True),
    "tie_word_embeddings": (None, False),
}


def _read(fields: Fields, *, post_norms: bool) -> DecoderSpec:
    # True means biases on q, k and v only, as in Qwen2.
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
        "pad_token_id": None,  # The default is an id of the published vocabulary.
    }


class _Rows:
    """Some rows of a stored tensor, with the interface of a safetensors slice."""

    def __init__(self, tensor: object, start: int, stop: int):
        self._tensor, self._start, self._stop = tensor, start, stop

    def get_shape(self) -> list[int]:
        return [self._stop - self._start, *self._tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, index: Sequence[slice]):
        row_slice, *other_slices = index
        start, stop, _ = row_slice.indices(self._stop - self._start)
        rows = slice(self._start + start, self._start + stop)
        return self._tensor[(rows, *other_slices)]


def _read_chatglm(fields: Fields) -> DecoderSpec:
    check_fields(fields, _CHATGLM_FIELDS)
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number("multi_query_group_num")
    if heads % kv_heads:
        supported = f"it must divide num_attention_heads={heads}"
        raise fields.refusal("multi_query_group_num", kv_heads, supported)
    head_dim = fields.number("kv_channels")
    if head_dim % 4:
        supported = "it must be a multiple of 4: pairs in its first half are rotated"
        raise fields.refusal("kv_channels", head_dim, supported)
    return DecoderSpec(
        vocab_size=fields.number("padded_vocab_size"),
        width=fields.number("hidden_size"),
        num_layers=fields.number("num_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=fields.number("ffn_hidden_size"),
        rope_theta=10_000.0 * fields.number("rope_ratio", float, 1.0),
        norm_eps=fields.number("layernorm_epsilon", float),
        qkv_bias=fields.get("add_qkv_bias") is True,
        max_context=fields.number("seq_length"),
        rotary_dim=head_dim // 2,
        rotary_pairs="neighbours",
        fused_mlp=True,
    )


def _split(tensors: Mapping[str, object], spec: DecoderSpec) -> dict[str, object]:
    """Return the tensors with fused matrices split into queries, keys and values.

    A fused matrix of unexpected height is left as it is, and is then refused because it
    does not match any parameter.
    """
    split_tensors = {}
    sizes = [n * spec.head_dim for n in (spec.num_heads, *[spec.num_kv_heads] * 2)]
    for name, tensor in tensors.items():
        layer, separator, kind = name.partition("query_key_value.")
        if not separator or tensor.get_shape()[:1] != [sum(sizes)]:
            split_tensors[name] = tensor
            continue
        start = 0
        for letter, size in zip("qkv", sizes):
            rows = _Rows(tensor, start, start + size)
            split_tensors[f"{layer}query_key_value[{letter}].{kind}"] = rows
            start += size
    return split_tensors


def _rename(name: str) -> str:
    for glm_name, chatglm_name in _CHATGLM_NAMES.items():
        name = name.replace(glm_name, chatglm_name)
    return name


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
CHATGLM = Family(
    architecture="ChatGLMModel",
    read=_read_chatglm,
    fits=lambda spec: False,  # exported as a "glm"
    write=lambda spec: {},
    layout={leaf: (_rename(name), axes) for leaf, (name, axes) in GLM.layout.items()},
    view=_split,
)

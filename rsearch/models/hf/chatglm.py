"""GLM-4-9B as its first repositories have it: "chatglm", which transformers lacks.

The network is that of "glm", under other names, with queries, keys and values in one
matrix. It is read, and exported as a "glm", which transformers computes without the
code of a repository. Such a repository has no tokenizer.json; that of the "glm" with
the same vocabulary, zai-org/glm-4-9b-chat-hf, takes its place.
"""

from collections.abc import Mapping, Sequence

from rsearch.models.hf.config import Family, check_fields
from rsearch.models.hf.fields import Fields
from rsearch.models.hf.weights import DECODER_LAYOUT
from rsearch.models.spec import DecoderSpec

_FUSED = "transformer.encoder.layers.{}.self_attention.query_key_value"
_NAMES = {  # of a "glm" -> of a "chatglm"
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    **{f"self_attn.{x}_proj": f"self_attention.query_key_value[{x}]" for x in "qkv"},
}
# What would change the network, and the values that leave it as a "glm" computes it.
_ALLOWED = {
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


class _Rows:
    """Some rows of a stored tensor, read as a safetensors slice is."""

    def __init__(self, tensor: object, start: int, stop: int):
        self._tensor, self._start, self._stop = tensor, start, stop

    def get_shape(self) -> list[int]:
        return [self._stop - self._start, *self._tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, index: Sequence[slice]):
        first, *others = index
        start, stop, _ = first.indices(self._stop - self._start)
        rows = slice(self._start + start, self._start + stop)
        return self._tensor[(rows, *others)]


def _read(fields: Fields) -> DecoderSpec:
    check_fields(fields, _ALLOWED)
    heads = fields.number("num_attention_heads")
    kv_heads = fields.number("multi_query_group_num")
    if heads % kv_heads:
        supported = f"it must divide num_attention_heads={heads}"
        raise fields.refusal("multi_query_group_num", kv_heads, supported)
    head_dim = fields.number("kv_channels")
    if head_dim % 4:
        supported = "neighbours of its first half are rotated: a multiple of 4"
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
    """Return the tensors with rows of their own for queries, keys and values.

    A fused matrix of another height stays as it is, and fits nothing.
    """
    split = dict(tensors)
    sizes = [n * spec.head_dim for n in (spec.num_heads, *[spec.num_kv_heads] * 2)]
    for layer in range(spec.num_layers):
        for kind in ("weight", "bias"):
            name = f"{_FUSED.format(layer)}.{kind}"
            if name not in tensors or tensors[name].get_shape()[0] != sum(sizes):
                continue
            fused, start = split.pop(name), 0
            for letter, size in zip("qkv", sizes):
                key = f"{_FUSED.format(layer)}[{letter}].{kind}"
                split[key] = _Rows(fused, start, start + size)
                start += size
    return split


def _rename(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


FAMILY = Family(
    architecture="ChatGLMModel",
    read=_read,
    fits=lambda spec: False,  # exported as a "glm"
    write=lambda spec: {},
    layout={
        leaf: (_rename(name), axes) for leaf, (name, axes) in DECODER_LAYOUT.items()
    },
    view=_split,
)

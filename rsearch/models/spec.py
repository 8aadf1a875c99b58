"""The shape of a decoder, in plain numbers: no arrays, no network."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretched rotary frequencies (`rope_type` llama3 in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor (`rope_type` linear in config.json)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """The shape of a decoder: everything a forward pass depends on except the weights.

    Attributes:
        rotary_dim: number of channels of a head that are rotated, which come first;
            None means all.
        rotary_pairs: "halves" rotates channel i with i + rotary_dim / 2 (Llama, Qwen),
            and "neighbours" rotates 2i with 2i + 1 (GLM-4).
        qk_norm: whether each head of queries and keys has an RMSNorm (Qwen3).
        fused_mlp: whether gate and up are one parameter, as GLM-4 stores them.
        post_norms: whether the outputs of attention and MLP also have an RMSNorm
            (GLM-4's releases of April 2025).
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | LinearScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    max_context: int = 2**31 - 1
    rotary_dim: int | None = None
    rotary_pairs: str = "halves"
    qk_norm: bool = False
    fused_mlp: bool = False
    post_norms: bool = False

    @property
    def num_params(self) -> int:
        """Number of parameters, excluding the value head."""
        d, c = self.width, self.head_dim
        attention = 2 * d * c * (self.num_heads + self.num_kv_heads)
        if self.qkv_bias:
            attention += c * (self.num_heads + 2 * self.num_kv_heads)
        if self.qk_norm:
            attention += 2 * c
        layer = attention + 3 * d * self.mlp_width + (4 if self.post_norms else 2) * d
        heads = 1 if self.tie_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * d + d

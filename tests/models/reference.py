"""Small random transformers models and real passages, as references for tests."""

import functools
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from rsearch.models.attention.cached import empty_cache
from rsearch.models.decoder import Decoder, param_shapes
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec

# With more threads, torch's threads wait for each other on a busy machine.
torch.set_num_threads(1)

_SIZES = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    max_position_embeddings=256,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_GLM = dict(pad_token_id=0)  # The default id lies outside these vocabularies.

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        **_SIZES, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **_SIZES,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 500.0, **_LLAMA3},
    ),
    "linear": lambda: transformers.LlamaConfig(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **_SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "qwen2.5": lambda: transformers.Qwen2Config(
        **_SIZES,
        num_attention_heads=6,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **_SIZES,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "glm": lambda: transformers.GlmConfig(
        **_SIZES, **_GLM, num_attention_heads=6, num_key_value_heads=2, head_dim=16
    ),
    "glm4": lambda: transformers.Glm4Config(
        **_SIZES,
        **_GLM,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        attention_bias=False,
        partial_rotary_factor=0.67,
        rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
    ),
}


def save_chatglm(model, directory, **changes):
    """Write transformers' Glm in the format of the "chatglm" repositories.

    Names and layout follow their modeling_chatglm.py.
    """
    c, stored = model.config, {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in (
            ("model.embed_tokens", "transformer.embedding.word_embeddings"),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("model.layers", "transformer.encoder.layers"),
            ("lm_head", "transformer.output_layer"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ):
            name = name.replace(ours, theirs)
        stored[name] = tensor.numpy()
    for query in [name for name in stored if "self_attn.q_proj" in name]:
        fused = query.replace("self_attn.q_proj", "self_attention.query_key_value")
        heads = [query.replace("q_proj", f"{x}_proj") for x in "qkv"]
        stored[fused] = np.concatenate([stored.pop(name) for name in heads])
    half = c.head_dim // 4
    stored["transformer.rotary_pos_emb.inv_freq"] = np.zeros(half, np.float32)
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "ffn_hidden_size": c.intermediate_size,
        "hidden_size": c.hidden_size,
        "kv_channels": c.head_dim,
        "layernorm_epsilon": c.rms_norm_eps,
        "multi_query_attention": True,
        "multi_query_group_num": c.num_key_value_heads,
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_layers": c.num_hidden_layers,
        "original_rope": True,
        "padded_vocab_size": c.vocab_size,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": c.rope_parameters["rope_theta"] / 10_000,
        "seq_length": c.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(stored, directory / "model.safetensors")


def random_reference(family, seed=0):
    """Return a transformers model in which every parameter matters, even the biases."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.eos_token_id = config.bos_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            scale = 0.3 if name.endswith(("norm.weight", "bias")) else 0.15
            parameter.copy_(noise * scale + ("norm" in name))
    return model


def random_params(spec):
    """Return parameters, drawn by NumPy, in which biases and norms matter too."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.normal(0, 0.2, leaf.shape).astype(np.float32)
        return jnp.asarray(noise + (path[-1].key == "scale"))

    return jax.tree_util.tree_map_with_path(draw, param_shapes(spec))


def load(directory, **settings):
    """Load (model, parameters) of a directory, on one device, in float32."""
    spec = read_spec(directory)
    return Decoder(spec, **settings), huggingface.load_params(directory, spec)


@functools.partial(jax.jit, static_argnums=0)
def full_logits(model, params, tokens):
    """Return [B, T, V] logits of [B, T] ids that start at position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, _ = model.apply({"params": params}, tokens, positions)
    return model.apply({"params": params}, hidden, method="logits")


@functools.partial(jax.jit, static_argnums=(0, 3))
def greedy(model, params, prompt, num_tokens):
    """Return the greedy continuation [num_tokens] of [n] ids, one cached step each."""

    def step(carry, position):
        tokens, cache = carry
        positions = position[None, None] + jnp.arange(tokens.shape[1])[None]
        hidden, cache = model.apply({"params": params}, tokens, positions, cache)
        logits = model.apply({"params": params}, hidden[:, -1], method="logits")
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return (token[:, None], cache), token[0]

    cache = empty_cache(model.spec, 1, len(prompt) + num_tokens, model.dtype)
    carry, first = step((prompt[None], cache), jnp.int32(0))
    steps = len(prompt) + jnp.arange(num_tokens - 1)
    _, rest = jax.lax.scan(step, carry, steps)
    return jnp.concatenate([first[None], rest])


def reference_greedy(model, prompt, num_tokens):
    """Return the greedy continuation that transformers generates."""
    ids = torch.tensor([list(map(int, prompt))])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, ids.shape[1] :].tolist()


def real_passages(shared_data, number):
    """Return the contents of passages spread over the HotpotQA corpus."""
    with gzip.open(shared_data / "hotpotqa" / "corpus.jsonl.gz", "rt") as file:
        lines = file.readlines()
    return [
        json.loads(line)["contents"] for line in lines[:: len(lines) // number][:number]
    ]

"""Networks that are measured: their weights, and the least work that they make."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp

from rsearch.bench.comparison import alone
from rsearch.bench.workload import multiply_in_full
from rsearch.models.decoder import Decoder, init_params, param_shapes
from rsearch.models.hf.checkpoint import export, load_params
from rsearch.models.hf.families import read_spec
from rsearch.models.sharding import make_mesh, param_shardings
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.spec import DecoderSpec

BYTES = {"float32": 4, "bfloat16": 2}

SMOLLM2 = DecoderSpec(  # HuggingFaceTB/SmolLM2-135M
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    rope_theta=100000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_context=8192,
)
SHAPES = {
    "smollm2": SMOLLM2,
    "quickstart": dataclasses.replace(  # configs/quickstart.py
        SMOLLM2,
        vocab_size=4096,
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_width=256,
    ),
    "tiny": dataclasses.replace(
        SMOLLM2,
        vocab_size=512,
        width=48,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        mlp_width=96,
    ),
}


def wide(vocab_size: int) -> DecoderSpec:
    """A network that is little more than its vocabulary."""
    shape = dict(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32)
    return dataclasses.replace(
        SMOLLM2, vocab_size=vocab_size, width=64, mlp_width=128, **shape
    )


TEXT = ["Who directed the film that was shot in the city where the river ends?"]


@contextlib.contextmanager
def model_directory(model: str, spec: DecoderSpec):
    """A directory with weights and tokenizer, for the length of a `with` block.

    Args:
        model: an existing directory, or "" for random weights of the shape.
        spec: the shape.
    """
    if model:
        yield str(pathlib.Path(model).resolve())
        return
    with tempfile.TemporaryDirectory(prefix="rsearch-bench-") as folder:
        path = pathlib.Path(folder) / "model"
        alone(write_random, path, spec)
        yield str(path)


def write_random(path, spec: DecoderSpec) -> None:
    """Random weights and a tokenizer; for a process of its own, which uses the CPU."""
    jax.config.update("jax_platforms", "cpu")
    params = jax.jit(functools.partial(init_params, Decoder(spec)))(jax.random.key(0))
    export(path, params, spec, tokenizer=train_tokenizer(TEXT * 2))


def load(model: str, dtype: str):
    """(network, placed parameters, mesh) of a Hugging Face directory."""
    multiply_in_full(dtype)
    spec, mesh = read_spec(model), make_mesh(devices=jax.devices()[:1])
    shardings = param_shardings(param_shapes(spec), mesh)
    params = load_params(model, spec, shardings=shardings)
    return Decoder(spec, dtype=jnp.dtype(dtype)), params, mesh


def check_choices(cases, known, shape, dtype) -> list[str]:
    """The cases that are asked for.

    Raises:
        ValueError: a case, a shape or a dtype that there is not.
    """
    asked = [name.strip() for name in cases.split(",")]
    if not set(asked) <= set(known):
        raise ValueError(f"--cases={cases}: must be of {', '.join(known)}")
    if shape not in SHAPES:
        raise ValueError(f"--shape={shape}: must be one of {', '.join(SHAPES)}")
    if dtype not in BYTES:
        raise ValueError(f"--dtype={dtype}: must be one of {', '.join(BYTES)}")
    return asked


def turns_work(
    spec: DecoderSpec,
    told,
    *,
    batch,
    num_prompt,
    num_new,
    num_turns,
    num_observed,
    dtype,
    **_,
) -> list[tuple[float, float]]:
    """(operations, bytes moved) of reading and of writing conversations, at least.

    Each token is read once, and what a row writes lies behind half of the conversation.

    Args:
        told: of a repetition: tokens read, and tokens written.
        num_prompt, num_new, num_turns, num_observed, dtype: of the conversations.
    """
    behind = (num_prompt + num_turns * num_new + (num_turns - 1) * num_observed) / 2
    steps = told["written"] / batch
    own = {"batch": batch, "num_prompt": behind - steps / 2, "num_new": steps}
    return [
        read_work(spec, told["tokens read"], dtype),
        decode_work(spec, **own, dtype=dtype),
    ]


def decode_work(
    spec: DecoderSpec, *, batch, num_prompt, num_new, dtype, **_
) -> tuple[float, float]:
    """(operations, bytes moved) of N steps of decoding behind P tokens, at least.

    Each step multiplies by every parameter, and reads them once, but for an input table
    apart; it reads the keys and values of all tokens before it.
    """
    size, num_params = BYTES[dtype], num_multiplied(spec)
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    behind = num_new * (num_prompt + num_new / 2)  # tokens looked at, of a row
    heads = 4 * spec.num_layers * spec.num_heads * spec.head_dim
    flops = 2 * batch * num_new * num_params + batch * heads * behind
    return flops, size * (num_new * num_params + batch * kv * behind)


def read_work(spec: DecoderSpec, num_tokens, dtype) -> tuple[float, float]:
    """(operations, bytes moved) of reading tokens, their attention left out, at least.

    Only the last token of a row needs logits.
    """
    inner = num_multiplied(spec) - spec.vocab_size * spec.width
    return 2.0 * num_tokens * inner, float(BYTES[dtype] * inner)


def num_multiplied(spec: DecoderSpec) -> int:
    """Parameters that a token is multiplied by, and that are read for that.

    Where input and output embeddings are apart, of the input's a token takes a row.
    """
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.width
    return spec.num_params - table


def step_work(
    spec: DecoderSpec, *, num_questions, group_size, num_prompt, num_new
) -> list[tuple[float, float]]:
    """(operations, bytes moved) of a GRPO step's phases in float32, at least.

    Prompts are read once a group; the reference scores and the policy learns from every
    token of all rollouts.
    """
    num_rows, num_tokens = num_questions * group_size, num_prompt + num_new
    own = {"batch": num_rows, "num_prompt": num_prompt, "num_new": num_new}
    flops, moved = update_work(spec, num_rows, num_tokens)
    return [
        read_work(spec, num_questions * num_prompt, "float32"),
        decode_work(spec, **own, dtype="float32"),
        (flops / 3, 4.0 * num_multiplied(spec)),  # scores: an update's forward pass
        (flops, moved),
    ]


def update_work(spec: DecoderSpec, num_rows, num_tokens) -> tuple[float, float]:
    """(operations, bytes moved) of an update in float32 moments, at least.

    Forward and twice as much backward; attention to the half of each row that lies
    before a token. Parameters are read for both passes, gradients written, and AdamW
    reads and writes parameters and both moments. Of an input table apart, few rows are
    read and have gradients, but AdamW changes all.
    """
    num_params = num_multiplied(spec)
    tokens = num_rows * num_tokens
    heads = 4 * spec.num_layers * spec.num_heads * spec.head_dim
    flops = 3 * (2 * tokens * num_params + tokens * heads * num_tokens / 2)
    return flops, 4.0 * (num_params * (2 + 1) + spec.num_params * (1 + 6))

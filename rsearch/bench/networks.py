"""The networks to measure: their shapes, their weights and the least work they need.

Least work is given as (operations of matrix products, bytes moved from and to memory).
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from rsearch.bench.comparison import run_in_process
from rsearch.bench.workload import multiply_in_full
from rsearch.models.decoder import Decoder, init_params, param_shapes
from rsearch.models.hf.checkpoint import export, load_params
from rsearch.models.hf.families import PUBLISHED, read_spec
from rsearch.models.sharding import make_mesh, param_shardings
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.spec import DecoderSpec

BYTES = {"float32": 4, "bfloat16": 2}
TEXT = ["Who directed the film that was shot in the city where the river ends?"]

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
    "qwen2.5-1.5b": PUBLISHED["Qwen/Qwen2.5-1.5B"],
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


def vocabulary_spec(vocab_size: int) -> DecoderSpec:
    """Return the shape of a network that is little more than its vocabulary."""
    return dataclasses.replace(
        SMOLLM2,
        vocab_size=vocab_size,
        width=64,
        mlp_width=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
    )


@contextlib.contextmanager
def model_directory(model: str, spec: DecoderSpec) -> Iterator[str]:
    """Yield a directory with weights and tokenizer, and remove it if it is temporary.

    Args:
        model: an existing directory, or "" for random weights.
        spec: shape of random weights.
    """
    if model:
        yield str(pathlib.Path(model).resolve())
        return
    with tempfile.TemporaryDirectory(prefix="rsearch-bench-") as folder:
        path = pathlib.Path(folder) / "model"
        run_in_process(write_random, path, spec)
        yield str(path)


def write_random(path: pathlib.Path, spec: DecoderSpec) -> None:
    """Write random weights and a tokenizer, and make this process's JAX use the CPU."""
    jax.config.update("jax_platforms", "cpu")
    params = jax.jit(functools.partial(init_params, Decoder(spec)))(jax.random.key(0))
    export(path, params, spec, tokenizer=train_tokenizer(TEXT * 2))


def load_network(model: str, dtype: str) -> tuple[Decoder, dict, jax.sharding.Mesh]:
    """Return (network, parameters placed on one device, mesh) of a directory."""
    multiply_in_full(dtype)
    spec = read_spec(model)
    mesh = make_mesh(devices=jax.devices()[:1])
    shardings = param_shardings(param_shapes(spec), mesh)
    params = load_params(model, spec, shardings=shardings)
    return Decoder(spec, dtype=jnp.dtype(dtype)), params, mesh


def parse_cases(
    cases: str, known: Sequence[str], *, dtype: str, model: str = "", **shapes: str
) -> list[str]:
    """Return the cases that a flag names, and check model, dtype and shapes.

    Args:
        model: directory of a model; "" for random weights.
        shapes: {flag: name of a shape}.

    Raises:
        ValueError: an unknown case, shape or dtype, or a directory without a model.
    """
    case_names = [name.strip() for name in cases.split(",")]
    if not set(case_names) <= set(known):
        raise ValueError(f"--cases={cases}: must be of {', '.join(known)}")
    for flag, shape in shapes.items():
        if shape not in SHAPES:
            raise ValueError(f"--{flag}={shape}: must be one of {', '.join(SHAPES)}")
    if dtype not in BYTES:
        raise ValueError(f"--dtype={dtype}: must be one of {', '.join(BYTES)}")
    if model:
        read_spec(model)
    return case_names


def parse_numbers(flag: str, text: str) -> list[int]:
    """Return a flag's comma-separated numbers, each at least 1.

    Raises:
        ValueError: one of them is not such a number.
    """
    numbers = [int(n) if n.strip().isdecimal() else 0 for n in text.split(",")]
    if not all(numbers):
        raise ValueError(f"--{flag}={text}: expected numbers of at least 1, e.g. 8,32")
    return numbers


def turns_work(
    spec: DecoderSpec,
    numbers: Mapping[str, float],
    *,
    batch: int,
    num_prompt: int,
    num_new: int,
    num_turns: int,
    num_observed: int,
    dtype: str,
    **_,
) -> list[tuple[float, float]]:
    """Return the least work of reading, and of writing, conversations.

    Each token is read once. A written token attends, on average, to the prompt and half
    of the rest of the conversation.

    Args:
        numbers: numbers of a repetition: tokens read, and tokens written.
        batch, num_prompt, num_new, num_turns, num_observed, dtype: see
            `rsearch.bench.rollout.make_turns`.
    """
    rest = num_turns * num_new + (num_turns - 1) * num_observed
    mean_context = num_prompt + rest / 2
    steps = numbers["written"] / batch
    return [
        read_work(spec, numbers["tokens read"], dtype),
        decode_work(
            spec,
            batch=batch,
            num_prompt=mean_context - steps / 2,
            num_new=steps,
            dtype=dtype,
        ),
    ]


def decode_work(
    spec: DecoderSpec, *, batch: int, num_prompt: float, num_new: float, dtype: str, **_
) -> tuple[float, float]:
    """Return the least work of N decode steps after P tokens.

    Each step reads every parameter once and multiplies by it, except for an untied
    input table. It also reads the keys and values of all earlier tokens.
    """
    num_params = num_multiplied(spec)
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    attended_tokens = num_new * (num_prompt + num_new / 2)  # in one row
    heads = 4 * spec.num_layers * spec.num_heads * spec.head_dim
    flops = 2 * batch * num_new * num_params + batch * heads * attended_tokens
    return flops, BYTES[dtype] * (num_new * num_params + batch * kv * attended_tokens)


def read_work(spec: DecoderSpec, num_tokens: int, dtype: str) -> tuple[float, float]:
    """Return the least work of reading tokens, without their attention.

    Only the last token of a row needs logits, so these are not counted.
    """
    inner = num_multiplied(spec) - spec.vocab_size * spec.width
    return 2.0 * num_tokens * inner, float(BYTES[dtype] * inner)


def num_multiplied(spec: DecoderSpec) -> int:
    """Return the number of parameters that are read and multiplied by for a token.

    An input table that is not tied to the output is not among them: a token only looks
    up one row of it.
    """
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.width
    return spec.num_params - table


def step_work(
    spec: DecoderSpec,
    *,
    num_questions: int,
    group_size: int,
    num_prompt: int,
    num_new: int,
) -> list[tuple[float, float]]:
    """Return the least work of each phase of a GRPO step in float32.

    Prompts are read once per group. The reference model scores the new tokens of all
    rollouts, and the policy is trained on them.
    """
    num_rows = num_questions * group_size
    flops, num_bytes = update_work(spec, num_rows, num_prompt + num_new, num_new)
    return [
        read_work(spec, num_questions * num_prompt, "float32"),
        decode_work(
            spec,
            batch=num_rows,
            num_prompt=num_prompt,
            num_new=num_new,
            dtype="float32",
        ),
        (flops / 3, 4.0 * num_multiplied(spec)),  # scores: an update's forward pass
        (flops, num_bytes),
    ]


def update_work(
    spec: DecoderSpec, num_rows: int, num_tokens: int, num_learnt: int
) -> tuple[float, float]:
    """Return the least work of an update with float32 moments.

    Only the `num_learnt` tokens of each row that are trained on need logits. The
    backward pass costs twice the forward pass; a token attends to half of its row on
    average. Parameters are read for both passes, gradients are written, and AdamW reads
    and writes parameters and both moments. Only a few rows of an untied input table are
    read and have gradients, but AdamW changes all of them.
    """
    num_params = num_multiplied(spec)
    tokens = num_rows * num_tokens
    heads = 4 * spec.num_layers * spec.num_heads * spec.head_dim
    table = spec.vocab_size * spec.width
    unscored = num_rows * (num_tokens - num_learnt) * table
    products = 2 * (tokens * num_params - unscored)
    flops = 3 * (products + tokens * heads * num_tokens / 2)
    return flops, 4.0 * (num_params * (2 + 1) + spec.num_params * (1 + 6))

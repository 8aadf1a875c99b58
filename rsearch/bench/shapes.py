"""The networks that are measured, as Hugging Face directories all subjects read."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile

import jax

from rsearch.bench.children import alone
from rsearch.models.decoder import Decoder, init_params
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.small_tokenizer import train_tokenizer
from rsearch.models.spec import DecoderSpec

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
    huggingface.export(path, params, spec, tokenizer=train_tokenizer(TEXT * 2))

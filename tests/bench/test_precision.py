"""The precision of JAX's float32 products, which torch computes in full float32."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from rsearch.bench import networks, peers, retrieval, train
from tests.models.tiny_bert import write_tiny_bert

TINY = networks.SHAPES["tiny"]
STEP = {"num_questions": 1, "group_size": 1, "num_prompt": 2, "num_new": 2}


@pytest.fixture(params=["gpu", "tpu", "cpu"])
def platform(request, monkeypatch):
    """Fake the platform on which JAX runs."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    yield request.param
    jax.config.update("jax_default_matmul_precision", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a policy, an encoder, and the texts that it searches."""
    folder = tmp_path_factory.mktemp("models")
    networks.write_random(folder / "policy", TINY)
    write_tiny_bert(folder / "bert")
    (folder / "texts.json").write_text('{"texts": ["a"], "passages": [["p", "a"]]}')
    np.save(folder / "vectors.npy", np.eye(1, 24, dtype=np.float32))
    return folder


def load(folder):
    networks.load_network(str(folder / "policy"), "float32")


def search(folder):
    encoder = {"encoder": str(folder / "bert"), "family": "minilm"}
    retrieval.make_engine(folder=folder, **encoder, num_rollouts=1, same_share=0.0)


def step(folder):
    train.make_step(spec=dataclasses.asdict(TINY), **STEP, micro_batch=1)


def step_of_tunix(folder):
    with contextlib.suppress(ModuleNotFoundError):  # tunix may not be installed
        peers.make_step(spec=dataclasses.asdict(TINY), **STEP, micro_batch=1)


@pytest.mark.parametrize("make", [load, search, step, step_of_tunix])
def test_float32_is_multiplied_in_full_precision_on_accelerators(
    make, platform, folder
):
    make(folder)
    expected = None if platform == "cpu" else "highest"
    assert jax.config.jax_default_matmul_precision == expected


def test_the_precision_of_bfloat16_is_left_as_it_is(monkeypatch, folder):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    networks.load_network(str(folder / "policy"), "bfloat16")
    assert jax.config.jax_default_matmul_precision is None

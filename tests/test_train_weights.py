"""Which weights rsearch.train holds, and until when."""

import types
import weakref

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from rsearch import train
from rsearch.hosts.offload import HOST

STEPS = {"sft": {"steps": 1}, "rl": {"steps": 1}}


class Weights:
    """Stands in for parameters."""


@pytest.fixture
def run_stages(tmp_path, monkeypatch):
    """Return a function that runs stages, {name: source of its model}.

    Its other arguments are a function that returns the initial weights and those that
    a stage ends with, and one that is called with the name of each stage that is
    prepared.
    """

    def run(sources, make_weights, on_prepare):
        stages = [
            (name, ConfigDict({**STEPS, "trains": "policy", "model": {"source": x}}))
            for name, x in sources.items()
        ]

        def prepare(stage, *_, **__):
            on_prepare(stage)
            return train.PreparedStage(types.SimpleNamespace(config=ConfigDict()), ())

        monkeypatch.setattr(train, "stage_configs", lambda _: stages)
        monkeypatch.setattr(train, "initial_params", make_weights)
        monkeypatch.setattr(train.sft, "run", make_weights)
        monkeypatch.setattr(train.rl, "run", make_weights)
        settings = {"model": {"source": "world:base"}, "eval": {"at_start": True}}
        base = types.SimpleNamespace(config=ConfigDict(settings))
        train.run_stages(train.Run(base, {}, prepare, set()), None, home)

    home = types.SimpleNamespace(
        path=tmp_path,
        run_id="",
        stage=lambda name: tmp_path / name,
        add_inputs=lambda _: None,
    )
    monkeypatch.setattr(train, "stage_inputs", lambda *_: {})
    monkeypatch.setattr(train, "_evaluate", lambda *_: None)
    monkeypatch.setattr(train, "make_trainer", lambda *_, **__: None)
    monkeypatch.setattr(train, "rl_stage", lambda *_, **__: None)
    monkeypatch.setattr(train, "offload_reference", lambda _, params: params)
    monkeypatch.setattr(train, "DataStage", lambda **_: None)
    monkeypatch.setattr(train.parts, "data_parts", lambda _: {})
    monkeypatch.setattr(train.curate, "run", lambda _: None)
    return run


@pytest.mark.parametrize("second", ["world:other", "world:base"])
def test_weights_that_no_later_stage_needs_are_freed_before_the_next_is_prepared(
    run_stages, second
):
    """Preparing a stage loads its other models, which need the memory."""
    left, alive = [], []

    def make(*_, **__):
        weights = Weights()
        left.append(weakref.ref(weights))
        return weights

    run_stages(
        {"sft": "world:base", "rl": second},
        make,
        lambda _: alive.append([one() is not None for one in left]),
    )
    is_same = second == "world:base"
    assert alive == [[True], [False, is_same]]


def test_weights_wait_in_host_memory_while_a_teacher_writes_data(run_stages):
    size, kinds = 7919, {}

    def live_kinds(stage):
        arrays = [x for x in jax.live_arrays() if x.shape == (size,)]
        kinds[stage] = [x.sharding.memory_kind == HOST for x in arrays]

    run_stages(
        {"curate": "teacher", "rl": "world:base"},
        lambda *_, **__: {"weights": jnp.arange(size)},
        live_kinds,
    )
    assert kinds == {"curate": [True], "rl": [False]}

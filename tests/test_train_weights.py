"""Which weights rsearch.train holds, and until when."""

import types
import weakref

import pytest
from ml_collections import ConfigDict

from rsearch import train

STEPS = {"sft": {"steps": 1}, "rl": {"steps": 1}}


class Weights:
    """Stands in for parameters."""


@pytest.mark.parametrize("second", ["world:other", "world:base"])
def test_weights_that_no_later_stage_needs_are_freed_before_the_next_is_prepared(
    tmp_path, monkeypatch, second
):
    """Preparing a stage loads its other models, which need the memory."""
    left, alive = [], []
    sources = {"sft": "world:base", "rl": second}
    stages = [
        (name, ConfigDict({"trains": "policy", "model": {"source": source}} | STEPS))
        for name, source in sources.items()
    ]

    def made(*_, **__):
        actual = Weights()
        left.append(weakref.ref(actual))
        return actual

    def prepared(stage, *_, **__):
        alive.append([one() is not None for one in left])
        return train.PreparedStage(types.SimpleNamespace(config=ConfigDict()), ())

    monkeypatch.setattr(train, "stage_configs", lambda _: stages)
    monkeypatch.setattr(train, "stage_inputs", lambda *_: {})
    monkeypatch.setattr(train, "_evaluate", lambda *_: None)
    monkeypatch.setattr(train, "make_trainer", lambda *_, **__: None)
    monkeypatch.setattr(train, "rl_stage", lambda *_, **__: None)
    monkeypatch.setattr(train, "initial_params", made)
    monkeypatch.setattr(train, "offload_reference", lambda _, params: params)
    monkeypatch.setattr(train.sft, "run", made)
    monkeypatch.setattr(train.rl, "run", made)
    config = ConfigDict({"model": {"source": "world:base"}, "eval": {"at_start": True}})
    home = types.SimpleNamespace(
        path=tmp_path,
        run_id="",
        stage=lambda name: tmp_path / name,
        add_inputs=lambda _: None,
    )
    base = types.SimpleNamespace(config=config)
    train.run_stages(train.Run(base, {}, prepared, set()), None, home)
    is_same = second == "world:base"
    assert alive == [[True], [False, is_same]]

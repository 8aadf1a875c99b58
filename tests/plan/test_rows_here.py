"""The number of concurrent rollouts that a run chooses for its machine."""

import dataclasses
import types

import numpy as np
import pytest

from rsearch.config.recipes import apply_overrides
from rsearch.config.stage_plan import rollouts_of_step
from rsearch.plan import dry_run
from rsearch.rollout.pages import num_pages
from rsearch.setup import load
from rsearch.setup.rollouts import make_host, make_rollouts
from tests.small_run import config


@pytest.mark.parametrize("limit, half", [("max\n", 50), ("64\n", 32), ("4096\n", 50)])
def test_a_run_counts_the_memory_that_it_may_use(tmp_path, monkeypatch, limit, half):
    sizes = {"SC_PHYS_PAGES": 25, "SC_PAGE_SIZE": 4}
    monkeypatch.setattr(dry_run.os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(dry_run.jax, "local_device_count", lambda: 2)
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(dry_run, "MEMORY_LIMIT", tmp_path / "memory.max")
    cpu = types.SimpleNamespace(platform="cpu")
    assert dry_run.device_memory(cpu) == half / 2
    gpu = types.SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"bytes_limit": 100}
    )
    assert dry_run.device_memory(gpu) == 85
    silent = types.SimpleNamespace(
        platform="gpu", device_kind="A GPU", memory_stats=lambda: None
    )
    with pytest.raises(ValueError, match="A GPU does not report how much"):
        dry_run.device_memory(silent)


def test_a_run_chooses_its_number_of_rollouts_and_other_commands_need_one():
    c = config(stages=("rl",), rollout__max_concurrent=0)
    setup = load.load_setup(c, choose_rows=dry_run.with_rows_here)
    rows = setup.config.rollout.max_concurrent
    assert rows == rollouts_of_step(c, 1) and c.rollout.max_concurrent == 0
    sizes = {"temperature": 1.0, "top_p": 1.0, "group_size": 1}
    host = make_host(setup)
    assert make_rollouts(setup, host, **sizes).num_rows == rows
    unchosen = dataclasses.replace(setup, config=c)
    with pytest.raises(ValueError, match=r"max_concurrent = 0: only rsearch\.train"):
        make_rollouts(unchosen, host, **sizes)


def test_the_pages_hold_the_longest_rollout_whatever_the_memory_is(monkeypatch):
    c = config(stages=("rl",), rollout__max_concurrent=0, rollout__page_tokens=16)
    c = apply_overrides(c, {"rl.questions_per_step": 40, "mesh.data": 8})
    setup = load.load_setup(c, choose_rows=dry_run.with_rows_here)
    host, chosen = make_host(setup), set()
    for memory in np.geomspace(1e5, 1e8, 60):
        monkeypatch.setattr(dry_run, "device_memory", lambda _, m=memory: m)
        try:
            fitted = dry_run.with_rows_here(c, setup.model.spec, setup.mesh)
        except ValueError:
            continue
        rows = fitted.rollout.max_concurrent, fitted.rollout.cache_tokens
        if rows in chosen:
            continue
        chosen.add(rows)
        engine = make_rollouts(
            dataclasses.replace(setup, config=fitted),
            host,
            temperature=1.0,
            top_p=1.0,
            group_size=1,
        )
        assert bool(num_pages(engine.sampler, *rows)) == bool(rows[1])
    assert {bool(tokens) for _, tokens in chosen} == {True, False}
    assert max(chosen)[0] == rollouts_of_step(c, 1)

"""How many rollouts a run chooses for the machine that it runs on."""

import dataclasses
import types

import pytest

from rsearch.config.stage_plan import rollouts_of_step
from rsearch.plan import dry_run
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


def test_a_run_chooses_its_rollouts_and_other_commands_want_a_number():
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

"""Hosts that beat while they work: none is given up for what takes it long."""

import time

import jax
import jax.numpy as jnp
import pytest

from rsearch import peers
from rsearch.peers import ALIVE, Peers


class Store:
    """The key-value store of two hosts, in one process; remembers when it was told."""

    def __init__(self):
        self.values, self.beats = {}, []

    def key_value_set(self, name, value, allow_overwrite=False):
        self.values[name] = value
        if name == f"{ALIVE}0":
            self.beats.append(time.monotonic())

    def key_value_dir_get(self, prefix):
        return [(n, v) for n, v in list(self.values.items()) if n.startswith(prefix)]


def compiled():
    """(when it began, seconds) of the compilation of a long program."""

    def program(x):
        for i in range(30):
            x = jnp.sin(x) @ x + i
        return x

    traced = jax.jit(program).lower(jnp.ones((8, 8)))
    began = time.monotonic()
    traced.compile()
    return began, time.monotonic() - began


@pytest.mark.fault(46, "goes on beating")
def test_a_host_goes_on_beating_while_it_compiles(monkeypatch):
    """So that no wait has to be longer than a compilation, however long that takes."""
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
    store = Store()
    with Peers(store, 0, 0.0).watched():
        began, took = compiled()
    during = [t for t in store.beats if began <= t <= began + took]
    gaps = [b - a for a, b in zip([began, *during], [*during, began + took])]
    assert len(during) > 5 and max(gaps) < took / 2

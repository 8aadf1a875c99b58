"""Hosts that beat while they work, and take leave of each other."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from rsearch.hosts import peers
from rsearch.hosts.peers import ALIVE, Peers


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
        for i in range(500):
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
    with Peers(store, 0, 0.0).heartbeat():
        began, took = compiled()
    during = [t for t in store.beats if began <= t <= began + took]
    gaps = [b - a for a, b in zip([began, *during], [*during, began + took])]
    assert len(during) > 5 and max(gaps) < took / 2


def test_the_first_host_ends_when_the_others_have_said_that_they_do(monkeypatch):
    monkeypatch.setattr(peers, "LEAVING_SECONDS", 60.0)
    store, ended = Store(), threading.Event()

    def first():
        Peers(store, 0, 0.0).wait_for_exits(2)
        ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    Peers(store, 1, 0.0).report_exit()
    assert not ended.wait(0.5)
    Peers(store, 2, 0.0).report_exit()
    assert ended.wait(30)
    thread.join()


def test_the_first_host_does_not_wait_for_ever_for_one_that_is_gone(monkeypatch):
    monkeypatch.setattr(peers, "LEAVING_SECONDS", 0.2)
    began = time.monotonic()
    Peers(Store(), 0, 0.0).wait_for_exits(1)
    assert 0.2 < time.monotonic() - began < 30

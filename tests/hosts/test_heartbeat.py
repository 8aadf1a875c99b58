"""Hosts send heartbeats while they work, and report their exit to each other."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from rsearch.hosts import peers
from rsearch.hosts.peers import ALIVE, Peers


class Store:
    """The key-value store of two hosts, in one process; records when host 0 beats."""

    def __init__(self):
        self.values, self.beats = {}, []

    def key_value_set(self, name, value, allow_overwrite=False):
        self.values[name] = value
        if name == f"{ALIVE}0":
            self.beats.append(time.monotonic())

    def key_value_dir_get(self, prefix):
        return [(n, v) for n, v in list(self.values.items()) if n.startswith(prefix)]


def compiled():
    """Compile a long program; return (start time, duration in seconds)."""

    def program(x):
        for i in range(500):
            x = jnp.sin(x) @ x + i
        return x

    traced = jax.jit(program).lower(jnp.ones((8, 8)))
    began = time.monotonic()
    traced.compile()
    return began, time.monotonic() - began


@pytest.mark.fault(46, "goes on beating")
def test_a_host_sends_heartbeats_while_it_compiles(monkeypatch):
    """So no timeout has to exceed the time of a compilation, however long that is."""
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.02)
    store = Store()
    with Peers(store, 0, 0.0).heartbeat():
        began, took = compiled()
    during = [t for t in store.beats if began <= t <= began + took]
    gaps = [b - a for a, b in zip([began, *during], [*during, began + took])]
    assert len(during) > 5 and max(gaps) < took / 2


def test_the_first_host_exits_once_the_others_have_reported_their_exit(monkeypatch):
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


def test_the_first_host_stops_waiting_for_a_host_that_is_gone(monkeypatch):
    monkeypatch.setattr(peers, "LEAVING_SECONDS", 0.2)
    began = time.monotonic()
    Peers(Store(), 0, 0.0).wait_for_exits(1)
    assert 0.2 < time.monotonic() - began < 30

"""Programs whose compilation takes long are named, and the time is counted once."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.runtime import compiles


def test_only_a_slow_compilation_is_named(monkeypatch, capsys):
    @jax.jit
    def slow(x):
        for _ in range(100):
            x = jnp.sin(x) @ x
        return x

    monkeypatch.setattr(compiles, "NOTE_AFTER", 0.001)
    slow(jnp.ones((8, 8)))
    lines = capsys.readouterr().err.splitlines()
    first, last = (line for line in lines if "slow" in line)
    assert first.endswith(" compiling jit(slow)")
    assert " compiled jit(slow) in " in last
    monkeypatch.setattr(compiles, "NOTE_AFTER", 1.0)
    jax.jit(lambda x: x + 1)(jnp.ones(3))
    time.sleep(1.2)
    assert "compil" not in capsys.readouterr().err


class Timer:
    """The seconds of a block, and those of compiling during it."""

    def __enter__(self):
        self._starts = time.monotonic(), compiles.compile_seconds()
        return self

    def __exit__(self, *_):
        compiling = compiles.compile_seconds() - self._starts[1]
        self.seconds, self.compiling = time.monotonic() - self._starts[0], compiling


@pytest.mark.parametrize("ahead_of_time", [False, True])
def test_tracing_counts_as_compiling(ahead_of_time):
    @jax.jit
    def slow(x):
        for _ in range(3):
            time.sleep(0.1)
        return x + 1

    x = np.ones(3)
    with Timer() as first:
        if ahead_of_time:
            slow.lower(x).compile()
        else:
            slow(x)
    assert 0.3 < first.compiling <= first.seconds


def test_a_program_that_is_made_while_another_is_traced_counts_once():
    @jax.jit
    def inner(x):
        time.sleep(0.3)
        return x + 1

    @jax.jit
    def outer(x):
        time.sleep(0.3)
        with jax.ensure_compile_time_eval():  # traced, lowered, compiled and run
            constant = inner(np.ones(3))
        return inner(x) + constant

    with Timer() as first:
        outer(np.ones(3))
    assert 0.6 < first.compiling <= first.seconds
    with Timer() as second:
        outer(np.ones(3))
        time.sleep(0.1)
    assert second.compiling < 0.1 <= second.seconds


def test_seconds_in_which_several_threads_compile_count_once():
    barrier, may_end = threading.Barrier(3), threading.Event()

    @jax.jit
    def slow(x):
        barrier.wait()
        may_end.wait()
        return x + 1

    shapes = [np.ones(2), np.ones(3)]
    threads = [threading.Thread(target=slow, args=(x,)) for x in shapes]
    with Timer() as both:
        for thread in threads:
            thread.start()
        barrier.wait()
        with Timer() as unfinished:
            time.sleep(0.3)
        may_end.set()
        for thread in threads:
            thread.join()
    assert 0.3 <= unfinished.compiling <= unfinished.seconds
    assert 0.3 < both.compiling <= both.seconds


def test_a_function_that_cannot_be_traced_ends_the_count():
    @jax.jit
    def wrong(x):
        time.sleep(0.2)
        raise ValueError(x.shape)

    with Timer() as failed, pytest.raises(ValueError, match="3"):
        wrong(np.ones(3))
    assert failed.compiling > 0.2
    with Timer() as after:
        time.sleep(0.1)
    assert after.compiling < 0.1

"""Programs whose compilation takes long are named."""

import time

import jax
import jax.numpy as jnp

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

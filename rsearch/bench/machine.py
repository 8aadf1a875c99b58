"""The bounds of this machine: measured, or as published by its maker."""

import dataclasses
import functools
import os
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.plan.machines import CHIPS

SIDE = 2048  # of the square matrices whose product is timed
COPIED = 2**28  # bytes of the array that is read, and of one that is copied
TRIES = 5  # of which the fastest counts, as a bound is what nothing passes

# {JAX's device_kind: name in CHIPS}. JAX's name is the longer one since boards of one
# chip differ, by memory or by SXM.
CHIP_NAMES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
}


@dataclasses.dataclass(frozen=True)
class MachineBounds:
    """Bounds of the devices that are measured on.

    Attributes:
        name: of the device.
        cores: of the processor.
        flops: {dtype: operations a second} of matrix products, on one device, as all
            subjects use one. For an accelerator it has only bfloat16, as published;
            for a device that is in no table it is empty.
        bandwidth: bytes a second from and to memory; None where it is unknown.
        is_measured: True where measured now; False where published.
    """

    name: str
    cores: int
    flops: dict[str, float]
    bandwidth: float | None
    is_measured: bool


def probe() -> MachineBounds:
    """Return the machine's bounds: from a table for accelerators, measured for CPUs."""
    devices = jax.devices()
    kind = devices[0].device_kind
    cores = len(os.sched_getaffinity(0))
    if devices[0].platform == "cpu":
        name = platform.processor() or kind
        flops = {dtype: _measured_flops(dtype) for dtype in ("float32", "bfloat16")}
        return MachineBounds(name, cores, flops, _measured_bandwidth(), True)
    if kind not in CHIP_NAMES:
        return MachineBounds(kind, cores, {}, None, False)
    chip = CHIPS[CHIP_NAMES[kind]]
    flops = {"bfloat16": chip.flops}
    return MachineBounds(kind, cores, flops, chip.bandwidth, False)


def _best(run) -> float:
    """Return the seconds of the fastest of several runs, without the first."""
    run()
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _measured_flops(dtype) -> float:
    """Return FLOP/s of matrix products: of float32 the faster of XLA and NumPy."""
    matrix = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    placed = jnp.asarray(matrix, dtype)
    multiply = jax.jit(functools.partial(jnp.matmul, preferred_element_type="float32"))
    seconds = _best(lambda: multiply(placed, placed).block_until_ready())
    if dtype == "float32":
        seconds = min(seconds, _best(lambda: matrix @ matrix))
    return 2 * SIDE**3 / seconds


def _measured_bandwidth() -> float:
    """Return bytes/s of a product with a vector or of a copy, whichever is faster."""
    matrix = jnp.ones((COPIED // 4 // SIDE, SIDE), jnp.float32)
    vector = jnp.ones(SIDE, jnp.float32)
    read = jax.jit(jnp.matmul)
    copy = jax.jit(lambda x: x + 1)
    return max(
        COPIED / _best(lambda: read(matrix, vector).block_until_ready()),
        2 * COPIED / _best(lambda: copy(matrix).block_until_ready()),
    )

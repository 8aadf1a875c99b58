"""Find this machine's bounds, either measured or as published by its maker."""

import dataclasses
import functools
import os
import platform
import timeit

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.plan.machines import CHIPS

SIDE = 2048  # side of the square matrices whose product is timed
COPIED = 2**28  # bytes of the array that is read, and of the one that is copied
TRIES = 5  # the fastest counts, as nothing may exceed a bound

# {JAX's device_kind: name in CHIPS}. JAX's names are longer, since boards with the same
# chip differ in memory or form factor (SXM).
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
    """Bounds of the device that is measured on.

    Attributes:
        cores: number of processor cores that this process may use.
        flops: {dtype: operations a second} of matrix products on one device, since
            every subject uses one. For an accelerator it has only bfloat16, as
            published; for an unknown device it is empty.
        bandwidth: bytes a second from and to memory; None if unknown.
        is_measured: True if measured by this run; False if published or unknown.
    """

    name: str
    cores: int
    flops: dict[str, float]
    bandwidth: float | None
    is_measured: bool


def probe() -> MachineBounds:
    """Return the machine's bounds, measured for CPUs and looked up for accelerators."""
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


def _fastest_seconds(run) -> float:
    """Return the seconds of the fastest of several runs, after a warm-up run."""
    run()
    return min(timeit.repeat(run, number=1, repeat=TRIES))


def _measured_flops(dtype) -> float:
    """Return FLOP/s of matrix products; for float32, the faster of XLA and NumPy."""
    matrix = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    device_matrix = jnp.asarray(matrix, dtype)
    multiply = jax.jit(functools.partial(jnp.matmul, preferred_element_type="float32"))
    seconds = _fastest_seconds(
        lambda: multiply(device_matrix, device_matrix).block_until_ready()
    )
    if dtype == "float32":
        seconds = min(seconds, _fastest_seconds(lambda: matrix @ matrix))
    return 2 * SIDE**3 / seconds


def _measured_bandwidth() -> float:
    """Return bytes/s of a matrix-vector product or of a copy, whichever is faster."""
    matrix = jnp.ones((COPIED // 4 // SIDE, SIDE), jnp.float32)
    vector = jnp.ones(SIDE, jnp.float32)
    read = jax.jit(jnp.matmul)
    copy = jax.jit(lambda x: x + 1)
    return max(
        COPIED / _fastest_seconds(lambda: read(matrix, vector).block_until_ready()),
        2 * COPIED / _fastest_seconds(lambda: copy(matrix).block_until_ready()),
    )

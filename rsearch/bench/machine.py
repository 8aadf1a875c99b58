"""What this machine can do at best: its bounds, measured or as its maker tells."""

import dataclasses
import os
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from rsearch.plan.machines import CHIPS

SIDE = 2048  # of the square matrices whose product is timed
COPIED = 2**28  # bytes of the array that is read, and of one that is copied
TRIES = 5  # of which the best counts: a bound is what nothing gets past

# What JAX calls them -> their names among CHIPS: boards of one name differ, by 80 GB of
# memory or by SXM.
KINDS = {
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
class Machine:
    """Bounds of the devices that are measured on.

    Attributes:
        name: of the device.
        cores: of the processor.
        flops: a second, matrix products, of one device, as all subjects use one; None
            of an accelerator that the table does not know, like `bandwidth`.
        bandwidth: bytes a second from and to memory.
        is_measured: here and now; otherwise as the maker tells, in bfloat16.
    """

    name: str
    cores: int
    flops: float | None
    bandwidth: float | None
    is_measured: bool

    def is_known(self, dtype: str) -> bool:
        """Whether the bounds are those of computing in this type of numbers."""
        return self.is_measured or (self.flops is not None and dtype == "bfloat16")


def make():
    """A subject (see `rsearch.bench`): the machine, as numbers and names."""
    return lambda: dataclasses.asdict(probe())


def probe() -> Machine:
    """The machine's bounds: of accelerators from a table, of processors measured."""
    devices = jax.devices()
    kind, cores = devices[0].device_kind, len(os.sched_getaffinity(0))
    if devices[0].platform == "cpu":
        name = platform.processor() or kind
        return Machine(name, cores, _measured_flops(), _measured_bandwidth(), True)
    if kind not in KINDS:
        return Machine(kind, cores, None, None, False)
    chip = CHIPS[KINDS[kind]]
    return Machine(kind, cores, chip.flops, chip.bandwidth, False)


def _best(run) -> float:
    """Seconds of the fastest of some runs, the first left out."""
    run()
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _measured_flops() -> float:
    """Of float32 matrix products a second; of XLA's or NumPy's, whichever is faster."""
    one = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    placed, multiply = jnp.asarray(one), jax.jit(jnp.matmul)
    seconds = min(
        _best(lambda: multiply(placed, placed).block_until_ready()),
        _best(lambda: one @ one),
    )
    return 2 * SIDE**3 / seconds


def _measured_bandwidth() -> float:
    """Bytes a second: a matrix read by a vector, or copied, whichever is faster."""
    matrix = jnp.ones((COPIED // 4 // SIDE, SIDE), jnp.float32)
    vector = jnp.ones(SIDE, jnp.float32)
    read = jax.jit(jnp.matmul)
    copy = jax.jit(lambda x: x + 1)
    return max(
        COPIED / _best(lambda: read(matrix, vector).block_until_ready()),
        2 * COPIED / _best(lambda: copy(matrix).block_until_ready()),
    )

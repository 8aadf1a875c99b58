"""Accelerators as their makers describe them, and machines that are not here."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re

import jax

SLICE = re.compile(r"(v4|v5e|v5p|v6e):(\d+x\d+(?:x\d+)?)")
NODE = re.compile(r"(a100|h100|h200)x([1-8])")
TYPE = re.compile(r"(v4|v5e|v5p|v6e)-(\d+)")
# Three-dimensional slices: {kind: most chips}. Their types count cores, two per chip.
MAX_CHIPS_3D = {"v4": 4096, "v5p": 8960}
# Shapes of all slices of v5e and v6e; the first three have one host.
FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Share of a GPU's memory that launch/ lets JAX use. The rest is for CUDA, its kernels
# and NCCL's buffers.
GPU_SHARE = 0.92
HOST_CHIPS = (2, 2, 1)  # chips of a TPU host; a smaller slice is one host
EIGHT_CHIP_HOST = FLAT_SLICES[2]  # a slice of this shape is one host of eight chips
# JAX's plugins that compile for GPUs, from `pip install jax[cuda12]` and jax[cuda13].
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# A v4 chip runs as one device; by default, compiling would see its two cores as two.
CONFIGS = {"v4": {"chip_config_name": "megacore"}}


@dataclasses.dataclass(frozen=True)
class Chip:
    """The properties of one device.

    Attributes:
        memory: bytes of memory; in a Machine, those that programs may use.
        flops: operations a second of matrix products in bfloat16.
        bandwidth: bytes a second from and to its memory.
        link: bytes a second that it sends to other devices over all its links.
    """

    memory: float
    flops: float
    bandwidth: float
    link: float


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, where `link` is half of the
# "bidirectional inter-chip interconnect bandwidth".
CHIPS = {
    "v4": Chip(32e9, 275e12, 1228e9, 300e9),
    "v5e": Chip(16e9, 197e12, 819e9, 200e9),
    "v5p": Chip(95e9, 459e12, 2765e9, 600e9),
    "v6e": Chip(32e9, 918e12, 1638e9, 400e9),
    # GPUs: nvidia.com's data sheets of the SXM boards, NVLink one way; L4: PCIe.
    "a100": Chip(80e9, 312e12, 2039e9, 300e9),
    "h100": Chip(80e9, 989e12, 3350e9, 450e9),
    "h200": Chip(141e9, 989e12, 4800e9, 450e9),
    "l4": Chip(24e9, 121e12, 300e9, 32e9),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that XLA's compiler needs besides those of its Chip.

    Attributes:
        capability: compute capability, (major, minor).
        cores: number of streaming multiprocessors.
        fpus: float32 units of a core.
        core_shared, block_shared: bytes of shared memory of a core, and of a block that
            opts in to more than the default.
        l2: bytes of its L2 cache.
        ghz: highest clock rate.
    """

    capability: tuple[int, int]
    cores: int
    fpus: int
    core_shared: int
    block_shared: int
    l2: int
    ghz: float


_HOPPER = Gpu((9, 0), 132, 128, 228 << 10, 227 << 10, 50 << 20, 1.98)
GPUS = {  # data sheets, and "Compute Capabilities" of the CUDA programming guide
    "a100": Gpu((8, 0), 108, 64, 164 << 10, 163 << 10, 40 << 20, 1.41),
    "h100": _HOPPER,
    "h200": _HOPPER,
}
CUDNN, CUDA = (9, 10), (12, 9)  # versions that programs are compiled for


@dataclasses.dataclass(frozen=True)
class Machine:
    """A TPU slice or a GPU node that is not here.

    Attributes:
        chip: properties of each device.
        devices: devices that JAX compiles for, grouped by host; for a GPU node, or a
            slice named by its type, they may be stand-ins.
        is_compiled_for: whether programs are compiled; for GPUs that needs a plugin.
        hosts: number of hosts that stand-ins represent; 0 takes the devices' own hosts.
    """

    name: str
    chip: Chip
    devices: tuple
    is_compiled_for: bool = True
    hosts: int = 0
    is_gpu: bool = False

    @property
    def num_devices(self) -> int:
        """Return how many devices all hosts have together."""
        return len(self.devices)

    @property
    def num_hosts(self) -> int:
        """Return how many hosts the devices belong to."""
        return self.hosts or len({d.process_index for d in self.devices})

    @property
    def host_devices(self) -> int:
        """Return how many devices each host has."""
        return self.num_devices // self.num_hosts


def find_machine(name: str, *, compiles_for_gpus: bool = True) -> Machine:
    """Return the TPU slice or GPU node of a name, such as "v5e:4x4" or "a100x8".

    For a slice named by its type, such as "v5p-32", and for a GPU node without JAX's
    CUDA plugin, nothing is compiled: CPU devices of this computer stand in for it.

    Args:
        compiles_for_gpus: whether to use the plugin if it is installed.

    Raises:
        ValueError: there is no such machine, or libtpu, which compiles for TPUs, is
            missing.
    """
    if slice_type := TYPE.fullmatch(name):
        return _slice_of_type(name, slice_type[1], int(slice_type[2]))
    if node := NODE.fullmatch(name):
        all_chips = CHIPS[node[1]]
        chip = dataclasses.replace(all_chips, memory=GPU_SHARE * all_chips.memory)
        has_plugin = any(map(importlib.util.find_spec, CUDA_PLUGINS))
        compiles = compiles_for_gpus and has_plugin
        make = _gpu_devices if compiles else _stand_ins
        return Machine(name, chip, make(name, int(node[2])), compiles, is_gpu=True)
    slice_name = SLICE.fullmatch(name)
    if not slice_name:
        raise ValueError(
            f"--topology={name}: must be a TPU slice such as v5e:2x4, v6e:2x2, "
            "v5p:2x2x4 or v4:2x2x2, its type, such as v5p-32, or a GPU node such as "
            "a100x8"
        )
    kind, shape = slice_name[1], tuple(int(n) for n in slice_name[2].split("x"))
    _check_shape(name, kind, shape)
    devices = _tpu_devices(name, kind, shape)
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    return Machine(name, CHIPS[kind], tuple(devices))


def _check_shape(name, kind, shape):
    """Refuse a shape that no slice of its kind has; libtpu accepts many of these."""
    if kind not in MAX_CHIPS_3D:
        is_slice = shape in FLAT_SLICES
        expected = ", ".join("x".join(map(str, sizes)) for sizes in FLAT_SLICES)
    else:
        is_cut = len(shape) == 3 and not any(n % m for n, m in zip(shape, HOST_CHIPS))
        is_slice = shape == (1, 1, 1) or is_cut
        is_slice = is_slice and 0 < math.prod(shape) <= MAX_CHIPS_3D[kind]
        expected = (
            "1x1x1, or of three sizes, the first two even, with at most "
            f"{MAX_CHIPS_3D[kind]} chips"
        )
    if not is_slice:
        raise ValueError(f"--topology={name}: must be of {expected}")


def _slice_of_type(name, kind, number):
    """Return the slice of a type, such as "v5p" and 32, with stand-ins for devices."""
    host_chips = math.prod(HOST_CHIPS)
    if kind in MAX_CHIPS_3D:
        chips, odd_core = divmod(number, 2)
        is_type = chips in (1, 2) or (chips > 0 and chips % host_chips == 0)
        is_type = is_type and not odd_core and chips <= MAX_CHIPS_3D[kind]
        hosts = max(chips // host_chips, 1)
        expected = (
            f"2, 4, {2 * host_chips} cores or a multiple of {2 * host_chips}, at most "
            f"{2 * MAX_CHIPS_3D[kind]}"
        )
    else:
        chips, sizes = number, [*map(math.prod, FLAT_SLICES)]
        is_type = chips in sizes
        hosts = 1 if chips <= math.prod(EIGHT_CHIP_HOST) else chips // host_chips
        expected = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]} chips"
    if not is_type:
        raise ValueError(f"--topology={name}: must be of {expected}")
    return Machine(name, CHIPS[kind], _stand_ins(name, chips), False, hosts)


def _tpu_devices(name, kind, shape):
    """Return the devices of a TPU slice, to compile for."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology={name}: compiling for TPUs needs the libtpu that belongs to "
            f"jax {jax.__version__}: pip install -r launch/tpu.txt"
        )
    # Only a TPU host's environment has these; elsewhere libtpu would query in vain.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Several processes may load it at the same time, since it only compiles.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    bounds = (*EIGHT_CHIP_HOST, 1)
    if shape != EIGHT_CHIP_HOST:
        bounds = tuple(map(min, (*shape, 1), HOST_CHIPS))
    settings = {"topology_name": name, "chips_per_host_bounds": bounds}
    return _described_devices(name, "tpu", **settings, **CONFIGS.get(kind, {}))


def _gpu_devices(name, count):
    """Return the GPUs of a node, to compile for; this computer needs none."""
    # Otherwise JAX's plugin queries the driver, and is skipped if there is none.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    kind = name.partition("x")[0]
    return _described_devices(
        name,
        "cuda",
        target_config=target_config(GPUS[kind], CHIPS[kind]),
        topology=f"1x1x{count}",  # partitions, hosts, GPUs of each
    )


def _described_devices(name, platform, **settings):
    """Return the devices of a machine that JAX's compiler is given a description of."""
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(platform=platform, **settings)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"--topology={name}: {first}") from None
    return tuple(topology.devices)


def target_config(gpu: Gpu, chip: Chip) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto as text."""
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.core_shared,
        "shared_memory_per_block_optin": gpu.block_shared,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus,
        "clock_rate_ghz": gpu.ghz,
        "l2_cache_size": gpu.l2,
        "memory_bandwidth": int(chip.bandwidth),
        "device_memory_size": int(chip.memory),
    }
    fields = " ".join(f"{field}: {value}" for field, value in device.items())
    versions = {
        "cuda_compute_capability": gpu.capability,
        "dnn_version_info": CUDNN,
        "runtime_version": CUDA,
    }
    capability, *libraries = [
        f"{field} {{ major: {major} minor: {minor} }}"
        for field, (major, minor) in versions.items()
    ]
    return (
        f"gpu_device_info {{ {fields} {capability} }} "
        f'platform_name: "CUDA" {" ".join(libraries)}'
    )


def _stand_ins(name, count):
    """Return CPU devices in place of a machine's, for programs that are only traced."""
    with contextlib.suppress(RuntimeError):  # too late if JAX has its devices already
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"--topology={name}: JAX is already running with {len(devices)} devices, "
            f"too few to stand in for {count}"
        )
    return tuple(devices[:count])

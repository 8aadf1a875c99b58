"""TPU slices and GPU nodes: their hosts and devices, and compiling for them."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.attention.flash import flash_within, has_gpu_kernels
from rsearch.plan import machines
from rsearch.plan.machines import CHIPS, GPUS, find_machine, target_config


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [("v5p-8", 4, 1), ("v4-2", 1, 1), ("v5e-4", 4, 1)],
)
def test_the_type_of_a_slice_gives_its_devices_and_hosts(name, devices, hosts):
    machine = find_machine(name)
    assert (machine.num_devices, machine.num_hosts) == (devices, hosts)
    assert not machine.is_compiled_for


@pytest.mark.parametrize(
    "name",
    [
        *("v5p-9", "v5p-12", "v5e-0", "v5p-32x", "v5p-6", "v5e-6", "v5e-12"),
        *("v6e-512", "v4-16384"),  # no pod is that large
    ],
)
def test_a_type_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match=f"--topology={name}: must be"):
        find_machine(name)


def test_a_refused_type_is_told_every_size_that_exists():
    with pytest.raises(ValueError, match="2, 4, 8 cores or a multiple of 8") as caught:
        find_machine("v5p-0")
    assert "17920" in str(caught.value)
    assert [find_machine(f"v5p-{n}").num_devices for n in (2, 4)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:2x2", 4, 1),
        ("v5e:2x4", 8, 1),  # v5litepod-8
        ("v6e:2x4", 8, 1),
        ("v5e:4x4", 16, 4),
        ("v5p:2x2x1", 4, 1),
        ("v5p:2x2x4", 16, 4),
        ("v4:2x2x1", 4, 1),  # a chip's two cores work as one device
        ("v4:2x2x2", 8, 2),
    ],
)
def test_a_slice_has_the_hosts_of_its_kind(name, devices, hosts):
    pytest.importorskip("libtpu")
    machine = find_machine(name)
    assert (machine.num_devices, machine.num_hosts) == (devices, hosts)
    owners = [d.process_index for d in machine.devices]
    assert owners == sorted(owners)


# libtpu accepts all of these shapes, with hosts that do not exist.
@pytest.mark.parametrize(
    "name",
    ["v5e:4x4x4", "v5e:1x4", "v5e:4x2", "v5e:16x32", "v5p:2x4", "v5p:1x2x2", "v4:2x4"],
)
def test_a_shape_that_no_slice_of_its_kind_has_is_refused(name):
    with pytest.raises(ValueError, match=f"--topology={name}: must be of"):
        find_machine(name)


def test_programs_are_compiled_for_a_gpu_node_if_a_plugin_is_installed(monkeypatch):
    named = []

    def devices(name, count):
        named.append((name, count))
        return (object(),) * count

    monkeypatch.setattr(machines, "_gpu_devices", devices)
    monkeypatch.setattr(machines, "CUDA_PLUGINS", ("no_such_plugin", "json"))
    machine = find_machine("a100x4")
    assert machine.is_compiled_for and machine.is_gpu and named == [("a100x4", 4)]
    traced = find_machine("a100x4", compiles_for_gpus=False)
    assert traced.is_gpu and not traced.is_compiled_for
    monkeypatch.setattr(machines, "CUDA_PLUGINS", ("no_such_plugin",))
    assert not find_machine("a100x4").is_compiled_for


@pytest.mark.parametrize("kind", GPUS)
def test_the_description_of_a_gpu_has_its_makers_numbers(kind):
    text = target_config(GPUS[kind], CHIPS[kind])
    assert text.count("{") == text.count("}") and 'platform_name: "CUDA"' in text
    assert f"memory_bandwidth: {CHIPS[kind].bandwidth:.0f} " in text
    blocks = {"a100": 166912, "h100": 232448, "h200": 232448}  # bytes, by CUDA
    assert f"shared_memory_per_block_optin: {blocks[kind]} " in text


# Compiles a program for a GPU that this machine does not have; launch/gpu_plan.sh
# installs what that takes.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a100", "h100"])
def test_flash_attention_compiles_for_a_gpu_with_no_scores_in_memory(kind):
    if not any(map(importlib.util.find_spec, machines.CUDA_PLUGINS)):
        pytest.skip("JAX's CUDA plugin is not installed")
    mesh = Mesh(np.array(find_machine(f"{kind}x1").devices), ("d",))
    tokens, heads, width = 4096, 8, 128
    sharding = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def loss(q, k, v, text):
        assert has_gpu_kernels(mesh.devices.flat[0], q.dtype, width)
        return jnp.sum(flash_within(q, k, v, text).astype(jnp.float32))

    keys = shape(1, 2, tokens, width)
    args = shape(1, tokens, heads, width), keys, keys, shape(1, tokens, dtype=jnp.int32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 8 * heads * tokens * width * 2 < tokens * tokens * heads
    assert compiled.as_text().count("__gpu$xla.gpu.triton") >= 3

"""TPU slices as their makers cut them into hosts."""

import pytest

from rsearch.plan.machines import find_machine


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [("v5p-8", 4, 1), ("v4-2", 1, 1), ("v5e-4", 4, 1)],
)
def test_a_slice_is_reckoned_with_by_its_type(name, devices, hosts):
    machine = find_machine(name)
    assert (machine.num_devices, machine.num_hosts) == (devices, hosts)
    assert not machine.is_compiled_for


@pytest.mark.parametrize("name", ["v5p-9", "v5p-12", "v5e-0", "v5p-32x"])
def test_a_type_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=f"--topology={name}: must be"):
        find_machine(name)


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
        ("v4:2x2x1", 4, 1),  # a chip is one device, whose two cores work as one
        ("v4:2x2x2", 8, 2),
    ],
)
def test_a_slice_has_the_hosts_of_its_kind(name, devices, hosts):
    pytest.importorskip("libtpu")
    machine = find_machine(name)
    assert (machine.num_devices, machine.num_hosts) == (devices, hosts)
    owners = [d.process_index for d in machine.devices]
    assert owners == sorted(owners)

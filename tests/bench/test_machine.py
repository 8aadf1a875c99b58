"""Upper bounds of a machine's speed."""

import jax
import pytest

from rsearch.bench import machine


def test_a_processors_bounds_are_measured(monkeypatch):
    monkeypatch.setattr(machine, "SIDE", 256)
    monkeypatch.setattr(machine, "COPIED", 2**22)
    actual = machine.probe()
    assert actual.is_measured and actual.cores >= 1
    # A core does 1e8 to 1e13 operations per second; memory moves 1e8 to 1e13 bytes.
    assert {*actual.flops} == {"float32", "bfloat16"}
    for flops in actual.flops.values():
        assert 1e8 < flops < 1e13 * actual.cores
    assert 1e8 < actual.bandwidth < 1e13


@pytest.mark.parametrize(
    ("kind", "count", "flops", "bandwidth"),
    [
        ("NVIDIA H200", 1, 989e12, 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 8, 312e12, 2.039e12),
        ("TPU v5 lite", 4, 197e12, 819e9),
        ("TPU v4", 4, 275e12, 1228e9),
    ],
)
def test_an_accelerators_bounds_are_its_makers_numbers_for_one_device(
    kind, count, flops, bandwidth, monkeypatch
):
    class Device:
        platform, device_kind = "accelerator", kind

    monkeypatch.setattr(jax, "devices", lambda: [Device()] * count)
    actual = machine.probe()
    assert actual.flops == {"bfloat16": flops}
    assert (actual.bandwidth, actual.is_measured) == (bandwidth, False)
    for other in ("Abacus", "NVIDIA L40S", "NVIDIA A100-SXM4-40GB"):
        Device.device_kind = other
        actual = machine.probe()
        assert (actual.name, actual.flops, actual.bandwidth) == (other, {}, None)

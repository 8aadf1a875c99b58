"""Offloading to host memory changes nothing about a run."""

import pytest

from rsearch.runtime import checkpoint
from tests.small_run import arguments, quick_compilation, run_python

__all__ = ["quick_compilation"]
BRIEF = dict(
    sft__steps=2,
    rl__steps=1,
    rl__kl_coef=0.1,
    rl__entropy_coef=1.0,
    eval__at_start="false",
    eval__methods="protocol",
)


@pytest.mark.slow  # tests/learn/test_offload.py shows it for one update
def test_a_run_with_offloaded_reference_and_moments_is_bit_identical(tmp_path):
    actual = []
    for offload in ("()", "reference,optimizer"):
        workdir = tmp_path / str(len(actual))
        told = arguments(workdir, model__offload=offload, **BRIEF)
        done = run_python("-m", "rsearch.train", *told)
        assert done.returncode == 0, done.stderr
        stages = (("sft", 2), ("rl", 1))
        actual.append(
            [
                checkpoint.read_manifest(workdir / name / "checkpoints", step)["leaves"]
                for name, step in stages
            ]
        )
    assert actual[0] == actual[1]
    assert any(".mu." in name for name in actual[0][1])

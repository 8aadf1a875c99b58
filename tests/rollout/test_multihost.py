"""What rollouts of several hosts in one program require of the mesh."""

import pytest

from rsearch.hosts import processes
from rsearch.models.sharding import make_mesh
from rsearch.rollout.multihost import MultihostSampler
from tests.rollout import tiny


def test_a_mesh_that_cannot_give_rows_to_every_host_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "num_hosts", lambda: 2)
    mesh = make_mesh(data=1, fsdp=1, tensor=8)
    with pytest.raises(
        ValueError, match=r"fsdp = 1: must be a multiple of the 2 hosts"
    ):
        MultihostSampler(tiny.make_sampler(), mesh)
    assert (
        MultihostSampler(tiny.make_sampler(), make_mesh(data=4, tensor=2)).row_shards(8)
        == 2
    )

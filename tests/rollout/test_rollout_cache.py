"""After a restart, finished rollouts are reused and the others come out the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rsearch.rollout.records import RolloutCache, encode_groups, params_fingerprint
from rsearch.runtime.journal import AppendLog
from tests.rollout.scripted import ANSWERS, SEARCHES, WHO, play
from tests.rollout.test_records import comparable

TURNS = [[ANSWERS], [SEARCHES, ANSWERS], ["nothing", ANSWERS], [SEARCHES] * 3]


class ForgetfulCache(RolloutCache):
    """A cache that forgets the rollouts of samples with even numbers."""

    def get(self, question, sample):
        return super().get(question, sample) if sample % 2 else None


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_finished_rollouts_are_not_generated_again(tmp_path, num_rows):
    def roll_out(kind):
        cache = kind(AppendLog(tmp_path, "rollouts"), ["policy", 3])
        (groups, script) = play(TURNS, num_rows=num_rows, rollout_cache=cache)
        return comparable(groups[0]), script, cache.num_reused

    original, first, num_reused = roll_out(RolloutCache)
    assert num_reused == 0 and len(first.whole) == 4
    half, second, num_reused = roll_out(ForgetfulCache)
    assert half == original and num_reused == 2
    assert {sample for _, sample in second.whole} == {0, 2}
    again, third, num_reused = roll_out(RolloutCache)
    assert again == original and num_reused == 4 and not third.writers


def test_another_policy_or_step_does_not_reuse_rollouts(tmp_path):
    journal = AppendLog(tmp_path, "rollouts")
    play(TURNS, rollout_cache=RolloutCache(journal, ["policy", 3]))
    for made_from in (["policy", 4], ["other", 3]):
        cache = RolloutCache(journal, made_from)
        assert cache.get(WHO, 0) is None
    assert RolloutCache(journal, ["policy", 3]).get(WHO, 0) is not None


def test_records_that_this_version_cannot_read_are_not_reused(tmp_path):
    journal = AppendLog(tmp_path, "rollouts")
    journal.add(["policy", WHO.id, 0], b"\0" * 9)
    journal.add(["policy", WHO.id, 1], encode_groups([]))
    cache = RolloutCache(journal, ["policy"])
    assert cache.get(WHO, 0) is None and cache.get(WHO, 1) is None
    assert cache.num_reused == 0


def params():
    rng = np.random.default_rng(0)
    return {
        "a": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
        "b": [jnp.asarray(rng.normal(size=(4, 8, 2)), jnp.bfloat16), jnp.zeros(())],
    }


def test_any_changed_bit_changes_the_fingerprint():
    original = params_fingerprint(params())
    assert original == params_fingerprint(params()) and len(original) == 8
    fingerprints = {original}
    leaves, tree = jax.tree.flatten(params())
    for number, leaf in enumerate(leaves):
        for index in np.ndindex(leaf.shape):
            raw = np.array(leaf)
            bits = raw.view(f"u{raw.dtype.itemsize}")
            bits[index] ^= 1
            changed = [*leaves[:number], jnp.asarray(raw), *leaves[number + 1 :]]
            fingerprints.add(params_fingerprint(tree.unflatten(changed)))
    assert len(fingerprints) == 1 + sum(leaf.size for leaf in leaves)


def test_permuted_numbers_change_the_fingerprint():
    values = jnp.arange(12.0).reshape(3, 4)
    fingerprints = {
        params_fingerprint(x) for x in (values, values[::-1], values.T, values[:, ::-1])
    }
    assert len(fingerprints) == 4
    assert params_fingerprint([values, values + 1]) != params_fingerprint(
        [values + 1, values]
    )


def test_the_fingerprint_does_not_depend_on_the_sharding():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    specs = {
        "a": PartitionSpec("tensor", "fsdp"),
        "b": [PartitionSpec("fsdp"), PartitionSpec()],
    }
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    assert params_fingerprint(
        jax.device_put(params(), shardings)
    ) == params_fingerprint(params())

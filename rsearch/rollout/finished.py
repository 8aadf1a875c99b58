"""Rollouts that had ended before a run was interrupted, for when it goes on."""

import functools
import math

import jax
import jax.numpy as jnp

from rsearch.rollout.sending import decode_groups, encode_groups
from rsearch.runtime.journal import Journal
from rsearch.types import Group, Question, Rollout


class Finished:
    """The rollouts of one step of a stage: a journal's, and those that end now.

    A rollout is the same only if its policy is, and its draws: what that hangs on is
    `made_from`.

    Args:
        journal: of the stage's rollouts.
        made_from: step, policy, and all else that a rollout follows from beside its
            question and its number.

    Attributes:
        num_reused: rollouts that were there already, and asked for.
    """

    def __init__(self, journal: Journal, made_from: list):
        self._journal, self._made_from = journal, made_from
        self.num_reused = 0

    def get(self, question: Question, sample: int) -> Rollout | None:
        """The rollout, to the last bit, if it has ended before."""
        body = self._journal.get([*self._made_from, question.id, sample])
        if body is None:
            return None
        try:
            (group,) = decode_groups(body, [question])
        except (LookupError, TypeError, ValueError):  # of another version's making
            return None
        self.num_reused += 1
        return group.rollouts[0]

    def put(self, question: Question, sample: int, rollout: Rollout) -> None:
        """One more has ended."""
        body = encode_groups([Group(question, (rollout,))])
        self._journal.add([*self._made_from, question.id, sample], body)


def fingerprint(params) -> str:
    """Of a policy as it decodes: other parameters have another, whatever holds them.

    The bits of every number are multiplied with an odd one of its place, and summed
    modulo 2^32: a sum whose order does not matter, so that it does not hang on how
    parameters are sharded; one changed number always changes it.
    """
    return f"{int(_checksum(params)):08x}"


@jax.jit
def _checksum(params):
    """[] uint32."""
    parts = map(_sum_of, range(10**9), jax.tree.leaves(params))
    return functools.reduce(jnp.add, parts, jnp.uint32(0))


def _sum_of(number, leaf):
    """[] uint32 of the leaf of this number."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)
    place = jnp.full(leaf.shape, number * 0x9E3779B1 & 0xFFFFFFFF, jnp.uint32)
    for axis in range(leaf.ndim):  # not flattened: that would gather what is sharded
        stride = math.prod(leaf.shape[axis + 1 :]) & 0xFFFFFFFF
        own = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        place = place + own * jnp.uint32(stride)
    odd = place * jnp.uint32(0x85EBCA6B) * 2 | 1
    return jnp.sum(bits * odd, dtype=jnp.uint32)

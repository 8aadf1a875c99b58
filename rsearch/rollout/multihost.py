"""One sampler for all hosts: their rollouts run in one program over all devices.

Each host schedules its own rows, as a single host does. All hosts call the same
functions in the same order, after agreeing on the number of calls. A host passes the
arguments of its own rows; the rows of all hosts are concatenated in host order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rsearch.hosts import processes
from rsearch.models.sharding import batch_sharding, num_shards, replicated
from rsearch.rollout.decode import Sampler
from rsearch.rollout.interface import Context, DecodeRequest, Rows, Turn
from rsearch.types import Params

FAILURE = -1  # sent to the other hosts by a host that cannot continue


class MultihostSampler:
    """A Sampler's functions, each called by every host with its own rows.

    Attributes:
        sampler: the Sampler over a mesh of all devices.
    """

    def __init__(self, sampler: Sampler, mesh: Mesh):
        """Check that every host has rows of its own; compile nothing yet.

        Args:
            sampler: a Sampler over the mesh.
            mesh: mesh of all hosts' devices, in which each host's are contiguous.

        Raises:
            ValueError: the mesh has fewer shards of rows than there are hosts.
        """
        self.sampler = sampler
        self._num_shards = num_shards(mesh)  # for the rows of all hosts
        self._num_hosts = processes.num_hosts()
        if self._num_shards % self._num_hosts:
            raise ValueError(
                f"config.mesh.data x config.mesh.fsdp = {self._num_shards}: must be a "
                f"multiple of the {self._num_hosts} hosts if "
                "config.rollout.global_mesh is set, so that each has its own rows"
            )
        self._by_host = batch_sharding(mesh)
        self._replicated = replicated(mesh)
        self.place_params = sampler.place_params
        self.page_tokens, self.row_pages = sampler.page_tokens, sampler.row_pages
        self._prefill = jax.jit(self._prefill_all)
        self._admit = jax.jit(self._admit_all, donate_argnums=0, static_argnums=4)
        self._extend = jax.jit(self._extend_all, donate_argnums=1)
        self._decode = jax.jit(self._decode_all, donate_argnums=1)

    @property
    def num_shards(self) -> int:
        """Return the number of shards that the devices split each host's rows into."""
        return self._num_shards // self._num_hosts

    def row_shards(self, num_rows: int) -> int:
        """Return the number of shards of each host's rows."""
        del num_rows  # `empty` rejects rows that cannot be split
        return self.num_shards

    def all_gather(self, number: int) -> np.ndarray:
        """Return [hosts] numbers, one from each host, each 0 or more.

        Raises:
            OtherHostError: another host has reported a failure.
        """
        numbers = processes.allgather_int(number)
        if number != FAILURE and (numbers == FAILURE).any():
            failed_host = int(np.argmin(numbers))
            raise processes.OtherHostError(f"host {failed_host} failed in its rollouts")
        return numbers

    def report_failure(self) -> None:
        """Tell the other hosts, which are waiting for this one, that it has failed."""
        self.all_gather(FAILURE)

    def empty(self, num_rows: int, num_pages: int = 0) -> Rows:
        """Return this many rows and pages for every host.

        Raises:
            ValueError: the rows cannot be spread evenly over the devices.
        """
        if num_rows * self._num_hosts % self._num_shards:
            raise ValueError(
                f"config.rollout.max_concurrent = {num_rows} on each of "
                f"{self._num_hosts} hosts cannot be spread over "
                f"{self._num_shards} shards of the mesh"
            )
        return self.sampler.empty(
            num_rows * self._num_hosts, num_pages * self._num_hosts
        )

    def prefill(self, params: Any, tokens: np.ndarray, count: np.ndarray) -> Context:
        """Prefill every host's prompts; see `Sampler.prefill`."""
        return self._prefill(params, self._to_global(tokens), self._to_global(count))

    def admit(
        self,
        rows: Rows,
        prompts: Context,
        slots: np.ndarray,
        source: np.ndarray,
        table: np.ndarray | None = None,
    ) -> Rows:
        """Admit every host's prompts; see `Sampler.admit`."""
        num_prompts = len(prompts.length) // self._num_hosts  # of each host
        slots, source, table = map(self._to_global, (slots, source, table))
        return self._admit(rows, prompts, slots, source, num_prompts, table)

    def extend(
        self,
        params: Params,
        rows: Rows,
        slots: np.ndarray,
        tokens: np.ndarray,
        count: np.ndarray,
        table: np.ndarray | None = None,
    ) -> Rows:
        """Extend every host's rows; see `Sampler.extend`."""
        arguments = map(self._to_global, (slots, tokens, count, table))
        return self._extend(params, rows, *arguments)

    def queue_size(self, num_rows: int) -> int:
        """Return the most rows of each host that decode in one step: all of them."""
        return num_rows

    def decode(
        self, params: Any, rows: Rows, key: jax.Array, request: DecodeRequest
    ) -> Rows:
        """Decode every host's rows until enough turns of all hosts have ended."""
        key_data = jax.make_array_from_process_local_data(
            self._replicated, np.asarray(jax.random.key_data(key))
        )
        request = request._replace(
            min_finished=np.int32(request.min_finished),
            max_steps=np.int32(request.max_steps),
            queue=None,  # all rows decode in each step, so that none waits
        )
        request = DecodeRequest(*map(self._to_global, request))
        return self._decode(params, rows, key_data, request)

    def turns_on_host(self, rows: Rows) -> Turn:
        """Return the turns of this host's rows as NumPy arrays."""
        return jax.tree.map(self._local_rows, rows.turn)

    def _to_global(self, array: np.ndarray | None) -> jax.Array | None:
        """Return [shards, ...], each host's array repeated for each of its shards."""
        if array is None:
            return None
        shard_arrays = np.repeat(np.asarray(array)[None], self.num_shards, axis=0)
        shape = (self._num_shards, *shard_arrays.shape[1:])
        return jax.make_array_from_process_local_data(
            self._by_host, shard_arrays, shape
        )

    def _per_host(self, arrays):
        """Return each array from `_to_global` as [hosts, ...]."""
        stride = self.num_shards
        return [None if array is None else array[::stride] for array in arrays]

    def _local_rows(self, array: jax.Array) -> np.ndarray:
        """Return this host's rows from an array of all hosts' rows."""
        shards = {s.index[0].start or 0: s.data for s in array.addressable_shards}
        rows = np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
        size = len(array) // self._num_hosts
        first = processes.host_index() * size - min(shards)
        return rows[first : first + size]

    def _prefill_all(self, params, tokens, count):
        tokens, count = self._per_host((tokens, count))
        return self.sampler.prefill(params, _flatten(tokens), _flatten(count))

    def _admit_all(self, rows, prompts, slots, source, num_prompts, table):
        slots, source, table = self._per_host((slots, source, table))
        source = source + jnp.arange(self._num_hosts)[:, None] * num_prompts
        slots, table = self._global_slots(rows, slots), self._global_pages(rows, table)
        return self.sampler.admit(rows, prompts, slots, _flatten(source), table)

    def _extend_all(self, params, rows, slots, tokens, count, table):
        slots, tokens, count, table = self._per_host((slots, tokens, count, table))
        return self.sampler.extend(
            params,
            rows,
            self._global_slots(rows, slots),
            _flatten(tokens),
            _flatten(count),
            self._global_pages(rows, table),
        )

    def _decode_all(self, params, rows, key_data, request):
        request = DecodeRequest(*self._per_host(request))
        request = request._replace(
            names=_flatten(request.names),
            begins=_flatten(request.begins),
            budget=_flatten(request.budget),
            min_finished=jnp.sum(request.min_finished),
            max_steps=jnp.min(request.max_steps),
            table=self._global_pages(rows, request.table),
        )
        key = jax.random.wrap_key_data(key_data)
        return self.sampler.decode(params, rows, key, request)

    def _global_slots(self, rows, slots):
        """Return hosts' slots as slots of all hosts' rows; padding stays padding."""
        return self._renumber(slots, len(rows.context.length))

    def _global_pages(self, rows, table):
        """Return hosts' pages as pages of all hosts; None if rows share none."""
        if table is None:
            return None
        return self._renumber(table, rows.context.cache.k.shape[1])

    def _renumber(self, numbers, total):
        """Return each host's numbers below total / hosts as numbers below total."""
        size = total // self._num_hosts
        offsets = jnp.arange(self._num_hosts)
        offsets = offsets.reshape(-1, *[1] * (numbers.ndim - 1)) * size
        return _flatten(jnp.where(numbers < size, numbers + offsets, total))


def _flatten(array):
    """Return a [hosts, n, ...] array as [hosts x n, ...]."""
    return array.reshape(-1, *array.shape[2:])

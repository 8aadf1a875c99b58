"""The rollouts of all hosts in one program over all devices.

Each host decides for its own rows, as it does alone, and all call the same functions in
the same order: before each they agree on how often. What a host gives to a function is
its own part of the arguments; the rows of all stand one host's behind another's.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rsearch.hosts import processes as hosts
from rsearch.models.sharding import batch_sharding, num_shards, replicated
from rsearch.rollout.decode import Rows, Sampler, Turn

FAILED = -1  # agreed on by a host that cannot go on


class MultihostSampler:
    """A Sampler's functions, each called by every host with its own rows.

    Attributes:
        sampler: over a mesh of all devices.
    """

    def __init__(self, sampler: Sampler, mesh: Mesh):
        """Holds what the hosts share.

        Args:
            sampler: over the mesh.
            mesh: of all hosts' devices, those of a host side by side.
        """
        self.sampler, self._shards = sampler, num_shards(mesh)
        self._num = hosts.num_hosts()
        if self._shards % self._num:
            raise ValueError(
                f"config.mesh.data x config.mesh.fsdp = {self._shards}: must be a "
                f"multiple of the {self._num} hosts with config.rollout.together, so "
                "that each has rows of its own"
            )
        self._by_host, self._whole = batch_sharding(mesh), replicated(mesh)
        self.place_params = sampler.place_params
        self._prefill = jax.jit(self._prefill_all)
        self.page_tokens, self.row_pages = sampler.page_tokens, sampler.row_pages
        self._admit = jax.jit(self._admit_all, donate_argnums=0, static_argnums=4)
        self._extend = jax.jit(self._extend_all, donate_argnums=1)
        self._decode = jax.jit(self._decode_all, donate_argnums=1)

    @property
    def num_traces(self) -> int:
        """See `Sampler`."""
        return self.sampler.num_traces

    @property
    def num_shards(self) -> int:
        """How many parts the devices cut the rows of each host into."""
        return self._shards // self._num

    def num_parts(self, num_rows: int) -> int:
        """How many parts this many rows of each host are cut into."""
        del num_rows  # `empty` refuses what cannot be cut.
        return self.num_shards

    def agree(self, number: int) -> np.ndarray:
        """[hosts] the numbers that each of them has given, 0 or more.

        Raises:
            OtherHostError: one has given up.
        """
        found = hosts.exchange_number(number)
        if number != FAILED and (found == FAILED).any():
            failed = int(np.argmin(found))
            raise hosts.OtherHostError(f"host {failed} failed in its rollouts")
        return found

    def give_up(self) -> None:
        """Tells the others, who wait for this host, that it has failed."""
        self.agree(FAILED)

    def empty(self, num_rows: int, num_pages: int = 0) -> Rows:
        """This many rows and pages for every host.

        Raises:
            ValueError: they cannot be spread over the devices.
        """
        if num_rows * self._num % self._shards:
            raise ValueError(
                f"config.rollout.slots = {num_rows} of {self._num} hosts cannot be "
                f"spread over {self._shards} parts of the mesh"
            )
        return self.sampler.empty(num_rows * self._num, num_pages * self._num)

    def prefill(self, params, tokens, count):
        """As `Sampler.prefill`, of every host's prompts."""
        return self._prefill(params, self._all(tokens), self._all(count))

    def admit(self, rows, prompts, *given):
        """As `Sampler.admit`."""
        block = len(prompts.length) // self._num
        slots, source, *table = self._each(given)
        return self._admit(rows, prompts, slots, source, block, *table)

    def extend(self, params, rows, *given):
        """As `Sampler.extend`."""
        return self._extend(params, rows, *self._each(given))

    def queue_size(self, num_rows: int) -> int:
        """How many rows of each host write in a step, at most: all."""
        return num_rows

    def decode(
        self,
        params,
        rows,
        key,
        names,
        begins,
        budget,
        enough,
        most,
        table=None,
        queue=None,
    ):
        """As `Sampler.decode`; it ends when enough turns of all hosts have."""
        del queue  # nobody waits in it
        data = jax.make_array_from_process_local_data(
            self._whole, np.asarray(jax.random.key_data(key))
        )
        own = names, begins, budget, np.int32(enough), np.int32(most), table
        return self._decode(params, rows, data, *self._each(own))

    def turns_on_host(self, rows: Rows) -> Turn:
        """What this host's rows have written, as arrays of this host."""
        return jax.tree.map(self._own, rows.turn)

    def _each(self, given):
        """`_all` of each argument that there is."""
        return [None if own is None else self._all(own) for own in given]

    def _all(self, own):
        """[shards, ...] of what each host gives, again for each shard of its rows."""
        own = np.repeat(np.asarray(own)[None], self.num_shards, axis=0)
        shape = (self._shards, *own.shape[1:])
        return jax.make_array_from_process_local_data(self._by_host, own, shape)

    def _of_hosts(self, arrays):
        """[hosts, ...] of each, of what `_all` has made."""
        each = self.num_shards
        return [None if array is None else array[::each] for array in arrays]

    def _own(self, array):
        """This host's rows of an array of all."""
        parts = {s.index[0].start or 0: s.data for s in array.addressable_shards}
        found = np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
        size = len(array) // self._num
        first = hosts.index() * size - min(parts)
        return found[first : first + size]

    def _prefill_all(self, params, tokens, count):
        tokens, count = self._of_hosts((tokens, count))
        return self.sampler.prefill(params, _flat(tokens), _flat(count))

    def _admit_all(self, rows, prompts, slots, source, block, table=None):
        slots, source, table = self._of_hosts((slots, source, table))
        source = source + jnp.arange(self._num)[:, None] * block
        slots, table = self._slots(rows, slots), self._pages(rows, table)
        return self.sampler.admit(rows, prompts, slots, _flat(source), table)

    def _extend_all(self, params, rows, *given):
        slots, tokens, count, *tables = self._of_hosts(given)
        slots = self._slots(rows, slots)
        tables = [self._pages(rows, table) for table in tables]
        given = _flat(tokens), _flat(count), *tables
        return self.sampler.extend(params, rows, slots, *given)

    def _decode_all(self, params, rows, data, *given):
        *own, enough, most, table = self._of_hosts(given)
        key = jax.random.wrap_key_data(data)
        enough, most = jnp.sum(enough), jnp.min(most)
        given = *map(_flat, own), enough, most, self._pages(rows, table)
        return self.sampler.decode(params, rows, key, *given)

    def _slots(self, rows, slots):
        """Slots of each host's own rows among all; nobody's stays nobody's."""
        return self._numbered(slots, len(rows.context.length))

    def _pages(self, rows, table):
        """Likewise of the pages that they share, if they do."""
        if table is None:
            return None
        return self._numbered(table, rows.context.cache.k.shape[1])

    def _numbered(self, own, total):
        """Each host's own numbers among those of all; beyond its last is nobody's."""
        size = total // self._num
        first = jnp.arange(self._num).reshape(-1, *[1] * (own.ndim - 1)) * size
        return _flat(jnp.where(own < size, own + first, total))


def _flat(array):
    """[hosts x n, ...] of [hosts, n, ...]."""
    return array.reshape(-1, *array.shape[2:])

"""The device's half of a rollout: prefill, admit, decode until some pause, extend.

Each function is compiled once; shapes come from the configuration alone. Rows differ in
length, pause at different moments and keep their cache while the host searches, so a
turn costs its own tokens and never the prefix again.

Dimensions: B rows, Q prompts, P prompt tokens, E rows read to at once, O tokens that
they read, N tokens of a turn, S cache slots, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.attention.cached import Cache, empty_cache
from rsearch.models.attention.pages import Pages, empty_pages, put_rows
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import (
    batch_sharding,
    cut_axes,
    num_shards,
    place_for_decoding,
    platform_of,
    replicated,
)
from rsearch.models.unstacked import (
    LARGE_LAYERS,
    extended,
    logits_behind,
    with_layers_apart,
)
from rsearch.rollout.sampling import row_keys, sample


class Context(NamedTuple):
    """What rows have read and written.

    Attributes:
        cache: keys and values of the first `length` tokens of each row; in pages, if
            the rows of a rollout share a number of them.
        length: [B] int32 tokens so far.
        logits: [B, V] float32 for the token that comes next.
    """

    cache: Cache | Pages
    length: jax.Array
    logits: jax.Array


class Turn(NamedTuple):
    """What B rows have written in their turns so far.

    Attributes:
        tokens: [B, N] int32; the first `count` of a row are valid.
        logp: [B, N] float32 log-probability under the distribution sampled from.
        count: [B] int32.
        state: [B] uint8 of the stop strings' automaton.
        active: [B] bool, the rows whose turn goes on.
    """

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array
    state: jax.Array
    active: jax.Array


class Rows(NamedTuple):
    """The device state of B conversations."""

    context: Context
    turn: Turn


def row_shardings(x: Rows | Context, mesh: Mesh):
    """Rows, and pages, over data and fsdp, heads over tensor, where they divide.

    Returns:
        As x, the sharding of each array, or shape.
    """
    context = x.context if isinstance(x, Rows) else x
    cache = context.cache
    axes = (1, 0) if isinstance(cache, Pages) else (1, 2)  # of rows, and of heads
    num_rows = len(context.length)
    cached, num_heads = (cache.k.shape[axis] for axis in axes)
    kept = [None, None, None]
    kept[axes[0]], kept[axes[1]] = cut_axes(mesh, num_heads, num_rows, cached)
    kept = NamedSharding(mesh, PartitionSpec(*kept))
    is_cut = cut_axes(mesh, 1, num_rows)[0] is not None
    row = batch_sharding(mesh) if is_cut else replicated(mesh)
    shardings = Context(type(cache)(kept, kept), row, row)
    if isinstance(x, Rows):
        return Rows(shardings, Turn(*[row] * len(Turn._fields)))
    return shardings


def begun(turn: Turn, begins, budget) -> Turn:
    """Where a row begins, a new turn of so many tokens; of others their own."""
    blank = begins[:, None]
    return Turn(
        jnp.where(blank, 0, turn.tokens),
        jnp.where(blank, 0.0, turn.logp),
        jnp.where(begins, 0, turn.count),
        jnp.where(begins, 0, turn.state).astype(jnp.uint8),
        jnp.where(begins, budget > 0, turn.active),
    )


def some(rows: Rows, slots) -> Rows:
    """[E] of the rows, those at slots, beside the cache of all.

    A slot of B is nobody's, whose turn does not go on.
    """
    (cache, *context), turn = rows
    context, turn = jax.tree.map(lambda x: x[slots], (context, turn))
    own = turn._replace(active=turn.active & (slots < len(rows.turn.count)))
    return Rows(Context(cache, *context), own)


def returned(rows: Rows, own: Rows, slots) -> Rows:
    """All rows, with what `some` of them have come to; the cache is theirs."""

    def put(whole, part):
        return whole.at[slots].set(part, mode="drop")

    (_, *context), (cache, *own_context) = rows.context, own.context
    context = jax.tree.map(put, context, own_context)
    return Rows(Context(cache, *context), jax.tree.map(put, rows.turn, own.turn))


BLOCK_SIZE = 16  # rows of a small model that a CPU lets write at once
QUEUE_SHARE = 1 / 16  # of the rows: so many of them write where they stand in a queue


def block_size(model: Decoder, mesh: Mesh, num_rows: int) -> int:
    """How many of B rows write at once, in a program that has one size for all.

    So what a row writes depends on no other, to the last bit.
    """
    is_small = model.spec.num_params * jnp.dtype(model.dtype).itemsize < LARGE_LAYERS
    if platform_of(mesh) == "cpu" and mesh.size == 1 and is_small:
        return min(num_rows, BLOCK_SIZE)
    return num_rows


def queue_size(num_rows: int, block: int) -> int:
    """How many of B rows write in a step, at most, where they stand in a queue.

    Whole blocks; all rows, where these are one.

    Args:
        num_rows: B.
        block: of `block_size`.
    """
    if block == num_rows:
        return num_rows
    return max(1, int(num_rows * QUEUE_SHARE) // block) * block


def in_blocks(active, queue, block: int) -> jax.Array:
    """[n x block] int32 rows: those that write first, as they stand in the queue.

    Args:
        active: [B] bool, the rows that write.
        queue: [B] int32 all rows; None is the order of their slots.
        block: rows of each; B is nobody, where the last block is not full.
    """
    if queue is None:
        queue = jnp.arange(len(active), dtype=jnp.int32)
    order = queue[jnp.argsort(~active[queue])]
    return jnp.pad(order, (0, -len(order) % block), constant_values=len(order))


SLOT_TILE = 16  # of a TPU's tiles in bfloat16


def _widen(stop_table: np.ndarray, vocab_size: int) -> np.ndarray:
    """[states, V]: the table with columns that keep the state for ids without token."""
    num_states, num_tokens = stop_table.shape
    if num_tokens > vocab_size:
        raise ValueError(
            f"the tokenizer has {num_tokens} ids, more than the model's {vocab_size=}"
        )
    same = np.arange(num_states, dtype=np.uint8)[:, None]
    rest = np.repeat(same, vocab_size - num_tokens, axis=1)
    return np.concatenate([stop_table, rest], axis=1)


class Sampler:
    """The compiled functions of one model, protocol and set of limits."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        stop_table: np.ndarray,
        eos_ids,
        num_slots: int,
        max_turn_tokens: int,
        chunk: int,
        temperature: float,
        top_p: float,
        page_tokens: int = 1,
        all_at_once: bool = False,
    ):
        """See `decode` and `extend`.

        Args:
            model: the policy's network.
            mesh: rows are spread over its data and fsdp axes, heads over tensor.
            stop_table: [states, tokens] uint8 of `stop_strings.token_automaton`; ids of
                the model beyond the tokenizer's stand for nothing.
            eos_ids: token ids that end a turn.
            num_slots: S, tokens that a whole conversation may hold.
            max_turn_tokens: N, tokens the policy may write in one turn.
            chunk: prompt and observation tokens go through the model this many at a
                time, at most.
            temperature, top_p: see `sample`.
            page_tokens: of a page, where `empty` makes some.
            all_at_once: no blocks of rows (see `block_size`), whatever the mesh is of.

        Raises:
            ValueError: the tokenizer has more ids than the model.
        """
        self._model, self._mesh = model.clone(mesh=mesh), mesh
        self._stop_table = jnp.asarray(_widen(stop_table, model.spec.vocab_size))
        self._is_eos = (
            jnp.zeros(model.spec.vocab_size, bool)
            .at[jnp.array(eos_ids, jnp.int32)]
            .set(True)
        )
        self._num_slots = self._tiled(num_slots)
        self.page_tokens, self._all_at_once = page_tokens, all_at_once
        self._max_turn_tokens = max_turn_tokens
        self._chunk, self._temperature, self._top_p = chunk, temperature, top_p
        self.num_traces = 0
        self.empty = jax.jit(self._empty, static_argnums=(0, 1))
        self.prefill = jax.jit(self._prefill)
        self.admit = jax.jit(self._admit, donate_argnums=0)
        self.extend = jax.jit(self._extend, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    @property
    def row_pages(self) -> int:
        """n, pages of the longest row."""
        return -(-self._num_slots // self.page_tokens)

    @property
    def num_shards(self) -> int:
        """How many parts the devices cut rows into, where these divide."""
        return num_shards(self._mesh)

    def num_parts(self, num_rows: int) -> int:
        """How many parts B rows are cut into, each on devices of its own."""
        return 1 if num_rows % self.num_shards else self.num_shards

    def queue_size(self, num_rows: int) -> int:
        """How many of B rows write in a step, at most, where they stand in a queue."""
        return queue_size(num_rows, self._block_size(num_rows))

    def _block_size(self, num_rows: int) -> int:
        if self._all_at_once:
            return num_rows
        return block_size(self._model, self._mesh, num_rows)

    def agree(self, number: int) -> np.ndarray:
        """[1] the number: nobody else rolls out in the same program."""
        return np.array([number])

    def give_up(self) -> None:
        """Nobody waits."""

    def turns_on_host(self, rows: Rows) -> Turn:
        """What the rows have written, on the host."""
        return jax.device_get(rows.turn)

    def place_params(self, params):
        """The parameters laid out and cast for decoding; no needless copy.

        On CPUs large layers are there twice, see `with_layers_apart`. Cast first: what
        devices then send to each other, and hold, is half as much.
        """
        if self._model.dtype != jnp.float32:
            params = jax.tree.map(lambda x: x.astype(self._model.dtype), params)
        return with_layers_apart(place_for_decoding(params, self._mesh), self._mesh)

    def _constrain(self, x: Rows | Context):
        return jax.lax.with_sharding_constraint(x, row_shardings(x, self._mesh))

    def _apply(self, params, *given):
        self.num_traces += 1
        return extended(self._model, params, *given)

    def _logits(self, params, hidden):
        return logits_behind(self._model, params, hidden)

    def _tiled(self, num_slots):
        """At least so many slots, in whole tiles of an accelerator's memory.

        Without, XLA copies the whole cache for each layer of each token: writing to it
        and reading it want different layouts.
        """
        tile = SLOT_TILE if platform_of(self._mesh) != "cpu" else 1
        return -(-num_slots // tile) * tile

    def _blank(self, num_rows, num_slots) -> Context:
        """Rows that have read nothing."""
        num_slots = self._tiled(num_slots)
        spec, dtype = self._model.spec, self._model.dtype
        return Context(
            empty_cache(spec, num_rows, num_slots, dtype),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, spec.vocab_size), jnp.float32),
        )

    def _empty(self, num_rows: int, num_pages: int = 0) -> Rows:
        """B rows without a conversation, each with all slots, or sharing pages."""
        size = num_rows, self._max_turn_tokens
        turn = Turn(
            jnp.zeros(size, jnp.int32),
            jnp.zeros(size, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(num_rows, jnp.uint8),
            jnp.zeros(num_rows, bool),
        )
        context = self._blank(num_rows, 1 if num_pages else self._num_slots)
        if num_pages:
            spec, size = self._model.spec, self.page_tokens
            pages = empty_pages(spec, num_pages, size, self._model.dtype)
            context = context._replace(cache=pages)
        return self._constrain(Rows(context, turn))

    def _prefill(self, params, tokens, count) -> Context:
        """Prompts read: [Q, P] ids, [Q] how many of each are valid, one at least."""
        context = self._constrain(self._blank(*tokens.shape))
        cache, logits = self._read(params, context, tokens, count)
        return self._constrain(Context(cache, count, logits))

    def _admit(self, rows: Rows, prompts: Context, slots, source, table=None) -> Rows:
        """Rows of which row slots[i] begins with prompt source[i].

        A question's rollouts share its prefill. A slot of B is nobody's. Where rows
        share pages, [E, n] `table` names those of slots[i].
        """
        context = rows.context

        def put(whole, own):
            return whole.at[:, slots, :, : own.shape[3]].set(
                own[:, source], mode="drop"
            )

        if table is None:
            cache = jax.tree.map(put, context.cache, prompts.cache)
        else:
            own = (x[:, source] for x in prompts.cache)
            cache = put_rows(context.cache, *own, table)
        context = Context(
            cache,
            context.length.at[slots].set(prompts.length[source], mode="drop"),
            context.logits.at[slots].set(prompts.logits[source], mode="drop"),
        )
        return self._constrain(rows._replace(context=context))

    def _extend(self, params, rows: Rows, slots, tokens, count, table=None) -> Rows:
        """Rows of which row slots[i] has read count[i] of [E, O] given tokens.

        A slot of B is nobody's. Where B rows are cut into parts, so are the E: each
        part of these are slots of the same part of those, or nobody's. [E, n] `table`
        as in `admit`.
        """
        context, num_rows = rows.context, len(rows.context.length)
        if self.num_parts(num_rows) > 1:
            own = batch_sharding(self._mesh)
            given = slots, tokens, count, table
            given = jax.lax.with_sharding_constraint(given, own)
            slots, tokens, count, table = given
        cache, logits = self._read(params, context, tokens, count, slots, table)
        context = Context(
            cache,
            context.length.at[slots].add(count, mode="drop"),
            context.logits.at[slots].set(logits, mode="drop"),
        )
        return self._constrain(rows._replace(context=context))

    def _read(self, params, context: Context, tokens, count, slots=None, table=None):
        """The cache after [E, O] tokens, and [E, V] logits behind the last of each."""
        most = min(self._chunk, tokens.shape[1])
        # Equal pieces, that padding is little, in an accelerator's tiles of 8.
        even = -(-tokens.shape[1] // -(-tokens.shape[1] // most))
        chunk = min(most, -(-even // 8) * 8)
        tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
        num_chunks = (jnp.max(count) + chunk - 1) // chunk
        num_slots = context.cache.k.shape[3]
        rows = slots
        if table is not None:  # which says where the rows are
            rows, num_slots = None, table.shape[1] * num_slots
        start, logits = context.length, context.logits
        if slots is not None:
            start, logits = start[slots], logits[slots]

        def read(carry):
            i, cache, logits = carry
            part = jax.lax.dynamic_slice_in_dim(tokens, i * chunk, chunk, axis=1)
            left = jnp.clip(count - i * chunk, 0, chunk)
            offset = jnp.arange(chunk)[None]
            positions = jnp.where(
                offset < left[:, None], start[:, None] + i * chunk + offset, num_slots
            )
            given = part, positions, cache, rows, table
            hidden, cache = self._apply(params, *given)
            last = jnp.maximum(left - 1, 0)[:, None, None]
            hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
            behind = self._logits(params, hidden)
            return i + 1, cache, jnp.where((left > 0)[:, None], behind, logits)

        first = (jnp.int32(0), context.cache, logits)
        return jax.lax.while_loop(lambda c: c[0] < num_chunks, read, first)[1:]

    def _decode(
        self,
        params,
        rows: Rows,
        key,
        names,
        begins,
        budget,
        enough,
        most,
        table=None,
        queue=None,
    ) -> Rows:
        """Lets rows write until enough of them have stopped, ended or run out.

        Args:
            params: from `place`.
            rows: their state; its buffers are reused.
            key: random key; the draw of a row at position p uses
                fold_in(fold_in(fold_in(key, name of the row), its second name), p).
            names: [B, 2] uint32.
            begins: [B] bool, the rows that begin a turn; others go on with theirs.
            budget: [B] int32 tokens of each turn, at most `max_turn_tokens`.
            enough: it ends when so many turns of this call have, or all.
            most: tokens that a row writes in this call, at most.
            table: [B, n] int32 pages of each row, where they share some.
            queue: [B] int32 all rows. Where a step costs what each row does, only the
                first of these that go on write, see `queue_size`; None: all.

        Returns:
            The rows' new state.
        """
        rows = rows._replace(turn=begun(rows.turn, begins, budget))
        stays = jnp.maximum(jnp.sum(rows.turn.active) - enough, 0)
        given = row_keys(key, names), budget, table
        block = self._block_size(len(begins))
        most_rows = len(begins) if queue is None else self.queue_size(len(begins))

        def goes_on(carry):
            step, rows = carry
            return (step < most) & (jnp.sum(rows.turn.active) > stays)

        def write(carry):
            step, rows = carry
            if block == len(begins):
                return step + 1, self._write(params, rows, *given)
            # Those that write, one block after another; the rest costs nothing.
            active = rows.turn.active
            order = in_blocks(active, queue, block)

            def write_block(i, rows):
                slots = jax.lax.dynamic_slice_in_dim(order, i * block, block)
                own = jax.tree.map(lambda x: x[slots], given)
                own = self._write(params, some(rows, slots), *own, slots)
                return returned(rows, own, slots)

            count = (jnp.minimum(jnp.sum(active), most_rows) + block - 1) // block
            return step + 1, jax.lax.fori_loop(0, count, write_block, rows)

        _, rows = jax.lax.while_loop(goes_on, write, (jnp.int32(0), rows))
        return self._constrain(rows)

    def _write(self, params, rows: Rows, keys, budget, table=None, slots=None) -> Rows:
        """The rows after one more token of each that is active.

        Args:
            params, table: as in `_decode`.
            rows: all, or `some`.
            keys: [E] of their names.
            budget: [E].
            slots: [E] int32 which rows they are; None is all.
        """
        context, turn = rows
        active = turn.active
        drawn = jax.vmap(jax.random.fold_in)(keys, context.length)
        tokens, logp = sample(
            context.logits, drawn, temperature=self._temperature, top_p=self._top_p
        )
        slot = jnp.where(active, turn.count, self._max_turn_tokens)
        count = turn.count + active
        state = jnp.where(active, self._stop_table[turn.state, tokens], turn.state)
        matched = len(self._stop_table) - 1
        ended = (state == matched) | self._is_eos[tokens] | (count >= budget)
        # The token that ends a turn is read too: the cache holds all that was written.
        nowhere = self.row_pages * self.page_tokens  # beyond all slots
        position = jnp.where(active, context.length, nowhere)
        new = tokens[:, None], position[:, None]
        # A table says where the rows are.
        slots = slots if table is None else None
        hidden, cache = self._apply(params, *new, context.cache, slots, table)
        behind = self._logits(params, hidden[:, 0])
        logits = jnp.where(active[:, None], behind, context.logits)
        row = jnp.arange(len(active))
        turn = Turn(
            turn.tokens.at[row, slot].set(tokens, mode="drop"),
            turn.logp.at[row, slot].set(logp, mode="drop"),
            count,
            state,
            active & ~ended,
        )
        return Rows(Context(cache, context.length + active, logits), turn)

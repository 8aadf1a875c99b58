"""The device side of a rollout: prefill, admit, decode until some rows pause, extend.

Each function is compiled once, since shapes depend only on the configuration. Rows
differ in length, pause at different times and keep their KV cache while the host
searches, so that a turn costs only its own tokens and never processes the prefix again.

Dimensions: B rows, Q prompts, P prompt tokens, E rows extended or admitted in one call,
O observation tokens, N tokens per turn, S cache slots per row, V vocabulary, n pages of
the longest row. Row index B is padding: it refers to no row.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.attention.cached import empty_cache
from rsearch.models.attention.pages import Pages, cache_dtype, empty_pages, put_rows
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import (
    batch_sharding,
    num_shards,
    place_for_decoding,
    platform_of,
    replicated,
    shard_axes,
)
from rsearch.models.unstacked import (
    LARGE_LAYERS,
    decode_logits,
    decode_step,
    with_int8_kernels,
    with_layers_apart,
)
from rsearch.rollout.interface import Context, DecodeRequest, Rows, Turn
from rsearch.rollout.sampling import row_keys, sample, unscaled_logp

# TPUs store the cache's slots in tiles of 16 in bfloat16.
SLOT_TILE = 16
# On an accelerator, or with a large model on a CPU, a decoding step is bound by reading
# all parameters, however many rows decode. With a small model on a CPU, each row adds
# to the cost. Decoding in small blocks then takes the same time per token, but the
# first rows end their turns sooner: their searches run while others decode, instead of
# all rows waiting for all searches.
BLOCK_SIZE = 16  # rows of a small model that a CPU decodes together
QUEUE_SHARE = 1 / 16  # share of the rows, the first in the queue, that decode in a step


def row_shardings(x: Rows | Context, mesh: Mesh) -> Rows | Context:
    """Return the sharding of each array in x.

    Rows and pages are sharded over the mesh's data and fsdp axes, and heads over
    tensor, where the sizes are divisible.

    Args:
        x: arrays, or their shapes.
        mesh: device mesh.
    """
    context = x.context if isinstance(x, Rows) else x
    cache = context.cache
    # Pages are [heads, pages, ...], a cache is [layers, rows, heads, ...].
    row_axis, head_axis = (1, 0) if isinstance(cache, Pages) else (1, 2)
    num_rows = len(context.length)
    num_cached, num_heads = cache.k.shape[row_axis], cache.k.shape[head_axis]
    axes = [None, None, None]
    axes[row_axis], axes[head_axis] = shard_axes(mesh, num_heads, num_rows, num_cached)
    cache_sharding = NamedSharding(mesh, PartitionSpec(*axes))
    is_sharded = shard_axes(mesh, 1, num_rows)[0] is not None
    row_sharding = batch_sharding(mesh) if is_sharded else replicated(mesh)
    shardings = Context(
        type(cache)(cache_sharding, cache_sharding), row_sharding, row_sharding
    )
    if isinstance(x, Rows):
        return Rows(shardings, Turn(*[row_sharding] * len(Turn._fields)))
    return shardings


def start_turns(
    turn: Turn, begins: jax.Array, budget: jax.Array, states: jax.Array | int
) -> Turn:
    """Return the turns, with an empty one in each row that starts a turn.

    Args:
        turn: turns of B rows.
        begins: [B] bool, rows that start a turn.
        budget: [B] int32 token budgets; a turn with a budget of 0 ends immediately.
        states: [B] uint8 states of the stop-string automaton in which turns start.
    """
    is_new = begins[:, None]
    return Turn(
        jnp.where(is_new, 0, turn.tokens),
        jnp.where(is_new, 0.0, turn.logp),
        jnp.where(begins, 0, turn.count),
        jnp.where(begins, states, turn.state).astype(jnp.uint8),
        jnp.where(begins, budget > 0, turn.active),
    )


def gather_rows(rows: Rows, slots: jax.Array) -> Rows:
    """Return the rows at `slots` [E], together with the cache of all rows.

    Slot B is padding; it is never active.
    """

    def pick(x):
        return x[slots]

    # The cache is not gathered: the model looks up a row's keys and values by its slot,
    # and copying them for each token would cost more than decoding it.
    context = Context(
        rows.context.cache, pick(rows.context.length), pick(rows.context.logits)
    )
    turn = jax.tree.map(pick, rows.turn)
    is_row = slots < len(rows.turn.count)
    return Rows(context, turn._replace(active=turn.active & is_row))


def scatter_rows(rows: Rows, updated: Rows, slots: jax.Array) -> Rows:
    """Return all rows after writing `updated`, with its cache, to `slots` [E]."""

    def put(old, new):
        return old.at[slots].set(new, mode="drop")  # slot B is dropped

    context = Context(
        updated.context.cache,
        put(rows.context.length, updated.context.length),
        put(rows.context.logits, updated.context.logits),
    )
    return Rows(context, jax.tree.map(put, rows.turn, updated.turn))


def even_chunk(num_tokens: int, max_chunk: int) -> int:
    """Return how many of a row's tokens to read at a time.

    Args:
        num_tokens: tokens of the row, including its padding.
        max_chunk: the most tokens to read at a time.
    """
    max_chunk = min(max_chunk, num_tokens)
    # Chunks of equal size need little padding; the size is rounded up to an
    # accelerator's tiles of 8.
    even_size = -(-num_tokens // -(-num_tokens // max_chunk))
    return min(max_chunk, -(-even_size // 8) * 8)


def decode_block_size(model: Decoder, mesh: Mesh, num_rows: int) -> int:
    """Return how many of B rows decode together.

    The whole program uses a single size, so that a row's tokens do not depend on the
    other rows, down to the last bit.
    """
    is_small = model.spec.num_params * jnp.dtype(model.dtype).itemsize < LARGE_LAYERS
    if platform_of(mesh) == "cpu" and mesh.size == 1 and is_small:
        return min(num_rows, BLOCK_SIZE)
    return num_rows


def decode_queue_size(num_rows: int, block_size: int) -> int:
    """Return the most rows that decode in one step: whole blocks, or all B rows.

    Args:
        num_rows: B.
        block_size: from `decode_block_size`.
    """
    if block_size == num_rows:
        return num_rows
    return max(1, int(num_rows * QUEUE_SHARE) // block_size) * block_size


def order_in_blocks(
    active: jax.Array, queue: jax.Array | None, block_size: int
) -> jax.Array:
    """Return [blocks x block_size] int32 rows: the active ones first, in queue order.

    Args:
        active: [B] bool, rows that decode.
        queue: [B] int32, all rows; None means the order of their slots.
        block_size: rows per block; the last block is padded with B, which is no row.
    """
    if queue is None:
        queue = jnp.arange(len(active), dtype=jnp.int32)
    order = queue[jnp.argsort(~active[queue])]
    return jnp.pad(order, (0, -len(order) % block_size), constant_values=len(order))


def _widen(stop_table: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the table as [states, V]; ids without a token leave the state as it is."""
    num_states, num_tokens = stop_table.shape
    if num_tokens > vocab_size:
        raise ValueError(
            f"the tokenizer has {num_tokens} ids, more than the model's {vocab_size=}"
        )
    states = np.arange(num_states, dtype=np.uint8)[:, None]
    padding = np.repeat(states, vocab_size - num_tokens, axis=1)
    return np.concatenate([stop_table, padding], axis=1)


class Sampler:
    """Compiled decoding functions for one model, protocol and set of limits."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        stop_table: np.ndarray,
        eos_ids: Sequence[int],
        num_slots: int,
        max_turn_tokens: int,
        chunk: int,
        temperature: float,
        top_p: float,
        page_tokens: int = 1,
        allow_blocks: bool = True,
        has_int8_kernels: bool = False,
    ):
        """Prepare the functions; each is compiled when it is first called.

        Args:
            model: the policy's network.
            mesh: rows are sharded over its data and fsdp axes, heads over tensor.
            stop_table: [states, tokens] uint8 from `stop_strings.token_automaton`;
                model ids beyond the tokenizer's leave the state as it is.
            eos_ids: token ids that end a turn.
            num_slots: S, the most tokens of a whole conversation.
            max_turn_tokens: N, the most tokens the policy may write in one turn.
            chunk: the most prompt or observation tokens of a row that go through the
                model at a time.
            temperature, top_p: see `sample`.
            page_tokens: tokens per page, if `empty` creates pages.
            allow_blocks: whether small models on CPUs decode in blocks of rows.
            has_int8_kernels: whether to sample with 8-bit layer kernels.

        Raises:
            ValueError: the tokenizer has more ids than the model.
        """
        # Rollouts may run on this host's devices only, while training runs on all.
        self._model, self._mesh = model.clone(mesh=mesh), mesh
        # XLA's CPU backend updates 16-bit integers in place, but not bfloat16.
        self._cache_dtype = cache_dtype(model.dtype, platform_of(mesh))
        self._stop_table = jnp.asarray(_widen(stop_table, model.spec.vocab_size))
        self._is_eos = (
            jnp.zeros(model.spec.vocab_size, bool)
            .at[jnp.array(eos_ids, jnp.int32)]
            .set(True)
        )
        self._num_slots = self._round_up_to_tile(num_slots)
        self.page_tokens = page_tokens
        self._allow_blocks = allow_blocks
        self._has_int8_kernels = has_int8_kernels
        self._max_turn_tokens = max_turn_tokens
        self._chunk = chunk
        self._temperature = temperature
        self._top_p = top_p
        self.num_traces = 0
        # Rows are donated, and so updated in place: two caches would not fit in memory.
        self.empty = jax.jit(self._empty, static_argnums=(0, 1))
        self.prefill = jax.jit(self._prefill)
        self.admit = jax.jit(self._admit, donate_argnums=0)
        self.extend = jax.jit(self._extend, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    @property
    def row_pages(self) -> int:
        """Return n, the number of pages of the longest row."""
        return -(-self._num_slots // self.page_tokens)

    @property
    def num_shards(self) -> int:
        """Return the number of shards that the devices split rows into."""
        return num_shards(self._mesh)

    def row_shards(self, num_rows: int) -> int:
        """Return the number of shards of B rows, each on its own devices."""
        return 1 if num_rows % self.num_shards else self.num_shards

    def queue_size(self, num_rows: int) -> int:
        """Return the most of B rows that decode in one step: the first in the queue."""
        return decode_queue_size(num_rows, self._block_size(num_rows))

    def _block_size(self, num_rows: int) -> int:
        if not self._allow_blocks:
            return num_rows
        return decode_block_size(self._model, self._mesh, num_rows)

    def all_gather(self, number: int) -> np.ndarray:
        """Return the number as [1]: no other host shares these functions."""
        return np.array([number])

    def report_failure(self) -> None:
        """Do nothing: no other host waits for this one."""

    def turns_on_host(self, rows: Rows) -> Turn:
        """Return the turns as NumPy arrays."""
        return jax.device_get(rows.turn)

    def cast_params(self, params: Any) -> Any:
        """Return the parameters in the dtypes used for decoding."""
        if self._has_int8_kernels:
            return with_int8_kernels(params, self._model.dtype)
        if self._model.dtype == jnp.float32:
            return params
        return jax.tree.map(lambda x: x.astype(self._model.dtype), params)

    def place_params(self, params: Any) -> Any:
        """Return the parameters laid out and cast for decoding, copied only if needed.

        On CPUs large layers are held twice, see `with_layers_apart`.
        """
        # Cast before moving: devices then send each other, and hold, half the bytes.
        params = place_for_decoding(self.cast_params(params), self._mesh)
        return with_layers_apart(params, self._mesh)

    def _constrain(self, x: Rows | Context):
        return jax.lax.with_sharding_constraint(x, row_shardings(x, self._mesh))

    def _apply(self, params, tokens, positions, cache, slots, table):
        self.num_traces += 1
        return decode_step(self._model, params, tokens, positions, cache, slots, table)

    def _round_up_to_tile(self, num_slots: int) -> int:
        # Without whole tiles XLA copies the entire cache for each layer of each token,
        # because writing and reading it favour different layouts.
        tile = SLOT_TILE if platform_of(self._mesh) != "cpu" else 1
        return -(-num_slots // tile) * tile

    def _empty_context(self, num_rows: int, num_slots: int) -> Context:
        """Return the context of rows that have read nothing."""
        num_slots = self._round_up_to_tile(num_slots)
        spec, dtype = self._model.spec, self._cache_dtype
        return Context(
            empty_cache(spec, num_rows, num_slots, dtype),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, spec.vocab_size), jnp.float32),
        )

    def _empty(self, num_rows: int, num_pages: int = 0) -> Rows:
        """Return B rows without a conversation, each with all its slots or in pages."""
        size = num_rows, self._max_turn_tokens
        turn = Turn(
            jnp.zeros(size, jnp.int32),
            jnp.zeros(size, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros(num_rows, jnp.uint8),
            jnp.zeros(num_rows, bool),
        )
        # If pages hold the tokens, rows have no slots of their own.
        context = self._empty_context(num_rows, 1 if num_pages else self._num_slots)
        if num_pages:
            spec, dtype = self._model.spec, self._cache_dtype
            pages = empty_pages(spec, num_pages, self.page_tokens, dtype)
            context = context._replace(cache=pages)
        return self._constrain(Rows(context, turn))

    def _prefill(self, params, tokens: jax.Array, count: jax.Array) -> Context:
        """Return the context of [Q, P] prompts, of which `count` [Q] >= 1 ids count."""
        # The cache is only as long as the prompts; `admit` copies it into longer rows.
        context = self._constrain(self._empty_context(*tokens.shape))
        cache, logits = self._read(params, context, tokens, count)
        return self._constrain(Context(cache, count, logits))

    def _admit(self, rows: Rows, prompts: Context, slots, source, table=None) -> Rows:
        """Return the rows after row slots[i] has started from prompt source[i].

        The rollouts of a question share its prefill.

        Args:
            rows: state of the rows; its buffers are reused.
            prompts: from `prefill`.
            slots: [E] int32; B is no row.
            source: [E] int32 in [0, Q).
            table: [E, n] int32 pages of these rows, if rows share pages.
        """
        context = rows.context

        # Several rows may start from one prompt. The slots after it keep what an
        # earlier row left there: positions beyond a row's length are never attended to.
        def put(cached, prompt):
            return cached.at[:, slots, :, : prompt.shape[3]].set(
                prompt[:, source], mode="drop"
            )

        if table is None:
            cache = jax.tree.map(put, context.cache, prompts.cache)
        else:
            prompt_rows = (x[:, source] for x in prompts.cache)
            cache = put_rows(context.cache, *prompt_rows, table)
        context = Context(
            cache,
            context.length.at[slots].set(prompts.length[source], mode="drop"),
            context.logits.at[slots].set(prompts.logits[source], mode="drop"),
        )
        return self._constrain(rows._replace(context=context))

    def _extend(self, params, rows: Rows, slots, tokens, count, table=None) -> Rows:
        """Return the rows after row slots[i] has read count[i] ids of tokens[i].

        Args:
            params: from `place_params`.
            rows: state of the rows; its buffers are reused.
            slots: [E] int32; B is no row. If the B rows are sharded, so are these: the
                slots in a shard of E refer to rows in the same shard of B.
            tokens: [E, O] int32.
            count: [E] int32.
            table: [E, n] int32 pages of these rows, if rows share pages.
        """
        context, num_rows = rows.context, len(rows.context.length)
        if self.row_shards(num_rows) > 1:
            # Each device processes its own rows; XLA would process all rows on each.
            by_shard = batch_sharding(self._mesh)
            slots, tokens, count, table = jax.lax.with_sharding_constraint(
                (slots, tokens, count, table), by_shard
            )
        cache, logits = self._read(params, context, tokens, count, slots, table)
        context = Context(
            cache,
            context.length.at[slots].add(count, mode="drop"),
            context.logits.at[slots].set(logits, mode="drop"),
        )
        return self._constrain(rows._replace(context=context))

    def _read(self, params, context: Context, tokens, count, slots=None, table=None):
        """Return the cache after [E, O] tokens, and [E, V] logits after the last."""
        # The chunk size depends on O only, not on where a row's tokens begin.
        chunk = even_chunk(tokens.shape[1], self._chunk)
        tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
        # Short observations end the loop early, whatever the padded shape. `num_chunks`
        # is computed on the device, so that the host need not wait for it.
        num_chunks = (jnp.max(count) + chunk - 1) // chunk
        num_slots = context.cache.k.shape[3]
        cache_rows = slots
        if table is not None:  # the table says where the rows are stored
            cache_rows, num_slots = None, table.shape[1] * num_slots
        # Rows that read nothing keep their logits.
        start, logits = context.length, context.logits
        if slots is not None:
            start, logits = start[slots], logits[slots]

        def read_chunk(carry):
            i, cache, logits = carry
            ids = jax.lax.dynamic_slice_in_dim(tokens, i * chunk, chunk, axis=1)
            num_valid = jnp.clip(count - i * chunk, 0, chunk)
            offset = jnp.arange(chunk)[None]
            # Keys and values at a position beyond all slots are not stored.
            positions = jnp.where(
                offset < num_valid[:, None],
                start[:, None] + i * chunk + offset,
                num_slots,
            )
            hidden, cache = self._apply(
                params, ids, positions, cache, cache_rows, table
            )
            # Logits of one token per row: [E, chunk, V] would not fit.
            last = jnp.maximum(num_valid - 1, 0)[:, None, None]
            hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
            next_logits = decode_logits(self._model, params, hidden)
            # A row whose tokens ended in an earlier chunk keeps that chunk's logits.
            logits = jnp.where((num_valid > 0)[:, None], next_logits, logits)
            return i + 1, cache, logits

        init = (jnp.int32(0), context.cache, logits)
        return jax.lax.while_loop(lambda c: c[0] < num_chunks, read_chunk, init)[1:]

    def _decode(self, params, rows: Rows, key, request: DecodeRequest) -> Rows:
        """Decode until enough turns have ended, and return the rows.

        Args:
            params: from `place_params`.
            rows: state of the rows; its buffers are reused.
            key: random key; the draw of a row at position p uses
                fold_in(fold_in(fold_in(key, row's first name), its second name), p).
            request: see `DecodeRequest`.
        """
        num_rows = len(request.begins)
        stop_table, states = self._stop_table, 0
        if request.stop_table is not None:
            stop_table, states = request.stop_table, request.stop_states
        rows = rows._replace(
            turn=start_turns(rows.turn, request.begins, request.budget, states)
        )
        # Turns that ended before this call do not count towards `min_finished`.
        max_active = jnp.maximum(jnp.sum(rows.turn.active) - request.min_finished, 0)
        # Outside the loop: only the position changes from token to token.
        keys = row_keys(key, request.names)
        row_arrays = keys, request.budget, request.table, request.unscaled_logp
        block_size = self._block_size(num_rows)
        max_rows = num_rows
        if request.queue is not None:
            max_rows = decode_queue_size(num_rows, block_size)

        def should_continue(carry):
            step, rows = carry
            return (step < request.max_steps) & (jnp.sum(rows.turn.active) > max_active)

        def decode_all(carry):
            step, rows = carry
            rows = self._step(params, rows, stop_table, *row_arrays)
            return step + 1, rows

        def decode_blocks(carry):
            # Only active rows fill the blocks: waiting rows cost nothing.
            step, rows = carry
            active = rows.turn.active
            order = order_in_blocks(active, request.queue, block_size)

            def decode_block(i, rows):
                slots = jax.lax.dynamic_slice_in_dim(order, i * block_size, block_size)
                # All per-row arrays but the cache, which stays in place, are gathered.
                block_arrays = jax.tree.map(lambda x: x[slots], row_arrays)
                block = gather_rows(rows, slots)
                block = self._step(params, block, stop_table, *block_arrays, slots)
                return scatter_rows(rows, block, slots)

            # The number of blocks is computed on the device, without the host.
            num_decoded = jnp.minimum(jnp.sum(active), max_rows)
            num_blocks = (num_decoded + block_size - 1) // block_size
            return step + 1, jax.lax.fori_loop(0, num_blocks, decode_block, rows)

        step = decode_all if block_size == num_rows else decode_blocks
        _, rows = jax.lax.while_loop(should_continue, step, (jnp.int32(0), rows))
        return self._constrain(rows)

    def _step(
        self,
        params,
        rows: Rows,
        stop_table,
        keys,
        budget,
        table,
        is_unscaled,
        slots=None,
    ) -> Rows:
        """Return the rows after each active one has decoded one more token.

        Args:
            params, table: as in `_decode`.
            rows: all rows, or those from `gather_rows`.
            stop_table: [states, V] uint8.
            keys: [E] random keys from `row_keys`.
            budget: [E] token budgets.
            is_unscaled: [E] bool, `DecodeRequest.unscaled_logp` of these rows, or None.
            slots: [E] int32, slots of these rows; None means all.
        """
        context, turn = rows
        active = turn.active
        # A token's key depends only on its row and position, so that a draw does not
        # depend on what else is decoded, or when.
        token_keys = jax.vmap(jax.random.fold_in)(keys, context.length)
        tokens, logp = sample(
            context.logits, token_keys, temperature=self._temperature, top_p=self._top_p
        )
        # Training never requests these, and None is static, so its program computes
        # none. At temperature 0 a draw's probability is 1, whatever the model.
        if is_unscaled is not None:
            logp = jnp.where(is_unscaled, unscaled_logp(context.logits, tokens), logp)
        # Inactive rows are computed too, but their results are dropped: column N of a
        # turn and a position beyond all slots are out of bounds.
        column = jnp.where(active, turn.count, self._max_turn_tokens)
        count = turn.count + active
        # One lookup per token finds stop strings wherever token boundaries fall.
        state = jnp.where(active, stop_table[turn.state, tokens], turn.state)
        is_stop = state == len(stop_table) - 1  # the automaton's last state
        has_ended = is_stop | self._is_eos[tokens] | (count >= budget)
        # The model also reads the token that ends a turn: the cache holds all tokens.
        out_of_bounds = self.row_pages * self.page_tokens
        position = jnp.where(active, context.length, out_of_bounds)
        cache_rows = slots if table is None else None  # a table locates the rows itself
        hidden, cache = self._apply(
            params, tokens[:, None], position[:, None], context.cache, cache_rows, table
        )
        next_logits = decode_logits(self._model, params, hidden[:, 0])
        # A pausing row keeps the logits after its last token for its next turn.
        logits = jnp.where(active[:, None], next_logits, context.logits)
        row = jnp.arange(len(active))
        turn = Turn(
            turn.tokens.at[row, column].set(tokens, mode="drop"),
            turn.logp.at[row, column].set(logp, mode="drop"),
            count,
            state,
            active & ~has_ended,
        )
        return Rows(Context(cache, context.length + active, logits), turn)

"""The device's half of a rollout: prefill, decode until paused, extend.

Each function is compiled once; shapes come from the configuration alone. Rows differ in
length, pause at different moments and keep their cache while the host searches, so a
turn costs its own tokens and never the prefix again.

Dimensions: Q prompts, B rows, P prompt tokens, N tokens of a turn, O observation
tokens, S cache slots, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsearch.models.decoder import Cache, Decoder, empty_cache
from rsearch.models.sharding import (
    DECODING_RULES,
    batch_sharding,
    param_shardings,
    replicated,
)


class Rows(NamedTuple):
    """The device state of B conversations.

    Attributes:
        cache: keys and values of the first `length` tokens of each row.
        length: [B] int32 tokens so far.
        logits: [B, V] float32 for the token that comes next.
    """

    cache: Cache
    length: jax.Array
    logits: jax.Array


class Turn(NamedTuple):
    """What B rows wrote until each had paused.

    Attributes:
        tokens: [B, N] int32; the first `count` of a row are valid.
        logp: [B, N] float32 log-probability under the distribution sampled from.
        count: [B] int32.
    """

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array


def nucleus(logits, top_p: float):
    """Logits with all but the smallest set of mass >= top_p at -inf; no sort.

    The probability threshold is found by bisection: the kept mass is at least `top_p`
        and tokens within 2^-30 of the threshold's interval count as ties and are kept.

    Source: Holtzman et al., arXiv 1904.09751.

    Args:
        logits: [B, V] float32.
        top_p: in (0, 1).
    """
    probs = jax.nn.softmax(logits, axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        mass = jnp.sum(jnp.where(probs >= middle, probs, 0.0), axis=-1, keepdims=True)
        enough = mass >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    top = jnp.max(probs, axis=-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, 30, halve, (jnp.zeros_like(top), top))
    return jnp.where(probs >= jnp.minimum(low, top), logits, -jnp.inf)


def sample(logits, keys, *, temperature: float, top_p: float):
    """One token a row, and its log-probability under the distribution sampled from.

    Args:
        logits: [B, V] float32.
        keys: [B] random keys; a row's draw depends on its own key alone.
        temperature: 0 takes the most likely token, whose log-probability is then 0.
        top_p: nucleus mass in (0, 1]; 1 keeps everything.

    Returns:
        [B] int32 tokens and [B] float32 log-probabilities.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(len(logits))
    logits = logits / temperature
    if top_p < 1:
        logits = nucleus(logits, top_p)
    tokens = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    logp = jax.nn.log_softmax(logits, axis=-1)
    return tokens, jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]


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
    ):
        """See `decode` and `extend`.

        Args:
            model: the policy's network.
            mesh: rows are spread over its data and fsdp axes, heads over tensor.
            stop_table: [states, tokens] uint8 of `automaton.token_automaton`; ids of
                the model beyond the tokenizer's stand for nothing.
            eos_ids: token ids that end a turn.
            num_slots: S, tokens that a whole conversation may hold.
            max_turn_tokens: N, tokens the policy may write in one turn.
            chunk: prompt and observation tokens go through the model this many at a
                time.
            temperature, top_p: see `sample`.

        Raises:
            ValueError: the tokenizer has more ids than the model.
        """
        self._model, self._mesh = model, mesh
        self._stop_table = jnp.asarray(_widen(stop_table, model.spec.vocab_size))
        self._is_eos = (
            jnp.zeros(model.spec.vocab_size, bool).at[jnp.array(eos_ids)].set(True)
        )
        self._num_slots, self._max_turn_tokens = num_slots, max_turn_tokens
        self._chunk, self._temperature, self._top_p = chunk, temperature, top_p
        self.num_traces = 0
        self.prefill = jax.jit(self._prefill)
        self.spread = jax.jit(self._spread)
        self.extend = jax.jit(self._extend, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1)

    def place(self, params):
        """The parameters laid out and cast for decoding; no needless copy."""
        shardings = param_shardings(params, self._mesh, DECODING_RULES)
        params = jax.device_put(params, shardings)
        if self._model.dtype == jnp.float32:
            return params
        return jax.tree.map(lambda x: x.astype(self._model.dtype), params)

    def _constrain(self, rows: Rows) -> Rows:
        """Rows over data and fsdp, heads over tensor, wherever they divide."""
        mesh = self._mesh
        num_rows, heads = rows.cache.k.shape[1:3]
        spread = num_rows % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
        row_axis = ("data", "fsdp") if spread else None
        head_axis = "tensor" if heads % mesh.shape["tensor"] == 0 else None
        cache = NamedSharding(mesh, PartitionSpec(None, row_axis, head_axis))
        row = batch_sharding(mesh) if spread else replicated(mesh)
        shardings = Rows(Cache(cache, cache), row, row)
        return jax.lax.with_sharding_constraint(rows, shardings)

    def _apply(self, params, tokens, positions, cache):
        self.num_traces += 1
        return self._model.apply({"params": params}, tokens, positions, cache)

    def _logits(self, params, hidden):
        return self._model.apply({"params": params}, hidden, method="logits")

    def _prefill(self, params, tokens, count):
        """Rows that have read their prompts: [Q, P] ids, [Q] how many are valid."""
        spec, model = self._model.spec, self._model
        rows = Rows(
            empty_cache(spec, len(tokens), self._num_slots, model.dtype),
            jnp.zeros(len(tokens), jnp.int32),
            jnp.zeros((len(tokens), spec.vocab_size), jnp.float32),
        )
        return self._extend(params, self._constrain(rows), tokens, count)

    def _spread(self, rows: Rows, index):
        """Row i becomes row index[i]: a question's rollouts share its prefill."""
        cache = jax.tree.map(lambda x: x[:, index], rows.cache)
        return self._constrain(Rows(cache, rows.length[index], rows.logits[index]))

    def _extend(self, params, rows: Rows, tokens, count):
        """Rows that have read [B, O] given tokens, [B] `count` of them valid."""
        chunk = min(self._chunk, tokens.shape[1])
        short = -tokens.shape[1] % chunk
        tokens = jnp.pad(tokens, ((0, 0), (0, short)))
        num_chunks = (jnp.max(count) + chunk - 1) // chunk

        def read(carry):
            i, rows = carry
            part = jax.lax.dynamic_slice_in_dim(tokens, i * chunk, chunk, axis=1)
            left = jnp.clip(count - i * chunk, 0, chunk)
            offset = jnp.arange(chunk)[None]
            positions = jnp.where(
                offset < left[:, None], rows.length[:, None] + offset, self._num_slots
            )
            hidden, cache = self._apply(params, part, positions, rows.cache)
            last = jnp.maximum(left - 1, 0)[:, None, None]
            logits = self._logits(
                params, jnp.take_along_axis(hidden, last, axis=1)[:, 0]
            )
            logits = jnp.where((left > 0)[:, None], logits, rows.logits)
            return i + 1, Rows(cache, rows.length + left, logits)

        start = (jnp.int32(0), rows)
        _, rows = jax.lax.while_loop(lambda c: c[0] < num_chunks, read, start)
        return self._constrain(rows)

    def _decode(self, params, rows: Rows, keys, active, budget):
        """Lets active rows write until each has stopped, ended or run out.

        Args:
            params: from `place`.
            rows: their state; its buffers are reused.
            keys: [B] row keys; the draw at position p uses fold_in(key, p).
            active: [B] bool, the rows that write.
            budget: [B] int32 tokens each may write, at most `max_turn_tokens`.

        Returns:
            The rows' new state and the Turn they wrote.
        """
        num_rows = len(active)
        row = jnp.arange(num_rows)
        matched = len(self._stop_table) - 1
        turn = Turn(
            jnp.zeros((num_rows, self._max_turn_tokens), jnp.int32),
            jnp.zeros((num_rows, self._max_turn_tokens), jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
        )

        def write(carry):
            rows, turn, state, active = carry
            drawn = jax.vmap(jax.random.fold_in)(keys, rows.length)
            tokens, logp = sample(
                rows.logits, drawn, temperature=self._temperature, top_p=self._top_p
            )
            slot = jnp.where(active, turn.count, self._max_turn_tokens)
            count = turn.count + active
            turn = Turn(
                turn.tokens.at[row, slot].set(tokens, mode="drop"),
                turn.logp.at[row, slot].set(logp, mode="drop"),
                count,
            )
            state = jnp.where(active, self._stop_table[state, tokens], state)
            # The token that ends a turn is read too: the cache holds all that was
            # written.
            position = jnp.where(active, rows.length, self._num_slots)
            hidden, cache = self._apply(
                params, tokens[:, None], position[:, None], rows.cache
            )
            logits = jnp.where(
                active[:, None], self._logits(params, hidden[:, 0]), rows.logits
            )
            rows = Rows(cache, rows.length + active, logits)
            ended = (state == matched) | self._is_eos[tokens] | (count >= budget)
            return rows, turn, state, active & ~ended

        start = (rows, turn, jnp.zeros(num_rows, jnp.uint8), active & (budget > 0))
        rows, turn, _, _ = jax.lax.while_loop(lambda c: jnp.any(c[3]), write, start)
        return self._constrain(rows), turn

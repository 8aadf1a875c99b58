"""The values that pass between the scheduler on the host and the sampler on the device.

Dimensions: B rows, Q prompts, P prompt tokens, E rows extended or admitted in one call,
O observation tokens, N tokens per turn, V vocabulary, n pages of the longest row. Row
index B is padding: it refers to no row.
"""

from typing import NamedTuple, Protocol

import jax
import numpy as np

from rsearch.models.attention.cached import Cache
from rsearch.models.attention.pages import Pages
from rsearch.types import Params


class Context(NamedTuple):
    """The tokens that rows have read and written, as held on the device.

    Attributes:
        cache: keys and values of the first `length` tokens of each row, in pages if the
            rows share them.
        length: [B] int32, number of tokens so far.
        logits: [B, V] float32 logits of the next token.
    """

    cache: Cache | Pages
    length: jax.Array
    logits: jax.Array


class Turn(NamedTuple):
    """The turns that B rows are writing.

    Attributes:
        tokens: [B, N] int32; the first `count` of a row are valid.
        logp: [B, N] float32 log-probability under the distribution sampled from, unless
            `DecodeRequest.unscaled_logp` is set for the row.
        count: [B] int32, number of tokens so far.
        state: [B] uint8, state of the stop-string automaton.
        active: [B] bool, rows whose turn has not ended.
    """

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array
    state: jax.Array
    active: jax.Array


class Rows(NamedTuple):
    """The state of B conversations on the device."""

    context: Context
    turn: Turn


class DecodeRequest(NamedTuple):
    """The inputs of one call of `decode`, including when it returns.

    Attributes:
        names: [B, 2] uint32, the numbers that determine a row's random draws.
        begins: [B] bool, rows that start a turn; the others continue theirs.
        budget: [B] int32 tokens of each turn, at most N.
        min_finished: the call returns when this many turns, or all, have ended in it.
        max_steps: the most tokens that a row writes in this call.
        table: [B, n] int32 pages of each row; None if rows share no pages.
        queue: [B] int32, all rows in order of decoding priority, see `queue_size`. None
            means row order.
        stop_table: [S, V] uint8 from `stop_strings.StopSets`, if rows have different
            stop strings; None means the sampler's.
        stop_states: [B] uint8, the table's state in which each row's turn starts.
        unscaled_logp: [B] bool, rows whose log-probabilities are at temperature 1 and
            over all tokens, however tokens are drawn; None means no row.
    """

    names: jax.Array | np.ndarray
    begins: jax.Array | np.ndarray
    budget: jax.Array | np.ndarray
    min_finished: jax.Array | int
    max_steps: jax.Array | int
    table: jax.Array | np.ndarray | None = None
    queue: jax.Array | np.ndarray | None = None
    stop_table: jax.Array | np.ndarray | None = None
    stop_states: jax.Array | np.ndarray | None = None
    unscaled_logp: jax.Array | np.ndarray | None = None


class SamplerLike(Protocol):
    """The functions that a scheduler calls; most of them take rows and return rows.

    A `Rows` passed to `admit`, `extend` or `decode` must not be used again: its buffers
    are reused. Implemented by `Sampler`, by `multihost.MultihostSampler`, and by a
    scripted fake in the tests.

    Attributes:
        page_tokens: tokens per page.
    """

    page_tokens: int

    @property
    def row_pages(self) -> int:
        """Return n, the number of pages of the longest row."""

    @property
    def num_shards(self) -> int:
        """Return the number of shards that the devices split rows into."""

    def row_shards(self, num_rows: int) -> int:
        """Return the number of shards of B rows; 1 if B is not divisible."""

    def queue_size(self, num_rows: int) -> int:
        """Return the most of B rows that decode in one step."""

    def all_gather(self, number: int) -> np.ndarray:
        """Return [hosts] numbers, one from each host that shares these functions."""

    def report_failure(self) -> None:
        """Tell the hosts that share the compiled functions that this one has failed."""

    def place_params(self, params: Params):
        """Return the parameters in the form that the other functions take."""

    def empty(self, num_rows: int, num_pages: int = 0) -> Rows:
        """Return B rows without a conversation; they share the pages, if any."""

    def prefill(self, params: Params, tokens: np.ndarray, count: np.ndarray) -> Context:
        """Return the context of [Q, P] prompts, of which `count` [Q] ids are valid."""

    def admit(
        self,
        rows: Rows,
        prompts: Context,
        slots: np.ndarray,
        source: np.ndarray,
        table: np.ndarray | None = None,
    ) -> Rows:
        """Return the rows after row slots[i] has started from prompt source[i]."""

    def extend(
        self,
        params: Params,
        rows: Rows,
        slots: np.ndarray,
        tokens: np.ndarray,
        count: np.ndarray,
        table: np.ndarray | None = None,
    ) -> Rows:
        """Return the rows after row slots[i] has read count[i] ids of tokens[i]."""

    def decode(
        self, params: Params, rows: Rows, key: jax.Array, request: DecodeRequest
    ) -> Rows:
        """Return the rows after some steps of decoding."""

    def turns_on_host(self, rows: Rows) -> Turn:
        """Return the turns of this host's rows as NumPy arrays."""

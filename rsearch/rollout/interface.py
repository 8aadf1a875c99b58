"""The values that pass between the scheduler on the host and the sampler on the device.

Dimensions: B rows, Q prompts, P prompt tokens, E rows that are extended or admitted in
one call, O tokens that they read, N tokens of a turn, V vocabulary, n pages of the
longest row. A row index of B is padding: it names no row.
"""

from typing import NamedTuple, Protocol

import jax
import numpy as np

from rsearch.models.attention.cached import Cache
from rsearch.models.attention.pages import Pages
from rsearch.types import Params


class Context(NamedTuple):
    """The tokens that rows have read and written, as the device holds them.

    Attributes:
        cache: keys and values of the first `length` tokens of each row; in pages, if
            the rows share a number of them.
        length: [B] int32 tokens so far.
        logits: [B, V] float32 for the token that comes next.
    """

    cache: Cache | Pages
    length: jax.Array
    logits: jax.Array


class Turn(NamedTuple):
    """The turns that B rows are writing.

    Attributes:
        tokens: [B, N] int32; the first `count` of a row are valid.
        logp: [B, N] float32 log-probability under the distribution sampled from, or as
            `DecodeRequest.unscaled_logp` says.
        count: [B] int32.
        state: [B] uint8 of the stop strings' automaton.
        active: [B] bool, the rows whose turn has not ended.
    """

    tokens: jax.Array
    logp: jax.Array
    count: jax.Array
    state: jax.Array
    active: jax.Array


class Rows(NamedTuple):
    """The device's state of B conversations."""

    context: Context
    turn: Turn


class DecodeRequest(NamedTuple):
    """The rows that one call of `decode` runs, and when it returns.

    Attributes:
        names: [B, 2] uint32, the numbers that a row's random draws follow from.
        begins: [B] bool, the rows that begin a turn; others go on with theirs.
        budget: [B] int32 tokens of each turn, at most N.
        min_finished: the call returns when this many turns have ended in it, or all.
        max_steps: tokens that a row writes in this call, at most.
        table: [B, n] int32 pages of each row; None where rows share none.
        queue: [B] int32 all rows, the first to decode first; see `queue_size`. None is
            the order of the rows.
        stop_table: [S, V] uint8 of `stop_strings.StopSets`, where rows stop at
            different strings; None is the sampler's.
        stop_states: [B] uint8 the state of the table that a row's turn begins in.
        unscaled_logp: [B] bool, the rows whose log-probabilities are at temperature 1
            and of all tokens, however tokens are drawn; None is none.
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
    """The functions that a scheduler calls; rows go in and come out of most of them.

    A `Rows` that was passed must not be used again: its buffers are reused.
    Implemented by `Sampler`, by `multihost.MultihostSampler`, and by a scripted fake in
    the tests.

    Attributes:
        page_tokens: tokens of a page.
    """

    page_tokens: int

    @property
    def row_pages(self) -> int:
        """Return n, the pages of the longest row."""

    @property
    def num_shards(self) -> int:
        """Return the number of shards that the devices cut rows into."""

    def row_shards(self, num_rows: int) -> int:
        """Return the number of shards of B rows; 1 where they do not divide."""

    def queue_size(self, num_rows: int) -> int:
        """Return how many of B rows decode in a step, at most."""

    def all_gather(self, number: int) -> np.ndarray:
        """Return [hosts] the number of each host that shares the compiled functions."""

    def report_failure(self) -> None:
        """Tell the hosts that share the compiled functions that this one has failed."""

    def place_params(self, params: Params):
        """Return the parameters as the other functions take them."""

    def empty(self, num_rows: int, num_pages: int = 0) -> Rows:
        """Return B rows without a conversation; with pages, these are shared."""

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
        """Return the rows, where row slots[i] begins with prompt source[i]."""

    def extend(
        self,
        params: Params,
        rows: Rows,
        slots: np.ndarray,
        tokens: np.ndarray,
        count: np.ndarray,
        table: np.ndarray | None = None,
    ) -> Rows:
        """Return the rows, where row slots[i] has read count[i] of tokens[i]."""

    def decode(
        self, params: Params, rows: Rows, key: jax.Array, request: DecodeRequest
    ) -> Rows:
        """Return the rows after some steps of decoding."""

    def turns_on_host(self, rows: Rows) -> Turn:
        """Return the turns of this host's rows as NumPy arrays."""

"""Hold the compiled functions that a stage trains with."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rsearch.learn.batch import Batch, to_micro_batches
from rsearch.learn.packing import pack_micro_batches
from rsearch.learn.train_state import TrainState
from rsearch.learn.update import mean_loss, put
from rsearch.models.sharding import num_shards, platform_of
from rsearch.types import Params


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one stage's training.

    Attributes:
        mesh: mesh of the devices that train.
        score: (params, base, batch) -> [M, b, T] log-probabilities under a policy.
        update: (state without critic, base, batch, memory=None) -> (state, metrics) of
            the policy, see `make_update`.
        score_values: like `score`, for the value model; None without one.
        update_values: (critic's state, base, batch) -> (state, metrics); None without a
            value model.
        merge: (dtype, donates) -> compiled (base, adapters) -> weights; None if all
            parameters are trained.
        decode_dtype: dtype of the weights used for decoding.
        state_shapes: shapes and shardings of a TrainState, to restore a checkpoint.
        fresh_state: params -> the TrainState that a stage starts with.
    """

    mesh: Mesh
    score: Callable
    update: Callable
    score_values: Callable | None
    update_values: Callable | None
    merge: Callable | None
    decode_dtype: jnp.dtype
    state_shapes: TrainState
    fresh_state: Callable

    def base_of(self, params: Params):
        """Return the frozen weights that a stage's adapters are added to, or None.

        They are the weights that the stage starts from. They are also the reference of
        its KL, so that no second copy is held.
        """
        return None if self.merge is None else params

    def for_decoding(self, params: Params, base: Params | None):
        """Return the weights used for decoding: adapters are merged into their base."""
        if base is None:
            return params
        return self.merge(jnp.dtype(self.decode_dtype), False)(base, params)

    def final_weights(self, params: Params, base: Params | None):
        """Return the stage's final weights: LoRA merged into the base, float32.

        The base must not be used again, since its buffers are donated.
        """
        if base is None:
            return params
        return self.merge(jnp.dtype(jnp.float32), True)(base, params)

    def put(self, batch: Batch, micro_batch: int) -> Batch:
        """Return rows on the devices, as packed micro-batches of `micro_batch` rows."""
        batch = pack_micro_batches(
            to_micro_batches(batch, micro_batch),
            multiple=num_shards(self.mesh),
            joins_rows=platform_of(self.mesh) == "cpu",
        )
        return put(batch, self.mesh)

    def imitation_loss(
        self, params: Params, base: Params | None, batch: Batch, *, kind: str
    ) -> tuple[float, int]:
        """Return the imitation loss of rows without an update; see `mean_loss`."""
        logp = self.score(params, base, batch)
        mean, size = jax.device_get(mean_loss(logp, batch, kind=kind))
        return float(mean), int(size)

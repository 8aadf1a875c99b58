"""The objects that the stages of a run share."""

import dataclasses
import pathlib

from jax.sharding import Mesh
from ml_collections import ConfigDict

from rsearch.models.decoder import Decoder
from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols.base import Protocol
from rsearch.rollout.conversation import Limits
from rsearch.types import GenerateFn, Question, SearchFn
from rsearch.world.world import World


@dataclasses.dataclass(frozen=True)
class ModelContext:
    """The objects that a stage's programs are compiled from.

    Attributes:
        config: of the run, or of one of its stages; locked and validated.
        mesh: devices.
        model: the policy's network.
        limits: budgets of a rollout.
        num_tokens: T, tokens of the longest conversation.
    """

    config: ConfigDict
    mesh: Mesh
    model: Decoder
    limits: Limits
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Setup(ModelContext):
    """The objects that all stages of a run share.

    Attributes:
        rollout_mesh: devices that roll out; the mesh where all devices do both.
        home: the run's directory, where "stage:..." is looked up; None without one.
        world: the embedded world, where the configuration names it.
        tokenizer, protocol: of the policy.
        source: the directory that its weights come from; None if they are random.
        search: finds passages for queries.
        train, dev: questions; those whose prompts are too long are left out of the
            first, and with config.eval.drop_long of both. Of the held-out ones the
            first config.eval.max_questions are kept.
        too_long: the held-out ones before the last whose prompts are too long.
        inputs: {name: fingerprint} of what the configuration names.
        judge: for reward terms that ask a judge.
        writer: writes the observations of the policy's protocol; None shows passages.
    """

    rollout_mesh: Mesh
    home: pathlib.Path | None
    world: World | None
    tokenizer: Tokenizer
    protocol: Protocol
    source: pathlib.Path | None
    search: SearchFn
    train: tuple[Question, ...]
    dev: tuple[Question, ...]
    too_long: tuple[Question, ...]
    inputs: dict[str, str]
    judge: GenerateFn | None
    writer: GenerateFn | None

"""Define the objects that the stages of a run share."""

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
    """The objects that determine a stage's compiled programs.

    Attributes:
        config: configuration of the run or of one of its stages; locked and validated.
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
        rollout_mesh: devices that roll out; equals `mesh` if all devices do both.
        home: the run's directory, where "stage:..." is looked up; None without one.
        world: the embedded world, if the configuration names it.
        tokenizer, protocol: the policy's tokenizer and protocol.
        source: the directory of the policy's weights; None if they are random.
        search: finds passages for queries.
        train, dev: questions to learn from, and held-out questions. Those with too long
            a prompt are dropped from train, and with config.eval.drop_long from dev
            too. Of dev only the first config.eval.max_questions are kept.
        too_long: held-out questions with too long a prompt, up to the last one in dev.
        inputs: {name: fingerprint} of the inputs that the configuration names.
        judge: the model for reward terms that call a judge; None without one.
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

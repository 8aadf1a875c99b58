"""Everything the stages of a run share."""

import dataclasses
import functools
import pathlib

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rsearch import files
from rsearch.build.parts import (
    budgets,
    fitting,
    has_world,
    load_judge,
    load_policy_tokenizer,
    open_search,
    policy_model,
    read_questions,
)
from rsearch.data.questions import fingerprint
from rsearch.data.world import World, make_world
from rsearch.models import huggingface, weights
from rsearch.models.decoder import Decoder, init_params
from rsearch.models.sharding import make_mesh, param_shardings
from rsearch.models.tokenizer import Tokenizer
from rsearch.protocols import PROTOCOLS, plain
from rsearch.protocols.base import Protocol
from rsearch.retrieval.engine import SearchEngine
from rsearch.rewards.group import check_terms
from rsearch.rollout.conversation import Limits
from rsearch.rules import validate
from rsearch.types import GenerateFn, Question


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all stages of a run share.

    Attributes:
        config: locked and validated.
        mesh: devices.
        world: the embedded one, where the configuration names it.
        tokenizer, protocol, model: of the policy.
        source: the directory its weights come from; None where they are random.
        search: passages for queries.
        train, dev: questions; those whose prompts are too long are left out of both.
            Of the held-out ones the first config.eval.max_questions are kept.
        num_long: how many held-out ones before the last were left out.
        inputs: {name: fingerprint} of what the configuration names.
        judge: for reward terms that ask one.
        limits: budgets of a rollout.
        num_tokens: T, tokens of the longest conversation.
    """

    config: ConfigDict
    mesh: Mesh
    world: World | None
    tokenizer: Tokenizer
    protocol: Protocol
    model: Decoder
    source: pathlib.Path | None
    search: SearchEngine
    train: tuple[Question, ...]
    dev: tuple[Question, ...]
    num_long: int
    inputs: dict[str, str]
    judge: GenerateFn | None
    limits: Limits
    num_tokens: int


def load_setup(config, *, say=lambda text: None, only_dev=False) -> Setup:
    """Everything that a configuration names, loaded and checked.

    Args:
        config: with the fields of configs/base.py; checked here before all else.
        say: called with a line on each part that takes a while.
        only_dev: leave the training questions out.

    Raises:
        ValueError: a value or a file that cannot be used.
    """
    _check_config(config)
    mesh = make_mesh(**config.mesh)
    world = make_world(seed=config.seed, **config.world) if has_world(config) else None
    source = None
    if config.model.source:
        source = huggingface.find_model(config.model.source)
    tokenizer = load_policy_tokenizer(config, world, source)
    protocol = plain.reworded(
        PROTOCOLS[config.protocol.name],
        user=config.protocol.instruction,
        system=config.protocol.system,
        invalid_message=config.protocol.invalid_message,
    )
    model = policy_model(config, tokenizer, source)
    limits, num_tokens = budgets(config, tokenizer, protocol, model.spec)
    say(f"model: {model.spec.num_params / 1e6:.3g} M parameters, {config.model.dtype}")
    search = open_search(config, world)
    say(f"retrieval: {len(search):,} passages, top {config.retrieval.top_k}")
    train = () if only_dev else read_questions(config, "train", world, say)
    train, _ = fitting(train, "train", protocol, tokenizer, limits, say)
    dev = read_questions(config, "dev", world, say)
    most = config.eval.max_questions
    dev, num_long = fitting(dev, "dev", protocol, tokenizer, limits, say, limit=most)
    if not dev:
        raise ValueError(
            "every held-out prompt is longer than config.rollout.max_prompt_tokens = "
            f"{limits.max_prompt_tokens}"
        )
    if only_dev:
        say(f"questions: {len(dev):,} held out")
    else:
        _check_enough(config, train)
        say(f"questions: {len(train):,} to learn from, {len(dev):,} held out")
    inputs = {"tokenizer": tokenizer.fingerprint, "retrieval": search.fingerprint}
    if not only_dev:
        inputs["data.train"] = fingerprint(train)
    if source is not None:
        weight_files = sorted(source.glob("*.safetensors"))
        digests = [f"{f.name} {files.sampled_digest(f)}" for f in weight_files]
        inputs["model.source"] = ", ".join(digests)
    return Setup(
        config=config,
        mesh=mesh,
        world=world,
        tokenizer=tokenizer,
        protocol=protocol,
        model=model,
        source=source,
        search=search,
        train=train,
        dev=dev,
        num_long=num_long,
        inputs=inputs,
        judge=None if only_dev else load_judge(config, mesh),
        limits=limits,
        num_tokens=num_tokens,
    )


def _check_enough(config, train):
    if "rl" in config.stages and len(train) < config.rl.questions_per_step:
        raise ValueError(
            f"config.data.train = {config.data.train!r} gives {len(train)} questions, "
            "fewer than config.rl.questions_per_step = "
            f"{config.rl.questions_per_step}"
        )


def _check_config(config) -> None:
    """Refuses what no run could use, before any file is read or made.

    Raises:
        ValueError: names the field, its value and what would be right.
    """
    validate(config, num_devices=jax.device_count())
    check_terms(config.reward, has_judge=bool(config.judge.source))
    if config.protocol.name not in PROTOCOLS:
        raise ValueError(
            f"config.protocol.name = {config.protocol.name!r}: must be one of "
            f"{', '.join(PROTOCOLS)}"
        )


def initial_params(setup: Setup):
    """The policy before training, float32, laid out over the mesh."""
    shapes = weights.param_shapes(setup.model.spec)
    shardings = param_shardings(shapes, setup.mesh)
    if setup.source is not None:
        return huggingface.load_params(
            setup.source, setup.model.spec, shardings=shardings
        )
    make = jax.jit(functools.partial(init_params, setup.model), out_shardings=shardings)
    return make(jax.random.key(setup.config.seed))

"""Everything the stages of a run share."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rsearch.config.fields import to_json
from rsearch.config.rules import validate
from rsearch.config.stage_plan import kinds, stage_configs
from rsearch.data.questions import fingerprint
from rsearch.hosts import processes
from rsearch.hosts.offload import check_host_memory
from rsearch.models.decoder import Decoder
from rsearch.models.sharding import make_mesh
from rsearch.models.tokenizer import Tokenizer
from rsearch.plan.costs import check_layout
from rsearch.protocols.base import Protocol
from rsearch.retrieval.engine import SearchEngine
from rsearch.retrieval.user import SIGNATURE
from rsearch.rewards.group import check_terms, needs_judge
from rsearch.rollout.conversation import Limits
from rsearch.runtime import files
from rsearch.setup.agents import load_agent
from rsearch.setup.beginnings import initial_weights
from rsearch.setup.parts import (
    apart,
    budgets,
    fitting,
    has_world,
    load_policy_tokenizer,
    open_search,
    policy_model,
    policy_protocol,
    read_questions,
)
from rsearch.text.extension import (
    check_callable,
    code_inputs,
    is_reference,
    load_reference,
)
from rsearch.types import GenerateFn, Question
from rsearch.world.pretrained import find_source
from rsearch.world.world import World, make_world


@dataclasses.dataclass(frozen=True)
class Frame:
    """What the programs of a stage are compiled from.

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
class Setup(Frame):
    """What all stages of a run share, beside what a Frame has.

    Attributes:
        home: the run's directory, where "stage:..." is looked up; None without one.
        world: the embedded one, where the configuration names it.
        tokenizer, protocol: of the policy.
        source: the directory its weights come from; None where they are random.
        search: passages for queries.
        train, dev: questions; those whose prompts are too long are left out of both.
            Of the held-out ones the first config.eval.max_questions are kept.
        num_long: how many held-out ones before the last were left out.
        inputs: {name: fingerprint} of what the configuration names.
        judge: for reward terms that ask one.
        writer: of the observations of the policy's protocol; None shows passages.
    """

    home: pathlib.Path | None
    world: World | None
    tokenizer: Tokenizer
    protocol: Protocol
    source: pathlib.Path | None
    search: SearchEngine
    train: tuple[Question, ...]
    dev: tuple[Question, ...]
    num_long: int
    inputs: dict[str, str]
    judge: GenerateFn | None
    writer: GenerateFn | None


class Shared:
    """Parts that several stages of a run have in common, each made once."""

    def __init__(self):
        self._made = {}

    def once(self, name, sections, make):
        """`make()`, or what it was when this part was last made from these sections."""
        key = name, tuple(map(to_json, sections))
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def load_setup(
    config,
    *,
    say=lambda text: None,
    only_dev=False,
    only_policy=False,
    home=None,
    shared=None,
    is_over=False,
) -> Setup:
    """Everything that a configuration names, loaded and checked.

    Args:
        config: with the fields of configs/base.py; checked here before all else.
        say: called with a line on each part that takes a while.
        only_dev: leave the training questions out, and the judge.
        only_policy: leave all questions out, for a policy that others ask.
        home: the run's directory, if "stage:..." is to mean a stage of it.
        shared: parts that other setups of the run have made; these are not said again.
        is_over: of a stage that seems to have ended: on one host the models beside the
            policy are loaded only if they are asked after all.

    Raises:
        ValueError: a value or a file that cannot be used.
    """
    _check_config(config)
    c, once = config, (shared or Shared()).once
    mesh = once("mesh", [c.mesh], lambda: make_mesh(**c.mesh))
    if c.model.offload:
        check_host_memory(mesh, f"config.model.offload = {c.model.offload}")
    world = None
    if has_world(c):
        seeded = ConfigDict({"seed": c.seed})
        world = once(
            "world", [seeded, c.world], lambda: make_world(seed=c.seed, **c.world)
        )
    source = None
    if c.model.source:
        source = find_source(c, c.model.source)
    tokenizer = load_policy_tokenizer(c, world, source)
    protocol = policy_protocol(c)
    model = policy_model(c, tokenizer, source)
    check_layout(c, model.spec)
    limits, num_tokens = budgets(c, tokenizer, protocol, model.spec)
    say(f"model: {model.spec.num_params / 1e6:.3g} M parameters, {c.model.dtype}")

    def searching():
        search = open_search(c, world)
        say(f"retrieval: {search}, top {c.retrieval.top_k}")
        return search

    def agent(name):
        sections = [c[name], c.model, c.mesh]
        # Hosts load together, and may not all come to ask.
        own = {"workdir": home, "is_late": is_over and processes.num_hosts() == 1}
        return once((name, is_over), sections, lambda: load_agent(c, name, mesh, **own))

    seeded = ConfigDict({"seed": c.seed})
    is_rewarded = needs_judge(c.reward) and "rl" in kinds(c) and not only_dev
    search = once("search", [c.retrieval, c.world, seeded], searching)
    only_dev = only_dev or only_policy
    train = () if only_dev else read_questions(c, "train", world, say, home)
    dev, num_long = (), 0
    if not only_policy:
        dev = read_questions(c, "dev", world, say, home)
    train = apart(train, dev, say, drops=c.data.decontaminate)
    train, _ = fitting(train, "train", protocol, tokenizer, limits, say)
    if not only_policy:
        most = c.eval.max_questions
        dev, num_long = fitting(
            dev, "dev", protocol, tokenizer, limits, say, limit=most
        )
        _check_questions(c, train, dev, only_dev, say)
    return Setup(
        config=c,
        home=None if home is None else pathlib.Path(home),
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
        inputs=_fingerprints(tokenizer, search, source, None if only_dev else train)
        | code_inputs(_references(c, only_dev=only_dev)),
        judge=agent("judge") if is_rewarded else None,
        writer=agent("writer"),
        limits=limits,
        num_tokens=num_tokens,
    )


def _fingerprints(tokenizer, search, source, train):
    """{name: fingerprint} of what a configuration names."""
    inputs = {"tokenizer": tokenizer.fingerprint, "retrieval": search.fingerprint}
    if train is not None:
        inputs["data.train"] = fingerprint(train)
    if source is not None:
        weight_files = sorted(source.glob("*.safetensors"))
        digests = [f"{f.name} {files.sampled_digest(f)}" for f in weight_files]
        inputs["model.source"] = ", ".join(digests)
    return inputs


def _references(c, *, only_dev: bool) -> list[str]:
    """Return the names in a configuration that may be of a user's functions."""
    references = [c.protocol.name, c.retrieval.engine]
    if not only_dev and "rl" in kinds(c):
        references += [settings.get("term", "") for settings in c.reward.values()]
    if not only_dev and "curate" in kinds(c):
        references.append(c.curate.method)
    return references


def _check_questions(config, train, dev, only_dev, say):
    """Refuses too few questions, and tells how many there are."""
    if not dev:
        raise ValueError(
            "every held-out prompt is longer than config.rollout.max_prompt_tokens = "
            f"{config.rollout.max_prompt_tokens}"
        )
    if only_dev:
        say(f"questions: {len(dev):,} held out")
        return
    if "rl" in kinds(config) and len(train) < config.rl.questions_per_step:
        raise ValueError(
            f"config.data.train = {config.data.train!r} gives {len(train)} questions, "
            "fewer than config.rl.questions_per_step = "
            f"{config.rl.questions_per_step}"
        )
    say(f"questions: {len(train):,} to learn from, {len(dev):,} held out")


def _check_config(config) -> None:
    """Refuses what no run could use, before any file is read or made.

    Raises:
        ValueError: names the field, its value and what would be right.
    """
    validate(config, num_devices=jax.device_count())
    check_names(config)


def check_names(config) -> None:
    """Refuses reward terms and a protocol that there are not, in any of the stages.

    Raises:
        ValueError: names the field, its value and what would be right.
    """
    _check_names(config)
    for stage, own in stage_configs(config):
        try:
            _check_names(own)
        except ValueError as error:
            raise ValueError(f"config.overrides.{stage}: {error}") from None


def _check_names(c):
    check_terms(c.reward, has_judge=bool(c.judge.source))
    protocol = policy_protocol(c)
    if "evidence" in c.eval.methods and protocol.evidence_tag is None:
        raise ValueError(
            "config.eval.methods names 'evidence', which only a protocol with evidence "
            f"has, such as 'r_search'; config.protocol.name = {c.protocol.name!r}"
        )
    for field, name, signature in (
        ("curate.method", c.curate.method, "(work) -> Chosen"),
        ("retrieval.engine", c.retrieval.engine, SIGNATURE),
    ):
        if is_reference(name):
            function = load_reference(f"config.{field}", name)
            check_callable(f"config.{field}", name, function, signature)


def initial_params(setup: Setup):
    """The policy before training, float32, laid out over the mesh."""
    seed = setup.config.seed
    return initial_weights(setup.model, setup.source, setup.mesh, seed)

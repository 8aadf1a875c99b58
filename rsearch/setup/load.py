"""Load everything that a configuration names."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rsearch.config.recipes import to_json, validate
from rsearch.config.stage_plan import (
    PARAGRAPHS,
    STAGE_PREFIX,
    WORLD,
    kind_of,
    kinds,
    stage_configs,
)
from rsearch.data.questions import questions_fingerprint
from rsearch.hosts import processes
from rsearch.hosts.offload import check_host_memory
from rsearch.methods.names import OTHER_METHODS, READER_METHODS, split_name
from rsearch.methods.table import check_methods, demanded_inputs, probes_of
from rsearch.models.sharding import all_devices, make_mesh
from rsearch.rewards.group import needs_judge
from rsearch.rollout.conversation import prompt_ids
from rsearch.runtime.files import expand
from rsearch.runtime.programs import keep_programs
from rsearch.setup.agents import check_endpoint, load_agent
from rsearch.setup.checks import check_layout, check_names
from rsearch.setup.context import Setup
from rsearch.setup.methods import make_unloaded_kit
from rsearch.setup.models import model_sources, searches_paragraphs, start_fingerprint
from rsearch.setup.policy import (
    has_world,
    load_policy_tokenizer,
    policy_model,
    policy_protocol,
    rollout_limits,
)
from rsearch.setup.preflight import check_machine
from rsearch.setup.questions import (
    decontaminate,
    drop_long_prompts,
    paragraph_reader,
    read_questions,
)
from rsearch.setup.search import check_index, open_paragraphs, open_search
from rsearch.text.extension import code_inputs
from rsearch.world.pretrained import find_source
from rsearch.world.world import World, make_world


class Shared:
    """Objects that several stages of a run share, each made once.

    Attributes:
        modules: users' modules that the run uses, see `code_inputs`.
    """

    def __init__(self):
        self._made, self.modules = {}, {}

    def memoise(self, name: str, sections: Sequence, make: Callable[[], Any]) -> Any:
        """Return `make()`, or its earlier result for the same name and sections."""
        key = name, tuple(map(to_json, sections))
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def external_corpus_overrides(c: ConfigDict, index: str | None) -> dict[str, str]:
    """Return the {field: value} that a world run needs to search another corpus.

    Args:
        c: configuration of an evaluation, which reads no training data.
        index: index that only this evaluation names; its corpus replaces the world.
    """
    corpus, changes = c.retrieval.corpus, {}
    if corpus == WORLD and index:
        corpus = changes["retrieval.corpus"] = ""
    if corpus in (WORLD, PARAGRAPHS):
        return changes
    for name, other in (("data.train", c.data.dev), ("sft.demonstrations", "")):
        section, _, field = name.partition(".")
        if c[section][field].partition(":")[0] == WORLD:
            changes[name] = other
    return changes


def check_inputs(
    config: ConfigDict, *, home: str | pathlib.Path, shared: Shared
) -> None:
    """Refuse an evaluation whose fields, questions, index or methods cannot be used.

    No model or index is opened: this is an early check of an evaluation that may run
    only hours later.

    Args:
        home: see `load_setup`.
        shared: see `load_setup`, which reuses the world that is made here.

    Raises:
        ValueError: a value or a file cannot be used.
    """
    validate(config, num_devices=jax.device_count())
    check_names(config)
    check_index(config)
    world = _make_world(config, shared) if has_world(config) else None
    questions = read_questions(config, "dev", world, lambda line: None, home)
    _check_methods(config, questions, world)


def check_local_files(config: ConfigDict, log: Callable[[str], None]) -> None:
    """Check a run's questions and indices, as far as they are on this machine.

    A run is often planned on a machine that does not have its data.

    Args:
        log: called with a line about files that are not here, and about records that
            are left out.

    Raises:
        ValueError: a file cannot be used, or has too few questions for a step; or no
            index is named although the run needs one.
    """
    missing, checked = {}, set()
    for stage, c in stage_configs(config):
        for split in ("train", "dev"):
            source = c.data[split]
            if source.startswith((f"{WORLD}:", STAGE_PREFIX)):
                continue
            if not expand(source).exists():
                missing[f"config.data.{split} = {source!r}"] = None
            elif (source, split, kind_of(stage)) not in checked:
                checked.add((source, split, kind_of(stage)))
                questions = read_questions(c, split, None, log)
                if split == "train" and kind_of(stage) == "rl":
                    _check_number(c, questions)
        for field in ("demonstrations", "chats") if kind_of(stage) == "sft" else ():
            source = c.sft[field]
            is_made = source in ("", WORLD) or source.startswith(STAGE_PREFIX)
            if not is_made and not expand(source).exists():
                missing[f"config.sft.{field} = {source!r}"] = None
        r = c.retrieval
        if r.index and not (r.engine or r.url or expand(r.index).exists()):
            missing[f"config.retrieval.index = {r.index!r}"] = None
        else:
            check_index(c)
    if missing:
        log(f"not on this machine, and hence not checked: {'; '.join(missing)}")


def load_setup(
    config: ConfigDict,
    *,
    log: Callable[[str], None] = lambda text: None,
    only_dev: bool = False,
    only_policy: bool = False,
    home: str | pathlib.Path | None = None,
    shared: Shared | None = None,
    is_over: bool = False,
    search: Callable | None = None,
    offline: bool = False,
    later: Sequence[ConfigDict] = (),
    choose_rows: Callable | None = None,
) -> Setup:
    """Load and check everything that a configuration names.

    Args:
        config: a configuration with the fields of configs/base.py; it is validated
            before anything else.
        log: called with a line about each part that takes a while to load.
        only_dev: whether to leave out the training questions and the judge.
        only_policy: whether to leave out all questions, for a policy that users ask.
        home: the run's directory, if "stage:..." is to mean a stage of it.
        shared: objects that other setups of the run have made; they are not reported
            to `log` again.
        is_over: whether the stage seems to have ended. On a single host, the models
            other than the policy are then loaded on first use.
        search: a user's SearchFn to use in place of the configuration's engine.
        offline: whether not to contact services and endpoints, which may be down.
        later: configurations of stages that will be loaded later, whose endpoints are
            called and whose users' modules are read now.
        choose_rows: (configuration, shape of the policy, rollout mesh) -> the
            configuration with a number in place of rollout.max_concurrent = 0.

    Raises:
        ValueError: a value or a file cannot be used.
    """
    validate(config, num_devices=jax.device_count())
    check_names(config)
    check_machine(config, home=home, log=log)
    keep_programs()
    shared = shared or Shared()
    c, memoise = config, shared.memoise
    only_dev = only_dev or only_policy
    asks_judge = _asks_judge(c, only_dev)

    # Endpoints are checked before anything heavy is loaded, not after hours of a run.
    if not (is_over or offline):
        _check_endpoints(c, shared, only_dev=only_dev, only_policy=only_policy)
        for stage_config in later:
            _check_endpoints(stage_config, shared)

    # Devices and the embedded world.
    rollout_devices = ConfigDict({"devices": c.rollout.devices})
    mesh, rollout_mesh = memoise(
        "meshes", [c.mesh, rollout_devices], lambda: _make_meshes(c)
    )
    if c.model.offload:
        check_host_memory(mesh, f"config.model.offload = {c.model.offload}")
    seed = ConfigDict({"seed": c.seed})
    world = _make_world(c, shared) if has_world(c) else None

    # The policy. Its limits are checked before anything large is read.
    source = find_source(c, c.model.source) if c.model.source else None
    tokenizer = memoise(
        ("tokenizer", source),
        [c.tokenizer, seed, c.world],
        lambda: load_policy_tokenizer(c, world, source),
    )
    protocol = policy_protocol(c)
    model = policy_model(c, tokenizer, source)
    check_layout(c, model.spec)
    if choose_rows is not None:
        c = choose_rows(c, model.spec, rollout_mesh)
    limits, num_tokens = rollout_limits(c, tokenizer, protocol, model.spec)

    def start_reading(field, source, find):
        start = functools.partial(start_fingerprint, field, find)
        return memoise(("fingerprint", field, source), [seed, c.world], start)

    # Weights take the longest: they are read while all else is loaded.
    pending = []
    if source is not None:
        pending.append(start_reading("model.source", c.model.source, lambda: source))
    log(f"model: {model.spec.num_params / 1e6:.3g} M parameters, {c.model.dtype}")

    # The search engine.
    def log_search(engine):
        log(f"retrieval: {engine}, top {c.retrieval.top_k}")
        return engine

    asks_corpora = searches_paragraphs(c) and only_dev and not only_policy
    engine = None
    if not asks_corpora:  # those corpora are made from the questions, below
        engine = memoise(
            ("search", id(search)),
            [c.retrieval, c.world, seed],
            lambda: log_search(open_search(c, world, search, offline=offline)),
        )

    # The questions. Most stages have the same, and tokenizing them is slow.
    count_tokens = memoise(
        ("prompt tokens", source),
        [c.protocol, c.tokenizer, seed, c.world],
        lambda: functools.cache(
            lambda text: len(prompt_ids(tokenizer, protocol, protocol.messages(text)))
        ),
    )
    drop_long = functools.partial(
        drop_long_prompts,
        count_tokens=count_tokens,
        max_tokens=limits.max_prompt_tokens,
        log=log,
    )
    train, dev, too_long = (), (), ()
    if not only_policy:
        if not only_dev:
            train = read_questions(c, "train", world, log, home)
        held_out = read_questions(c, "dev", world, log, home)
        train = decontaminate(train, held_out, log, drops=c.data.decontaminate)
        train, _ = drop_long(train, "train")
        dev, too_long = _held_out_questions(c, held_out, drop_long)
        if not only_dev and "rl" in kinds(c):
            _check_number(c, train)
        learnt = "" if only_dev else f"{len(train):,} to learn from, "
        log(f"questions: {learnt}{len(dev):,} held out")
        _check_methods(c, dev, world)
        if asks_corpora:
            paragraphs_of = paragraph_reader(c, world)
            engine = log_search(open_paragraphs(c, dev, held_out, paragraphs_of))

    # The models other than the policy. Several hosts load them jointly, never lazily.
    def make_agent(name):
        is_lazy = is_over and processes.num_hosts() == 1
        return memoise(
            (name, is_over),
            [c.models[name], c.model, c.mesh, rollout_devices],
            lambda: load_agent(c, name, rollout_mesh, workdir=home, is_lazy=is_lazy),
        )

    judge = make_agent("judge") if asks_judge else None
    writer = make_agent("writer")

    # All inputs that results depend on. A stage that is over may never call its models,
    # so they are not downloaded just for their fingerprints.
    sources_by_field = model_sources(c, only_dev=only_dev, asks_judge=asks_judge)
    pending += [
        start_reading(field, name, functools.partial(find_source, c, name))
        for field, name in sources_by_field.items()
        if not is_over or pathlib.Path(name).expanduser().is_dir()
    ]
    inputs = {"tokenizer": tokenizer.fingerprint, "retrieval": engine.fingerprint}
    if not only_dev:
        inputs["data.train"] = questions_fingerprint(train)
    for wait in pending:
        inputs |= wait()
    if not only_policy:
        control_tokens = tokenizer.control_tokens()
        inputs |= demanded_inputs(c.eval.methods, control_tokens, dev)
    for stage_config in later:  # their code may be edited before they are loaded
        code_inputs(_references(stage_config, only_dev=False), shared.modules)
    inputs |= code_inputs(_references(c, only_dev=only_dev), shared.modules)
    return Setup(
        config=c,
        home=None if home is None else pathlib.Path(home),
        mesh=mesh,
        rollout_mesh=rollout_mesh,
        world=world,
        tokenizer=tokenizer,
        protocol=protocol,
        model=model,
        source=source,
        search=engine,
        train=train,
        dev=dev,
        too_long=too_long,
        inputs=inputs,
        judge=judge,
        writer=writer,
        limits=limits,
        num_tokens=num_tokens,
    )


def _held_out_questions(c, held_out, drop_long):
    """Return the questions to evaluate, and those of them with prompts too long."""
    dev, too_long = drop_long(
        held_out,
        "dev",
        limit=c.eval.max_questions,
        draw_seed=c.eval.draw_seed,
        are_kept=not c.eval.drop_long,
    )
    if {q.id for q in dev} <= {q.id for q in too_long}:
        raise ValueError(
            "every held-out prompt is longer than config.rollout.max_prompt_tokens "
            f"= {c.rollout.max_prompt_tokens}"
        )
    return dev, too_long


def _make_meshes(c: ConfigDict) -> tuple[Mesh, Mesh]:
    """Return the mesh of the devices that learn, and of those that roll out.

    Models that are called during rollouts, such as a judge, are on the second. The two
    are the same mesh unless the last config.rollout.devices devices only roll out.
    """
    if not c.rollout.devices:
        mesh = make_mesh(**c.mesh)
        return mesh, mesh
    if processes.num_hosts() > 1:
        raise ValueError(
            f"config.rollout.devices = {c.rollout.devices}: with several hosts all "
            "devices learn and roll out; must be 0"
        )
    devices = all_devices()
    learning, sampling = np.split(devices, [-c.rollout.devices])
    return (
        make_mesh(**c.mesh, devices=learning),
        make_mesh(tensor=c.mesh.tensor, devices=sampling),
    )


def _make_world(c, shared) -> World:
    """Return the embedded world, made once per seed and settings."""
    sections = [ConfigDict({"seed": c.seed}), c.world]
    return shared.memoise("world", sections, lambda: make_world(seed=c.seed, **c.world))


def _asks_judge(c, only_dev) -> bool:
    """Return whether a setup of this configuration calls the judge of rewards."""
    return needs_judge(c.reward) and "rl" in kinds(c) and not only_dev


def _check_endpoints(c, shared, *, only_dev=False, only_policy=False) -> None:
    """Call each endpoint that a setup of this configuration will call, once."""
    for name in _asked_models(c, only_dev, only_policy):
        probes = ()
        if name == "subject":
            probes = probes_of(c.eval.methods, has_scorer=bool(c.eval.scored_by))
        shared.memoise(
            f"endpoint of {name}",
            [c.models[name], ConfigDict({"probes": repr(probes)})],
            functools.partial(check_endpoint, c, name, probes),
        )


def _asked_models(c, only_dev, only_policy) -> list[str]:
    """Return the roles of the models other than the policy that are called."""
    evaluates = only_dev and not only_policy
    methods = c.eval.methods if evaluates else ()
    is_asked = {
        "judge": _asks_judge(c, only_dev),
        "rewriter": bool(c.rl.memorise_coef) and "rl" in kinds(c) and not only_dev,
        "writer": True,
        "answerer": only_dev,
        "reader": any(method in READER_METHODS for method in methods),
        "eval_judge": evaluates,
        "subject": any(method not in OTHER_METHODS for method in methods),
    }
    return [name for name, is_needed in is_asked.items() if is_needed]


def _check_methods(c, questions, world) -> None:
    """Refuse settings of methods that would end an evaluation when it reaches them."""
    kit = make_unloaded_kit(c, paragraph_reader(c, world))
    check_methods(c.eval.methods, questions, kit)


def _references(c, *, only_dev: bool) -> list[str]:
    """Return the values in a configuration that may name a user's functions."""
    references = [c.protocol.name, c.retrieval.engine, *c.protocol.tools]
    references += [split_name(method)[0] for method in c.eval.methods]
    if not only_dev and "rl" in kinds(c):
        references += [settings.get("term", "") for settings in c.reward.values()]
        references.append(c.rl.loss)
    if not only_dev and "curate" in kinds(c):
        references.append(c.curate.method)
    return references


def _check_number(c, train):
    """Refuse fewer questions than an RL step needs."""
    if len(train) < c.rl.questions_per_step:
        raise ValueError(
            f"config.data.train = {c.data.train!r} gives {len(train)} questions, "
            f"fewer than config.rl.questions_per_step = {c.rl.questions_per_step}"
        )

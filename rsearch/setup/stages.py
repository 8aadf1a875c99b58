"""Make the arguments of stages and evaluation from a run's Setup."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

from rsearch.hosts import processes
from rsearch.retrieval.wrap import wrap_search
from rsearch.rewards.group import needs_judge, reward_groups
from rsearch.rollout.health import search_health
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.runtime.journal import AppendLog
from rsearch.setup.agents import load_agent, load_subject, recorded_agent
from rsearch.setup.context import Setup
from rsearch.setup.learners import make_trainer
from rsearch.setup.methods import make_kit, make_local_model
from rsearch.setup.rollouts import make_host, make_rollouts
from rsearch.setup.search import open_encoder
from rsearch.types import GenerateFn, Group

NUM_SEEDS = 2**31  # number of values that config.seed can have


def rl_parts(setup: Setup, folder: pathlib.Path) -> dict:
    """Return the fields of an RLStage except its name, evaluation and memory."""
    c = setup.config
    setup = record_services(setup, folder)
    rollouts = make_rollouts(
        setup,
        make_host(setup),
        temperature=c.rollout.temperature,
        top_p=c.rollout.top_p,
        group_size=c.rollout.group_size,
        is_step=True,
    )
    return dict(
        config=c,
        folder=folder,
        trainer=make_trainer(setup, "rl"),
        rollouts=rollouts,
        score=make_score(setup),
        health=measure_health(setup),
        questions=setup.train,
        num_tokens=setup.num_tokens,
        inputs=setup.inputs,
    )


def make_score(setup: Setup) -> Callable:
    """Return `reward_groups` bound to the recipe's terms, protocol and judge."""
    return functools.partial(
        reward_groups,
        terms=setup.config.reward.to_dict(),
        protocol=setup.protocol,
        judge=setup.judge,
    )


def measure_health(setup: Setup) -> Callable[[Sequence[Group]], dict]:
    """Return `search_health` bound to the run's protocol and its world, if any."""
    hops = {} if setup.world is None else setup.world.hops
    return functools.partial(
        search_health,
        tags=setup.protocol.observation_tags(),
        titles={name: {hop.subject for hop in plan} for name, plan in hops.items()},
    )


def record_services(setup: Setup, folder: pathlib.Path) -> Setup:
    """Return a copy of `setup` whose service calls are cached in the stage's journals.

    A service may change its answers at any time; from the journals, a resumed run sees
    the same replies.
    """
    c, services = setup.config, {}
    if c.retrieval.url:
        journal = AppendLog(folder, "searches")
        services["search"] = wrap_search(setup.search, journal=journal)
    for name in ("judge", "writer"):
        generate = getattr(setup, name)
        if generate is not None:
            services[name] = recorded_agent(c, name, generate, folder)
    return dataclasses.replace(setup, **services)


def load_rewriter(
    setup: Setup, folder: pathlib.Path, *, is_over: bool = False
) -> GenerateFn:
    """Load the model that rewrites what a stage memorises.

    Args:
        folder: the stage's directory, whose journal caches the replies of a service.
        is_over: see `load_setup`.
    """
    rewrite = load_agent(
        setup.config, "rewriter", setup.mesh, workdir=setup.home, is_lazy=is_over
    )
    return recorded_agent(setup.config, "rewriter", rewrite, folder)


def memory_settings(setup: Setup) -> dict:
    """Return the arguments of a Memory other than its rewriting model and folder."""
    c = setup.config
    return dict(
        host=make_host(setup),
        num_rows=c.rl.memorise_rows,
        seed=c.seed,
        prompt=c.protocol.rewrite,
        correct=dict(c.reward.get("answer_cover_em", {})),
    )


def data_parts(setup: Setup) -> dict:
    """Return the fields of a DataStage except its name, folder and parameters."""
    return dict(
        config=setup.config,
        questions=setup.train,
        protocol=setup.protocol,
        tokenizer=setup.tokenizer,
        limits=setup.limits,
        num_tokens=setup.num_tokens,
        max_context=setup.model.spec.max_context,
        world=setup.world,
        search=setup.search,
        open_encoder=functools.partial(open_encoder, setup.config),
        make_host=functools.partial(make_host, setup),
        make_rollouts=functools.partial(make_rollouts, setup),
    )


def evaluation_parts(setup: Setup) -> dict:
    """Return the arguments of an Evaluator."""
    c = setup.config
    sampler = {"temperature": c.eval.temperature, "top_p": c.eval.top_p}
    samples = {}
    if c.eval.temperature or c.eval.samples * c.eval.seeds > 1:
        seeds = [(c.seed + i) % NUM_SEEDS for i in range(c.eval.seeds)]
        samples = {"samples": c.eval.samples, "seeds": seeds}

    def make_engine() -> RolloutEngine:
        return make_rollouts(
            setup, make_host(setup), **sampler, group_size=c.eval.samples
        )

    def make_model():
        if not c.models.subject.source:
            return make_local_model(setup)
        scorer = make_local_model(setup) if c.eval.scored_by else None
        return load_subject(c, scorer=scorer)

    return dict(
        config=c,
        questions=setup.dev,
        too_long=setup.too_long,
        search=setup.search,
        make_engine=make_engine,
        make_model=make_model,
        kit=make_kit(setup),
        made_from=lambda: [setup.inputs, processes.program_versions()],
        load_model=functools.partial(
            load_agent, c, mesh=setup.mesh, workdir=setup.home
        ),
        health=measure_health(setup),
        score=None if needs_judge(c.reward) else make_score(setup),
        inputs=setup.inputs,
        sampling=sampler | samples,
    )

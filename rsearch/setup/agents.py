"""Load the models other than the policy: judge, rewriter, writer, and evaluation's.

Each is a GenerateFn, whose caller cannot tell where the model runs. A section of the
configuration (config.models, see configs/base.py) names its source: a Hugging Face
directory or hub id, a small model of the embedded world ("world:<name>"), the model
that a stage of the same run has trained ("stage:<name>"), or the URL of an endpoint.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rsearch.config.stage_plan import STAGE_PREFIX, URLS
from rsearch.llm.endpoint import remote_generator
from rsearch.llm.local import local_generator
from rsearch.llm.remote_model import RemoteModel
from rsearch.llm.requests import Request, Scorer
from rsearch.models.decoder import Decoder, param_shapes
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.families import read_spec
from rsearch.models.sharding import own_mesh, param_shardings
from rsearch.models.tokenizer import load_tokenizer
from rsearch.runtime import checkpoint
from rsearch.runtime.journal import AppendLog
from rsearch.runtime.recorded import record_replies
from rsearch.runtime.workdir import read_config
from rsearch.setup.policy import load_policy_tokenizer, policy_model
from rsearch.setup.weights import initial_weights, restored_weights
from rsearch.types import GenerateFn
from rsearch.world.pretrained import find_source
from rsearch.world.world import WORLD, make_world

STAGE_SECTIONS = ("model", "tokenizer", "protocol")  # they shape a stage's model


def load_agent(
    c: ConfigDict,
    name: str,
    mesh: Mesh,
    *,
    find: Callable[[str], pathlib.Path] | None = None,
    workdir: str | os.PathLike | None = None,
    is_lazy: bool = False,
) -> GenerateFn | None:
    """Load the model that a section of a configuration names; None if it names none.

    Args:
        name: the model's role, a key of ROLES, such as "judge".
        mesh: devices to load a local model's weights over; it runs on those of this
            host.
        find: (source) -> directory of a model that is neither a stage nor an endpoint;
            by default `find_source`.
        workdir: directory of the run that "stage:<name>" refers to.
        is_lazy: whether to load the model only when it is first called, which is also
            when a missing one is detected.

    Raises:
        ValueError: there is no such model, or its context is too small for the section.
    """
    s = c.models[name]
    find = find or functools.partial(find_source, c)
    if not s.source:
        return None
    if is_lazy:
        make = functools.partial(load_agent, c, name, mesh, find=find, workdir=workdir)
        load_once = functools.cache(make)
        return lambda chats: load_once()(chats)
    if s.source.startswith(URLS):
        return _endpoint(c, name)
    if s.source.startswith(STAGE_PREFIX):
        stage = s.source.removeprefix(STAGE_PREFIX)
        model, tokenizer, params = stage_model(stage, mesh, workdir=workdir, find=find)
        _check_context(name, s, model.spec)
    else:
        source = find(s.source)
        spec = read_spec(source)
        _check_context(name, s, spec)
        model = Decoder(spec, dtype=jnp.dtype(c.model.dtype))
        tokenizer = load_tokenizer(source)
        shardings = param_shardings(param_shapes(spec), mesh)
        params = huggingface.load_params(source, spec, shardings=shardings)
    return local_generator(
        model,
        params,
        tokenizer,
        own_mesh(mesh),
        num_rows=s.max_concurrent,
        max_prompt_tokens=s.max_prompt_tokens,
        max_reply_tokens=s.max_reply_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        seed=c.seed,
        name=f"config.models.{name}",
    )


def check_endpoint(
    c: ConfigDict, name: str, probes: Sequence[tuple[Request, Sequence[str]]] = ()
) -> None:
    """Call the endpoint of a model other than the policy once, if it has one.

    Args:
        probes: further requests that the role "subject" must answer; see `probes_of`.

    Raises:
        ValueError: the endpoint refuses, see `RemoteModel.check`; quotes the beginning
            of its reply.
    """
    if not c.models[name].source.startswith(URLS):
        return
    if name == "subject":
        load_subject(c).check(probes)
    else:
        _endpoint(c, name).check()


def load_subject(c: ConfigDict, *, scorer: Scorer | None = None) -> RemoteModel:
    """Return the model that methods ask in place of the policy.

    Raises:
        ValueError: its key is missing, or would be sent without encryption.
    """
    s = c.models.subject
    settings = _endpoint_settings(c, "subject")
    return RemoteModel(s.source, s.name, scorer=scorer, **settings)


def _endpoint(c, name):
    """Return the GenerateFn for a role whose model is at an endpoint."""
    s = c.models[name]
    return remote_generator(
        s.source,
        s.name,
        max_reply_tokens=s.max_reply_tokens,
        **_endpoint_settings(c, name),
    )


def _endpoint_settings(c, name) -> dict:
    """Return the settings of a role's Endpoint."""
    s = c.models[name]
    return dict(
        api_key_env=s.api_key_env,
        key_over_http=s.key_over_http,
        temperature=s.temperature,
        top_p=s.top_p,
        timeout_seconds=s.timeout_seconds,
        max_retries=s.max_retries,
        concurrency=s.max_concurrent,
        outage_seconds=c.retrieval.outage_seconds,
        field=f"config.models.{name}.source",
    )


def recorded_agent(
    c: ConfigDict, name: str, generate: GenerateFn, folder: pathlib.Path
) -> GenerateFn:
    """Return the model; if it is a service, cache its reply to each chat of a stage."""
    if not c.models[name].source.startswith(URLS):
        return generate
    return record_replies(generate, AppendLog(folder, name))


def stage_model(
    stage: str,
    mesh: Mesh,
    *,
    workdir: str | os.PathLike | None,
    find: Callable[[str], pathlib.Path] | None = None,
):
    """Load a stage's network, tokenizer and newest parameters.

    Args:
        workdir: the run's directory, whose config.json says what the stage trained.
        find: as in `load_agent`.

    Raises:
        ValueError: there is no run, no such stage, or no checkpoint of it.
    """
    if workdir is None:
        raise ValueError(
            f"'{STAGE_PREFIX}{stage}' is a stage of a run, and no run is given"
        )
    c = _stage_config(stage, workdir)
    find = find or functools.partial(find_source, c)
    source = find(c.model.source) if c.model.source else None
    needs_world = c.tokenizer.source == WORLD
    world = make_world(seed=c.seed, **c.world) if needs_world else None
    tokenizer = load_policy_tokenizer(c, world, source)
    model = policy_model(c, tokenizer, source)
    folder = pathlib.Path(workdir) / stage / checkpoint.FOLDER
    step = checkpoint.latest(folder)
    if step is None:
        raise ValueError(f"'{STAGE_PREFIX}{stage}': {folder} holds no checkpoint")
    initial = functools.partial(initial_weights, model, source, mesh, c.seed)
    params = restored_weights(workdir, stage, step, model.spec, mesh, initial)
    return model, tokenizer, params


def _stage_config(stage, workdir):
    """Return the configuration that shapes a stage's model."""
    config = read_config(workdir)
    if stage not in config["stages"]:
        raise ValueError(
            f"'{STAGE_PREFIX}{stage}': the run in {workdir} has the stages "
            f"{', '.join(config['stages'])}"
        )
    overrides = config["overrides"].get(stage, {})
    sections = {n: {**config[n], **overrides.get(n, {})} for n in STAGE_SECTIONS}
    return ConfigDict({"seed": config["seed"], "world": config["world"], **sections})


def _check_context(name, section, spec):
    """Refuse budgets that the model's context cannot hold."""
    num_tokens = section.max_prompt_tokens + section.max_reply_tokens
    if num_tokens > spec.max_context:
        raise ValueError(
            f"config.models.{name}.max_prompt_tokens = {section.max_prompt_tokens} and "
            f"max_reply_tokens = {section.max_reply_tokens} make {num_tokens} tokens, "
            f"but the context of {section.source} is {spec.max_context}"
        )

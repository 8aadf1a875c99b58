"""The weights that stages begin with, which checkpoints of adapters do not hold.

Adapters mean nothing beside other weights than those that they were trained beside.
These are looked for in the run: what the stage before left in its last checkpoint, its
own adapters merged, or what the policy was at the start. A stage whose successor has
begun can get no more steps, so that they are what they were.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp

from rsearch.config.stage_plan import kind_of
from rsearch.models.decoder import init_params
from rsearch.models.hf import checkpoint as huggingface
from rsearch.models.hf.weights import param_shapes
from rsearch.models.lora import adapter_shapes, make_merge
from rsearch.models.sharding import laid_out, param_shardings
from rsearch.runtime import checkpoint
from rsearch.runtime.workdir import read_config

CHECKPOINTS = checkpoint.FOLDER  # in a stage's directory


def initial_weights(model, source, mesh, seed: int):
    """Weights before all stages, float32, over a mesh: of a directory, or random.

    Args:
        model: the network.
        source: a Hugging Face directory, or None.
        mesh: devices.
        seed: of random ones.
    """
    shardings = param_shardings(param_shapes(model.spec), mesh)
    if source is not None:
        return huggingface.load_params(source, model.spec, shardings=shardings)
    make = jax.jit(functools.partial(init_params, model), out_shardings=shardings)
    return make(jax.random.key(seed))


def restored(workdir, stage: str, step: int, spec, mesh, initial):
    """Plain weights of one checkpoint of a run, float32, its adapters merged.

    Args:
        workdir: of the run; its config.json tells what each stage trained.
        stage, step: whose checkpoint.
        spec: shape of the network.
        mesh: devices.
        initial: () -> the weights before all stages.

    Raises:
        ValueError: the checkpoint, or one that it stands on, is not there.
    """
    folder = pathlib.Path(workdir) / stage / CHECKPOINTS
    model = _section(read_config(workdir), stage, "model")
    shapes = param_shapes(spec)
    if model["lora_rank"]:
        own = dict(rank=model["lora_rank"], matrices=model["lora_matrices"])
        shapes = adapter_shapes(spec, **own)
    like = {"params": laid_out(shapes, mesh)}
    params = checkpoint.restore(folder, step, like, is_part=True)["params"]
    return merged_weights(workdir, stage, params, spec, mesh, initial)


def merged_weights(workdir, stage: str, params, spec, mesh, initial):
    """Plain weights of a stage's parameters: as they are, or merged if adapters.

    Args:
        workdir, stage: see `restored`.
        params: that a state of the stage holds.
        spec, mesh, initial: see `restored`.

    Raises:
        ValueError: the checkpoint that the adapters stand on is not there.
    """
    whole = read_config(workdir)
    model = _section(whole, stage, "model")
    if not model["lora_rank"]:
        return params
    before = _stage_before(whole, stage)
    if before is None:
        base = initial()
    else:
        base = restored(workdir, *before, spec, mesh, initial)
    scale = model["lora_alpha"] / model["lora_rank"]
    return make_merge(mesh, scale, jnp.float32, donates=True)(base, params)


def _stage_before(whole, stage):
    """(stage, its last step) that left the weights a stage begins with, or None."""

    def trained(name):
        own = whole["overrides"].get(name, {})
        source = _section(whole, name, "model")["source"]
        return own.get("trains", whole["trains"]), source

    earlier = whole["stages"][: whole["stages"].index(stage)]
    for name in reversed(earlier):
        kind = kind_of(name)
        if kind == "curate" or trained(name) != trained(stage):
            continue
        if steps := _section(whole, name, kind)["steps"]:
            return name, steps
    return None


def _section(whole, stage, name):
    """A section of a stage's configuration, of a run's as a plain dict."""
    return {**whole[name], **whole["overrides"].get(stage, {}).get(name, {})}
